// Batch norm in pieces, with a leading batch axis by which the same kernels do group, instance and layer norm:
// x is (batch, rows, channels), statistics are (batch, channels), gamma and beta (channels).
#include "activation.cuh"
#include "columns.cuh"

#define PAIRS 4  // rows of x and dy that a thread reads at a time

struct NormParams {
    const T* x;
    T* y;
    const T* dy;
    T* dx;
    const T* residual;  // residual_forward: added before the activation
    T* dresidual;       // gradient_sums: dy', or none
    const void* gamma;
    const void* beta;
    void* mean;
    void* var;
    int64 gamma_float;
    int64 beta_float;
    int64 mean_float;
    int64 var_float;
    void* sums;         // (batch, 2, channels), double or float
    const void* means;  // (batch, 2, channels), times `factor`, of the same type
    int64 sums_float;
    double factor;
    double* partial;
    uint64* arrived;
    int64 batch;
    int64 rows;
    int64 channels;
    double alpha;         // of the activation
    int64 premultiplied;  // means are of gamma * dy', not of dy'
    double eps;
    double share;  // forward: 1 / elements that `sums` are over, from which mean and var follow; 0: these are given
    double momentum;
    double unbiased;  // factor on var
    void* running_mean;  // or none
    void* running_var;
    int64 running_float;
    void* dgamma;  // or none
    void* dbeta;
    int64 gradients_float;
};

DEVICE double sum_at(const void* sums, int64 is_float, int64 i) {
    return is_float ? double(static_cast<const float*>(sums)[i]) : static_cast<const double*>(sums)[i];
}

DEVICE void set_sum(double value, void* sums, int64 is_float, int64 i) {
    if (is_float) static_cast<float*>(sums)[i] = float(value);
    else static_cast<double*>(sums)[i] = value;
}

// Write the sums of all chunks, right where threadIdx.y is 0; in backward they are the gradients of the parameters too.
template <int V> DEVICE void leave_sums(const NormParams& p, const Columns& at, const double (&sums)[2][V]) {
    if (threadIdx.y != 0 || !at.inside) return;
    for (int k = 0; k < V; ++k) {
        const Index c = at.channel + k;
        const int64 at_sum = int64(blockIdx.z) * 2 * at.channels + c;
        set_sum(sums[0][k], p.sums, p.sums_float, at_sum);
        set_sum(sums[1][k], p.sums, p.sums_float, at_sum + at.channels);
        if (!p.dgamma) continue;
        set_parameter(sums[0][k], p.dbeta, p.gradients_float, c);
        set_parameter(sums[1][k], p.dgamma, p.gradients_float, c);
    }
}

// Sums of x and of its square. A thread sums up differences from a number near its first rows, as float, and moves the
// sums to zero in double at its end: their difference is right even where the mean is many times the standard
// deviation (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983).
template <int V, bool WHOLE>
DEVICE void add_tile(const Vec<T, V> (&x)[TILE], int count, const A (&pivot)[V], double (&sums)[2][V]) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
        A sum = 0, squares = 0;
#pragma unroll
        for (int t = 0; t < TILE; ++t) {
            const A d = WHOLE || t < count ? widen(x[t].v[k]) - pivot[k] : A(0);
            sum += d;
            squares += d * d;
        }
        sums[0][k] += double(sum);
        sums[1][k] += double(squares);
    }
}

template <int V> DEVICE void statistics(const NormParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    double sums[2][V] = {};
    if (at.inside && at.row < at.rows) {
        A pivot[V];
        for (Index row = at.row; row < at.rows; row += TILE * at.step) {
            Vec<T, V> x[TILE];
            int count = 0;
#pragma unroll
            for (int t = 0; t < TILE; ++t) {
                const Index r = row + t * at.step;
                if (r >= at.rows) continue;
                x[t] = loaded_from<V>(p.x + element(at, r));
                ++count;
            }
            // The number that is subtracted is the mean of the thread's first tile: it costs no further pass.
            if (row == at.row) {
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const A first = widen(x[0].v[k]);
                    A sum = 0;
#pragma unroll
                    for (int t = 1; t < TILE; ++t) sum += t < count ? widen(x[t].v[k]) - first : A(0);
                    pivot[k] = first + sum / A(count);
                }
            }
            if (count == TILE) add_tile<V, true>(x, count, pivot, sums);
            else add_tile<V, false>(x, count, pivot, sums);
        }
        // Rows of this thread: at.row, at.row + at.step, ...
        const double count = double((at.rows - 1 - at.row) / at.step + 1);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const double about = double(pivot[k]);
            // sum x^2 = sum d^2 + 2 about sum d + count about^2: the squares first, as they need the sum of d.
            sums[1][k] += about * (2 * sums[0][k] + count * about);
            sums[0][k] += count * about;
        }
    }
    if (add_chunks<V>(at, sums, p.partial, p.arrived)) leave_sums<V>(p, at, sums);
}

// The input of the activation in the forward pass. The backward pass computes it again from x, which it reads anyway,
// by the same expression. So without a residual y is not read, and may be overwritten by then.
DEVICE A normalized(A x, A mean, A scale, A shift) { return (x - mean) * scale + shift; }

// What `gradient_sums` adds up in one thread. With a residual, x alone does not determine the activation's slope, but y
// does.
template <int V, bool RESIDUAL>
DEVICE void add_gradients(const NormParams& p, const Columns& at, double (&sums)[2][V]) {
    A mean[V], inverse[V], scale[V], shift[V];
    const Index set = Index(blockIdx.z) * at.channels + at.channel;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        mean[k] = parameter(p.mean, p.mean_float, set + k);
        inverse[k] = A(1) / sqrt(parameter(p.var, p.var_float, set + k) + A(p.eps));
        scale[k] = inverse[k] * parameter(p.gamma, p.gamma_float, at.channel + k);
        shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
    }
    for (Index row = at.row; row < at.rows; row += PAIRS * at.step) {
        Vec<T, V> x[PAIRS], given[PAIRS], y[RESIDUAL ? PAIRS : 1];
#pragma unroll
        for (int t = 0; t < PAIRS; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
            x[t] = loaded_from<V>(p.x + element(at, r));
            given[t] = loaded_from<V>(p.dy + element(at, r));
            if (RESIDUAL) y[RESIDUAL ? t : 0] = loaded_from<V>(p.y + element(at, r));
        }
        A first[V] = {}, second[V] = {};
#pragma unroll
        for (int t = 0; t < PAIRS; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
            A dy[V];
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A centered = widen(x[t].v[k]) - mean[k];
                dy[k] = widen(given[t].v[k]);
                if (ACTIVATION >= 0) {
                    const A z = RESIDUAL ? widen(y[RESIDUAL ? t : 0].v[k])
                                         : normalized(widen(x[t].v[k]), mean[k], scale[k], shift[k]);
                    dy[k] = fused_gradient(z, A(p.alpha), dy[k]);
                }
                first[k] += dy[k];
                second[k] += dy[k] * centered;
            }
            if (RESIDUAL) store<V>(dy, p.dresidual + element(at, r));
        }
#pragma unroll
        for (int k = 0; k < V; ++k) {
            sums[0][k] += double(first[k]);
            sums[1][k] += double(second[k]);
        }
    }
#pragma unroll
    // The factor of xhat is the same for all rows of a channel.
    for (int k = 0; k < V; ++k) sums[1][k] *= double(inverse[k]);
}

// Sums of dy' and of dy' * xhat, dy' = f' * dy, which is stored if there is a residual, as its gradient.
template <int V> DEVICE void gradient_sums(const NormParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    double sums[2][V] = {};
    if (at.inside) {
        if (p.dresidual) add_gradients<V, true>(p, at, sums);
        else add_gradients<V, false>(p, at, sums);
    }
    if (add_chunks<V>(at, sums, p.partial, p.arrived)) leave_sums<V>(p, at, sums);
}

// A number as it is stored: the forward pass computes with what the backward pass will read.
DEVICE A kept(double value, int64 is_float) {
    if (is_float) return A(float(value));
    T stored;
    narrow(value, stored);
    return widen(stored);
}

DEVICE void take_up(double batch, void* running, int64 is_float, double momentum, Index i) {
    set_parameter((1 - momentum) * double(parameter(running, is_float, i)) + momentum * batch, running, is_float, i);
}

// Mean and variance of channel c of a sample: those given, or from the sums over all processes. Then one block of those
// that share the channel `writes` them, and takes them up into the running statistics.
DEVICE void find_moments(const NormParams& p, Index set, Index c, bool writes, A& mean, A& var) {
    if (p.share > 0) {
        const int64 at = int64(blockIdx.z) * 2 * p.channels + c;
        const double first = sum_at(p.sums, p.sums_float, at) * p.share;
        const double second = sum_at(p.sums, p.sums_float, at + p.channels) * p.share;
        mean = kept(first, p.mean_float);
        var = kept(not_negative(second - first * first), p.var_float);
        if (writes) {
            set_parameter(double(mean), p.mean, p.mean_float, set);
            set_parameter(double(var), p.var, p.var_float, set);
        }
    } else {
        mean = parameter(p.mean, p.mean_float, set);
        var = parameter(p.var, p.var_float, set);
    }
    if (writes && p.running_mean) {
        take_up(double(mean), p.running_mean, p.running_float, p.momentum, c);
        take_up(double(var) * p.unbiased, p.running_var, p.running_float, p.momentum, c);
    }
}

template <int V, bool RESIDUAL> DEVICE void forward(const NormParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    if (!at.inside) return;
    A mean[V], scale[V], shift[V];
    const Index set = Index(blockIdx.z) * at.channels + at.channel;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        A var;
        // Of all blocks that compute the moments of a channel, the first one writes them.
        find_moments(p, set + k, at.channel + k, blockIdx.y == 0 && threadIdx.y == 0, mean[k], var);
        scale[k] = A(1) / sqrt(var + A(p.eps)) * parameter(p.gamma, p.gamma_float, at.channel + k);
        shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
    }
    for (Index row = at.row; row < at.rows; row += PAIRS * at.step) {
        Vec<T, V> x[PAIRS], residual[RESIDUAL ? PAIRS : 1];
#pragma unroll
        for (int t = 0; t < PAIRS; ++t) {
            if (row + t * at.step >= at.rows) continue;
            const Index from = from_end(at, row + t * at.step);
            x[t] = loaded_from<V>(p.x + from);
            if (RESIDUAL) residual[RESIDUAL ? t : 0] = loaded_from<V>(p.residual + from);
        }
#pragma unroll
        for (int t = 0; t < PAIRS; ++t) {
            if (row + t * at.step >= at.rows) continue;
            A y[V];
#pragma unroll
            for (int k = 0; k < V; ++k) {
                y[k] = normalized(widen(x[t].v[k]), mean[k], scale[k], shift[k]);
                if (RESIDUAL) y[k] += widen(residual[RESIDUAL ? t : 0].v[k]);
                y[k] = fused(y[k], A(p.alpha));
            }
            store<V>(y, p.y + from_end(at, row + t * at.step));
        }
    }
}

// dx = gamma * inverse * (dy' - means[0] - xhat * means[1]), or without gamma on the means. `given` is dy, or dy' where
// that was stored.
template <int V, bool MASKED, int ROWS>
DEVICE void gradient_data(const NormParams& p, const T* given) {
    const Columns at = columns<V>(p.rows, p.channels);
    if (!at.inside) return;
    A mean[V], scale[V], slope[V], offset[V], shift[V];
    const Index set = Index(blockIdx.z) * at.channels + at.channel;
    const int64 at_mean = int64(blockIdx.z) * 2 * at.channels + at.channel;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        mean[k] = parameter(p.mean, p.mean_float, set + k);
        const A inverse = A(1) / sqrt(parameter(p.var, p.var_float, set + k) + A(p.eps));
        scale[k] = inverse * parameter(p.gamma, p.gamma_float, at.channel + k);
        // In group norm the means contain gamma already, because it differs within a group.
        const A outer = p.premultiplied ? inverse : scale[k];
        offset[k] = outer * A(sum_at(p.means, p.sums_float, at_mean + k) * p.factor);
        shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
        slope[k] = outer * inverse * A(sum_at(p.means, p.sums_float, at_mean + at.channels + k) * p.factor);
    }
    // From the last row: `gradient_sums` has read those rows last, so they may still be in a cache.
    for (Index row = at.row; row < at.rows; row += ROWS * at.step) {
        Vec<T, V> x[ROWS], dy[ROWS];
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
            x[t] = loaded_from<V>(p.x + from_end(at, r));
            dy[t] = loaded_from<V>(given + from_end(at, r));
        }
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
            A dx[V];
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A in = widen(x[t].v[k]), out = widen(dy[t].v[k]);
                const A z = normalized(in, mean[k], scale[k], shift[k]);
                const A gradient = MASKED ? out : fused_gradient(z, A(p.alpha), out);
                dx[k] = gradient * scale[k] - offset[k] - (in - mean[k]) * slope[k];
            }
            store<V>(dx, p.dx + from_end(at, r));
        }
    }
}

// A whole norm, whose blocks have all rows of their channels: no other block needs what one has found, and the second
// pass over the rows reads from a cache. For few rows: then launches take longer than the passes.
template <int V> DEVICE void whole_forward(const NormParams& p) {
    statistics<V>(p);
    // The sums of the block are in global memory: all its threads see them after the barrier.
    __syncthreads();
    if (p.residual) forward<V, true>(p);
    else forward<V, false>(p);
}

template <int V> DEVICE void whole_backward(const NormParams& p) {
    gradient_sums<V>(p);
    // The same for dy', which other threads of the block have stored: this pass goes from the last row to the first.
    __syncthreads();
    if (p.dresidual) gradient_data<V, true, 2>(p, p.dresidual);
    else gradient_data<V, false, 2>(p, p.dy);
}

SHARING_KERNEL(statistics_1, NormParams) { statistics<1>(p); }
SHARING_KERNEL(statistics_v, NormParams) { statistics<VECTOR>(p); }
SHARING_KERNEL(gradient_sums_1, NormParams) { gradient_sums<1>(p); }
SHARING_KERNEL(gradient_sums_v, NormParams) { gradient_sums<VECTOR>(p); }
KERNEL(forward_1, NormParams) { forward<1, false>(p); }
KERNEL(forward_v, NormParams) { forward<VECTOR, false>(p); }
KERNEL(residual_forward_1, NormParams) { forward<1, true>(p); }
KERNEL(residual_forward_v, NormParams) { forward<VECTOR, true>(p); }
KERNEL(gradient_data_1, NormParams) { gradient_data<1, false, PAIRS>(p, p.dy); }
KERNEL(gradient_data_v, NormParams) { gradient_data<VECTOR, false, PAIRS>(p, p.dy); }
BLOCK_KERNEL(whole_forward_1, NormParams) { whole_forward<1>(p); }
BLOCK_KERNEL(whole_forward_v, NormParams) { whole_forward<VECTOR>(p); }
SHARING_KERNEL(whole_backward_1, NormParams) { whole_backward<1>(p); }
SHARING_KERNEL(whole_backward_v, NormParams) { whole_backward<VECTOR>(p); }
