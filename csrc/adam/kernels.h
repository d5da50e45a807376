// What one instruction set's kernels offer. Plain data only: this header is compiled with every set's flags, and an
// inline function of the standard library would be emitted with them too and could then run on any machine.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace infinity::adam {

// Elements worked on at a time: the scratch for them stays in the L1 cache.
constexpr size_t kBlock = 256;
// Elements of one piece of work, and of one partial sum. Fixed, so that sums do not depend on the number of threads.
constexpr size_t kChunk = 128 * kBlock;
// Elements that share the scale of an 8-bit moment; kBlock is a multiple.
constexpr size_t kScaleBlock = 256;

enum class Dtype : int { f32, bf16, f16 };

enum class Rule : int { adamw, adam, adagrad, lion, sgd };

// How the parameter lies in memory; the optimizer always works on its fp32 value.
enum class ParamKind : int {
    f32,    // float param
    split,  // bf16 param and the int16 that completes it to the fp32 master, see [Note: split] in convert.h
    master, // fp16 param, the rounded copy of a float master; where it is not, it was written and is the master
};

enum class MomentKind : int {
    f32,
    bf16, // stochastically rounded
    int8, // 8-bit floats with a scale for every kScaleBlock, see [Note: 8-bit moments] in quantize.h
};

// The numbers of one step, rounded from double once; infinity/kernels/rules.py fills them in.
struct Scalars {
    float grad_scale;   // gradient factor: 1 / loss scale * clip coefficient
    float param_factor; // decoupled decay: 1 - lr * weight_decay, else 1
    float l2;           // coupled decay: weight_decay, else 0
    float step_size;    // negative: what the direction is multiplied with
    float m_factor;     // share of the old first moment in Lion's and SGD's
    float m_weight;     // weight of the gradient in the first moment
    float v_factor;     // share of the old second moment
    float v_weight;     // weight of the squared gradient in the second moment
    float blend;        // Lion: weight of the gradient in the direction; SGD: 1 for Nesterov's, else 0
    float inv_bias2;    // Adam: 1 / sqrt(1 - beta2^step)
    float eps;
};

struct Moment {
    void* values; // null where the rule has none
    float* scales;
};

// Buffers like those of an update, so that its old values stay somewhere; null where they need not.
struct Aside {
    void* param;   // the old values go here, the new ones in place
    void* master;  // the new values go here, and the old ones stay in place
    Moment first;  // like `master`
    Moment second; // like `master`
};

// Elements of which an update's states do not tell the gradient, or the bits of the parameter before it: their
// positions (and bits) go where there is room, and all are counted.
struct Lost {
    uint32_t* positions;
    size_t room;
    size_t count;
    uint32_t* param_positions; // null where nobody asks; room for all
    uint16_t* param_bits;
    size_t param_count;
};

struct UpdateArgs {
    Rule rule;
    ParamKind param_kind;
    MomentKind moment_kind;
    Dtype grad_dtype;
    void* param;
    void* master;  // split: the low bits; master: the fp32 master
    Moment first;  // signed: exp_avg, momentum
    Moment second; // not negative: exp_avg_sq, sum of squares
    const void* grad;
    Scalars scalars;
    uint64_t seed;  // of stochastic rounding, new for every step
    uint64_t index; // of the first element, among those that share the seed
    Aside aside;
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
    // Of an adamw update with gradients of 16 bits and fp32 moments, and of split parameters, `lost` can be told; else
    // it is null.
    void (*update)(const UpdateArgs&, size_t begin, size_t end, Lost* lost);
    // Returns the sum of squares of what was stored: not finite exactly when one of the stored values is not.
    double (*grad_store)(const GradArgs&, size_t begin, size_t end);
    void (*split)(const float* master, uint16_t* param, int16_t* low_bits, size_t n);
    void (*join)(const uint16_t* param, const int16_t* low_bits, float* master, size_t n);
    // `update`'s way of keeping moments, by itself; n starts at a multiple of kScaleBlock.
    void (*load_moment)(MomentKind kind, bool is_signed, const Moment& moment, float* out, size_t n);
    void (*store_moment)(MomentKind kind, bool is_signed, const Moment& moment, const float* values, size_t n,
                         uint64_t seed, uint64_t index);
    // The gradients, of 16 bits, of an adamw update that has made the fp32 first moment `after` of `before`.
    void (*reconstruct_grads)(const float* before, const float* after, const Scalars&, Dtype dtype, void* grad,
                              size_t n);
    // Split parameters before such an update, in place of those after it; the moments are those after it.
    void (*reconstruct_params)(uint16_t* param, const int16_t* low_before, const int16_t* low_after, const float* first,
                               const float* second, const Scalars&, size_t n);
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
