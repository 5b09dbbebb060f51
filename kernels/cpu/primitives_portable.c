/* The inner loops in portable C. Weights of half the width do not pay here: widening them costs
 * more than reading them. */
#include "kernels/cpu/vector_portable.h"

#define PRIMITIVES            primitives_portable
#define PRIMITIVES_NAME       "portable"
#define PRIMITIVES_HALVES_PAY false
#include "kernels/cpu/primitives.inc"
