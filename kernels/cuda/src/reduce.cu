// Sums of squares of whole arrays and clipping by their root, the search for numbers that are not finite, and updates
// of the loss scale.
#include "common.cuh"

struct SquaresParams {
    const T* x;
    int64 count;
    double weight;
    double* partial;
    int64 partials;
    double* total;
};

template <int V> DEVICE void squares(const SquaresParams& p) {
    double sum = 0;
    const Index bulk = Index(p.count) / V;
    for (Index item = first_item(); item < bulk; item += item_step()) {
        A x[V];
        load<V>(p.x + item * V, x);
#pragma unroll
        for (int k = 0; k < V; ++k) sum += double(x[k]) * double(x[k]);
    }
    // Fewer than V elements are left, one for each of the first threads of the grid.
    const Index i = bulk * V + first_item();
    if (V > 1 && i < Index(p.count)) {
        const double x = double(widen(p.x[i]));
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = p.weight * sum;
}

BLOCK_KERNEL(squares_1, SquaresParams) { squares<1>(p); }
BLOCK_KERNEL(squares_v, SquaresParams) { squares<VECTOR>(p); }

// One block, so that the order of the sum never changes.
BLOCK_KERNEL(finish_squares, SquaresParams) {
    double sum = 0;
    for (Index i = Index(threadIdx.x); i < Index(p.partials); i += Index(blockDim.x)) sum += p.partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *p.total = sum;
}

struct FiniteParams {
    const T* x;
    int64 count;
    int* flag;
};

// Many threads may write the same 1.
template <int V> DEVICE void find_nonfinite(const FiniteParams& p) {
    bool found = false;
    const Index bulk = Index(p.count) / V;
    for (Index item = first_item(); item < bulk; item += item_step()) {
        A x[V];
        load<V>(p.x + item * V, x);
        // The difference is NaN for NaN and infinities, and 0 for all other numbers.
#pragma unroll
        for (int k = 0; k < V; ++k) found |= !(x[k] - x[k] == A(0));
    }
    const Index i = bulk * V + first_item();
    if (V > 1 && i < Index(p.count)) {
        const A x = widen(p.x[i]);
        found |= !(x - x == A(0));
    }
    if (found) *p.flag = 1;
}

KERNEL(find_nonfinite_1, FiniteParams) { find_nonfinite<1>(p); }
KERNEL(find_nonfinite_v, FiniteParams) { find_nonfinite<VECTOR>(p); }

struct ScalingParams {
    double* state;  // [loss scale, good steps, 1 / loss scale]
    int* flag;
    double growth;
    double backoff;
    double interval;
};

KERNEL(update_loss_scale, ScalingParams) {
    if (blockIdx.x || threadIdx.x) return;
    if (*p.flag) {
        // The scale stays within [1, 2^24].
        p.state[0] = larger(p.state[0] * p.backoff, 1.0);
        p.state[1] = 0;
    } else if (++p.state[1] >= p.interval) {
        p.state[0] = smaller(p.state[0] * p.growth, 16777216.0);
        p.state[1] = 0;
    }
    p.state[2] = 1 / p.state[0];
    *p.flag = 0;
}

struct ClipParams {
    const double* squares;
    const double* inverse;  // of the loss scale, or none
    double max_norm;
    double* norm;
    double* factor;
};

KERNEL(clip, ClipParams) {
    if (blockIdx.x || threadIdx.x) return;
    const double norm = sqrt(*p.squares) * (p.inverse ? *p.inverse : 1.0);
    *p.norm = norm;
    // 1e-6 as in torch's clip_grad_norm_.
    *p.factor = smaller(1.0, p.max_norm / (norm + 1e-6));
}
