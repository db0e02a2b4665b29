// Steps around an attention that another library computes, see kernels/cudnn/attention.py.
#include "rows.cuh"

#define AXES 3
#define LANES 64

struct MergeParams {
    const T* part;   // (samples, queries, heads, e): results for further keys
    const A* stats;  // (samples, heads, queries): their logarithms of sums of exponentials
    T* y;            // results for the keys before, updated
    A* lse;          // (samples, queries, heads), updated
    int64 samples;
    int64 queries;
    int64 heads;
    int64 e;
};

struct BiasSumsParams {
    const T* matrix;  // (heads, queries of a tile, keys of a tile): gradient of what each pair adds
    void* dbias;      // (all heads, *tables), increased
    int64 bias_float;
    int64 query_count[AXES];
    int64 key_count[AXES];
    int64 origin[AXES];  // entry of the first query and the first key
    int64 table[AXES];
    int64 heads;
    int64 first_head;
};

// lse = log(exp(before) + exp(more)); each of the two results has the weight exp(its own lse - lse).
BLOCK_KERNEL(attention_merge, MergeParams) {
    const Index rows = Index(p.samples) * Index(p.queries) * Index(p.heads);
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y);
        const bool active = row < rows;
        const Index head = row % Index(p.heads), position = row / Index(p.heads);
        const Index sample = position / Index(p.queries), query = position % Index(p.queries);
        const A before = active ? p.lse[row] : A(0);
        const A more = active ? p.stats[(sample * Index(p.heads) + head) * Index(p.queries) + query] : A(0);
        const A highest = Maximum::of(before, more);
        const bool none = highest == -INFINITY;  // no keys so far: -inf - -inf would be NaN
        const A lse = none ? highest : highest + A(log(A(exp(before - highest)) + A(exp(more - highest))));
        __syncthreads();  // all lanes have read the old number
        if (!active) continue;
        const A old = none ? A(0) : A(exp(before - lse)), added = none ? A(0) : A(exp(more - lse));
        for (Index c = Index(threadIdx.x); c < Index(p.e); c += LANES) {
            T& target = p.y[row * Index(p.e) + c];
            narrow(widen(target) * old + widen(p.part[row * Index(p.e) + c]) * added, target);
        }
        if (threadIdx.x == 0) p.lse[row] = lse;
    }
}

// A row per entry of the table: the sum over all pairs of its distance.
BLOCK_KERNEL(attention_bias_sums, BiasSumsParams) {
    const Index queries = Index(p.query_count[0]) * Index(p.query_count[1]) * Index(p.query_count[2]);
    const Index keys = Index(p.key_count[0]) * Index(p.key_count[1]) * Index(p.key_count[2]);
    const Index entries = Index(p.table[0]) * Index(p.table[1]) * Index(p.table[2]), rows = Index(p.heads) * entries;
    for (Index start = first_row(); start < rows; start += row_step()) {
        const Index row = start + Index(threadIdx.y), head = row / entries;
        A sum = 0;
        for (Index query = Index(threadIdx.x); row < rows && query < queries; query += LANES) {
            Index entry = row % entries, rest = query, key = 0, step = 1;
            bool allowed = true;
            // Entry = position of the query - position of the key + origin, per axis: at most one key per query.
            for (int axis = AXES - 1; axis >= 0; --axis) {
                const Index count = Index(p.key_count[axis]);
                const Index at = rest % Index(p.query_count[axis]) + Index(p.origin[axis]) -
                                 entry % Index(p.table[axis]);
                allowed = allowed && at >= 0 && at < count;
                key += at * step;
                step *= count;
                rest /= Index(p.query_count[axis]);
                entry /= Index(p.table[axis]);
            }
            if (allowed) sum += widen(p.matrix[(head * queries + query) * keys + key]);
        }
        const double found = double(across_lanes<Add>(sum));
        if (row >= rows || threadIdx.x > 0) continue;
        const Index target = Index(p.first_head) * entries + row;
        set_parameter(double(parameter(p.dbias, p.bias_float, target)) + found, p.dbias, p.bias_float, target);
    }
}
