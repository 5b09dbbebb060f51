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

/* Nearest, ties to even. Infinite above 65504, like the conversion instruction. */
static inline uint16_t number_to_f16(float value) {
    uint32_t bits = number_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size < 0x38800000) { /* below 2^-14: a multiple of 2^-24, rounded by adding 2^-24 * 2^23 */
        return (uint16_t)(sign | (number_bits(number_from_bits(size) + 0.5f) - number_bits(0.5f)));
    }
    uint32_t rounded = size + 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | (rounded >= 0x47800000 ? 0x7c00 : (rounded - 0x38000000) >> 13));
}

/* Codes -127..127 of a group of numbers, and the scale that they are to be multiplied by: a bf16
 * number, the least with which the largest of x has a code. Below 2^-100 all is zero. A group with
 * a number that is not finite has the scale NaN: a broken model must not look like a good one.
 * Loops of constant length over bits, so that every instruction set finds the same in vectors. */
static inline float number_quantise(const float *x, int16_t *codes) {
    const float shift = 0x1.8p23f; /* adding it rounds to an integer, in the low bits */
    uint32_t top = 0;
    for (size_t i = 0; i < INT8_GROUP; i++) {
        uint32_t size = number_bits(x[i]) & 0x7fffffff;
        top = size > top ? size : top;
    }
    if (top >= 0x7f800000) {
        memset(codes, 0, INT8_GROUP * sizeof *codes);
        return number_from_bits(0x7fc00000);
    }
    float largest = top >= number_bits(0x1p-100f) ? number_from_bits(top) : 0;
    float scale = number_from_bits((number_bits(largest / 127) + 0xffff) & 0xffff0000);
    float inverse = largest == 0 ? 0 : 1 / scale;
    for (size_t i = 0; i < INT8_GROUP; i++) {
        codes[i] = (int16_t)(number_bits(x[i] * inverse + shift) - number_bits(shift));
    }
    return scale;
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
