/* What a step of a model takes, and where the machine's limits are: prefill and decode without a
 * server, side by side with what the memory and the multipliers give in the same run.
 *
 *     bench_step MODEL [WEIGHTS [THREADS [ISA]]]
 *
 * Prefill is 512 tokens of one sequence; decode is one token of each of 1, 8 and 32 sequences with
 * 128 tokens behind them, logits included. Times are the best of several: on a shared machine the
 * others measure the neighbours.
 */
#include "engine/forward.h"
#include "engine/model.h"
#include "peaks.h"
#include "tests/step_batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PREFILL = 512, PAST = 128, SEQUENCES = 32, REPEATS = 7 };
enum { BLOCKS_PER_SLOT = PREFILL / KV_BLOCK_TOKENS };

static struct model *model;
static struct kv_arena *arena;

static void fail(const struct error *error) {
    fprintf(stderr, "bench_step: %s\n", error->message);
    exit(1);
}

struct times {
    double seconds, cpu; /* of the clock; of all threads */
};

static double cpu_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* `rows` tokens: of one sequence from position `first` on, or the next one of as many sequences. */
static struct times run_step(size_t rows, size_t first, bool one_sequence, bool logits) {
    struct step_batch step = {0};
    int32_t table[SEQUENCES * BLOCKS_PER_SLOT];
    const struct model_info *info = model_get_info(model);
    for (size_t i = 0; i < SEQUENCES * BLOCKS_PER_SLOT; i++) table[i] = (int32_t)i;
    for (size_t i = 0; i < rows; i++) {
        int32_t token = (int32_t)(i * 7919 % info->vocab);
        step_batch_add(&step, token, one_sequence ? first + i : first, 0, one_sequence ? 0 : i);
        if (logits) step_batch_want(&step);
    }
    struct batch batch = step_batch_view(&step);
    batch.block_table = table;
    batch.slots = one_sequence ? 1 : rows;
    batch.blocks_per_slot = BLOCKS_PER_SLOT;
    batch.body = BODY_DENSE;
    struct step_result result;
    uint64_t start = time_now_ns();
    double cpu = cpu_seconds();
    model_step(model, arena, &batch, &result);
    return (struct times){(double)(time_now_ns() - start) * 1e-9, cpu_seconds() - cpu};
}

static void print_step(const char *what, size_t rows, size_t first, bool one_sequence, bool logits,
                       double flops) {
    struct times best = {1e9, 1e9};
    for (size_t i = 0; i < REPEATS; i++) {
        struct times times = run_step(rows, first, one_sequence, logits);
        if (times.seconds < best.seconds) best.seconds = times.seconds;
        if (times.cpu < best.cpu) best.cpu = times.cpu;
    }
    printf("%-12s %8.2f ms (cpu %8.2f) %8.1f tok/s %7.1f GFLOP/s\n", what, best.seconds * 1e3,
           best.cpu * 1e3, (double)rows / best.seconds,
           flops * (double)rows / best.seconds * 1e-9);
}

static enum weight_type weights_of(const char *name) {
    static const char *const names[] = {
        [WEIGHTS_AUTO] = "auto", [WEIGHTS_F32] = "f32",   [WEIGHTS_BF16] = "bf16",
        [WEIGHTS_F16] = "f16",   [WEIGHTS_INT8] = "int8",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!strcmp(name, names[i])) return (enum weight_type)i;
    }
    fprintf(stderr, "bench_step: weights are auto, f32, bf16, f16 or int8\n");
    exit(2);
}

int main(int count, char **arguments) {
    struct error error = {0};
    struct model_options options = {.max_step_rows = PREFILL, .max_context = PREFILL};
    if (count < 2) {
        fprintf(stderr, "usage: bench_step MODEL [WEIGHTS [THREADS [ISA]]]\n");
        return 2;
    }
    if (count > 2) options.weights = weights_of(arguments[2]);
    if (count > 3) options.threads = strtoul(arguments[3], NULL, 10);
    if (count > 4) options.isa = arguments[4];
    uint64_t start = time_now_ns();
    if (model_load(arguments[1], &options, &model, &error)) fail(&error);
    double load = (double)(time_now_ns() - start) * 1e-9;
    if (kv_arena_create(model, SEQUENCES * BLOCKS_PER_SLOT, &arena, &error)) fail(&error);
    const struct model_info *info = model_get_info(model);
    size_t threads = options.threads ? options.threads : (size_t)sysconf(_SC_NPROCESSORS_ONLN);
    printf("%s, %s weights, %s; loaded in %.2f s; reading %.1f GB/s, at most %.1f GFLOP/s\n",
           info->name, info->weights, info->device, load, peak_read(threads) * 1e-9,
           peak_operations(info->isa, model->weights) * (double)threads * 1e-9);

    double blocks = info->flops_fixed + info->flops_attn + info->flops_mlp;
    double head = 2.0 * (double)(info->vocab * info->hidden);
    double context = info->flops_attn_per_context;
    print_step("prefill 512", PREFILL, 0, true, false, blocks + context * PREFILL / 2);
    for (size_t i = 0; i < SEQUENCES; i++) run_step(1, PAST, false, false);
    print_step("decode 1", 1, PAST, false, true, blocks + head + context * PAST);
    print_step("decode 8", 8, PAST, false, true, blocks + head + context * PAST);
    print_step("decode 32", 32, PAST, false, true, blocks + head + context * PAST);
    kv_arena_destroy(model, arena);
    model_destroy(model);
    return 0;
}
