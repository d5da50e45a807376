// Runs the kernels over whole tensors, on all threads.
#pragma once

#include "kernels.h"

#include <optional>
#include <vector>

namespace infinity::adam {

struct GradStats {
    double sum_sq;
    bool finite;
};

void run_update(const UpdateArgs& args, size_t n);
// Positions of elements whose old values cannot be reconstructed from the states of an update, in order.
struct LostOfUpdate {
    std::optional<std::vector<uint32_t>> grads; // none if there are too many
    std::vector<uint32_t> params;
    std::vector<uint16_t> param_bits; // the old bits of these parameters
};

// As `run_update`. Returns the elements for which `run_reconstruct_grads` and `run_reconstruct_params` would be wrong.
LostOfUpdate run_update_reporting_lost(const UpdateArgs& args, size_t n, bool params);
void run_reconstruct_grads(const float* before, const float* after, const Scalars& scalars, Dtype dtype, void* grad,
                           size_t n);
GradStats run_grad_store(const GradArgs& args, size_t n);
void run_reconstruct_params(uint16_t* param, const int16_t* low_before, const int16_t* low_after, const float* first,
                            const float* second, const Scalars& scalars, size_t n);
void run_split(const float* master, uint16_t* param, int16_t* low_bits, size_t n);
void run_join(const uint16_t* param, const int16_t* low_bits, float* master, size_t n);
void run_load_moment(MomentKind kind, bool is_signed, const Moment& moment, float* out, size_t n);
void run_store_moment(MomentKind kind, bool is_signed, const Moment& moment, const float* values, size_t n,
                      uint64_t seed, uint64_t index);
void run_bare(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, size_t n);

} // namespace infinity::adam
