// Losses with their gradients in one pass. Blocks leave partial sums in double, which the last block to end adds up.
#include "rows.cuh"

struct LossParams {
    const T* x;          // (rows, channels)
    const void* target;  // (rows, 1) class indices, or (rows, channels)
    int64 target_code;
    T* dx;                  // or none
    const double* weights;  // per class or channel, or none
    const void* factors;    // weights (rows, 1) or (rows, channels), or none; where one is 0, there is no loss
    int64 factor_code;
    int64 factor_channels;
    const double* factor;   // of dx alone, on the device, or none
    const double* divisor;  // of loss and dx, on the device, or none; both are 0 unless it is above 0
    double* partial;
    double* loss;
    uint64* wrong;  // number of targets that are no class, with which the loss is NaN, or none; 0 before and after
    int64 rows;      // of x
    int64 counted;   // leading rows that have a loss
    int64 channels;
    double scale;    // of the sum
    double smoothing;
    int64 ignores;
    int64 ignored;
    uint64* arrived;  // blocks that have left their sum: 0 before and after
};

DEVICE double loss_scale(const LossParams& p) {
    if (!p.divisor) return p.scale;
    return *p.divisor > 0 ? p.scale / *p.divisor : 0.0;
}

DEVICE A gradient_scale(const LossParams& p) { return A(p.factor ? loss_scale(p) * *p.factor : loss_scale(p)); }

// Add up what the threads of all blocks have found, in an order that never changes. All threads must come here.
DEVICE void leave(const LossParams& p, double sum) {
    __shared__ bool last;
    const bool first = threadIdx.x == 0 && threadIdx.y == 0;
    const double found = block_sum(sum);
    if (first) p.partial[blockIdx.x] = found;
    // Other blocks must see the partial sum before they see this block's arrival.
    __threadfence();
    __syncthreads();
    if (first) {
        last = atomicAdd(p.arrived, uint64(1)) == uint64(gridDim.x - 1);
        // For the next run, which then needs no launch to clear it.
        if (last) *p.arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    // Not from a cache of this multiprocessor, which does not have what others have written since.
    const volatile double* partial = p.partial;
    const volatile uint64* wrong = p.wrong;
    sum = 0;
    for (int i = int(threadIdx.y * blockDim.x + threadIdx.x); i < int(gridDim.x); i += 256) sum += partial[i];
    sum = block_sum(sum);
    if (first) {
        // Without a header of the toolkit, NaN is the difference of two infinities.
        *p.loss = wrong && *wrong ? INFINITY - INFINITY : sum * loss_scale(p);
        if (wrong) *p.wrong = 0;  // targets of the next run are counted anew
    }
}

// The weight of element `channel` of a row.
DEVICE A factor_of(const LossParams& p, Index row, Index channel) {
    if (!p.factors) return A(1);
    const Index at = p.factor_channels == 1 ? row : row * Index(p.factor_channels) + channel;
    return A(number_at(p.factors, p.factor_code, at));
}

struct Label {
    int64 index;
    bool counts;
    A weight;  // of class and position
    A factor;  // of the position
};

// The class of a row; one that is ignored, of weight 0 or no class at all has no weight.
DEVICE Label label_of(const LossParams& p, Index row) {
    Label found = {0, false, A(0), A(0)};
    if (row >= Index(p.counted)) return found;
    const A factor = factor_of(p, row, 0);
    // Before the target is read: where nothing is known it may be NaN, or no class.
    if (factor == A(0)) return found;
    // Targets may be of any dtype; a double holds all indices of classes exactly.
    found.index = int64(number_at(p.target, p.target_code, row));
    if (p.ignores && found.index == p.ignored) {
        found.index = 0;
        return found;
    }
    if (found.index < 0 || found.index >= p.channels) {
        // All threads of a row read its label: one counts it.
        if (p.wrong && threadIdx.x == 0) atomicAdd(p.wrong, uint64(1));
        found.index = 0;
        return found;
    }
    found.counts = true;
    found.factor = factor;
    found.weight = p.weights ? A(p.weights[found.index]) * factor : factor;
    return found;
}

DEVICE A class_weight(const LossParams& p, Index c) { return p.weights ? A(p.weights[c]) : A(1); }

// loss = mass * log(sum of exp z) - q . z, with z = x - max, q = (1 - s) w[t] at t plus s / K * w everywhere.
// The sum is `others` and `own`, the label's. Of the sum alone neither its logarithm near 1 nor own / sum - 1 =
// -others / sum could be formed: it has lost the small ones.
BLOCK_KERNEL(softmax_cross_entropy, LossParams) {
    const Index channels = Index(p.channels), lanes = Index(blockDim.x);
    const A share = A(p.smoothing) / A(p.channels), rest = A(1) - A(p.smoothing), scale = gradient_scale(p);
    double total = 0;
    for (Index start = first_row(); start < Index(p.rows); start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < Index(p.rows);
        const Label label = label_of(p, row);
        const T* x = p.x + row * channels;
        A largest = -A(INFINITY);
        for (Index c = Index(threadIdx.x); active && c < channels; c += lanes) {
            largest = Maximum::of(largest, widen(x[c]));
        }
        largest = across_lanes<Maximum>(largest);
        A others = 0, own = 0, taken = 0, mass = 0;
        for (Index c = Index(threadIdx.x); active && c < channels; c += lanes) {
            const A z = widen(x[c]) - largest;
            A q = label.counts && p.smoothing != 0 ? share * class_weight(p, c) * label.factor : A(0);
            if (c == Index(label.index)) q += rest * label.weight;
            if (c == Index(label.index)) own += exp(z);
            else others += exp(z);
            // A class that is masked has z = -inf: 0 * z would be NaN.
            if (q != A(0)) taken += q * z;
            mass += q;
        }
        others = across_lanes<Add>(others);
        own = across_lanes<Add>(own);
        taken = across_lanes<Add>(taken);
        mass = across_lanes<Add>(mass);
        if (!active) continue;
        if (threadIdx.x == 0 && label.counts) total += double(log1p(others + (own - A(1))) * mass - taken);
        // Validation has no gradients.
        if (!p.dx) continue;
        const A sum = others + own, target = rest * label.weight;
        for (Index c = Index(threadIdx.x); c < channels; c += lanes) {
            A gradient = 0;
            if (label.counts) {
                const bool labelled = c == Index(label.index);
                const A smoothed = p.smoothing != 0 ? share * class_weight(p, c) * label.factor : A(0);
                // mass * own / sum - target, over one divisor; without smoothing the mass is the target.
                if (labelled) gradient = ((p.smoothing != 0 ? mass - target : A(0)) * own - target * others) / sum;
                else gradient = exp(widen(x[c]) - largest) / sum * mass;
                gradient -= smoothed;
            }
            narrow(gradient * scale, p.dx[row * channels + c]);
        }
    }
    leave(p, total);
}

// The sum of the weights of all targets.
BLOCK_KERNEL(target_weight, LossParams) {
    double total = 0;
    for (Index row = first_item(); row < Index(p.counted); row += item_step()) {
        const int64 index = int64(number_at(p.target, p.target_code, row));
        if ((p.ignores && index == p.ignored) || index < 0 || index >= p.channels) continue;
        const double factor = p.factors ? number_at(p.factors, p.factor_code, row) : 1.0;
        total += p.weights ? p.weights[index] * factor : factor;
    }
    leave(p, total);
}

// (1 - t) softplus(x) + w t softplus(-x), with softplus(x) = max(x, 0) + log1p(exp(-|x|)): no term is negative, so that
// nothing cancels. The scale is divided by the channels by the launcher.
BLOCK_KERNEL(binary_cross_entropy, LossParams) {
    const Index channels = Index(p.channels), count = Index(p.rows) * channels, counted = Index(p.counted) * channels;
    const A scale = gradient_scale(p);
    double total = 0;
    for (Index i = first_item(); i < count; i += item_step()) {
        A gradient = 0;
        const A factor = i < counted ? factor_of(p, i / channels, i % channels) : A(0);
        if (factor != A(0)) {
            const A x = widen(p.x[i]), t = A(number_at(p.target, p.target_code, i));
            const A one = (p.weights ? A(p.weights[i % channels]) : A(1)) * t, zero = A(1) - t;
            const A e = exp(x < A(0) ? x : -x), part = log1p(e);
            // The gradient is (1 - t) sigmoid(x) - w t sigmoid(-x), both with the divisor 1 + e.
            total += double(factor * (zero * (not_negative(x) + part) + one * (not_negative(-x) + part)));
            gradient = factor * ((zero * (x < A(0) ? e : A(1)) - one * (x < A(0) ? A(1) : e)) / (A(1) + e));
        }
        if (p.dx) narrow(gradient * scale, p.dx[i]);
    }
    leave(p, total);
}

// (x - t)^2. The scale is divided by the channels by the launcher.
BLOCK_KERNEL(mean_squared_error, LossParams) {
    const Index channels = Index(p.channels), count = Index(p.rows) * channels, counted = Index(p.counted) * channels;
    const A scale = gradient_scale(p);
    double total = 0;
    for (Index i = first_item(); i < count; i += item_step()) {
        A gradient = 0;
        const A factor = i < counted ? factor_of(p, i / channels, i % channels) : A(0);
        if (factor != A(0)) {
            const A d = widen(p.x[i]) - A(number_at(p.target, p.target_code, i));
            total += double(factor * d * d);
            gradient = A(2) * factor * d;
        }
        if (p.dx) narrow(gradient * scale, p.dx[i]);
    }
    leave(p, total);
}
