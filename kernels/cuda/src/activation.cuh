// Activations and their derivatives. A program compiled with ACTIVATION, the number of a kind, has that one in kernels
// that compute something else: at compile time, so that they take no more registers than they need.
//
// No function is formed as a difference of nearly equal numbers, but of exp(-|x|) where there is an exponential: near
// saturation the result has the relative error of a few roundings. Derivatives are formed from the input for that
// reason, those of ReLU and leaky ReLU also from the output.
#pragma once
#include "common.cuh"

#ifndef ACTIVATION
#define ACTIVATION -1
#endif

// In the order of ACTIVATIONS of kernels/pointwise.py. Neither of the switches below has a default: with -Werror=switch
// a compiler refuses a kind without a case, and a number that is no kind gives NaN.
enum Kind {
    RELU,
    LEAKY_RELU,
    SIGMOID,
    TANH,
    GELU,
    SILU,
    ELU,
    HARD_SIGMOID,
    HARD_SWISH,
    SOFTPLUS,
    MISH,
    GELU_TANH,
};
static_assert(ACTIVATION <= GELU_TANH, "no such kind of activation");

DEVICE A magnitude(A x) { return x < A(0) ? -x : x; }
DEVICE A decay(A x) { return exp(-magnitude(x)); }

// The sigmoid of x, and its derivative, from e = exp(-|x|).
DEVICE A sigmoid(A x, A e) { return (x < A(0) ? e : A(1)) / (A(1) + e); }
DEVICE A bell(A e) { return e / (A(1) + e) / (A(1) + e); }

// min(max(x + 3, 0), 6) / 6, and NaN for NaN.
DEVICE A hard_sigmoid(A x) {
    const A h = x + A(3);
    return h < A(0) ? A(0) : h > A(6) ? A(1) : h / A(6);
}

// log(1 + exp(x)) without overflow, and NaN for NaN.
DEVICE A softplus(A x) { return rectify(x) + log1p(decay(x)); }

// exp(-x^2 / 2). The square in two parts: the error of a large exponent would be multiplied by it.
DEVICE A gaussian(A x) {
    const A size = magnitude(x), a = size > A(64) ? A(64) : size, square = a * a;
    return exp(A(-0.5) * square) * (A(1) - A(0.5) * fma(a, a, -square));
}

// The tail of the normal distribution beyond |x|, divided by gaussian(x).
DEVICE A scaled_tail(A x) { return A(0.5) * erfcx(magnitude(x) * A(0.70710678118654752440)); }

#define GELU_LINEAR 1.5957691216057308
#define GELU_CUBIC 0.07135481627260025
// exp(-|w|) with w = GELU_LINEAR x + GELU_CUBIC x^3, the exponent in two parts; the constants, too, have a second one.
DEVICE A cubic_decay(A x) {
    const A size = magnitude(x), a = size > A(64) ? A(64) : size;
    const A linear = A(GELU_LINEAR), cubic = A(GELU_CUBIC);
    const A linear_rest = A(GELU_LINEAR - double(linear)) + A(-9.96930880911092e-17);
    const A cubic_rest = A(GELU_CUBIC - double(cubic)) + A(-6.175149918155315e-19);
    const A square = a * a, square_rest = fma(a, a, -square);
    const A product = cubic * square;
    const A product_rest = fma(cubic, square, -product) + cubic * square_rest + cubic_rest * square;
    // Rounded once each: a fused multiplication and addition would count the product's second part twice.
    const A sum = plus(linear, product), part = plus(sum, -linear);
    const A sum_rest = (linear - (sum - part)) + plus(product, -part) + linear_rest + product_rest;
    const A w = a * sum;
    return exp(-w) * (A(1) - (fma(a, sum, -w) + a * sum_rest));
}

// Mish is x n / d with n = a (a + 2 b), d = n + 2 b^2, a = exp(min(x, 0)) and b = exp(min(-x, 0)).
struct Mish {
    A a, b, n, d;
};
DEVICE Mish mish_terms(A x) {
    const A e = decay(x), a = x < A(0) ? e : A(1), b = x < A(0) ? A(1) : e, n = a * (a + A(2) * b);
    return {a, b, n, n + A(2) * b * b};
}

DEVICE A activated(Kind kind, A x, A alpha) {
    switch (kind) {
        case RELU: return rectify(x);
        case LEAKY_RELU: return x > A(0) ? x : alpha * x;
        case SIGMOID: return sigmoid(x, decay(x));
        case TANH: return tanh(x);
        case GELU: {
            const A tail = gaussian(x) * scaled_tail(x);
            return x * (x < A(0) ? tail : A(1) - tail);
        }
        case SILU: return x * sigmoid(x, decay(x));
        case ELU: return x > A(0) ? x : alpha * expm1(x);
        case HARD_SIGMOID: return hard_sigmoid(x);
        case HARD_SWISH: return x * hard_sigmoid(x);
        case SOFTPLUS: return softplus(x);
        case MISH: {
            const Mish m = mish_terms(x);
            return x * (m.n / m.d);
        }
        case GELU_TANH: return x * sigmoid(x, cubic_decay(x));
    }
    return A(INFINITY) - A(INFINITY);
}

// The derivative. `from` is the input; for ReLU, and for leaky ReLU that keeps the sign, it may be the output.
DEVICE A slope(Kind kind, A from, A alpha) {
    const A x = from;
    switch (kind) {
        case RELU: return x > A(0) ? A(1) : A(0);
        case LEAKY_RELU: return x > A(0) ? A(1) : alpha;
        case SIGMOID: return bell(decay(x));
        // 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|), without the difference.
        case TANH: return A(4) * bell(decay(A(2) * x));
        case GELU: {
            // The exponential outside: the tail alone may be so small that it is flushed to 0.
            const A tail = scaled_tail(x), density = A(0.39894228040143267794);
            return x < A(0) ? gaussian(x) * (tail + x * density) : A(1) - gaussian(x) * (tail - x * density);
        }
        case SILU: {
            const A e = decay(x);
            return sigmoid(x, e) + x * bell(e);
        }
        case ELU: return x > A(0) ? A(1) : alpha * exp(x);
        case HARD_SIGMOID: return magnitude(x) < A(3) ? A(1.0 / 6) : A(0);
        case HARD_SWISH: return magnitude(x) < A(3) ? (x + x + A(3)) / A(6) : x < A(0) ? A(0) : A(1);
        case SOFTPLUS: return sigmoid(x, decay(x));
        case MISH: {
            const Mish m = mish_terms(x);
            return (m.n + A(4) * x * m.a * m.b * m.b * (m.a + m.b) / m.d) / m.d;
        }
        case GELU_TANH: {
            const A e = cubic_decay(x), rate = A(GELU_LINEAR) + A(3 * GELU_CUBIC) * x * x;
            return sigmoid(x, e) + x * rate * bell(e);
        }
    }
    return A(INFINITY) - A(INFINITY);
}

// The gradient of the input, from slope `s` and the gradient `dy` of the output. Where the slope of a flat part is 0,
// so is the product with an infinity or NaN.
DEVICE A chained(Kind kind, A s, A dy) {
    const bool flat = kind == RELU || kind == HARD_SIGMOID || kind == HARD_SWISH;
    return flat && s == A(0) ? A(0) : s * dy;
}

// The activation of this program, and the gradient of its input; without one, x and dy are returned unchanged.
DEVICE A fused(A x, A alpha) { return ACTIVATION < 0 ? x : activated(Kind(ACTIVATION), x, alpha); }
DEVICE A fused_gradient(A x, A alpha, A dy) {
    return ACTIVATION < 0 ? dy : chained(Kind(ACTIVATION), slope(Kind(ACTIVATION), x, alpha), dy);
}
