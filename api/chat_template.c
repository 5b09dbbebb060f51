#include "api/chat.h"

#include <string.h>

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* A string of the code, from its first quote on; returns what is behind it. */
static const char *copy_string(const char *at, struct text_buffer *out) {
    char quote = *at++;
    text_append_string(out, "\"");
    while (*at && *at != quote) {
        if (*at == '\n') {
            text_append_string(out, "\\n");
        } else {
            if (*at == '\\' && at[1]) text_append(out, at++, 1);
            text_append(out, at, 1);
        }
        at++;
    }
    text_append_string(out, "\"");
    return *at ? at + 1 : at;
}

/* From behind {{ or {% to its end, included. */
static const char *copy_code(const char *at, struct text_buffer *out) {
    while (*at && !starts_with(at, "}}") && !starts_with(at, "%}")) {
        if (*at == '"' || *at == '\'') {
            at = copy_string(at, out);
        } else {
            if (!strchr(" \t\r\n", *at)) text_append(out, at, 1);
            at++;
        }
    }
    if (!*at) return at;
    text_append(out, at, 2);
    return at + 2;
}

/* `to` is not longer than `from`; text is NUL-terminated. */
static void replace_all(struct text_buffer *text, const char *from, const char *to) {
    char *write = text->data, *read = text->data, *found;
    while ((found = strstr(read, from))) {
        size_t before = (size_t)(found - read);
        memmove(write, read, before);
        memcpy(write + before, to, strlen(to));
        write += before + strlen(to);
        read = found + strlen(from);
    }
    memmove(write, read, strlen(read) + 1);
}

void chat_template_normalize(const char *source, struct text_buffer *out) {
    for (const char *at = source; *at;) {
        if (starts_with(at, "{#")) {
            const char *end = strstr(at, "#}");
            at = end ? end + 2 : at + strlen(at);
        } else if (starts_with(at, "{{") || starts_with(at, "{%")) {
            text_append(out, at, 2);
            at = copy_code(at + 2, out);
        } else {
            if (*at == '\n') {
                text_append_string(out, "\\n");
            } else {
                text_append(out, at, 1);
            }
            at++;
        }
    }
    text_append(out, "", 1);
    if (out->failed) return;
    replace_all(out, "\"+\"", "");
    replace_all(out, "[\"role\"]", ".role");
    replace_all(out, "[\"content\"]", ".content");
}

char *chat_template_find_system(const char *normal, const char *open, const char *close,
                                bool *unclear) {
    const char *text = NULL;
    size_t length = 0;
    *unclear = true;
    for (const char *at = normal; (at = strstr(at, open)); at++) {
        const char *start = at + strlen(open);
        if (*start == '"') continue; /* the message's own text follows */
        const char *end = strstr(start, close);
        if (at == normal || at[-1] != '"' || !end || end[strlen(close)] != '"') return NULL;
        size_t found = (size_t)(end - start);
        if (memchr(start, '"', found) || memchr(start, '\\', found)) return NULL;
        if (text && (found != length || memcmp(text, start, found) != 0)) return NULL;
        text = start;
        length = found;
    }
    char *copy = text ? strndup(text, length) : NULL;
    *unclear = text && !copy;
    return copy;
}
