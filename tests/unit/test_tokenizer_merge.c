/* Merging by the heap, whatever fits into it, against merging by looking through all pairs. */
#include "engine/tokenizer_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LETTERS = 4, MERGES = 300, WORD_MAX = 12000 };

/* Tokens 0..LETTERS-1 and one for each merge, in an order of ranks that has nothing to do with how
 * tokens are made of each other. */
struct vocabulary_of_pairs {
    struct merge_table table;
    uint32_t rank[LETTERS + MERGES][LETTERS + MERGES]; /* MERGE_NONE: no such merge */
    int32_t result[MERGES];                            /* by rank */
};

static uint64_t draw(uint64_t *state) {
    return mix_bits(*state += MIX_STEP);
}

static struct vocabulary_of_pairs *make_merges(uint64_t seed) {
    struct vocabulary_of_pairs *pairs = malloc(sizeof *pairs);
    struct {
        int32_t left, right;
    } made[MERGES]; /* of token LETTERS + i */
    uint32_t order[MERGES];
    assert_non_null(pairs);
    memset(pairs->rank, 0xff, sizeof pairs->rank);
    for (uint32_t i = 0; i < MERGES; i++) {
        uint32_t known = i < LETTERS * LETTERS ? LETTERS : LETTERS + i;
        do {
            made[i].left = (int32_t)(i < LETTERS * LETTERS ? i / LETTERS : draw(&seed) % known);
            made[i].right = (int32_t)(i < LETTERS * LETTERS ? i % LETTERS : draw(&seed) % known);
        } while (pairs->rank[made[i].left][made[i].right] != MERGE_NONE);
        pairs->rank[made[i].left][made[i].right] = 0; /* taken; the rank comes below */
        size_t place = draw(&seed) % (i + 1);
        order[i] = i;
        order[i] = order[place];
        order[place] = i;
    }
    struct error error = {0};
    memset(&pairs->table, 0, sizeof pairs->table);
    assert_int_equal(merge_table_create(&pairs->table, MERGES, seed, &error), 0);
    for (uint32_t rank = 0; rank < MERGES; rank++) {
        uint32_t i = order[rank];
        pairs->result[rank] = (int32_t)(LETTERS + i);
        pairs->rank[made[i].left][made[i].right] = rank;
        merge_table_add(&pairs->table, made[i].left, made[i].right, rank, pairs->result[rank]);
    }
    return pairs;
}

/* The definition: the pair of lowest rank, leftmost first. */
static size_t merge_plainly(const struct vocabulary_of_pairs *pairs, int32_t *ids, size_t count) {
    for (;;) {
        uint32_t best = MERGE_NONE;
        size_t place = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            uint32_t rank = pairs->rank[ids[i]][ids[i + 1]];
            if (rank < best) best = rank, place = i;
        }
        if (best == MERGE_NONE) return count;
        ids[place] = pairs->result[best];
        memmove(&ids[place + 1], &ids[place + 2], (count - place - 2) * sizeof *ids);
        count--;
    }
}

static void check_word(const struct vocabulary_of_pairs *pairs, const int32_t *word,
                       size_t length) {
    static int32_t expected[WORD_MAX];
    struct token_list list = {0};
    struct error error = {0};
    memcpy(expected, word, length * sizeof *word);
    size_t count = merge_plainly(pairs, expected, length);
    for (size_t i = 0; i < length; i++)
        assert_int_equal(token_list_push(&list, word[i], &error), 0);
    assert_int_equal(merge_tokens(&pairs->table, &list, 0, NULL, &error), 0);
    assert_int_equal(list.count, count);
    assert_memory_equal(list.ids, expected, count * sizeof *expected);
    free(list.ids);
}

static void test_random_words(void **state) {
    static const size_t lengths[] = {1, 2, 48, 49, 200, 3000, 5000, WORD_MAX};
    static int32_t word[WORD_MAX];
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct vocabulary_of_pairs *pairs = make_merges(seed);
        uint64_t dice = seed;
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            for (size_t k = 0; k < lengths[i]; k++) word[k] = (int32_t)(draw(&dice) % LETTERS);
            check_word(pairs, word, lengths[i]);
        }
        merge_table_clear(&pairs->table);
        free(pairs);
    }
}

/* Every pair has the same rank, or one of two, at first. */
static void test_monotonous_words(void **state) {
    static int32_t word[WORD_MAX];
    (void)state;
    struct vocabulary_of_pairs *pairs = make_merges(5);
    for (size_t unit = 1; unit <= 3; unit++) {
        for (size_t k = 0; k < WORD_MAX; k++) word[k] = (int32_t)(k % unit);
        check_word(pairs, word, WORD_MAX);
        check_word(pairs, word, WORD_MAX - 1);
    }
    merge_table_clear(&pairs->table);
    free(pairs);
}

static void test_stop(void **state) {
    static int32_t word[WORD_MAX];
    (void)state;
    struct vocabulary_of_pairs *pairs = make_merges(6);
    struct token_list list = {word, WORD_MAX, WORD_MAX};
    struct error error = {0};
    atomic_bool stop = true;
    assert_int_equal(merge_tokens(&pairs->table, &list, 0, &stop, &error), FATHOM_CANCELLED);
    merge_table_clear(&pairs->table);
    free(pairs);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_words),
        cmocka_unit_test(test_monotonous_words),
        cmocka_unit_test(test_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
