// Conversion of packed arrays from SCALAR to SECOND, times a number that lies on the device.
#include "common.cuh"

typedef SECOND S;

struct CastParams {
    const T* source;
    S* target;
    const double* scale;  // or none
    int64 count;
};

// Four at a time where both arrays are aligned to it.
template <int V> DEVICE void cast(const CastParams& p) {
    const A scale = p.scale ? A(*p.scale) : A(1);
    for (Index item = first_item(); item < Index(p.count) / V; item += item_step()) {
        A values[V];
        load<V>(p.source + item * V, values);
        Vec<S, V> stored;
#pragma unroll
        for (int k = 0; k < V; ++k) narrow(p.scale ? values[k] * scale : values[k], stored.v[k]);
        *reinterpret_cast<Vec<S, V>*>(p.target + item * V) = stored;
    }
}

KERNEL(cast_1, CastParams) { cast<1>(p); }
KERNEL(cast_4, CastParams) { cast<4>(p); }
