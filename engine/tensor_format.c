#include "engine/tensor_format.h"

#include "kernels/number.h"

static float scale_at(const unsigned char *bytes) {
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return number_from_f16(bits);
}

/* f16 scale, 32 signed bytes. */
static void unpack_q8_0(const unsigned char *block, float *out) {
    float scale = scale_at(block);
    for (size_t i = 0; i < 32; i++) out[i] = scale * (float)(int8_t)block[2 + i];
}

/* f16 scale, 16 bytes: the low halves are elements 0..15, the high ones 16..31; 8 means zero. */
static void unpack_q4_0(const unsigned char *block, float *out) {
    float scale = scale_at(block);
    for (size_t i = 0; i < 16; i++) {
        out[i] = scale * (float)((block[2 + i] & 15) - 8);
        out[i + 16] = scale * (float)((block[2 + i] >> 4) - 8);
    }
}

/* f16 scale, f16 least value, 16 bytes as above. */
static void unpack_q4_1(const unsigned char *block, float *out) {
    float scale = scale_at(block), least = scale_at(block + 2);
    for (size_t i = 0; i < 16; i++) {
        out[i] = scale * (float)(block[4 + i] & 15) + least;
        out[i + 16] = scale * (float)(block[4 + i] >> 4) + least;
    }
}

/* 128 bytes of low halves, 64 bytes of high pairs of bits, 16 signed scales, f16 scale of all. Each
 * half of the block has 64 + 32 bytes: element 32 q + i has its low half in byte 32 (q % 2) + i, in
 * the upper bits for q > 1, and its high pair in bits 2 q of byte i; 32 means zero. */
static void unpack_q6_k(const unsigned char *block, float *out) {
    const unsigned char *low = block, *high = block + 128, *scales = block + 192;
    float scale = scale_at(block + 208);
    for (size_t half = 0; half < 2; half++, low += 64, high += 32, scales += 8) {
        for (size_t i = 0; i < 128; i++) {
            size_t quarter = i / 32, at = i % 32;
            int code = low[quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
            code |= (high[at] >> 2 * quarter & 3) << 4;
            *out++ = scale * (float)(int8_t)scales[i / 16] * (float)(code - 32);
        }
    }
}

static const struct tensor_format formats[] = {
    {"F32", 0, 1, 4, NULL, DTYPE_F32},
    {"F16", 1, 1, 2, NULL, DTYPE_F16},
    {"BF16", 30, 1, 2, NULL, DTYPE_BF16},
    {"Q4_0", 2, 32, 18, unpack_q4_0, DTYPE_BF16},
    {"Q4_1", 3, 32, 20, unpack_q4_1, DTYPE_BF16},
    {"Q8_0", 8, 32, 34, unpack_q8_0, DTYPE_BF16},
    {"Q6_K", 14, 256, 210, unpack_q6_k, DTYPE_BF16},
};
const char tensor_format_names[] = "F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q6_K";

const struct tensor_format *tensor_format_find(uint32_t number) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (formats[i].number == number) return &formats[i];
    }
    return NULL;
}
