/* The engine: a model, its tokenizer, and a thread that turns requests into tokens.
 *
 * Callers know requests, tokens and tiers; they never see a tensor. Nothing here knows HTTP or JSON
 * requests. Three parts, used in this order:
 *   model      what a checkpoint folder holds, packed on a device
 *   tokenizer  text <-> token ids
 *   engine     continuous batching over one model: submit, cancel, take events
 *
 * A function that returns int gives 0, or a negative enum fathom_error with the reason in `error`,
 * which may be NULL; FATHOM_NO_MEMORY is possible wherever something is made. On failure nothing is
 * left to undo and *out parameters are not to be used. Sizes are bytes unless they say otherwise.
 */
#ifndef FATHOM_ENGINE_H
#define FATHOM_ENGINE_H

#include <stdatomic.h>

#include "base/base.h"

/* ---- Model ----------------------------------------------------------------------------------- */

#define TIER_NAME_MAX 32 /* bytes, NUL included */
#define TIERS_MAX     16

#define STEP_ROWS_MAX 8192 /* model_options.max_step_rows is at most that */
#define EOS_MAX       16   /* tokens that end a text */

enum weight_type { WEIGHTS_AUTO, WEIGHTS_F32, WEIGHTS_BF16, WEIGHTS_F16, WEIGHTS_INT8 };

/* What a row that skips an attention leaves in that layer's cache: its K and V all the same, or
 * nothing. (models/nag.md section 2) */
enum kv_policy { KV_COMPUTE, KV_OMIT };

struct model_options {
    const char *device;       /* "auto", "cpu", "cuda:N"; NULL is auto */
    const char *isa;          /* NULL: the best instruction set that the processor has */
    enum weight_type weights; /* auto: the file's where that is fast on the device, else f32 */
    size_t threads;           /* of a CPU, 1..64; 0: one per processor */
    size_t max_context;       /* tokens; 0: the checkpoint's max_position_embeddings, the most */
    size_t max_step_rows;     /* rows of one step, decode and prefill together; 0: 256 */
    /* Folder in which the times of model_measure_cost are kept for the next start; NULL: none. */
    const char *cost_cache;
    /* Called from the loading thread with 0..1 and the phase's name ("mapping", "packing
     * weights"). */
    void (*progress)(void *context, double fraction, const char *phase);
    void *progress_context;
};

struct tier_info {
    char name[TIER_NAME_MAX];
    double target_skip; /* share of the FLOPs that skips can save; 0: full */
    bool measured;      /* depth.json has the figures below, which are those of its text */
    double perplexity;
    double attn_skip, mlp_skip; /* shares of rows x sub-layers of the kind */
    double flops_per_token;     /* of the blocks */
};

struct model_info {
    char path[512];
    char name[128];            /* last component of the path */
    char residual[16];         /* "nag", "standard": nothing is ever skipped */
    char device[96];           /* as struct device's description */
    char backend[16], isa[16]; /* "cpu", "avx512bf16" */
    char weights[8];           /* "f32", "bf16", "f16", "int8" */
    size_t parameters, vocab;  /* ids are below `vocab` */
    size_t hidden, inner;      /* width of the state, and inside the MLP */
    size_t blocks, sublayers;  /* two per block: attention, MLP */
    size_t heads, kv_heads, head_size;
    size_t directions;    /* of each gate; 0: no gates */
    size_t context;       /* longest prompt + completion, tokens */
    size_t max_step_rows; /* as in model_options */
    int32_t bos;          /* the tokenizer's, else the configuration's; -1: none */
    /* Every token that ends a text: the tokenizer's first, then the configuration's. */
    int32_t eos[EOS_MAX];
    size_t eos_count;
    enum kv_policy kv_policy;
    size_t weight_bytes;  /* packed, on the device */
    size_t scratch_bytes; /* activations of a step */
    /* The KV cache is given out in blocks: of all layers under compute; of one layer under omit,
     * where a token takes a place only in the layers whose attention it runs. Groups of layers: */
    size_t kv_block_tokens, kv_block_bytes, kv_groups;
    size_t tier_count;   /* >= 1; "full" always exists */
    size_t default_tier; /* index */
    struct tier_info tiers[TIERS_MAX];
    /* FLOPs of the blocks per token (no head): every sub-layer run, at a context of T tokens is
     * flops_fixed + flops_attn + flops_mlp + T * flops_attn_per_context, summed over blocks.
     * A skipped attention saves its share of flops_attn and of the context term; a skipped MLP its
     * share of flops_mlp. (models/nag.md section 2) */
    double flops_fixed, flops_attn, flops_attn_per_context, flops_mlp;
};

/* What steps take, in nanoseconds, measured on the device. A step of some rows in which every
 * sub-layer is skipped; what one attention and one MLP add when so many rows run it; what the head
 * adds for so many rows. */
#define COST_POINTS_MAX 9
struct cost_point {
    size_t rows;
    double step_ns, attn_ns, mlp_ns, head_ns;
};
struct cost_model {
    size_t blocks, count;                      /* of the model; of points, 0: not measured */
    struct cost_point points[COST_POINTS_MAX]; /* by ascending rows; straight lines in between */
    double attended_ns;                        /* per block and position that a row attends to */
    double gather_factor; /* a sub-layer over packed rows, to the same rows without packing */
    size_t ridge;         /* rows from which a skip pays whatever the others do; 0: not reached */
};

/* Bytes of the KV cache that one sequence of so many tokens takes if none is omitted: whole
 * blocks. */
static inline size_t model_kv_bytes(const struct model_info *model, size_t tokens) {
    size_t blocks = tokens / model->kv_block_tokens + (tokens % model->kv_block_tokens != 0);
    return blocks * model->kv_groups * model->kv_block_bytes;
}

struct model;

/* Loads a checkpoint folder or a GGUF file. Can take seconds for a large model; may run on any
 * thread. `options` NULL: the defaults, all zero. The error names the file, what is wrong with it
 * and what would be right: FATHOM_INVALID or FATHOM_NOT_FOUND of the files, FATHOM_UNSUPPORTED of
 * what this build or device cannot do. */
int model_load(const char *path, const struct model_options *options, struct model **model,
               struct error *error);

/* Engines on it, and all that it has given out, must be gone. NULL is allowed. */
void model_destroy(struct model *model);

/* Bytes for who has no KV budget of their own: what a device with memory of its own has to spare,
 * else KV_BUDGET_DEFAULT. */
#define KV_BUDGET_DEFAULT ((size_t)512 << 20)
size_t model_default_kv_budget(const struct model *model);

/* Both belong to the model and do not change: any thread. No tokenizer, NULL, where the checkpoint
 * has none. */
const struct model_info *model_get_info(const struct model *model);
const struct tokenizer *model_get_tokenizer(const struct model *model);

/* On the first call, which engine_create makes too, reads the times from the cache or measures
 * them, in a few tenths of a second; a large model takes seconds. No engine may be running on the
 * model then. A cache that cannot be read or written is no error: the note says so. */
int model_measure_cost(struct model *model, struct error *error);

/* The model's own; count is 0 before they were measured. */
const struct cost_model *model_get_cost(const struct model *model);

/* One line: from which file they were read or how long it took to measure them, and what was wrong
 * with the cache. Empty before. */
const char *model_get_cost_note(const struct model *model);

/* Index of a tier by name, or FATHOM_NOT_FOUND. Any thread. */
int model_find_tier(const struct model *model, const char *name);

/* ---- Tokenizer ----------------------------------------------------------------------------------
 * Immutable once loaded: every function may be called from several threads at once. */

struct tokenizer;

struct token_list {
    int32_t *ids; /* malloc'd; the caller frees it */
    size_t count, capacity;
};

/* Loads tokenizer.json (BPE over bytes, or over pieces with byte_fallback) and, if there,
 * tokenizer_config.json from a folder. FATHOM_UNSUPPORTED names the part of the file that is not
 * known here: nothing is guessed. */
int tokenizer_load(const char *folder, struct tokenizer **tokenizer, struct error *error);
void tokenizer_destroy(struct tokenizer *tokenizer); /* NULL is allowed */

/* Appends the ids of `text` (any bytes, at most 1 GiB; not NUL-terminated) to `out`, the same that
 * Hugging Face's tokenizers gives for these files; bytes that are no UTF-8 become a token each.
 * parse_special: added tokens marked special are recognised in the text; otherwise they are
 * ordinary characters. O(n log n) for n bytes. On failure `out` is as it was. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                     bool parse_special, struct token_list *out, struct error *error);

/* The same, given up soon after another thread sets *stop: FATHOM_CANCELLED. `stop` may be NULL. */
int tokenizer_encode_until(const struct tokenizer *tokenizer, const char *text, size_t length,
                           bool parse_special, const atomic_bool *stop, struct token_list *out,
                           struct error *error);

/* Amortised O(1). Zero-filled is an empty list. */
int token_list_push(struct token_list *list, int32_t id, struct error *error);

/* What stands before a text's own tokens, or -1 for nothing: bos if the tokenizer adds one. A text
 * that is empty must begin with something: bos, or the end-of-text token where there is no bos. */
int32_t model_start_token(const struct model_info *model, const struct tokenizer *tokenizer,
                          bool is_empty);

/* The bytes of one token, never NULL; *length 0 for an id outside the vocabulary. Not necessarily
 * whole UTF-8 characters. A special token gives the text it is written as. */
const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *length);
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);
size_t tokenizer_size(const struct tokenizer *tokenizer); /* ids are below this */
/* A text of n bytes makes at least n / tokenizer_longest tokens; SIZE_MAX: no such bound. */
size_t tokenizer_longest(const struct tokenizer *tokenizer);
/* Id of a token by the text that it is written as, or -1. Linear in the vocabulary. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text);
/* A space at the start of what a whole text's tokens stand for was put there by encoding. */
bool tokenizer_strips_space(const struct tokenizer *tokenizer);
/* add_bos_token of tokenizer_config.json, or what the post-processor of tokenizer.json does. */
bool tokenizer_adds_bos(const struct tokenizer *tokenizer);
/* -1 if there is none. From tokenizer_config.json; the model's config.json is the fallback. */
int32_t tokenizer_bos(const struct tokenizer *tokenizer);
int32_t tokenizer_eos(const struct tokenizer *tokenizer);

/* How the checkpoint wants a chat written: chat_format of tokenizer_config.json, a name; and the
 * (default) chat template, unread, from chat_template.jinja or tokenizer_config.json. NULL if there
 * is none. */
const char *tokenizer_chat_format(const struct tokenizer *tokenizer);
const char *tokenizer_chat_template(const struct tokenizer *tokenizer);

/* ---- Engine -------------------------------------------------------------------------------------
 * One thread owns sequences, KV blocks and the scheduler. Other threads talk to it by message. */

#define TOP_LOGPROBS_MAX 20
#define LOGIT_BIAS_MAX   1024
#define STOP_TOKENS_MAX  64

/* How a sub-layer runs that some rows skip. The result is the same. */
#define BODY_AUTO   0 /* what is predicted to be faster */
#define BODY_DENSE  1 /* tests: run everything, then mask */
#define BODY_GATHER 2 /* tests: pack, run, scatter */

/* Copied by engine_create. */
struct engine_options {
    /* At most so many bytes of KV cache, allocated at start; less when max_sequences of full
     * context need less. Its pages are touched from the front, which is used first. */
    size_t kv_budget;
    size_t max_sequences;    /* running at once, and never more than max_step_rows; 0: 256 */
    size_t queue_limit;      /* unfinished requests accepted beyond max_sequences; 0: 1024 */
    size_t queue_tokens;     /* their prompt tokens beyond what the KV cache holds; 0: no limit */
    size_t queue_timeout_ms; /* a request that did not start by then expires; 0: never */
    size_t prefill_chunk;    /* most prompt tokens of one sequence in a step; 0: the step's rows */
    int body;                /* BODY_* */
    size_t step_log;         /* steps kept for engine_get_steps; 0: none */
    bool no_prefix_cache;    /* compute every prompt anew */
    bool host_draws;         /* tokens, even where the device could: the same ones, to compare */
    const struct cost_model *cost; /* copied; NULL: measured */
    size_t step_target_us; /* prefill does not make a step with decode rows longer; 0: no target */
    double prefill_share;  /* but may take so much of its time: [0, 1), 0: as the target has it */
    /* Called from the engine thread when there are new events; must not block (uv_async_send is
     * meant). */
    void (*notify)(void *context);
    void *notify_context;
};

struct logit_bias {
    int32_t token;
    float bias;
};

/* All ranges are checked by engine_submit; api/ checks them first to name the JSON field. */
struct sampling {
    float temperature;                         /* 0..2; 0 is greedy (lowest id among equals) */
    float top_p;                               /* (0, 1]; 1 is off */
    float min_p;                               /* [0, 1]; 0 is off */
    int32_t top_k;                             /* 0 is off */
    float presence_penalty, frequency_penalty; /* -2..2; over generated tokens */
    float repetition_penalty;      /* (0, 2]; 1 is off; over prompt and generated tokens */
    uint64_t seed;                 /* the draw for position i is a function of (seed, i) alone */
    const struct logit_bias *bias; /* copied */
    size_t bias_count;             /* up to LOGIT_BIAS_MAX */
};

struct engine_request {
    uint64_t id;           /* the caller's, not in use */
    const int32_t *prompt; /* copied; 1..context tokens, each in the vocabulary */
    size_t prompt_length;
    size_t max_tokens; /* prompt_length + max_tokens <= context; 0: score the prompt only */
    size_t min_tokens; /* end-of-text and stop_tokens cannot be drawn before */
    bool ignore_eos;
    const int32_t *stop_tokens; /* copied; drawing one finishes, with FINISH_STOP */
    size_t stop_token_count;
    int32_t tier;     /* index into model_info.tiers; fixed for the request's life */
    int32_t priority; /* lower first: each step is worth one second of waiting */
    struct sampling sampling;
    int32_t top_logprobs; /* -1: none at all; 0..20: the token's own and that many best */
    bool prompt_logprobs; /* one EVENT_PROMPT per prompt token; needs top_logprobs >= 0 */
    /* Prefixes are shared among equal salts only; bytes, read by engine_submit; 0 long: none. */
    const char *cache_salt;
    size_t cache_salt_length;
};

enum engine_event_kind {
    EVENT_PROMPT,   /* a prompt token, in order from position 0 (which has no logprob); scored
                       without bias and penalties */
    EVENT_TOKEN,    /* a generated token, in order; a stop or end-of-text token is reported too */
    EVENT_FINISHED, /* exactly one per accepted request, the last */
};
enum finish_reason {
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_EXPIRED, /* queue_timeout_ms passed before its first row */
};
#define FINISH_REASONS (FINISH_EXPIRED + 1)

struct token_logprob {
    int32_t token;
    float logprob; /* natural; of the model's distribution at temperature 1 before
                      top_k/top_p/min_p, after bias and penalties; -inf possible */
};

/* Filled in EVENT_FINISHED. */
struct engine_usage {
    size_t prompt_tokens, completion_tokens;
    size_t cached_tokens; /* of the prompt: never executed for this request */
    /* Sub-layers over all rows of the request, those of cached tokens as they were executed once,
     * recomputation excluded. */
    uint64_t attn_run, attn_total, mlp_run, mlp_total;
    uint64_t queue_ns, prefill_ns, decode_ns; /* waiting; first row to first token; the rest */
    uint32_t preemptions; /* times that it was put back, to be computed again, for lack of blocks */
};

struct engine_event {
    uint64_t id; /* of the request */
    enum engine_event_kind kind;
    enum finish_reason finish; /* EVENT_FINISHED */
    int32_t token;             /* EVENT_PROMPT, EVENT_TOKEN */
    bool is_stop;              /* EVENT_TOKEN: end-of-text or a stop token; its text is not shown */
    float logprob;             /* when asked for; NAN at prompt position 0 */
    uint16_t depth; /* sub-layers that ran for the row that predicted this token (EVENT_TOKEN), or
                       of this prompt token's own row (EVENT_PROMPT) */
    uint16_t attn_depth; /* those of `depth` that are attention */
    uint16_t top_count;
    struct token_logprob top[TOP_LOGPROBS_MAX]; /* descending; ties by lower id */
    struct engine_usage usage;                  /* EVENT_FINISHED */
};

#define STEP_ERROR_EDGES 6
extern const double step_error_edges[STEP_ERROR_EDGES]; /* ascending shares: 0.1 is 10 % off */

/* A snapshot for metrics; the uint64_t are counters, which only grow. */
struct engine_stats {
    size_t running, waiting;                /* sequences: one for each request */
    size_t kv_blocks_used, kv_blocks_total; /* held by sequences */
    size_t kv_blocks_cached;                /* held by none, kept to be found again */
    size_t kv_bytes_used;
    size_t kv_bytes_budget;    /* of all blocks: at most what max_sequences whole contexts need */
    size_t kv_bytes_saved;     /* that running sequences would hold more if nothing were omitted */
    uint64_t prompt_tokens;    /* prompt rows executed, recomputed ones too */
    uint64_t generated_tokens; /* tokens drawn */
    uint64_t host_draws; /* rows of logits that came to the host, to draw from or to score by */
    uint64_t prefix_queries, prefix_hits; /* prompt tokens looked for in the prefix cache, found */
    uint64_t steps, step_rows;
    uint64_t preemptions;        /* sequences put back, to be computed again, for lack of blocks */
    uint64_t cancelled, expired; /* by their finish_reason */
    double drain_seconds; /* until those waiting now will have started, by how fast others ended
                             lately; 0: not known */
    uint64_t attn_run[TIERS_MAX], attn_skipped[TIERS_MAX]; /* sub-layers x rows */
    uint64_t mlp_run[TIERS_MAX], mlp_skipped[TIERS_MAX];
    uint64_t body_none, body_dense, body_gather; /* sub-layer executions by body */
    uint64_t step_ns_total, step_ns_last;
    uint64_t predicted_ns_total, predicted_ns_last;
    /* Steps by |real / predicted - 1|: at most step_error_edges[i], and above all of them. */
    uint64_t step_errors[STEP_ERROR_EDGES + 1];
    /* time_now_ns() at the end of the last step, or when an idle engine was asked for the next one;
     * 0 before the first */
    uint64_t last_step_at_ns;
    bool idle; /* nothing to run */
};

struct engine;

/* Allocates and touches the KV arena and all queues, measures the cost where it is not known,
 * starts the thread. The model must outlive it and has one engine at a time. A budget smaller than
 * one block for one sequence is FATHOM_INVALID. */
int engine_create(struct model *model, const struct engine_options *options, struct engine **engine,
                  struct error *error);

/* Cancels everything, joins the thread, frees; no other call may be under way. Events not taken are
 * dropped. NULL is allowed. */
void engine_destroy(struct engine *engine);

/* Takes a request in, to run when there is room for it. Any thread; never waits for a step.
 * FATHOM_INVALID: the error names the field. FATHOM_FULL: the queue has no room now.
 * FATHOM_TOO_LARGE: prompt + max_tokens could never fit the KV budget. */
int engine_submit(struct engine *engine, const struct engine_request *request, struct error *error);

/* The request's EVENT_FINISHED follows within one step (FINISH_CANCELLED unless it finished
 * before). An unknown id is ignored. Any thread; cannot fail. */
void engine_cancel(struct engine *engine, uint64_t id);

/* Takes up to `capacity` events, the oldest first; returns how many. One consuming thread. While
 * nobody takes them the engine stops, after some thousands. */
size_t engine_take_events(struct engine *engine, struct engine_event *events, size_t capacity);

/* Waits until there are events or `timeout_ms` have passed: for a consuming thread without an event
 * loop. */
void engine_wait(struct engine *engine, unsigned timeout_ms);

/* As of the end of the last step, or of the last request that came or went. Any thread; never waits
 * for a step. */
void engine_get_stats(struct engine *engine, struct engine_stats *stats);

/* What one step was. */
struct step_record {
    uint64_t number, at_ns; /* counted from 1; time_now_ns() at its end */
    size_t rows, decode_rows, logit_rows;
    size_t body_none, body_dense, body_gather; /* sub-layers */
    uint64_t predicted_ns, real_ns;
    uint64_t modelled_ns;      /* predicted, before what earlier steps taught */
    uint64_t thread_ns;        /* of real_ns: the engine's thread had a processor */
    uint32_t tiers[TIERS_MAX]; /* rows of each tier */
};

/* Copies the last steps, oldest first; returns how many: at most `capacity` and options.step_log.
 * Any thread. */
size_t engine_get_steps(struct engine *engine, struct step_record *records, size_t capacity);

/* Objectives for a request that leaves its tier to the server. */
struct auto_options {
    double first_token, per_token; /* seconds, until the first token and for each further one */
    size_t floor;                  /* the lowest tier that may be chosen */
    size_t previous;               /* the tier chosen last: going back up needs some more room */
};
enum auto_reason { AUTO_WITHIN, AUTO_FIRST_TOKEN, AUTO_PER_TOKEN };
#define AUTO_REASONS (AUTO_PER_TOKEN + 1)
struct auto_choice {
    size_t tier;
    enum auto_reason reason;       /* within the objectives, or what better tiers would miss */
    double first_token, per_token; /* predicted, seconds */
};

/* The best tier with which 99 of 100 requests should meet both objectives at the load of this moment
 * and at the rate at which requests arrive, but none below the floor. Any thread; never waits for a
 * step. */
void engine_choose_tier(struct engine *engine, const struct auto_options *options,
                        size_t prompt_tokens, struct auto_choice *choice);

/* Most tokens that one sequence can hold under the KV budget, at most the context. Any thread. */
size_t engine_max_sequence(const struct engine *engine);

/* ---- Measuring ------------------------------------------------------------------------------- */

struct evaluation {
    size_t tokens;              /* predicted tokens */
    double perplexity;          /* exp(mean negative log-likelihood, natural) */
    double attn_skip, mlp_skip; /* shares of sub-layers x rows */
    double flops_skip;          /* share of what skips can save, in FLOPs: what target_skip means */
    double flops_per_token, flops_per_token_full; /* of the blocks, executed and at full depth */
    float *sublayer_skip; /* [sublayers] shares of rows that skipped; malloc'd, the caller frees */
    double seconds;       /* that it took */
};

struct evaluate_options {
    size_t window;     /* tokens per independent window, 2..context; 0: the context */
    size_t max_tokens; /* 0: all */
    /* Called after each window with 0..1 and the perplexity so far. */
    void (*progress)(void *context, double fraction, double perplexity);
    void *progress_context;
};

/* Perplexity of a token sequence, two at least, at a tier: cut into windows, the first token of
 * each is not predicted. `options` NULL: the defaults, all zero. Uses the model directly: no engine
 * may be running on it. */
int model_evaluate(struct model *model, const int32_t *tokens, size_t count, size_t tier,
                   const struct evaluate_options *options, struct evaluation *evaluation,
                   struct error *error);

#define CALIBRATION_SKIP_MAX 0.95

struct calibration_target {
    char name[TIER_NAME_MAX];
    double skip; /* above 0, at most CALIBRATION_SKIP_MAX; FLOPs-weighted */
};

struct calibration {
    const int32_t *tokens; /* text that the thresholds are fitted on: two at least */
    size_t count;
    const int32_t *measure_tokens; /* text that the tiers are measured on; NULL: the same */
    size_t measure_count;
    const struct calibration_target *targets;
    size_t target_count;                               /* at most TIERS_MAX - 1: "full" is added */
    size_t window;                                     /* as in evaluate_options */
    void (*progress)(void *context, const char *line); /* one line per round */
    void *progress_context;
};

/* Finds thresholds for every target (models/nag.md section 3), measures each tier, and writes
 * depth.json into the checkpoint folder (atomically). The KV policy stays as it is, the default
 * tier too if its name is among the targets (else it is "full"). Uses the model directly, and
 * leaves the new thresholds in force: no engine may be running on it, and after an error it should
 * be loaded again. */
int model_calibrate(struct model *model, const struct calibration *calibration,
                    struct error *error);

#endif
