// Activations and sums over arrays of any strides, as up to five joined axes; packed arrays are one axis. Strides are
// in elements. Where the innermost axis is packed and everything is aligned, V elements of it are one item.
#include "activation.cuh"

#define AXES 5
#define TERMS 12

// Offsets of one item in arrays with `strides`; `axes` is 1 where all arrays are packed.
struct PointwiseParams {
    const T* x;
    T* y;
    const T* dy;
    T* dx;
    int64 kind;
    double alpha;
    int64 from_output;  // the derivative comes from y
    int64 axes;
    int64 items;
    int64 shape[AXES];
    int64 x_strides[AXES];
    int64 y_strides[AXES];
    int64 dy_strides[AXES];
    int64 dx_strides[AXES];
};

struct AddParams {
    const T* xs[TERMS];
    T* y;
    int64 terms;
    double alpha;  // of the activation after the sum
    int64 axes;
    int64 items;
    int64 shape[AXES];
    int64 y_strides[AXES];
    int64 strides[TERMS][AXES];
};

struct BiasParams {
    T* y;
    const void* b;
    int64 b_float;
    int64 items;
    int64 channels;
};

template <int V> DEVICE Index offset_of(Index item, int64 axes, const int64 (&shape)[AXES], const int64* strides) {
    // Packed: no division per item.
    if (axes == 1) return item * V;
    // The innermost axis is packed and counted in vectors.
    Index at = (item % Index(shape[axes - 1])) * V;
    item /= Index(shape[axes - 1]);
    for (int axis = int(axes) - 2; axis > 0; --axis) {
        at += (item % Index(shape[axis])) * Index(strides[axis]);
        item /= Index(shape[axis]);
    }
    return at + item * Index(strides[0]);
}

// One element at a time, any innermost stride.
DEVICE Index offset_strided(Index item, int64 axes, const int64 (&shape)[AXES], const int64* strides) {
    Index at = 0;
    for (int axis = int(axes) - 1; axis > 0; --axis) {
        at += (item % Index(shape[axis])) * Index(strides[axis]);
        item /= Index(shape[axis]);
    }
    return at + item * Index(strides[0]);
}

template <int V> DEVICE Index find(Index item, int64 axes, const int64 (&shape)[AXES], const int64* strides) {
    return V == 1 ? offset_strided(item, axes, shape, strides) : offset_of<V>(item, axes, shape, strides);
}

template <int V> DEVICE void activation_forward(const PointwiseParams& p) {
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        A x[V];
        load<V>(p.x + find<V>(item, p.axes, p.shape, p.x_strides), x);
#pragma unroll
        for (int k = 0; k < V; ++k) x[k] = activated(Kind(p.kind), x[k], A(p.alpha));
        store<V>(x, p.y + find<V>(item, p.axes, p.shape, p.y_strides));
    }
}

template <int V> DEVICE void activation_backward(const PointwiseParams& p) {
    const bool by_input = !p.from_output;
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        A from[V], dy[V];
        if (by_input) load<V>(p.x + find<V>(item, p.axes, p.shape, p.x_strides), from);
        else load<V>(p.y + find<V>(item, p.axes, p.shape, p.y_strides), from);
        load<V>(p.dy + find<V>(item, p.axes, p.shape, p.dy_strides), dy);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            dy[k] = chained(Kind(p.kind), slope(Kind(p.kind), from[k], A(p.alpha)), dy[k]);
        }
        store<V>(dy, p.dx + find<V>(item, p.axes, p.shape, p.dx_strides));
    }
}

template <int V> DEVICE void add(const AddParams& p) {
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        A sum[V];
        load<V>(p.xs[0] + find<V>(item, p.axes, p.shape, p.strides[0]), sum);
        for (int term = 1; term < int(p.terms); ++term) {
            A x[V];
            load<V>(p.xs[term] + find<V>(item, p.axes, p.shape, p.strides[term]), x);
#pragma unroll
            for (int k = 0; k < V; ++k) sum[k] += x[k];
        }
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] = fused(sum[k], A(p.alpha));
        store<V>(sum, p.y + find<V>(item, p.axes, p.shape, p.y_strides));
    }
}

template <int V> DEVICE void bias(const BiasParams& p) {
    const Index lanes = Index(p.channels) / V;
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        const Index channel = (item % lanes) * V;
        A y[V];
        load<V>(p.y + item * V, y);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            y[k] += parameter(p.b, p.b_float, channel + k);
        }
        store<V>(y, p.y + item * V);
    }
}

KERNEL(activation_forward_1, PointwiseParams) { activation_forward<1>(p); }
KERNEL(activation_forward_v, PointwiseParams) { activation_forward<VECTOR>(p); }
KERNEL(activation_backward_1, PointwiseParams) { activation_backward<1>(p); }
KERNEL(activation_backward_v, PointwiseParams) { activation_backward<VECTOR>(p); }
KERNEL(add_1, AddParams) { add<1>(p); }
KERNEL(add_v, AddParams) { add<VECTOR>(p); }
KERNEL(bias_1, BiasParams) { bias<1>(p); }
KERNEL(bias_v, BiasParams) { bias<VECTOR>(p); }
