/* The inner loops for processors with avx512bf16. */
#if defined(__x86_64__)
#include "kernels/cpu/vector_avx512.h"

#define PRIMITIVES            primitives_avx512bf16
#define PRIMITIVES_NAME       "avx512bf16"
#define PRIMITIVES_HALVES_PAY true
#include "kernels/cpu/primitives.inc"
#else
typedef int primitives_need_x86; /* a file must declare something */
#endif
