// Batch norm in pieces, with a leading batch axis by which the same kernels do group, instance and layer norm:
// x is (batch, rows, channels), statistics are (batch, channels), gamma and beta (channels).
#include "activation.cuh"
#include "columns.cuh"

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

// Sums of x and of its square. Those of squares are taken about the mean of each tile and then moved to zero in double,
// so that their difference is right even where the mean is many times the deviation
// (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
template <int V> DEVICE void statistics(const NormParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    double sums[2][V] = {};
    if (at.inside) {
        for (Index row = at.row; row < at.rows; row += TILE * at.step) {
            A x[TILE][V];
            int count = 0;
#pragma unroll
            for (int t = 0; t < TILE; ++t) {
                const Index r = row + t * at.step;
                if (r < at.rows) {
                    load<V>(p.x + element(at, r), x[t]);
                    ++count;
                }
            }
#pragma unroll
            for (int k = 0; k < V; ++k) {
                // About the tile's first value: what values far from zero have in common would take all the digits.
                const A pivot = x[0][k];
                A sum = 0, squares = 0;
#pragma unroll
                for (int t = 1; t < TILE; ++t) sum += t < count ? x[t][k] - pivot : A(0);
                const A mean = pivot + sum / A(count);
#pragma unroll
                for (int t = 0; t < TILE; ++t) {
                    const A d = t < count ? x[t][k] - mean : A(0);
                    squares += d * d;
                }
                const double first = count * double(pivot) + double(sum);
                sums[0][k] += first;
                sums[1][k] += double(squares) + double(mean) * (2 * first - count * double(mean));
            }
        }
    }
    if (add_chunks<V>(at, sums, p.partial, p.arrived)) leave_sums<V>(p, at, sums);
}

// What an activation is given forward. Backward computes it again from x, which it reads anyway, by the same
// expression: y need not be read, nor be there any more.
DEVICE A normalized(A x, A mean, A scale, A shift) { return (x - mean) * scale + shift; }

// Sums of dy' and of dy' * xhat, dy' = f' * dy, which is kept where a residual has it for gradient.
template <int V> DEVICE void gradient_sums(const NormParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    double sums[2][V] = {};
    if (at.inside) {
        A mean[V], inverse[V], scale[V], shift[V];
        const Index set = Index(blockIdx.z) * at.channels + at.channel;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            mean[k] = parameter(p.mean, p.mean_float, set + k);
            inverse[k] = A(1) / sqrt(parameter(p.var, p.var_float, set + k) + A(p.eps));
            scale[k] = inverse[k] * parameter(p.gamma, p.gamma_float, at.channel + k);
            shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
        }
        for (Index row = at.row; row < at.rows; row += TILE * at.step) {
            A first[V] = {}, second[V] = {};
#pragma unroll
            for (int t = 0; t < TILE; ++t) {
                const Index r = row + t * at.step;
                if (r >= at.rows) continue;
                A x[V], y[V], dy[V];
                load<V>(p.x + element(at, r), x);
                load<V>(p.dy + element(at, r), dy);
                if (p.dresidual) load<V>(p.y + element(at, r), y);  // with what was added, x alone does not tell
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    if (ACTIVATION >= 0) {
                        const A z = normalized(x[k], mean[k], scale[k], shift[k]), alpha = A(p.alpha);
                        dy[k] = fused_gradient(p.dresidual ? y[k] : z, alpha, dy[k]);
                    }
                    first[k] += dy[k];
                    second[k] += dy[k] * ((x[k] - mean[k]) * inverse[k]);
                }
                if (p.dresidual) store<V>(dy, p.dresidual + element(at, r));
            }
#pragma unroll
            for (int k = 0; k < V; ++k) {
                sums[0][k] += double(first[k]);
                sums[1][k] += double(second[k]);
            }
        }
    }
    if (add_chunks<V>(at, sums, p.partial, p.arrived)) leave_sums<V>(p, at, sums);
}

// What a number becomes where it is kept, from where backward reads it.
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
        find_moments(p, set + k, at.channel + k, blockIdx.y == 0 && threadIdx.y == 0, mean[k], var);
        scale[k] = A(1) / sqrt(var + A(p.eps)) * parameter(p.gamma, p.gamma_float, at.channel + k);
        shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
    }
    for (Index row = at.row; row < at.rows; row += 4 * at.step) {
        A x[4][V], residual[RESIDUAL ? 4 : 1][V];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (row + t * at.step >= at.rows) continue;
            load<V>(p.x + from_end(at, row + t * at.step), x[t]);
            if (RESIDUAL) load<V>(p.residual + from_end(at, row + t * at.step), residual[RESIDUAL ? t : 0]);
        }
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (row + t * at.step >= at.rows) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) {
                x[t][k] = normalized(x[t][k], mean[k], scale[k], shift[k]);
                if (RESIDUAL) x[t][k] += residual[RESIDUAL ? t : 0][k];
                x[t][k] = fused(x[t][k], A(p.alpha));
            }
            store<V>(x[t], p.y + from_end(at, row + t * at.step));
        }
    }
}

// dx = gamma * inverse * (dy' - means[0] - xhat * means[1]), or without gamma on the means. `given` is dy, or dy' where
// that was stored.
template <int V, bool MASKED> DEVICE void gradient_data(const NormParams& p, const T* given) {
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
        const A outer = p.premultiplied ? inverse : scale[k];
        offset[k] = outer * A(sum_at(p.means, p.sums_float, at_mean + k) * p.factor);
        shift[k] = parameter(p.beta, p.beta_float, at.channel + k);
        slope[k] = outer * inverse * A(sum_at(p.means, p.sums_float, at_mean + at.channels + k) * p.factor);
    }
    for (Index row = at.row; row < at.rows; row += 2 * at.step) {
        A x[2][V], dy[2][V];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
            load<V>(p.x + from_end(at, r), x[t]);
            load<V>(given + from_end(at, r), dy[t]);
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const Index r = row + t * at.step;
            if (r >= at.rows) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const A z = normalized(x[t][k], mean[k], scale[k], shift[k]);
                const A gradient = MASKED ? dy[t][k] : fused_gradient(z, A(p.alpha), dy[t][k]);
                dy[t][k] = gradient * scale[k] - offset[k] - (x[t][k] - mean[k]) * slope[k];
            }
            store<V>(dy[t], p.dx + from_end(at, r));
        }
    }
}

// A whole norm, whose blocks have all rows of their channels: no other block needs what one has found, and the second
// pass over the rows reads from a cache. For few rows: then launches take longer than the passes.
template <int V> DEVICE void whole_forward(const NormParams& p) {
    statistics<V>(p);
    __syncthreads();
    if (p.residual) forward<V, true>(p);
    else forward<V, false>(p);
}

template <int V> DEVICE void whole_backward(const NormParams& p) {
    gradient_sums<V>(p);
    __syncthreads();
    if (p.dresidual) gradient_data<V, true>(p, p.dresidual);
    else gradient_data<V, false>(p, p.dy);
}

BLOCK_KERNEL(statistics_1, NormParams) { statistics<1>(p); }
BLOCK_KERNEL(statistics_v, NormParams) { statistics<VECTOR>(p); }
BLOCK_KERNEL(gradient_sums_1, NormParams) { gradient_sums<1>(p); }
BLOCK_KERNEL(gradient_sums_v, NormParams) { gradient_sums<VECTOR>(p); }
KERNEL(forward_1, NormParams) { forward<1, false>(p); }
KERNEL(forward_v, NormParams) { forward<VECTOR, false>(p); }
KERNEL(residual_forward_1, NormParams) { forward<1, true>(p); }
KERNEL(residual_forward_v, NormParams) { forward<VECTOR, true>(p); }
KERNEL(gradient_data_1, NormParams) { gradient_data<1, false>(p, p.dy); }
KERNEL(gradient_data_v, NormParams) { gradient_data<VECTOR, false>(p, p.dy); }
BLOCK_KERNEL(whole_forward_1, NormParams) { whole_forward<1>(p); }
BLOCK_KERNEL(whole_forward_v, NormParams) { whole_forward<VECTOR>(p); }
BLOCK_KERNEL(whole_backward_1, NormParams) { whole_backward<1>(p); }
BLOCK_KERNEL(whole_backward_v, NormParams) { whole_backward<VECTOR>(p); }

// What lies between sums over ranks and the kernels above. Vectors of a few hundred numbers, in double.
struct GroupParams {
    const double* sums;  // (batch, 2, channels)
    double* totals;      // (batch, 2, groups)
    double* means;       // (batch, 2, channels)
    const void* gamma;   // or none
    int64 gamma_float;
    void* mean;
    void* var;
    int64 mean_float;
    int64 var_float;
    void* first;  // (channels): sums of the first and second quantity over the batch
    void* second;
    int64 first_float;
    int64 second_float;
    int64 batch;
    int64 groups;
    int64 channels;
    double scale;
};

// totals = scale * sum over the channels of each group of sums (times gamma).
KERNEL(group_totals, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * 2 * p.groups);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index group = item % Index(p.groups), set = item / Index(p.groups);
        double sum = 0;
        for (Index c = group * members; c < (group + 1) * members; ++c) {
            const double weight = p.gamma ? double(parameter(p.gamma, p.gamma_float, c)) : 1.0;
            sum += p.sums[set * Index(p.channels) + c] * weight;
        }
        p.totals[item] = sum * p.scale;
    }
}

// mean and variance from totals [E x, E x^2].
KERNEL(group_moments, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * p.channels);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index sample = item / Index(p.channels), group = item % Index(p.channels) / members;
        const double* found = p.totals + sample * 2 * Index(p.groups) + group;
        const double mean = found[0] * p.scale;
        set_parameter(mean, p.mean, p.mean_float, item);
        const double var = found[Index(p.groups)] * p.scale - mean * mean;
        set_parameter(not_negative(var), p.var, p.var_float, item);
    }
}

// means of every channel are those of its group.
KERNEL(group_spread, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * 2 * p.channels);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index set = item / Index(p.channels), group = item % Index(p.channels) / members;
        p.means[item] = p.totals[set * Index(p.groups) + group];
    }
}

// The two quantities summed over the batch.
KERNEL(sum_samples, GroupParams) {
    const Index channels = Index(p.channels);
    for (Index c = first_item(); c < channels; c += item_step()) {
        double first = 0, second = 0;
        for (Index n = 0; n < Index(p.batch); ++n) {
            first += p.sums[2 * n * channels + c];
            second += p.sums[(2 * n + 1) * channels + c];
        }
        set_parameter(first, p.first, p.first_float, c);
        set_parameter(second, p.second, p.second_float, c);
    }
}
