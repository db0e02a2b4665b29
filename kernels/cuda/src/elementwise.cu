// Activations and sums over arrays of any strides, as up to five joined axes; packed arrays are one axis. Strides are
// in elements. Where the innermost axis is packed and everything is aligned, V elements of it are one item.
#include "common.cuh"

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
    int64 relu;
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
    int64 relu;
    int64 items;
    int64 channels;
};

template <int V> DEVICE Index offset_of(Index item, int64 axes, const int64 (&shape)[AXES], const int64* strides) {
    if (axes == 1) return item * V;
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

// min(max(x / 6 + 1/2, 0), 1), and NaN of NaN.
DEVICE A hard_sigmoid(A x) {
    const A h = x * A(1.0 / 6) + A(0.5);
    return h < A(0) ? A(0) : h > A(1) ? A(1) : h;
}

// log(1 + exp(x)) without overflow, and NaN of NaN.
DEVICE A softplus(A x) { return rectify(x) + log1p(exp(x > A(0) ? -x : x)); }

// Kinds: 0 relu, 1 leaky_relu, 2 sigmoid, 3 tanh, 4 gelu, 5 silu, 6 elu, 7 hard_sigmoid, 8 hard_swish, 9 softplus,
// 10 mish, 11 gelu_tanh.
DEVICE A activated(int64 kind, A x, A alpha) {
    switch (int(kind)) {
        case 0: return rectify(x);
        case 1: return x > A(0) ? x : alpha * x;
        case 2: return A(0.5) + A(0.5) * tanh(A(0.5) * x);
        case 3: return tanh(x);
        case 5: return x * (A(0.5) + A(0.5) * tanh(A(0.5) * x));
        case 6: return x > A(0) ? x : alpha * expm1(x);
        case 7: return hard_sigmoid(x);
        case 8: return x * hard_sigmoid(x);
        case 9: return softplus(x);
        case 10: return x * tanh(softplus(x));
        case 11: return x * (A(0.5) + A(0.5) * tanh(A(0.79788456080286535588) * x * (A(1) + A(0.044715) * x * x)));
        default: return x * (A(0.5) * erfc(-x * A(0.70710678118654752440)));
    }
}

// x and y are both what it is formed from: the input for kinds 4, 5 and from 8 on (and a leaky ReLU that turns the
// sign), else the output.
DEVICE A slope(int64 kind, A x, A y, A alpha) {
    switch (int(kind)) {
        case 0: return y > A(0) ? A(1) : A(0);
        case 1: return x > A(0) ? A(1) : alpha;
        case 2: return y * (A(1) - y);
        case 3: return A(1) - y * y;
        case 5: {
            const A s = A(0.5) + A(0.5) * tanh(A(0.5) * x);
            return s * (A(1) + x * (A(1) - s));
        }
        case 6: return y > A(0) ? A(1) : y + alpha;
        case 7: return y > A(0) && y < A(1) ? A(1.0 / 6) : A(0);
        case 8: {
            const A h = hard_sigmoid(x);
            return h > A(0) && h < A(1) ? h + x * A(1.0 / 6) : h;
        }
        case 9: return A(0.5) + A(0.5) * tanh(A(0.5) * x);
        case 10: {
            const A t = tanh(softplus(x)), s = A(0.5) + A(0.5) * tanh(A(0.5) * x);
            return t + x * s * (A(1) - t * t);
        }
        case 11: {
            const A square = A(0.044715) * x * x, t = tanh(A(0.79788456080286535588) * x * (A(1) + square));
            const A inner = A(0.79788456080286535588) * (A(1) + A(3) * square);
            return A(0.5) * (A(1) + t) * (A(1) + x * (A(1) - t) * inner);
        }
        default: {
            const A density = A(0.39894228040143267794) * exp(A(-0.5) * x * x);
            return A(0.5) * erfc(-x * A(0.70710678118654752440)) + x * density;
        }
    }
}

template <int V> DEVICE void activation_forward(const PointwiseParams& p) {
    for (Index item = first_item(); item < Index(p.items); item += item_step()) {
        A x[V];
        load<V>(p.x + find<V>(item, p.axes, p.shape, p.x_strides), x);
#pragma unroll
        for (int k = 0; k < V; ++k) x[k] = activated(p.kind, x[k], A(p.alpha));
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
        for (int k = 0; k < V; ++k) dy[k] *= slope(p.kind, from[k], from[k], A(p.alpha));
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
        for (int k = 0; k < V; ++k) sum[k] = p.relu ? rectify(sum[k]) : sum[k];
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
