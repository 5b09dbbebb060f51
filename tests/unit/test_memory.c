/* Memory that runs out at every single place: each operation is repeated with its first allocation
 * refused, then its second, until it succeeds. Every failure must be an error that says so, with
 * nothing leaked and nothing broken; under sanitizers, nothing touched that is not there.
 *
 * This program has its own malloc in front of the C library's (or of the sanitizer's), which all
 * libraries call, too. Only the thread that asked for it meets refusals. */
#include "test_api.h"

#include <errno.h>
#include <stdatomic.h>

#include "bench/answer.h"
#include "server/http_parser.h"

/* ---- An allocator that refuses --------------------------------------------------------------- */

static _Thread_local size_t refuse_at; /* the allocation that fails, counted from 1; 0: none */
static _Thread_local bool refuse_all;  /* and all that follow it */
static _Thread_local bool has_refused;
static atomic_llong live; /* allocations that were not freed, of all threads */

/* The loader calls these before a sanitizer is ready: they must not call into one. */
#define PLAIN __attribute__((no_sanitize("address", "thread", "undefined")))

PLAIN static bool refuses(void) {
    if (refuse_at == 0) return false;
    if (refuse_at > 1) {
        refuse_at--;
        return false;
    }
    if (!refuse_all) refuse_at = 0;
    has_refused = true;
    errno = ENOMEM;
    return true;
}

PLAIN static void *counted(void *block) {
    if (block) atomic_fetch_add(&live, 1);
    return block;
}

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);
/* There under a sanitizer. */
void *__interceptor_malloc(size_t size) __attribute__((weak));
void *__interceptor_calloc(size_t count, size_t size) __attribute__((weak));
void *__interceptor_realloc(void *block, size_t size) __attribute__((weak));
void *__interceptor_memalign(size_t alignment, size_t size) __attribute__((weak));
void __interceptor_free(void *block) __attribute__((weak));

#define REAL(name) (__interceptor_##name ? __interceptor_##name : __libc_##name)

PLAIN void *malloc(size_t size) {
    return refuses() ? NULL : counted(REAL(malloc)(size));
}

PLAIN void *calloc(size_t count, size_t size) {
    return refuses() ? NULL : counted(REAL(calloc)(count, size));
}

PLAIN void *realloc(void *block, size_t size) {
    if (refuses()) return NULL;
    void *moved = REAL(realloc)(block, size);
    return block ? moved : counted(moved);
}

PLAIN void *aligned_alloc(size_t alignment, size_t size) {
    return refuses() ? NULL : counted(REAL(memalign)(alignment, size));
}

PLAIN int posix_memalign(void **block, size_t alignment, size_t size) {
    void *made = refuses() ? NULL : counted(REAL(memalign)(alignment, size));
    if (made) *block = made;
    return made ? 0 : ENOMEM;
}

PLAIN void free(void *block) {
    if (block) atomic_fetch_sub(&live, 1);
    REAL(free)(block);
}

/* ---- The repetition -------------------------------------------------------------------------- */

#define MESSAGE_SIZE 600

/* Does the whole thing and undoes it. Returns 0, or says in `message` what went wrong; then
 * *is_memory tells whether that was called by its name. */
typedef int operation(char message[MESSAGE_SIZE], bool *is_memory);

/* The first 200 places one by one; of thousands in a loop, a sample. */
static size_t next_place(size_t n) {
    return n < 200 ? n + 1 : n + n / 24;
}

static size_t run_out(operation *run, const char *name, bool for_good) {
    size_t failures = 0;
    for (size_t n = 1;; n = next_place(n)) {
        char message[MESSAGE_SIZE] = "";
        bool is_memory = false;
        long long before = atomic_load(&live);
        refuse_at = n, refuse_all = for_good, has_refused = false;
        int result = run(message, &is_memory);
        refuse_at = 0;
        long long lost = atomic_load(&live) - before;
        /* Sanitizers have their own strdup, and look for leaks themselves, at the end. */
        if (lost != 0 && !__interceptor_malloc) {
            fail_msg("%s, allocation %zu: %lld not freed", name, n, lost);
        }
        if (result == 0) {
            if (!has_refused) return failures;
            continue; /* it could do without */
        }
        failures++;
        if (!has_refused) fail_msg("%s failed with memory enough: %s", name, message);
        if (!is_memory || !message[0]) fail_msg("%s, allocation %zu: '%s'", name, n, message);
    }
}

static void run_out_everywhere(operation *run, const char *name, size_t least) {
    char message[MESSAGE_SIZE] = "";
    bool is_memory;
    for (int i = 0; i < 2; i++) { /* what libraries keep for good is there from now on */
        if (run(message, &is_memory) != 0) fail_msg("%s: %s", name, message);
    }
    size_t once = run_out(run, name, false), always = run_out(run, name, true);
    print_message("%s: %zu and %zu failures\n", name, once, always);
    assert_true(once >= least && always >= once);
}

static int tell(const struct error *error, int result, char message[MESSAGE_SIZE],
                bool *is_memory) {
    if (result == 0) return 0;
    snprintf(message, MESSAGE_SIZE, "%s", error->message);
    *is_memory = error->code == FATHOM_NO_MEMORY && result == FATHOM_NO_MEMORY;
    return result;
}

static int tell_api(const struct api_error *error, int result, char message[MESSAGE_SIZE],
                    bool *is_memory) {
    if (result == 0) return 0;
    snprintf(message, MESSAGE_SIZE, "%d: %s", error->status, error->message);
    *is_memory = error->status == 500 || error->status == 503;
    return result;
}

/* ---- What is tried --------------------------------------------------------------------------- */

static const char completion_body[] =
    "{\"model\":\"fathom-tiny\",\"prompt\":[\"The lamp's light\",\"\"],\"n\":2,\"max_tokens\":8,"
    "\"stop\":[\"zz\",\"a b\"],\"stop_token_ids\":[7],\"logit_bias\":{\"5\":1,\"6\":-1},"
    "\"echo\":true,\"logprobs\":2,\"cache_salt\":\"s\",\"return_depth\":true,\"seed\":1}";
static const char chat_body[] = "{\"model\":\"fathom-tiny\",\"messages\":["
                                "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Why?"
                                " \\u00e9\"}]}],\"max_tokens\":2,"
                                "\"stream\":true,\"logprobs\":true,\"top_logprobs\":1}";

static int push_events(struct completion *completion, size_t choice) {
    struct engine_request told;
    unsigned flags = 0;
    completion_fill(completion, choice, 1, &told);
    size_t scored = told.prompt_logprobs ? told.prompt_length : 0;
    for (size_t i = 0; i < scored + told.max_tokens; i++) {
        struct engine_event event = {.kind = i < scored ? EVENT_PROMPT : EVENT_TOKEN,
                                     .token = (int32_t)(40 + i),
                                     .logprob = -1,
                                     .top_count = 2,
                                     .top = {{1, -1}, {2, -2}}};
        flags |= completion_push(completion, choice, &event);
    }
    struct engine_event event = {.kind = EVENT_FINISHED, .finish = FINISH_LENGTH};
    flags |= completion_push(completion, choice, &event);
    return flags & PUSH_FAILED ? FATHOM_NO_MEMORY : 0;
}

static int build_answer(struct completion_request *request, struct api_error *error) {
    struct completion *completion;
    struct text_buffer out = {0};
    int result = completion_create(&test_context, request, "id", 0, 1, &completion, error);
    if (result != 0) return result;
    for (size_t i = 0; i < completion_choice_count(completion) && result == 0; i++) {
        result = push_events(completion, i);
        if (request->stream) completion_write_chunk(completion, i, &out);
    }
    if (result == 0 && !request->stream) completion_write_response(completion, &out);
    if (out.failed) result = FATHOM_NO_MEMORY;
    if (result != 0) api_error_set(error, 500, NULL, NULL, "no memory for the answer");
    completion_destroy(completion);
    text_free(&out);
    return result;
}

static int answer_request(bool is_chat, char message[MESSAGE_SIZE], bool *is_memory) {
    struct completion_request request;
    struct api_error error = {0};
    const char *body = is_chat ? chat_body : completion_body;
    int result = (is_chat ? chat_request_parse : completion_request_parse)(
        &test_context, body, strlen(body), NULL, &request, &error);
    if (result == 0) {
        result = completion_request_tokenize(&test_context, &request, NULL, &error);
        if (result == 0) result = build_answer(&request, &error);
        completion_request_free(&request);
    }
    return tell_api(&error, result, message, is_memory);
}

static int answer_completion(char message[MESSAGE_SIZE], bool *is_memory) {
    return answer_request(false, message, is_memory);
}

static int answer_chat(char message[MESSAGE_SIZE], bool *is_memory) {
    test_context.chat_format = "plain";
    return answer_request(true, message, is_memory);
}

static int answer_tokenize(char message[MESSAGE_SIZE], bool *is_memory) {
    static const char text[] = "{\"prompt\":\"a b c \\u00e9\",\"return_token_strs\":true}";
    static const char ids[] = "{\"tokens\":[1,2,3]}";
    struct api_error error = {0};
    struct text_buffer out = {0};
    int result = tokenize_answer(&test_context, text, sizeof text - 1, NULL, &out, &error);
    if (result == 0) {
        result = detokenize_answer(&test_context, ids, sizeof ids - 1, &out, &error);
    }
    if (result == 0 && out.failed) {
        result = api_error_set(&error, 500, NULL, NULL, "no memory for the answer");
    }
    text_free(&out);
    return tell_api(&error, result, message, is_memory);
}

static int load_folder(const char *folder, char message[MESSAGE_SIZE], bool *is_memory) {
    struct tokenizer *tokenizer = NULL;
    struct token_list ids = {0};
    struct error error = {0};
    static const char text[] = "The e\xCC\x81 caf\xC3\xA9  12\xFF <|endoftext|>";
    int result = tokenizer_load(folder, &tokenizer, &error);
    if (result == 0)
        result = tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, &error);
    free(ids.ids);
    tokenizer_destroy(tokenizer);
    return tell(&error, result, message, is_memory);
}

static int load_tokenizer(char message[MESSAGE_SIZE], bool *is_memory) {
    return load_folder(FATHOM_SOURCE "/models/fathom-tiny", message, is_memory);
}

static int load_small_tokenizer(char message[MESSAGE_SIZE], bool *is_memory) {
    return load_folder(FATHOM_SOURCE "/tests/reference/tokenizer/nfc", message, is_memory);
}

static int load_model(char message[MESSAGE_SIZE], bool *is_memory) {
    const struct model_options options = {.threads = 1, .max_step_rows = 16, .max_context = 32};
    struct model *model = NULL;
    struct error error = {0};
    int result = model_load(FATHOM_SOURCE "/models/fathom-tiny", &options, &model, &error);
    model_destroy(model);
    return tell(&error, result, message, is_memory);
}

static struct model *served;

static int run_engine(char message[MESSAGE_SIZE], bool *is_memory) {
    static const struct cost_model cost = {.count = 0};
    const struct engine_options options = {
        .kv_budget = (size_t)1 << 20, .max_sequences = 2, .queue_limit = 2, .cost = &cost};
    const int32_t prompt[] = {1, 2, 3}, stop = 5;
    const struct logit_bias bias = {4, 1};
    struct engine *engine = NULL;
    struct error error = {0};
    int result = engine_create(served, &options, &engine, &error);
    if (result == 0) {
        struct engine_request request = {
            .id = 1,
            .prompt = prompt,
            .prompt_length = 3,
            .max_tokens = 2,
            .stop_tokens = &stop,
            .stop_token_count = 1,
            .sampling = {.top_p = 1, .repetition_penalty = 1.5f, .bias = &bias, .bias_count = 1},
            .top_logprobs = 2,
        };
        result = engine_submit(engine, &request, &error);
    }
    for (bool is_done = result != 0; !is_done;) {
        struct engine_event event;
        engine_wait(engine, 1000);
        while (engine_take_events(engine, &event, 1) > 0) is_done |= event.kind == EVENT_FINISHED;
    }
    engine_destroy(engine);
    return tell(&error, result, message, is_memory);
}

static int read_http(char message[MESSAGE_SIZE], bool *is_memory) {
    static const struct http_limits limits = {.head_bytes = 65536, .body_bytes = 65536};
    struct http_parser parser;
    char text[20000];
    size_t length = (size_t)snprintf(text, sizeof text,
                                     "POST / HTTP/1.1\r\nHost: h\r\nX: %0999d\r\n"
                                     "Content-Length: 10000\r\n\r\n%010000d",
                                     1, 2);
    http_parser_init(&parser, &limits);
    enum http_progress progress = HTTP_PROGRESS_HEAD;
    for (size_t at = 0, used; progress == HTTP_PROGRESS_HEAD; at += used) {
        progress = http_parser_feed(&parser, text + at, length - at, &used);
    }
    int result = progress == HTTP_PROGRESS_MESSAGE ? 0 : FATHOM_NO_MEMORY;
    if (result != 0) snprintf(message, MESSAGE_SIZE, "%d: %s", parser.status, parser.error.message);
    *is_memory = parser.status == 503;
    http_parser_free(&parser);
    return result;
}

static int read_answer(char message[MESSAGE_SIZE], bool *is_memory) {
    static const char text[] =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        "data: {\"choices\":[{\"text\":\"a\"}],\"quality\":\"full\"}\n\n"
        "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n"
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
    struct answer answer;
    answer_init(&answer);
    answer_begin(&answer);
    bool is_complete = false;
    for (size_t at = 0; at < sizeof text - 1 && !is_complete; at += 50) {
        size_t left = sizeof text - 1 - at;
        is_complete = answer_feed(&answer, text + at, left < 50 ? left : 50, 1 + at);
    }
    if (!is_complete) answer_end(&answer);
    int result = answer.failure == FAILURE_NONE ? 0 : FATHOM_NO_MEMORY;
    if (result != 0)
        snprintf(message, MESSAGE_SIZE, "%s: %s", failure_name(answer.failure), answer.detail);
    *is_memory = strstr(answer.detail, "memory") != NULL;
    answer_free(&answer);
    return result;
}

static void requests_run_out(void **state) {
    (void)state;
    run_out_everywhere(answer_completion, "a completion", 100);
    run_out_everywhere(answer_chat, "a chat", 50);
    run_out_everywhere(answer_tokenize, "tokenize", 20);
}

static void tokenizers_run_out(void **state) {
    (void)state;
    run_out_everywhere(load_small_tokenizer, "a small tokenizer", 200);
    run_out_everywhere(load_tokenizer, "the bundled tokenizer", 200);
}

static void models_run_out(void **state) {
    (void)state;
    run_out_everywhere(load_model, "a model", 200);
}

static void engines_run_out(void **state) {
    (void)state;
    const struct model_options options = {.threads = 1, .max_step_rows = 16, .max_context = 32};
    assert_int_equal(model_load(FATHOM_SOURCE "/models/fathom-tiny", &options, &served, NULL), 0);
    run_out_everywhere(run_engine, "an engine", 10);
    model_destroy(served);
}

static void connections_run_out(void **state) {
    (void)state;
    run_out_everywhere(read_http, "a request's bytes", 3);
    run_out_everywhere(read_answer, "an answer's bytes", 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(requests_run_out, test_api_setup, test_api_teardown),
        cmocka_unit_test(tokenizers_run_out),
        cmocka_unit_test(models_run_out),
        cmocka_unit_test(engines_run_out),
        cmocka_unit_test(connections_run_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
