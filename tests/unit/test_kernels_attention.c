/* Rotary positions, the paged cache and attention, against double precision; and the promise that a
 * row sees its own sequence and nothing else: not its neighbours, not what a reused block held. */
#include "test_kernels.h"

enum {
    CONTEXT = 128,
    BLOCKS_PER_SLOT = CONTEXT / KV_BLOCK_TOKENS,
    SLOTS = 3,
    BLOCKS = SLOTS * BLOCKS_PER_SLOT
};

/* ---- Rotary positions ------------------------------------------------------------------------ */

#define EPSILON 1e-3f /* large enough to be seen */

static double unit_factor(const double *x, size_t size) {
    double squares = 0;
    for (size_t i = 0; i < size; i++) squares += x[i] * x[i];
    return 1 / sqrt(squares / (double)size + EPSILON);
}

static void rope_reference(const float *x, const float *table, size_t size, enum qk_norm norm,
                           const float *gain, double scale, double *out) {
    double *from = allocate(size * sizeof *from);
    for (size_t i = 0; i < size; i++) from[i] = x[i];
    double before = norm == QK_NORM_BEFORE_ROPE ? unit_factor(from, size) : 1;
    size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        double a = from[i] * before, b = from[half + i] * before;
        if (gain && norm == QK_NORM_BEFORE_ROPE) {
            a *= gain[i];
            b *= gain[half + i];
        }
        out[i] = a * table[i] - b * table[half + i];
        out[half + i] = b * table[i] + a * table[half + i];
    }
    double after = norm == QK_NORM_AFTER_ROPE ? unit_factor(out, size) : 1;
    for (size_t i = 0; i < size; i++) {
        out[i] *= after * scale * (gain && norm == QK_NORM_AFTER_ROPE ? gain[i] : 1);
    }
    free(from);
}

static void check_rope(struct bench *bench, size_t size, enum qk_norm norm, bool listed,
                       bool with_gain) {
    enum { ROWS = 5, HEADS = 3 };
    static const int32_t positions[ROWS] = {0, 7, 1, 15, 9}, list[] = {1, 3, 4};
    size_t rows = listed ? 3 : ROWS, width = HEADS * size;
    float *gain = random_floats(size, 2);
    float *x = random_floats(ROWS * width, 1), *table = allocate(16 * size * sizeof *table);
    float *got = allocate(ROWS * width * sizeof *got);
    double *expected = allocate(size * sizeof *expected);
    for (size_t i = 0; i < 16 * size; i++) {
        double angle = (double)(i / size) * (0.3 + (double)(i % (size / 2)));
        table[i] = (float)(i % size < size / 2 ? cos(angle) : sin(angle));
    }
    struct row_list rows_listed = bench_list(bench, list, 3);
    struct step_rows step = {.rows = ROWS,
                             .position = bench_buffer(bench, positions, sizeof positions)};
    struct rope rope = {&step,
                        listed ? &rows_listed : NULL,
                        bench_floats(bench, x, ROWS * width),
                        HEADS,
                        size,
                        norm,
                        1.2f,
                        bench_floats(bench, table, 16 * size),
                        with_gain ? bench_floats(bench, gain, size) : NULL,
                        EPSILON};
    bench->kernels->rope(bench->device, &rope);
    bench_read(bench, rope.x, got, ROWS * width * sizeof *got);
    for (size_t i = 0; i < rows * HEADS; i++) {
        size_t row = listed ? (size_t)list[i / HEADS] : i / HEADS;
        rope_reference(x + i * size, table + (size_t)positions[row] * size, size, norm,
                       with_gain ? gain : NULL, 1.2f, expected);
        for (size_t j = 0; j < size; j++)
            assert_close(got[i * size + j], expected[j], 2e-6, "rope");
    }
    assert_memory_equal(got + rows * width, x + rows * width, (ROWS - rows) * width * sizeof *got);
    free(gain);
    free(x);
    free(table);
    free(got);
    free(expected);
}

static void test_rope(void **state) {
    static const size_t sizes[] = {2, 40, 64, 70};
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            struct bench bench;
            if (!bench_open(&bench, isa_names[isa], 2)) continue;
            for (int norm = QK_NORM_NONE; norm <= QK_NORM_AFTER_ROPE; norm++) {
                check_rope(&bench, sizes[i], (enum qk_norm)norm, false, false);
                check_rope(&bench, sizes[i], (enum qk_norm)norm, true, false);
                if (norm != QK_NORM_NONE) {
                    check_rope(&bench, sizes[i], (enum qk_norm)norm, false, true);
                }
            }
            bench_close(&bench);
        }
    }
}

/* ---- A cache of three sequences -------------------------------------------------------------- */

struct shape {
    size_t heads, kv_heads, head_size;
    enum dtype type;
    bool listed; /* steps have rows besides, which are not on the list */
};

/* Sequence s at position p has row s * CONTEXT + p of q, k and v. */
struct story {
    struct shape shape;
    float *q, *k, *v;
};

static void story_create(struct story *story, struct shape shape) {
    story->shape = shape;
    story->q = random_floats(SLOTS * CONTEXT * shape.heads * shape.head_size, 2);
    story->k = random_floats(SLOTS * CONTEXT * shape.kv_heads * shape.head_size, 3);
    story->v = random_floats(SLOTS * CONTEXT * shape.kv_heads * shape.head_size, 4);
    for (size_t i = 0; i < SLOTS * CONTEXT * shape.heads * shape.head_size; i++) story->q[i] *= 3;
}

static void story_destroy(struct story *story) {
    free(story->q);
    free(story->k);
    free(story->v);
}

struct cache {
    struct bench bench;
    struct kv_layer kv;
    struct step_rows step;
    struct buffer *q, *k, *v, *out;
    struct row_list list;
    size_t max_rows;
};

/* The arena is full of what another owner left: NaN in every number. */
static bool cache_open(struct cache *cache, const struct shape *shape, const char *isa,
                       size_t threads, size_t max_rows) {
    struct bench *bench = &cache->bench;
    int32_t table[BLOCKS];
    if (!bench_open(bench, isa, threads)) return false;
    for (int32_t i = 0; i < BLOCKS; i++)
        table[i] = (i * 7 + 3) % BLOCKS; /* 7 and 24 share no factor */
    cache->kv = (struct kv_layer){NULL, 1, 2, shape->kv_heads, shape->head_size, shape->type};
    size_t block = bench->kernels->kv_block_bytes(&cache->kv);
    size_t kv_bytes =
        2 * 2 * KV_BLOCK_TOKENS * shape->kv_heads * shape->head_size * dtype_size(shape->type);
    assert_in_range(block, kv_bytes, kv_bytes + 63);
    unsigned char *dirty = allocate(BLOCKS * block);
    memset(dirty, 0xff, BLOCKS * block);
    cache->kv.arena = bench_buffer(bench, dirty, BLOCKS * block);
    free(dirty);
    size_t ints = max_rows * sizeof(int32_t), q_floats = max_rows * shape->heads * shape->head_size;
    size_t k_floats = max_rows * shape->kv_heads * shape->head_size;
    cache->step = (struct step_rows){0,
                                     NULL,
                                     bench_buffer(bench, NULL, ints),
                                     NULL,
                                     bench_buffer(bench, NULL, ints),
                                     bench_buffer(bench, table, sizeof table),
                                     BLOCKS_PER_SLOT,
                                     SLOTS,
                                     0};
    cache->q = bench_floats(bench, NULL, q_floats);
    cache->k = bench_floats(bench, NULL, k_floats);
    cache->v = bench_floats(bench, NULL, k_floats);
    cache->out = bench_floats(bench, NULL, q_floats);
    cache->list = (struct row_list){bench_buffer(bench, NULL, ints),
                                    bench_buffer(bench, NULL, sizeof(int32_t)), 0, true};
    cache->max_rows = max_rows;
    return true;
}

static void put_row(const struct cache *cache, struct buffer *to, size_t at, const float *from,
                    size_t index, size_t floats) {
    cache->bench.kernels->write(cache->bench.device, to, at * floats * sizeof *from,
                                from + index * floats, floats * sizeof *from);
}

/* One step over rows[i] = sequence * CONTEXT + position; answers go to out[rows[i]]. Where rows are
 * listed, each comes behind one that is not, and has no q, k and v: none of it may show. */
static void cache_step(struct cache *cache, const struct story *story, const int32_t *rows,
                       size_t count, float *out) {
    const struct shape *shape = &story->shape;
    const struct kernels *kernels = cache->bench.kernels;
    struct device *device = cache->bench.device;
    size_t q_floats = shape->heads * shape->head_size,
           k_floats = shape->kv_heads * shape->head_size;
    int32_t listed = (int32_t)count;
    size_t stride = shape->listed ? 2 : 1;
    for (size_t i = 0; i < count; i++) {
        int32_t position = rows[i] % CONTEXT, slot = rows[i] / CONTEXT;
        int32_t index = (int32_t)(stride * i + stride - 1);
        size_t row = (size_t)rows[i];
        for (size_t at = stride * i; at <= (size_t)index; at++) {
            kernels->write(device, cache->step.position, at * sizeof index, &position,
                           sizeof position);
            kernels->write(device, cache->step.slot, at * sizeof index, &slot, sizeof slot);
        }
        kernels->write(device, cache->list.indices, i * sizeof index, &index, sizeof index);
        put_row(cache, cache->q, i, story->q, row, q_floats);
        put_row(cache, cache->k, i, story->k, row, k_floats);
        put_row(cache, cache->v, i, story->v, row, k_floats);
    }
    cache->step.rows = stride * count;
    kernels->write(device, cache->list.count, 0, &listed, sizeof listed);
    cache->list.most = count;
    const struct row_list *list = shape->listed ? &cache->list : NULL;
    kernels->kv_append(device,
                       &(struct kv_append){&cache->step, &cache->kv, cache->k, cache->v, list});
    kernels->attention(device, &(struct attention){&cache->step, &cache->kv, cache->q, cache->out,
                                                   shape->heads, list});
    for (size_t i = 0; i < count; i++) {
        kernels->read(device, cache->out, i * q_floats * sizeof *out,
                      out + (size_t)rows[i] * q_floats, q_floats * sizeof *out);
    }
}

/* All three sequences, `chunk` positions of each per step, to position `length`. */
static bool run_story(const struct story *story, const char *isa, size_t threads, size_t chunk,
                      size_t length, float *out) {
    struct cache cache;
    int32_t rows[SLOTS * CONTEXT];
    if (!cache_open(&cache, &story->shape, isa, threads, 2 * SLOTS * chunk)) return false;
    for (size_t first = 0; first < length; first += chunk) {
        size_t count = 0;
        for (size_t s = 0; s < SLOTS; s++) {
            for (size_t p = first; p < first + chunk && p < length; p++) {
                rows[count++] = (int32_t)(s * CONTEXT + p);
            }
        }
        cache_step(&cache, story, rows, count, out);
    }
    bench_close(&cache.bench);
    return true;
}

/* ---- Against the formula --------------------------------------------------------------------- */

static double cached(const struct story *story, const float *x, size_t row, size_t head, size_t i) {
    const struct shape *shape = &story->shape;
    float value = x[(row * shape->kv_heads + head) * shape->head_size + i];
    return shape->type == DTYPE_BF16 ? rounded_to_bf16(value) : value;
}

/* Softmax over the visible positions, in two passes, in double. */
static void attention_reference(const struct story *story, size_t row, size_t head, double *out) {
    const struct shape *shape = &story->shape;
    size_t size = shape->head_size, start = row / CONTEXT * CONTEXT;
    size_t kv_head = head / (shape->heads / shape->kv_heads);
    const float *q = story->q + (row * shape->heads + head) * size;
    double score[CONTEXT], top = -INFINITY, total = 0;
    for (size_t p = start; p <= row; p++) {
        double sum = 0;
        for (size_t i = 0; i < size; i++) sum += q[i] * cached(story, story->k, p, kv_head, i);
        score[p - start] = sum / sqrt((double)size);
        top = fmax(top, score[p - start]);
    }
    for (size_t i = 0; i < size; i++) out[i] = 0;
    for (size_t p = start; p <= row; p++) {
        double weight = exp(score[p - start] - top);
        total += weight;
        for (size_t i = 0; i < size; i++) out[i] += weight * cached(story, story->v, p, kv_head, i);
    }
    for (size_t i = 0; i < size; i++) out[i] /= total;
}

/* With a bf16 cache a tensor core takes queries and weights in bf16 too. */
static void check_story(const struct story *story, const float *out, size_t length) {
    const struct shape *shape = &story->shape;
    double tolerance = shape->type == DTYPE_BF16 && !is_cpu_tested() ? 1e-2 : 3e-6;
    double *expected = allocate(shape->head_size * sizeof *expected);
    for (size_t row = 0; row < SLOTS * CONTEXT; row++) {
        if (row % CONTEXT >= length) continue;
        for (size_t h = 0; h < shape->heads; h++) {
            const float *got = out + (row * shape->heads + h) * shape->head_size;
            attention_reference(story, row, h, expected);
            for (size_t i = 0; i < shape->head_size; i++) {
                assert_close(got[i], expected[i], tolerance, "attention");
            }
        }
    }
    free(expected);
}

static const struct shape shapes[] = {
    {3, 1, 64, DTYPE_F32, false}, {4, 2, 40, DTYPE_BF16, false}, {2, 2, 70, DTYPE_F32, true},
    {20, 2, 6, DTYPE_F32, false}, /* a group larger than the inner loop takes */
    {3, 1, 64, DTYPE_BF16, true}, {6, 1, 80, DTYPE_BF16, false}, {6, 1, 80, DTYPE_F32, true},
};
#define SHAPES (sizeof shapes / sizeof *shapes)

static float *answers_create(const struct shape *shape) {
    return allocate(SLOTS * CONTEXT * shape->heads * shape->head_size * sizeof(float));
}

static void test_attention(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        struct story story;
        story_create(&story, shapes[i]);
        float *out = answers_create(&shapes[i]);
        for (size_t isa = 0; isa < ISA_COUNT; isa++) {
            if (run_story(&story, isa_names[isa], 2, 19, 70, out)) check_story(&story, out, 70);
        }
        free(out);
        story_destroy(&story);
    }
}

/* Prefill at once, in chunks and token by token, on one to three threads: the same bits. */
static void test_attention_same_bits(void **state) {
    static const size_t chunks[] = {50, 16, 7, 1};
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        struct story story;
        story_create(&story, shapes[i]);
        size_t bytes = SLOTS * CONTEXT * shapes[i].heads * shapes[i].head_size * sizeof(float);
        float *first = answers_create(&shapes[i]), *other = answers_create(&shapes[i]);
        for (size_t isa = 0; isa < ISA_COUNT; isa++) {
            if (!run_story(&story, isa_names[isa], 1, 50, 50, first)) continue;
            for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
                memset(other, 0, bytes);
                run_story(&story, isa_names[isa], 1 + c % 3, chunks[c], 50, other);
                assert_memory_equal(other, first, bytes);
            }
        }
        free(first);
        free(other);
        story_destroy(&story);
    }
}

/* Scores far apart neither overflow nor lose the largest. */
static void test_extreme_scores(void **state) {
    struct shape shape = {1, 1, 16, DTYPE_F32, false};
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct story story;
        story_create(&story, shape);
        float *out = answers_create(&shape);
        for (size_t i = 0; i < SLOTS * CONTEXT * 16; i++) story.q[i] *= 300;
        if (run_story(&story, isa_names[isa], 1, 40, 40, out)) {
            for (size_t i = 0; i < 40 * 16; i++) assert_true(fabsf(out[i]) <= 1.0001f);
            double expected[16];
            attention_reference(&story, 39, 0, expected);
            for (size_t i = 0; i < 16; i++)
                assert_close(out[39 * 16 + i], expected[i], 1e-3, "attention");
        }
        free(out);
        story_destroy(&story);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_same_bits),
        cmocka_unit_test(test_extreme_scores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
