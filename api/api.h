/* The wire: JSON -> checked requests; engine events -> text -> JSON answers, SSE chunks, errors.
 *
 * Pure functions: no sockets, no clocks, no randomness, no threads of its own. Nothing here blocks;
 * what can take long (parsing a large body, tokenizing a long prompt) says so and may run on any
 * thread, as long as one object is used by one thread at a time. The life of one request:
 *
 *   completion_request_parse     body -> request, or an api_error     loop or pool thread
 *     (or chat_request_parse; all that follows is the same for both)
 *   completion_request_tokenize  texts -> ids, lengths checked        pool thread
 *   completion_create            one choice per prompt x n            loop thread, and so below
 *   completion_fill              -> struct engine_request for engine_submit, once per choice
 *   completion_push              <- each engine event
 *   completion_write_chunk ...   after a batch of events, when streaming
 *   completion_write_response    when completion_is_done, when not streaming
 *   completion_destroy, completion_request_free
 *
 * A function that returns int gives 0, or a negative enum fathom_error with the answer that the
 * client gets in `error`, never NULL. What a writer appends is whole and valid, or the buffer's
 * `failed` is set.
 */
#ifndef FATHOM_API_H
#define FATHOM_API_H

#include "base/base.h"
#include "engine/engine.h"

/* ---- Text buffer: where every answer is written -----------------------------------------------
 * Bytes that grow. Running out of memory sets `failed` and drops what follows, so that a writer
 * checks once, at the end. Zero-initialised is empty. */

struct text_buffer {
    char *data; /* malloc'd; not NUL-terminated; NULL while empty */
    size_t length, capacity;
    bool failed;
};

void text_append(struct text_buffer *buffer, const char *bytes, size_t length); /* amortised O(n) */
void text_append_string(struct text_buffer *buffer, const char *string);        /* NUL-terminated */
void text_append_number(struct text_buffer *buffer, uint64_t number);           /* decimal */
void text_append_format(struct text_buffer *buffer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A JSON string with its quotes. Whatever the bytes are, the result is valid JSON in valid UTF-8:
 * an invalid sequence becomes U+FFFD. */
void text_append_json(struct text_buffer *buffer, const char *bytes, size_t length);
void text_free(struct text_buffer *buffer); /* back to empty */

/* ---- What every request is checked against --------------------------------------------------- */

/* The caller's, immutable, outliving every request made with it. */
struct api_context {
    const struct model_info *model;
    const struct tokenizer *tokenizer;
    const char *served_name; /* what `model` must say; may itself hold ':' */
    int64_t created;         /* Unix seconds, of the model objects */
    size_t default_tier;     /* index into model->tiers: what silence means */
    bool default_is_auto;    /* silence leaves the tier to the server, as "auto" does */
    size_t max_sequence;     /* engine_max_sequence: tokens that fit the KV budget */
    size_t max_choices;      /* most prompts x n of one request (the engine's queue); 0: no limit */
    const char *chat_format; /* --chat-format, a known name; NULL: what the tokenizer's files say */
};

extern const char chat_format_names[]; /* for messages: "chatml, llama3, ..." */
bool chat_format_is_known(const char *name);

/* ---- Errors ---------------------------------------------------------------------------------- */

struct api_error {
    int status;             /* HTTP: 4xx, 5xx */
    const char *type;       /* static; follows from the status */
    const char *code;       /* static, or NULL */
    char param[64];         /* the field at fault, "prompt[3]"; empty: none */
    char message[512];      /* a sentence that the client can act on */
    unsigned retry_after_s; /* > 0: send Retry-After */
    bool never_retry;       /* send x-should-retry: false */
};

/* Fills `error` and returns FATHOM_INVALID, so that a caller can `return api_error_set(...)`.
 * `code` must be a string literal or NULL; `param` is copied, may be NULL. 429 and 503 set
 * retry_after_s, 500 sets never_retry: change them afterwards if that is wrong. */
int api_error_set(struct api_error *error, int status, const char *code, const char *param,
                  const char *format, ...) __attribute__((format(printf, 5, 6)));

/* What a failed engine_submit means to a client: FULL 429 server_overloaded,
 * TOO_LARGE 400 kv_budget_exceeded (it could never fit), NO_MEMORY 503, INVALID and UNSUPPORTED
 * 400, NOT_FOUND 404, else 500. */
int api_error_from_engine(struct api_error *error, const struct error *cause);

/* The body of the answer: {"error":{"message":...,"type":...,"param":...|null,"code":...|null}} */
void api_error_write(const struct api_error *error, struct text_buffer *out);

/* ---- A completion request, checked ----------------------------------------------------------- */

#define PROMPTS_MAX        256
#define CHOICES_MAX        128  /* n */
#define STOPS_MAX          16   /* stop strings, */
#define STOP_BYTES_MAX     1024 /* of so many bytes each */
#define MAX_TOKENS_DEFAULT 16   /* of a completion; a chat has the rest of the context */
#define CACHE_SALT_MAX     256  /* bytes */
#define JSON_DEPTH_MAX     64   /* arrays and objects within each other */

/* A place in a chat's text. What is before it and what is behind it are tokenized apart, and a
 * token of the chat format stands between them (-1: none). */
struct prompt_mark {
    size_t position; /* 0..text_length */
    int32_t token;
};

/* A prompt as sent, or rendered from messages. `tokens` is complete once
 * completion_request_tokenize has succeeded. */
struct prompt {
    char *text; /* malloc'd bytes, may hold NUL; NULL when ids were sent */
    size_t text_length;
    struct prompt_mark *marks; /* malloc'd, of a chat, in order */
    size_t mark_count;
    struct token_list tokens;
    size_t hidden;     /* leading tokens that we added (bos): never part of an echo's text */
    size_t max_tokens; /* of its completions: the request's, or the default cut to the context */
};

struct stop_string {
    char *bytes; /* malloc'd, valid UTF-8 */
    size_t length;
    /* fallback[i]: length of the longest proper prefix of bytes[0..i] that is also its suffix */
    uint16_t *fallback;
};

struct completion_request {
    bool is_chat;
    struct prompt *prompts;    /* malloc'd */
    size_t prompt_count;       /* 1..PROMPTS_MAX */
    size_t choices_per_prompt; /* n, 1..CHOICES_MAX */
    size_t tier;               /* index into model_info.tiers */
    bool tier_is_auto;         /* the server may choose another before completion_create */
    const char *tier_reason;   /* why it chose; static; NULL: it did not */
    int32_t priority;          /* lower first */
    bool has_max_tokens;
    size_t max_tokens, min_tokens; /* max_tokens when absent: MAX_TOKENS_DEFAULT; of a chat,
                                      INT32_MAX: the rest of the context */
    bool has_seed;
    struct sampling sampling; /* .bias points to `bias`; .seed is meaningful if has_seed */
    struct logit_bias *bias;  /* malloc'd */
    struct stop_string stops[STOPS_MAX];
    size_t stop_count;
    int32_t stop_tokens[STOP_TOKENS_MAX];
    size_t stop_token_count;
    int32_t top_logprobs; /* -1: no logprobs; 0..TOP_LOGPROBS_MAX */
    char *cache_salt;     /* malloc'd, at most CACHE_SALT_MAX bytes; NULL: none */
    bool ignore_eos, echo, return_depth, service_tier;
    bool stream, include_usage, continuous_usage;
};

/* Parses and checks a POST /v1/completions body: every type, sign, range and count, the model's
 * name, the tier. `quality_header` is the value of X-Quality, or NULL. The tier: body over header
 * over model suffix over context->default_tier. On failure `error` names the field and nothing is
 * left to free. The time is linear in `length`. */
int completion_request_parse(const struct api_context *context, const char *body, size_t length,
                             const char *quality_header, struct completion_request *request,
                             struct api_error *error);

/* The same for a POST /v1/chat/completions body. Its messages become the one prompt, written in the
 * model's chat format: context->chat_format, else the tokenizer's, else plain; 400
 * chat_format_unknown where the tokenizer's is none of those known. */
int chat_request_parse(const struct api_context *context, const char *body, size_t length,
                       const char *quality_header, struct completion_request *request,
                       struct api_error *error);

/* Tokenizes the text prompts and checks every prompt's length with its max_tokens against the
 * context and the KV budget. Once per request; slow for long texts, and given up, with an error for
 * nobody, soon after another thread sets *stop (which may be NULL). On failure the request is still
 * to be freed. */
int completion_request_tokenize(const struct api_context *context,
                                struct completion_request *request, const atomic_bool *stop,
                                struct api_error *error);

/* Frees what the request holds, not the struct. Only after a parse that succeeded. */
void completion_request_free(struct completion_request *request);

/* ---- A completion under way ------------------------------------------------------------------ */

struct completion;

/* What completion_push asks of its caller: a set of these. */
enum {
    PUSH_READY = 1,  /* completion_write_chunk has something to say about this choice */
    PUSH_CANCEL = 2, /* a stop string matched: engine_cancel it (once; EVENT_FINISHED follows) */
    PUSH_DONE = 4,   /* EVENT_FINISHED was taken: no more events for this choice */
    PUSH_FAILED = 8, /* the engine failed or cancelled it, or no memory: answer with an error */
};

/* `id` is unique per request (<= 128 bytes; the answer's id is "cmpl-" or "chatcmpl-" and it),
 * `created` Unix seconds. `random_seed` serves when the request has no seed. Context and request
 * must outlive the completion. Returns 0, or a 500 in `error` when there is no memory. */
int completion_create(const struct api_context *context, const struct completion_request *request,
                      const char *id, int64_t created, uint64_t random_seed,
                      struct completion **completion, struct api_error *error);
void completion_destroy(struct completion *completion); /* NULL is allowed */

/* Choice index = prompt index x n + number of the choice. */
size_t completion_choice_count(const struct completion *completion);

/* The engine's view of one choice; its pointers are the request's. Choice 0 of a prompt draws with
 * the seed itself, choice k with one mixed from seed and k. */
void completion_fill(const struct completion *completion, size_t choice, uint64_t engine_id,
                     struct engine_request *engine_request);

/* Takes one event of a choice (the event's id is not looked at): keeps text, logprobs and counts.
 * Returns PUSH_* flags. Stop strings are looked for in the generated text, behind what the first
 * min_tokens tokens wrote; tokens that begin at or behind a match are not listed in logprobs.
 * Events after a match are counted for nothing, until EVENT_FINISHED. */
unsigned completion_push(struct completion *completion, size_t choice,
                         const struct engine_event *event);

/* Every choice has had its EVENT_FINISHED. */
bool completion_is_done(const struct completion *completion);

/* "stop" or "length" once known, else NULL. Static. */
const char *completion_finish_reason(const struct completion *completion, size_t choice);

/* Sums over the choices that have finished: prompt tokens once per prompt, tokens after a stop
 * string's match not counted. Times are the longest of the choices. */
void completion_get_usage(const struct completion *completion, struct engine_usage *usage);

/* The whole answer, not streamed: {"id":...,"choices":[...],"usage":{...}}. Needs
 * completion_is_done. */
void completion_write_response(const struct completion *completion, struct text_buffer *out);

/* Streaming: one event "data: {...}\n\n" with what became visible since the last one, and the
 * finish_reason with the last text; of a chat, the first time, one with the role before it. Writes
 * nothing and returns false when there is nothing to say, so it may be called for any choice after
 * any number of pushes. What was written is forgotten. */
bool completion_write_chunk(struct completion *completion, size_t choice, struct text_buffer *out);

/* The chunk with "choices":[] and the usage; for include_usage, after all others. Needs
 * completion_is_done. */
void completion_write_usage_chunk(const struct completion *completion, struct text_buffer *out);

/* What else goes into a stream: "data: {"error":...}", "data: [DONE]", and the comment ": ping". */
void stream_write_error(const struct api_error *error, struct text_buffer *out);
void stream_write_done(struct text_buffer *out);
void stream_write_ping(struct text_buffer *out);

/* ---- The smaller endpoints ------------------------------------------------------------------- */

/* GET /v1/models, GET /v1/models/ID (ID percent-decoded; a tier suffix is allowed): 404
 * model_not_found. */
void models_write(const struct api_context *context, struct text_buffer *out);
int model_write(const struct api_context *context, const char *id, struct text_buffer *out,
                struct api_error *error);

/* POST /tokenize {"prompt":"...", "add_special_tokens":true, "return_token_strs":false} ->
 * {"count":..,"max_model_len":..,"tokens":[..],"token_strs":null}; POST /detokenize {"tokens":[..]}
 * -> {"prompt":"..."}. `model` may be given and must then be served here. Slow for long texts;
 * `stop` as of completion_request_tokenize; ids are looked up in less time than they are read. */
int tokenize_answer(const struct api_context *context, const char *body, size_t length,
                    const atomic_bool *stop, struct text_buffer *out, struct api_error *error);
int detokenize_answer(const struct api_context *context, const char *body, size_t length,
                      struct text_buffer *out, struct api_error *error);

/* GET /version; backend and isa may be NULL (not loaded yet): null. */
struct version_info {
    const char *version, *build; /* of Fathom; the compiler's */
    const char *backend, *isa;   /* "cpu", "avx2" */
};
void version_write(const struct version_info *info, struct text_buffer *out);

#endif
