/* Sixteen floats in one AVX-512 register. What the operations mean: vector_portable.h. */
/* clang-format off: one operation, one line */
#include "kernels/cpu/vector_x86.h"

/* 32 registers: a tile's sums, its weights, and one factor. */
#define GEMM_ROWS 8
#define GEMM_PANELS(rows) ((rows) > 6 ? 3 : 4)
#define GEMM_TILES(T, L)                                                                           \
    T(L, 1, 1) T(L, 1, 2) T(L, 1, 3) T(L, 1, 4) T(L, 2, 1) T(L, 2, 2) T(L, 2, 3) T(L, 2, 4)        \
    T(L, 3, 1) T(L, 3, 2) T(L, 3, 3) T(L, 3, 4) T(L, 4, 1) T(L, 4, 2) T(L, 4, 3) T(L, 4, 4)        \
    T(L, 5, 1) T(L, 5, 2) T(L, 5, 3) T(L, 5, 4) T(L, 6, 1) T(L, 6, 2) T(L, 6, 3) T(L, 6, 4)        \
    T(L, 7, 1) T(L, 7, 2) T(L, 7, 3) T(L, 8, 1) T(L, 8, 2) T(L, 8, 3)
#define QUERIES_TOGETHER 6 /* three have too few sums to hide how long one takes */
#define VALUE_VECS(queries) 4

typedef __m512 vec;

INLINE __mmask16 lane_mask(size_t lanes) {
    return (__mmask16)(lanes >= 16 ? 0xffff : (1u << lanes) - 1);
}

INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vec vec_load_some(const float *p, size_t lanes) {
    return _mm512_maskz_loadu_ps(lane_mask(lanes), p);
}
INLINE vec vec_load_bf16(const uint16_t *p, size_t lanes) {
    __m256i half = _mm256_maskz_loadu_epi16(lane_mask(lanes), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
INLINE vec vec_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE void vec_store_some(float *p, vec x, size_t lanes) {
    _mm512_mask_storeu_ps(p, lane_mask(lanes), x);
}

INLINE vec vec_add(vec x, vec y) { return _mm512_add_ps(x, y); }
INLINE vec vec_sub(vec x, vec y) { return _mm512_sub_ps(x, y); }
INLINE vec vec_mul(vec x, vec y) { return _mm512_mul_ps(x, y); }
INLINE vec vec_div(vec x, vec y) { return _mm512_div_ps(x, y); }
INLINE vec vec_fma(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }
INLINE vec vec_max(vec x, vec y) { return _mm512_max_ps(x, y); }
INLINE vec vec_min(vec x, vec y) { return _mm512_min_ps(x, y); }
INLINE vec vec_select(unsigned lanes, vec x, vec y) {
    return _mm512_mask_blend_ps((__mmask16)lanes, y, x);
}
INLINE vec vec_scale2(vec x, vec n) { return _mm512_scalef_ps(x, n); }

INLINE __m256 upper_half(vec x) { return _mm512_extractf32x8_ps(x, 1); }
INLINE float vec_sum(vec x) {
    return eight_sum(_mm256_add_ps(_mm512_castps512_ps256(x), upper_half(x)));
}
INLINE float vec_largest(vec x) {
    return eight_largest(_mm256_max_ps(_mm512_castps512_ps256(x), upper_half(x)));
}

#if defined(__AVX512BF16__)
#define VECTOR_HAS_PAIRS /* two bf16 factors per lane, by instruction */

typedef __m512bh vec_pair;
typedef uint32_t pair;

INLINE vec_pair vec_pair_load(const uint16_t *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE vec_pair vec_pair_set(const pair *x) { return (__m512bh)_mm512_set1_epi32((int)*x); }
INLINE vec vec_pair_fma(vec_pair x, vec_pair w, vec sum) { return _mm512_dpbf16_ps(sum, x, w); }
#else
INLINE vec vec_load_even(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
INLINE vec vec_load_odd(const uint16_t *p) {
    __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper));
}
#endif

typedef __m512i vec_int;
typedef __m512i int8_weights;
typedef __m512i int8_factor;

INLINE vec_int int8_start(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vec vec_from_int(vec_int x) { return _mm512_cvtepi32_ps(x); }

#if defined(__AVX512VNNI__)
#define INT8_HALVES 1
typedef int8_t int8_code;

INLINE int8_weights int8_load(const uint8_t *p, int half) {
    (void)half;
    return _mm512_loadu_si512(p);
}
INLINE int8_factor int8_set(const int8_code *x, int half) {
    int32_t four;
    (void)half;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE vec_int int8_dot(int8_factor x, int8_weights w, vec_int sum) {
    return _mm512_dpbusd_epi32(sum, w, x);
}
#else
#define INT8_HALVES 2
typedef int16_t int8_code;

INLINE int8_weights int8_load(const uint8_t *p, int half) {
    __m512i bytes = _mm512_loadu_si512(p);
    return half ? _mm512_srli_epi16(bytes, 8) : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
}
INLINE int8_factor int8_set(const int8_code *x, int half) {
    int32_t two;
    memcpy(&two, x + 2 * half, sizeof two);
    return _mm512_set1_epi32(two);
}
INLINE vec_int int8_dot(int8_factor x, int8_weights w, vec_int sum) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
}
#endif
