/* The inner loops for processors with avx2. */
#if defined(__x86_64__)
#include "kernels/cpu/vector_avx2.h"

#define PRIMITIVES            primitives_avx2
#define PRIMITIVES_NAME       "avx2"
#define PRIMITIVES_HALVES_PAY true
#include "kernels/cpu/primitives.inc"
#else
typedef int primitives_need_x86; /* a file must declare something */
#endif
