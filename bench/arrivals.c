#include "bench/arrivals.h"

#include <math.h>

enum { ARRIVALS_STREAM = 0x41525256 }; /* apart from the streams of the requests */

void arrivals_init(struct arrivals *arrivals, double rate, double burstiness, uint64_t seed) {
    *arrivals = (struct arrivals){rate, burstiness, dice_make(~seed, ARRIVALS_STREAM), 0};
}

void arrivals_advance(struct arrivals *arrivals) {
    double gap = 1; /* in mean gaps */
    if (isfinite(arrivals->burstiness))
        gap = dice_gamma(&arrivals->dice, arrivals->burstiness) / arrivals->burstiness;
    arrivals->at += gap / arrivals->rate;
}
