/* A NAG of a given shape with random weights, made on a device and stepped as the engine does: time
 * of a step at several row counts and tiers, beside what the device can copy and multiply.
 *
 *   bench_device cuda:0              the shape of an 8 B model, told as if all blocks were made
 *   bench_device cpu tiny            a small one, to see that it runs
 *
 * Some of the blocks are made, more than any cache holds, and their time is told for all. */
#include "engine/measure.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shape {
    size_t width, heads, kv_heads, head_size, inner, directions, blocks, told_blocks, context;
};

static const struct shape large = {4096, 32, 8, 128, 14336, 32, 4, 32, 8192};
static const struct shape tiny = {64, 4, 2, 16, 128, 4, 2, 2, 64};
static const double skips[] = {0, 0.25, 0.4};
static const char *const tier_names[] = {"full", "balanced", "fast"};
enum { TIERS = 3, REPEATS = 5 }; /* a device that records steps does so in the first two */

struct block {
    struct matrix *q, *k, *v, *o, *gate, *up, *down;
};

struct bench {
    struct shape shape;
    struct device *device;
    const struct kernels *kernels;
    struct block *blocks;
    struct gate *gates;
    struct step_rows step;
    struct decisions decisions;
    struct buffer *table, *rope, *r, *s, *q, *k, *v, *mixed, *hidden_gate, *up, *f, *arena;
    size_t max_rows;
};

static void check(const void *made, const struct error *error) {
    if (made) return;
    fprintf(stderr, "bench_device: %s\n", error->message);
    exit(1);
}

/* Uniform with the standard deviation that keeps a product of `in` inputs near 1. */
static float *random_floats(size_t count, size_t in, uint64_t seed) {
    float *x = malloc(count * sizeof *x), scale = sqrtf(3.0f / (float)in);
    for (size_t i = 0; x && i < count; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f * scale;
    }
    return x;
}

static struct buffer *floats(struct bench *bench, const float *data, size_t count) {
    struct error error = {0};
    struct buffer *buffer =
        bench->kernels->buffer_create(bench->device, count * sizeof(float), &error);
    check(buffer, &error);
    if (data) bench->kernels->write(bench->device, buffer, 0, data, count * sizeof(float));
    return buffer;
}

static struct buffer *activation(struct bench *bench, size_t width) {
    struct error error = {0};
    struct buffer *buffer = bench->kernels->activation_create(bench->device, bench->max_rows, width,
                                                              DTYPE_BF16, &error);
    check(buffer, &error);
    return buffer;
}

static struct matrix *matrix(struct bench *bench, const float *data, size_t out, size_t in) {
    struct error error = {0};
    struct matrix *made =
        bench->kernels->matrix_create(bench->device, data, DTYPE_F32, out, in, DTYPE_BF16, &error);
    check(made, &error);
    return made;
}

static void make_blocks(struct bench *bench) {
    const struct shape *shape = &bench->shape;
    size_t d = shape->width, q = shape->heads * shape->head_size,
           k = shape->kv_heads * shape->head_size;
    float *data = random_floats(shape->inner * d, d, 1);
    float *bias = calloc(shape->directions, sizeof *bias);
    float *weight = malloc(shape->directions * sizeof *weight);
    bench->blocks = calloc(shape->blocks, sizeof *bench->blocks);
    bench->gates = calloc(2 * shape->blocks, sizeof *bench->gates);
    if (!data || !bias || !weight || !bench->blocks || !bench->gates) exit(1);
    for (size_t c = 0; c < shape->directions; c++) weight[c] = 1 / (float)shape->directions;
    for (size_t i = 0; i < shape->blocks; i++) {
        bench->blocks[i] = (struct block){matrix(bench, data, q, d),
                                          matrix(bench, data, k, d),
                                          matrix(bench, data, k, d),
                                          matrix(bench, data, d, q),
                                          matrix(bench, data, shape->inner, d),
                                          matrix(bench, data, shape->inner, d),
                                          matrix(bench, data, d, shape->inner)};
    }
    for (size_t l = 0; l < 2 * shape->blocks; l++) {
        float *directions = random_floats(shape->directions * d, d, 100 + l);
        if (!directions) exit(1);
        bench->gates[l] = (struct gate){floats(bench, directions, shape->directions * d),
                                        floats(bench, bias, shape->directions),
                                        floats(bench, weight, shape->directions),
                                        shape->directions,
                                        0.2f,
                                        1};
        free(directions);
    }
    free(data);
    free(bias);
    free(weight);
}

static void make_state(struct bench *bench, size_t positions) {
    const struct shape *shape = &bench->shape;
    size_t rows = bench->max_rows, sublayers = 2 * shape->blocks, vocab = 1024;
    size_t per_slot = shape->context / KV_BLOCK_TOKENS;
    float *table = random_floats(vocab * shape->width, 3, 7);
    float *rope = calloc(shape->context * shape->head_size, sizeof *rope);
    if (!table || !rope) exit(1);
    for (size_t i = 0; i < shape->context * shape->head_size; i += shape->head_size) {
        for (size_t j = 0; j < shape->head_size / 2; j++) rope[i + j] = 1;
    }
    bench->table = floats(bench, table, vocab * shape->width);
    bench->rope = floats(bench, rope, shape->context * shape->head_size);
    free(table);
    free(rope);
    bench->step = (struct step_rows){rows,
                                     floats(bench, NULL, rows),
                                     floats(bench, NULL, rows),
                                     floats(bench, NULL, rows),
                                     floats(bench, NULL, rows),
                                     floats(bench, NULL, rows * per_slot),
                                     per_slot,
                                     rows,
                                     0};
    bench->decisions = (struct decisions){floats(bench, NULL, sublayers * rows),
                                          floats(bench, NULL, sublayers * rows),
                                          {.indices = floats(bench, NULL, rows),
                                           .count = floats(bench, NULL, 1),
                                           .most = rows},
                                          rows,
                                          floats(bench, NULL, TIERS * sublayers),
                                          sublayers};
    bench->r = floats(bench, NULL, rows * shape->width);
    bench->s = floats(bench, NULL, rows);
    bench->q = activation(bench, shape->heads * shape->head_size);
    bench->mixed = activation(bench, shape->heads * shape->head_size);
    bench->k = activation(bench, shape->kv_heads * shape->head_size);
    bench->v = activation(bench, shape->kv_heads * shape->head_size);
    bench->hidden_gate = activation(bench, shape->inner);
    bench->up = activation(bench, shape->inner);
    bench->f = activation(bench, shape->width);
    struct kv_layer kv = {NULL, 0, shape->blocks, shape->kv_heads, shape->head_size, DTYPE_BF16};
    size_t blocks = positions / KV_BLOCK_TOKENS + rows;
    bench->arena =
        floats(bench, NULL, blocks * bench->kernels->kv_block_bytes(&kv) / sizeof(float));
}

/* ---- A step, as engine/forward.c makes it ---------------------------------------------------- */

static void multiply(struct bench *bench, struct buffer *x, struct matrix *w, struct buffer *y,
                     size_t rows, const struct row_list *list) {
    bench->kernels->matmul(bench->device, &(struct matmul){x, w, y, rows, list}, 1);
}

static void rotate(struct bench *bench, struct buffer *x, size_t heads,
                   const struct row_list *list) {
    bench->kernels->rope(bench->device,
                         &(struct rope){&bench->step, list, x, heads, bench->shape.head_size,
                                        QK_NORM_AFTER_ROPE, 1.2f, bench->rope, NULL, 1e-6f});
}

/* Once, unless the device wants it once more. */
static bool branch_begin(struct bench *bench, const struct row_list *list, size_t attempt) {
    if (!bench->kernels->branch_begin) return attempt == 0;
    return bench->kernels->branch_begin(bench->device, list, attempt);
}

static void branch_end(struct bench *bench) {
    if (bench->kernels->branch_end) bench->kernels->branch_end(bench->device);
}

static void run_attention(struct bench *bench, size_t block, const struct row_list *list) {
    const struct shape *shape = &bench->shape;
    const struct block *weights = &bench->blocks[block];
    size_t rows = bench->step.rows;
    struct kv_layer kv = {bench->arena,     block,     shape->blocks, shape->kv_heads,
                          shape->head_size, DTYPE_BF16};
    multiply(bench, bench->r, weights->k, bench->k, rows, NULL);
    multiply(bench, bench->r, weights->v, bench->v, rows, NULL);
    rotate(bench, bench->k, shape->kv_heads, NULL);
    bench->kernels->kv_append(bench->device,
                              &(struct kv_append){&bench->step, &kv, bench->k, bench->v, NULL});
    for (size_t i = 0; branch_begin(bench, list, i); i++) {
        size_t running = bench->kernels->row_count(bench->device, list);
        multiply(bench, bench->r, weights->q, bench->q, rows, list);
        rotate(bench, bench->q, shape->heads, list);
        struct attention attention = {&bench->step, &kv, bench->q, bench->mixed,
                                      shape->heads, list};
        bench->kernels->attention(bench->device, &attention);
        multiply(bench, bench->mixed, weights->o, bench->f, running, NULL);
        branch_end(bench);
    }
}

static void run_mlp(struct bench *bench, size_t block, const struct row_list *list) {
    const struct block *weights = &bench->blocks[block];
    size_t rows = bench->step.rows;
    for (size_t i = 0; branch_begin(bench, list, i); i++) {
        size_t running = bench->kernels->row_count(bench->device, list);
        multiply(bench, bench->r, weights->gate, bench->hidden_gate, rows, list);
        multiply(bench, bench->r, weights->up, bench->up, rows, list);
        struct activate activate = {bench->hidden_gate,  bench->up,
                                    bench->up,           running,
                                    bench->shape.inner,  ACTIVATION_SILU_GATED,
                                    list};
        bench->kernels->activate(bench->device, &activate);
        multiply(bench, bench->up, weights->down, bench->f, running, NULL);
        branch_end(bench);
    }
}

static void issue_operations(struct bench *bench) {
    const struct row_list *running = &bench->decisions.running;
    size_t sublayers = bench->decisions.sublayers;
    bench->kernels->nag_begin(bench->device,
                              &(struct nag_begin){&bench->step, bench->table, DTYPE_F32,
                                                  bench->shape.width, 0, bench->r, bench->s,
                                                  &bench->gates[0], &bench->decisions, NULL});
    for (size_t l = 0; l < sublayers; l++) {
        if (l % 2)
            run_mlp(bench, l / 2, running);
        else
            run_attention(bench, l / 2, running);
        bench->kernels->nag_end_sublayer(
            bench->device,
            &(struct nag_end_sublayer){&bench->step, l, bench->shape.width, bench->f, true,
                                       bench->r, bench->s, &bench->gates[l],
                                       l + 1 < sublayers ? &bench->gates[l + 1] : NULL,
                                       &bench->decisions, NULL});
    }
}

static double time_step(struct bench *bench) {
    const struct kernels *kernels = bench->kernels;
    struct step_shape shape = {.step = &bench->step, .is_packed = true, .arena = bench->arena};
    float done;
    uint64_t start = time_now_ns();
    if (!kernels->step_begin || kernels->step_begin(bench->device, &shape)) {
        do issue_operations(bench);
        while (kernels->step_end && !kernels->step_end(bench->device));
    }
    bench->kernels->read(bench->device, bench->s, 0, &done, sizeof done);
    return (double)(time_now_ns() - start);
}

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Thresholds at which the wanted share of rows skips, sub-layer by sub-layer as they come. */
static void set_tier(struct bench *bench, double skip) {
    size_t sublayers = bench->decisions.sublayers, rows = bench->step.rows;
    float *theta = calloc(sublayers, sizeof *theta), *mix = malloc(rows * sizeof *mix);
    if (!theta || !mix) exit(1);
    for (size_t l = 0; l < sublayers && skip > 0; l++) {
        time_step(bench);
        bench->kernels->read(bench->device, bench->decisions.mix,
                             l * bench->decisions.max_rows * sizeof *mix, mix, rows * sizeof *mix);
        qsort(mix, rows, sizeof *mix, compare_floats);
        theta[l] = mix[(size_t)(skip * (double)rows)];
        bench->kernels->write(bench->device, bench->decisions.theta, 0, theta,
                              sublayers * sizeof *theta);
    }
    bench->kernels->write(bench->device, bench->decisions.theta, 0, theta,
                          sublayers * sizeof *theta);
    free(theta);
    free(mix);
}

/* Decode: every row has a sequence of its own with `positions` before it, all in the same blocks of
 * the cache but the last. Prefill: one sequence. */
static void set_rows(struct bench *bench, size_t rows, size_t positions, bool prefill) {
    size_t per_slot = bench->step.blocks_per_slot;
    int32_t *ids = calloc(rows * per_slot, sizeof *ids);
    if (!ids) exit(1);
    bench->step.rows = bench->decisions.running.most = rows;
    for (size_t i = 0; i < rows; i++) ids[i] = (int32_t)(i % 1000);
    bench->kernels->write(bench->device, bench->step.token, 0, ids, rows * sizeof *ids);
    for (size_t i = 0; i < rows; i++) ids[i] = (int32_t)(prefill ? i : positions);
    bench->kernels->write(bench->device, bench->step.position, 0, ids, rows * sizeof *ids);
    for (size_t i = 0; i < rows; i++) ids[i] = prefill ? 0 : (int32_t)i;
    bench->kernels->write(bench->device, bench->step.slot, 0, ids, rows * sizeof *ids);
    for (size_t slot = 0; slot < rows; slot++) {
        for (size_t b = 0; b < per_slot; b++) {
            bool own = !prefill && b == positions / KV_BLOCK_TOKENS;
            ids[slot * per_slot + b] = (int32_t)(own ? per_slot + slot : b);
        }
    }
    bench->kernels->write(bench->device, bench->step.block_table, 0, ids,
                          rows * per_slot * sizeof *ids);
    memset(ids, 0, rows * sizeof *ids);
    bench->kernels->write(bench->device, bench->step.tier, 0, ids, rows * sizeof *ids);
    free(ids);
}

static void tell(struct bench *bench, size_t rows, size_t positions, bool prefill) {
    double full = 0;
    set_rows(bench, rows, positions, prefill);
    for (size_t tier = 0; tier < TIERS; tier++) {
        double best = INFINITY;
        set_tier(bench, skips[tier]);
        for (size_t i = 0; i < REPEATS; i++) best = fmin(best, time_step(bench));
        best *= (double)bench->shape.told_blocks / (double)bench->shape.blocks;
        if (tier == 0) full = best;
        printf("%-8s %6zu rows  %-9s %9.3f ms  %.2fx of full\n", prefill ? "prefill" : "decode",
               rows, tier_names[tier], best / 1e6, full / best);
        fflush(stdout);
    }
}

int main(int count, char **arguments) {
    struct bench bench = {.shape = count > 2 && !strcmp(arguments[2], "tiny") ? tiny : large};
    bool is_tiny = bench.shape.width == tiny.width;
    struct error error = {0};
    bench.max_rows = is_tiny ? 16 : 8192;
    struct device_options options = {.name = count > 1 ? arguments[1] : "cuda",
                                     .max_rows = bench.max_rows,
                                     .max_width = bench.shape.inner};
    if (device_open(&options, &bench.device, &error) != 0) check(NULL, &error);
    bench.kernels = bench.device->kernels;
    printf("%s: d %zu, %zu of %zu blocks, bf16\n", bench.device->description, bench.shape.width,
           bench.shape.blocks, bench.shape.told_blocks);
    make_blocks(&bench);
    make_state(&bench, bench.shape.context);
    static const size_t decode_rows[] = {1, 8, 64, 256, 1024};
    for (size_t i = 0; i < 5; i++) {
        if (decode_rows[i] <= bench.max_rows)
            tell(&bench, decode_rows[i], is_tiny ? 20 : 512, false);
    }
    tell(&bench, is_tiny ? 16 : 8192, 0, true);
    return 0; /* the device's memory goes with the process */
}
