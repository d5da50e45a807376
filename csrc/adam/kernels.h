// What one instruction set's kernels offer. Plain data only: this header is compiled with every set's flags, and an
// inline function of the standard library would be emitted with them too and could then run on any machine.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace infinity::adam {

// Elements worked on at a time: the scratch for them stays in the L1 cache.
constexpr size_t kBlock = 512;
// Elements of one piece of work, and of one partial sum. Fixed, so that sums do not depend on the number of threads.
constexpr size_t kChunk = 64 * kBlock;

enum class Dtype : int { f32, bf16, f16 };

// How the parameter lies in memory; the optimizer always works on its fp32 value.
enum class ParamKind : int {
    f32,   // float param
    split, // bf16 param and the int16 that completes it to the fp32 master, see [Note: split] in convert.h
};

// The numbers of one Adam step, rounded from double once.
struct AdamScalars {
    float grad_scale;   // gradient factor: 1 / loss scale * clip coefficient
    float param_factor; // 1 - lr * weight_decay when decoupled, else 1
    float l2;           // weight_decay when coupled, else 0
    float m_weight;     // 1 - beta1
    float v_factor;     // beta2
    float v_weight;     // 1 - beta2
    float neg_step;     // -lr / (1 - beta1^step)
    float inv_bias2;    // 1 / sqrt(1 - beta2^step)
    float eps;
};

struct UpdateArgs {
    ParamKind param_kind;
    void* param;
    void* low_bits; // split only
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    Dtype grad_dtype;
    AdamScalars scalars;
};

struct GradArgs {
    void* dst;
    Dtype dst_dtype;
    const void* src;
    Dtype src_dtype;
    bool accumulate;
    float scale;
};

struct Kernels {
    const char* name;
    // Both work on elements [begin, end); begin is a multiple of kBlock.
    void (*update)(const UpdateArgs&, size_t begin, size_t end);
    // Returns the sum of squares of what was stored: not finite exactly when one of the stored values is not.
    double (*grad_store)(const GradArgs&, size_t begin, size_t end);
    void (*split)(const float* master, uint16_t* param, int16_t* low_bits, size_t n);
    void (*join)(const uint16_t* param, const int16_t* low_bits, float* master, size_t n);
    // The roofline of `update` for fp32: the same streams, in place, with next to no arithmetic.
    void (*bare)(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, size_t n);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

} // namespace infinity::adam
