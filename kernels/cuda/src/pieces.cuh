// Loops over the words of strided boxes, all boxes of a list in one launch. A table in device memory describes the
// pieces; a piece has whole blocks of threads to itself.
#pragma once
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
        // Axes that the table was filled up with: no division.
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
        // The last block of a piece is partly empty.
        if (word >= Index(piece.words)) continue;
        const Offsets at = offsets(piece, word);
        targets[k] = reinterpret_cast<Word*>(piece.target) + at.target;
        values[k] = value(piece, at.source, targets[k]);
    }
#pragma unroll
    for (int k = 0; k < WORDS_PER_BLOCK / 256; ++k)
        if (start + k * 256 < Index(piece.words)) *targets[k] = values[k];
}
