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
    __syncthreads();
    row[lane] = value;
    __syncthreads();
    for (int half = lanes / 2; half > 0; half /= 2) {
        if (lane < half) row[lane] = Combine::of(row[lane], row[lane + half]);
        __syncthreads();
    }
    return row[0];
}
