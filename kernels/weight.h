/* What a logit weighs in a draw: exp of its distance to the best one, as a whole number. Sums of
 * whole numbers do not depend on their order: the host and every device draw the same token.
 *
 * Products and sums of doubles are rounded one by one everywhere, never fused: the same bits on a
 * GPU as on a CPU. */
#ifndef FATHOM_WEIGHT_H
#define FATHOM_WEIGHT_H

#include <stdint.h>

#if defined(__CUDACC__)
#define WEIGHT_FUNCTION static __host__ __device__ inline
#else
#define WEIGHT_FUNCTION static inline
#endif
#if defined(__CUDA_ARCH__)
#define WEIGHT_MULTIPLY(a, b) __dmul_rn(a, b)
#define WEIGHT_ADD(a, b)      __dadd_rn(a, b)
#else
#define WEIGHT_MULTIPLY(a, b) ((a) * (b))
#define WEIGHT_ADD(a, b)      ((a) + (b))
#endif

/* Of the best: a sum over 2^22 entries, the largest vocabulary, has 62 bits. */
#define WEIGHT_UNIT 0x1p40

/* What distances are multiplied by. */
WEIGHT_FUNCTION float weight_scale(float temperature) {
    float scale = 1 / temperature;
    return scale < 3e38f ? scale : 3e38f; /* times 0, infinity would not be a number */
}

/* Of a distance 0 or less, scaled; below -28.4 it is 0. NaN weighs nothing. */
WEIGHT_FUNCTION uint64_t weight_of(float distance) {
    if (!(distance > -29)) return 0;
    /* exp(x) = 2^-halvings * exp(rest), |rest| <= ln 2 / 2: nine terms of its series, to 2e-10 */
    double scaled = WEIGHT_MULTIPLY((double)distance, 1.4426950408889634);
    int halvings = (int)WEIGHT_ADD(0.5, -scaled);
    double rest = WEIGHT_MULTIPLY(WEIGHT_ADD(scaled, (double)halvings), 0.6931471805599453);
    double sum = 1. / 40320;
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 5040);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 720);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 120);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 24);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 6);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1. / 2);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1.);
    sum = WEIGHT_ADD(WEIGHT_MULTIPLY(sum, rest), 1.);
    uint64_t units = (uint64_t)(int64_t)WEIGHT_MULTIPLY(sum, WEIGHT_UNIT);
    return (units + (((uint64_t)1 << halvings) >> 1)) >> halvings;
}

/* What the best candidates must weigh together to hold `top_p` of the whole: 1..total. */
WEIGHT_FUNCTION uint64_t weight_to_reach(float top_p, uint64_t total) {
    double exact = WEIGHT_MULTIPLY((double)top_p, (double)total);
    uint64_t whole = (uint64_t)exact;
    if ((double)whole < exact) whole++;
    if (whole < 1) whole = 1;
    return whole < total ? whole : total;
}

/* The least weight of a candidate that is `min_p` times as likely as the best. */
WEIGHT_FUNCTION uint64_t weight_least(float min_p) {
    double exact = WEIGHT_MULTIPLY((double)min_p, WEIGHT_UNIT);
    uint64_t whole = (uint64_t)exact;
    return (double)whole < exact ? whole + 1 : whole;
}

/* Where a draw falls: 0..total - 1. It chooses the first candidate, in the order of ids, with which
 * the sum of weights exceeds it. */
WEIGHT_FUNCTION uint64_t weight_drawn(double uniform, uint64_t total) {
    uint64_t whole = (uint64_t)WEIGHT_MULTIPLY(uniform, (double)total);
    return whole < total ? whole : total - 1;
}

#endif
