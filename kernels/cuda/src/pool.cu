// Maximum and mean over windows, channels last, 1-D and 2-D as 3-D; gradients are gathered, so nothing is added twice
// and the order of sums never changes. Neighboring threads take neighboring channels.
#include "common.cuh"

struct PoolParams {
    const T* x;
    T* y;
    const T* dy;
    T* dx;
    void* position;  // of the maximum in its window: uint8, or int where `wide`
    int64 wide;
    int64 samples;
    int64 channels;
    int64 in[3];
    int64 out[3];
    int64 kernel[3];
    int64 stride[3];
    int64 dilation[3];
    int64 lo[3];
    int64 include;  // the mean is over all taps, not over those inside
};

// Where a vector of channels lies in an array (samples, *extent, channels).
struct Place {
    Index sample, at[3], channel;
};

template <int V> DEVICE Place place(Index item, const int64 (&extent)[3], Index channels) {
    Place found;
    const Index lanes = channels / V;
    found.channel = (item % lanes) * V;
    item /= lanes;
    for (int axis = 2; axis >= 0; --axis) {
        found.at[axis] = item % Index(extent[axis]);
        item /= Index(extent[axis]);
    }
    found.sample = item;
    return found;
}

DEVICE Index offset(Index sample, const int64 (&extent)[3], Index a, Index b, Index c, Index channels) {
    return (((sample * Index(extent[0]) + a) * Index(extent[1]) + b) * Index(extent[2]) + c) * channels;
}

DEVICE Index count_items(const PoolParams& p, const int64 (&extent)[3], int lanes) {
    return Index(p.samples * extent[0] * extent[1] * extent[2] * (p.channels / lanes));
}

template <int V> DEVICE void positions_at(const PoolParams& p, Index i, int (&taps)[V]) {
    if (p.wide) {
        const Vec<int, V> loaded = *reinterpret_cast<const Vec<int, V>*>(static_cast<const int*>(p.position) + i);
        for (int k = 0; k < V; ++k) taps[k] = loaded.v[k];
        return;
    }
    const Vec<uint8, V> loaded = *reinterpret_cast<const Vec<uint8, V>*>(static_cast<const uint8*>(p.position) + i);
#pragma unroll
    for (int k = 0; k < V; ++k) taps[k] = int(loaded.v[k]);
}

template <int V> DEVICE void set_positions(const PoolParams& p, Index i, const int (&taps)[V]) {
    if (p.wide) {
        for (int k = 0; k < V; ++k) static_cast<int*>(p.position)[i + k] = taps[k];
        return;
    }
    Vec<uint8, V> stored;
#pragma unroll
    for (int k = 0; k < V; ++k) stored.v[k] = uint8(taps[k]);
    *reinterpret_cast<Vec<uint8, V>*>(static_cast<uint8*>(p.position) + i) = stored;
}

template <int V> DEVICE void max_forward(const PoolParams& p) {
    const Index total = count_items(p, p.out, V);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Place o = place<V>(item, p.out, Index(p.channels));
        A best[V];
        int chosen[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            best[k] = -A(INFINITY);
            chosen[k] = 0;
        }
        bool any = false;
        int tap = 0;
        for (Index a = 0; a < Index(p.kernel[0]); ++a) {
            const Index i = o.at[0] * Index(p.stride[0]) - Index(p.lo[0]) + a * Index(p.dilation[0]);
            for (Index b = 0; b < Index(p.kernel[1]); ++b) {
                const Index j = o.at[1] * Index(p.stride[1]) - Index(p.lo[1]) + b * Index(p.dilation[1]);
                for (Index c = 0; c < Index(p.kernel[2]); ++c, ++tap) {
                    const Index l = o.at[2] * Index(p.stride[2]) - Index(p.lo[2]) + c * Index(p.dilation[2]);
                    if (i < 0 || i >= Index(p.in[0]) || j < 0 || j >= Index(p.in[1])) continue;
                    if (l < 0 || l >= Index(p.in[2])) continue;
                    A value[V];
                    load<V>(p.x + offset(o.sample, p.in, i, j, l, Index(p.channels)) + o.channel, value);
#pragma unroll
                    for (int k = 0; k < V; ++k) {
                        // The first of equal elements stays, also of -inf; a NaN wins and is not lost again.
                        if (!any || value[k] > best[k] || value[k] != value[k]) {
                            best[k] = value[k];
                            chosen[k] = tap;
                        }
                    }
                    any = true;
                }
            }
        }
        const Index at = item * V;
        store<V>(best, p.y + at);
        if (p.position) set_positions<V>(p, at, chosen);
    }
}

// The outputs [first, last] of one axis whose windows may hold input i.
DEVICE void readers(const PoolParams& p, int axis, Index i, Index& first, Index& last) {
    const Index row = i + Index(p.lo[axis]), stride = Index(p.stride[axis]);
    // A window that begins before this row ends before the input.
    const Index above = row - Index(p.dilation[axis]) * (Index(p.kernel[axis]) - 1);
    first = above > 0 ? (above + stride - 1) / stride : 0;
    last = smaller(row / stride, Index(p.out[axis]) - 1);
}

// The tap of output o that reads input i, or -1.
DEVICE Index tap_of(const PoolParams& p, int axis, Index i, Index o) {
    const Index row = i + Index(p.lo[axis]) - o * Index(p.stride[axis]);
    if (p.dilation[axis] == 1) return row;
    // Between the taps of a dilated window lie inputs that it does not read.
    return row % Index(p.dilation[axis]) ? Index(-1) : row / Index(p.dilation[axis]);
}

// Taps of output o that lie inside the array.
DEVICE Index taps_inside(const PoolParams& p, int axis, Index o) {
    const Index start = o * Index(p.stride[axis]) - Index(p.lo[axis]), step = Index(p.dilation[axis]);
    const Index first = start >= 0 ? 0 : (-start + step - 1) / step;
    const Index room = Index(p.in[axis]) - 1 - start;
    return room < 0 ? 0 : larger(Index(0), smaller(Index(p.kernel[axis]) - 1, room / step) - first + 1);
}

DEVICE A share_of(const PoolParams& p, Index a, Index b, Index c) {
    if (p.include) return A(1) / A(p.kernel[0] * p.kernel[1] * p.kernel[2]);
    const Index inside = taps_inside(p, 0, a) * taps_inside(p, 1, b) * taps_inside(p, 2, c);
    // A window within the padding has no taps: its sum is 0, not 0 / 0.
    return A(1) / A(larger(inside, Index(1)));
}

template <int V> DEVICE void average_forward(const PoolParams& p) {
    const Index total = count_items(p, p.out, V);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Place o = place<V>(item, p.out, Index(p.channels));
        A sum[V] = {};
        for (Index a = 0; a < Index(p.kernel[0]); ++a) {
            const Index i = o.at[0] * Index(p.stride[0]) - Index(p.lo[0]) + a * Index(p.dilation[0]);
            if (i < 0 || i >= Index(p.in[0])) continue;
            for (Index b = 0; b < Index(p.kernel[1]); ++b) {
                const Index j = o.at[1] * Index(p.stride[1]) - Index(p.lo[1]) + b * Index(p.dilation[1]);
                if (j < 0 || j >= Index(p.in[1])) continue;
                for (Index c = 0; c < Index(p.kernel[2]); ++c) {
                    const Index l = o.at[2] * Index(p.stride[2]) - Index(p.lo[2]) + c * Index(p.dilation[2]);
                    if (l < 0 || l >= Index(p.in[2])) continue;
                    A value[V];
                    load<V>(p.x + offset(o.sample, p.in, i, j, l, Index(p.channels)) + o.channel, value);
#pragma unroll
                    for (int k = 0; k < V; ++k) sum[k] += value[k];
                }
            }
        }
        const A share = share_of(p, o.at[0], o.at[1], o.at[2]);
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] *= share;
        store<V>(sum, p.y + item * V);
    }
}

template <int V, bool MAXIMUM> DEVICE void backward(const PoolParams& p) {
    const Index total = count_items(p, p.in, V);
    const Index channels = Index(p.channels);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Place x = place<V>(item, p.in, channels);
        Index first[3], last[3];
        for (int axis = 0; axis < 3; ++axis) readers(p, axis, x.at[axis], first[axis], last[axis]);
        A sum[V] = {};
        for (Index a = first[0]; a <= last[0]; ++a) {
            const Index i = tap_of(p, 0, x.at[0], a);
            if (i < 0) continue;
            for (Index b = first[1]; b <= last[1]; ++b) {
                const Index j = tap_of(p, 1, x.at[1], b);
                if (j < 0) continue;
                for (Index c = first[2]; c <= last[2]; ++c) {
                    const Index l = tap_of(p, 2, x.at[2], c);
                    if (l < 0) continue;
                    const Index at = offset(x.sample, p.out, a, b, c, channels) + x.channel;
                    A gradient[V];
                    load<V>(p.dy + at, gradient);
                    if (MAXIMUM) {
                        const int tap = int((i * Index(p.kernel[1]) + j) * Index(p.kernel[2]) + l);
                        int taps[V];
                        positions_at<V>(p, at, taps);
#pragma unroll
                        for (int k = 0; k < V; ++k) sum[k] += taps[k] == tap ? gradient[k] : A(0);
                    } else {
                        const A share = share_of(p, a, b, c);
#pragma unroll
                        for (int k = 0; k < V; ++k) sum[k] += gradient[k] * share;
                    }
                }
            }
        }
        store<V>(sum, p.dx + item * V);
    }
}

KERNEL(max_forward_1, PoolParams) { max_forward<1>(p); }
KERNEL(max_forward_v, PoolParams) { max_forward<VECTOR>(p); }
KERNEL(max_backward_1, PoolParams) { backward<1, true>(p); }
KERNEL(max_backward_v, PoolParams) { backward<VECTOR, true>(p); }
KERNEL(average_forward_1, PoolParams) { average_forward<1>(p); }
KERNEL(average_forward_v, PoolParams) { average_forward<VECTOR>(p); }
KERNEL(average_backward_1, PoolParams) { backward<1, false>(p); }
KERNEL(average_backward_v, PoolParams) { backward<VECTOR, false>(p); }
