// Sums per channel over the rows of arrays (batch, rows, channels), in two stages whose order never changes.
//
// A thread keeps V neighboring channels and goes down the rows TILE at a time: so many 16-byte loads are in flight, and
// a tile is summed in float before it is added to a double. The threads of a block with the same channels are added
// up in shared memory; blocks leave partial sums, which the block that ends last adds up. Grid: (channels, chunks of
// rows, batch), 256 threads.
#pragma once
#include "common.cuh"

#define TILE 8
#define IN_FLIGHT 8  // loads of a thread that adds up partial sums

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

// The same, counted from the last row: a pass over rows that another pass has just read begins with those that are
// still in a cache (L2: some 25 MB of the last ones).
DEVICE Index from_end(const Columns& at, Index r) { return element(at, at.rows - 1 - r); }

// Memory of a block for the sums of its threads: a row of them after the other, with a gap, so that rows begin at
// different banks.
#define SHARED_SUMS(V) (256 * (2 * V + 1))

// Add up `parts` rows of `columns` numbers in shared memory, and take the sums of this thread's channels: those of one
// thread are `next` apart, and those of neighboring threads `lane`.
template <int V>
DEVICE void add_parts(double (&sums)[2][V], double* shared, int columns, int parts, int next, int lane) {
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    double sum = 0;
    if (thread < columns) {
        for (int part = 0; part < parts; ++part) sum += shared[part * columns + thread];
    }
    // The first row of sums overwrites a part: all threads must have read the parts, and then find the sums.
    __syncthreads();
    if (thread < columns) shared[thread] = sum;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; ++k) {
        sums[0][k] = shared[int(threadIdx.x) * lane + k * next];
        sums[1][k] = shared[int(threadIdx.x) * lane + k * next + columns / 2];
    }
}

// Add up the sums of two quantities over the threads of a block that have the same channels, in an order that never
// changes; right where threadIdx.y is 0 only. All threads must come here.
template <int V> DEVICE void add_threads(double (&sums)[2][V], double* shared) {
    const int lanes = int(blockDim.x), rows = int(blockDim.y), columns = 2 * V * lanes;
    const int thread = int(threadIdx.y) * lanes + int(threadIdx.x);
    // Several threads add up parts of the rows of one sum. All extents are powers of two, and a block has at most 8
    // lanes of 8 channels (kernels/cuda/columns.py), so each of the 256 threads has a part, and a sum at least two.
    const int parts = 256 / columns, part_rows = rows / parts;
    const int column = thread % columns, first = thread / columns * part_rows;
    double* row = shared + int(threadIdx.y) * (columns + lanes) + int(threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; ++k) {
        row[k * lanes] = sums[0][k];
        row[(V + k) * lanes] = sums[1][k];
    }
    __syncthreads();
    double found = 0;
    for (int y = 0; y < part_rows; ++y) found += shared[(first + y) * (columns + lanes) + column];
    __syncthreads();
    shared[thread] = found;
    __syncthreads();
    add_parts<V>(sums, shared, columns, parts, lanes, 1);
}

// Add up the sums over all chunks of rows: blocks leave theirs at partial[batch][chunk][quantity][channel], and the one
// that arrives last at arrived[batch][channels of a block], which is 0 before and after, adds them up. Returns whether
// this is that block; its sums are right where threadIdx.y is 0. All threads must come here.
template <int V> DEVICE bool add_chunks(const Columns& at, double (&sums)[2][V], double* partial, uint64* arrived) {
    __shared__ double shared[SHARED_SUMS(V)];
    __shared__ bool last;
    add_threads<V>(sums, shared);
    const int chunks = int(gridDim.y);
    if (chunks == 1) return true;
    double* out = partial + (int64(blockIdx.z) * chunks + blockIdx.y) * 2 * at.channels;
    if (threadIdx.y == 0 && at.inside) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            out[at.channel + k] = sums[0][k];
            out[at.channels + at.channel + k] = sums[1][k];
        }
    }
    // Other blocks must see the partial sums before they see this block's arrival.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        uint64* count = arrived + int64(blockIdx.z) * gridDim.x + blockIdx.x;
        last = atomicAdd(count, uint64(1)) == uint64(chunks - 1);
        // For the next launch: within a graph, the host cannot clear it.
        if (last) *count = 0;
    }
    __syncthreads();
    if (!last) return false;
    // The partial sums of the others, too, are read only after all of them have arrived.
    __threadfence();
    // Neighboring threads take neighboring channels; several take parts of the chunks of one sum, as in `add_threads`.
    // Many loads are in flight: the block is alone, and the next launch waits for it.
    const int width = int(blockDim.x) * V, columns = 2 * width, parts = 256 / columns;
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    const int column = thread % columns, channel = int(blockIdx.x) * width + column % width;
    double sum = 0;
    if (channel < int(at.channels)) {
        const double* from = partial + (int64(blockIdx.z) * chunks * 2 + column / width) * at.channels + channel;
        for (int chunk = thread / columns; chunk < chunks; chunk += IN_FLIGHT * parts) {
            double read[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int next = chunk + i * parts;
                read[i] = next < chunks ? from_l2(from + int64(next) * 2 * at.channels) : 0;
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) sum += read[i];
        }
    }
    shared[thread] = sum;
    __syncthreads();
    add_parts<V>(sums, shared, columns, parts, 1, V);
    return true;
}
