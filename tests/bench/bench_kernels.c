/* How fast the kernels are: matrix products per type and number of rows, beside what the machine
 * can do at most, and what the operations of one step cost.
 *
 *     bench_kernels [ISA [THREADS]]
 *
 * Each figure is the best of several runs: on a shared machine the others measure the neighbours.
 */
#include "kernels/kernels.h"
#include "peaks.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ROWS_MAX  128
#define WIDTH_MAX 4096
#define REPEATS   5

/* Weights of a step come from memory: cycle through so many bytes, more than caches hold. */
#define CYCLED_BYTES ((size_t)128 << 20)
#define COPIES_MAX   1024

static struct device *device;

static void *check(void *created, const struct error *error) {
    if (created) return created;
    fprintf(stderr, "bench_kernels: %s\n", error->message);
    exit(1);
}

/* Pseudo-random numbers in -1..1; the same in every run. */
static void fill(float *x, size_t count) {
    uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

static struct buffer *buffer_of(size_t bytes, const void *data) {
    struct error error;
    struct buffer *buffer = check(device->kernels->buffer_create(device, bytes, &error), &error);
    if (data) device->kernels->write(device, buffer, 0, data, bytes);
    return buffer;
}

static struct buffer *random_buffer(size_t count) {
    float *x = malloc(count * sizeof *x);
    struct error error = {.message = "no memory"};
    fill(check(x, &error), count);
    struct buffer *buffer = buffer_of(count * sizeof *x, x);
    free(x);
    return buffer;
}

/* ---- Matrix products ------------------------------------------------------------------------- */

/* The best of runs of consecutive products: one alone would measure the clock. */
static double product_seconds(struct matrix *const *w, size_t copies, struct buffer *x,
                              struct buffer *y, size_t rows) {
    double best = 1e9;
    size_t run = copies < 8 ? 1 : copies / 8;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        for (size_t i = 0; i + run <= copies; i += run) {
            uint64_t start = time_now_ns();
            for (size_t j = i; j < i + run; j++) {
                device->kernels->matmul(device, &(struct matmul){x, w[j], y, rows, NULL}, 1);
            }
            double seconds = (double)(time_now_ns() - start) * 1e-9 / (double)run;
            if (seconds < best) best = seconds;
        }
    }
    return best;
}

static void bench_products(size_t in, size_t out, enum dtype type, double operations,
                           double bytes_read) {
    static const size_t rows[] = {1, 2, 4, 8, 32, ROWS_MAX};
    static struct matrix *w[COPIES_MAX];
    struct buffer *x = random_buffer(ROWS_MAX * in), *y = random_buffer(ROWS_MAX * out);
    float *data = malloc(in * out * sizeof *data);
    struct error error = {.message = "no memory"};
    fill(check(data, &error), in * out);
    size_t copies = CYCLED_BYTES / (in * out * dtype_size(type)) + 1;
    if (copies > COPIES_MAX) copies = COPIES_MAX;
    for (size_t i = 0; i < copies; i++) {
        w[i] = check(device->kernels->matrix_create(device, data, DTYPE_F32, out, in, type, &error),
                     &error);
    }
    size_t bytes = device->kernels->matrix_bytes(w[0]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double seconds = product_seconds(w, copies, x, y, rows[i]);
        double done = 2 * (double)(rows[i] * in * out) / seconds, read = (double)bytes / seconds;
        printf("%4zu x %4zu  %-4s %5zu rows %9.1f us %8.1f GFLOP/s", in, out, dtype_name(type),
               rows[i], seconds * 1e6, done * 1e-9);
        if (operations > 0) printf(" (%3.0f %%)", 100 * done / operations);
        printf(" %6.1f GB/s (%3.0f %%)\n", read * 1e-9, 100 * read / bytes_read);
    }
    for (size_t i = 0; i < copies; i++) device->kernels->matrix_destroy(device, w[i]);
    device->kernels->buffer_destroy(device, x);
    device->kernels->buffer_destroy(device, y);
    free(data);
}

/* ---- Operations of a step -------------------------------------------------------------------- */

enum {
    WIDTH = 192,
    INNER = 512,
    HEADS = 3,
    HEAD_SIZE = 64,
    DIRECTIONS = 16,
    CONTEXT = 256,
    SUBLAYERS = 24
};

struct bench_step {
    struct step_rows rows;
    struct decisions decisions;
    struct gate gate;
    struct kv_layer kv;
    struct buffer *r, *s, *f, *q, *k, *out, *up, *table;
};

/* Every row is a sequence of its own near the end of its context. */
static void step_fill(struct bench_step *step) {
    int32_t position[ROWS_MAX], slot[ROWS_MAX], zero[ROWS_MAX] = {0},
                                                blocks[ROWS_MAX * CONTEXT / 16];
    for (int32_t i = 0; i < ROWS_MAX; i++) {
        position[i] = CONTEXT - 1 - i % 16;
        slot[i] = i;
    }
    for (int32_t i = 0; i < ROWS_MAX * CONTEXT / 16; i++) blocks[i] = i;
    step->rows = (struct step_rows){ROWS_MAX,
                                    buffer_of(sizeof zero, zero),
                                    buffer_of(sizeof position, position),
                                    buffer_of(sizeof zero, zero),
                                    buffer_of(sizeof slot, slot),
                                    buffer_of(sizeof blocks, blocks),
                                    CONTEXT / 16,
                                    ROWS_MAX,
                                    0};
}

static void step_create(struct bench_step *step) {
    step_fill(step);
    step->decisions = (struct decisions){
        buffer_of(SUBLAYERS * ROWS_MAX * sizeof(float), NULL),
        buffer_of(SUBLAYERS * ROWS_MAX, NULL),
        {buffer_of(ROWS_MAX * sizeof(int32_t), NULL), buffer_of(sizeof(int32_t), NULL), ROWS_MAX,
         false},
        ROWS_MAX,
        buffer_of(SUBLAYERS * sizeof(float), NULL),
        SUBLAYERS};
    step->gate = (struct gate){random_buffer(DIRECTIONS * WIDTH),
                               random_buffer(DIRECTIONS),
                               random_buffer(DIRECTIONS),
                               DIRECTIONS,
                               0.3f,
                               1.0f};
    step->kv = (struct kv_layer){NULL, 0, 1, 1, HEAD_SIZE, DTYPE_F32};
    size_t block = device->kernels->kv_block_bytes(&step->kv);
    step->kv.arena = random_buffer(ROWS_MAX * CONTEXT / 16 * block / sizeof(float));
    step->r = random_buffer(ROWS_MAX * WIDTH);
    step->s = random_buffer(ROWS_MAX);
    step->f = random_buffer(ROWS_MAX * WIDTH);
    step->q = random_buffer(ROWS_MAX * HEADS * HEAD_SIZE);
    step->k = random_buffer(ROWS_MAX * HEAD_SIZE);
    step->out = random_buffer(ROWS_MAX * HEADS * HEAD_SIZE);
    step->up = random_buffer(ROWS_MAX * INNER);
    step->table = random_buffer(CONTEXT * HEAD_SIZE);
}

static void run_begin(const struct bench_step *step) {
    device->kernels->nag_begin(device, &(struct nag_begin){&step->rows, step->f, DTYPE_F32, WIDTH,
                                                           0, step->r, step->s, &step->gate,
                                                           &step->decisions, NULL});
}

static void run_end(const struct bench_step *step) {
    device->kernels->nag_end_sublayer(
        device, &(struct nag_end_sublayer){&step->rows, 0, WIDTH, step->f, false, step->r, step->s,
                                           &step->gate, &step->gate, &step->decisions, NULL});
}

static void run_rope(const struct bench_step *step) {
    device->kernels->rope(device,
                          &(struct rope){&step->rows, NULL, step->q, HEADS, HEAD_SIZE,
                                         QK_NORM_AFTER_ROPE, 1.2f, step->table, NULL, 1e-6f});
}

static void run_append(const struct bench_step *step) {
    device->kernels->kv_append(device,
                               &(struct kv_append){&step->rows, &step->kv, step->k, step->k, NULL});
}

static void run_attention(const struct bench_step *step) {
    device->kernels->attention(
        device, &(struct attention){&step->rows, &step->kv, step->q, step->out, HEADS, NULL});
}

static void run_activate(const struct bench_step *step) {
    device->kernels->activate(device,
                              &(struct activate){step->up, step->up, step->up, step->rows.rows,
                                                 INNER, ACTIVATION_SILU_GATED, NULL});
}

static void bench_operations(void) {
    static const struct {
        const char *name;
        void (*run)(const struct bench_step *);
    } operations[] = {{"nag_begin", run_begin},         {"nag_end_sublayer", run_end},
                      {"rope (q)", run_rope},           {"kv_append", run_append},
                      {"attention 256", run_attention}, {"activate", run_activate}};
    static const size_t rows[] = {1, 8, 32, ROWS_MAX};
    struct bench_step step;
    step_create(&step);
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        printf("%-16s", operations[i].name);
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            double best = 1e9;
            step.rows.rows = rows[j];
            for (int repeat = 0; repeat < 50 * REPEATS; repeat++) {
                uint64_t start = time_now_ns();
                operations[i].run(&step);
                double us = (double)(time_now_ns() - start) * 1e-3;
                if (us < best) best = us;
            }
            printf("  %3zu: %6.1f us", rows[j], best);
        }
        printf("\n");
    }
}

int main(int count, char **arguments) {
    struct device_options options = {.name = "cpu", .max_rows = ROWS_MAX, .max_width = WIDTH_MAX};
    struct error error;
    if (count > 1) options.isa = arguments[1];
    if (count > 2) options.threads = strtoul(arguments[2], NULL, 10);
    if (device_open(&options, &device, &error)) check(NULL, &error);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!options.threads) options.threads = (size_t)sysconf(_SC_NPROCESSORS_ONLN);
    double read = peak_read(options.threads);
    printf("%s; reading %.1f GB/s\n", device->description, read * 1e-9);
    for (enum dtype type = DTYPE_F32; type <= DTYPE_INT8; type++) {
        double operations = peak_operations(device->isa, type) * (double)options.threads;
        printf("%s products, at most %.1f G operations/s\n", dtype_name(type), operations * 1e-9);
        bench_products(576, 1536, type, operations, read);
        bench_products(1536, 576, type, operations, read);
    }
    printf("operations, %d wide, %d directions, %d heads of %d\n", WIDTH, DIRECTIONS, HEADS,
           HEAD_SIZE);
    bench_operations();
    device->kernels->close(device);
    return 0;
}
