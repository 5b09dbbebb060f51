/* Words found without a regular expression are those that the expression finds; and work that
 * nobody waits for any more stops. */
#include "engine/tokenizer_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define CL100K_LETTERS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define CL100K_OTHERS  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define OWNED_LETTERS  "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define OWNED_OTHERS   "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define GPT2_WORDS     " ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static const char *const patterns[] = {
    "'(?:[sdmt]|ll|ve|re)|" GPT2_WORDS,
    "'s|'t|'re|'ve|'m|'ll|'d|" GPT2_WORDS,
    CL100K_LETTERS "\\p{N}" CL100K_OTHERS,
    CL100K_LETTERS "\\p{N}{1,2}" CL100K_OTHERS,
    CL100K_LETTERS "\\p{N}{1,3}" CL100K_OTHERS,
    OWNED_LETTERS "\\p{N}{1,2}" OWNED_OTHERS,
    OWNED_LETTERS "\\p{N}{1,3}" OWNED_OTHERS,
    "\\p{N}",
    "\\p{N}+",
};
#define PATTERNS (sizeof patterns / sizeof *patterns)

static struct pretokenizer *splitter(const char *before, const char *pattern, const char *after) {
    char whole[512];
    snprintf(whole, sizeof whole, "%s%s%s", before, pattern, after);
    json_t *description =
        json_pack("{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s, s:b, s:b}]}", "type", "Sequence",
                  "pretokenizers", "type", "Split", "pattern", "Regex", whole, "behavior",
                  "Isolated", "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    struct pretokenizer *pretokenizer = NULL;
    struct error error = {0};
    if (pretokenizer_create(description, &pretokenizer, &error) != 0) fail_msg("%s", error.message);
    json_decref(description);
    return pretokenizer;
}

static struct span_list split(const struct pretokenizer *pretokenizer, const char *text,
                              size_t length) {
    struct split_state state;
    split_state_init(&state, length, NULL);
    assert_int_equal(pretokenizer_split(pretokenizer, &state, text, length, NULL), 0);
    struct span_list spans = state.spans;
    state.spans = (struct span_list){0};
    split_state_clear(&state);
    return spans;
}

static void assert_same_words(const struct pretokenizer *quick, const struct pretokenizer *slow,
                              const char *text, size_t length) {
    struct span_list a = split(quick, text, length), b = split(slow, text, length);
    for (size_t i = 0; i < a.count && i < b.count; i++) {
        if (a.items[i].start == b.items[i].start && a.items[i].end == b.items[i].end) continue;
        fail_msg("'%.*s': word %zu is %u..%u, not %u..%u", (int)length, text, i, a.items[i].start,
                 a.items[i].end, b.items[i].start, b.items[i].end);
    }
    assert_int_equal(a.count, b.count);
    free(a.items);
    free(b.items);
}

/* All of ASCII with what turns on its neighbours more often, and characters beyond it of each kind:
 * letters, of which two are s and k when case is ignored, marks, numbers, spaces, signs. */
static size_t make_text(char *text, size_t size, uint64_t *random) {
    static const char *const parts[] = {
        "'", "'s", "'S", "'ll", "'lL", "'RE", "'v", "'d", " ", "  ", "\n", "\r\n", "\t", "\v", "\f",
        "a", "Zz", "12", "7", "!", "-.", "\x1C", "\x7F", "\u017F", "\u212A", "é", "\u0301", "字",
        "½", "٣", "\u00A0", "\u3000", "\u2028", "\xC2\x85", "…", "😀", "a", "b", "1", " ", "'"};
    size_t length = 0, count = mix_bits(*random += MIX_STEP) % 24;
    for (size_t i = 0; i < count; i++) {
        uint64_t dice = mix_bits(*random += MIX_STEP);
        const char *part = parts[dice % (sizeof parts / sizeof *parts)];
        char any[2] = {(char)(dice >> 32 & 0x7F), '\0'};
        if (dice >> 40 & 1) part = any;
        size_t part_length = part == any ? 1 : strlen(part);
        assert_true(length + part_length <= size);
        memcpy(text + length, part, part_length);
        length += part_length;
    }
    return length;
}

/* A group around a pattern changes nothing but its letters: those are then not recognised. */
static void test_words_are_the_patterns(void **state) {
    (void)state;
    for (size_t n = 0; n < PATTERNS; n++) {
        struct pretokenizer *quick = splitter("", patterns[n], "");
        struct pretokenizer *slow = splitter("(?:", patterns[n], ")");
        uint64_t random = n;
        assert_non_null(ascii_rules_find(patterns[n]));
        for (size_t round = 0; round < 10000; round++) {
            char text[128];
            size_t length = make_text(text, sizeof text, &random);
            assert_same_words(quick, slow, text, length);
        }
        pretokenizer_destroy(quick);
        pretokenizer_destroy(slow);
    }
    assert_null(ascii_rules_find("(?:\\p{N})"));
    assert_null(ascii_rules_find(""));
}

/* Each single character, and each pair, alone and between letters. */
static void test_every_ascii_pair(void **state) {
    (void)state;
    for (size_t n = 0; n < PATTERNS; n++) {
        struct pretokenizer *quick = splitter("", patterns[n], "");
        struct pretokenizer *slow = splitter("(?:", patterns[n], ")");
        for (unsigned pair = 0; pair < 128 * 128; pair++) {
            char text[4] = {'x', (char)(pair / 128), (char)(pair % 128), 'y'};
            assert_same_words(quick, slow, text, 4);
            assert_same_words(quick, slow, text + 1, 2);
        }
        pretokenizer_destroy(quick);
        pretokenizer_destroy(slow);
    }
}

/* ---- Giving up ------------------------------------------------------------------------------- */

static void assert_given_up(const char *folder, const char *text, size_t length) {
    struct tokenizer *tokenizer = NULL;
    struct token_list ids = {0};
    struct error error = {0};
    atomic_bool stop = true;
    assert_int_equal(tokenizer_load(folder, &tokenizer, &error), 0);
    assert_int_equal(token_list_push(&ids, 7, NULL), 0);
    assert_int_equal(
        tokenizer_encode_until(tokenizer, text, length, false, &stop, &ids, &error),
        FATHOM_CANCELLED);
    assert_int_equal(ids.count, 1);
    assert_int_equal(ids.ids[0], 7);
    atomic_store(&stop, false);
    assert_int_equal(
        tokenizer_encode_until(tokenizer, text, length, false, &stop, &ids, &error), 0);
    assert_true(ids.count > 1);
    free(ids.ids);
    tokenizer_destroy(tokenizer);
}

static void test_encoding_is_given_up(void **state) {
    (void)state;
    static const char text[] = "Once upon a time";
    assert_given_up(FATHOM_SOURCE "/models/fathom-tiny", text, strlen(text));
    assert_given_up(FATHOM_SOURCE "/tests/reference/tokenizer/pieces", text, strlen(text));
}

/* One word of a whole text is given up too: it may be megabytes long. */
static void test_a_long_word_is_given_up(void **state) {
    (void)state;
    struct merge_table table = {0};
    struct token_list ids = {0};
    struct error error = {0};
    atomic_bool stop = true;
    assert_int_equal(merge_table_create(&table, 1, 0, &error), 0);
    merge_table_add(&table, 1, 1, 0, 2);
    for (size_t i = 0; i < 1000; i++) assert_int_equal(token_list_push(&ids, 1, NULL), 0);
    assert_int_equal(merge_tokens(&table, &ids, 0, &stop, &error), FATHOM_CANCELLED);
    assert_int_equal(merge_tokens(&table, &ids, 0, NULL, &error), 0);
    assert_int_equal(ids.count, 500);
    merge_table_clear(&table);
    free(ids.ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_words_are_the_patterns),
        cmocka_unit_test(test_every_ascii_pair),
        cmocka_unit_test(test_encoding_is_given_up),
        cmocka_unit_test(test_a_long_word_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
