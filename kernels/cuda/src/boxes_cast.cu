// Copies between pairs of strided boxes that convert, from SCALAR to SECOND. A word is V elements of either.
#include "pieces.cuh"

typedef SECOND S;

template <int V> struct Convert {
    typedef Vec<S, V> Word;
    DEVICE Word operator()(const Piece& piece, int64 source, const Word*) const {
        A values[V];
        load<V>((reinterpret_cast<const Vec<T, V>*>(piece.source) + source)->v, values);
        Word stored;
#pragma unroll
        for (int k = 0; k < V; ++k) narrow(values[k], stored.v[k]);
        return stored;
    }
};

KERNEL(convert_1, BoxesParams) { each_word<Vec<S, 1>>(p, Convert<1>()); }
KERNEL(convert_2, BoxesParams) { each_word<Vec<S, 2>>(p, Convert<2>()); }
KERNEL(convert_4, BoxesParams) { each_word<Vec<S, 4>>(p, Convert<4>()); }
