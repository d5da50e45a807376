// Conversions between fp32 and the stored formats, as branch-free scalar code that compilers vectorise.
// Only included by kernels.cpp, inside the namespace of the instruction set.
//
// The bf16 and fp16 instructions of newer sets are not used: vcvtneps2bf16 flushes denormals, so it would give other
// bits than the other sets. They would save no time, because these kernels wait for memory.

inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

constexpr uint32_t kInf = 0x7f800000u;

inline bool is_nan(uint32_t u) {
    return (u & 0x7fffffffu) > kInf;
}

inline float bf16_to_f32(uint16_t h) {
    return float_of(static_cast<uint32_t>(h) << 16);
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(is_nan(u) ? (u >> 16) | 0x40u : rounded);
}

inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + 0x38000000u; // exponent bias 15 -> 127
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t special = (magnitude << 13) + 0x70000000u; // inf and NaN: exponent 31 -> 255
    const uint32_t u = magnitude < 0x400u ? subnormal : magnitude < 0x7c00u ? normal : special;
    return float_of(sign | u);
}

// Round to nearest even; overflow gives inf, NaN stays NaN.
inline uint16_t f32_to_f16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 shifts a subnormal's bits to the end of the fraction, and the addition rounds them.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > kInf ? 0x7e00u : 0x7c00u;
    const uint32_t h = magnitude < 0x38800000u ? subnormal : magnitude < 0x47800000u ? normal : special;
    return static_cast<uint16_t>(sign | h);
}

// [Note: split]
// An fp32 master is stored as a bf16 `hi`, which is the weight that the model computes with, and 16 more bits `lo`:
//
//     hi = (master + 0x8000) >> 16      master = (hi << 16) + lo, lo signed       (on the bit patterns)
//
// hi is the bf16 nearest to the master; a master in the middle between two is rounded away from zero. It cannot be
// rounded to even: 65537 masters are rounded to each even bf16, one more than 16 bits can distinguish. The pair
// restores every bit pattern, except that a NaN keeps only its sign (its rounding could carry into the sign).
inline uint32_t split_bits(float master) {
    const uint32_t u = bits_of(master);
    return is_nan(u) ? (u & 0x80000000u) | 0x7fc00000u : u;
}

inline uint16_t split_hi(uint32_t u) {
    return static_cast<uint16_t>((u + 0x8000u) >> 16);
}
inline int16_t split_lo(uint32_t u) {
    return static_cast<int16_t>(static_cast<uint16_t>(u));
}

// A weight that was written outside the optimizer is joined with the low bits of the old one, which change it by at
// most half a bf16 step. A weight of zero and negative low bits would give a NaN that no split produces: there, only
// the weight counts.
inline float join_master(uint16_t hi, int16_t lo) {
    const uint32_t rounded = static_cast<uint32_t>(hi) << 16;
    const uint32_t u = rounded + static_cast<uint32_t>(static_cast<int32_t>(lo));
    return float_of((u & 0x7fffffffu) < 0x7fff8000u ? u : rounded);
}
