// Blocks of (lanes, rows): the lanes of a row share its channels, and add up or compare what they found.
#pragma once
#include "common.cuh"

struct Add {
    DEVICE static A of(A a, A b) { return a + b; }
};
struct Maximum {
    DEVICE static A of(A a, A b) { return a < b || a != a ? b : a; }
};

// `value` of all lanes of the row, combined; the same in every lane. All threads of the block must come here.
template <class Combine> DEVICE A across_lanes(A value) {
    const int lanes = int(blockDim.x), lane = int(threadIdx.x);
    if (lanes == 1) return value;
    __shared__ A shared[256];
    A* row = shared + int(threadIdx.y) * lanes;
    // A call before this one may still be reading its result.
    __syncthreads();
    row[lane] = value;
    __syncthreads();
    for (int half = lanes / 2; half > 0; half /= 2) {
        if (lane < half) row[lane] = Combine::of(row[lane], row[lane + half]);
        __syncthreads();
    }
    return row[0];
}

// Loops over rows: every block has the same number of steps for all its threads, as they must all reach the barriers.
// Threads whose row lies after the last one compute nothing, but stay in the loop.
DEVICE Index first_row() { return Index(blockIdx.x) * Index(blockDim.y); }
DEVICE Index row_step() { return Index(gridDim.x) * Index(blockDim.y); }
