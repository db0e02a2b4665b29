// Random bits from counters: the same for any decomposition, as in kernels/numpy/pointwise.py.
#pragma once
#include "common.cuh"

#define GOLDEN 0x9E3779B97F4A7C15ull

// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
DEVICE uint64 mix(uint64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The key of a layer at a step; `state` is [seed, step, first sample].
DEVICE uint64 key_of(const uint64* state, uint64 salt) {
    return mix(mix(mix(state[0] + GOLDEN) + state[1] + GOLDEN) + salt + GOLDEN);
}
