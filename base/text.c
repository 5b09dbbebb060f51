/* Texts from outside, before anything is made of them: UTF-8 and the size of JSON. */
#include "base.h"

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

struct json_extent json_measure(const char *text, size_t length) {
    struct json_extent extent = {0};
    size_t depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\') i++;
            if (c == '"') in_string = false;
            continue;
        }
        if (c == '"') in_string = true;
        if (c == '[' || c == '{') {
            extent.containers++;
            if (++depth > extent.depth) extent.depth = depth;
        }
        if (c == ']' || c == '}') depth -= depth > 0;
        extent.commas += c == ',';
        extent.colons += c == ':';
    }
    return extent;
}
