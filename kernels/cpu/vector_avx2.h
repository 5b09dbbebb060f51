/* Sixteen floats in two AVX registers. What the operations mean: vector_portable.h. */
/* clang-format off: one operation, one line */
#include "kernels/cpu/vector_x86.h"

/* 16 registers, two to a vec. */
#define GEMM_ROWS 6
#define GEMM_PANELS(rows) ((rows) > 3 ? 1 : (rows) > 1 ? 2 : 4)
#define GEMM_TILES(T, L)                                                                           \
    T(L, 1, 1) T(L, 1, 2) T(L, 1, 3) T(L, 1, 4) T(L, 2, 1) T(L, 2, 2) T(L, 3, 1) T(L, 3, 2)        \
    T(L, 4, 1) T(L, 5, 1) T(L, 6, 1)
#define QUERIES_TOGETHER 3
#define VALUE_VECS(queries) ((queries) > 1 ? 2 : 4)

typedef struct {
    __m256 low, high;
} vec;

#define VEC_BOTH(operation, ...) (vec){operation(low, __VA_ARGS__), operation(high, __VA_ARGS__)}
#define VEC_1(half, intrinsic, x) intrinsic((x).half)
#define VEC_2(half, intrinsic, x, y) intrinsic((x).half, (y).half)
#define VEC_3(half, intrinsic, x, y, z) intrinsic((x).half, (y).half, (z).half)

/* All bits set in the first `lanes` lanes of the eight that begin with lane `first`. */
INLINE __m256i lane_mask(size_t lanes, int first) {
    __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                    _mm256_set1_epi32(first));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes > 16 ? 16 : (int)lanes), lane);
}

INLINE vec vec_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec vec_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE vec vec_load_some(const float *p, size_t lanes) {
    if (lanes >= 16) return vec_load(p);
    return (vec){_mm256_maskload_ps(p, lane_mask(lanes, 0)),
                 _mm256_maskload_ps(p + 8, lane_mask(lanes, 8))};
}
INLINE __m256 widen_bf16(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
INLINE vec vec_load_bf16(const uint16_t *p, size_t lanes) {
    uint16_t some[16] = {0};
    if (lanes < 16) p = memcpy(some, p, lanes * sizeof *p);
    return (vec){widen_bf16(_mm_loadu_si128((const __m128i *)p)),
                 widen_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE vec vec_load_f16(const uint16_t *p) {
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE void vec_store(float *p, vec x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
INLINE void vec_store_some(float *p, vec x, size_t lanes) {
    if (lanes >= 16) {
        vec_store(p, x);
        return;
    }
    _mm256_maskstore_ps(p, lane_mask(lanes, 0), x.low);
    _mm256_maskstore_ps(p + 8, lane_mask(lanes, 8), x.high);
}

INLINE vec vec_add(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_add_ps, x, y); }
INLINE vec vec_sub(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_sub_ps, x, y); }
INLINE vec vec_mul(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_mul_ps, x, y); }
INLINE vec vec_div(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_div_ps, x, y); }
INLINE vec vec_fma(vec x, vec y, vec z) { return VEC_BOTH(VEC_3, _mm256_fmadd_ps, x, y, z); }
INLINE vec vec_max(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_max_ps, x, y); }
INLINE vec vec_min(vec x, vec y) { return VEC_BOTH(VEC_2, _mm256_min_ps, x, y); }

INLINE __m256 select_half(unsigned lanes, __m256 x, __m256 y) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i mask = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)lanes), bit), bit);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(mask));
}
INLINE vec vec_select(unsigned lanes, vec x, vec y) {
    return (vec){select_half(lanes, x.low, y.low), select_half(lanes >> 8, x.high, y.high)};
}

INLINE __m256 scale2_half(__m256 x, __m256 n) {
    __m256i whole = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(whole, 1);
    __m256i bias = _mm256_set1_epi32(127), second = _mm256_sub_epi32(whole, first);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(
        x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}
INLINE vec vec_scale2(vec x, vec n) {
    return (vec){scale2_half(x.low, n.low), scale2_half(x.high, n.high)};
}

INLINE float vec_sum(vec x) { return eight_sum(_mm256_add_ps(x.low, x.high)); }
INLINE float vec_largest(vec x) { return eight_largest(_mm256_max_ps(x.low, x.high)); }

INLINE __m256 even_half(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
INLINE __m256 odd_half(const uint16_t *p) {
    __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), upper));
}
INLINE vec vec_load_even(const uint16_t *p) { return (vec){even_half(p), even_half(p + 16)}; }
INLINE vec vec_load_odd(const uint16_t *p) { return (vec){odd_half(p), odd_half(p + 16)}; }

#define INT8_HALVES 2
typedef int16_t int8_code;
typedef struct {
    __m256i low, high;
} vec_int;
typedef vec_int int8_weights;
typedef __m256i int8_factor;

INLINE vec_int int8_start(int32_t x) {
    return (vec_int){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
INLINE __m256i int8_half(const uint8_t *p, int half) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
    return half ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
}
INLINE int8_weights int8_load(const uint8_t *p, int half) {
    return (vec_int){int8_half(p, half), int8_half(p + 32, half)};
}
INLINE int8_factor int8_set(const int8_code *x, int half) {
    int32_t two;
    memcpy(&two, x + 2 * half, sizeof two);
    return _mm256_set1_epi32(two);
}
/* Compilers may add integers in any order, and then keep more of them than there are registers: to
 * them each sum is made here and now. */
INLINE vec_int int8_dot(int8_factor x, int8_weights w, vec_int sum) {
    sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(w.low, x));
    sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(w.high, x));
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}
INLINE vec vec_from_int(vec_int x) {
    return (vec){_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
