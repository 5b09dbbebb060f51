/* The tokenizer against golden ids (tests/reference/make_tokenizer_golden.py), bytes that are not
 * text, hostile texts and hostile files. */
#include "engine/engine.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define REFERENCE   FATHOM_SOURCE "/tests/reference/tokenizer"
#define TINY_FOLDER FATHOM_SOURCE "/models/fathom-tiny"

static const char *const golden_names[] = {"tiny", "prefix", "split",
                                           "nfc",  "pieces", "metaspace"};

/* ---- Helpers --------------------------------------------------------------------------------- */

static struct tokenizer *load(const char *name) {
    char folder[512];
    snprintf(folder, sizeof folder, "%s/%s", REFERENCE, name);
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    if (tokenizer_load(strcmp(name, "tiny") == 0 ? TINY_FOLDER : folder, &tokenizer, &error) != 0) {
        fail_msg("%s", error.message);
    }
    return tokenizer;
}

static struct token_list encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                                bool parse_special) {
    struct token_list ids = {0};
    struct error error = {0};
    if (tokenizer_encode(tokenizer, text, length, parse_special, &ids, &error) != 0) {
        fail_msg("%s", error.message);
    }
    return ids;
}

static bool decodes_to(const struct tokenizer *tokenizer, const struct token_list *ids,
                       const char *text, size_t length) {
    size_t at = 0;
    for (size_t i = 0; i < ids->count; i++) {
        size_t token_length;
        const char *bytes = tokenizer_bytes(tokenizer, ids->ids[i], &token_length);
        if (token_length > length - at || memcmp(bytes, text + at, token_length) != 0) return false;
        at += token_length;
    }
    return at == length;
}

static void assert_round_trip(const struct tokenizer *tokenizer, const char *text, size_t length,
                              bool parse_special) {
    struct token_list ids = encode(tokenizer, text, length, parse_special);
    assert_true(decodes_to(tokenizer, &ids, text, length));
    free(ids.ids);
}

static json_t *read_json(const char *path) {
    json_error_t reason;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &reason);
    if (!json) fail_msg("%s: %s", path, reason.text);
    return json;
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* ---- Golden ids ------------------------------------------------------------------------------ */

/* Compares with the numbers from *text up to `stop` or the line's end, and moves *text there. */
static void assert_ids(const struct token_list *ids, const char **text, const char *name,
                       size_t line) {
    size_t count = 0;
    while (**text != '|' && **text != '\n') {
        char *end;
        long expected = strtol(*text, &end, 10);
        if (count >= ids->count || ids->ids[count] != expected) {
            fail_msg("%s, line %zu: token %zu is not %ld", name, line, count, expected);
        }
        count++;
        *text = *end == ' ' ? end + 1 : end;
    }
    if (count != ids->count) {
        fail_msg("%s, line %zu: %zu tokens, not %zu", name, line, ids->count, count);
    }
}

static void test_golden(void **state) {
    (void)state;
    json_t *lines = read_json(REFERENCE "/lines.json");
    assert_true(json_array_size(lines) >= 2000);
    for (size_t n = 0; n < sizeof golden_names / sizeof *golden_names; n++) {
        struct tokenizer *tokenizer = load(golden_names[n]);
        char path[512], *golden;
        size_t size;
        snprintf(path, sizeof path, "%s/%s.ids", REFERENCE, golden_names[n]);
        assert_int_equal(file_read(path, 16u << 20, &golden, &size, NULL), 0);
        const char *at = golden;
        for (size_t i = 0; i < json_array_size(lines); i++) {
            const json_t *line = json_array_get(lines, i);
            const char *text = json_string_value(line), *start = at;
            struct token_list plain = encode(tokenizer, text, json_string_length(line), false);
            struct token_list special = encode(tokenizer, text, json_string_length(line), true);
            assert_ids(&plain, &at, golden_names[n], i);
            if (*at == '|') start = ++at;
            at = start;
            assert_ids(&special, &at, golden_names[n], i);
            assert_int_equal(*at++, '\n');
            free(plain.ids);
            free(special.ids);
        }
        assert_ptr_equal(at, golden + size);
        free(golden);
        tokenizer_destroy(tokenizer);
    }
    json_decref(lines);
}

/* What pieces stand for is the text behind one space, which decoding drops again. */
static void test_pieces_round_trip(void **state) {
    (void)state;
    static const char *const texts[] = {"The lamp", "  two", " ", "深い海\n\ttabs", "naïve ½¾", "a"};
    struct tokenizer *tokenizer = load("pieces");
    assert_true(tokenizer_strips_space(tokenizer));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char spaced[64];
        snprintf(spaced, sizeof spaced, " %s", texts[i]);
        struct token_list ids = encode(tokenizer, texts[i], strlen(texts[i]), false);
        assert_true(decodes_to(tokenizer, &ids, spaced, strlen(spaced)));
        free(ids.ids);
    }
    tokenizer_destroy(tokenizer);
}

static void test_round_trip(void **state) {
    (void)state;
    struct tokenizer *tokenizer = load("tiny");
    json_t *lines = read_json(REFERENCE "/lines.json");
    for (size_t i = 0; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        assert_round_trip(tokenizer, json_string_value(line), json_string_length(line), false);
        assert_round_trip(tokenizer, json_string_value(line), json_string_length(line), true);
    }
    json_decref(lines);
    tokenizer_destroy(tokenizer);
}

/* ---- Bytes that are not UTF-8 ---------------------------------------------------------------- */

static void test_random_bytes(void **state) {
    (void)state;
    struct tokenizer *tokenizer = load("tiny");
    uint64_t random = 7;
    char text[64];
    for (size_t round = 0; round < 20000; round++) {
        size_t length = next_random(&random) % sizeof text;
        for (size_t i = 0; i < length; i++) {
            text[i] = (char)(next_random(&random) % 4 ? next_random(&random)
                                                      : ' ' + next_random(&random) % 95);
        }
        assert_round_trip(tokenizer, text, length, round % 2);
    }
    tokenizer_destroy(tokenizer);
}

/* An invalid byte is its byte token, and both sides are encoded as if they stood alone. */
static void test_invalid_parts(void **state) {
    (void)state;
    static const char *const invalid[] = {
        "\xFF", "\x80", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
        "\xF0\x9F\x91", "\xC3", "\xF8\x88\x80\x80\x80"};
    static const char left[] = "The lamp, 水深", right[] = " is 12 fathoms<|endoftext|>";
    for (size_t n = 0; n < sizeof golden_names / sizeof *golden_names; n++) {
        /* These put a space before `right` where that stands alone. */
        if (strcmp(golden_names[n], "prefix") == 0 || strcmp(golden_names[n], "pieces") == 0 ||
            strcmp(golden_names[n], "metaspace") == 0) {
            continue;
        }
        struct tokenizer *tokenizer = load(golden_names[n]);
        for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
            char text[128];
            snprintf(text, sizeof text, "%s%s%s", left, invalid[i], right);
            struct token_list whole = encode(tokenizer, text, strlen(text), true);
            struct token_list parts = encode(tokenizer, left, strlen(left), true);
            for (const char *byte = invalid[i]; *byte; byte++) {
                struct token_list one = encode(tokenizer, byte, 1, true);
                assert_int_equal(one.count, 1);
                free(one.ids);
                assert_int_equal(tokenizer_encode(tokenizer, byte, 1, true, &parts, NULL), 0);
            }
            assert_int_equal(tokenizer_encode(tokenizer, right, strlen(right), true, &parts, NULL),
                             0);
            assert_int_equal(whole.count, parts.count);
            assert_memory_equal(whole.ids, parts.ids, whole.count * sizeof *whole.ids);
            assert_true(decodes_to(tokenizer, &whole, text, strlen(text)));
            free(whole.ids);
            free(parts.ids);
        }
        tokenizer_destroy(tokenizer);
    }
}

/* ---- Texts made to hang ---------------------------------------------------------------------- */

#define LONG_TEXT ((size_t)1 << 20)

/* Under a second without sanitizers on a quiet machine; quadratic work would take hours. */
static void test_long_texts(void **state) {
    (void)state;
    static const char *const units[] = {
        "a", "A", " ", "\n", "ab", " \n", "'", "é", "\u0301", "\u0323\u0301", "\u0301\u0323a",
        "\xFF", "9", "<|endof", " .", "字", "\u1100\u1161", "  a"};
    char *text = malloc(LONG_TEXT);
    assert_non_null(text);
    for (size_t n = 0; n < sizeof golden_names / sizeof *golden_names; n++) {
        struct tokenizer *tokenizer = load(golden_names[n]);
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
            size_t unit = strlen(units[i]), most = n == 0 ? LONG_TEXT : LONG_TEXT / 4;
            size_t length = most / unit * unit;
            for (size_t at = 0; at < length; at += unit) memcpy(text + at, units[i], unit);
            struct token_list ids = encode(tokenizer, text, length, false);
            if (strcmp(golden_names[n], "tiny") == 0) {
                assert_true(decodes_to(tokenizer, &ids, text, length));
            }
            free(ids.ids);
        }
        tokenizer_destroy(tokenizer);
    }
    free(text);
}

/* Marks out of order by the thousand come out ordered by class, and within a class as they
 * stood. */
static void test_many_marks(void **state) {
    (void)state;
    struct tokenizer *tokenizer = load("nfc");
    char scrambled[4096] = "b", ordered[4096] = "b";
    for (size_t i = 0; i < 500; i++) {
        strcat(scrambled, i % 2 ? "\u0323" : i % 4 ? "\u0307" : "\u0301");
    }
    for (size_t i = 0; i < 250; i++) strcat(ordered, "\u0323");
    for (size_t i = 0; i < 500; i += 2) strcat(ordered, i % 4 ? "\u0307" : "\u0301");
    memcpy(ordered, "\u1E05", 3); /* b and the first U+0323 compose, and take as many bytes */
    struct token_list a = encode(tokenizer, scrambled, strlen(scrambled), false);
    struct token_list b = encode(tokenizer, ordered, strlen(ordered), false);
    assert_true(decodes_to(tokenizer, &a, ordered, strlen(ordered)));
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.ids, b.ids, a.count * sizeof *a.ids);
    free(a.ids);
    free(b.ids);
    tokenizer_destroy(tokenizer);
}

/* ---- Threads --------------------------------------------------------------------------------- */

struct work {
    const struct tokenizer *tokenizer;
    json_t *lines;
    struct token_list ids; /* of all lines */
};

static void *encode_all(void *argument) {
    struct work *work = argument;
    for (size_t i = 0; i < json_array_size(work->lines); i++) {
        const json_t *line = json_array_get(work->lines, i);
        if (tokenizer_encode(work->tokenizer, json_string_value(line), json_string_length(line),
                             i % 2, &work->ids, NULL) != 0) {
            break;
        }
    }
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    struct tokenizer *tokenizer = load("nfc");
    struct work work[5] = {{0}};
    pthread_t threads[4];
    json_t *lines = read_json(REFERENCE "/lines.json");
    for (size_t i = 0; i < 5; i++) work[i] = (struct work){.tokenizer = tokenizer, .lines = lines};
    encode_all(&work[4]);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, encode_all, &work[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(work[i].ids.count, work[4].ids.count);
        assert_memory_equal(work[i].ids.ids, work[4].ids.ids, work[4].ids.count * sizeof(int32_t));
    }
    for (size_t i = 0; i < 5; i++) free(work[i].ids.ids);
    json_decref(lines);
    tokenizer_destroy(tokenizer);
}

/* ---- Accessors ------------------------------------------------------------------------------- */

static void test_accessors(void **state) {
    (void)state;
    struct tokenizer *tokenizer = load("tiny");
    assert_int_equal(tokenizer_size(tokenizer), 4096);
    int32_t end = tokenizer_find(tokenizer, "<|endoftext|>");
    assert_int_equal(end, 0);
    assert_int_equal(tokenizer_bos(tokenizer), end);
    assert_int_equal(tokenizer_eos(tokenizer), end);
    assert_false(tokenizer_adds_bos(tokenizer));
    assert_true(tokenizer_is_special(tokenizer, end));
    assert_false(tokenizer_is_special(tokenizer, tokenizer_find(tokenizer, " the")));
    assert_int_equal(tokenizer_find(tokenizer, "no such token"), -1);
    assert_int_equal(tokenizer_find(tokenizer, ""), -1);
    static const int32_t outside[] = {-1, 4096, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        size_t length = 1;
        assert_non_null(tokenizer_bytes(tokenizer, outside[i], &length));
        assert_int_equal(length, 0);
        assert_false(tokenizer_is_special(tokenizer, outside[i]));
    }
    struct token_list ids = encode(tokenizer, "<|endoftext|>", 13, true);
    assert_int_equal(ids.count, 1);
    free(ids.ids);
    ids = encode(tokenizer, "<|endoftext|>", 13, false);
    assert_true(ids.count > 1);
    free(ids.ids);
    tokenizer_destroy(tokenizer);

    tokenizer = load("split"); /* no tokenizer_config.json: the template says it */
    assert_true(tokenizer_adds_bos(tokenizer));
    assert_int_equal(tokenizer_bos(tokenizer), tokenizer_find(tokenizer, "<|begin|>"));
    assert_int_equal(tokenizer_eos(tokenizer), -1);
    assert_false(tokenizer_is_special(tokenizer, tokenizer_find(tokenizer, "<tool>")));
    tokenizer_destroy(tokenizer);
    tokenizer_destroy(NULL);
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* A folder with the given files (NULL: none); removed by remove_folder. */
static void make_folder(char folder[64], const json_t *tokenizer, const char *config) {
    char path[128];
    strcpy(folder, "/tmp/fathom-tokenizer-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    if (tokenizer) assert_int_equal(json_dump_file(tokenizer, path, JSON_COMPACT), 0);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    if (!config) return;
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(config, file);
    fclose(file);
}

static void remove_folder(const char *folder) {
    char path[128];
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    unlink(path);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    unlink(path);
    rmdir(folder);
}

static int load_made(const json_t *json, const char *config, struct tokenizer **tokenizer,
                     struct error *error) {
    char folder[64];
    make_folder(folder, json, config);
    int result = tokenizer_load(folder, tokenizer, error);
    remove_folder(folder);
    return result;
}

/* The small tokenizer "nfc" with one member ("model.vocab" reaches into an object) replaced. */
static json_t *altered(const char *member, const char *value) {
    json_t *json = read_json(REFERENCE "/nfc/tokenizer.json"), *object = json;
    const char *dot = strchr(member, '.');
    if (dot) {
        object = json_object_get(json, "model");
        member = dot + 1;
    }
    json_t *replacement = json_loads(value, JSON_DECODE_ANY, NULL);
    assert_non_null(replacement);
    json_object_set_new(object, member, replacement);
    return json;
}

#define PRE(text) "pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":[" text "]}"
#define PATTERN(text)                                                                              \
    PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" text "\"},\"behavior\":\"Isolated\"}")
#define ADDED(text) "added_tokens", "[{" text "}]"

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *member, *value;
        int code;
        const char *message; /* a part of it */
    } cases[] = {
        {"pre_tokenizer", "{\"type\":\"Metaspace\"}", FATHOM_UNSUPPORTED,
         "tokenizer.json: pre_tokenizer type 'Metaspace' is not supported"},
        {"pre_tokenizer", "null", FATHOM_UNSUPPORTED, "pre_tokenizer type ''"},
        {PRE(""), FATHOM_UNSUPPORTED, "without ByteLevel"},
        {PRE("{\"type\":\"ByteLevel\",\"add_prefix_space\":false},{\"type\":\"Digits\"}"),
         FATHOM_UNSUPPORTED, "'Digits' after ByteLevel"},
        {PRE("{\"type\":\"Digits\"},{\"type\":\"ByteLevel\"}"), FATHOM_UNSUPPORTED,
         "add_prefix_space"},
        {PRE("{\"type\":\"ByteLevel\",\"use_regex\":1}"), FATHOM_INVALID, "'use_regex'"},
        {PRE("{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Odd\"}"),
         FATHOM_UNSUPPORTED, "Split behavior 'Odd'"},
        {PRE("{\"type\":\"Split\",\"pattern\":\"a\",\"behavior\":\"Isolated\"}"), FATHOM_INVALID,
         "no pattern"},
        {PATTERN("(?<name>a)"), FATHOM_UNSUPPORTED, "'(?<'"},
        {PATTERN("(*UTF)a"), FATHOM_UNSUPPORTED, "'(*'"},
        {PATTERN("(a)\\\\1"), FATHOM_UNSUPPORTED, "'\\1'"},
        {PATTERN("[a&&b]"), FATHOM_UNSUPPORTED, "'&&'"},
        {PATTERN("[a[^b]]"), FATHOM_UNSUPPORTED, "'[^'"},
        {PATTERN("[a"), FATHOM_INVALID, "without ']'"},
        {PATTERN("a{1,2}+"), FATHOM_UNSUPPORTED, "'{1,2}+'"},
        {PATTERN("a\\\\b"), FATHOM_UNSUPPORTED, "'\\b'"},
        {PATTERN("(a"), FATHOM_UNSUPPORTED, "pattern '(a'"},
        {PATTERN("\\\\p{Nonsense}"), FATHOM_UNSUPPORTED, "\\p{Nonsense}"},
        {"normalizer", "{\"type\":\"Lowercase\"}", FATHOM_UNSUPPORTED,
         "normalizer type 'Lowercase'"},
        {"decoder", "{\"type\":\"WordPiece\"}", FATHOM_UNSUPPORTED, "decoder type 'WordPiece'"},
        {"post_processor", "{\"type\":\"BertProcessing\"}", FATHOM_UNSUPPORTED, "'BertProcessing'"},
        {"post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[]}", FATHOM_UNSUPPORTED,
         "Template"},
        {"model", "{\"type\":\"Unigram\"}", FATHOM_UNSUPPORTED, "model type 'Unigram'"},
        {"model", "null", FATHOM_UNSUPPORTED, "model type ''"},
        {"model.dropout", "0.1", FATHOM_UNSUPPORTED, "dropout"},
        {"model.end_of_word_suffix", "\"</w>\"", FATHOM_UNSUPPORTED, "end_of_word_suffix"},
        {"model.vocab", "[]", FATHOM_INVALID, "'vocab'"},
        {"model.vocab", "{}", FATHOM_UNSUPPORTED, "byte 0x00"},
        {"model.vocab", "{\"a\":-1}", FATHOM_INVALID, "token 'a' has no id"},
        {"model.vocab", "{\"a\":4194304}", FATHOM_INVALID, "0..4194303"},
        {"model.vocab", "{\"a\":1.5}", FATHOM_INVALID, "token 'a'"},
        {"model.vocab", "{\"a\":7,\"b\":7}", FATHOM_INVALID, "the same id"},
        {"model.merges", "{}", FATHOM_INVALID, "'merges'"},
        {"model.merges", "[\"ab\"]", FATHOM_INVALID, "merges[0]"},
        {"model.merges", "[[\"a\"]]", FATHOM_INVALID, "merges[0]"},
        {"model.merges", "[[\"a\",1]]", FATHOM_INVALID, "merges[0]"},
        {"model.merges", "[\"a b c\"]", FATHOM_INVALID, "not in the vocabulary"},
        {"model.merges", "[\"Z Q\"]", FATHOM_INVALID, "'Z', 'Q'"},
        {"added_tokens", "{}", FATHOM_INVALID, "added_tokens"},
        {ADDED("\"id\":5000"), FATHOM_INVALID, "added_tokens[0]"},
        {ADDED("\"id\":5000,\"content\":\"\""), FATHOM_INVALID, "added_tokens[0]"},
        {ADDED("\"content\":\"<x>\""), FATHOM_INVALID, "'<x>' has no id"},
        {ADDED("\"id\":5,\"content\":\"<x>\""), FATHOM_INVALID, "'<x>'"},
        {ADDED("\"id\":5000,\"content\":\"a\""), FATHOM_INVALID, "'a'"},
        {ADDED("\"id\":5000,\"content\":\"<x>\",\"single_word\":true"), FATHOM_UNSUPPORTED,
         "added token '<x>': single_word"},
        {ADDED("\"id\":5000,\"content\":\"<x>\"},{\"id\":5001,\"content\":\"<x>\""), FATHOM_INVALID,
         "twice"},
        {ADDED("\"id\":5000,\"content\":\"<x>\"},{\"id\":5000,\"content\":\"<x>\""), FATHOM_INVALID,
         "'<x>'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *json = altered(cases[i].member, cases[i].value);
        struct tokenizer *tokenizer = NULL;
        struct error error = {0};
        int result = load_made(json, NULL, &tokenizer, &error);
        if (result != cases[i].code || !strstr(error.message, cases[i].message)) {
            fail_msg("%s = %s gave %d '%s'", cases[i].member, cases[i].value, result,
                     error.message);
        }
        assert_null(tokenizer);
        json_decref(json);
    }
}

static void test_holes(void **state) {
    (void)state;
    json_t *json =
        altered("added_tokens", "[{\"id\":4194303,\"content\":\"<far>\",\"special\":true}]");
    struct tokenizer *tokenizer = NULL;
    assert_int_equal(load_made(json, NULL, &tokenizer, NULL), 0);
    size_t length = 1;
    assert_int_equal(tokenizer_size(tokenizer), 4194304);
    tokenizer_bytes(tokenizer, 100000, &length);
    assert_int_equal(length, 0);
    assert_int_equal(tokenizer_find(tokenizer, "<far>"), 4194303);
    assert_memory_equal(tokenizer_bytes(tokenizer, 4194303, &length), "<far>", 5);
    assert_int_equal(length, 5);
    tokenizer_destroy(tokenizer);
    json_decref(json);
}

/* The bound is the longest token's own length, held by every text, and none where texts can shrink
 * without end. */
static void test_longest(void **state) {
    (void)state;
    json_t *lines = read_json(REFERENCE "/lines.json");
    for (size_t n = 0; n < sizeof golden_names / sizeof *golden_names; n++) {
        struct tokenizer *tokenizer = load(golden_names[n]);
        size_t longest = tokenizer_longest(tokenizer), most = 0, length;
        for (size_t id = 0; id < tokenizer_size(tokenizer); id++) {
            tokenizer_bytes(tokenizer, (int32_t)id, &length);
            if (length > most) most = length;
        }
        bool composes = strcmp(golden_names[n], "nfc") == 0; /* 7 bytes to 2 at most: below 4 */
        if (longest != SIZE_MAX) assert_int_equal(longest, composes ? 4 * most : most);
        for (size_t i = 0; i < json_array_size(lines); i++) {
            const json_t *line = json_array_get(lines, i);
            length = json_string_length(line);
            struct token_list ids = encode(tokenizer, json_string_value(line), length, true);
            assert_true(ids.count >= length / longest);
            free(ids.ids);
        }
        tokenizer_destroy(tokenizer);
    }
    json_decref(lines);

    static const char *const shrinking[][2] = {
        {PRE("{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Removed\"},"
             "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}")},
        {ADDED("\"id\":5000,\"content\":\"<x>\",\"lstrip\":true")},
        {ADDED("\"id\":5000,\"content\":\"<x>\",\"rstrip\":true")},
    };
    for (size_t i = 0; i < sizeof shrinking / sizeof *shrinking; i++) {
        json_t *json = altered(shrinking[i][0], shrinking[i][1]);
        struct tokenizer *tokenizer = NULL;
        assert_int_equal(load_made(json, NULL, &tokenizer, NULL), 0);
        assert_true(tokenizer_longest(tokenizer) == SIZE_MAX);
        tokenizer_destroy(tokenizer);
        json_decref(json);
    }
}

static void test_start_token(void **state) {
    (void)state;
    const struct model_info both = {.bos = 7, .eos = {8}, .eos_count = 1},
                            end = {.bos = -1, .eos = {8}, .eos_count = 1}, neither = {.bos = -1};
    struct tokenizer *silent = load("tiny"), *adds = load("split");
    assert_int_equal(model_start_token(&both, silent, false), -1);
    assert_int_equal(model_start_token(&both, silent, true), 7);
    assert_int_equal(model_start_token(&end, silent, true), 8);
    assert_int_equal(model_start_token(&neither, silent, true), -1);
    assert_int_equal(model_start_token(&both, adds, false), 7);
    assert_int_equal(model_start_token(&both, adds, true), 7);
    tokenizer_destroy(silent);
    tokenizer_destroy(adds);
}

static void test_config(void **state) {
    (void)state;
    static const struct {
        const char *config;
        int code;
        bool adds_bos, has_bos, has_eos;
        const char *message;
    } cases[] = {
        {NULL, 0, false, false, false, ""},
        {"{}", 0, false, false, false, ""},
        {"{\"bos_token\":null,\"eos_token\":\"<|endoftext|>\"}", 0, false, false, true, ""},
        {"{\"bos_token\":{\"content\":\"<|endoftext|>\"},\"add_bos_token\":true}", 0, true, true,
         false, ""},
        {"{\"bos_token\":\"<none>\"}", FATHOM_INVALID, false, false, false,
         "tokenizer_config.json: bos_token '<none>'"},
        {"{\"eos_token\":3}", FATHOM_INVALID, false, false, false, "'eos_token'"},
        {"{\"add_bos_token\":true}", FATHOM_INVALID, false, false, false, "no bos_token"},
        {"{\"add_bos_token\":\"yes\"}", FATHOM_INVALID, false, false, false, "'add_bos_token'"},
        {"[]", FATHOM_INVALID, false, false, false, "an object is required"},
        {"{", FATHOM_INVALID, false, false, false,
         "tokenizer_config.json: not valid JSON at line 1"},
    };
    json_t *json = read_json(REFERENCE "/nfc/tokenizer.json");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tokenizer *tokenizer = NULL;
        struct error error = {0};
        assert_int_equal(load_made(json, cases[i].config, &tokenizer, &error), cases[i].code);
        assert_non_null(strstr(error.message, cases[i].message));
        if (cases[i].code != 0) continue;
        assert_int_equal(tokenizer_adds_bos(tokenizer), cases[i].adds_bos);
        assert_int_equal(tokenizer_bos(tokenizer) >= 0, cases[i].has_bos);
        assert_int_equal(tokenizer_eos(tokenizer) >= 0, cases[i].has_eos);
        tokenizer_destroy(tokenizer);
    }
    json_decref(json);
    struct tokenizer *tokenizer = NULL;
    assert_int_equal(load_made(NULL, NULL, &tokenizer, NULL), FATHOM_NOT_FOUND);
}

/* A pattern that tries every way to cut a text, and never matches: given up, with every byte
 * kept. */
static void test_exploding_patterns(void **state) {
    (void)state;
    static const char *const patterns[] = {"(?:a+)+b", "(?:a|aa)+b", "a*a*a*a*b", "(?:(?:a|b)*c)*d",
                                           "a++b"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char value[256];
        snprintf(value, sizeof value,
                 "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                 "\"Regex\":\"%s\"},"
                 "\"behavior\":\"Removed\",\"invert\":true},"
                 "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}",
                 patterns[i]);
        json_t *json = altered("pre_tokenizer", value);
        struct tokenizer *tokenizer = NULL;
        assert_int_equal(load_made(json, NULL, &tokenizer, NULL), 0);
        json_decref(json);
        char text[20000];
        memset(text, 'a', sizeof text);
        assert_round_trip(tokenizer, text, sizeof text, false);
        tokenizer_destroy(tokenizer);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),       cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_pieces_round_trip),
        cmocka_unit_test(test_random_bytes), cmocka_unit_test(test_invalid_parts),
        cmocka_unit_test(test_long_texts),   cmocka_unit_test(test_many_marks),
        cmocka_unit_test(test_threads),      cmocka_unit_test(test_accessors),
        cmocka_unit_test(test_refusals),     cmocka_unit_test(test_holes),
        cmocka_unit_test(test_config),       cmocka_unit_test(test_exploding_patterns),
        cmocka_unit_test(test_longest),      cmocka_unit_test(test_start_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
