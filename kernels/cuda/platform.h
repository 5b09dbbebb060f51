/* CUDA, or its emulation on the CPU: the only place that knows which. */
#ifndef FATHOM_CUDA_PLATFORM_H
#define FATHOM_CUDA_PLATFORM_H

#if defined(FATHOM_EMULATION)
#include "kernels/emulation/emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <stddef.h>
#include <stdint.h>

/* kernel, grid, block, bytes of shared memory, stream, arguments of the kernel */
#define LAUNCH(kernel, grid, block, shared, stream, ...)                                           \
    kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#define UNROLL              _Pragma("unroll") /* so that an array is in registers */
#define DEVICE_NOW_NS()     time_now_ns()
#define COUNT_BYTES(bytes)  ((void)0) /* device memory read or written: the emulation adds up */
#endif

extern "C" {
#include "kernels/kernels.h"
}

#endif
