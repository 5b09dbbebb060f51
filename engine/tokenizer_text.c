#include "engine/tokenizer_private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

size_t utf8_valid_prefix(const char *text, size_t length) {
    size_t at = 0, used;
    while (at < length) {
        if ((unsigned char)text[at] < 0x80) { /* most texts are mostly that */
            at++;
            continue;
        }
        if (utf8_scan(text + at, length - at, &used) != UTF8_VALID) break;
        at += used;
    }
    return at;
}

/* The next character of valid text; moves *at behind it. */
static int32_t utf8_decode(const unsigned char *text, size_t *at) {
    const unsigned char *byte = text + *at;
    if (byte[0] < 0x80) {
        *at += 1;
        return byte[0];
    }
    if (byte[0] < 0xE0) {
        *at += 2;
        return (byte[0] & 0x1F) << 6 | (byte[1] & 0x3F);
    }
    if (byte[0] < 0xF0) {
        *at += 3;
        return (byte[0] & 0x0F) << 12 | (byte[1] & 0x3F) << 6 | (byte[2] & 0x3F);
    }
    *at += 4;
    return (byte[0] & 0x07) << 18 | (byte[1] & 0x3F) << 12 | (byte[2] & 0x3F) << 6 |
           (byte[3] & 0x3F);
}

/* Unicode's White_Space property. */
static bool is_white_space(int32_t c) {
    return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

size_t utf8_leading_space(const char *text, size_t length) {
    size_t at = 0;
    return length > 0 && is_white_space(utf8_decode((const unsigned char *)text, &at)) ? at : 0;
}

size_t utf8_trailing_space(const char *text, size_t length) {
    if (length == 0) return 0;
    size_t start = length - 1;
    while (start > 0 && ((unsigned char)text[start] & 0xC0) == 0x80) start--;
    return utf8_leading_space(text + start, length - start);
}

/* ---- NFC ------------------------------------------------------------------------------------- */

/* Characters below U+0300 (lead bytes below 0xCC) are composed and do not compose with another. */
bool text_is_surely_nfc(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)text[i] >= 0xCC) return false;
    }
    return true;
}

struct codepoints {
    int32_t *items;
    size_t count, capacity;
};

#define DECOMPOSITION_MAX 32 /* room for one character's; the longest canonical one has 4 */

static bool codepoints_reserve(struct codepoints *points) {
    if (points->capacity - points->count >= DECOMPOSITION_MAX) return true;
    size_t capacity = points->capacity + points->capacity / 2 + DECOMPOSITION_MAX;
    int32_t *items = realloc(points->items, capacity * sizeof *items);
    if (!items) return false;
    points->items = items;
    points->capacity = capacity;
    return true;
}

static unsigned combining_class(int32_t codepoint) {
    return (unsigned)utf8proc_get_property(codepoint)->combining_class & 0xFF;
}

/* Orders one run of combining marks by class, stably, by counting: a text may be one run of
 * megabytes, where utf8proc's own ordering by swapping neighbours would take hours. */
static bool order_marks(int32_t *marks, size_t count) {
    int32_t *sorted = malloc(count * sizeof *sorted);
    if (!sorted) return false;
    size_t starts[257] = {0};
    for (size_t i = 0; i < count; i++) starts[combining_class(marks[i]) + 1]++;
    for (size_t i = 1; i < 257; i++) starts[i] += starts[i - 1];
    for (size_t i = 0; i < count; i++) sorted[starts[combining_class(marks[i])]++] = marks[i];
    memcpy(marks, sorted, count * sizeof *marks);
    free(sorted);
    return true;
}

static bool order_all_marks(struct codepoints *points) {
    for (size_t i = 0; i < points->count;) {
        size_t start = i;
        bool ordered = true;
        unsigned last = 0, class;
        while (i < points->count && (class = combining_class(points->items[i])) != 0) {
            if (class < last) ordered = false;
            last = class;
            i++;
        }
        if (!ordered && !order_marks(points->items + start, i - start)) return false;
        if (i == start) i++;
    }
    return true;
}

static bool decompose(const char *text, size_t length, struct codepoints *points) {
    int boundary = 0; /* written only for grapheme breaks, which are not asked for */
    for (size_t at = 0; at < length;) {
        if (!codepoints_reserve(points)) return false;
        int32_t codepoint = utf8_decode((const unsigned char *)text, &at);
        utf8proc_ssize_t count =
            utf8proc_decompose_char(codepoint, points->items + points->count, DECOMPOSITION_MAX,
                                    UTF8PROC_DECOMPOSE, &boundary);
        assert(count >= 0 && count <= DECOMPOSITION_MAX);
        points->count += (size_t)count;
    }
    return order_all_marks(points);
}

int byte_buffer_reserve(struct byte_buffer *buffer, size_t extra, struct error *error) {
    size_t needed;
    if (!size_add(buffer->length, extra, &needed)) needed = SIZE_MAX;
    if (needed <= buffer->capacity) return 0;
    char *bytes = realloc(buffer->bytes, needed);
    if (!bytes) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for a text of %zu bytes", needed);
    }
    buffer->bytes = bytes;
    buffer->capacity = needed;
    return 0;
}

int text_normalize_nfc(const char *text, size_t length, struct byte_buffer *out,
                       struct error *error) {
    struct codepoints points = {0};
    int result = 0;
    out->length = 0;
    if (!decompose(text, length, &points)) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory to normalize a text of %zu bytes",
                           length);
    } else {
        utf8proc_ssize_t count = utf8proc_normalize_utf32(
            points.items, (utf8proc_ssize_t)points.count, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
        assert(count >= 0);
        points.count = (size_t)count;
        result = byte_buffer_reserve(out, 4 * points.count, error);
    }
    for (size_t i = 0; i < points.count && result == 0; i++) {
        out->length += (size_t)utf8proc_encode_char(points.items[i],
                                                    (utf8proc_uint8_t *)out->bytes + out->length);
    }
    free(points.items);
    return result;
}
