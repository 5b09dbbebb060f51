/* Text on its way out, against brute force: random tokens (whole words, single bytes, torn and
 * invalid characters), random stop strings, random moments of writing. Whatever they are, the
 * chunks add up to the answer that is not streamed, and nothing is shown late, early or twice. */
#include "test_api.h"

#define TOKENS_MAX 40
#define TEXT_MAX   4096

/* ---- The reference: all scalar values, encoded by arithmetic
 * -------------------------------------- whole[k] holds every k-byte character, prefix[k] every
 * k-byte beginning of a longer one. Both as bits, indexed by the bytes read as a big-endian number;
 * of 4-byte characters the first 3 bytes suffice, as any continuation byte may follow. */

static uint8_t *whole[4], *prefix[4];

static void set_bit(uint8_t *bits, uint32_t index) {
    bits[index / 8] |= (uint8_t)(1 << index % 8);
}

static bool has_bit(const uint8_t *bits, uint32_t index) {
    return bits[index / 8] >> index % 8 & 1;
}

static uint32_t big_endian(const unsigned char *bytes, size_t length) {
    uint32_t value = 0;
    for (size_t i = 0; i < length; i++) value = value << 8 | bytes[i];
    return value;
}

static size_t encode_scalar(uint32_t scalar, unsigned char out[4]) {
    if (scalar < 0x80) return out[0] = (unsigned char)scalar, 1;
    size_t length = scalar < 0x800 ? 2 : scalar < 0x10000 ? 3 : 4;
    static const unsigned char leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = length; i-- > 1; scalar >>= 6) out[i] = (unsigned char)(0x80 | (scalar & 0x3F));
    out[0] = (unsigned char)(leads[length] | scalar);
    return length;
}

static void reference_create(void) {
    for (size_t k = 1; k <= 3; k++) {
        whole[k] = calloc((size_t)1 << (8 * k - 3), 1);
        prefix[k] = calloc((size_t)1 << (8 * k - 3), 1);
        assert_true(whole[k] && prefix[k]);
    }
    for (uint32_t scalar = 0; scalar < 0x110000; scalar++) {
        unsigned char bytes[4];
        if (scalar >= 0xD800 && scalar < 0xE000) continue;
        size_t length = encode_scalar(scalar, bytes);
        if (length < 4) set_bit(whole[length], big_endian(bytes, length));
        for (size_t k = 1; k < length; k++) set_bit(prefix[k], big_endian(bytes, k));
    }
}

static void reference_destroy(void) {
    for (size_t k = 1; k <= 3; k++) free(whole[k]), free(prefix[k]);
}

/* Decodes all of the bytes; a torn end becomes U+FFFD if `is_over`, else it is left out. */
static size_t reference_decode(const unsigned char *bytes, size_t length, bool is_over,
                               char *text) {
    size_t used = 0;
    for (size_t at = 0; at < length;) {
        size_t left = length - at, take = 0, torn = 0;
        for (size_t k = 1; k <= 3 && k <= left; k++) {
            if (has_bit(whole[k], big_endian(bytes + at, k))) take = k;
            if (has_bit(prefix[k], big_endian(bytes + at, k))) torn = k;
        }
        if (torn == 3 && left > 3 && (bytes[at + 3] & 0xC0) == 0x80) take = 4;
        if (take > 0) {
            memcpy(text + used, bytes + at, take);
            used += take, at += take;
        } else if (torn == left && !is_over) {
            break;
        } else {
            memcpy(text + used, "\xEF\xBF\xBD", 3);
            used += 3, at += torn > 0 ? torn : 1;
        }
    }
    return used;
}

/* Where the first stop string to be complete ends (position *end) and begins; SIZE_MAX if none
 * is. */
static size_t reference_find(const char *text, size_t length, size_t from,
                             const struct completion_request *request) {
    for (size_t end = from; end <= length; end++) {
        size_t begin = SIZE_MAX;
        for (size_t i = 0; i < request->stop_count; i++) {
            size_t size = request->stops[i].length;
            if (end - from >= size &&
                memcmp(text + end - size, request->stops[i].bytes, size) == 0 &&
                (begin == SIZE_MAX || end - size < begin)) {
                begin = end - size;
            }
        }
        if (begin != SIZE_MAX) return begin;
    }
    return SIZE_MAX;
}

/* The longest end of text[from..length) that begins a stop string. */
static size_t reference_held(const char *text, size_t length, size_t from,
                             const struct completion_request *request) {
    size_t held = 0;
    for (size_t i = 0; i < request->stop_count; i++) {
        for (size_t size = 1; size < request->stops[i].length && size <= length - from; size++) {
            if (size > held && memcmp(text + length - size, request->stops[i].bytes, size) == 0) {
                held = size;
            }
        }
    }
    return held;
}

/* ---- One trial ------------------------------------------------------------------------------- */

struct trial {
    int32_t tokens[TOKENS_MAX];
    size_t count;
    bool ends_with_eos;
    struct completion_request request;
};

struct outcome {
    char text[TEXT_MAX];
    size_t length, completion_tokens;
    const char *finish;
    bool cut;     /* by a stop string */
    bool cancels; /* and the sequence would have gone on, for all the text knew */
};

/* Text shown after the first `count` tokens, by definition rather than by increments. */
static void reference_run(const struct trial *trial, size_t count, struct outcome *outcome) {
    unsigned char raw[TEXT_MAX];
    size_t raw_length = 0, from = 0;
    *outcome = (struct outcome){0};
    for (size_t i = 0; i < count; i++) {
        size_t length;
        bool is_last = i + 1 == trial->request.max_tokens;
        bool is_eos = trial->ends_with_eos && i + 1 == trial->count;
        const char *bytes = tokenizer_bytes(test_context.tokenizer, trial->tokens[i], &length);
        if (!tokenizer_is_special(test_context.tokenizer, trial->tokens[i])) {
            memcpy(raw + raw_length, bytes, length);
            raw_length += length;
        }
        outcome->completion_tokens = i + 1;
        outcome->length = reference_decode(raw, raw_length, false, outcome->text);
        bool is_free = i + 1 <= trial->request.min_tokens;
        if (is_free) from = outcome->length;
        size_t cut = reference_find(outcome->text, outcome->length, from, &trial->request);
        outcome->cancels = cut != SIZE_MAX;
        if (cut == SIZE_MAX &&
            (is_last || is_eos)) { /* the end of a torn character may be a match */
            outcome->length = reference_decode(raw, raw_length, true, outcome->text);
            cut = reference_find(outcome->text, outcome->length, from, &trial->request);
        }
        if (cut != SIZE_MAX) {
            outcome->length = cut;
            outcome->finish = "stop";
            outcome->cut = true;
            return;
        }
        if (is_last || is_eos) {
            outcome->finish = is_eos ? "stop" : "length";
            return;
        }
    }
    outcome->length -= reference_held(outcome->text, outcome->length, from, &trial->request);
}

static struct engine_event event_of(const struct trial *trial, size_t i) {
    return (struct engine_event){
        .kind = EVENT_TOKEN,
        .token = trial->tokens[i],
        .is_stop = trial->ends_with_eos && i + 1 == trial->count,
        .logprob = -(float)i - 0.5f,
        .depth = (uint16_t)i,
        .top_count = 1,
        .top = {{trial->tokens[i], -(float)i - 0.5f}},
    };
}

/* Takes a chunk apart: appends its text and its arrays. */
static void take_chunk(struct text_buffer *chunk, struct outcome *outcome, json_t *offsets,
                       json_t *tokens, json_t *depths) {
    assert_memory_equal(chunk->data, "data: ", 6);
    assert_memory_equal(chunk->data + chunk->length - 2, "\n\n", 2);
    memmove(chunk->data, chunk->data + 6, chunk->length -= 6);
    json_t *json = test_json(chunk), *choice = json_array_get(json_object_get(json, "choices"), 0);
    json_t *text = json_object_get(choice, "text"), *logprobs = json_object_get(choice, "logprobs");
    assert_null(outcome->finish); /* nothing comes after the finish_reason */
    memcpy(outcome->text + outcome->length, json_string_value(text), json_string_length(text));
    outcome->length += json_string_length(text);
    const char *finish = test_string(choice, "finish_reason");
    outcome->finish = !finish ? NULL : strcmp(finish, "stop") == 0 ? "stop" : "length";
    json_array_extend(offsets, json_object_get(logprobs, "text_offset"));
    json_array_extend(tokens, json_object_get(logprobs, "tokens"));
    json_array_extend(depths, json_object_get(choice, "depth"));
    json_decref(json);
}

static struct completion *create(const struct trial *trial) {
    struct completion *completion;
    struct api_error error;
    assert_int_equal(
        completion_create(&test_context, &trial->request, "id", 5, 1, &completion, &error), 0);
    return completion;
}

static void push_finished(struct completion *completion, bool cancelled) {
    /* What ran includes the rows after a stop string, which the answer's usage leaves out. */
    struct engine_event event = {
        .kind = EVENT_FINISHED,
        .finish = cancelled ? FINISH_CANCELLED : FINISH_LENGTH,
        .usage = {.attn_run = 1 << 20,
                  .attn_total = 1 << 20,
                  .mlp_run = 1 << 20,
                  .mlp_total = 1 << 20},
    };
    assert_int_equal(completion_push(completion, 0, &event), PUSH_DONE);
    assert_true(completion_is_done(completion));
}

/* Streams, writing after a push with the given odds in 8; 8 of 8 also checks that nothing is held
 * longer than it must be. */
static void stream(const struct trial *trial, uint64_t *random, unsigned odds,
                   struct outcome *outcome, json_t *offsets, json_t *tokens, json_t *depths) {
    struct completion *completion = create(trial);
    struct text_buffer chunk = {0};
    *outcome = (struct outcome){0};
    for (size_t i = 0; i < trial->count; i++) {
        struct engine_event event = event_of(trial, i);
        unsigned flags = completion_push(completion, 0, &event);
        if (flags & PUSH_CANCEL) outcome->cancels = true;
        if (test_random(random) % 8 >= odds && i + 1 < trial->count) continue;
        bool has_news = completion_write_chunk(completion, 0, &chunk);
        if (odds == 8) {
            struct outcome expected;
            reference_run(trial, i + 1, &expected);
            assert_int_equal(has_news, (flags & PUSH_READY) != 0);
            if (has_news) take_chunk(&chunk, outcome, offsets, tokens, depths);
            assert_int_equal(outcome->length, expected.length);
            assert_memory_equal(outcome->text, expected.text, expected.length);
        } else if (has_news) {
            take_chunk(&chunk, outcome, offsets, tokens, depths);
        }
        assert_false(completion_write_chunk(completion, 0, &chunk));
    }
    push_finished(completion, outcome->cancels);
    struct engine_usage usage;
    completion_get_usage(completion, &usage);
    outcome->completion_tokens = usage.completion_tokens;
    completion_destroy(completion);
    text_free(&chunk);
}

static void check_outcome(const struct outcome *outcome, const struct outcome *expected) {
    assert_int_equal(outcome->length, expected->length);
    assert_memory_equal(outcome->text, expected->text, expected->length);
    assert_non_null(outcome->finish);
    assert_string_equal(outcome->finish, expected->finish);
    assert_int_equal(outcome->completion_tokens, expected->completion_tokens);
    assert_int_equal(outcome->cancels, expected->cancels);
}

/* The answer in one piece; its arrays must be those of the chunks. */
static void check_response(const struct trial *trial, const struct outcome *expected,
                           const json_t *offsets, const json_t *tokens, const json_t *depths) {
    struct completion *completion = create(trial);
    struct text_buffer answer = {0};
    for (size_t i = 0; i < trial->count; i++) {
        struct engine_event event = event_of(trial, i);
        completion_push(completion, 0, &event);
    }
    push_finished(completion, expected->cancels);
    completion_write_response(completion, &answer);
    json_t *json = test_json(&answer),
           *choice = json_array_get(json_object_get(json, "choices"), 0);
    json_t *text = json_object_get(choice, "text"), *logprobs = json_object_get(choice, "logprobs");
    assert_int_equal(json_string_length(text), expected->length);
    assert_memory_equal(json_string_value(text), expected->text, expected->length);
    assert_string_equal(test_string(choice, "finish_reason"), expected->finish);
    assert_true(json_equal(json_object_get(logprobs, "text_offset"), offsets));
    assert_true(json_equal(json_object_get(logprobs, "tokens"), tokens));
    assert_true(json_equal(json_object_get(choice, "depth"), depths));
    if (!expected->cut) assert_int_equal(json_array_size(depths), expected->completion_tokens);
    json_decref(json);
    completion_destroy(completion);
}

/* ---- Random trials --------------------------------------------------------------------------- */

static int32_t byte_token(unsigned char byte) {
    struct token_list list = {0};
    struct error error;
    char text = (char)byte;
    assert_int_equal(tokenizer_encode(test_context.tokenizer, &text, 1, false, &list, &error), 0);
    assert_int_equal(list.count, 1);
    int32_t token = list.ids[0];
    free(list.ids);
    return token;
}

/* Emoji, other characters of all lengths, and every way of being wrong. */
static const char *const pieces[] = {
    "\xF0\x9F\x98\x80",
    "\xE2\x82\xAC",
    "\xC3\xA9",
    "a",
    "b",
    "\xEF\xBF\xBD",
    "\xED\x9F\xBF",
    "\x80",
    "\xFF",
    "\xC0\xAF",
    "\xE0\x80\x80",
    "\xED\xA0\x80",
    "\xF0\x9F\x98",
    "\xE2\x82",
    "\xC3",
    "\xF4\x90\x80\x80",
    "\xF5",
    "\xF0\x80",
    "\xE2\x82\xE2\x82\xAC",
};

static void random_tokens(struct trial *trial, uint64_t *random) {
    unsigned style = test_random(random) % 3;
    size_t count = 1 + test_random(random) % TOKENS_MAX;
    trial->count = 0;
    while (trial->count < count) {
        if (style == 0) { /* words, and now and then a special token */
            int32_t token = (int32_t)(test_random(random) % TEST_VOCAB);
            if (token == byte_token(0)) continue; /* a JSON key that our parser cannot take */
            trial->tokens[trial->count++] = token;
        } else if (style == 1) { /* two letters: stop strings begin everywhere */
            trial->tokens[trial->count++] =
                byte_token((unsigned char)("ab"[test_random(random) % 2]));
        } else {
            const char *piece = pieces[test_random(random) % (sizeof pieces / sizeof *pieces)];
            for (; *piece && trial->count < count; piece++) {
                trial->tokens[trial->count++] = byte_token((unsigned char)*piece);
            }
        }
    }
}

/* Stop strings out of the text itself, so that they occur, some with their last byte changed, so
 * that they nearly do. */
static json_t *random_stops(const struct trial *trial, uint64_t *random) {
    unsigned char raw[TEXT_MAX];
    char text[TEXT_MAX];
    size_t raw_length = 0, length;
    json_t *stops = json_array();
    for (size_t i = 0; i < trial->count; i++) {
        const char *bytes = tokenizer_bytes(test_context.tokenizer, trial->tokens[i], &length);
        memcpy(raw + raw_length, bytes, length);
        raw_length += length;
    }
    length = reference_decode(raw, raw_length, true, text);
    for (unsigned left = test_random(random) % 4; left > 0; left--) {
        size_t start = test_random(random) % length, size = 1 + test_random(random) % 9;
        char stop[16];
        if (size > length - start) size = length - start;
        memcpy(stop, text + start, size);
        if (test_random(random) % 2) stop[size - 1] = 'b';
        json_t *string = json_stringn(stop, size); /* NULL if it cuts a character */
        if (string) json_array_append_new(stops, string);
    }
    return stops;
}

static void make_trial(struct trial *trial, uint64_t *random) {
    struct api_error error;
    random_tokens(trial, random);
    trial->ends_with_eos = test_random(random) % 2;
    if (trial->ends_with_eos) {
        trial->tokens[trial->count - 1] = tokenizer_eos(test_context.tokenizer);
    }
    size_t min_tokens = test_random(random) % 4 ? 0 : test_random(random) % (trial->count + 1);
    size_t max_tokens = trial->count + (trial->ends_with_eos ? 1 : 0);
    json_t *body =
        json_pack("{s:s, s:[i], s:i, s:i, s:o, s:i, s:b}", "model", "fathom-tiny", "prompt", 1,
                  "max_tokens", (int)max_tokens, "min_tokens", (int)min_tokens, "stop",
                  random_stops(trial, random), "logprobs", 1, "return_depth", 1);
    char *text = json_dumps(body, 0);
    assert_int_equal(
        completion_request_parse(&test_context, text, strlen(text), NULL, &trial->request, &error),
        0);
    assert_int_equal(completion_request_tokenize(&test_context, &trial->request, NULL, &error), 0);
    free(text);
    json_decref(body);
}

static void check_offsets(const json_t *offsets, const struct outcome *outcome) {
    size_t characters = 0;
    json_int_t last = 0;
    for (size_t i = 0; i < outcome->length; i++) characters += (outcome->text[i] & 0xC0) != 0x80;
    for (size_t i = 0; i < json_array_size(offsets); i++) {
        json_int_t offset = json_integer_value(json_array_get(offsets, i));
        assert_true(offset >= last && offset <= (json_int_t)characters);
        last = offset;
    }
}

static void test_chunks_add_up(void **state) {
    (void)state;
    uint64_t random = 12345;
    size_t matches = 0;
    reference_create();
    for (int round = 0; round < 3000; round++) {
        static struct trial trial;
        static struct outcome expected, outcome;
        make_trial(&trial, &random);
        reference_run(&trial, trial.count, &expected);
        matches += expected.cut;
        for (unsigned odds = 1; odds <= 8; odds += 7) {
            json_t *offsets = json_array(), *tokens = json_array(), *depths = json_array();
            stream(&trial, &random, odds, &outcome, offsets, tokens, depths);
            check_outcome(&outcome, &expected);
            check_offsets(offsets, &outcome);
            check_response(&trial, &expected, offsets, tokens, depths);
            json_decref(offsets), json_decref(tokens), json_decref(depths);
        }
        completion_request_free(&trial.request);
    }
    reference_destroy();
    assert_in_range(matches, 300, 2700); /* else the trials prove little */
}

/* ---- Single cases that say what is meant ----------------------------------------------------- */

struct script {
    struct completion_request request;
    struct completion *completion;
};

static void script_begin(struct script *script, const char *fields) {
    char body[512];
    struct api_error error;
    snprintf(body, sizeof body, "{\"model\":\"fathom-tiny\",\"prompt\":[1],\"max_tokens\":9%s}",
             fields);
    test_request(body, &script->request);
    assert_int_equal(
        completion_create(&test_context, &script->request, "id", 5, 1, &script->completion, &error),
        0);
}

static void script_end(struct script *script) {
    completion_destroy(script->completion);
    completion_request_free(&script->request);
}

/* Pushes each byte of `bytes` as a token; returns the flags of the last. */
static unsigned push_bytes(struct script *script, const char *bytes) {
    unsigned flags = 0;
    for (; *bytes; bytes++) {
        struct engine_event event = {.kind = EVENT_TOKEN,
                                     .token = byte_token((unsigned char)*bytes)};
        flags = completion_push(script->completion, 0, &event);
    }
    return flags;
}

/* The text of the next chunk, which stays valid until the next call; NULL if there is none. */
static const char *next_text(struct script *script) {
    static char text[256];
    struct text_buffer chunk = {0};
    if (!completion_write_chunk(script->completion, 0, &chunk)) return NULL;
    memmove(chunk.data, chunk.data + 6, chunk.length -= 6);
    json_t *json = test_json(&chunk);
    snprintf(text, sizeof text, "%s",
             test_string(json_array_get(json_object_get(json, "choices"), 0), "text"));
    json_decref(json);
    return text;
}

static void test_held_back_no_longer_than_needed(void **state) {
    (void)state;
    struct script script;
    script_begin(&script, ",\"stop\":[\"aab\"]");
    assert_int_equal(push_bytes(&script, "xaa"), 0 | PUSH_READY);
    assert_string_equal(next_text(&script), "x");
    assert_int_equal(push_bytes(&script, "a"), PUSH_READY); /* "aaa": the first can go */
    assert_string_equal(next_text(&script), "a");
    assert_int_equal(push_bytes(&script, "b"), PUSH_READY | PUSH_CANCEL);
    assert_string_equal(completion_finish_reason(script.completion, 0), "stop");
    assert_string_equal(next_text(&script), "");
    assert_null(next_text(&script));
    assert_int_equal(push_bytes(&script, "zzz"), 0); /* drawn before the cancel arrived */
    assert_null(next_text(&script));
    script_end(&script);
}

static void test_a_torn_character_waits(void **state) {
    (void)state;
    struct script script;
    script_begin(&script, "");
    assert_int_equal(push_bytes(&script, "\xF0\x9F\x98"), 0);
    assert_null(next_text(&script));
    assert_int_equal(push_bytes(&script, "\x80"), PUSH_READY);
    assert_string_equal(next_text(&script), "\xF0\x9F\x98\x80");
    assert_int_equal(push_bytes(&script, "\xE2\x82"), 0);
    assert_int_equal(push_bytes(&script, "a"), PUSH_READY); /* one U+FFFD for the maximal piece */
    assert_string_equal(next_text(&script), "\xEF\xBF\xBD"
                                            "a");
    assert_int_equal(push_bytes(&script, "\xC3"), 0);
    struct engine_event event = {
        .kind = EVENT_TOKEN, .token = tokenizer_eos(test_context.tokenizer), .is_stop = true};
    assert_int_equal(completion_push(script.completion, 0, &event), PUSH_READY);
    assert_string_equal(next_text(&script), "\xEF\xBF\xBD");
    assert_string_equal(completion_finish_reason(script.completion, 0), "stop");
    script_end(&script);
}

static void test_the_finish_rides_on_the_last_text(void **state) {
    (void)state;
    struct script script;
    script_begin(&script, ",\"stop\":\"zz\"");
    push_bytes(&script, "abcdefgh");
    assert_string_equal(next_text(&script), "abcdefgh");
    assert_null(completion_finish_reason(script.completion, 0));
    assert_int_equal(push_bytes(&script, "z"),
                     PUSH_READY); /* the ninth of nine: nothing to wait for */
    assert_string_equal(completion_finish_reason(script.completion, 0), "length");
    assert_string_equal(next_text(&script), "z");
    struct engine_event event = {.kind = EVENT_FINISHED, .finish = FINISH_LENGTH};
    assert_int_equal(completion_push(script.completion, 0, &event), PUSH_DONE);
    assert_null(next_text(&script));
    script_end(&script);
}

static void test_failures_are_told(void **state) {
    (void)state;
    for (int finish = FINISH_CANCELLED; finish <= FINISH_ERROR; finish++) {
        struct script script;
        script_begin(&script, "");
        push_bytes(&script, "ab");
        struct engine_event event = {.kind = EVENT_FINISHED, .finish = (enum finish_reason)finish};
        assert_int_equal(completion_push(script.completion, 0, &event), PUSH_DONE | PUSH_FAILED);
        assert_null(completion_finish_reason(script.completion, 0));
        script_end(&script);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks_add_up),
        cmocka_unit_test(test_held_back_no_longer_than_needed),
        cmocka_unit_test(test_a_torn_character_waits),
        cmocka_unit_test(test_the_finish_rides_on_the_last_text),
        cmocka_unit_test(test_failures_are_told),
    };
    return cmocka_run_group_tests(tests, test_api_setup, test_api_teardown);
}
