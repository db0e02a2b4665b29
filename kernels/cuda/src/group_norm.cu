// Group norms: what lies between the sums of each channel (norm.cu) and the statistics of its group. Vectors of a few
// hundred numbers, in double.
#include "common.cuh"

struct GroupParams {
    const double* sums;  // (batch, 2, channels)
    double* totals;      // (batch, 2, groups)
    double* means;       // (batch, 2, channels)
    const void* gamma;   // or none
    int64 gamma_float;
    void* mean;
    void* var;
    int64 mean_float;
    int64 var_float;
    void* first;  // (channels): sums of the first and second quantity over the batch
    void* second;
    int64 first_float;
    int64 second_float;
    int64 batch;
    int64 groups;
    int64 channels;
    double scale;  // of totals
};

// totals = scale * sum over the channels of each group of sums (times gamma).
KERNEL(group_totals, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * 2 * p.groups);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index group = item % Index(p.groups), set = item / Index(p.groups);
        double sum = 0;
        for (Index c = group * members; c < (group + 1) * members; ++c) {
            const double weight = p.gamma ? double(parameter(p.gamma, p.gamma_float, c)) : 1.0;
            sum += p.sums[set * Index(p.channels) + c] * weight;
        }
        p.totals[item] = sum * p.scale;
    }
}

// mean and variance from totals [E x, E x^2].
KERNEL(group_moments, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * p.channels);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index sample = item / Index(p.channels), group = item % Index(p.channels) / members;
        const double* found = p.totals + sample * 2 * Index(p.groups) + group;
        const double mean = found[0];
        set_parameter(mean, p.mean, p.mean_float, item);
        const double var = found[Index(p.groups)] - mean * mean;
        // Rounding may leave the variance of a constant group below 0.
        set_parameter(not_negative(var), p.var, p.var_float, item);
    }
}

// means of every channel are those of its group.
KERNEL(group_spread, GroupParams) {
    const Index members = Index(p.channels / p.groups), total = Index(p.batch * 2 * p.channels);
    for (Index item = first_item(); item < total; item += item_step()) {
        const Index set = item / Index(p.channels), group = item % Index(p.channels) / members;
        p.means[item] = p.totals[set * Index(p.groups) + group];
    }
}

// The two quantities summed over the batch.
KERNEL(sum_samples, GroupParams) {
    const Index channels = Index(p.channels);
    for (Index c = first_item(); c < channels; c += item_step()) {
        double first = 0, second = 0;
        for (Index n = 0; n < Index(p.batch); ++n) {
            first += p.sums[2 * n * channels + c];
            second += p.sums[(2 * n + 1) * channels + c];
        }
        set_parameter(first, p.first, p.first_float, c);
        set_parameter(second, p.second, p.second_float, c);
    }
}
