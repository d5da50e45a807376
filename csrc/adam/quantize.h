// Moments in 16 and 8 bits. Only included by kernels.cpp, inside the namespace of the instruction set, after convert.h.

// [Note: stochastic rounding]
// A second moment with beta2 = 0.999 changes by a thousandth of itself in a step, and bf16 has steps of 1/128: rounded
// to nearest, it would never decay. If it is rounded up with a probability equal to its fraction, it is right on
// average. The random bits are a hash of (seed, index), so the result depends neither on the division into pieces nor
// on the thread. Each element has one hash: its lower half rounds the first moment, its upper half the second.
struct RandomKey {
    uint32_t first, second;
};

// splitmix64's finalizer (Steele, Lea and Flood, 2014)
inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

inline RandomKey random_key(uint64_t seed, uint64_t index) {
    const uint64_t key = mix64(mix64(seed + 0x9e3779b97f4a7c15u) ^ (index >> 32));
    return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// A 32-bit finalizer (C. Wellons' lowbias32) with a second key in the middle, so that no seed is a shift of another.
inline uint32_t random_bits(RandomKey key, uint32_t index) {
    uint32_t x = index ^ key.first;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x ^= key.second;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// `random` has 16 bits. x is a result of arithmetic, whose NaNs are quiet, so that the upper half is a NaN, too.
inline uint16_t f32_to_bf16_stochastic(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    return static_cast<uint16_t>((u + ((u & kInf) == kInf ? 0u : random)) >> 16);
}

// [Note: 8-bit moments]
// A block of 256 elements shares a scale: its largest magnitude divided by 1.9375. A value divided by the scale is
// stored as a small float with 4 fraction bits, stochastically rounded. The error is less than 1/16 of the value, or
// one step near zero.
//
//     first moment    sign, 3 exponent bits, 4 fraction bits    1.9375 .. 2^-6, then steps of 2^-10 down to 0
//     second moment         4 exponent bits, 4 fraction bits    1.9375 .. 2^-14, then steps of 2^-18 down to 2^-18
//
// A second moment that is not zero is never stored as zero: with a denominator of eps alone, one step could destroy the
// parameter. A second moment that is too large only makes the step smaller.
// A block with a NaN or infinity gets the scale NaN, so that all of its values become NaN and the error is not hidden.
constexpr float kTop = 1.9375f;
constexpr int kFractionDrop = 23 - 4;

template <bool is_signed> struct SmallFloat {
    static constexpr uint32_t kLowExponent = is_signed ? 121 : 113; // fp32 exponent field of the smallest normal

    // `random` has 16 bits. The magnitude is at most kTop, apart from its own rounding error. Only 16 of the 19 dropped
    // bits are random, so this error cannot carry into a code above the largest one.
    static uint32_t encode(float magnitude, uint32_t random) {
        const float low = float_of(kLowExponent << 23);
        const int32_t normal = static_cast<int32_t>(bits_of(magnitude) - ((kLowExponent - 1) << 23));
        const int32_t subnormal = static_cast<int32_t>(bits_of(magnitude + low) - (kLowExponent << 23));
        const int32_t larger = normal > subnormal ? normal : subnormal; // correct on both sides of `low`
        return (static_cast<uint32_t>(larger) + (random << 3)) >> kFractionDrop;
    }

    static float decode(uint32_t code) {
        const float low = float_of(kLowExponent << 23);
        const float normal = float_of((code << kFractionDrop) + ((kLowExponent - 1) << 23));
        const float subnormal = float_of((code << kFractionDrop) + (kLowExponent << 23)) - low;
        return subnormal < normal ? subnormal : normal; // correct on both sides of `low`
    }
};

inline float decode_signed(uint8_t code) {
    const float magnitude = SmallFloat<true>::decode(code & 0x7fu);
    return float_of(bits_of(magnitude) | static_cast<uint32_t>(code & 0x80u) << 24);
}

inline float decode_unsigned(uint8_t code) {
    return SmallFloat<false>::decode(code);
}

inline uint8_t encode_signed(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    const uint32_t code = SmallFloat<true>::encode(float_of(u & 0x7fffffffu), random);
    return static_cast<uint8_t>(code | ((u >> 24) & 0x80u));
}

inline uint8_t encode_unsigned(float x, uint32_t random) {
    const uint32_t code = SmallFloat<false>::encode(x, random);
    return static_cast<uint8_t>(code == 0u && x > 0.0f ? 1u : code);
}
