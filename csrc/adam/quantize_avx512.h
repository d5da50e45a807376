// Converts 16 elements of 8-bit moments at a time, with the same bits as the plain loops of quantize.h, which gcc
// vectorises into 64 lanes of bytes that are slow to widen. Only included by kernels.cpp, for sets with AVX-512.
//
// Each function returns the number of elements that it has converted, a multiple of 16. The plain loop does the rest.

// A code that is shifted to the exponent and fraction of an fp16 is this fp16, also if denormal: exactly for the second
// moment, and 2^8 times too small for the first.
template <bool is_signed>
size_t decode_sixteens(const uint8_t* __restrict codes, float scale, float* __restrict out, size_t n) {
    const __m512 scales = _mm512_set1_ps(scale);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        __m512 value;
        if (is_signed) {
            const __m256i sign_and_magnitude = _mm256_set1_epi16(static_cast<short>(0x8000u | 0x7fu << 6));
            const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(code), 6);
            value = _mm512_cvtph_ps(_mm256_and_si256(half, sign_and_magnitude));
            value = _mm512_mul_ps(value, _mm512_set1_ps(0x1p8f));
        } else {
            value = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(code), 6));
        }
        _mm512_storeu_ps(out + i, _mm512_mul_ps(value, scales));
    }
    return i;
}

// As SmallFloat::encode. Its two exponent offsets, which differ by one, are subtracted together after the comparison,
// in the operation that masks `random`: they do not change its low bits.
template <bool is_signed>
size_t encode_sixteens(const float* __restrict values, float inverse, const uint32_t* __restrict random,
                       uint8_t* __restrict codes, size_t n) {
    constexpr uint32_t kLow = SmallFloat<is_signed>::kLowExponent << 23;
    constexpr int kOr = 0xf8, kAndThenOr = 0xea; // truth tables: a | (b & c), (a & b) | c
    const __m512 low = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kLow)));
    const __m512i minus_low = _mm512_set1_epi32(static_cast<int>(0u - kLow));
    const __m512i random_mask = _mm512_set1_epi32(0xffff << 3);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(inverse));
        const __m512i u = _mm512_castps_si512(x);
        const __m512i magnitude = is_signed ? _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)) : u;
        const __m512i normal = _mm512_add_epi32(magnitude, _mm512_set1_epi32(1 << 23));
        const __m512i subnormal = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), low));
        const __m512i larger = _mm512_max_epi32(normal, subnormal);

        __m512i bits = _mm512_loadu_si512(random + i); // the lower or the upper half, to bits 3 .. 18
        bits = is_signed ? _mm512_slli_epi32(bits, 3) : _mm512_srli_epi32(bits, 16 - 3);
        bits = _mm512_ternarylogic_epi32(bits, random_mask, minus_low, kAndThenOr);
        __m512i code = _mm512_srli_epi32(_mm512_add_epi32(larger, bits), kFractionDrop);
        if (is_signed)
            code = _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80), kOr);
        else // at least 1 for every positive value: min(u, 1), as integers, is 1
            code = _mm512_max_epi32(code, _mm512_min_epi32(u, _mm512_set1_epi32(1)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
    }
    return i;
}
