/* Batching over one engine, without HTTP: what tiers gain, what a long prompt costs those who
 * decode, what a small KV budget costs, how good predictions are.
 *
 *   bench_batching MODEL [requests]
 *
 * Prompts and lengths are made from a fixed seed; end-of-text is ignored, so that every run does
 * the same work. */
#include "engine/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT    128
#define GENERATED 128
#define CLIENTS   8 /* that decode while a long prompt comes */
#define MS        1e6

static const struct model_info *info;
static struct model *model;

static void die(const struct error *error) {
    fprintf(stderr, "bench_batching: %s\n", error->message);
    exit(1);
}

static uint64_t mix(uint64_t x) {
    return mix_bits(x + MIX_STEP);
}

static void submit(struct engine *engine, uint64_t id, size_t prompt, size_t generated,
                   size_t tier) {
    int32_t *tokens = calloc(prompt, sizeof *tokens);
    struct error error = {0};
    for (size_t i = 0; i < prompt; i++) tokens[i] = (int32_t)(mix(id * 65536 + i) % info->vocab);
    struct engine_request request = {
        .id = id,
        .prompt = tokens,
        .prompt_length = prompt,
        .max_tokens = generated,
        .ignore_eos = true,
        .tier = (int32_t)tier,
        .top_logprobs = -1,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
    if (engine_submit(engine, &request, &error) != 0) die(&error);
    free(tokens);
}

static struct engine *open_engine(struct engine_options options) {
    struct engine *engine = NULL;
    struct error error = {0};
    if (options.kv_budget == 0) options.kv_budget = (size_t)1 << 30;
    if (engine_create(model, &options, &engine, &error) != 0) die(&error);
    return engine;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(double *values, size_t count, double share) {
    qsort(values, count, sizeof *values, compare);
    return count ? values[(size_t)(share * (double)(count - 1))] : 0;
}

/* ---- Closed loop ---- */

struct run {
    double tokens_per_second, skip; /* of sub-layers */
    uint64_t hash;                  /* of all tokens, whatever the order of requests */
    struct engine_stats stats;
};

/* `clients` requests at a time; lockstep: the next ones only when all of them have ended. */
static struct run run_closed(struct engine_options options, size_t clients, size_t requests,
                             size_t tier, bool lockstep) {
    struct engine *engine = open_engine(options);
    struct run run = {0};
    uint64_t start = time_now_ns(), tokens = 0, *last = calloc(requests, sizeof *last);
    size_t sent = 0, ended = 0;
    while (ended < requests) {
        bool may_send = !lockstep || ended == sent;
        size_t room = clients - (sent - ended);
        for (; may_send && room > 0 && sent < requests; room--) {
            size_t generated = lockstep ? GENERATED : GENERATED / 2 + mix(sent) % GENERATED;
            submit(engine, sent++, PROMPT, generated, tier);
        }
        struct engine_event events[64];
        engine_wait(engine, 100);
        size_t count = engine_take_events(engine, events, 64);
        for (size_t i = 0; i < count; i++) {
            if (events[i].kind == EVENT_FINISHED) ended++;
            if (events[i].kind != EVENT_TOKEN) continue;
            tokens++;
            last[events[i].id] = mix(last[events[i].id] + (uint64_t)events[i].token);
        }
    }
    run.tokens_per_second = (double)tokens / ((double)(time_now_ns() - start) / 1e9);
    for (size_t i = 0; i < requests; i++) run.hash ^= mix(last[i] + i);
    free(last);
    engine_get_stats(engine, &run.stats);
    uint64_t ran = run.stats.attn_run[tier] + run.stats.mlp_run[tier];
    uint64_t skipped = run.stats.attn_skipped[tier] + run.stats.mlp_skipped[tier];
    run.skip = (double)skipped / (double)(ran + skipped);
    engine_destroy(engine);
    return run;
}

static void print_tiers(size_t requests) {
    static const size_t clients[] = {1, 8, 32, 128};
    printf("closed loop, %d prompt tokens, %d generated on average, output tokens/s\n", PROMPT,
           GENERATED);
    printf("  %7s %-10s %9s %11s %7s %8s\n", "clients", "tier", "tokens/s", "sub-layers", "gain",
           "ideal");
    for (size_t i = 0; i < 4; i++) {
        double full = 0;
        for (size_t tier = 0; tier < info->tier_count; tier++) {
            size_t count = clients[i] == 1 ? requests / 8 + 1 : requests;
            struct run run = run_closed((struct engine_options){0}, clients[i], count, tier, false);
            if (tier == 0) full = run.tokens_per_second;
            printf("  %7zu %-10s %9.0f %9.1f %% %7.2f %8.2f\n", clients[i], info->tiers[tier].name,
                   run.tokens_per_second, 100 * (1 - run.skip), run.tokens_per_second / full,
                   1 / (1 - run.skip));
        }
    }
}

static void print_modes(size_t requests) {
    printf(
        "32 clients, tier %s: lock-step %.0f tokens/s, continuous %.0f, by predicted time %.0f\n",
        info->tiers[info->tier_count - 1].name,
        run_closed((struct engine_options){0}, 32, requests, info->tier_count - 1, true)
            .tokens_per_second,
        run_closed((struct engine_options){.prefill_chunk = 64}, 32, requests, info->tier_count - 1,
                   false)
            .tokens_per_second,
        run_closed((struct engine_options){.step_target_us = 20000}, 32, requests,
                   info->tier_count - 1, false)
            .tokens_per_second);
}

static void print_kv(size_t requests) {
    size_t blocks = 32 * ((PROMPT + 3 * GENERATED / 2) / 16 + 1);
    struct engine_options small = {.kv_budget = blocks / 4 * info->kv_block_bytes};
    struct run all = run_closed((struct engine_options){0}, 32, requests, 0, false);
    struct run few = run_closed(small, 32, requests, 0, false);
    printf("32 clients, a quarter of the KV that they want: all %zu end, the same tokens: %s, "
           "%llu preemptions, %.0f tokens/s of %.0f\n",
           requests, all.hash == few.hash ? "yes" : "NO", (unsigned long long)few.stats.preemptions,
           few.tokens_per_second, all.tokens_per_second);
}

/* ---- A long prompt beside streams ---- */

static void print_long_prompt(size_t target_us) {
    struct engine *engine = open_engine((struct engine_options){.step_target_us = target_us});
    size_t generated = info->context / 2, longest = info->context - 1, count = 0, ended = 0;
    double *gaps = calloc(CLIENTS * generated, sizeof *gaps), last[CLIENTS + 1] = {0};
    double asked = 0, first = 0;
    for (size_t i = 0; i < CLIENTS; i++) submit(engine, i, 16, generated, 0);
    while (ended < CLIENTS) {
        struct engine_event event;
        engine_wait(engine, 100);
        if (!engine_take_events(engine, &event, 1)) continue;
        double now = (double)time_now_ns();
        ended += event.kind == EVENT_FINISHED && event.id < CLIENTS;
        if (event.kind != EVENT_TOKEN) continue;
        if (event.id == CLIENTS) first = now - asked;
        if (event.id < CLIENTS && asked > 0 && first == 0) gaps[count++] = now - last[event.id];
        last[event.id] = now;
        if (asked == 0 && event.id == 0 && last[CLIENTS - 1] > 0) {
            asked = now;
            submit(engine, CLIENTS, longest, 1, 0);
        }
    }
    printf("  target %5.1f ms: %4zu tokens while the prompt of %zu is read in %.0f ms; between "
           "tokens p50 %.2f ms, p99 %.2f ms\n",
           (double)target_us / 1e3, count, longest, first / MS, percentile(gaps, count, 0.5) / MS,
           percentile(gaps, count, 0.99) / MS);
    free(gaps);
    engine_destroy(engine);
}

/* ---- Predictions ---- */

static void print_predictions(size_t requests) {
    struct engine *engine =
        open_engine((struct engine_options){.step_log = 65536, .step_target_us = 20000});
    for (size_t i = 0; i < requests; i++) {
        submit(engine, i, 1 + mix(i) % PROMPT, 1 + mix(i + 7) % GENERATED, i % info->tier_count);
    }
    for (size_t ended = 0; ended < requests;) {
        struct engine_event event;
        engine_wait(engine, 100);
        if (engine_take_events(engine, &event, 1)) ended += event.kind == EVENT_FINISHED;
    }
    struct step_record *steps = calloc(65536, sizeof *steps);
    double *errors = calloc(65536, sizeof *errors);
    size_t count = engine_get_steps(engine, steps, 65536);
    for (size_t i = 0; i < count; i++) {
        double off = (double)steps[i].real_ns / (double)steps[i].predicted_ns - 1;
        errors[i] = off < 0 ? -off : off;
    }
    printf("predictions of %zu steps of mixed tiers: off by %.1f %% (median), %.1f %% (p90)\n",
           count, 100 * percentile(errors, count, 0.5), 100 * percentile(errors, count, 0.9));
    free(steps);
    free(errors);
    engine_destroy(engine);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_batching MODEL [requests]\n");
        return 2;
    }
    size_t requests = argc > 2 ? strtoul(argv[2], NULL, 10) : 128;
    struct model_options options = {.device = "cpu"};
    struct error error = {0};
    if (model_load(argv[1], &options, &model, &error) != 0) die(&error);
    info = model_get_info(model);
    print_predictions(requests);
    printf("%d clients decode at full depth, a long prompt arrives\n", CLIENTS);
    static const size_t targets[] = {0, 20000, 10000, 5000};
    for (size_t i = 0; i < 4; i++) print_long_prompt(targets[i]);
    print_kv(requests);
    print_modes(requests);
    print_tiers(requests);
    model_destroy(model);
    return 0;
}
