/* Sums and numbers for the threads of a block. Every order is fixed by the size of the block. */
#ifndef FATHOM_CUDA_BLOCK_H
#define FATHOM_CUDA_BLOCK_H

#include "kernels/cuda/cuda.h"

#define ALL_LANES   0xffffffffu

static __device__ __forceinline__ float number_of(float x) {
    return x;
}
static __device__ __forceinline__ float number_of(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
static __device__ __forceinline__ void number_store(float *to, float x) {
    *to = x;
}
static __device__ __forceinline__ void number_store(__nv_bfloat16 *to, float x) {
    *to = __float2bfloat16(x);
}
static __device__ __forceinline__ void number_store(__half *to, float x) {
    *to = __float2half(x);
}

/* The bits of x as BF16 or F16. */
static __device__ __forceinline__ uint16_t half_bits(float x, enum dtype type) {
    return type == DTYPE_F16 ? __half_as_ushort(__float2half(x))
                             : __bfloat16_as_ushort(__float2bfloat16(x));
}

/* IEEE half precision by its definition, so that the emulation needs no type for it. */
static __device__ __forceinline__ float half_value(unsigned bits) {
    unsigned sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    exponent = exponent == 31 ? 255 : exponent + 112; /* 112 = bias 127 - bias 15 */
    return __uint_as_float(sign | exponent << 23 | fraction << 13);
}

static __device__ __forceinline__ float table_value(const void *table, enum dtype type, size_t i) {
    if (type == DTYPE_F32) return ((const float *)table)[i];
    uint16_t bits = ((const uint16_t *)table)[i];
    return type == DTYPE_BF16 ? __uint_as_float((unsigned)bits << 16) : half_value(bits);
}

static __device__ __forceinline__ float warp_sum(float x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}
static __device__ __forceinline__ float warp_largest(float x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, bits);
        x = other > x ? other : x;
    }
    return x;
}

/* The sum of x over the block, in every thread. `scratch` is shared, one float per warp. */
static __device__ __forceinline__ float block_sum(float x, float *scratch) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    x = warp_sum(x);
    __syncthreads(); /* the sum before this one has been read */
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    float sum = scratch[0];
    for (int i = 1; i < (int)blockDim.x / WARP; i++) sum += scratch[i];
    return sum;
}

static __device__ __forceinline__ int active_count(const struct active &active) {
    if (!active.count) return active.most;
    return *active.count < active.most ? *active.count : active.most;
}
static __device__ __forceinline__ int active_row(const struct active &active, int i) {
    return active.indices ? active.indices[i] : i;
}

#endif
