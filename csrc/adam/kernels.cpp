// The kernels, compiled once per instruction set with INFINITY_ISA naming it. The plain loops are the specification:
// IEEE operations in a fixed order, no fused multiply-add, so every set gives the same bits.
//
// The kernels work on blocks. The values of a block are converted to fp32 in scratch memory, or used in place if they
// are fp32 already; the rule runs on four float pointers; the results are converted back. So each rule is one loop,
// each memory format is one load and one store, and all combinations are possible.
#include "kernels.h"

#include <math.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace infinity::adam::INFINITY_ISA {
namespace {

// clang-format off: the order matters
#include "convert.h"
#include "quantize.h"
#ifdef __AVX512F__
#include "adopt_avx512.h"
#include "quantize_avx512.h"
#endif
// clang-format on

// Elements that are loaded, updated and stored together. They are few enough for a core to overlap the divisions and
// square roots of one step with the loads of the next (whole blocks are a tenth slower for fp32 moments), and enough to
// fill vectors of bytes.
constexpr size_t kStep = 128;
static_assert(kBlock == kScaleBlock, "a block of a moment has one scale");

inline size_t block_end(size_t begin, size_t end) {
    return end - begin < kBlock ? end : begin + kBlock;
}

#include "reconstruction.h"

// --- past the caches ------------------------------------------------------------------------------------------------

// Copies to memory that is not read soon, without reading its cache lines before they are written.
void stream(void* target, const void* source, size_t nbytes) {
    char* to = static_cast<char*>(target);
    const char* from = static_cast<const char*>(source);
    size_t i = 0;
#if defined(__AVX512F__)
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
        for (; i + 64 <= nbytes; i += 64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
        for (; i + 16 <= nbytes; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
    memcpy(to + i, from + i, nbytes - i);
}

// Makes the streamed data visible to other threads before any later store.
void end_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Copies values to scratch memory, because the rule stores its results elsewhere. The copy uses whole vectors: a later
// load from two stores would wait until both, and all streamed data before them, are in the cache (half the rate).
float* to_scratch(float* scratch, const float* source, size_t n) {
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(scratch + i, _mm512_loadu_ps(source + i));
#endif
    memcpy(scratch + i, source + i, (n - i) * sizeof(float));
    return scratch;
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

// Returns the n values from index `begin` as fp32: in place, or converted into scratch memory.
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

// --- reconstruction of the values before an update; see reconstruction.h --------------------------------------------

void reconstruct_into(float* __restrict grad, const float* __restrict before, const float* __restrict after, size_t n,
                      const Scalars& scalars) {
    const Reconstruction reconstruction(scalars);
    for (size_t i = 0; i < n; ++i)
        grad[i] = reconstruction.grad(before[i], after[i]);
}

void reconstruct_grads(const float* before, const float* after, const Scalars& scalars, Dtype dtype, void* grad,
                       size_t n) {
    alignas(64) float wide[kBlock];
    for (size_t i = 0, stop; i < n; i = stop) {
        stop = block_end(i, n);
        reconstruct_into(wide, before + i, after + i, stop - i, scalars);
        (dtype == Dtype::bf16 ? narrow_bf16 : narrow_f16)(wide, static_cast<uint16_t*>(grad) + i, stop - i);
    }
}

void reconstruct_params(uint16_t* __restrict param, const int16_t* __restrict low_before,
                        const int16_t* __restrict low_after, const float* __restrict first,
                        const float* __restrict second, const Scalars& scalars, size_t n) {
    const Reconstruction reconstruction(scalars);
    for (size_t i = 0; i < n; ++i) {
        const float after = join_master(param[i], low_after[i]);
        const uint32_t about = reconstruction.about_master(after, first[i], second[i]);
        const uint32_t off = static_cast<uint32_t>(low_before[i]) - about;
        param[i] = split_hi(about + static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(off))));
    }
}

// --- the rules ------------------------------------------------------------------------------------------------------

// In torch's order of operations. The pointer of a moment is null if the rule does not have it. `doubt` is null unless
// the rule can prove reconstructions.
using RuleLoop = void (*)(float* param, float* first, float* second, const float* grad, size_t n, const Scalars&,
                          Doubt* doubt);

// Coupled decay is a template argument, so that an infinite weight times a zero `l2` cannot poison the moments.
template <bool coupled, bool tells>
void adam_loop(float* __restrict param, float* __restrict exp_avg, float* __restrict exp_avg_sq,
               const float* __restrict grad, size_t n, const Scalars& scalars, Doubt* __restrict doubt) {
    const Scalars s = scalars;
    const Reconstruction reconstruction(s);
    Extremes extremes;
    const float share = tells ? doubt->share : 0.0f;
    for (size_t i = 0; i < n; ++i) {
        const float p_old = param[i];
        float p = p_old;
        float g = grad[i] * s.grad_scale;
        if (coupled)
            g += p * s.l2;
        else
            p *= s.param_factor;
        const float m_old = exp_avg[i];
        const float m = reconstruction.moment(m_old, g);
        const float squared = s.v_weight * g * g;
        const float v = exp_avg_sq[i] * s.v_factor + squared;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        const float moved = reconstruction.moved(m, v);
        param[i] = p + moved;
        if (tells) {
            doubt->before[i] = m_old;
            extremes.add(squared - m_old * m_old * share, p_old, moved);
        }
    }
    if (tells)
        doubt->note(extremes);
}

template <bool coupled>
void adam(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, size_t n, const Scalars& scalars,
          Doubt* doubt) {
    (doubt ? adam_loop<coupled, true> : adam_loop<coupled, false>)(param, exp_avg, exp_avg_sq, grad, n, scalars, doubt);
}

void adagrad(float* __restrict param, float*, float* __restrict sum, const float* __restrict grad, size_t n,
             const Scalars& scalars, Doubt*) {
    const Scalars s = scalars;
    for (size_t i = 0; i < n; ++i) {
        const float g = grad[i] * s.grad_scale + param[i] * s.l2;
        sum[i] += g * g;
        param[i] += s.step_size * g / (sqrtf(sum[i]) + s.eps);
    }
}

// Chen et al., arXiv 2302.06675, algorithm 2
void lion(float* __restrict param, float* __restrict exp_avg, float*, const float* __restrict grad, size_t n,
          const Scalars& scalars, Doubt*) {
    const Scalars s = scalars;
    for (size_t i = 0; i < n; ++i) {
        const float g = grad[i] * s.grad_scale;
        const float direction = exp_avg[i] * (1.0f - s.blend) + g * s.blend;
        const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction; // keeps NaN
        param[i] = param[i] * s.param_factor + s.step_size * sign;
        exp_avg[i] = exp_avg[i] * s.m_factor + g * s.m_weight;
    }
}

void sgd(float* __restrict param, float* __restrict momentum, float*, const float* __restrict grad, size_t n,
         const Scalars& scalars, Doubt*) {
    const Scalars s = scalars;
    const bool nesterov = s.blend != 0.0f;
    for (size_t i = 0; i < n; ++i) {
        const float g = grad[i] * s.grad_scale + param[i] * s.l2;
        const float m = momentum[i] * s.m_factor + g * s.m_weight;
        momentum[i] = m;
        param[i] += s.step_size * (nesterov ? g + s.m_factor * m : m);
    }
}

// --- parameters -----------------------------------------------------------------------------------------------------

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

// A weight that differs from its rounded master was written outside the optimizer, and replaces the master. Bits are
// compared: a master that overflows is rounded to infinity, and is kept if the weight is this infinity.
void adopt(const uint16_t* __restrict param, float* __restrict master, size_t n) {
    size_t i = 0;
#ifdef __AVX512F__
    i = adopt_sixteens(param, master, n);
#endif
    for (; i < n; ++i)
        master[i] = f32_to_f16(master[i]) == param[i] ? master[i] : f16_to_f32(param[i]);
}

// Returns the fp32 parameters of a block: in place, or converted into scratch memory.
float* load_params(const UpdateArgs& args, size_t begin, size_t n, float* scratch) {
    if (args.aside.param) {
        const size_t width = args.param_kind == ParamKind::f32 ? sizeof(float) : sizeof(uint16_t);
        stream(static_cast<char*>(args.aside.param) + begin * width, static_cast<char*>(args.param) + begin * width,
               n * width);
    }
    if (args.param_kind == ParamKind::f32)
        return static_cast<float*>(args.param) + begin;
    if (args.param_kind == ParamKind::master) {
        float* master = static_cast<float*>(args.master) + begin;
        if (args.aside.master)
            master = to_scratch(scratch, master, n);
        adopt(static_cast<const uint16_t*>(args.param) + begin, master, n);
        return master;
    }
    join(static_cast<const uint16_t*>(args.param) + begin, static_cast<const int16_t*>(args.master) + begin, scratch,
         n);
    return scratch;
}

void store_params(const UpdateArgs& args, size_t begin, size_t n, const float* params) {
    uint16_t* narrow = static_cast<uint16_t*>(args.param) + begin;
    if (args.param_kind == ParamKind::split) {
        alignas(64) int16_t scratch[kStep];
        split(params, narrow, args.aside.master ? scratch : static_cast<int16_t*>(args.master) + begin, n);
        if (args.aside.master)
            stream(static_cast<int16_t*>(args.aside.master) + begin, scratch, n * sizeof(int16_t));
    } else if (args.param_kind == ParamKind::master) {
        narrow_f16(params, narrow, n);
        if (args.aside.master)
            stream(static_cast<float*>(args.aside.master) + begin, params, n * sizeof(float));
    }
}

// --- moments --------------------------------------------------------------------------------------------------------

template <bool is_signed>
void decode_block(const uint8_t* __restrict codes, float scale, float* __restrict out, size_t n) {
    size_t i = 0;
#ifdef __AVX512F__
    i = decode_sixteens<is_signed>(codes, scale, out, n);
#endif
    for (; i < n; ++i)
        out[i] = (is_signed ? decode_signed(codes[i]) : decode_unsigned(codes[i])) * scale;
}

// Returns the scale.
template <bool is_signed>
float encode_block(const float* __restrict values, const uint32_t* __restrict random, uint8_t* __restrict codes,
                   size_t n) {
    uint32_t largest = 0; // the bits of magnitudes, as integers, are in the order of their values, with NaN as largest
    for (size_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float top = float_of(largest);
    const bool vanishes = top < 0x1p-100f; // its reciprocal could overflow; it is negligible compared with any eps
    if (vanishes || largest >= kInf) {
        memset(codes, 0, n);
        return vanishes ? 0.0f : float_of(0x7fc00000u);
    }
    const float inverse = kTop / top;
    size_t i = 0;
#ifdef __AVX512F__
    i = encode_sixteens<is_signed>(values, inverse, random, codes, n);
#endif
    for (; i < n; ++i) {
        const float x = values[i] * inverse;
        codes[i] = is_signed ? encode_signed(x, random[i] & 0xffffu) : encode_unsigned(x, random[i] >> 16);
    }
    return top / kTop;
}

float* load_moment(MomentKind kind, bool is_signed, const Moment& moment, size_t begin, size_t n, float* scratch) {
    switch (kind) {
    case MomentKind::f32:
        return static_cast<float*>(moment.values) + begin;
    case MomentKind::bf16:
        widen_bf16(static_cast<const uint16_t*>(moment.values) + begin, scratch, n);
        break;
    case MomentKind::int8:
        for (size_t i = 0; i < n; i += kScaleBlock) {
            const size_t length = n - i < kScaleBlock ? n - i : kScaleBlock;
            const uint8_t* codes = static_cast<const uint8_t*>(moment.values) + begin + i;
            const float scale = moment.scales[(begin + i) / kScaleBlock];
            (is_signed ? decode_block<true> : decode_block<false>)(codes, scale, scratch + i, length);
        }
        break;
    }
    return scratch;
}

void store_bf16_stochastic(const float* __restrict values, const uint32_t* __restrict random, int shift,
                           uint16_t* __restrict dst, size_t n) {
    for (size_t i = 0; i < n; ++i)
        dst[i] = f32_to_bf16_stochastic(values[i], (random[i] >> shift) & 0xffffu);
}

void store_moment(MomentKind kind, bool is_signed, const Moment& moment, size_t begin, size_t n, const float* values,
                  const uint32_t* random) {
    switch (kind) {
    case MomentKind::f32: // updated in place
        break;
    case MomentKind::bf16:
        store_bf16_stochastic(values, random, is_signed ? 0 : 16, static_cast<uint16_t*>(moment.values) + begin, n);
        break;
    case MomentKind::int8:
        for (size_t i = 0; i < n; i += kScaleBlock) {
            const size_t length = n - i < kScaleBlock ? n - i : kScaleBlock;
            uint8_t* codes = static_cast<uint8_t*>(moment.values) + begin + i;
            moment.scales[(begin + i) / kScaleBlock] =
                (is_signed ? encode_block<true> : encode_block<false>)(values + i, random + i, codes, length);
        }
        break;
    }
}

// Stores a moment of at most one block, in place or into `aside`.
void store_moment_of(const UpdateArgs& args, bool is_signed, size_t begin, size_t n, const float* values,
                     const uint32_t* random) {
    const Moment& own = is_signed ? args.first : args.second;
    const Moment& aside = is_signed ? args.aside.first : args.aside.second;
    if (!aside.values)
        return store_moment(args.moment_kind, is_signed, own, begin, n, values, random);
    alignas(64) char scratch[kBlock * sizeof(uint16_t)];
    const size_t width = args.moment_kind == MomentKind::bf16 ? sizeof(uint16_t) : sizeof(uint8_t);
    float scale = 0.0f;
    store_moment(args.moment_kind, is_signed, {scratch, &scale}, 0, n, values, random);
    stream(static_cast<char*>(aside.values) + begin * width, scratch, n * width);
    if (args.moment_kind == MomentKind::int8)
        aside.scales[begin / kScaleBlock] = scale;
}

void draw_below_wrap(RandomKey key, uint32_t first, uint32_t* __restrict out, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i)
        out[i] = random_bits(key, first + i);
}

// Computes the random bits of elements index .. index + n - 1.
void draw(uint64_t seed, uint64_t index, uint32_t* out, size_t n) {
    const uint32_t first = static_cast<uint32_t>(index);
    const size_t until_wrap = static_cast<size_t>(0x100000000u - first); // then the key changes
    const size_t stop = n < until_wrap ? n : until_wrap;
    draw_below_wrap(random_key(seed, index), first, out, static_cast<uint32_t>(stop));
    if (stop < n)
        draw_below_wrap(random_key(seed, index + stop), 0, out + stop, static_cast<uint32_t>(n - stop));
}

// --- the update -----------------------------------------------------------------------------------------------------

// The fp32 values that the rule has computed: at most kStep elements from index `begin` on, not stored yet.
struct Worked {
    size_t begin, n;
    const float *grad, *param, *first, *second;
};

void note_lost_grads(const UpdateArgs& args, const Worked& on, const float* __restrict before, Lost& lost) {
    const Reconstruction reconstruction(args.scalars);
    const uint32_t half = half_step(args.grad_dtype);
    alignas(64) uint32_t is[kStep];
    uint32_t some = 0;
    for (size_t i = 0; i < on.n; ++i)
        some |= is[i] = is_lost(reconstruction.grad(before[i], on.first[i]), on.grad[i], half);
    for (size_t i = 0; some && i < on.n; ++i)
        if (is[i] && lost.count++ < lost.room)
            lost.positions[lost.count - 1] = static_cast<uint32_t>(on.begin + i);
}

void note_lost_params(const UpdateArgs& args, const Worked& on, Lost& lost) {
    const Reconstruction reconstruction(args.scalars);
    const uint16_t* param = static_cast<const uint16_t*>(args.param) + on.begin;
    const int16_t* low_bits = static_cast<const int16_t*>(args.master) + on.begin;
    alignas(64) uint32_t is[kStep];
    uint32_t some = 0;
    for (size_t i = 0; i < on.n; ++i)
        some |= is[i] = is_lost_master(reconstruction.about_master(on.param[i], on.first[i], on.second[i]),
                                       bits_of(join_master(param[i], low_bits[i])));
    for (size_t i = 0; some && i < on.n; ++i)
        if (is[i]) {
            lost.param_positions[lost.param_count] = static_cast<uint32_t>(on.begin + i);
            lost.param_bits[lost.param_count++] = param[i];
        }
}

struct Scratch {
    alignas(64) float grad[kStep];
    alignas(64) float param[kStep];
    alignas(64) float first[kBlock];
    alignas(64) float second[kBlock];
    alignas(64) uint32_t random[kBlock];
};

// Updates one block, without storing its moments, because their scale depends on the whole block.
template <RuleLoop rule>
void compute(const UpdateArgs& args, size_t begin, size_t n, Scratch& scratch, Doubt& doubt, Lost* lost) {
    const MomentKind kind = args.moment_kind;
    const bool is_f32 = kind == MomentKind::f32;
    for (size_t at = 0; at < n; at += kStep) {
        const size_t i = begin + at;
        const size_t length = n - at < kStep ? n - at : kStep;
        const float* grad = load(args.grad, args.grad_dtype, i, length, scratch.grad);
        float* param = load_params(args, i, length, scratch.param);
        float* first = args.first.values ? load_moment(kind, true, args.first, i, length, scratch.first + at) : nullptr;
        float* second =
            args.second.values ? load_moment(kind, false, args.second, i, length, scratch.second + at) : nullptr;
        if (is_f32 && args.aside.first.values)
            first = to_scratch(scratch.first + at, first, length);
        if (is_f32 && args.aside.second.values)
            second = to_scratch(scratch.second + at, second, length);
        rule(param, first, second, grad, length, args.scalars, lost ? &doubt : nullptr);
        const Worked on{i, length, grad, param, first, second};
        if (lost && doubt.grads)
            note_lost_grads(args, on, doubt.before, *lost);
        if (lost && doubt.params && lost->param_positions)
            note_lost_params(args, on, *lost);
        store_params(args, i, length, param);
        if (is_f32 && args.aside.first.values)
            stream(static_cast<float*>(args.aside.first.values) + i, first, length * sizeof(float));
        if (is_f32 && args.aside.second.values)
            stream(static_cast<float*>(args.aside.second.values) + i, second, length * sizeof(float));
        if (!is_f32)
            draw(args.seed, args.index + i, scratch.random + at, length);
    }
}

template <RuleLoop rule> void update_by(const UpdateArgs& args, size_t begin, size_t end, Lost* lost = nullptr) {
    Scratch scratch;
    Doubt doubt(args.scalars, args.grad_dtype);
    const MomentKind kind = args.moment_kind;
    for (size_t i = begin, stop; i < end; i = stop) {
        stop = block_end(i, end);
        const size_t n = stop - i;
        compute<rule>(args, i, n, scratch, doubt, lost);
        if (kind != MomentKind::f32 && args.first.values)
            store_moment_of(args, true, i, n, scratch.first, scratch.random);
        if (kind != MomentKind::f32 && args.second.values)
            store_moment_of(args, false, i, n, scratch.second, scratch.random);
    }
    if (args.aside.param || args.aside.master || args.aside.first.values || args.aside.second.values)
        end_stream();
}

void update(const UpdateArgs& args, size_t begin, size_t end, Lost* lost) {
    switch (args.rule) {
    case Rule::adamw:
        return update_by<adam<false>>(args, begin, end, lost);
    case Rule::adam:
        return update_by<adam<true>>(args, begin, end);
    case Rule::adagrad:
        return update_by<adagrad>(args, begin, end);
    case Rule::lion:
        return update_by<lion>(args, begin, end);
    case Rule::sgd:
        return update_by<sgd>(args, begin, end);
    }
}

void load_whole_moment(MomentKind kind, bool is_signed, const Moment& moment, float* out, size_t n) {
    for (size_t i = 0, stop; i < n; i = stop) {
        stop = block_end(i, n);
        const float* values = load_moment(kind, is_signed, moment, i, stop - i, out + i);
        if (values != out + i)
            memcpy(out + i, values, (stop - i) * sizeof(float));
    }
}

void store_whole_moment(MomentKind kind, bool is_signed, const Moment& moment, const float* values, size_t n,
                        uint64_t seed, uint64_t index) {
    alignas(64) uint32_t random[kBlock];
    if (kind == MomentKind::f32)
        memcpy(moment.values, values, n * sizeof(float));
    for (size_t i = 0, stop; i < n; i = stop) {
        stop = block_end(i, n);
        draw(seed, index + i, random, stop - i);
        store_moment(kind, is_signed, moment, i, stop - i, values + i, random);
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
        const float g = grad[i] * 0.0f; // reads the gradient without changing the values
        param[i] += g;
        exp_avg[i] += g;
        exp_avg_sq[i] += g;
    }
}

#define INFINITY_TEXT_(x) #x
#define INFINITY_TEXT(x) INFINITY_TEXT_(x)

} // namespace

extern const Kernels kernels = {INFINITY_TEXT(INFINITY_ISA),
                                update,
                                grad_store,
                                split,
                                join,
                                load_whole_moment,
                                store_whole_moment,
                                reconstruct_grads,
                                reconstruct_params,
                                bare};

} // namespace infinity::adam::INFINITY_ISA
