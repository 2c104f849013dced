// What the memory gives: the streams of an optimizer step, read and written in place as a step does, with one addition each.
// Built by cpu_adam.py for the machine it runs on. Tensors are given as an array of addresses.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class Work>
void in_parallel(size_t size, size_t threads, const Work& work) {
    std::vector<std::thread> others;
    const size_t piece = size / threads / 64 * 64;
    for (size_t k = 1; k < threads; ++k) others.emplace_back(work, (k - 1) * piece, k * piece);
    work((threads - 1) * piece, size);
    for (std::thread& other : others) other.join();
}

void add(const float* __restrict__ g, float* __restrict__ p, float* __restrict__ m, float* __restrict__ v, size_t begin,
         size_t end) {
    for (size_t i = begin; i < end; ++i) {
        p[i] += g[i];
        m[i] += g[i];
        v[i] += g[i];
    }
}

void add_mixed(const uint16_t* __restrict__ g, float* __restrict__ p, float* __restrict__ m, float* __restrict__ v,
               uint16_t* __restrict__ out, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        uint32_t bits = uint32_t{g[i]} << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        x += p[i];
        p[i] = x;
        m[i] += x;
        v[i] += x;
        std::memcpy(&bits, &x, sizeof x);
        out[i] = static_cast<uint16_t>(bits >> 16);
    }
}

template <class T>
T* at(void* const* addresses, size_t index) {
    return static_cast<T*>(addresses[index]);
}

}  // namespace

extern "C" {

// gradient in; parameter and two moments in and out: 28 bytes an element
void stream_fp32(void* const* t, size_t size, size_t threads) {
    in_parallel(size, threads, [=](size_t begin, size_t end) {
        add(at<float>(t, 0), at<float>(t, 1), at<float>(t, 2), at<float>(t, 3), begin, end);
    });
}

// the same with a gradient of 2 bytes, and the parameter's upper half written: 28 bytes an element
void stream_mixed(void* const* t, size_t size, size_t threads) {
    in_parallel(size, threads, [=](size_t begin, size_t end) {
        add_mixed(at<uint16_t>(t, 0), at<float>(t, 1), at<float>(t, 2), at<float>(t, 3), at<uint16_t>(t, 4), begin, end);
    });
}

// McCalpin's STREAM triad: two tensors in, one out: 12 bytes an element
void triad(void* const* t, size_t size, size_t threads) {
    in_parallel(size, threads, [=](size_t begin, size_t end) {
        const float *a = at<float>(t, 0), *b = at<float>(t, 1);
        float* __restrict__ c = at<float>(t, 2);
        for (size_t i = begin; i < end; ++i) c[i] = a[i] + 3.0f * b[i];
    });
}
}
