/* Cuts text into pre-tokens: the pieces that merges never cross. Immutable once created. */
#ifndef FATHOM_PRETOKENIZER_H
#define FATHOM_PRETOKENIZER_H

#include "base/base.h"

#include <jansson.h>
#include <stdatomic.h>

struct pretokenizer;

struct span {
    uint32_t start, end;
};

struct span_list {
    struct span *items;
    size_t count, capacity;
};

/* Builds it from the pre_tokenizer member of tokenizer.json. What it cannot do exactly is refused
 * by name. */
int pretokenizer_create(const json_t *description, struct pretokenizer **pretokenizer,
                        struct error *error);
void pretokenizer_destroy(struct pretokenizer *pretokenizer); /* NULL is allowed */

/* ByteLevel's add_prefix_space: the caller puts a space before a text that does not start with
 * one. */
bool pretokenizer_adds_prefix_space(const struct pretokenizer *pretokenizer);

/* Some text may be left out of the pre-tokens. */
bool pretokenizer_removes(const struct pretokenizer *pretokenizer);

/* 0, or FATHOM_CANCELLED once *stop is true; `stop` may be NULL. */
static inline int stop_check(const atomic_bool *stop, struct error *error) {
    if (!stop || !atomic_load_explicit(stop, memory_order_relaxed)) return 0;
    return error_set(error, FATHOM_CANCELLED, "the text was given up");
}

/* Working memory of one encode call. `budget` is shared by all its splits, so that no combination
 * of pattern and text takes longer than linear in the text. */
struct split_state {
    void *match, *context;   /* PCRE2's, NULL before the first split */
    uint64_t budget;         /* match steps left */
    const atomic_bool *stop; /* set by another thread; may be NULL */
    struct span_list spans, scratch;
};

void split_state_init(struct split_state *state, size_t text_length, const atomic_bool *stop);
void split_state_clear(struct split_state *state);

/* Replaces state->spans with the pre-tokens of valid UTF-8 `text` (below 4 GiB), in order, none
 * empty. When the budget is spent, what is left of the text is not cut further: the ids differ, the
 * bytes do not. FATHOM_CANCELLED soon after *state->stop is true. */
int pretokenizer_split(const struct pretokenizer *pretokenizer, struct split_state *state,
                       const char *text, size_t length, struct error *error);

/* Rewrites a pattern in Oniguruma's syntax, as tokenizer.json has it, into PCRE2's with the same
 * meaning. *pcre2 is malloc'd. (pretokenizer_pattern.c) */
int pattern_translate(const char *oniguruma, char **pcre2, struct error *error);

#define PATTERN_LENGTH_MAX 8192

/* ---- ASCII without PCRE2 (pretokenizer_ascii.c) ---------------------------------------------- */

struct ascii_rules;

/* The rules that do what this pattern, in Oniguruma's syntax, does; NULL: it is not known. */
const struct ascii_rules *ascii_rules_find(const char *pattern);

enum ascii_match {
    ASCII_NOTHING, /* the pattern does not match here */
    ASCII_MATCH,
    ASCII_UNDECIDED, /* a character beyond ASCII has a say */
};

/* What the pattern matches at `at`, below `length`; *end is behind a match. Takes no longer than
 * linear in the match, or in the stretch of ASCII before what is beyond it. */
enum ascii_match ascii_match(const struct ascii_rules *rules, const char *text, size_t length,
                             size_t at, size_t *end);

#endif
