#include "api/utf8.h"

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
