#include "api/utf8.h"

#include <string.h>

/* Which second bytes a lead allows: the table of well-formed sequences of the Unicode standard
 * (3-7). It excludes overlong forms, surrogates and what lies beyond U+10FFFF. */
static size_t sequence_shape(unsigned char lead, unsigned char *low, unsigned char *high) {
    *low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    *high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) return 2;
    if (lead >= 0xE0 && lead <= 0xEF) return 3;
    if (lead >= 0xF0 && lead <= 0xF4) return 4;
    return 0;
}

enum utf8_state utf8_scan(const char *bytes, size_t length, size_t *used) {
    unsigned char low, high;
    size_t need = sequence_shape((unsigned char)bytes[0], &low, &high);
    *used = 1;
    if (need == 0) return UTF8_INVALID;
    while (*used < need) {
        if (*used == length) return UTF8_TORN;
        unsigned char byte = (unsigned char)bytes[*used];
        if (byte < low || byte > high) return UTF8_INVALID;
        low = 0x80, high = 0xBF;
        ++*used;
    }
    return UTF8_VALID;
}

size_t utf8_resync(struct utf8_decoder *decoder, char byte, struct text_buffer *out) {
    if (decoder->length == 0) return 0;
    size_t used;
    decoder->torn[decoder->length] = byte; /* a torn character has at most 3 bytes */
    if (utf8_scan(decoder->torn, decoder->length + 1, &used) != UTF8_INVALID) return 0;
    return utf8_finish(decoder, out);
}

size_t utf8_take(struct utf8_decoder *decoder, char byte, struct text_buffer *out) {
    size_t used;
    decoder->torn[decoder->length++] = byte;
    enum utf8_state state = utf8_scan(decoder->torn, decoder->length, &used);
    if (state == UTF8_TORN) return 0;
    if (state == UTF8_INVALID) return utf8_finish(decoder, out);
    text_append(out, decoder->torn, decoder->length);
    decoder->length = 0;
    return 1;
}

size_t utf8_finish(struct utf8_decoder *decoder, struct text_buffer *out) {
    if (decoder->length == 0) return 0;
    decoder->length = 0;
    text_append_string(out, UTF8_REPLACEMENT);
    return 1;
}
