/* Single numbers in the types of a checkpoint. */
#ifndef FATHOM_NUMBER_H
#define FATHOM_NUMBER_H

#include "kernels/kernels.h"

#include <string.h>

static inline uint32_t number_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float number_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Nearest, ties to even. A NaN gets the quiet bit, or one with a small payload would become
 * infinity. */
static inline uint16_t number_to_bf16(float value) {
    uint32_t bits = number_bits(value);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((is_nan ? bits | 0x00400000 : rounded) >> 16);
}

static inline float number_from_bf16(uint16_t value) {
    return number_from_bits((uint32_t)value << 16);
}

static inline float number_from_f16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16;
    uint32_t exponent = (value >> 10) & 31, fraction = value & 1023;
    if (exponent == 0) { /* zero or subnormal: a multiple of 2^-24 */
        return number_from_bits(sign | number_bits((float)fraction * 0x1p-24f));
    }
    exponent = exponent == 31 ? 255 : exponent + 112; /* 112 = bias 127 - bias 15 */
    return number_from_bits(sign | exponent << 23 | fraction << 13);
}

/* Element i of an array of `type`, which need not be aligned: checkpoints are mapped files. */
static inline float number_load(const void *data, enum dtype type, size_t i) {
    const unsigned char *at = (const unsigned char *)data + i * dtype_size(type);
    if (type == DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return type == DTYPE_BF16 ? number_from_bf16(half) : number_from_f16(half);
}

#endif
