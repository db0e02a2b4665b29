// Sums per channel over the rows of arrays (batch, rows, channels), in two stages whose order never changes.
//
// A thread keeps V neighboring channels and goes down the rows TILE at a time: so many 16-byte loads are in flight, and
// a tile is summed in float before it is added to a double. The threads of a block with the same channels are added
// up as a tree; blocks leave partial sums, which the block that ends last adds up, in the order of the chunks. Grid:
// (channels, chunks of rows, batch).
#pragma once
#include "common.cuh"

#define TILE 8

struct Columns {
    Index channel, row, step, rows, channels, base;
    bool inside;
};

template <int V> DEVICE Columns columns(int64 rows, int64 channels) {
    Columns at;
    at.channel = (Index(blockIdx.x) * Index(blockDim.x) + Index(threadIdx.x)) * V;
    at.row = Index(blockIdx.y) * Index(blockDim.y) + Index(threadIdx.y);
    at.step = Index(gridDim.y) * Index(blockDim.y);
    at.rows = Index(rows);
    at.channels = Index(channels);
    at.base = Index(blockIdx.z) * at.rows * at.channels + at.channel;
    at.inside = at.channel < at.channels;
    return at;
}

// Element of the first of this thread's channels in row r.
DEVICE Index element(const Columns& at, Index r) { return at.base + r * at.channels; }

// The same, counted from the last row: a pass over rows that another pass has just read begins with those that are still
// in a cache (L2: some 25 MB of the last ones).
DEVICE Index from_end(const Columns& at, Index r) { return element(at, at.rows - 1 - r); }

// Add up the sums of two quantities over the threads of a block that have the same channels, as a tree; right where
// threadIdx.y is 0 only. All threads must come here.
template <int V> DEVICE void add_threads(double (&sums)[2][V]) {
    __shared__ double shared[2][256];
    const int lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + int(threadIdx.x);
    for (int k = 0; k < V; ++k) {
        __syncthreads();
        shared[0][thread] = sums[0][k];
        shared[1][thread] = sums[1][k];
        __syncthreads();
        for (int half = int(blockDim.y) / 2; half > 0; half /= 2) {
            if (int(threadIdx.y) < half) {
                shared[0][thread] += shared[0][thread + half * lanes];
                shared[1][thread] += shared[1][thread + half * lanes];
            }
            __syncthreads();
        }
        sums[0][k] = shared[0][thread];
        sums[1][k] = shared[1][thread];
    }
}

// Add up the sums over all chunks of rows: blocks leave theirs at partial[batch][chunk][quantity][channel], and the one
// that arrives last at arrived[batch][channels of a block], which is 0 before and after, adds them up. Returns whether
// this is that block; its sums are right where threadIdx.y is 0. All threads must come here.
template <int V> DEVICE bool add_chunks(const Columns& at, double (&sums)[2][V], double* partial, uint64* arrived) {
    __shared__ bool last;
    add_threads<V>(sums);
    const Index chunks = Index(gridDim.y);
    if (chunks == 1) return true;
    double* out = partial + (int64(blockIdx.z) * chunks + blockIdx.y) * 2 * at.channels;
    if (threadIdx.y == 0 && at.inside) {
        for (int k = 0; k < V; ++k) {
            out[at.channel + k] = sums[0][k];
            out[at.channels + at.channel + k] = sums[1][k];
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        uint64* count = arrived + int64(blockIdx.z) * gridDim.x + blockIdx.x;
        last = atomicAdd(count, uint64(1)) == uint64(chunks - 1);
        if (last) *count = 0;
    }
    __syncthreads();
    if (!last) return false;
    __threadfence();
    for (int k = 0; k < V; ++k) sums[0][k] = sums[1][k] = 0;
    if (at.inside) {
        // Not from a cache of this multiprocessor, which does not have what others have written since.
        const volatile double* from = partial + int64(blockIdx.z) * chunks * 2 * at.channels + at.channel;
        for (Index chunk = Index(threadIdx.y); chunk < chunks; chunk += Index(blockDim.y)) {
            for (int k = 0; k < V; ++k) {
                sums[0][k] += from[int64(chunk) * 2 * at.channels + k];
                sums[1][k] += from[(int64(chunk) * 2 + 1) * at.channels + k];
            }
        }
    }
    add_threads<V>(sums);
    return true;
}
