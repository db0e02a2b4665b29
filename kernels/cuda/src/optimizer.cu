// Updates of flat buckets: masters and states of SCALAR (float or double), gradients of SECOND, and a copy of the
// parameters in THIRD where layers compute in less. What changes from step to step lies on the device, so that a
// captured step needs no new arguments.
#include "common.cuh"

typedef SECOND G;
typedef THIRD C;

struct UpdateParams {
    T* p;
    const G* g;
    const C* rounded;     // gradients in the dtype of the copy, or none
    const uint8* rounds;  // bit k of byte i: these are read for elements 16 (8 i + k) and the 15 after it
    T* v;  // momentum, or the first moment; none for plain descent
    T* m;  // the second moment
    C* copy;                // or none
    const double* scalars;  // learning rate, gradient scale, 1 - beta1^step, sqrt(1 - beta2^step), weight of p
    const int* skip;        // nonzero: change nothing; or none
    int64 count;
    int64 decayed;          // leading elements with weight decay, where there is no mask
    const uint8* mask;      // bit k of byte i: element 4 i + k has weight decay; or none
    double weight_decay;
    double momentum;        // or beta1
    double beta2;
    double epsilon;
    int64 nesterov;
    int64 decoupled;
    const int64* segments;  // (count of parameters, 3): start, stop, decayed
    double* partial;        // (parameters, chunks, 2)
    int64 chunks;
    double trust;
};

DEVICE bool has_decay(const UpdateParams& u, Index i) {
    return u.mask ? (u.mask[i / 4] >> (i % 4)) & 1 : i < Index(u.decayed);
}

template <class Element, int V> DEVICE void load_as(const Element* from, A (&to)[V]) {
    const Vec<Element, V> loaded = *reinterpret_cast<const Vec<Element, V>*>(from);
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = A(widen(loaded.v[k]));
}

template <int V> DEVICE void load_gradients(const UpdateParams& u, Index i, A (&to)[V]) {
    if (u.rounded && (u.rounds[i / 128] >> (i / 16 % 8)) & 1) load_as<C, V>(u.rounded + i, to);
    else load_as<G, V>(u.g + i, to);
}

DEVICE A gradient(const UpdateParams& u, Index i) {
    A g[1];
    load_gradients<1>(u, i, g);
    return g[0];
}

template <class Rule, int V> DEVICE void update(const UpdateParams& u, Index i, const Rule& rule) {
    A p[V], g[V], v[V], m[V];
    load<V>(u.p + i, p);
    load_gradients<V>(u, i, g);
    if (u.v) load<V>(u.v + i, v);
    if (u.m) load<V>(u.m + i, m);
#pragma unroll
    for (int k = 0; k < V; ++k) rule(p[k], g[k], v[k], m[k], has_decay(u, i + k));
    store<V>(p, u.p + i);
    if (u.v) store<V>(v, u.v + i);
    if (u.m) store<V>(m, u.m + i);
    if (u.copy) {
        Vec<C, V> low;
#pragma unroll
        for (int k = 0; k < V; ++k) narrow(p[k], low.v[k]);
        *reinterpret_cast<Vec<C, V>*>(u.copy + i) = low;
    }
}

// The bulk in vectors of V, the rest one by one.
template <class Rule, int V> DEVICE void update_all(const UpdateParams& u, const Rule& rule) {
    // Set where a gradient is not finite (loss scaling): decided on the device, without a wait of the host.
    if (u.skip && *u.skip) return;
    const Index bulk = Index(u.count) / V;
    for (Index item = first_item(); item < bulk; item += item_step()) update<Rule, V>(u, item * V, rule);
    if (V > 1) {
        // Fewer than V elements are left, one for each of the first threads of the grid.
        const Index i = bulk * V + first_item();
        if (i < Index(u.count)) update<Rule, 1>(u, i, rule);
    }
}

struct Descent {
    A rate, scale, decay, momentum;
    bool has_momentum, nesterov;
    DEVICE explicit Descent(const UpdateParams& u)
        : rate(A(u.scalars[0])), scale(A(u.scalars[1])), decay(A(u.weight_decay)), momentum(A(u.momentum)),
          has_momentum(u.v != 0), nesterov(u.nesterov != 0) {}
    // As torch.optim.SGD without dampening.
    DEVICE void operator()(A& p, A g, A& v, A&, bool decayed) const {
        g *= scale;
        if (decayed) g += decay * p;
        if (has_momentum) {
            v = momentum * v + g;
            g = nesterov ? g + momentum * v : v;
        }
        p -= rate * g;
    }
};

struct AdamRule {
    A rate, scale, decay, shrink, first_step, beta2, second_step, epsilon, correction;
    bool decoupled;
    // Formed in double: as a float, 1 - beta2 would have lost digits.
    DEVICE explicit AdamRule(const UpdateParams& u)
        : rate(A(u.scalars[0] / u.scalars[2])), scale(A(u.scalars[1])), decay(A(u.weight_decay)),
          shrink(A(1 - u.scalars[0] * u.weight_decay)), first_step(A(1 - u.momentum)), beta2(A(u.beta2)),
          second_step(A(1 - u.beta2)), epsilon(A(u.epsilon)), correction(A(u.scalars[3])),
          decoupled(u.decoupled != 0) {}
    // Here `v` is the first moment and `m` the second.
    DEVICE void operator()(A& p, A g, A& v, A& m, bool decayed) const {
        g *= scale;
        if (decayed && !decoupled) g += decay * p;
        v += (g - v) * first_step;
        m = m * beta2 + g * g * second_step;
        if (decayed && decoupled) p *= shrink;
        // In the order of torch: epsilon is added to the corrected root; the rate has the divisor of the first moment.
        p -= rate * (v / (sqrt(m) / correction + epsilon));
    }
};

// Here `p` is the average and `g` the parameter.
struct Averaging {
    A weight;
    DEVICE explicit Averaging(const UpdateParams& u) : weight(A(u.scalars[4])) {}
    DEVICE void operator()(A& p, A g, A&, A&, bool) const { p += weight * (g - p); }
};

KERNEL(sgd_1, UpdateParams) { update_all<Descent, 1>(p, Descent(p)); }
KERNEL(sgd_4, UpdateParams) { update_all<Descent, 4>(p, Descent(p)); }
KERNEL(adam_1, UpdateParams) { update_all<AdamRule, 1>(p, AdamRule(p)); }
KERNEL(adam_4, UpdateParams) { update_all<AdamRule, 4>(p, AdamRule(p)); }
KERNEL(average_1, UpdateParams) { update_all<Averaging, 1>(p, Averaging(p)); }
KERNEL(average_4, UpdateParams) { update_all<Averaging, 4>(p, Averaging(p)); }

// LARS, first half: squares of each parameter and of its gradient. Grid: (chunks, parameters).
BLOCK_KERNEL(lars_norms, UpdateParams) {
    const int64* segment = p.segments + 3 * int64(blockIdx.y);
    double parameters = 0, gradients = 0;
    for (Index i = Index(segment[0]) + first_item(); i < Index(segment[1]); i += item_step()) {
        const double a = double(widen(p.p[i])), b = double(gradient(p, i));
        parameters += a * a;
        gradients += b * b;
    }
    double* out = p.partial + (int64(blockIdx.y) * gridDim.x + blockIdx.x) * 2;
    const double first = block_sum(parameters);
    if (threadIdx.x == 0) out[0] = first;
    const double second = block_sum(gradients);
    if (threadIdx.x == 0) out[1] = second;
}

// Second half: every block adds the partial squares up again, and updates its part.
BLOCK_KERNEL(lars, UpdateParams) {
    __shared__ A rate;
    const int64* segment = p.segments + 3 * int64(blockIdx.y);
    const double* squares = p.partial + int64(blockIdx.y) * p.chunks * 2;
    double parameters = 0, gradients = 0;
    for (int i = int(threadIdx.x); i < int(p.chunks); i += int(blockDim.x)) {
        parameters += squares[2 * i];
        gradients += squares[2 * i + 1];
    }
    parameters = block_sum(parameters);
    const double norm = sqrt(parameters);
    gradients = block_sum(gradients);
    if (threadIdx.x == 0) {
        // The local rate of You, Gitman and Ginsburg (2017): trust |p| / (|g| + weight_decay |p|).
        const double below = sqrt(gradients) * p.scalars[1] + p.weight_decay * norm;
        // Parameters without weight decay (biases, norms) keep the global rate, and so does one that is 0.
        const bool scaled = segment[2] && norm > 0 && below > 0;
        rate = A(p.scalars[0] * (scaled ? p.trust * norm / below : 1.0));
    }
    __syncthreads();
    if (p.skip && *p.skip) return;
    const A scale = A(p.scalars[1]), decay = segment[2] ? A(p.weight_decay) : A(0);
    for (Index i = Index(segment[0]) + first_item(); i < Index(segment[1]); i += item_step()) {
        const A parameter = widen(p.p[i]);
        A v = widen(p.v[i]) * A(p.momentum) + rate * (gradient(p, i) * scale + decay * parameter);
        narrow(v, p.v[i]);
        narrow(parameter - v, p.p[i]);
        if (p.copy) narrow(parameter - v, p.copy[i]);
    }
}
