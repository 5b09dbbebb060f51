/* Tokenizer files hold patterns in Oniguruma's Ruby syntax. Most of it means the same to PCRE2
 * (compiled with UTF, UCP, MULTILINE and newline LF); what does not is rewritten here, and what
 * cannot be rewritten, or is not known to mean the same, is refused. The differences:
 *   \s \w \h \v    other sets of characters, or another meaning altogether
 *   [a[bc]]        a class in a class is a union; PCRE2 sees a literal '['
 *   \uHHHH {,n}    not in PCRE2
 *   {n,m}+ {n}?    repeat a repeat; PCRE2: possessive, lazy
 */
#include "engine/pretokenizer.h"

#include <stdlib.h>
#include <string.h>

/* The characters of Unicode's White_Space property. */
#define SPACE_SET                                                                                  \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{"    \
    "205f}"                                                                                        \
    "\\x{3000}"
/* All others: categories but Z, and the control characters that are no space. PCRE2 knows the
 * properties White_Space and Alphabetic by name from 10.40 on, categories always. */
#define NOT_SPACE_SET                                                                              \
    "\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}\\p{Cf}\\p{Co}\\p{Cn}\\p{Cs}"                                   \
    "\\x00-\\x08\\x0e-\\x1f\\x7f-\\x{84}\\x{86}-\\x{9f}"
/* Alphabetic, M, Nd and Pc: what of Alphabetic is not L, M or Nl are letters in circles. */
#define WORD_SET                                                                                   \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}"                    \
    "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"
#define HEX_SET "0-9A-Fa-f"
/* No construct becomes more than this many times longer: \W, 2 bytes, is the worst. */
#define GROWTH ((sizeof WORD_SET + 3) / 2)
_Static_assert(sizeof WORD_SET >= sizeof SPACE_SET && sizeof WORD_SET >= sizeof NOT_SPACE_SET,
               "GROWTH is that of the longest set");

struct translation {
    const char *start, *in; /* the pattern, and what is left of it */
    char *out;              /* where to write */
    unsigned nested;        /* open '[' */
    struct error *error;
};

static void emit(struct translation *t, const char *text, size_t length) {
    memcpy(t->out, text, length);
    t->out += length;
}

/* Copies `length` bytes of the pattern as they are. */
static void copy(struct translation *t, size_t length) {
    emit(t, t->in, length);
    t->in += length;
}

/* Writes `text` for the next `length` bytes of the pattern. */
static void replace(struct translation *t, size_t length, const char *text) {
    emit(t, text, strlen(text));
    t->in += length;
}

static int refuse(const struct translation *t, size_t length) {
    return error_set(t->error, FATHOM_UNSUPPORTED, "'%.*s' in a pattern is not supported",
                     (int)length, t->in);
}

static bool is_one_of(char c, const char *set) {
    return c != '\0' && strchr(set, c) != NULL;
}

static size_t count_hex(const char *text) {
    return strspn(text, "0123456789abcdefABCDEF");
}

/* \p{Name}, \P{Name}, \x{HHHH}: through the closing brace. */
static int translate_braced(struct translation *t) {
    const char *end = t->in[2] == '{' ? strchr(t->in, '}') : NULL;
    if (!end) return refuse(t, 2);
    copy(t, (size_t)(end - t->in) + 1);
    return 0;
}

static int translate_escape(struct translation *t) {
    bool in_class = t->nested > 0;
    char c = t->in[1];
    if (is_one_of(c, "nrtfaedD")) {
        copy(t, 2);
    } else if (is_one_of(c, "pP") || (c == 'x' && t->in[2] == '{')) {
        return translate_braced(t);
    } else if (c == 's') {
        replace(t, 2, in_class ? SPACE_SET : "[" SPACE_SET "]");
    } else if (c == 'S') {
        replace(t, 2, in_class ? NOT_SPACE_SET : "[^" SPACE_SET "]");
    } else if (c == 'w') {
        replace(t, 2, in_class ? WORD_SET : "[" WORD_SET "]");
    } else if (c == 'W' && !in_class) {
        replace(t, 2, "[^" WORD_SET "]");
    } else if (c == 'h') {
        replace(t, 2, in_class ? HEX_SET : "[" HEX_SET "]");
    } else if (c == 'v') {
        replace(t, 2, "\\x0b");
    } else if (is_one_of(c, "AzZ") && !in_class) {
        copy(t, 2);
    } else if (c == 'x' && is_one_of(t->in[2], "01234567") && count_hex(t->in + 2) >= 2) {
        copy(t, 4); /* from \x80 on it would be a byte, not a character */
    } else if (c == 'u' && count_hex(t->in + 2) >= 4) {
        emit(t, "\\x{", 3);
        t->in += 2;
        copy(t, 4);
        emit(t, "}", 1);
    } else if (c == '\0' || is_one_of(c, "0123456789") ||
               ((c | 0x20) >= 'a' && (c | 0x20) <= 'z')) {
        return refuse(t, c ? 2 : 1);
    } else {
        copy(t, 2); /* punctuation, or the first byte of a character, standing for itself */
    }
    return 0;
}

static int translate_in_class(struct translation *t) {
    char c = t->in[0];
    if (c == '\\') return translate_escape(t);
    if (c == '&' && t->in[1] == '&') return refuse(t, 2);
    if (c == '[') {
        /* A union loses its brackets; next to a '-' that would make a range of it. */
        if (is_one_of(t->in[1], "^:]") || t->in[-1] == '-') return refuse(t, 2);
        t->nested++;
        t->in++;
    } else if (c == ']') {
        if (t->nested > 1 && t->in[1] == '-') return refuse(t, 2);
        if (t->nested == 1) emit(t, "]", 1);
        t->nested--;
        t->in++;
    } else {
        copy(t, 1);
    }
    return 0;
}

static void translate_class_start(struct translation *t) {
    t->nested = 1;
    copy(t, t->in[1] == '^' ? 2 : 1);
    if (t->in[0] == ']') replace(t, 1, "\\]");
}

static int translate_group_start(struct translation *t) {
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    if (t->in[1] == '*') return refuse(t, 2);
    if (t->in[1] != '?') {
        copy(t, 1);
        return 0;
    }
    if (t->in == t->start && strncmp(t->in, "(?i)", 4) == 0) {
        copy(t, 4); /* further on, Ruby's reaches over the alternatives that follow */
        return 0;
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t length = strlen(known[i]);
        if (strncmp(t->in, known[i], length) != 0) continue;
        copy(t, length);
        return 0;
    }
    return refuse(t, 3);
}

static int translate_brace(struct translation *t) {
    const char *least = t->in + 1;
    size_t least_digits = strspn(least, "0123456789");
    const char *most = least + least_digits;
    bool comma = *most == ',';
    size_t most_digits = comma ? strspn(++most, "0123456789") : 0;
    const char *end = most + most_digits;
    if (*end != '}' || least_digits + most_digits == 0) {
        replace(t, 1, "\\{");
        return 0;
    }
    size_t length = (size_t)(end - t->in) + 1;
    if (end[1] == '+' || (end[1] == '?' && !comma)) return refuse(t, length + 1);
    if (least_digits == 0) replace(t, 1, "{0");
    copy(t, (size_t)(end - t->in) + 1);
    return 0;
}

static int translate_next(struct translation *t) {
    if (t->nested > 0) return translate_in_class(t);
    switch (t->in[0]) {
    case '\\':
        return translate_escape(t);
    case '(':
        return translate_group_start(t);
    case '{':
        return translate_brace(t);
    case '[':
        translate_class_start(t);
        return 0;
    default:
        copy(t, 1);
        return 0;
    }
}

int pattern_translate(const char *oniguruma, char **pcre2, struct error *error) {
    size_t length = strlen(oniguruma);
    if (length > PATTERN_LENGTH_MAX) {
        return error_set(error, FATHOM_INVALID, "a pattern has %zu bytes; the limit is %d", length,
                         PATTERN_LENGTH_MAX);
    }
    char *out = malloc(GROWTH * length + 1);
    if (!out) return error_set(error, FATHOM_NO_MEMORY, "no memory for a pattern");
    struct translation translation = {
        .start = oniguruma, .in = oniguruma, .out = out, .error = error};
    int result = 0;
    while (*translation.in && result == 0) result = translate_next(&translation);
    if (result == 0 && translation.nested > 0) {
        result = error_set(error, FATHOM_INVALID, "a pattern has a '[' without ']'");
    }
    if (result != 0) {
        free(out);
        return result;
    }
    *translation.out = '\0';
    *pcre2 = out;
    return 0;
}
