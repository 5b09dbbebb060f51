#include "bench/dice.h"

#include <math.h>

#include "base/base.h"

/* SplitMix64: one addition and a mix, every state is a good state. */
struct dice dice_make(uint64_t seed, uint64_t stream) {
    return (struct dice){mix_bits(mix_bits(seed + MIX_STEP) ^ (stream * 0xd1342543de82ef95u + 1))};
}

uint64_t dice_next(struct dice *dice) {
    dice->state += MIX_STEP;
    return mix_bits(dice->state);
}

double dice_unit(struct dice *dice) {
    return ((double)(dice_next(dice) >> 11) + 0.5) * 0x1p-53;
}

uint64_t dice_below(struct dice *dice, uint64_t limit) {
    /* The high half of a product: its bias is under limit / 2^32. */
    return ((dice_next(dice) >> 32) * limit) >> 32;
}

double dice_normal(struct dice *dice) {
    double radius = sqrt(-2 * log(dice_unit(dice)));
    return radius * cos(2 * M_PI * dice_unit(dice));
}

/* Marsaglia and Tsang 2000; a shape under 1 is that of shape + 1 times a power of a uniform. */
double dice_gamma(struct dice *dice, double shape) {
    if (shape < 1) {
        double power = pow(dice_unit(dice), 1 / shape);
        return dice_gamma(dice, shape + 1) * power;
    }
    double d = shape - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = dice_normal(dice), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        if (log(dice_unit(dice)) < x * x / 2 + d - d * v + d * log(v)) return d * v;
    }
}
