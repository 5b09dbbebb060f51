#include "engine/pretokenizer.h"

#include "engine/tokenizer_private.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#define STAGES_MAX 16

/* Matching runs in PCRE2's interpreter, not its JIT: the interpreter counts every step back, so
 * that no text can hang the server, and needs no memory that is both writable and executable. The
 * JIT does not count steps back within repeats of single characters, which is what these patterns
 * consist of.
 *
 * A match is first tried with few steps, and seeing only the text just ahead: enough for words.
 * When it runs out of either, it is tried again with more of both, and what the failed try may have
 * cost is drawn from the budget. So a run of a million spaces is matched exactly, but cannot be
 * tried from each of its million places. */
#define TRY_STEPS          256
#define TRY_BYTES_PER_STEP 4
#define TRY_FACTOR         16
#define MATCH_HEAP_KIB     (64 * 1024)
#define BUDGET_PER_BYTE    16
#define BUDGET_LEAST       ((uint64_t)1 << 20)

enum behavior {
    BEHAVIOR_REMOVED,
    BEHAVIOR_ISOLATED,
    BEHAVIOR_MERGED_WITH_PREVIOUS,
    BEHAVIOR_MERGED_WITH_NEXT,
    BEHAVIOR_CONTIGUOUS,
};
static const char *const behavior_names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                             "MergedWithNext", "Contiguous"};

/* Cuts every span into matches and the text between them; `behavior` says what becomes of these. */
struct stage {
    pcre2_code *code;
    const struct ascii_rules *ascii; /* that do the same to ASCII; NULL: none */
    enum behavior behavior;
    bool invert; /* what the pattern matches counts as text between, and the other way round */
};

struct pretokenizer {
    struct stage stages[STAGES_MAX];
    size_t count;
    bool byte_level; /* seen: nothing may come after it */
    bool prefix_space;
};

/* ---- Creating -------------------------------------------------------------------------------- */

static int add_stage(struct pretokenizer *pretokenizer, const char *oniguruma,
                     enum behavior behavior, bool invert, struct error *error) {
    if (pretokenizer->count == STAGES_MAX) {
        return error_set(error, FATHOM_INVALID, "more than %d steps", STAGES_MAX);
    }
    char *pattern;
    int result = pattern_translate(oniguruma, &pattern, error);
    if (result != 0) return result;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context) pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    /* Without automatic possessive repeats a repeat that leads nowhere is undone in steps, and
     * counted. */
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_AUTO_POSSESS;
    int code = PCRE2_ERROR_NOMEMORY;
    PCRE2_SIZE offset = 0;
    pcre2_code *compiled = context ? pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                                   options, &code, &offset, context)
                                   : NULL;
    pcre2_compile_context_free(context);
    free(pattern);
    if (!compiled) {
        char reason[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
        return error_set(error, FATHOM_UNSUPPORTED, "pattern '%.200s' is not supported: %s",
                         oniguruma, reason);
    }
    pretokenizer->stages[pretokenizer->count++] =
        (struct stage){compiled, ascii_rules_find(oniguruma), behavior, invert};
    return 0;
}

static int add_byte_level(struct pretokenizer *pretokenizer, const json_t *description,
                          struct error *error) {
    static const char pattern[] = /* GPT-2's */
        "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    bool use_regex, prefix_space;
    int result = json_read_flag(description, "use_regex", true, &use_regex, error);
    if (result == 0) {
        result = json_read_flag(description, "add_prefix_space", true, &prefix_space, error);
    }
    if (result != 0) return result;
    if (prefix_space && pretokenizer->count > 0) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "add_prefix_space of a ByteLevel after another step is not supported");
    }
    pretokenizer->byte_level = true;
    pretokenizer->prefix_space = prefix_space;
    return use_regex ? add_stage(pretokenizer, pattern, BEHAVIOR_ISOLATED, false, error) : 0;
}

static int add_digits(struct pretokenizer *pretokenizer, const json_t *description,
                      struct error *error) {
    bool individual;
    int result = json_read_flag(description, "individual_digits", false, &individual, error);
    if (result != 0) return result;
    return add_stage(pretokenizer, individual ? "\\p{N}" : "\\p{N}+", BEHAVIOR_ISOLATED, false,
                     error);
}

static int read_behavior(const json_t *description, enum behavior *behavior, struct error *error) {
    const char *name = json_string_value(json_object_get(description, "behavior"));
    for (size_t i = 0; name && i < sizeof behavior_names / sizeof *behavior_names; i++) {
        if (strcmp(name, behavior_names[i]) != 0) continue;
        *behavior = (enum behavior)i;
        return 0;
    }
    return error_set(error, FATHOM_UNSUPPORTED, "Split behavior '%.40s' is not supported",
                     name ? name : "");
}

/* Adds a stage for the literal `text`; an empty one never matches. */
static int add_literal(struct pretokenizer *pretokenizer, const char *text, enum behavior behavior,
                       bool invert, struct error *error) {
    char *escaped = malloc(2 * strlen(text) + sizeof "(?!)");
    if (!escaped) return error_set(error, FATHOM_NO_MEMORY, "no memory for a pattern");
    char *out = escaped;
    for (const char *c = text; *c; c++) {
        if (strchr("\\^$.[]|()?*+{}", *c)) *out++ = '\\';
        *out++ = *c;
    }
    strcpy(out, *text ? "" : "(?!)");
    int result = add_stage(pretokenizer, escaped, behavior, invert, error);
    free(escaped);
    return result;
}

static int add_split(struct pretokenizer *pretokenizer, const json_t *description,
                     struct error *error) {
    const json_t *pattern = json_object_get(description, "pattern");
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    const char *string = json_string_value(json_object_get(pattern, "String"));
    enum behavior behavior = BEHAVIOR_ISOLATED;
    bool invert;
    int result = json_read_flag(description, "invert", false, &invert, error);
    if (result == 0) result = read_behavior(description, &behavior, error);
    if (result != 0) return result;
    if (regex) return add_stage(pretokenizer, regex, behavior, invert, error);
    if (string) return add_literal(pretokenizer, string, behavior, invert, error);
    return error_set(error, FATHOM_INVALID, "Split has no pattern with 'Regex' or 'String'");
}

/* One step that is not a Sequence. */
static int add_step(void *context, const json_t *description, struct error *error) {
    struct pretokenizer *pretokenizer = context;
    const char *type = json_type_name(description);
    if (pretokenizer->byte_level) {
        return error_set(error, FATHOM_UNSUPPORTED, "'%.40s' after ByteLevel is not supported",
                         type);
    }
    if (strcmp(type, "ByteLevel") == 0) return add_byte_level(pretokenizer, description, error);
    if (strcmp(type, "Split") == 0) return add_split(pretokenizer, description, error);
    if (strcmp(type, "Digits") == 0) return add_digits(pretokenizer, description, error);
    return error_set(error, FATHOM_UNSUPPORTED, "pre_tokenizer type '%.40s' is not supported",
                     type);
}

int pretokenizer_create(const json_t *description, struct pretokenizer **pretokenizer,
                        struct error *error) {
    struct pretokenizer *created = calloc(1, sizeof *created);
    if (!created) return error_set(error, FATHOM_NO_MEMORY, "no memory for the pre-tokenizer");
    int result = json_read_steps(description, "pretokenizers", add_step, created, error);
    if (result == 0 && !created->byte_level) {
        result = error_set(error, FATHOM_UNSUPPORTED,
                           "a pre_tokenizer without ByteLevel is not supported");
    }
    if (result != 0) {
        pretokenizer_destroy(created);
        return result;
    }
    *pretokenizer = created;
    return 0;
}

void pretokenizer_destroy(struct pretokenizer *pretokenizer) {
    if (!pretokenizer) return;
    for (size_t i = 0; i < pretokenizer->count; i++) pcre2_code_free(pretokenizer->stages[i].code);
    free(pretokenizer);
}

bool pretokenizer_adds_prefix_space(const struct pretokenizer *pretokenizer) {
    return pretokenizer->prefix_space;
}

bool pretokenizer_removes(const struct pretokenizer *pretokenizer) {
    for (size_t i = 0; i < pretokenizer->count; i++) {
        if (pretokenizer->stages[i].behavior == BEHAVIOR_REMOVED) return true;
    }
    return false;
}

/* ---- Splitting ------------------------------------------------------------------------------- */

void split_state_init(struct split_state *state, size_t text_length, const atomic_bool *stop) {
    *state = (struct split_state){
        .budget = BUDGET_LEAST + BUDGET_PER_BYTE * (uint64_t)text_length, .stop = stop};
}

void split_state_clear(struct split_state *state) {
    pcre2_match_data_free(state->match);
    pcre2_match_context_free(state->context);
    free(state->spans.items);
    free(state->scratch.items);
}

static int create_match_memory(struct split_state *state, struct error *error) {
    if (state->match) return 0;
    state->context = pcre2_match_context_create(NULL);
    state->match = pcre2_match_data_create(1, NULL);
    if (!state->context || !state->match) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory to tokenize a text");
    }
    pcre2_set_heap_limit(state->context, MATCH_HEAP_KIB);
    return 0;
}

static int append_span(struct span_list *list, uint32_t start, uint32_t end, struct error *error) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        struct span *items = realloc(list->items, capacity * sizeof *items);
        if (!items) {
            return error_set(error, FATHOM_NO_MEMORY, "no memory for %zu pre-tokens", capacity);
        }
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = (struct span){start, end};
    return 0;
}

/* One span being cut. A piece is a match or the text between two; `out` may hold a last one that
 * grows. */
struct cut {
    const struct stage *stage;
    struct span_list *out;
    size_t first;   /* out->count before this span */
    bool was_match; /* the piece before */
    struct error *error;
};

static int put_piece(struct cut *cut, uint32_t start, uint32_t end, bool matched) {
    bool match = matched != cut->stage->invert;
    bool any = cut->out->count > cut->first, grow = false;
    switch (cut->stage->behavior) {
    case BEHAVIOR_ISOLATED:
        break;
    case BEHAVIOR_REMOVED:
        if (match) return 0;
        break;
    case BEHAVIOR_MERGED_WITH_PREVIOUS:
        grow = any && match && !cut->was_match;
        break;
    case BEHAVIOR_MERGED_WITH_NEXT:
        grow = any && !match && cut->was_match;
        break;
    case BEHAVIOR_CONTIGUOUS:
        grow = any && match == cut->was_match;
        break;
    }
    cut->was_match = match;
    if (grow) {
        cut->out->items[cut->out->count - 1].end = end;
        return 0;
    }
    return append_span(cut->out, start, end, cut->error);
}

static size_t next_character(const char *text, size_t length, size_t at) {
    do at++;
    while (at < length && ((unsigned char)text[at] & 0xC0) == 0x80);
    return at;
}

/* Matches at `at` or nowhere. 1 and *end, or 0: no match, or -1: the budget is spent. */
static int match_pattern(const struct stage *stage, struct split_state *state, const char *text,
                    size_t length, size_t at, size_t *end) {
    for (uint64_t steps = TRY_STEPS;; steps *= TRY_FACTOR) {
        uint64_t bytes = steps * TRY_BYTES_PER_STEP;
        size_t seen = length;
        uint32_t options = PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK;
        if (bytes < length - at) {
            seen = next_character(text, length, at + bytes);
            options |= PCRE2_PARTIAL_HARD; /* says so if it would have looked further */
        }
        pcre2_set_match_limit(state->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
        int code = pcre2_match(stage->code, (PCRE2_SPTR)text, seen, at, options, state->match,
                               state->context);
        if (code > 0) {
            *end = pcre2_get_ovector_pointer(state->match)[1];
            return 1;
        }
        if (code == PCRE2_ERROR_NOMATCH) return 0;
        bool again = code == PCRE2_ERROR_MATCHLIMIT || code == PCRE2_ERROR_PARTIAL;
        if (!again || steps + bytes >= state->budget) {
            state->budget = 0;
            return -1;
        }
        state->budget -= steps + bytes;
    }
}

/* As match_pattern. */
static int match_at(const struct stage *stage, struct split_state *state, const char *text,
                    size_t length, size_t at, size_t *end) {
    if (stage->ascii) {
        enum ascii_match found = ascii_match(stage->ascii, text, length, at, end);
        if (found != ASCII_UNDECIDED) return found == ASCII_MATCH;
    }
    return match_pattern(stage, state, text, length, at, end);
}

/* Cuts text[0, length), which starts at `base` of the whole. Patterns see nothing outside it. */
static int cut_span(struct cut *cut, struct split_state *state, const char *text, size_t length,
                    uint32_t base) {
    size_t between = 0; /* start of the text since the last match */
    size_t at = 0, end = 0;
    bool matched_before = false;
    int result = 0;
    while (at < length && state->budget > 0 && result == 0) {
        if ((result = stop_check(state->stop, cut->error)) != 0) break;
        int found = match_at(cut->stage, state, text, length, at, &end);
        if (found < 0) break;
        /* An empty match right behind a match is none, or the search would not move on. */
        if (found == 0 || (end == at && matched_before && at == between)) {
            at = next_character(text, length, at);
            continue;
        }
        if (at > between) {
            result = put_piece(cut, base + (uint32_t)between, base + (uint32_t)at, false);
        }
        if (result == 0) result = put_piece(cut, base + (uint32_t)at, base + (uint32_t)end, true);
        at = between = end;
        matched_before = true;
    }
    if (result != 0 || between == length) return result;
    uint32_t start = base + (uint32_t)between, stop = base + (uint32_t)length;
    /* Given up: kept as it is, also where the behavior would drop it. */
    if (state->budget == 0) return append_span(cut->out, start, stop, cut->error);
    return put_piece(cut, start, stop, false);
}

static void drop_empty_spans(struct span_list *list) {
    size_t kept = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->items[i].start < list->items[i].end) list->items[kept++] = list->items[i];
    }
    list->count = kept;
}

static int run_stage(const struct stage *stage, struct split_state *state, const char *text,
                     struct error *error) {
    state->scratch.count = 0;
    int result = 0;
    for (size_t i = 0; i < state->spans.count && result == 0; i++) {
        struct span span = state->spans.items[i];
        struct cut cut = {
            .stage = stage, .out = &state->scratch, .first = state->scratch.count, .error = error};
        result = cut_span(&cut, state, text + span.start, span.end - span.start, span.start);
    }
    struct span_list cut_spans = state->scratch;
    state->scratch = state->spans;
    state->spans = cut_spans;
    drop_empty_spans(&state->spans);
    return result;
}

int pretokenizer_split(const struct pretokenizer *pretokenizer, struct split_state *state,
                       const char *text, size_t length, struct error *error) {
    state->spans.count = 0;
    if (length == 0) return 0;
    int result = create_match_memory(state, error);
    if (result == 0) result = append_span(&state->spans, 0, (uint32_t)length, error);
    for (size_t i = 0; i < pretokenizer->count && result == 0; i++) {
        result = run_stage(&pretokenizer->stages[i], state, text, error);
    }
    return result;
}
