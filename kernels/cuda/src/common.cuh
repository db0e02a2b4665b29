// What every kernel needs: element types, vectors of them, loops over a grid, sums over a block.
//
// No header of the toolkit is included: NVRTC alone compiles these sources, and so does an ordinary C++ compiler with
// the header that HOST_SHIM names, with which the tests run them on a CPU.
//
// A kernel takes one struct by value, all of whose members are 8 bytes long (pointers, int64, uint64, double and arrays
// of them): the launchers read its layout from this text (kernels/cuda/sources.py).
//
// SCALAR is the element type, INDEX an integer that holds every element's offset. Arithmetic is done in float for
// all types but double; what is summed over many elements ends in double.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char uint8;

struct Half {
    uint16 bits;
};
struct Bfloat16 {
    uint16 bits;
};

#ifdef HOST_SHIM
#include HOST_SHIM
#else
// `p` stays in the constant bank even where its arrays are indexed by a variable.
#define KERNEL(name, Params) \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params p)
// A kernel whose threads meet at barriers; the shim runs the others without fibers.
#define BLOCK_KERNEL(name, Params) KERNEL(name, Params)
// A kernel of which two blocks fit on a multiprocessor: while the threads of one block wait or compute, those of the
// other read.
#define SHARING_KERNEL(name, Params) \
    extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Params p)
#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// A number that other blocks have written: not from the cache of this multiprocessor, which may have an older one.
DEVICE double from_l2(const double* p) { return __ldcg(p); }

// A sum that the compiler does not fuse with a product.
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }

DEVICE float widen(Half h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
    return f;
}
// A bfloat16 is the upper half of a float.
DEVICE float widen(Bfloat16 b) { return __uint_as_float(uint32(b.bits) << 16); }
DEVICE void narrow(float f, Half& h) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f)); }
DEVICE void narrow(float f, Bfloat16& b) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(f));
#else
    const uint32 u = __float_as_uint(f);
    // To the nearest, ties to even, by integers: cards before 8.0 have no instruction for it.
    b.bits = f != f ? 0x7fff : uint16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
}
#endif

DEVICE float widen(float f) { return f; }
DEVICE double widen(double d) { return d; }
DEVICE void narrow(float f, float& out) { out = f; }
DEVICE void narrow(float f, double& out) { out = f; }
DEVICE void narrow(double d, float& out) { out = float(d); }
DEVICE void narrow(double d, double& out) { out = d; }
DEVICE void narrow(double d, Half& out) { narrow(float(d), out); }
DEVICE void narrow(double d, Bfloat16& out) { narrow(float(d), out); }

template <class Element> struct Arithmetic {
    typedef float type;
};
// In all other types a sum or product is formed in float, and rounded where it is stored.
template <> struct Arithmetic<double> {
    typedef double type;
};

typedef SCALAR T;
typedef Arithmetic<T>::type A;
typedef INDEX Index;

// Elements of one 16-byte access.
#define VECTOR (16 / int(sizeof(T)))

template <class Element, int N> struct alignas(sizeof(Element) * N) Vec {
    Element v[N];
};

// One access; 16-bit elements are widened where they are used, and take half the registers until then.
template <int V> DEVICE Vec<T, V> loaded_from(const T* from) { return *reinterpret_cast<const Vec<T, V>*>(from); }

template <int V> DEVICE void load(const T* from, A (&to)[V]) {
    const Vec<T, V> loaded = loaded_from<V>(from);
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = widen(loaded.v[k]);
}

template <int V> DEVICE void store(const A (&from)[V], T* to) {
    Vec<T, V> stored;
#pragma unroll
    for (int k = 0; k < V; ++k) narrow(from[k], stored.v[k]);
    // One access; the launchers choose V > 1 only where all addresses are multiples of it.
    *reinterpret_cast<Vec<T, V>*>(to) = stored;
}

DEVICE Index first_item() { return Index(blockIdx.x) * Index(blockDim.x) + Index(threadIdx.x); }
DEVICE Index item_step() { return Index(gridDim.x) * Index(blockDim.x); }

// NaN stays NaN, as in NumPy; fmax would drop it.
DEVICE A rectify(A a) { return a < A(0) ? A(0) : a; }

template <class Number> DEVICE Number smaller(Number a, Number b) { return a < b ? a : b; }
// NaN stays what it is.
template <class Number> DEVICE Number not_negative(Number a) { return a < 0 ? Number(0) : a; }
template <class Number> DEVICE Number larger(Number a, Number b) { return a > b ? a : b; }

// A per-channel vector of the dtype of the data or of float.
DEVICE A parameter(const void* p, int64 is_float, Index i) {
    return is_float ? A(static_cast<const float*>(p)[i]) : A(widen(static_cast<const T*>(p)[i]));
}
DEVICE void set_parameter(double value, void* p, int64 is_float, Index i) {
    if (is_float) static_cast<float*>(p)[i] = float(value);
    else narrow(value, static_cast<T*>(p)[i]);
}

// The sum of `value` over the 256 threads of a block, in an order that never changes. All threads must come here, and
// get the same sum.
DEVICE double block_sum(double value) {
    __shared__ double sums[256];
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    // Threads may still read the result of a call before this one.
    __syncthreads();
    sums[thread] = value;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (thread < half) sums[thread] += sums[thread + half];
        __syncthreads();
    }
    return sums[0];
}

// A number of any dtype that targets may have; the codes are those of kernels/cuda/sources.py.
DEVICE double number_at(const void* p, int64 code, Index i) {
    switch (int(code)) {
        case 0: return double(static_cast<const float*>(p)[i]);
        case 1: return static_cast<const double*>(p)[i];
        case 2: return double(widen(static_cast<const Half*>(p)[i]));
        case 3: return double(widen(static_cast<const Bfloat16*>(p)[i]));
        case 4: return double(static_cast<const signed char*>(p)[i]);
        case 5: return double(static_cast<const uint8*>(p)[i]);
        case 6: return double(static_cast<const short*>(p)[i]);
        case 7: return double(static_cast<const uint16*>(p)[i]);
        case 8: return double(static_cast<const int*>(p)[i]);
        case 9: return double(static_cast<const uint32*>(p)[i]);
        case 10: return double(static_cast<const int64*>(p)[i]);
        default: return double(static_cast<const uint64*>(p)[i]);
    }
}
