// Attention of any rule, see kernels/attention.py: a row of LANES threads computes one query, or one key, of one head.
// Scores are computed where they are used, and never stored: forward twice, for the sum of exponentials and for the
// weighted sum of the values; backward again for each gradient.
#include "counters.cuh"
#include "rows.cuh"

#define AXES 3
#define LANES 64

enum Rule { EVERYWHERE, WINDOWS, NEIGHBORHOOD };

struct AttentionParams {
    const T* q;  // (samples, queries, heads, d)
    const T* k;  // (samples, keys, key_heads, d)
    const T* v;  // (samples, keys, key_heads, e)
    const void* bias;  // (all heads, *tables), or none
    T* y;
    A* lse;
    const T* dy;
    T* dq;
    T* dk;
    T* dv;
    void* dbias;
    A* delta;  // (samples, queries, heads): sum of dy * y, written with dq
    int64 bias_float;
    int64 rule[AXES];
    int64 size[AXES];
    int64 extent[AXES];
    int64 shift[AXES];
    int64 dilation[AXES];
    int64 query_start[AXES];
    int64 query_count[AXES];
    int64 key_start[AXES];
    int64 key_count[AXES];
    int64 table[AXES];  // extents of the table of biases
    int64 most;         // keys that a query reads, or queries that may read a key, at most
    int64 samples;
    int64 heads;
    int64 key_heads;
    int64 first_head;  // global number of the first head of q
    int64 groups;
    int64 d;
    int64 e;
    double scale;
    int64 merge;
    const uint64* state;  // of dropout, or none
    uint64 salt;
    uint64 threshold;
    uint64 base;
    uint64 sample;
    uint64 steps[8];  // GOLDEN * stride of sample, head, queries, keys in the array of all probabilities
    double kept;      // factor of the probabilities that dropout keeps
};

struct Range {
    Index first, count, step;
};

DEVICE Index floor_mod(Index a, Index b) { return ((a % b) + b) % b; }

// First key, counted among those of one remainder, that a query of a neighborhood reads.
DEVICE Index first_neighbor(const AttentionParams& p, int axis, Index query) {
    // With a dilation, a query reads only keys of its own remainder: a sequence of `length` keys.
    const Index remainder = query % Index(p.dilation[axis]);
    const Index length = (Index(p.size[axis]) - remainder + Index(p.dilation[axis]) - 1) / Index(p.dilation[axis]);
    // At the ends the neighborhood is moved inwards, so that it keeps its extent.
    const Index last = larger(length - Index(p.extent[axis]), Index(0));
    return smaller(larger(query / Index(p.dilation[axis]) - Index(p.extent[axis]) / 2, Index(0)), last);
}

// The positions from `first` to before `stop`, by `step`, that lie in a block of `count` positions from `start` on.
DEVICE Range clipped(Index first, Index stop, Index step, Index start, Index count) {
    // To the first position of the sequence that is not before the block.
    if (first < start) first += (start - first + step - 1) / step * step;
    stop = smaller(stop, start + count);
    Range range = {first, first < stop ? (stop - first + step - 1) / step : 0, step};
    return range;
}

// The local keys that a query reads.
DEVICE Range keys_of(const AttentionParams& p, int axis, Index query) {
    const Index start = Index(p.key_start[axis]), count = Index(p.key_count[axis]), extent = Index(p.extent[axis]);
    if (p.rule[axis] == EVERYWHERE) return clipped(start, start + count, 1, start, count);
    if (p.rule[axis] == WINDOWS) {
        // The window that holds the query; the shift may make the first one begin before 0.
        const Index begin = query - floor_mod(query - Index(p.shift[axis]), extent);
        return clipped(begin, begin + extent, 1, start, count);
    }
    const Index step = Index(p.dilation[axis]), first = first_neighbor(p, axis, query) * step + query % step;
    return clipped(first, first + extent * step, step, start, count);
}

// The local queries that may read a key.
DEVICE Range queries_of(const AttentionParams& p, int axis, Index key) {
    const Index start = Index(p.query_start[axis]), count = Index(p.query_count[axis]), extent = Index(p.extent[axis]);
    if (p.rule[axis] == EVERYWHERE) return clipped(start, start + count, 1, start, count);
    if (p.rule[axis] == WINDOWS) {
        const Index begin = key - floor_mod(key - Index(p.shift[axis]), extent);
        return clipped(begin, begin + extent, 1, start, count);
    }
    const Index step = Index(p.dilation[axis]);
    // More than those that read the key: at the ends neighborhoods are moved. `reads` decides.
    return clipped(key - (extent - 1) * step, key + (extent - 1) * step + 1, step, start, count);
}

DEVICE bool reads(const AttentionParams& p, int axis, Index query, Index key) {
    const Range keys = keys_of(p, axis, query);
    const Index distance = key - keys.first;
    return distance >= 0 && distance % keys.step == 0 && distance / keys.step < keys.count;
}

struct Position {
    Index at[AXES];  // global
};

DEVICE Position position_of(const int64 (&start)[AXES], const int64 (&count)[AXES], Index local) {
    Position found;
    for (int axis = AXES - 1; axis >= 0; --axis) {
        found.at[axis] = Index(start[axis]) + local % Index(count[axis]);
        local /= Index(count[axis]);
    }
    return found;
}

DEVICE Index local_of(const int64 (&start)[AXES], const int64 (&count)[AXES], const Position& position) {
    Index local = 0;
    for (int axis = 0; axis < AXES; ++axis) local = local * Index(count[axis]) + position.at[axis] - Index(start[axis]);
    return local;
}

// Element `number` of the product of the ranges.
DEVICE Position element_of(const Range (&ranges)[AXES], Index number) {
    Position found;
    for (int axis = AXES - 1; axis >= 0; --axis) {
        found.at[axis] = ranges[axis].first + number % ranges[axis].count * ranges[axis].step;
        number /= ranges[axis].count;
    }
    return found;
}

DEVICE Index size_of(const Range (&ranges)[AXES]) { return ranges[0].count * ranges[1].count * ranges[2].count; }

// A query and a key of one sample and head, and the rows of q and k that hold their vectors.
struct Pair {
    Index sample, head;  // head: local
    Position query, key;
    Index row;     // of the query: (sample, query, head)
    Index column;  // of the key: (sample, key, key head)
};

DEVICE Index key_head(const AttentionParams& p, Index head) {
    return (Index(p.first_head) + head) / Index(p.groups) - Index(p.first_head) / Index(p.groups);
}

DEVICE Pair pair_of(const AttentionParams& p, Index sample, Index head, const Position& query, const Position& key) {
    Pair pair = {sample, head, query, key, 0, 0};
    const Index queries = Index(p.query_count[0]) * Index(p.query_count[1]) * Index(p.query_count[2]);
    const Index keys = Index(p.key_count[0]) * Index(p.key_count[1]) * Index(p.key_count[2]);
    pair.row = (sample * queries + local_of(p.query_start, p.query_count, query)) * Index(p.heads) + head;
    pair.column = (sample * keys + local_of(p.key_start, p.key_count, key)) * Index(p.key_heads) + key_head(p, head);
    return pair;
}

DEVICE A dot(const T* a, const T* b, Index count) {
    A sum = 0;
#pragma unroll 1
    for (Index c = 0; c < count; ++c) sum += widen(a[c]) * widen(b[c]);
    return sum;
}

DEVICE A score(const AttentionParams& p, const Pair& pair) {
    const A s = dot(p.q + pair.row * Index(p.d), p.k + pair.column * Index(p.d), Index(p.d)) * A(p.scale);
    if (!p.bias) return s;
    // The table holds all heads, and per axis the distances -(extent - 1) to extent - 1, in steps of the dilation.
    Index entry = Index(p.first_head) + pair.head;
    for (int axis = 0; axis < AXES; ++axis)
        entry = entry * Index(p.table[axis]) +
                (pair.query.at[axis] - pair.key.at[axis]) / Index(p.dilation[axis]) + Index(p.extent[axis]) - 1;
    return s + parameter(p.bias, p.bias_float, Index(entry));
}

// Factor of a probability by dropout.
DEVICE A kept(const AttentionParams& p, const Pair& pair) {
    if (!p.state) return A(1);
    uint64 counter = key_of(p.state, p.salt) + p.base + p.state[2] * p.sample;
    // Unsigned products and sums are those of the index times GOLDEN, modulo 2^64.
    counter += uint64(pair.sample) * p.steps[0] + uint64(pair.head) * p.steps[1];
    for (int axis = 0; axis < AXES; ++axis) {
        counter += uint64(pair.query.at[axis] - Index(p.query_start[axis])) * p.steps[2 + axis];
        counter += uint64(pair.key.at[axis] - Index(p.key_start[axis])) * p.steps[5 + axis];
    }
    return mix(counter) < p.threshold ? A(0) : A(p.kept);
}

// Probability of a pair, and the gradient of its score.
DEVICE A gradient_of(const AttentionParams& p, const Pair& pair, A& probability) {
    const A lse = p.lse[pair.row], factor = kept(p, pair);
    // A query without keys: exp(score - lse) would be infinite.
    const A all = lse == -INFINITY ? A(0) : A(exp(score(p, pair) - lse));
    const A dp = dot(p.dy + pair.row * Index(p.e), p.v + pair.column * Index(p.e), Index(p.e));
    // Set to 0, not multiplied: a probability that is not finite must not come back from a dropped pair.
    probability = factor == A(0) ? A(0) : all * factor;
    return all * ((factor == A(0) ? A(0) : dp * factor) - p.delta[pair.row]);
}

DEVICE Index larger_width(const AttentionParams& p) { return larger(Index(p.d), Index(p.e)); }

// y = sum over keys of exp(score - lse) v with lse = log(sum over keys of exp(score)): backward needs lse to find the
// probabilities again.
BLOCK_KERNEL(attention_forward, AttentionParams) {
    __shared__ A weights[256];  // LANES for each row of the block
    const int lane = int(threadIdx.x), own = int(threadIdx.y) * LANES;
    const Index queries = Index(p.query_count[0]) * Index(p.query_count[1]) * Index(p.query_count[2]);
    const Index rows = Index(p.samples) * queries * Index(p.heads);
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < rows;
        const Index head = row % Index(p.heads), sample = row / Index(p.heads) / queries;
        const Position query = position_of(p.query_start, p.query_count, row / Index(p.heads) % queries);
        Range ranges[AXES];
        for (int axis = 0; axis < AXES; ++axis) ranges[axis] = keys_of(p, axis, query.at[axis]);
        const Index count = active ? size_of(ranges) : 0;
        // Each lane keeps a maximum and a sum relative to it, which is scaled when the maximum rises (online softmax).
        A peak = -INFINITY, total = 0, broken = 0;
        for (Index j = lane; j < count; j += LANES) {
            const A s = score(p, pair_of(p, sample, head, query, element_of(ranges, j)));
            // A bias masks this key.
            if (s == -INFINITY) continue;
            broken += s - s;  // NaN, which maxima drop
            const A highest = Maximum::of(peak, s);
            total = total * (peak == -INFINITY ? A(0) : A(exp(peak - highest))) + A(exp(s - highest));
            peak = highest;
        }
        // Results for the keys before count as one more key, in lane 0.
        const A before = active && p.merge ? p.lse[row] : A(-INFINITY);
        const A highest = across_lanes<Maximum>(Maximum::of(peak, before));
        total = peak == -INFINITY ? A(0) : total * A(exp(peak - highest));
        if (lane == 0 && before != -INFINITY) total += A(exp(before - highest));
        total = across_lanes<Add>(total + broken);
        const A lse = total == A(0) ? A(-INFINITY) : highest + A(log(total));
        // The share of the results before in the sum over all keys.
        const A old = before == -INFINITY ? A(0) : A(exp(before - lse));
        // 64 channels of the values at a time, a lane for each; within, 64 keys at a time: lanes share their weights.
        for (Index first = 0; first < Index(p.e); first += LANES) {
            const Index c = first + lane;
            A sum = active && p.merge && c < Index(p.e) ? widen(p.y[row * Index(p.e) + c]) * old : A(0);
            // To `most` and not to `count`, which differs between rows: all threads must reach the barriers.
            for (Index chunk = 0; chunk < Index(p.most); chunk += LANES) {
                A weight = 0;
                if (chunk + lane < count && lse != -INFINITY) {
                    const Pair pair = pair_of(p, sample, head, query, element_of(ranges, chunk + lane));
                    const A factor = kept(p, pair);
                    weight = factor == A(0) ? A(0) : factor * A(exp(score(p, pair) - lse));
                }
                // All lanes have used the weights of the chunk before.
                __syncthreads();
                weights[own + lane] = weight;
                __syncthreads();
                for (int j = 0; c < Index(p.e) && j < LANES && chunk + j < count; ++j) {
                    const Pair pair = pair_of(p, sample, head, query, element_of(ranges, chunk + j));
                    sum += weights[own + j] * widen(p.v[pair.column * Index(p.e) + c]);
                }
            }
            if (active && c < Index(p.e)) narrow(sum, p.y[row * Index(p.e) + c]);
        }
        if (active && lane == 0) p.lse[row] = lse;
    }
}

// dq = scale * sum over keys of dscore k with dscore = probability (dp - delta), dp = dy . v and delta = dy . y.
BLOCK_KERNEL(attention_queries, AttentionParams) {
    __shared__ A weights[256];
    const int lane = int(threadIdx.x), own = int(threadIdx.y) * LANES;
    const Index queries = Index(p.query_count[0]) * Index(p.query_count[1]) * Index(p.query_count[2]);
    const Index rows = Index(p.samples) * queries * Index(p.heads);
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < rows;
        const Index head = row % Index(p.heads), sample = row / Index(p.heads) / queries;
        const Position query = position_of(p.query_start, p.query_count, row / Index(p.heads) % queries);
        Range ranges[AXES];
        for (int axis = 0; axis < AXES; ++axis) ranges[axis] = keys_of(p, axis, query.at[axis]);
        const Index count = active ? size_of(ranges) : 0;
        A sum = 0;
        if (active) {
            const T *dy = p.dy + row * Index(p.e), *y = p.y + row * Index(p.e);
            for (Index c = lane; c < Index(p.e); c += LANES) sum += widen(dy[c]) * widen(y[c]);
        }
        sum = across_lanes<Add>(sum);
        if (active) p.delta[row] = sum;  // the same in all lanes
        for (Index first = 0; first < Index(p.d); first += LANES) {
            const Index c = first + lane;
            A found = 0;
            // To `most`, as in forward: all threads must reach the barriers.
            for (Index chunk = 0; chunk < Index(p.most); chunk += LANES) {
                A probability, weight = 0;
                if (chunk + lane < count)
                    weight = gradient_of(
                        p, pair_of(p, sample, head, query, element_of(ranges, chunk + lane)), probability);
                __syncthreads();
                weights[own + lane] = weight;
                __syncthreads();
                for (int j = 0; c < Index(p.d) && j < LANES && chunk + j < count; ++j) {
                    const Pair pair = pair_of(p, sample, head, query, element_of(ranges, chunk + j));
                    found += weights[own + j] * widen(p.k[pair.column * Index(p.d) + c]);
                }
            }
            if (!active || c >= Index(p.d)) continue;
            T& target = p.dq[row * Index(p.d) + c];
            narrow((p.merge ? widen(target) : A(0)) + found * A(p.scale), target);
        }
    }
}

// dk = scale * sum over queries of dscore q, and dv = sum over queries of probability dy, for all query heads that
// share this head of the keys.
BLOCK_KERNEL(attention_keys, AttentionParams) {
    __shared__ A weights[256], probabilities[256];
    const int lane = int(threadIdx.x), own = int(threadIdx.y) * LANES;
    const Index keys = Index(p.key_count[0]) * Index(p.key_count[1]) * Index(p.key_count[2]);
    const Index rows = Index(p.samples) * keys * Index(p.key_heads);
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < rows;
        const Index shared_head = row % Index(p.key_heads), sample = row / Index(p.key_heads) / keys;
        const Position key = position_of(p.key_start, p.key_count, row / Index(p.key_heads) % keys);
        Range ranges[AXES];
        for (int axis = 0; axis < AXES; ++axis) ranges[axis] = queries_of(p, axis, key.at[axis]);
        const Index count = active ? size_of(ranges) : 0;
        // Local heads of the queries that read this head of the keys: from `least` to before `least + groups`.
        const Index groups = Index(p.groups), first_head = Index(p.first_head);
        const Index least = (first_head / groups + shared_head) * groups - first_head;
        // One loop for the channels of dk and dv, of which there may be different numbers.
        for (Index first = 0; first < larger_width(p); first += LANES) {
            const Index c = first + lane;
            A found_k = 0, found_v = 0;
            for (Index group = 0; group < Index(p.groups); ++group) {
                const Index head = least + group;
                // A rank may hold only some heads of a group.
                const bool held = head >= 0 && head < Index(p.heads);
                for (Index chunk = 0; chunk < Index(p.most); chunk += LANES) {
                    A probability = 0, weight = 0;
                    if (held && chunk + lane < count) {
                        const Position query = element_of(ranges, chunk + lane);
                        bool allowed = true;
                        // `queries_of` may list more queries than read this key.
                        for (int axis = 0; axis < AXES; ++axis)
                            allowed = allowed && reads(p, axis, query.at[axis], key.at[axis]);
                        if (allowed) weight = gradient_of(p, pair_of(p, sample, head, query, key), probability);
                    }
                    __syncthreads();
                    weights[own + lane] = weight;
                    probabilities[own + lane] = probability;
                    __syncthreads();
                    for (int j = 0; held && j < LANES && chunk + j < count; ++j) {
                        const Pair pair = pair_of(p, sample, head, element_of(ranges, chunk + j), key);
                        if (c < Index(p.d)) found_k += weights[own + j] * widen(p.q[pair.row * Index(p.d) + c]);
                        if (c < Index(p.e)) found_v += probabilities[own + j] * widen(p.dy[pair.row * Index(p.e) + c]);
                    }
                }
            }
            if (active && c < Index(p.d)) narrow(found_k * A(p.scale), p.dk[row * Index(p.d) + c]);
            if (active && c < Index(p.e)) narrow(found_v, p.dv[row * Index(p.e) + c]);
        }
    }
}

// A row per entry of the table: the sum over all pairs of its distance.
BLOCK_KERNEL(attention_bias, AttentionParams) {
    const int lane = int(threadIdx.x);
    const Index queries = Index(p.query_count[0]) * Index(p.query_count[1]) * Index(p.query_count[2]);
    const Index entries = Index(p.table[0]) * Index(p.table[1]) * Index(p.table[2]), rows = Index(p.heads) * entries;
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        A sum = 0;
        for (Index j = lane; row < rows && j < Index(p.samples) * queries; j += LANES) {
            const Position query = position_of(p.query_start, p.query_count, j % queries);
            Position key;
            Index entry = row % entries;
            bool allowed = true;
            // The entry of a query and a key is their distance plus extent - 1 (see `score`): it gives the key.
            for (int axis = AXES - 1; axis >= 0; --axis) {
                const Index distance = entry % Index(p.table[axis]) - Index(p.extent[axis]) + 1;
                key.at[axis] = query.at[axis] - distance * Index(p.dilation[axis]);
                entry /= Index(p.table[axis]);
                allowed = allowed && reads(p, axis, query.at[axis], key.at[axis]);
            }
            A probability;
            if (allowed) sum += gradient_of(p, pair_of(p, j / queries, row / entries, query, key), probability);
        }
        const double found = double(across_lanes<Add>(sum));
        if (row >= rows || lane > 0) continue;
        const Index at = Index(p.first_head) * entries + row;
        const double old = p.merge ? double(parameter(p.dbias, p.bias_float, at)) : 0.0;
        set_parameter(old + found, p.dbias, p.bias_float, at);
    }
}
