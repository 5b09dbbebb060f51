/* When requests of an open loop arrive, whatever the server does. Pure. */
#ifndef FATHOM_BENCH_ARRIVALS_H
#define FATHOM_BENCH_ARRIVALS_H

#include "bench/dice.h"

/* Gaps are gamma distributed with mean 1 / rate: burstiness, the shape, is 1 for Poisson arrivals,
 * under 1 for burstier ones, larger for more regular ones, INFINITY for a constant gap. */
struct arrivals {
    double rate, burstiness;
    struct dice dice;
    double at; /* seconds since the start, of the next arrival */
};

/* The first arrival is at 0. */
void arrivals_init(struct arrivals *arrivals, double rate, double burstiness, uint64_t seed);
void arrivals_advance(struct arrivals *arrivals);

#endif
