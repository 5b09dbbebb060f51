/* What the machine can do at most, measured: multiply-adds per second of registers alone, and bytes
 * per second that threads read from memory. Figures of kernels are shown beside these. */
#ifndef FATHOM_TESTS_PEAKS_H
#define FATHOM_TESTS_PEAKS_H

#include "kernels/kernels.h"

/* Operations (a multiply and an add are two) per second of one thread with the instructions that
 * the set `isa` has for weights of `type`. 0 where there are none of its own: portable C. */
double peak_operations(const char *isa, enum dtype type);

/* Bytes per second that `threads` threads read together from 256 MiB. 0: no memory. */
double peak_read(size_t threads);

#endif
