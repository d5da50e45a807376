// `adopt` of kernels.cpp with the fp16 conversions of AVX-512. They are exact for denormals, and differ from
// convert.h's only in the payload of a NaN, which may replace another NaN. Only included by kernels.cpp, inside the
// namespace of the instruction set.

// Returns the number of elements that were processed.
inline size_t adopt_sixteens(const uint16_t* __restrict param, float* __restrict master, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(param + i));
        const __m256i rounded = _mm512_cvtps_ph(_mm512_loadu_ps(master + i), _MM_FROUND_TO_NEAREST_INT);
        const __mmask16 written = _mm256_cmpneq_epi16_mask(stored, rounded);
        if (written)
            _mm512_mask_storeu_ps(master + i, written, _mm512_cvtph_ps(stored));
    }
    return i;
}
