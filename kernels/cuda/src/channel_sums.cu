// Sums over all rows of dy' and of dy' * xhat where every row has its own mean and standard deviation, and plain column
// sums.
#include "activation.cuh"
#include "columns.cuh"

struct ChannelSumsParams {
    const T* x;
    const T* dy;
    const void* gamma;  // or none
    const void* beta;   // or none
    int64 gamma_float;
    int64 beta_float;
    const A* moments;  // (rows, 2), or none: only the sums of dy are wanted
    double* partial;
    uint64* arrived;
    void* first;  // (channels) or none, of the codes' dtypes: sums of dy'
    void* second;
    int64 first_code;  // 0: T, 1: float, 2: double
    int64 second_code;
    int64 rows;
    int64 channels;
    double alpha;  // of the activation after the norm
};

DEVICE void put(double value, void* out, int64 code, Index i) {
    if (code == 2) static_cast<double*>(out)[i] = value;
    else set_parameter(value, out, code, i);
}

template <int V> DEVICE void row_sums(const ChannelSumsParams& p) {
    const Columns at = columns<V>(p.rows, p.channels);
    double sums[2][V] = {};
    if (at.inside) {
        A gamma[V], beta[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            gamma[k] = p.gamma ? parameter(p.gamma, p.gamma_float, at.channel + k) : A(1);
            beta[k] = p.beta ? parameter(p.beta, p.beta_float, at.channel + k) : A(0);
        }
        for (Index row = at.row; row < at.rows; row += TILE * at.step) {
            A first[V] = {}, second[V] = {};
#pragma unroll
            for (int t = 0; t < TILE; ++t) {
                const Index r = row + t * at.step;
                if (r >= at.rows) continue;
                A x[V], dy[V];
                load<V>(p.dy + element(at, r), dy);
                if (p.moments) load<V>(p.x + element(at, r), x);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const A xhat = p.moments ? (x[k] - p.moments[2 * r]) * p.moments[2 * r + 1] : A(0);
                    const A gradient = fused_gradient(xhat * gamma[k] + beta[k], A(p.alpha), dy[k]);
                    first[k] += gradient;
                    second[k] += gradient * xhat;
                }
            }
#pragma unroll
            for (int k = 0; k < V; ++k) {
                sums[0][k] += double(first[k]);
                sums[1][k] += double(second[k]);
            }
        }
    }
    if (!add_chunks<V>(at, sums, p.partial, p.arrived) || threadIdx.y != 0 || !at.inside) return;
    for (int k = 0; k < V; ++k) {
        if (p.first) put(sums[0][k], p.first, p.first_code, at.channel + k);
        if (p.second) put(sums[1][k], p.second, p.second_code, at.channel + k);
    }
}

SHARING_KERNEL(row_sums_1, ChannelSumsParams) { row_sums<1>(p); }
SHARING_KERNEL(row_sums_v, ChannelSumsParams) { row_sums<VECTOR>(p); }
