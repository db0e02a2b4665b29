// Interpolation with tables per axis: output o reads the inputs first[o] + t with weights[o][t], t below taps.
// Backward, input i gathers from the outputs [readers[i][0], readers[i][1]), which are neighbors of each other.
#include "common.cuh"

struct ResizeParams {
    const T* x;
    T* y;
    const T* dy;
    T* dx;
    int64 samples;
    int64 channels;
    int64 in[3];
    int64 out[3];
    int64 taps[3];
    const int* first[3];
    const double* weights[3];
    const int* readers[3];
};

struct Place {
    Index sample, at[3], channel;
};

template <int V> DEVICE Place place(Index item, const int64 (&extent)[3], Index channels) {
    Place found;
    found.channel = (item % (channels / V)) * V;
    item /= channels / V;
    for (int axis = 2; axis >= 0; --axis) {
        found.at[axis] = item % Index(extent[axis]);
        item /= Index(extent[axis]);
    }
    found.sample = item;
    return found;
}

DEVICE Index offset(const Place& at, const int64 (&extent)[3], Index a, Index b, Index c, Index channels) {
    return (((at.sample * Index(extent[0]) + a) * Index(extent[1]) + b) * Index(extent[2]) + c) * channels + at.channel;
}

template <int V> DEVICE void forward(const ResizeParams& p) {
    const Index channels = Index(p.channels);
    const Index total = Index(p.samples * p.out[0] * p.out[1] * p.out[2]) * (channels / V);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Place o = place<V>(item, p.out, channels);
        Index first[3];
        const double* weight[3];
        for (int axis = 0; axis < 3; ++axis) {
            first[axis] = Index(p.first[axis][o.at[axis]]);
            weight[axis] = p.weights[axis] + p.taps[axis] * o.at[axis];
        }
        A sum[V] = {};
        for (Index a = 0; a < Index(p.taps[0]); ++a) {
            for (Index b = 0; b < Index(p.taps[1]); ++b) {
                const A outer = A(weight[0][a]) * A(weight[1][b]);
                for (Index c = 0; c < Index(p.taps[2]); ++c) {
                    const A factor = outer * A(weight[2][c]);
                    // An input with a weight of 0 may lie beyond the end of the array.
                    if (factor == A(0)) continue;
                    A x[V];
                    load<V>(p.x + offset(o, p.in, first[0] + a, first[1] + b, first[2] + c, channels), x);
#pragma unroll
                    for (int k = 0; k < V; ++k) sum[k] += x[k] * factor;
                }
            }
        }
        store<V>(sum, p.y + item * V);
    }
}

// Weight with which output o reads input i.
DEVICE A weight_of(const ResizeParams& p, int axis, Index o, Index i) {
    const Index tap = i - Index(p.first[axis][o]);
    const Index taps = Index(p.taps[axis]);
    return tap >= 0 && tap < taps ? A(p.weights[axis][taps * o + tap]) : A(0);
}

template <int V> DEVICE void backward(const ResizeParams& p) {
    const Index channels = Index(p.channels);
    const Index total = Index(p.samples * p.in[0] * p.in[1] * p.in[2]) * (channels / V);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Place x = place<V>(item, p.in, channels);
        Index start[3], stop[3];
        for (int axis = 0; axis < 3; ++axis) {
            start[axis] = Index(p.readers[axis][2 * x.at[axis]]);
            stop[axis] = Index(p.readers[axis][2 * x.at[axis] + 1]);
        }
        A sum[V] = {};
        for (Index a = start[0]; a < stop[0]; ++a) {
            const A outer = weight_of(p, 0, a, x.at[0]);
            for (Index b = start[1]; b < stop[1]; ++b) {
                const A middle = outer * weight_of(p, 1, b, x.at[1]);
                for (Index c = start[2]; c < stop[2]; ++c) {
                    const A factor = middle * weight_of(p, 2, c, x.at[2]);
                    if (factor == A(0)) continue;  // an output between the readers that does not read this input
                    A dy[V];
                    load<V>(p.dy + offset(x, p.out, a, b, c, channels), dy);
#pragma unroll
                    for (int k = 0; k < V; ++k) sum[k] += dy[k] * factor;
                }
            }
        }
        store<V>(sum, p.dx + item * V);
    }
}

KERNEL(resize_forward_1, ResizeParams) { forward<1>(p); }
KERNEL(resize_forward_v, ResizeParams) { forward<VECTOR>(p); }
KERNEL(resize_backward_1, ResizeParams) { backward<1>(p); }
KERNEL(resize_backward_v, ResizeParams) { backward<VECTOR>(p); }
