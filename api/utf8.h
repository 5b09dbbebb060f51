/* UTF-8 out of bytes that need not be: the WHATWG decoding practice, where every maximal piece of
 * an invalid sequence becomes one U+FFFD. Private to api/. */
#ifndef FATHOM_UTF8_H
#define FATHOM_UTF8_H

#include "api/api.h"

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* A byte stream that arrives in pieces; zero-initialised is the start. */
struct utf8_decoder {
    char torn[4]; /* the character under way */
    size_t length;
};

/* Before each byte: if the character under way cannot go on with it, ends it as U+FFFD. Then takes
 * the byte. Both return how many characters they appended to `out`. */
size_t utf8_resync(struct utf8_decoder *decoder, char byte, struct text_buffer *out);
size_t utf8_take(struct utf8_decoder *decoder, char byte, struct text_buffer *out);

/* At the end of the stream: a character under way becomes U+FFFD. */
size_t utf8_finish(struct utf8_decoder *decoder, struct text_buffer *out);

#endif
