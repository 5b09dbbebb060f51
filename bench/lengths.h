/* How many tokens: a fixed number or a distribution. Pure. */
#ifndef FATHOM_BENCH_LENGTHS_H
#define FATHOM_BENCH_LENGTHS_H

#include "base/base.h"
#include "bench/dice.h"

#define LENGTH_MAX 1048576 /* every draw lies in 1..LENGTH_MAX */

enum length_kind {
    LENGTH_FIXED,
    LENGTH_UNIFORM,
    LENGTH_NORMAL,
    LENGTH_LOGNORMAL,
    LENGTH_EXPONENTIAL,
};

struct lengths {
    enum length_kind kind;
    double first, second; /* N | low, high | mean, deviation | mean, deviation | mean */
};

/* "128", "64-256", "normal:128:32", "lognormal:128:64", "exponential:128". `flag` is for errors. */
int lengths_parse(const char *flag, const char *text, struct lengths *lengths, struct error *error);
size_t lengths_draw(const struct lengths *lengths, struct dice *dice);

#endif
