/* The inner loops for processors with avx512 and vnni. */
#if defined(__x86_64__)
#include "kernels/cpu/vector_avx512.h"

#define PRIMITIVES            primitives_avx512vnni
#define PRIMITIVES_NAME       "avx512vnni"
#define PRIMITIVES_HALVES_PAY true
#include "kernels/cpu/primitives.inc"
#else
typedef int primitives_need_x86; /* a file must declare something */
#endif
