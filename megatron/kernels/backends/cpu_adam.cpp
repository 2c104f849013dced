// AdamW (Loshchilov and Hutter, arXiv 1711.05101) in one pass over memory: the gradient is read in its own format, the
// moments and the fp32 parameter are updated, and the parameter is written a second time, rounded to the model's format.
//
// Called with addresses (cpu_adam.py has them from tensors), so that building needs Python's headers and no others.
//
// Every element goes through the same IEEE operations, in the order of torch's fused CPU kernel, whatever the instruction
// set and wherever it lies in its vector: one fused multiply-add where `__builtin_fmaf` stands, and, because setup.py
// forbids the compiler to contract any other, single operations elsewhere. So results do not depend on the machine, on
// the number of threads, or on how a tensor is cut.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace {

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct Nothing {};  // no second copy of the parameter is wanted

// What is one number for the whole step. Rounded to fp32 from Python's doubles.
struct Coefficients {
    float divisor;     // of the gradient
    float decay;       // 1 - lr * weight_decay
    float weight;      // of the gradient in exp_avg: 1 - beta1
    float beta2;
    float weight_sq;   // 1 - beta2
    float correction;  // sqrt(1 - beta2^step)
    float eps;
    float rate;        // -lr / (1 - beta1^step)
};

inline __attribute__((always_inline)) uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline __attribute__((always_inline)) float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline __attribute__((always_inline)) float widen(float x) { return x; }
inline __attribute__((always_inline)) float widen(Bf16 x) { return float_of(uint32_t{x.bits} << 16); }

// Rounding to nearest, ties to even. Written without branches, so that compilers vectorise it.
inline __attribute__((always_inline)) void narrow(float, Nothing*) {}
inline __attribute__((always_inline)) void narrow(float x, float* out) { *out = x; }

inline __attribute__((always_inline)) void narrow(float x, Bf16* out) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
    out->bits = static_cast<uint16_t>((x == x ? rounded : 0x7FC00000u) >> 16);
}

inline __attribute__((always_inline)) void narrow(float x, Fp16* out) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    // Normal in fp16: the exponent's bias goes from 127 to 15. Too large ones carry into infinity's exponent.
    uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    // Below 2^-14: adding 0.5 lets the fp32 adder round at 2^-24, the last bit of such numbers.
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    out->bits = static_cast<uint16_t>(sign | (magnitude < (143u << 23) ? finite : special));
}

// Divided: whether the gradient is divided at all. A choice inside the loop would be a division and a blend.
template <bool Divided, class Grad, class Out>
inline __attribute__((always_inline)) void update(
    const Coefficients& c, const Grad* __restrict__ grad, float* __restrict__ param, float* __restrict__ exp_avg,
    float* __restrict__ exp_avg_sq, Out* __restrict__ out, size_t begin, size_t end) {
    // The form of exp_avg + weight * (g - exp_avg) that is exact at both ends, as torch's lerp.
    const bool near = c.weight < 0.5f;
    const float lerp = near ? c.weight : c.weight - 1.0f;
    for (size_t i = begin; i < end; ++i) {
        float g = widen(grad[i]), m = exp_avg[i];
        if (Divided) g = g / c.divisor;
        m = __builtin_fmaf(lerp, g - m, near ? m : g);
        float v = __builtin_fmaf(c.weight_sq * g, g, exp_avg_sq[i] * c.beta2);
        float p = param[i] * c.decay + c.rate * m / (std::sqrt(v) / c.correction + c.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p;
        narrow(p, out + i);
    }
}

// The same loop once for each instruction set; which of them this CPU has is asked at run time.
#define COMPILED_FOR(NAME, ATTRIBUTES)                                                                             \
    template <class Grad, class Out>                                                                               \
    ATTRIBUTES void NAME(const Coefficients& c, const void* grad, float* param, float* exp_avg, float* exp_avg_sq, \
                         void* out, size_t begin, size_t end) {                                                    \
        const Grad* g = static_cast<const Grad*>(grad);                                                            \
        Out* o = static_cast<Out*>(out);                                                                           \
        if (c.divisor == 1.0f) {                                                                                   \
            update<false>(c, g, param, exp_avg, exp_avg_sq, o, begin, end);                                        \
        } else {                                                                                                   \
            update<true>(c, g, param, exp_avg, exp_avg_sq, o, begin, end);                                         \
        }                                                                                                          \
    }

#if defined(__x86_64__)
COMPILED_FOR(update_avx2, __attribute__((target("avx2,fma"))))
COMPILED_FOR(update_avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#elif defined(__aarch64__)
COMPILED_FOR(update_neon, )
#else
#error "no fused multiply-add is known here; torch's own kernels are used instead"
#endif

using Update = void (*)(const Coefficients&, const void*, float*, float*, float*, void*, size_t, size_t);

template <class Grad, class Out>
Update for_this_cpu() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return update_avx512<Grad, Out>;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? update_avx2<Grad, Out> : nullptr;
#else
    return update_neon<Grad, Out>;
#endif
}

template <class Grad>
Update for_output(const char* out) {
    if (std::strcmp(out, "none") == 0) return for_this_cpu<Grad, Nothing>();
    if (std::strcmp(out, "float32") == 0) return for_this_cpu<Grad, float>();
    if (std::strcmp(out, "bfloat16") == 0) return for_this_cpu<Grad, Bf16>();
    if (std::strcmp(out, "float16") == 0) return for_this_cpu<Grad, Fp16>();
    return nullptr;
}

Update find_update(const char* grad, const char* out) {
    if (std::strcmp(grad, "float32") == 0) return for_output<float>(out);
    if (std::strcmp(grad, "bfloat16") == 0) return for_output<Bf16>(out);
    return nullptr;
}

// Gives each thread a piece of [0, size). Threads are started for the call: it takes some 20 us each, against milliseconds
// of work, and leaves no second pool beside torch's, whose threads would wait in a spin for the next call.
template <class Work>
void in_parallel(size_t size, size_t threads, const Work& work) {
    const size_t unit = 64, least = size_t{1} << 16;  // elements: whole cache lines of every format; worth a thread
    threads = std::max<size_t>(1, std::min(threads, size / least));
    const size_t piece = size / threads / unit * unit;
    std::vector<std::thread> others;
    size_t begin = 0;
    try {
        others.reserve(threads);
        for (; others.size() + 1 < threads; begin += piece) others.emplace_back(work, begin, begin + piece);
    } catch (const std::exception&) {
        // No thread or memory to be had: what was not handed out is done here.
    }
    work(begin, size);
    for (std::thread& other : others) other.join();
}

template <class T>
T* pointer(unsigned long long address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

PyObject* step(PyObject*, PyObject* args) {
    const char *grad_format, *out_format;
    unsigned long long grad, param, exp_avg, exp_avg_sq, out;
    Py_ssize_t size, threads;
    Coefficients c;
    if (!PyArg_ParseTuple(args, "ssKKKKKnnffffffff", &grad_format, &out_format, &grad, &param, &exp_avg, &exp_avg_sq, &out,
                          &size, &threads, &c.divisor, &c.decay, &c.weight, &c.beta2, &c.weight_sq, &c.correction, &c.eps,
                          &c.rate)) {
        return nullptr;
    }
    const Update kernel = find_update(grad_format, out_format);
    if (kernel == nullptr || size < 0 || threads < 1) {
        return PyErr_Format(PyExc_ValueError, "no kernel for gradient %s, output %s, size %zd, threads %zd", grad_format,
                            out_format, size, threads);
    }
    Py_BEGIN_ALLOW_THREADS;
    in_parallel(static_cast<size_t>(size), static_cast<size_t>(threads), [=](size_t begin, size_t end) {
        kernel(c, pointer<void>(grad), pointer<float>(param), pointer<float>(exp_avg), pointer<float>(exp_avg_sq),
               pointer<void>(out), begin, end);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* runs_here(PyObject*, PyObject*) { return PyBool_FromLong(for_this_cpu<float, Nothing>() != nullptr); }

PyMethodDef methods[] = {
    {"step", step, METH_VARARGS, "One AdamW step on memory given by addresses; see cpu_adam.py."},
    {"runs_here", runs_here, METH_NOARGS, "Whether this CPU has one of the instruction sets compiled for."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu_adam", "AdamW in one pass over host memory.", -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu_adam() { return PyModule_Create(&module); }
