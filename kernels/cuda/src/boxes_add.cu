// Sums of strided boxes into others: what comes back from a halo.
#include "pieces.cuh"

template <int V> struct AddInto {
    typedef Vec<T, V> Word;
    DEVICE Word operator()(const Piece& piece, int64 source, const Word* target) const {
        A sum[V], more[V];
        load<V>(target->v, sum);
        load<V>((reinterpret_cast<const Word*>(piece.source) + source)->v, more);
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] += more[k];
        Word stored;
        store<V>(sum, stored.v);
        return stored;
    }
};

KERNEL(add_into_1, BoxesParams) { each_word<Vec<T, 1>>(p, AddInto<1>()); }
KERNEL(add_into_v, BoxesParams) { each_word<Vec<T, VECTOR>>(p, AddInto<VECTOR>()); }
