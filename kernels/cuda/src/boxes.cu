// Copies between pairs of strided boxes, all of a list in one launch: packing and unpacking of messages, copies that
// stay on the device, margins. By words of as many bytes as all addresses and strides are multiples of.
// A table in device memory describes the pieces; a piece has whole blocks of threads to itself.
#include "common.cuh"

#define AXES 5
#define WORDS_PER_BLOCK 1024

// Layout of a row of the table, int64: see kernels/cuda/boxes.py.
struct Piece {
    uint64 source;  // address, or the pattern to fill with
    uint64 target;
    int64 first_block;
    int64 words;
    int64 shape[AXES];
    int64 source_strides[AXES];  // in words
    int64 target_strides[AXES];
};

struct BoxesParams {
    const Piece* pieces;
    int64 count;
};

// The piece that block b works on: the last one that does not begin after it.
DEVICE const Piece& piece_of(const BoxesParams& p, int64 block) {
    int low = 0, high = int(p.count) - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (p.pieces[middle].first_block <= block) low = middle;
        else high = middle - 1;
    }
    return p.pieces[low];
}

struct Offsets {
    int64 source, target;
};

DEVICE Offsets offsets(const Piece& piece, Index word) {
    Offsets at = {0, 0};
#pragma unroll
    for (int axis = AXES - 1; axis >= 0; --axis) {
        const Index extent = Index(piece.shape[axis]);
        if (extent == 1) continue;
        const Index i = word % extent;
        word /= extent;
        at.source += int64(i) * piece.source_strides[axis];
        at.target += int64(i) * piece.target_strides[axis];
    }
    return at;
}

// All words of a thread are read before the first is written: so many loads are in flight.
template <class Word, class Action> DEVICE void each_word(const BoxesParams& p, Action value) {
    const int64 block = blockIdx.x;
    const Piece& piece = piece_of(p, block);
    const Index start = Index(block - piece.first_block) * WORDS_PER_BLOCK + Index(threadIdx.x);
    Word values[WORDS_PER_BLOCK / 256];
    Word* targets[WORDS_PER_BLOCK / 256];
#pragma unroll
    for (int k = 0; k < WORDS_PER_BLOCK / 256; ++k) {
        const Index word = start + k * 256;
        if (word >= Index(piece.words)) continue;
        const Offsets at = offsets(piece, word);
        targets[k] = reinterpret_cast<Word*>(piece.target) + at.target;
        values[k] = value(piece, at.source, targets[k]);
    }
#pragma unroll
    for (int k = 0; k < WORDS_PER_BLOCK / 256; ++k)
        if (start + k * 256 < Index(piece.words)) *targets[k] = values[k];
}

template <class Word> struct Copy {
    DEVICE Word operator()(const Piece& piece, int64 source, const Word*) const {
        return reinterpret_cast<const Word*>(piece.source)[source];
    }
};

template <class Word> struct Fill {
    DEVICE Word operator()(const Piece& piece, int64, const Word*) const { return Word(piece.source); }
};

struct alignas(16) Wide {
    uint64 low, high;
    Wide() = default;
    DEVICE explicit Wide(uint64 pattern) : low(pattern), high(pattern) {}
};

KERNEL(copy_1, BoxesParams) { each_word<uint8>(p, Copy<uint8>()); }
KERNEL(copy_2, BoxesParams) { each_word<uint16>(p, Copy<uint16>()); }
KERNEL(copy_4, BoxesParams) { each_word<uint32>(p, Copy<uint32>()); }
KERNEL(copy_8, BoxesParams) { each_word<uint64>(p, Copy<uint64>()); }
KERNEL(copy_16, BoxesParams) { each_word<Wide>(p, Copy<Wide>()); }
KERNEL(fill_1, BoxesParams) { each_word<uint8>(p, Fill<uint8>()); }
KERNEL(fill_2, BoxesParams) { each_word<uint16>(p, Fill<uint16>()); }
KERNEL(fill_4, BoxesParams) { each_word<uint32>(p, Fill<uint32>()); }
KERNEL(fill_8, BoxesParams) { each_word<uint64>(p, Fill<uint64>()); }
KERNEL(fill_16, BoxesParams) { each_word<Wide>(p, Fill<Wide>()); }

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
