/* What batching makes of a model on this machine: one JSON object per line for each measured cell.
 *
 *   bench_batching MODEL PART [--seconds S] [--clients A,B,..] [--arms static,budget,time]
 *                  [--lengths fixed,mixed] [--tokens N] [--tiers full,..] [--rounds N] ...
 *
 * tiers    closed loop: every arm, tier, number of clients and kind of lengths
 * open     Poisson arrivals at --load times what `full` does: full, and quality auto
 * long     8 clients decode, a prompt of --prompt tokens comes
 * kv       a quarter of the KV that the load wants, against all of it
 * predict  predicted against real step times
 *
 * bench_batching.py runs them all, and makes a table and a plot. A checkpoint without tiers gets
 * them first, calibrated on random tokens. Every run does the same work: prompts and lengths come
 * from a fixed seed, end-of-text is ignored. */
#include "engine/cost.h"
#include "engine_load.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS           1e3
#define DECODERS     8  /* clients that decode while a long prompt comes */
#define LEAST_CHUNK  16 /* rows of a prompt that a step has room for in any case */
#define CROWD        64 /* requests at once whose steps are predicted */
#define LIST_MAX     8
#define STEP_RECORDS 65536

struct bench {
    const char *path, *part, *text_path;
    double seconds, load, ttft_ms, tpot_ms;
    size_t threads, rounds, prompt, target_ms, requests, tokens;
    const char *clients, *arms, *lengths, *tiers;
    struct model *model;
    const struct model_info *info;
    struct token_list text;
};

/* Who forms the batch; the model, its skips and its kernels are the same. */
struct arm {
    const char *name;
    bool lockstep;
    bool by_time; /* steps that meet a target of time; else as many rows as fit */
};
static const struct arm arms[] = {
    {"static", true, false},  /* a batch starts together and ends together */
    {"budget", false, false}, /* continuous, max_step_rows tokens per step */
    {"time", false, true},    /* continuous, by predicted time */
};

static void die(const char *message) {
    fprintf(stderr, "bench_batching: %s\n", message);
    exit(1);
}

/* Whether `word` is in a list like "full,fast"; an empty list has everything. */
static bool list_has(const char *list, const char *word) {
    size_t length = strlen(word);
    if (!list[0]) return true;
    for (const char *at = list; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, word, length) == 0 && (at[length] == ',' || !at[length])) return true;
    }
    return false;
}

static size_t list_numbers(const char *list, size_t *numbers) {
    size_t count = 0;
    for (const char *at = list; at && count < LIST_MAX; at = strchr(at, ',')) {
        at += *at == ',';
        numbers[count++] = strtoul(at, NULL, 10);
    }
    return count;
}

static struct load make_load(const struct bench *bench) {
    return (struct load){
        .model = bench->model,
        .engine = {.no_prefix_cache = true},
        .text = &bench->text,
        .prompt = {.kind = LENGTH_FIXED, .first = (double)bench->tokens},
        .generated = {.kind = LENGTH_FIXED, .first = (double)bench->tokens},
        .seconds = bench->seconds,
    };
}

static void print_result(const struct bench *bench, const struct load_result *result) {
    double load = 0;
    getloadavg(&load, 1);
    printf("\"tokens_per_second\": %.2f, \"cpu_ms_per_token\": %.5g, \"saving\": %.5f, "
           "\"attn_skip\": %.4f, \"mlp_skip\": %.4f, \"rows_per_step\": %.2f, \"first_p50\": %.5g, "
           "\"first_p99\": %.5g, \"next_p50\": %.5g, \"next_p99\": %.5g, \"ended\": %zu, "
           "\"seconds\": %.2f, \"others\": %.3f, \"load_average\": %.2f, \"preemptions\": %llu, ",
           (double)result->tokens / result->seconds,
           result->cpu_seconds * 1e3 / (double)(result->tokens + !result->tokens), result->saving,
           result->attn_skip, result->mlp_skip, result->rows_per_step, MS * result->first_p50,
           MS * result->first_p99, MS * result->next_p50, MS * result->next_p99, result->ended,
           result->seconds, result->others, load, (unsigned long long)result->stats.preemptions);
    printf("\"bodies\": [%llu, %llu, %llu], \"per_tier\": {",
           (unsigned long long)result->stats.body_none,
           (unsigned long long)result->stats.body_dense,
           (unsigned long long)result->stats.body_gather);
    for (size_t i = 0; i < bench->info->tier_count; i++) {
        printf("%s\"%s\": %zu", i ? ", " : "", bench->info->tiers[i].name, result->per_tier[i]);
    }
    printf("}}\n");
    fflush(stdout);
}

/* ---- tiers ----------------------------------------------------------------------------------- */

static void run_tier(const struct bench *bench, const struct arm *arm, size_t tier, size_t clients,
                     bool mixed, size_t round) {
    struct load load = make_load(bench);
    struct load_result result;
    load.clients = clients;
    load.tier = (int)tier;
    load.lockstep = arm->lockstep;
    if (arm->by_time) load.engine.step_target_us = 1000 * bench->target_ms;
    if (mixed) {
        double mean = (double)bench->tokens, deviation = 0.75 * mean;
        load.prompt = (struct lengths){LENGTH_LOGNORMAL, mean, deviation};
        load.generated = load.prompt;
    }
    load_run(&load, &result);
    printf("{\"part\": \"tiers\", \"model\": \"%s\", \"arm\": \"%s\", \"tier\": \"%s\", "
           "\"clients\": %zu, \"lengths\": \"%s\", \"tokens\": %zu, \"device\": \"%s\", "
           "\"round\": %zu, ",
           bench->info->name, arm->name, bench->info->tiers[tier].name, clients,
           mixed ? "mixed" : "fixed", bench->tokens, bench->info->device, round);
    print_result(bench, &result);
}

/* Tiers innermost, and in the opposite order every other round: what disturbs the machine for
 * longer than a cell should disturb all that are compared. */
static void run_tiers(const struct bench *bench) {
    size_t clients[LIST_MAX], count = list_numbers(bench->clients, clients);
    size_t tiers = bench->info->tier_count, arm_count = sizeof arms / sizeof *arms;
    for (size_t i = 0; i < bench->rounds * 2 * count * arm_count * tiers; i++) {
        size_t round = i / (2 * count * arm_count * tiers);
        size_t tier = round % 2 ? tiers - 1 - i % tiers : i % tiers;
        const struct arm *arm = &arms[i / tiers % arm_count];
        bool mixed = i / tiers / arm_count % 2;
        if (!list_has(bench->tiers, bench->info->tiers[tier].name)) continue;
        if (!list_has(bench->arms, arm->name)) continue;
        if (!list_has(bench->lengths, mixed ? "mixed" : "fixed")) continue;
        run_tier(bench, arm, tier, clients[i / tiers / arm_count / 2 % count], mixed, round);
    }
}

/* ---- open ------------------------------------------------------------------------------------ */

static void run_open_arm(const struct bench *bench, int tier, double rate, size_t round) {
    struct load load = make_load(bench);
    struct load_result result;
    load.rate = rate;
    load.tier = tier;
    load.engine.step_target_us = 1000 * bench->target_ms;
    load.engine.queue_limit = 100000;
    load.objectives = (struct auto_options){
        .first_token = bench->ttft_ms / MS,
        .per_token = bench->tpot_ms / MS,
    };
    for (size_t i = 0; i < bench->info->tier_count; i++) {
        const struct tier_info *tiers = bench->info->tiers;
        if (tiers[i].target_skip > tiers[load.objectives.floor].target_skip) {
            load.objectives.floor = i;
        }
    }
    load_run(&load, &result);
    printf("{\"part\": \"open\", \"model\": \"%s\", \"tier\": \"%s\", \"rate\": %.4g, "
           "\"round\": %zu, \"slo_first\": %g, \"slo_next\": %g, \"arrivals_for\": %g, ",
           bench->info->name, tier == LOAD_AUTO ? "auto" : bench->info->tiers[tier].name, rate,
           round, bench->ttft_ms, bench->tpot_ms, bench->seconds);
    print_result(bench, &result);
}

static void run_open(const struct bench *bench) {
    for (size_t round = 0; round < bench->rounds; round++) {
        struct load load = make_load(bench);
        struct load_result full;
        load.clients = 64;
        load.engine.step_target_us = 1000 * bench->target_ms;
        load.seconds = bench->seconds / 3;
        load_run(&load, &full);
        double capacity = (double)full.tokens / full.seconds / load.generated.first;
        run_open_arm(bench, round % 2 ? LOAD_AUTO : 0, bench->load * capacity, round);
        run_open_arm(bench, round % 2 ? 0 : LOAD_AUTO, bench->load * capacity, round);
    }
}

/* ---- kv -------------------------------------------------------------------------------------- */

static void run_kv(const struct bench *bench) {
    struct load load = make_load(bench);
    struct load_result all, few;
    load.clients = 32;
    load.requests = bench->requests;
    load.engine.no_prefix_cache = false;
    load_run(&load, &all);
    size_t bytes = load.clients * model_kv_bytes(bench->info, 2 * bench->tokens);
    load.engine.kv_budget = bytes / 4;
    load_run(&load, &few);
    printf("{\"part\": \"kv\", \"model\": \"%s\", \"requests\": %zu, \"wanted_bytes\": %zu, "
           "\"budget_bytes\": %zu, \"same_tokens\": %s, \"unlimited_tokens_per_second\": %.2f, ",
           bench->info->name, bench->requests, bytes, load.engine.kv_budget,
           all.hash == few.hash && all.ended == few.ended ? "true" : "false",
           (double)all.tokens / all.seconds);
    print_result(bench, &few);
}

/* ---- long ------------------------------------------------------------------------------------ */

/* At full depth. */
static void submit(const struct bench *bench, struct engine *engine, uint64_t id, size_t prompt,
                   size_t generated) {
    struct dice dice = dice_make(2, id);
    int32_t *tokens = calloc(prompt, sizeof *tokens);
    if (!tokens) die("no memory");
    load_fill_tokens(bench->info, &dice, tokens, prompt);
    load_submit(engine, id, tokens, prompt, generated, 0);
    free(tokens);
}

/* Gaps between the tokens of those who decode while the prompt is read. target_ms 0: no target, and
 * chunks of `chunk` tokens (0: a whole step). */
static void run_long_arm(const struct bench *bench, size_t target_ms, size_t chunk, size_t round) {
    struct engine_options options = {
        .kv_budget = (size_t)2 << 30,
        .step_target_us = 1000 * target_ms,
        .prefill_chunk = chunk,
    };
    struct engine *engine;
    struct error error = {0};
    if (engine_create(bench->model, &options, &engine, &error) != 0) die(error.message);
    size_t capacity = 65536, count = 0;
    double *gaps = calloc(capacity, sizeof *gaps), last[DECODERS] = {0}, asked = 0, first = 0;
    size_t generated = bench->info->context - 32, started = 0;
    if (!gaps) die("no memory");
    for (size_t i = 0; i < DECODERS; i++) submit(bench, engine, i, 16, generated);
    while (first == 0) {
        struct engine_event event;
        engine_wait(engine, 100);
        if (!engine_take_events(engine, &event, 1)) continue;
        double now = (double)time_now_ns() / 1e9;
        if (event.kind != EVENT_TOKEN) continue;
        if (event.id == DECODERS) {
            first = now - asked;
            continue;
        }
        if (asked > 0 && count < capacity) gaps[count++] = now - last[event.id];
        last[event.id] = now;
        /* Some steps of decoding first, for predictions to settle. */
        if (asked == 0 && ++started == 20 * DECODERS) {
            asked = now;
            submit(bench, engine, DECODERS, bench->prompt, 1);
        }
    }
    /* The smallest chunk beside those who decode, at the prompt's end. */
    const struct cost_model *cost = model_get_cost(bench->model);
    struct cost_load decode = {DECODERS, DECODERS, DECODERS, 0, DECODERS}, both = decode;
    both.rows = both.attn_rows = both.mlp_rows = DECODERS + LEAST_CHUNK;
    both.attended = (double)(LEAST_CHUNK * bench->prompt);
    double chunk_ns = cost_predict(cost, &both) - cost_predict(cost, &decode);
    printf("{\"part\": \"long\", \"model\": \"%s\", \"round\": %zu, \"prompt\": %zu, "
           "\"target\": %zu, \"chunk\": %zu, \"prompt_seconds\": %.4g, \"gaps\": %zu, "
           "\"next_p50\": %.5g, \"next_p99\": %.5g, \"next_max\": %.5g, \"chunk_ms\": %.4g}\n",
           bench->info->name, round, bench->prompt, target_ms, chunk, first, count,
           MS * load_quantile(gaps, count, 0.5), MS * load_quantile(gaps, count, 0.99),
           MS * load_quantile(gaps, count, 1), chunk_ns / 1e6);
    fflush(stdout);
    free(gaps);
    engine_destroy(engine);
}

static void run_long(const struct bench *bench) {
    for (size_t round = 0; round < bench->rounds; round++) {
        run_long_arm(bench, bench->target_ms, 0, round);
        run_long_arm(bench, 0, 0, round);
        run_long_arm(bench, 0, 64, round);
    }
}

/* ---- predict --------------------------------------------------------------------------------- */

/* What was predicted against what it took; plainly: the cost model alone against the time that the
 * engine's thread had a processor, which on one thread is what it took without other programs. */
static double error_of(const struct step_record *step, bool plainly) {
    uint64_t predicted = plainly ? step->modelled_ns : step->predicted_ns;
    uint64_t real = plainly ? step->thread_ns : step->real_ns;
    return fabs((double)predicted / (double)real - 1);
}

static void print_errors(const struct bench *bench, const struct step_record *steps, size_t count,
                         const char *kind, bool plainly, size_t round) {
    double *errors = calloc(count + 1, sizeof *errors), load = 0;
    size_t kept = 0;
    if (!errors) die("no memory");
    for (size_t i = 0; i < count; i++) {
        bool is_decode = steps[i].decode_rows == steps[i].rows;
        if (strcmp(kind, "all") != 0 && is_decode != (strcmp(kind, "decode") == 0)) continue;
        errors[kept++] = error_of(&steps[i], plainly);
    }
    getloadavg(&load, 1);
    printf("{\"part\": \"predict\", \"model\": \"%s\", \"device\": \"%s\", \"round\": %zu, "
           "\"steps\": \"%s\", \"against\": \"%s\", \"count\": %zu, \"p25\": %.4f, \"p50\": %.4f, "
           "\"p75\": %.4f, \"p90\": %.4f, \"load_average\": %.2f}\n",
           bench->info->name, bench->info->device, round, kind, plainly ? "thread" : "real", kept,
           load_quantile(errors, kept, 0.25), load_quantile(errors, kept, 0.5),
           load_quantile(errors, kept, 0.75), load_quantile(errors, kept, 0.9), load);
    fflush(stdout);
    free(errors);
}

/* Requests of all tiers and many lengths, all at once: crowded at first, a few at the end. */
static void run_crowd(const struct bench *bench, struct engine *engine) {
    size_t ended = 0, sent = 0;
    while (ended < bench->requests) {
        for (; sent < bench->requests && sent < ended + CROWD; sent++) {
            struct dice dice = dice_make(3, sent);
            size_t prompt = 1 + dice_below(&dice, 256), generated = 1 + dice_below(&dice, 128);
            int32_t tokens[256], tier = (int32_t)(sent % bench->info->tier_count);
            load_fill_tokens(bench->info, &dice, tokens, prompt);
            load_submit(engine, sent, tokens, prompt, generated, tier);
        }
        struct engine_event event;
        engine_wait(engine, 100);
        while (engine_take_events(engine, &event, 1)) ended += event.kind == EVENT_FINISHED;
    }
}

static void run_predict(const struct bench *bench) {
    struct step_record *steps = calloc(STEP_RECORDS, sizeof *steps);
    if (!steps) die("no memory");
    for (size_t round = 0; round < bench->rounds; round++) {
        struct engine_options options = {
            .kv_budget = (size_t)1 << 30,
            .step_log = STEP_RECORDS,
            .step_target_us = 1000 * bench->target_ms,
            .max_sequences = CROWD,
        };
        struct engine *engine;
        struct error error = {0};
        if (engine_create(bench->model, &options, &engine, &error) != 0) die(error.message);
        run_crowd(bench, engine);
        size_t count = engine_get_steps(engine, steps, STEP_RECORDS);
        print_errors(bench, steps, count, "all", false, round);
        print_errors(bench, steps, count, "decode", false, round);
        print_errors(bench, steps, count, "prefill", false, round);
        print_errors(bench, steps, count, "all", true, round);
        engine_destroy(engine);
    }
    free(steps);
}

/* ---- Start ----------------------------------------------------------------------------------- */

static void show(void *context, const char *line) {
    (void)context;
    fprintf(stderr, "calibrating: %s\n", line);
}

static void make_tiers(struct bench *bench) {
    static const struct calibration_target targets[] = {{"balanced", 0.25}, {"fast", 0.4}};
    enum { TOKENS = 384 };
    int32_t tokens[TOKENS];
    struct dice dice = dice_make(4, 0);
    struct error error = {0};
    load_fill_tokens(bench->info, &dice, tokens, TOKENS);
    struct calibration calibration = {
        .tokens = tokens,
        .count = TOKENS,
        .targets = targets,
        .target_count = 2,
        .window = TOKENS,
        .progress = show,
    };
    if (model_calibrate(bench->model, &calibration, &error) != 0) die(error.message);
}

static void open_model(struct bench *bench) {
    struct model_options options = {.device = "cpu", .threads = bench->threads};
    struct error error = {0};
    for (int attempt = 0; attempt < 2; attempt++) {
        if (model_load(bench->path, &options, &bench->model, &error) != 0) die(error.message);
        bench->info = model_get_info(bench->model);
        if (bench->info->tier_count > 1) break;
        make_tiers(bench);
        model_destroy(bench->model);
    }
    if (model_measure_cost(bench->model, &error) != 0) die(error.message);
}

static void read_text(struct bench *bench) {
    char *text;
    size_t size;
    struct error error = {0};
    const struct tokenizer *tokenizer = model_get_tokenizer(bench->model);
    if (!bench->text_path || !tokenizer) return;
    if (file_read(bench->text_path, (size_t)1 << 26, &text, &size, &error) != 0 ||
        tokenizer_encode(tokenizer, text, size, false, &bench->text, &error) != 0) {
        die(error.message);
    }
    free(text);
}

static void parse_flags(struct bench *bench, int argc, char **argv) {
    const struct {
        const char *name;
        const char **text;
        double *real;
        size_t *count;
    } flags[] = {
        {"--seconds", NULL, &bench->seconds, NULL},
        {"--clients", &bench->clients, NULL, NULL},
        {"--arms", &bench->arms, NULL, NULL},
        {"--lengths", &bench->lengths, NULL, NULL},
        {"--tiers", &bench->tiers, NULL, NULL},
        {"--rounds", NULL, NULL, &bench->rounds},
        {"--text", &bench->text_path, NULL, NULL},
        {"--load", NULL, &bench->load, NULL},
        {"--ttft-ms", NULL, &bench->ttft_ms, NULL},
        {"--tpot-ms", NULL, &bench->tpot_ms, NULL},
        {"--prompt", NULL, NULL, &bench->prompt},
        {"--requests", NULL, NULL, &bench->requests},
        {"--target-ms", NULL, NULL, &bench->target_ms},
        {"--threads", NULL, NULL, &bench->threads},
        {"--tokens", NULL, NULL, &bench->tokens},
    };
    for (int i = 3; i < argc; i += 2) {
        size_t flag = 0, count = sizeof flags / sizeof *flags;
        while (flag < count && strcmp(argv[i], flags[flag].name) != 0) flag++;
        if (flag == count || i + 1 == argc) die("unknown flag, or one without a value");
        if (flags[flag].text) *flags[flag].text = argv[i + 1];
        if (flags[flag].real) *flags[flag].real = strtod(argv[i + 1], NULL);
        if (flags[flag].count) *flags[flag].count = strtoul(argv[i + 1], NULL, 10);
    }
}

int main(int argc, char **argv) {
    struct bench bench = {
        .seconds = 5,
        .load = 1.2,
        .ttft_ms = 1000,
        .tpot_ms = 100,
        .rounds = 1,
        .prompt = 8000,
        .target_ms = 50,
        .requests = 128,
        .tokens = 128,
        .clients = "1,8,32,128",
        .arms = "",
        .lengths = "",
        .tiers = "",
    };
    static const struct {
        const char *name;
        void (*run)(const struct bench *);
    } parts[] = {{"tiers", run_tiers},
                 {"open", run_open},
                 {"kv", run_kv},
                 {"long", run_long},
                 {"predict", run_predict}};
    size_t part = 0, count = sizeof parts / sizeof *parts;
    while (argc > 2 && part < count && strcmp(argv[2], parts[part].name) != 0) part++;
    if (argc < 3 || part == count) {
        fprintf(stderr, "usage: bench_batching MODEL tiers|open|kv|long|predict [flags]\n");
        return 2;
    }
    bench.path = argv[1];
    parse_flags(&bench, argc, argv);
    open_model(&bench);
    read_text(&bench);
    parts[part].run(&bench);
    free(bench.text.ids);
    model_destroy(bench.model);
    return 0;
}
