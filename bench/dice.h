/* Seeded randomness: the same seed and stream give the same draws on every machine. */
#ifndef FATHOM_BENCH_DICE_H
#define FATHOM_BENCH_DICE_H

#include <stdint.h>

struct dice {
    uint64_t state;
};

/* Streams of one seed are independent: request 7 draws the same whatever request 6 drew. */
struct dice dice_make(uint64_t seed, uint64_t stream);
uint64_t dice_next(struct dice *dice);
double dice_unit(struct dice *dice);                    /* uniform in (0, 1) */
uint64_t dice_below(struct dice *dice, uint64_t limit); /* uniform in [0, limit), limit 1..2^32 */
double dice_normal(struct dice *dice);                  /* mean 0, deviation 1 */
double dice_gamma(struct dice *dice, double shape);     /* scale 1, shape > 0 */

#endif
