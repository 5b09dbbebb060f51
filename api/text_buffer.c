#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/utf8.h"

static bool text_reserve(struct text_buffer *buffer, size_t extra) {
    size_t need, doubled;
    if (buffer->failed) return false;
    if (!size_add(buffer->length, extra, &need)) return !(buffer->failed = true);
    if (need <= buffer->capacity) return true;
    size_t capacity = need < 64 ? 64 : need;
    if (size_multiply(buffer->capacity, 2, &doubled) && doubled > capacity) capacity = doubled;
    char *data = realloc(buffer->data, capacity);
    if (!data) return !(buffer->failed = true);
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void text_append(struct text_buffer *buffer, const char *bytes, size_t length) {
    if (length == 0 || !text_reserve(buffer, length)) return;
    memcpy(buffer->data + buffer->length, bytes, length);
    buffer->length += length;
}

void text_append_string(struct text_buffer *buffer, const char *string) {
    text_append(buffer, string, strlen(string));
}

void text_append_number(struct text_buffer *buffer, uint64_t number) {
    char digits[20]; /* of 2^64 - 1 */
    size_t start = sizeof digits;
    do digits[--start] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    text_append(buffer, digits + start, sizeof digits - start);
}

void text_append_format(struct text_buffer *buffer, const char *format, ...) {
    /* Most of what is formatted is short: 32 bytes beforehand save the second pass. */
    for (size_t room = 32;;) {
        if (!text_reserve(buffer, room)) return;
        va_list arguments;
        va_start(arguments, format);
        int length = vsnprintf(buffer->data + buffer->length, room, format, arguments);
        va_end(arguments);
        if (length < 0) {
            buffer->failed = true;
            return;
        }
        if ((size_t)length < room) {
            buffer->length += (size_t)length;
            return;
        }
        room = (size_t)length + 1;
    }
}

static void append_escape(struct text_buffer *buffer, char byte) {
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    const char *found = byte ? strchr(from, byte) : NULL;
    if (found) {
        char escape[2] = {'\\', to[found - from]};
        text_append(buffer, escape, 2);
    } else {
        text_append_format(buffer, "\\u%04x", (unsigned)(unsigned char)byte);
    }
}

/* 0x7f needs no escape in JSON. */
static bool is_plain(char byte) {
    unsigned char value = (unsigned char)byte;
    return value >= 0x20 && value < 0x80 && byte != '"' && byte != '\\';
}

void text_append_json(struct text_buffer *buffer, const char *bytes, size_t length) {
    text_append(buffer, "\"", 1);
    for (size_t at = 0, used; at < length; at += used) {
        for (used = 0; at + used < length && is_plain(bytes[at + used]);) used++;
        text_append(buffer, bytes + at, used);
        if (used > 0) continue;
        enum utf8_state state = utf8_scan(bytes + at, length - at, &used);
        if (state != UTF8_VALID) {
            text_append_string(buffer, UTF8_REPLACEMENT);
        } else if (used > 1) {
            text_append(buffer, bytes + at, used);
        } else {
            append_escape(buffer, bytes[at]);
        }
    }
    text_append(buffer, "\"", 1);
}

void text_free(struct text_buffer *buffer) {
    free(buffer->data);
    *buffer = (struct text_buffer){0};
}
