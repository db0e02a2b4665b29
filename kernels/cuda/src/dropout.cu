// Dropout by a hash of the global index: the same bits as layers/dropout.py, on any decomposition. Backward draws the
// mask again from the same state, which costs less than to store and load it.
#include "counters.cuh"

#define AXES 5

struct DropoutParams {
    const T* x;
    T* y;
    const uint64* state;  // [seed, step, first sample], on the device
    uint64 salt;
    uint64 threshold;
    uint64 base;         // GOLDEN * global index of the first element, modulo 2^64
    uint64 sample;       // GOLDEN * elements of a sample, modulo 2^64
    uint64 steps[AXES];  // GOLDEN * global stride of each axis, modulo 2^64
    int64 shape[AXES];   // of the block; the last axis in vectors
    int64 axes;
    int64 items;
    double scale;
};

template <int V> DEVICE void dropout(const DropoutParams& p) {
    const uint64 key = key_of(p.state, p.salt);
    const A scale = A(p.scale);
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        uint64 counter = key + p.base + p.state[2] * p.sample;
        Index rest = item;
        for (int axis = int(p.axes) - 1; axis > 0; --axis) {
            counter += uint64(rest % Index(p.shape[axis])) * p.steps[axis];
            rest /= Index(p.shape[axis]);
        }
        counter += uint64(rest) * p.steps[0];
        A x[V];
        load<V>(p.x + item * V, x);
#pragma unroll
        // Set, not multiplied by zero: an infinite element that is dropped must not become NaN.
        for (int k = 0; k < V; ++k) x[k] = mix(counter + uint64(k) * GOLDEN) < p.threshold ? A(0) : x[k] * scale;
        store<V>(x, p.y + item * V);
    }
}

KERNEL(dropout_1, DropoutParams) { dropout<1>(p); }
KERNEL(dropout_v, DropoutParams) { dropout<VECTOR>(p); }
