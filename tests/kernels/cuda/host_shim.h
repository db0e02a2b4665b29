// What CUDA C++ has and C++ has not, so that g++ compiles the kernels and a test runs them on a CPU.
//
// The threads of a block run one after the other. Where they meet at barriers each is a fiber that is left at the
// barrier until all others have come there too; a block in which some threads end while others wait is an error, as it
// would hang or be undefined on a device. Threads and blocks run forward or backward: a kernel that forgot a barrier,
// or whose blocks depend on each other, then gives two results.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#define DEVICE inline
#define __shared__ static
#define KERNEL(name, Params) HOST_KERNEL(name, Params, false)
#define BLOCK_KERNEL(name, Params) HOST_KERNEL(name, Params, true)
#define SHARING_KERNEL(name, Params) BLOCK_KERNEL(name, Params)
#define HOST_KERNEL(name, Params, meets)                                                                    \
    static void name##_thread(const Params& p);                                                             \
    extern "C" __attribute__((visibility("default"))) int name(const void* p, const unsigned* g, const unsigned* b) { \
        return run_grid([](const void* q) { name##_thread(*static_cast<const Params*>(q)); }, p, g, b, meets); \
    }                                                                                                       \
    static void name##_thread(const Params& p)

struct Extent {
    unsigned x, y, z;
};

static Extent threadIdx, blockIdx, blockDim, gridDim;

enum { MOST_THREADS = 1024, STACK = 1 << 16 };
enum { FINE = 0, THREADS_PARTED = 1, BARRIER_OUTSIDE_BLOCK_KERNEL = 2 };

static int backward_order = 0;
extern "C" __attribute__((visibility("default"))) void set_order(int backward) { backward_order = backward; }

static bool fibers_run = false;
static int fault = FINE, running;
static bool ended[MOST_THREADS];
// Fibers are begun once and kept; they are left by longjmp, which unlike swapcontext asks nothing of the system.
static int begun = 0;
static jmp_buf scheduler, resume[MOST_THREADS];
static ucontext_t starts[MOST_THREADS];
static void (*thread_body)(const void*);
static const void* thread_argument;

static void leave_fiber() {
    if (!_setjmp(resume[running])) _longjmp(scheduler, 1);
}

static void enter_fiber() {
    for (;;) {
        thread_body(thread_argument);
        ended[running] = true;
        leave_fiber();
    }
}

static void make_fibers(int count) {
    for (; begun < count; ++begun) {
        ucontext_t& fiber = starts[begun];
        getcontext(&fiber);
        fiber.uc_stack.ss_sp = malloc(STACK);
        fiber.uc_stack.ss_size = STACK;
        fiber.uc_link = nullptr;
        makecontext(&fiber, enter_fiber, 0);
        // A first run up to where the fiber would be left, so that all are resumed alike.
        running = begun;
        void (*body)(const void*) = thread_body;
        thread_body = [](const void*) {};
        if (!_setjmp(scheduler)) setcontext(&fiber);
        thread_body = body;
    }
}

static void __syncthreads() {
    if (fibers_run) leave_fiber();
    else fault = BARRIER_OUTSIDE_BLOCK_KERNEL;
}

static void __threadfence() {}

static Extent place_of(int index, const Extent& extent) {
    const unsigned i = unsigned(index);
    return {i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y};
}

static int turn(int step, int count) { return backward_order ? count - 1 - step : step; }

static void run_fibers(int count) {
    make_fibers(count);
    for (int i = 0; i < count; ++i) ended[i] = false;
    for (int left = count; left > 0;) {
        int done = 0;
        for (int step = 0; step < count; ++step) {
            running = turn(step, count);
            threadIdx = place_of(running, blockDim);
            if (!_setjmp(scheduler)) _longjmp(resume[running], 1);
            done += ended[running];
        }
        // All at the next barrier, or all at the end.
        if (done != 0 && done != count) {
            fault = THREADS_PARTED;
            return;
        }
        left = count - done;
    }
}

// Numbers below the smallest normal one are zero, as CuPy has its modules compiled (here those of double too).
struct Flushing {
#ifdef __SSE2__
    const unsigned before = _mm_getcsr();
    Flushing() { _mm_setcsr(before | 0x8040); }
    ~Flushing() { _mm_setcsr(before); }
#endif
};

static int run_grid(void (*body)(const void*), const void* argument, const unsigned* g, const unsigned* b, bool meets) {
    gridDim = {g[0], g[1], g[2]};
    blockDim = {b[0], b[1], b[2]};
    thread_body = body;
    thread_argument = argument;
    fault = FINE;
    fibers_run = meets;
    const int threads = int(b[0] * b[1] * b[2]), blocks = int(g[0] * g[1] * g[2]);
    const Flushing flushing;
    for (int block = 0; block < blocks && fault == FINE; ++block) {
        blockIdx = place_of(turn(block, blocks), gridDim);
        if (meets) {
            run_fibers(threads);
            continue;
        }
        for (int step = 0; step < threads; ++step) {
            threadIdx = place_of(turn(step, threads), blockDim);
            body(argument);
        }
    }
    return fault;
}

static inline uint64 atomicAdd(uint64* at, uint64 value) {
    const uint64 old = *at;
    *at = old + value;
    return old;
}

static inline uint32 bits_of(float f) {
    uint32 u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float float_of(uint32 u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// exp(x * x) * erfc(x), as CUDA has it; x86's long double has the digits and the exponents.
static inline double erfcx(double x) {
    if (x > 1e2) return 0.56418958354775628695 / x;
    return double(expl((long double)x * x) * erfcl((long double)x));
}

static inline double from_l2(const double* p) { return *p; }

// Behind a barrier for the optimizer: what it holds is rounded.
static inline float plus(float a, float b) {
    volatile float sum = a + b;
    return sum;
}
static inline double plus(double a, double b) {
    volatile double sum = a + b;
    return sum;
}

static inline float erfcx(float x) { return float(erfcx(double(x))); }

// IEEE 754 binary16, rounded to nearest even.
DEVICE float widen(Half h) {
    const uint32 sign = uint32(h.bits & 0x8000) << 16, exponent = h.bits >> 10 & 0x1f, mantissa = h.bits & 0x3ff;
    if (exponent == 0x1f) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = float(mantissa) * 0x1p-24f;
    return sign ? -small : small;
}

DEVICE void narrow(float f, Half& h) {
    const uint32 u = bits_of(f), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    uint32 found;
    if (size > 0x7f800000) found = 0x7fff;
    else if (size >= 0x477ff000) found = 0x7c00;
    else if (size < 0x38800000) found = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    else found = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    h.bits = uint16(sign | found);
}

DEVICE float widen(Bfloat16 b) { return float_of(uint32(b.bits) << 16); }

DEVICE void narrow(float f, Bfloat16& b) {
    const uint32 u = bits_of(f);
    b.bits = f != f ? uint16(0x7fff) : uint16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
