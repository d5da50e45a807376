#include "run.h"

#include "dispatch.h"
#include "pool.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace infinity::adam {
namespace {

// The most lost gradients of a chunk that are kept one by one. With their positions they take 1/43 of the memory of all
// gradients; usually a tenth of this number is lost.
constexpr size_t kMostLost = kChunk / 128;

// Calls body(chunk, begin, end) for the fixed chunks of [0, n).
template <class Body> void for_chunks(size_t n, const Body& body) {
    parallel_for((n + kChunk - 1) / kChunk, [&](size_t chunk) {
        const size_t begin = chunk * kChunk;
        body(chunk, begin, std::min(n, begin + kChunk));
    });
}

} // namespace

void run_update(const UpdateArgs& args, size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) { kernels.update(args, begin, end, nullptr); });
}

LostOfUpdate run_update_reporting_lost(const UpdateArgs& args, size_t n, bool params) {
    const Kernels& kernels = active_kernels();
    const size_t chunks = (n + kChunk - 1) / kChunk;
    std::vector<uint32_t> positions(chunks * kMostLost);
    // Not initialized, so that pages without a lost element are never allocated.
    const std::unique_ptr<uint32_t[]> param_positions(params ? new uint32_t[n] : nullptr);
    const std::unique_ptr<uint16_t[]> param_bits(params ? new uint16_t[n] : nullptr);
    std::vector<Lost> lost(chunks);
    for_chunks(n, [&](size_t chunk, size_t begin, size_t end) {
        lost[chunk] = {
            positions.data() + chunk * kMostLost,        kMostLost, 0, params ? param_positions.get() + begin : nullptr,
            params ? param_bits.get() + begin : nullptr, 0};
        kernels.update(args, begin, end, &lost[chunk]);
    });
    LostOfUpdate all;
    all.grads.emplace();
    for (const Lost& part : lost) {
        if (part.count > part.room)
            all.grads.reset();
        if (all.grads)
            all.grads->insert(all.grads->end(), part.positions, part.positions + part.count);
        all.params.insert(all.params.end(), part.param_positions, part.param_positions + part.param_count);
        all.param_bits.insert(all.param_bits.end(), part.param_bits, part.param_bits + part.param_count);
    }
    return all;
}

void run_reconstruct_grads(const float* before, const float* after, const Scalars& scalars, Dtype dtype, void* grad,
                           size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) {
        uint16_t* out = static_cast<uint16_t*>(grad) + begin;
        kernels.reconstruct_grads(before + begin, after + begin, scalars, dtype, out, end - begin);
    });
}

GradStats run_grad_store(const GradArgs& args, size_t n) {
    const Kernels& kernels = active_kernels();
    std::vector<double> sums((n + kChunk - 1) / kChunk);
    for_chunks(n, [&](size_t chunk, size_t begin, size_t end) { sums[chunk] = kernels.grad_store(args, begin, end); });
    double total = 0.0;
    for (const double sum : sums)
        total += sum;
    return {total, std::isfinite(total)}; // squares of finite floats cannot overflow a double
}

void run_reconstruct_params(uint16_t* param, const int16_t* low_before, const int16_t* low_after, const float* first,
                            const float* second, const Scalars& scalars, size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) {
        kernels.reconstruct_params(param + begin, low_before + begin, low_after + begin, first + begin, second + begin,
                                   scalars, end - begin);
    });
}

void run_split(const float* master, uint16_t* param, int16_t* low_bits, size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) {
        kernels.split(master + begin, param + begin, low_bits + begin, end - begin);
    });
}

void run_join(const uint16_t* param, const int16_t* low_bits, float* master, size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) {
        kernels.join(param + begin, low_bits + begin, master + begin, end - begin);
    });
}

void run_load_moment(MomentKind kind, bool is_signed, const Moment& moment, float* out, size_t n) {
    active_kernels().load_moment(kind, is_signed, moment, out, n);
}

void run_store_moment(MomentKind kind, bool is_signed, const Moment& moment, const float* values, size_t n,
                      uint64_t seed, uint64_t index) {
    active_kernels().store_moment(kind, is_signed, moment, values, n, seed, index);
}

void run_bare(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, size_t n) {
    const Kernels& kernels = active_kernels();
    for_chunks(n, [&](size_t, size_t begin, size_t end) {
        kernels.bare(param + begin, exp_avg + begin, exp_avg_sq + begin, grad + begin, end - begin);
    });
}

} // namespace infinity::adam
