// Activations and their derivatives. A program compiled with ACTIVATION, the number of a kind, has that one in kernels
// that compute something else: at compile time, so that they take no more registers than they need.
#pragma once
#include "common.cuh"

#ifndef ACTIVATION
#define ACTIVATION -1
#endif

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

// The activation of this program, and its derivative, at what it is given.
DEVICE A fused(A x, A alpha) { return ACTIVATION < 0 ? x : activated(ACTIVATION, x, alpha); }
DEVICE A fused_slope(A x, A alpha) {
    return ACTIVATION < 0 ? A(1) : slope(ACTIVATION, x, activated(ACTIVATION, x, alpha), alpha);
}
