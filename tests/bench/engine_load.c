#include "engine_load.h"

#include "bench/arrivals.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SEED 1

struct request {
    double sent, first, last; /* seconds; 0: not yet */
    uint64_t hash;
};

/* One run. Requests are numbered as they are sent. */
struct run {
    const struct load *load;
    const struct model_info *info;
    struct engine *engine;
    struct request *requests;
    double *gaps; /* between tokens, while measuring */
    size_t sent, ended, first_tokens, tokens, gap_count, requests_capacity, gaps_capacity;
    size_t ended_before, tokens_before; /* when measuring began */
    bool measures;
    double begun, cpu_before, machine_before;
    struct engine_stats stats_before;
    double context_sum; /* mean context of the rows of each request sent */
    struct auto_options objectives;
    size_t per_tier[TIERS_MAX];
};

static void die(const char *message) {
    fprintf(stderr, "bench: %s\n", message);
    exit(1);
}

static void *grow(void *array, size_t *capacity, size_t count, size_t size) {
    if (count < *capacity) return array;
    *capacity = 2 * count + 64;
    array = realloc(array, *capacity * size);
    if (!array) die("no memory");
    return array;
}

static double now(void) {
    return (double)time_now_ns() / 1e9;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double load_quantile(double *values, size_t count, double share) {
    if (count == 0) return 0;
    qsort(values, count, sizeof *values, compare_doubles);
    return values[(size_t)(share * (double)(count - 1))];
}

/* ---- Processors ------------------------------------------------------------------------------ */

static double own_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* That all processors together were not idle. */
static double machine_seconds(void) {
    unsigned long long user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0;
    FILE *file = fopen("/proc/stat", "re");
    if (!file) return 0;
    int got = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system, &idle,
                     &wait, &irq, &soft);
    fclose(file);
    unsigned long long busy = user + nice + system + irq + soft;
    return got == 7 ? (double)busy / (double)sysconf(_SC_CLK_TCK) : 0;
}

/* ---- Requests -------------------------------------------------------------------------------- */

static int32_t choose_tier(struct run *run, size_t prompt) {
    if (run->load->tier != LOAD_AUTO) return run->load->tier;
    struct auto_choice choice;
    engine_choose_tier(run->engine, &run->objectives, prompt, &choice);
    run->objectives.previous = choice.tier;
    return (int32_t)choice.tier;
}

void load_fill_tokens(const struct model_info *model, struct dice *dice, int32_t *tokens,
                      size_t count) {
    for (size_t i = 0; i < count; i++) tokens[i] = (int32_t)dice_below(dice, model->vocab);
}

void load_submit(struct engine *engine, uint64_t id, const int32_t *prompt, size_t prompt_length,
                 size_t generated, int32_t tier) {
    struct engine_request request = {
        .id = id,
        .prompt = prompt,
        .prompt_length = prompt_length,
        .max_tokens = generated,
        .ignore_eos = true,
        .tier = tier,
        .top_logprobs = -1,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
    struct error error = {0};
    if (engine_submit(engine, &request, &error) != 0) die(error.message);
}

static void fill_prompt(const struct run *run, struct dice *dice, int32_t *tokens, size_t count) {
    const struct token_list *text = run->load->text;
    bool has_text = text && text->count > count;
    size_t at = has_text ? dice_below(dice, text->count - count) : 0;
    if (has_text)
        memcpy(tokens, text->ids + at, count * sizeof *tokens);
    else
        load_fill_tokens(run->info, dice, tokens, count);
}

/* The first requests of a closed loop are cut short, each at another place: or all would end, and
 * begin, together. */
static size_t stagger(const struct run *run, size_t generated) {
    const struct load *load = run->load;
    if (load->lockstep || load->requests || run->sent >= load->clients) return generated;
    size_t part = generated * (run->sent + 1) / load->clients;
    return part ? part : 1;
}

static void send(struct run *run) {
    const struct load *load = run->load;
    struct dice dice = dice_make(SEED, run->sent);
    size_t room = run->info->context - 1;
    size_t prompt = lengths_draw(&load->prompt, &dice);
    size_t generated = lengths_draw(&load->generated, &dice);
    if (prompt > room) prompt = room;
    if (generated > run->info->context - prompt) generated = run->info->context - prompt;
    generated = stagger(run, generated);
    int32_t *tokens = calloc(prompt, sizeof *tokens);
    if (!tokens) die("no memory");
    fill_prompt(run, &dice, tokens, prompt);
    int32_t tier = choose_tier(run, prompt);
    run->requests = grow(run->requests, &run->requests_capacity, run->sent, sizeof *run->requests);
    run->requests[run->sent] = (struct request){.sent = now()};
    run->per_tier[tier]++;
    run->context_sum += (double)(prompt + generated) / 2;
    load_submit(run->engine, run->sent++, tokens, prompt, generated, tier);
    free(tokens);
}

static void take_token(struct run *run, const struct engine_event *event) {
    struct request *request = &run->requests[event->id];
    double time = now();
    if (request->first == 0) {
        request->first = time;
        run->first_tokens++;
    } else if (run->measures) {
        run->gaps = grow(run->gaps, &run->gaps_capacity, run->gap_count, sizeof *run->gaps);
        run->gaps[run->gap_count++] = time - request->last;
    }
    request->last = time;
    request->hash = request->hash * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)event->token + 1;
    run->tokens++;
}

static void take_events(struct run *run, unsigned timeout_ms) {
    struct engine_event events[32];
    engine_wait(run->engine, timeout_ms);
    size_t count = engine_take_events(run->engine, events, 32);
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind == EVENT_TOKEN) take_token(run, &events[i]);
        if (events[i].kind == EVENT_FINISHED) run->ended++;
    }
}

/* ---- Runs ------------------------------------------------------------------------------------ */

static void begin_measuring(struct run *run) {
    run->measures = true;
    run->begun = now();
    run->cpu_before = own_seconds();
    run->machine_before = machine_seconds();
    run->ended_before = run->ended;
    run->tokens_before = run->tokens;
    engine_get_stats(run->engine, &run->stats_before);
}

static bool is_over(const struct run *run) {
    const struct load *load = run->load;
    if (load->requests) return run->ended >= load->requests;
    if (!run->measures || now() - run->begun < load->seconds) return false;
    if (load->lockstep) return run->ended == run->sent;
    size_t enough = load->clients < 4 ? 4 : load->clients > 32 ? 32 : load->clients;
    return run->ended - run->ended_before >= enough;
}

static void run_closed(struct run *run) {
    const struct load *load = run->load;
    if (load->lockstep || load->requests) begin_measuring(run);
    while (!is_over(run)) {
        bool may_send = !load->lockstep || run->ended == run->sent;
        for (size_t room = load->clients - (run->sent - run->ended); may_send && room > 0; room--) {
            if (load->requests && run->sent == load->requests) break;
            send(run);
        }
        take_events(run, 20);
        if (!run->measures && run->first_tokens >= load->clients) begin_measuring(run);
    }
}

static void run_open(struct run *run) {
    struct arrivals arrivals;
    arrivals_init(&arrivals, run->load->rate, 1, SEED);
    begin_measuring(run);
    while (arrivals.at < run->load->seconds || run->ended < run->sent) {
        double time = now() - run->begun;
        for (; arrivals.at < run->load->seconds && arrivals.at <= time;
             arrivals_advance(&arrivals)) {
            send(run);
        }
        double wait = arrivals.at < run->load->seconds ? arrivals.at - time : 1;
        take_events(run, wait < 0.02 ? (unsigned)(1000 * fmax(wait, 0.001)) : 20);
    }
}

/* ---- Figures --------------------------------------------------------------------------------- */

static uint64_t sum(const uint64_t *per_tier) {
    uint64_t total = 0;
    for (size_t i = 0; i < TIERS_MAX; i++) total += per_tier[i];
    return total;
}

/* Since measuring began. */
static void fill_work(const struct run *run, struct load_result *result) {
    const struct model_info *info = run->info;
    const struct engine_stats *a = &run->stats_before, *b = &result->stats;
    double blocks = (double)info->blocks, rows = (double)(b->step_rows - a->step_rows);
    double attn = (double)(sum(b->attn_skipped) - sum(a->attn_skipped));
    double mlp = (double)(sum(b->mlp_skipped) - sum(a->mlp_skipped));
    double logits = (double)(b->generated_tokens - a->generated_tokens);
    double attn_flops =
        info->flops_attn + info->flops_attn_per_context * run->context_sum / (double)run->sent;
    double all = rows * (info->flops_fixed + attn_flops + info->flops_mlp) +
                 logits * 2 * (double)(info->hidden * info->vocab);
    if (rows == 0) return;
    result->saving = (attn / blocks * attn_flops + mlp / blocks * info->flops_mlp) / all;
    result->attn_skip = attn / blocks / rows;
    result->mlp_skip = mlp / blocks / rows;
    result->rows_per_step = rows / (double)(b->steps - a->steps);
}

static void fill_times(struct run *run, struct load_result *result) {
    double *firsts = calloc(run->sent + 1, sizeof *firsts);
    size_t count = 0;
    if (!firsts) die("no memory");
    for (size_t i = 0; i < run->sent; i++) {
        const struct request *request = &run->requests[i];
        if (request->first > 0) firsts[count++] = request->first - request->sent;
    }
    result->first_p50 = load_quantile(firsts, count, 0.5);
    result->first_p99 = load_quantile(firsts, count, 0.99);
    result->next_p50 = load_quantile(run->gaps, run->gap_count, 0.5);
    result->next_p99 = load_quantile(run->gaps, run->gap_count, 0.99);
    free(firsts);
}

void load_run(const struct load *load, struct load_result *result) {
    struct run run = {.load = load, .info = model_get_info(load->model)};
    struct engine_options options = load->engine;
    struct error error = {0};
    if (options.kv_budget == 0) options.kv_budget = (size_t)2 << 30;
    run.objectives = load->objectives;
    if (engine_create(load->model, &options, &run.engine, &error) != 0) die(error.message);
    if (load->clients) {
        run_closed(&run);
    } else {
        run_open(&run);
    }
    *result = (struct load_result){.seconds = now() - run.begun};
    result->cpu_seconds = own_seconds() - run.cpu_before;
    result->others =
        (machine_seconds() - run.machine_before - result->cpu_seconds) / result->seconds;
    result->ended = run.ended - run.ended_before;
    result->tokens = run.tokens - run.tokens_before;
    engine_get_stats(run.engine, &result->stats);
    fill_work(&run, result);
    fill_times(&run, result);
    for (size_t i = 0; i < run.sent; i++) result->hash ^= run.requests[i].hash * (2 * i + 1);
    memcpy(result->per_tier, run.per_tier, sizeof run.per_tier);
    engine_destroy(run.engine);
    free(run.requests);
    free(run.gaps);
}
