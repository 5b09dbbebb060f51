#include "engine/pretokenizer.h"

#include <string.h>

/* What the patterns of the tokenizers that most models have do to ASCII, written out: most text is
 * that, and a regular expression takes several times as long for it. Where a character beyond ASCII
 * has a say, the pattern itself is asked: Unicode's tables are PCRE2's alone. */

#define GPT2_WORDS   " ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define SPLIT_LETTER "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define SPLIT_OTHERS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* The same, possessive; of several line ends both find the last. */
#define OWNED_LETTER "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define OWNED_OTHERS "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"

#define ANY_NUMBER SIZE_MAX

enum style {
    STYLE_GPT2,   /* a space goes with the word, number or signs behind it */
    STYLE_CL100K, /* any one sign goes with the word behind it; line ends are cut apart */
    STYLE_DIGITS, /* nothing but digits is matched */
};

struct ascii_rules {
    const char *pattern; /* Oniguruma's syntax, letter for letter */
    enum style style;
    size_t digits; /* most in one match */
};

static const struct ascii_rules known[] = {
    {"'(?:[sdmt]|ll|ve|re)|" GPT2_WORDS, STYLE_GPT2, ANY_NUMBER},
    {"'s|'t|'re|'ve|'m|'ll|'d|" GPT2_WORDS, STYLE_GPT2, ANY_NUMBER},
    {SPLIT_LETTER "\\p{N}" SPLIT_OTHERS, STYLE_CL100K, 1},
    {SPLIT_LETTER "\\p{N}{1,2}" SPLIT_OTHERS, STYLE_CL100K, 2},
    {SPLIT_LETTER "\\p{N}{1,3}" SPLIT_OTHERS, STYLE_CL100K, 3},
    {OWNED_LETTER "\\p{N}{1,2}" OWNED_OTHERS, STYLE_CL100K, 2},
    {OWNED_LETTER "\\p{N}{1,3}" OWNED_OTHERS, STYLE_CL100K, 3},
    {"\\p{N}", STYLE_DIGITS, 1},
    {"\\p{N}+", STYLE_DIGITS, ANY_NUMBER},
};

const struct ascii_rules *ascii_rules_find(const char *pattern) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].pattern, pattern) == 0) return &known[i];
    }
    return NULL;
}

enum kind {
    LETTER = 1,
    DIGIT = 2,
    BLANK = 4, /* white space that ends no line */
    LINE_END = 8,
    SIGN = 16, /* all the rest of ASCII, control characters too */
    BEYOND = 32,
    TEXT_END = 64,
};

#define L LETTER
#define D DIGIT
#define B BLANK
#define E LINE_END
#define S SIGN
static const uint8_t ascii_kinds[128] = {
    S, S, S, S, S, S, S, S, S, B, E, B, B, E, S, S, /* tab, LF, VT, FF, CR */
    S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S,
    B, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, /* space */
    D, D, D, D, D, D, D, D, D, D, S, S, S, S, S, S, /* 0 to 9 */
    S, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* A */
    L, L, L, L, L, L, L, L, L, L, L, S, S, S, S, S, /* to Z */
    S, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* a */
    L, L, L, L, L, L, L, L, L, L, L, S, S, S, S, S, /* to z */
};
#undef L
#undef D
#undef B
#undef E
#undef S

static unsigned kind_at(const char *text, size_t length, size_t at) {
    if (at >= length) return TEXT_END;
    unsigned char c = (unsigned char)text[at];
    return c < 128 ? ascii_kinds[c] : BEYOND;
}

static size_t skip(const char *text, size_t length, size_t at, unsigned kinds) {
    while (kind_at(text, length, at) & kinds) at++;
    return at;
}

/* A match up to `end`, unless the character there would have to be looked at. */
static enum ascii_match ends_at(const char *text, size_t length, size_t at, size_t *end) {
    *end = at;
    return kind_at(text, length, at) == BEYOND ? ASCII_UNDECIDED : ASCII_MATCH;
}

/* 's, 't, 'm, 'd, 're, 've, 'll. Beyond ASCII there are characters that are one of these letters
 * when case is ignored. */
static enum ascii_match match_contraction(const struct ascii_rules *rules, const char *text,
                                          size_t length, size_t at, size_t *end) {
    unsigned case_bit = rules->style == STYLE_CL100K ? 'a' - 'A' : 0;
    unsigned first = kind_at(text, length, at + 1), second = kind_at(text, length, at + 2);
    if (first == BEYOND) return ASCII_UNDECIDED;
    if (first != LETTER) return ASCII_NOTHING;
    int letter = (int)((unsigned char)text[at + 1] | case_bit);
    *end = at + 2;
    if (strchr("stmd", letter)) return ASCII_MATCH;
    if (!strchr("rvl", letter)) return ASCII_NOTHING;
    if (second == BEYOND) return ASCII_UNDECIDED;
    *end = at + 3;
    return second == LETTER && (int)((unsigned char)text[at + 2] | case_bit) ==
                                   (letter == 'l' ? 'l' : 'e')
               ? ASCII_MATCH
               : ASCII_NOTHING;
}

static enum ascii_match match_digits(const struct ascii_rules *rules, const char *text,
                                     size_t length, size_t at, size_t *end) {
    size_t most = rules->digits < length - at ? at + rules->digits : length;
    *end = skip(text, most, at, DIGIT);
    return *end == most ? ASCII_MATCH : ends_at(text, length, *end, end);
}

static enum ascii_match match_space(const struct ascii_rules *rules, const char *text,
                                    size_t length, size_t at, size_t *end) {
    size_t stop = skip(text, length, at, BLANK | LINE_END), last = stop;
    if (kind_at(text, length, stop) == BEYOND) return ASCII_UNDECIDED;
    while (last > at && kind_at(text, length, last - 1) != LINE_END) last--;
    if (rules->style == STYLE_CL100K && last > at) {
        *end = last;
    } else if (stop == length || stop == at + 1) {
        *end = stop;
    } else {
        *end = stop - 1; /* the last one stays for what follows */
    }
    return ASCII_MATCH;
}

enum ascii_match ascii_match(const struct ascii_rules *rules, const char *text, size_t length,
                             size_t at, size_t *end) {
    unsigned first = kind_at(text, length, at), second = kind_at(text, length, at + 1);
    bool is_gpt2 = rules->style == STYLE_GPT2, is_space = text[at] == ' ';
    if (first == BEYOND) return ASCII_UNDECIDED;
    if (rules->style == STYLE_DIGITS) {
        return first == DIGIT ? match_digits(rules, text, length, at, end) : ASCII_NOTHING;
    }
    if (text[at] == '\'') {
        enum ascii_match found = match_contraction(rules, text, length, at, end);
        if (found != ASCII_NOTHING) return found;
    }
    bool goes_with_letters = is_gpt2 ? is_space : first == BLANK || first == SIGN;
    if (goes_with_letters && second == BEYOND) return ASCII_UNDECIDED;
    if (first == LETTER || (goes_with_letters && second == LETTER)) {
        return ends_at(text, length, skip(text, length, at + 1, LETTER), end);
    }
    bool goes_with_digits = is_gpt2 && is_space && second == DIGIT;
    if (first == DIGIT || goes_with_digits) {
        return match_digits(rules, text, length, at + goes_with_digits, end);
    }
    if (first == SIGN || (is_space && second == SIGN)) {
        size_t stop = skip(text, length, at + 1, SIGN);
        if (kind_at(text, length, stop) == BEYOND) return ASCII_UNDECIDED;
        *end = is_gpt2 ? stop : skip(text, length, stop, LINE_END);
        return ASCII_MATCH;
    }
    return match_space(rules, text, length, at, end);
}
