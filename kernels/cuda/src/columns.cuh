// Sums per channel over the rows of arrays (batch, rows, channels), in two stages whose order never changes.
//
// A thread keeps V neighboring channels and goes down the rows TILE at a time: so many 16-byte loads are in flight, and
// a tile is summed in float before it is added to a double. The threads of a block with the same channels are added
// up as a tree; blocks leave partial sums, which `finish` adds up. Grid: (channels, chunks of rows, batch).
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

// Leave the block's sums of two quantities at partial[batch][chunk][quantity][channel]. All threads must come here.
template <int V> DEVICE void leave_partial(const Columns& at, double (&sums)[2][V], double* partial) {
    __shared__ double shared[2][256];
    const int lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + int(threadIdx.x);
    double* out = partial + (int64(blockIdx.z) * gridDim.y + blockIdx.y) * 2 * at.channels;
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
        if (threadIdx.y == 0 && at.inside) {
            out[at.channel + k] = shared[0][thread];
            out[at.channels + at.channel + k] = shared[1][thread];
        }
    }
}

// The sums over all chunks, by blocks of (8 channels, 32 threads); right where threadIdx.y is 0 only.
DEVICE void add_partials(const double* partial, Index chunks, Index channels, Index channel, double (&sums)[2]) {
    __shared__ double shared[2][256];
    const int lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + int(threadIdx.x);
    double first = 0, second = 0;
    if (channel < channels) {
        const double* from = partial + int64(blockIdx.z) * chunks * 2 * channels + channel;
        for (Index chunk = Index(threadIdx.y); chunk < chunks; chunk += Index(blockDim.y)) {
            first += from[int64(chunk) * 2 * channels];
            second += from[(int64(chunk) * 2 + 1) * channels];
        }
    }
    shared[0][thread] = first;
    shared[1][thread] = second;
    __syncthreads();
    for (int half = int(blockDim.y) / 2; half > 0; half /= 2) {
        if (int(threadIdx.y) < half) {
            shared[0][thread] += shared[0][thread + half * lanes];
            shared[1][thread] += shared[1][thread + half * lanes];
        }
        __syncthreads();
    }
    sums[0] = shared[0][thread];
    sums[1] = shared[1][thread];
}
