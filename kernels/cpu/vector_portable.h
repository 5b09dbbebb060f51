/* Sixteen floats in four registers of four, which every 64-bit processor has. This file also says
 * what the operations mean; vector_avx2.h and vector_avx512.h give the same ones:
 *
 *   vec_load_some, vec_store_some  the first `lanes` lanes (16 if more); memory beyond is not
 *                                  touched, lanes beyond are loaded as zero
 *   vec_load_bf16                  the same from bf16
 *   vec_fma(x, y, z)               x * y + z, rounded once if the processor can
 *   vec_max, vec_min               y if either is NaN: put the value whose NaN must survive second
 *   vec_select(lanes, x, y)        x where the lane's bit is set, else y
 *   vec_scale2(x, n)               x * 2^n for integral n in -160..160, without overflow on the way
 *   vec_sum, vec_largest           fold halves: lane i with i + 8, then + 4, + 2, + 1
 *   vec_load_even, vec_load_odd    of 32 bf16: the even or odd ones
 *
 * GEMM_ROWS, GEMM_PANELS(rows), GEMM_TILES(T, L): the tiles of gemm.inc that fit into the
 * registers.
 *
 * For attention.inc, QUERIES_TOGETHER: queries that share each load of K and V, 3 or 6;
 * VALUE_VECS(queries): vectors of columns of V that so many queries sum at a time, most for one.
 *
 * For gemm_int8.inc, sixteen int32 and their factors; INT8_HALVES 1 with an instruction for four
 * bytes, else 2:
 *   int8_load, int8_set            of 16 outputs' fours of weights, and of a four of codes: what
 *                                  int8_dot takes in the given half
 *   int8_dot(x, w, sum)            sum + x w, exact */
/* clang-format off: one operation, one line */
#include "kernels/number.h"

#define INLINE static inline __attribute__((always_inline))

#define GEMM_ROWS         2
#define GEMM_PANELS(rows) ((rows) > 1 ? 1 : 2)
#define GEMM_TILES(T, L)  T(L, 1, 1) T(L, 1, 2) T(L, 2, 1)
#define QUERIES_TOGETHER    3
#define VALUE_VECS(queries) ((queries) > 1 ? 1 : 2)

typedef float quad __attribute__((vector_size(16)));
typedef uint32_t quad_bits __attribute__((vector_size(16)));

typedef struct {
    quad a, b, c, d;
} vec;

#define VEC_1(f, x)    (vec){f((x).a), f((x).b), f((x).c), f((x).d)}
#define VEC_2(f, x, y) (vec){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)}

INLINE quad quad_set(float x) { return (quad){x, x, x, x}; }
INLINE quad quad_load(const float *p) {
    quad x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE quad quad_add(quad x, quad y) { return x + y; }
INLINE quad quad_sub(quad x, quad y) { return x - y; }
INLINE quad quad_mul(quad x, quad y) { return x * y; }
INLINE quad quad_div(quad x, quad y) { return x / y; }
INLINE quad quad_select(quad_bits mask, quad x, quad y) {
    return (quad)((mask & (quad_bits)x) | (~mask & (quad_bits)y));
}
INLINE quad quad_max(quad x, quad y) { return quad_select((quad_bits)(x > y), x, y); }
INLINE quad quad_min(quad x, quad y) { return quad_select((quad_bits)(x < y), x, y); }

INLINE vec vec_set(float x) {
    quad q = quad_set(x);
    return (vec){q, q, q, q};
}
INLINE vec vec_load(const float *p) {
    return (vec){quad_load(p), quad_load(p + 4), quad_load(p + 8), quad_load(p + 12)};
}
INLINE vec vec_load_some(const float *p, size_t lanes) {
    float some[16] = {0};
    if (lanes < 16) p = memcpy(some, p, lanes * sizeof *p);
    return vec_load(p);
}
INLINE vec vec_load_bf16(const uint16_t *p, size_t lanes) {
    uint32_t bits[16] = {0};
    vec x;
    for (size_t i = 0; i < 16 && i < lanes; i++) bits[i] = (uint32_t)p[i] << 16;
    memcpy(&x, bits, sizeof x);
    return x;
}
INLINE vec vec_load_f16(const uint16_t *p) {
    float some[16];
    for (size_t i = 0; i < 16; i++) some[i] = number_from_f16(p[i]);
    return vec_load(some);
}
INLINE void vec_store(float *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE void vec_store_some(float *p, vec x, size_t lanes) {
    memcpy(p, &x, (lanes < 16 ? lanes : 16) * sizeof *p);
}

INLINE vec vec_add(vec x, vec y) { return VEC_2(quad_add, x, y); }
INLINE vec vec_sub(vec x, vec y) { return VEC_2(quad_sub, x, y); }
INLINE vec vec_mul(vec x, vec y) { return VEC_2(quad_mul, x, y); }
INLINE vec vec_div(vec x, vec y) { return VEC_2(quad_div, x, y); }
INLINE vec vec_fma(vec x, vec y, vec z) { return vec_add(vec_mul(x, y), z); }
INLINE vec vec_max(vec x, vec y) { return VEC_2(quad_max, x, y); }
INLINE vec vec_min(vec x, vec y) { return VEC_2(quad_min, x, y); }

INLINE quad_bits lane_mask(unsigned lanes) {
    quad_bits bit = {1, 2, 4, 8}, all = {lanes, lanes, lanes, lanes};
    return (quad_bits)((all & bit) == bit);
}
INLINE vec vec_select(unsigned lanes, vec x, vec y) {
    return (vec){quad_select(lane_mask(lanes), x.a, y.a),
                 quad_select(lane_mask(lanes >> 4), x.b, y.b),
                 quad_select(lane_mask(lanes >> 8), x.c, y.c),
                 quad_select(lane_mask(lanes >> 12), x.d, y.d)};
}

/* Two factors, because 2^n alone may be no normal number. Adding 1.5 * 2^23 leaves n in the low
 * bits; unlike a conversion, that is defined for NaN. */
INLINE quad quad_scale2(quad x, quad n) {
    quad shift = quad_set(0x1.8p23f);
    quad_bits bias = {127, 127, 127, 127};
    quad first = n * 0.5f + shift - shift, second = n - first;
    quad_bits f = (quad_bits)(first + shift) - (quad_bits)shift;
    quad_bits s = (quad_bits)(second + shift) - (quad_bits)shift;
    return x * (quad)((f + bias) << 23) * (quad)((s + bias) << 23);
}
INLINE vec vec_scale2(vec x, vec n) { return VEC_2(quad_scale2, x, n); }

INLINE float vec_sum(vec x) {
    quad four = (x.a + x.c) + (x.b + x.d);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float largest(float x, float y) { return x > y ? x : y; }
INLINE float vec_largest(vec x) {
    quad four = quad_max(quad_max(x.a, x.c), quad_max(x.b, x.d));
    return largest(largest(four[0], four[2]), largest(four[1], four[3]));
}

INLINE quad quad_load_even(const uint16_t *p) {
    quad_bits bits;
    memcpy(&bits, p, sizeof bits);
    return (quad)(bits << 16);
}
INLINE quad quad_load_odd(const uint16_t *p) {
    quad_bits bits;
    memcpy(&bits, p, sizeof bits);
    return (quad)(bits & 0xffff0000);
}
INLINE vec vec_load_even(const uint16_t *p) {
    return (vec){quad_load_even(p), quad_load_even(p + 8), quad_load_even(p + 16),
                 quad_load_even(p + 24)};
}
INLINE vec vec_load_odd(const uint16_t *p) {
    return (vec){quad_load_odd(p), quad_load_odd(p + 8), quad_load_odd(p + 16),
                 quad_load_odd(p + 24)};
}

#define INT8_HALVES 2
typedef int16_t int8_code;
typedef int32_t quad_int __attribute__((vector_size(16)));
typedef struct {
    quad_int a, b, c, d;
} vec_int;
typedef vec_int int8_weights; /* in each lane two numbers of 16 bits */
typedef struct {
    quad_int low, high;
} int8_factor;

INLINE quad_int quad_int_set(int32_t x) { return (quad_int){x, x, x, x}; }
INLINE vec_int int8_start(int32_t x) {
    quad_int q = quad_int_set(x);
    return (vec_int){q, q, q, q};
}
INLINE quad_int int8_half(const uint8_t *p, int half) {
    quad_bits bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (quad_int)((half ? bytes >> 8 : bytes) & 0x00ff00ff);
}
INLINE int8_weights int8_load(const uint8_t *p, int half) {
    return (vec_int){int8_half(p, half), int8_half(p + 16, half), int8_half(p + 32, half),
                     int8_half(p + 48, half)};
}
INLINE int8_factor int8_set(const int8_code *x, int half) {
    return (int8_factor){quad_int_set(x[2 * half]), quad_int_set(x[2 * half + 1])};
}
INLINE quad_int quad_dot(int8_factor x, quad_int w, quad_int sum) {
    return sum + (w & 0xffff) * x.low + (w >> 16) * x.high;
}
INLINE vec_int int8_dot(int8_factor x, int8_weights w, vec_int sum) {
    return (vec_int){quad_dot(x, w.a, sum.a), quad_dot(x, w.b, sum.b), quad_dot(x, w.c, sum.c),
                     quad_dot(x, w.d, sum.d)};
}
INLINE quad quad_from_int(quad_int x) { return __builtin_convertvector(x, quad); }
INLINE vec vec_from_int(vec_int x) {
    return (vec){quad_from_int(x.a), quad_from_int(x.b), quad_from_int(x.c), quad_from_int(x.d)};
}
