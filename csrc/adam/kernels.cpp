// The kernels, compiled once per instruction set with INFINITY_ISA naming it. The plain loops are the specification:
// IEEE operations in a fixed order, no fused multiply-add, so every set gives the same bits.
//
// Work goes by blocks. A block's values are brought to fp32, in scratch where memory holds another type and in place
// where it already is fp32; the rule runs on four float pointers; the results go back. So each rule is one loop, each
// memory format is one load and one store, and they combine freely.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace infinity::adam::INFINITY_ISA {
namespace {

#include "convert.h"

inline size_t block_end(size_t begin, size_t end) {
    return end - begin < kBlock ? end : begin + kBlock;
}

// --- loads and stores of one block ----------------------------------------------------------------------------------

void widen_bf16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
    for (size_t i = 0; i < n; ++i)
        dst[i] = bf16_to_f32(src[i]);
}

void widen_f16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
    for (size_t i = 0; i < n; ++i)
        dst[i] = f16_to_f32(src[i]);
}

void narrow_bf16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
    for (size_t i = 0; i < n; ++i)
        dst[i] = f32_to_bf16(src[i]);
}

void narrow_f16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
    for (size_t i = 0; i < n; ++i)
        dst[i] = f32_to_f16(src[i]);
}

// The n values from index `begin` as fp32: where they lie, or in scratch.
const float* load(const void* base, Dtype dtype, size_t begin, size_t n, float* scratch) {
    switch (dtype) {
    case Dtype::f32:
        return static_cast<const float*>(base) + begin;
    case Dtype::bf16:
        widen_bf16(static_cast<const uint16_t*>(base) + begin, scratch, n);
        break;
    case Dtype::f16:
        widen_f16(static_cast<const uint16_t*>(base) + begin, scratch, n);
        break;
    }
    return scratch;
}

// --- the rule -------------------------------------------------------------------------------------------------------

// Adam in the order of operations of torch's fused kernel. Coupled decay is a template argument, so that an infinite
// weight times a zero `l2` cannot poison the moments.
template <bool coupled>
void adam(float* __restrict param, float* __restrict exp_avg, float* __restrict exp_avg_sq,
          const float* __restrict grad, size_t n, const AdamScalars& scalars) {
    const AdamScalars s = scalars;
    const bool from_avg = s.m_weight < 0.5f; // torch's lerp starts from the nearer end
    const float m_factor = from_avg ? s.m_weight : s.m_weight - 1.0f;
    for (size_t i = 0; i < n; ++i) {
        float p = param[i];
        float g = grad[i] * s.grad_scale;
        if (coupled)
            g += p * s.l2;
        else
            p *= s.param_factor;
        const float m_old = exp_avg[i];
        const float m = (from_avg ? m_old : g) + m_factor * (g - m_old);
        const float v = exp_avg_sq[i] * s.v_factor + s.v_weight * g * g;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p + s.neg_step * m / (sqrtf(v) * s.inv_bias2 + s.eps);
    }
}

void join(const uint16_t* __restrict param, const int16_t* __restrict low_bits, float* __restrict master, size_t n) {
    for (size_t i = 0; i < n; ++i)
        master[i] = join_master(param[i], low_bits[i]);
}

void split(const float* __restrict master, uint16_t* __restrict param, int16_t* __restrict low_bits, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const uint32_t u = split_bits(master[i]);
        param[i] = split_hi(u);
        low_bits[i] = split_lo(u);
    }
}

void update(const UpdateArgs& args, size_t begin, size_t end) {
    alignas(64) float grad_scratch[kBlock];
    alignas(64) float master_scratch[kBlock];
    const auto rule = args.scalars.l2 != 0.0f ? adam<true> : adam<false>;
    for (size_t i = begin, stop; i < end; i = stop) {
        stop = block_end(i, end);
        const size_t n = stop - i;
        const float* grad = load(args.grad, args.grad_dtype, i, n, grad_scratch);
        if (args.param_kind == ParamKind::f32) {
            rule(static_cast<float*>(args.param) + i, args.exp_avg + i, args.exp_avg_sq + i, grad, n, args.scalars);
        } else {
            uint16_t* hi = static_cast<uint16_t*>(args.param) + i;
            int16_t* lo = static_cast<int16_t*>(args.low_bits) + i;
            join(hi, lo, master_scratch, n);
            rule(master_scratch, args.exp_avg + i, args.exp_avg_sq + i, grad, n, args.scalars);
            split(master_scratch, hi, lo, n);
        }
    }
}

// --- gradients ------------------------------------------------------------------------------------------------------

// Lane l sums the squares of the elements whose index is l modulo kLanes, in order.
constexpr size_t kLanes = 16;

void add_squares(const float* __restrict values, size_t n, double* __restrict lanes) {
    double sums[kLanes];
    memcpy(sums, lanes, sizeof sums);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) {
            const double x = values[i + lane];
            sums[lane] += x * x;
        }
    for (size_t lane = 0; i + lane < n; ++lane) {
        const double x = values[i + lane];
        sums[lane] += x * x;
    }
    memcpy(lanes, sums, sizeof sums);
}

void scale_into(float* __restrict out, const float* __restrict src, float scale, size_t n) {
    for (size_t i = 0; i < n; ++i)
        out[i] = src[i] * scale;
}

void accumulate_into(float* __restrict out, const float* __restrict src, float scale, size_t n) {
    for (size_t i = 0; i < n; ++i)
        out[i] += src[i] * scale;
}

double grad_store(const GradArgs& args, size_t begin, size_t end) {
    alignas(64) float src_scratch[kBlock];
    alignas(64) float dst_scratch[kBlock];
    double lanes[kLanes] = {};
    for (size_t i = begin, stop; i < end; i = stop) {
        stop = block_end(i, end);
        const size_t n = stop - i;
        const float* src = load(args.src, args.src_dtype, i, n, src_scratch);
        float* out = args.dst_dtype == Dtype::f32 ? static_cast<float*>(args.dst) + i : dst_scratch;
        if (args.accumulate) {
            load(args.dst, args.dst_dtype, i, n, dst_scratch);
            accumulate_into(out, src, args.scale, n);
        } else {
            scale_into(out, src, args.scale, n);
        }
        if (args.dst_dtype == Dtype::bf16) {
            narrow_bf16(out, static_cast<uint16_t*>(args.dst) + i, n);
            load(args.dst, args.dst_dtype, i, n, out);
        } else if (args.dst_dtype == Dtype::f16) {
            narrow_f16(out, static_cast<uint16_t*>(args.dst) + i, n);
            load(args.dst, args.dst_dtype, i, n, out);
        }
        add_squares(out, n, lanes);
    }
    double sum = 0.0;
    for (size_t lane = 0; lane < kLanes; ++lane)
        sum += lanes[lane];
    return sum;
}

// --- the roofline ---------------------------------------------------------------------------------------------------

void bare(float* __restrict param, float* __restrict exp_avg, float* __restrict exp_avg_sq,
          const float* __restrict grad, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const float g = grad[i] * 0.0f; // read it, but leave the values as they are
        param[i] += g;
        exp_avg[i] += g;
        exp_avg_sq[i] += g;
    }
}

#define INFINITY_TEXT_(x) #x
#define INFINITY_TEXT(x) INFINITY_TEXT_(x)

} // namespace

extern const Kernels kernels = {INFINITY_TEXT(INFINITY_ISA), update, grad_store, split, join, bare};

} // namespace infinity::adam::INFINITY_ISA
