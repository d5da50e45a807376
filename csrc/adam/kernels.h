// The interface of the kernels of one instruction set. Plain data only: this header is compiled with the flags of every
// set, and the linker could keep an inline function that was compiled for a set that the machine does not have.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace infinity::adam {

// Elements that are processed at a time, so that their scratch memory stays in the L1 cache.
constexpr size_t kBlock = 256;
// Elements of one task, and of one partial sum. Fixed, so that sums do not depend on the number of threads.
constexpr size_t kChunk = 128 * kBlock;
// Elements that share the scale of an 8-bit moment; kBlock is a multiple.
constexpr size_t kScaleBlock = 256;

enum class Dtype : int { f32, bf16, f16 };

enum class Rule : int { adamw, adam, adagrad, lion, sgd };

// How the parameter is stored. The optimizer always computes with its fp32 value.
enum class ParamKind : int {
    f32,    // float param
    split,  // bf16 param and the int16 that completes it to the fp32 master, see [Note: split] in convert.h
    master, // fp16 param, the rounded copy of a float master; if it differs, it was written and replaces the master
};

enum class MomentKind : int {
    f32,
    bf16, // stochastically rounded
    int8, // 8-bit floats with a scale for every kScaleBlock, see [Note: 8-bit moments] in quantize.h
};

// The numbers of one step, rounded once from double. infinity/kernels/rules.py computes them.
struct Scalars {
    float grad_scale;   // gradient factor: 1 / loss scale * clip coefficient
    float param_factor; // decoupled decay: 1 - lr * weight_decay, else 1
    float l2;           // coupled decay: weight_decay, else 0
    float step_size;    // factor of the direction; negative
    float m_factor;     // share of the old first moment in the new one (Lion, SGD)
    float m_weight;     // weight of the gradient in the first moment
    float v_factor;     // share of the old second moment
    float v_weight;     // weight of the squared gradient in the second moment
    float blend;        // Lion: weight of the gradient in the direction; SGD: 1 for Nesterov's, else 0
    float inv_bias2;    // Adam: 1 / sqrt(1 - beta2^step)
    float eps;
};

struct Moment {
    void* values; // null if the rule has none
    float* scales;
};

// Further buffers of an update, which keep its old values; null for values that need not be kept.
struct Aside {
    void* param;   // the old values go here, the new ones in place
    void* master;  // the new values go here, and the old ones stay in place
    Moment first;  // like `master`
    Moment second; // like `master`
};

// Elements whose gradient, or whose old parameter, cannot be reconstructed from the states of an update. Positions (and
// old bits of parameters) are stored as long as the buffer has space; all elements are counted.
struct Lost {
    uint32_t* positions;
    size_t room; // elements of `positions`
    size_t count;
    uint32_t* param_positions; // null if not requested; has space for all elements
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
    uint64_t index; // position of the first element among those that share the seed
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
    // `update` and `grad_store` process elements [begin, end); begin is a multiple of kBlock.
    // `lost` needs adamw, 16-bit gradients and fp32 moments, and its `param_positions` split parameters; else null.
    void (*update)(const UpdateArgs&, size_t begin, size_t end, Lost* lost);
    // Returns the sum of squares of the stored values. It is finite if and only if all of them are.
    double (*grad_store)(const GradArgs&, size_t begin, size_t end);
    void (*split)(const float* master, uint16_t* param, int16_t* low_bits, size_t n);
    void (*join)(const uint16_t* param, const int16_t* low_bits, float* master, size_t n);
    // Convert a moment between the format of `update` and fp32, from an index that is a multiple of kScaleBlock.
    void (*load_moment)(MomentKind kind, bool is_signed, const Moment& moment, float* out, size_t n);
    void (*store_moment)(MomentKind kind, bool is_signed, const Moment& moment, const float* values, size_t n,
                         uint64_t seed, uint64_t index);
    // Reconstructs the 16-bit gradients of an adamw update, which has changed the fp32 first moment from `before` to
    // `after`.
    void (*reconstruct_grads)(const float* before, const float* after, const Scalars&, Dtype dtype, void* grad,
                              size_t n);
    // Replaces split parameters after such an update by those before it. The moments are those after the update.
    void (*reconstruct_params)(uint16_t* param, const int16_t* low_before, const int16_t* low_after, const float* first,
                               const float* second, const Scalars&, size_t n);
    // The roofline of `update` for fp32: the same reads and writes, in place, with almost no arithmetic.
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
