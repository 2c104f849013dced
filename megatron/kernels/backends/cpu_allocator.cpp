// Counts the bytes that torch's CPU tensors take: an allocator in front of torch's own one. Called through ctypes.
//
// Every tensor is seen, whichever thread makes or frees it, and so are the temporaries that torch's kernels take from the
// allocator. A block carries its size before its data, so a deleter needs no table and no lock.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstddef>

namespace {

constexpr size_t kHead = 64;  // bytes before the data: keeps torch's alignment

std::atomic<long long> allocated{0};
std::atomic<long long> peak{0};

void release(void* data) {
    if (data == nullptr) return;
    char* block = static_cast<char*>(data) - kHead;
    allocated -= static_cast<long long>(*reinterpret_cast<size_t*>(block));
    c10::free_cpu(block);
}

struct Counting final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        const c10::Device cpu(c10::DeviceType::CPU);
        if (size == 0) return {nullptr, nullptr, &release, cpu};
        char* block = static_cast<char*>(c10::alloc_cpu(size + kHead));
        *reinterpret_cast<size_t*>(block) = size;
        const long long now = allocated += static_cast<long long>(size);
        long long most = peak.load();
        while (now > most && !peak.compare_exchange_weak(most, now)) {
        }
        return {block + kHead, block + kHead, &release, cpu};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

Counting counting;

}  // namespace

extern "C" void install() {
    c10::SetCPUAllocator(&counting, 100);  // above the priority of torch's own
}
extern "C" long long allocated_bytes() { return allocated; }
extern "C" long long peak_bytes() { return peak; }
extern "C" void reset_peak() { peak = allocated.load(); }
