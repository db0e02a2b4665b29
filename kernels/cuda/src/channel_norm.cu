// Normalization over the channels of each row, x (rows, channels): layer norm of a position; RMS norm if not centered.
#include "activation.cuh"
#include "rows.cuh"

struct ChannelNormParams {
    const T* x;
    T* y;
    const T* dy;
    T* dx;  // or none: sums of gradients only
    const void* gamma;
    const void* beta;  // or none
    int64 gamma_float;
    int64 beta_float;
    A* moments;  // (rows, 2): mean and 1 / standard deviation, written by the forward pass; or none
    int64 centered;  // 0: the mean counts as 0
    int64 rows;
    int64 channels;
    double alpha;  // of the activation
    double eps;
};

// gamma * xhat + beta, or gamma * xhat.
DEVICE A affine(const ChannelNormParams& p, Index c, A xhat) {
    const A gamma = parameter(p.gamma, p.gamma_float, c);
    return p.beta ? xhat * gamma + parameter(p.beta, p.beta_float, c) : xhat * gamma;
}

BLOCK_KERNEL(channel_forward, ChannelNormParams) {
    const Index channels = Index(p.channels), lanes = Index(blockDim.x);
    for (Index start = first_row(); start < Index(p.rows); start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < Index(p.rows);
        const T* x = p.x + row * channels;
        A sum = 0;
        for (Index c = Index(threadIdx.x); p.centered && active && c < channels; c += lanes) sum += widen(x[c]);
        const A mean = p.centered ? across_lanes<Add>(sum) / A(channels) : A(0);
        // About the mean, in a second pass over the row, which is in a cache: nothing cancels.
        A squares = 0;
        for (Index c = Index(threadIdx.x); active && c < channels; c += lanes) {
            const A d = widen(x[c]) - mean;
            squares += d * d;
        }
        const A inverse = A(1) / sqrt(across_lanes<Add>(squares) / A(channels) + A(p.eps));
        if (!active) continue;
        if (p.moments && threadIdx.x == 0) {
            p.moments[2 * row] = mean;
            p.moments[2 * row + 1] = inverse;
        }
        for (Index c = Index(threadIdx.x); c < channels; c += lanes) {
            A y = (widen(x[c]) - mean) * inverse;
            if (p.gamma) y = affine(p, c, y);
            narrow(fused(y, A(p.alpha)), p.y[row * channels + c]);
        }
    }
}

// gamma * dy' with dy' = f' * dy; the input of the activation f is computed again.
DEVICE A gradient(const ChannelNormParams& p, Index at, Index c, A xhat) {
    const A gamma = p.gamma ? parameter(p.gamma, p.gamma_float, c) : A(1), dy = widen(p.dy[at]);
    if (ACTIVATION < 0) return dy * gamma;
    const A z = p.gamma ? affine(p, c, xhat) : xhat;
    return fused_gradient(z, A(p.alpha), dy) * gamma;
}

// dx = inverse * (g - mean of g - xhat * mean of g * xhat), g = gamma * dy'; without the mean of g if not centered.
BLOCK_KERNEL(channel_backward, ChannelNormParams) {
    const Index channels = Index(p.channels), lanes = Index(blockDim.x);
    for (Index start = first_row(); start < Index(p.rows); start += row_step()) {
        const Index row = start + Index(threadIdx.y), base = row * channels;
        const bool active = row < Index(p.rows);
        const A mean = active ? p.moments[2 * row] : A(0), inverse = active ? p.moments[2 * row + 1] : A(0);
        A first = 0, second = 0;
        for (Index c = Index(threadIdx.x); active && c < channels; c += lanes) {
            const A xhat = (widen(p.x[base + c]) - mean) * inverse, g = gradient(p, base + c, c, xhat);
            first += g;
            second += g * xhat;
        }
        first = p.centered ? across_lanes<Add>(first) / A(channels) : A(0);
        second = across_lanes<Add>(second) / A(channels);
        for (Index c = Index(threadIdx.x); active && c < channels; c += lanes) {
            const A xhat = (widen(p.x[base + c]) - mean) * inverse, g = gradient(p, base + c, c, xhat);
            narrow(inverse * (g - first - xhat * second), p.dx[base + c]);
        }
    }
}
