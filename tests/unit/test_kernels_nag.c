/* The residual against its formulas in double precision, and the properties that models/nag.md asks
 * for.
 * */
#include "test_kernels.h"

enum { ROWS = 33, VOCAB = 9, SUBLAYERS = 3, TIERS = 3, SLOTS = 4 };

/* Rows of a slot are neighbours; some slots have rows of earlier steps in a layer's cache. */
static int32_t slot_of(size_t row) {
    return (int32_t)(row < 2 ? 0 : row < 14 ? 1 : row < 32 ? 2 : 3);
}
static int32_t taken_of(size_t layer, int32_t slot) {
    return slot % 2 * (int32_t)(17 * layer + 5);
}

/* Three sub-layers on the host. Row i holds token i % VOCAB and has tier i % TIERS; its f in
 * sub-layer l is row i of f[l]. */
struct model {
    size_t width, directions;
    float *table, *f[SUBLAYERS];
    float *w[SUBLAYERS], *bias[SUBLAYERS], *weight[SUBLAYERS];
    float alpha[SUBLAYERS], beta[SUBLAYERS], theta[TIERS * SUBLAYERS], log_gain;
};

static void model_create(struct model *model, size_t width, size_t directions) {
    *model = (struct model){.width = width, .directions = directions, .log_gain = 2.3f};
    model->table = random_floats(VOCAB * width, 20);
    for (uint32_t l = 0; l < SUBLAYERS; l++) {
        double total = 0;
        model->f[l] = random_floats(ROWS * width, 21 + l);
        model->w[l] = random_floats(directions * width, 31 + l);
        model->bias[l] = random_floats(directions, 41 + l);
        model->weight[l] = random_floats(directions, 51 + l);
        for (size_t c = 0; c < directions; c++) total += fabsf(model->weight[l][c]);
        for (size_t c = 0; c < directions; c++) {
            model->weight[l][c] = (float)(fabsf(model->weight[l][c]) / total);
        }
        model->alpha[l] = l == 1 ? -0.4f : 0.3f;
        model->beta[l] = 0.7f + (float)l / 2;
        model->theta[0 * SUBLAYERS + l] = 0;    /* runs */
        model->theta[1 * SUBLAYERS + l] = 0.5f; /* depends */
        model->theta[2 * SUBLAYERS + l] = 1.5f; /* never runs */
    }
}

static void model_destroy(struct model *model) {
    free(model->table);
    for (size_t l = 0; l < SUBLAYERS; l++) {
        free(model->f[l]);
        free(model->w[l]);
        free(model->bias[l]);
        free(model->weight[l]);
    }
}

/* What a device made of rows first..first+count-1: after the begin (moment 0) and each
 * sub-layer. */
struct trace {
    float *r[SUBLAYERS + 1], s[SUBLAYERS + 1][ROWS];
    float mix[SUBLAYERS][ROWS];
    uint8_t run[SUBLAYERS][ROWS];
    int32_t running[SUBLAYERS][ROWS], running_count[SUBLAYERS], place[SUBLAYERS][ROWS];
};

static void trace_create(struct trace *trace, const struct model *model) {
    memset(trace, 0, sizeof *trace);
    for (size_t i = 0; i <= SUBLAYERS; i++) {
        trace->r[i] = allocate(ROWS * model->width * sizeof(float));
    }
}

static void trace_destroy(struct trace *trace) {
    for (size_t i = 0; i <= SUBLAYERS; i++) free(trace->r[i]);
}

struct lane {
    struct bench bench;
    struct step_rows step;
    struct gate gates[SUBLAYERS];
    struct decisions decisions;
    struct buffer *table, *r, *s, *f, *taken, *place;
    size_t first;
};

static bool lane_open(struct lane *lane, const struct model *model, const char *isa, size_t threads,
                      size_t first, size_t count) {
    struct bench *bench = &lane->bench;
    int32_t token[ROWS], tier[ROWS], slot[ROWS], taken[SUBLAYERS * SLOTS];
    if (!bench_open(bench, isa, threads)) return false;
    for (size_t i = 0; i < count; i++) {
        token[i] = (int32_t)((first + i) % VOCAB);
        tier[i] = (int32_t)((first + i) % TIERS);
        slot[i] = slot_of(first + i);
    }
    for (size_t i = 0; i < SUBLAYERS * SLOTS; i++) {
        taken[i] = taken_of(i / SLOTS, (int32_t)(i % SLOTS));
    }
    lane->first = first;
    lane->step = (struct step_rows){.rows = count,
                                    .token = bench_buffer(bench, token, sizeof token),
                                    .tier = bench_buffer(bench, tier, sizeof tier),
                                    .slot = bench_buffer(bench, slot, sizeof slot),
                                    .slots = SLOTS};
    lane->taken = bench_buffer(bench, taken, sizeof taken);
    lane->place = bench_buffer(bench, NULL, sizeof slot);
    for (size_t l = 0; l < SUBLAYERS; l++) {
        lane->gates[l] =
            (struct gate){bench_floats(bench, model->w[l], model->directions * model->width),
                          bench_floats(bench, model->bias[l], model->directions),
                          bench_floats(bench, model->weight[l], model->directions),
                          model->directions,
                          model->alpha[l],
                          model->beta[l]};
    }
    lane->decisions = (struct decisions){bench_floats(bench, NULL, SUBLAYERS * ROWS),
                                         bench_buffer(bench, NULL, SUBLAYERS * ROWS),
                                         bench_list(bench, (int32_t[ROWS]){0}, ROWS),
                                         ROWS,
                                         bench_floats(bench, model->theta, TIERS * SUBLAYERS),
                                         SUBLAYERS};
    lane->table = bench_floats(bench, model->table, VOCAB * model->width);
    lane->r = bench_floats(bench, NULL, ROWS * model->width);
    lane->s = bench_floats(bench, NULL, ROWS);
    lane->f = bench_floats(bench, NULL, ROWS * model->width);
    return true;
}

/* Copies r and s of this moment, and the decision of sub-layer `moment` where there is one. */
static void lane_record(const struct lane *lane, size_t moment, struct trace *trace, size_t width) {
    const struct bench *bench = &lane->bench;
    const struct decisions *decisions = &lane->decisions;
    size_t count = lane->step.rows;
    bench_read(bench, lane->r, trace->r[moment], count * width * sizeof(float));
    bench_read(bench, lane->s, trace->s[moment], count * sizeof(float));
    if (moment == SUBLAYERS) return;
    bench->kernels->read(bench->device, decisions->mix, moment * ROWS * sizeof(float),
                         trace->mix[moment], count * sizeof(float));
    bench->kernels->read(bench->device, decisions->run, moment * ROWS, trace->run[moment], count);
    bench_read(bench, decisions->running.count, &trace->running_count[moment], sizeof(int32_t));
    bench_read(bench, decisions->running.indices, trace->running[moment],
               (size_t)trace->running_count[moment] * sizeof(int32_t));
    bench_read(bench, lane->place, trace->place[moment], count * sizeof(int32_t));
}

/* Puts f of sub-layer l where the body leaves it. Dense: what rows that skip hold is garbage. */
static void lane_write_f(const struct lane *lane, const struct model *model, size_t l, bool packed,
                         const struct trace *trace) {
    size_t row_floats = model->width, at = 0;
    float *f = allocate(ROWS * row_floats * sizeof *f);
    for (size_t i = 0; i < ROWS * row_floats; i++) f[i] = NAN;
    for (size_t i = 0; i < lane->step.rows; i++) {
        if (!trace->run[l][i]) continue;
        size_t to = packed ? at++ : i;
        memcpy(f + to * row_floats, model->f[l] + (lane->first + i) * row_floats,
               row_floats * sizeof *f);
    }
    lane->bench.kernels->write(lane->bench.device, lane->f, 0, f, ROWS * row_floats * sizeof *f);
    free(f);
}

static void lane_run(struct lane *lane, const struct model *model, bool packed,
                     struct trace *trace) {
    const struct kernels *kernels = lane->bench.kernels;
    struct device *device = lane->bench.device;
    struct kv_place place = {lane->taken, 0, lane->place};
    kernels->nag_begin(device, &(struct nag_begin){&lane->step, lane->table, DTYPE_F32,
                                                   model->width, model->log_gain, lane->r, lane->s,
                                                   &lane->gates[0], &lane->decisions, &place});
    lane_record(lane, 0, trace, model->width);
    for (size_t l = 0; l < SUBLAYERS; l++) {
        lane_write_f(lane, model, l, packed, trace);
        place.layer = l + 1;
        kernels->nag_end_sublayer(
            device, &(struct nag_end_sublayer){&lane->step, l, model->width, lane->f, packed,
                                               lane->r, lane->s, &lane->gates[l],
                                               l + 1 < SUBLAYERS ? &lane->gates[l + 1] : NULL,
                                               &lane->decisions, &place});
        lane_record(lane, l + 1, trace, model->width);
    }
}

static bool run_model(const struct model *model, const char *isa, size_t threads, size_t first,
                      size_t count, bool packed, struct trace *trace) {
    struct lane lane;
    if (!lane_open(&lane, model, isa, threads, first, count)) return false;
    lane_run(&lane, model, packed, trace);
    bench_close(&lane.bench);
    return true;
}

/* ---- Against the formulas -------------------------------------------------------------------- */

static double mix_reference(const struct model *model, size_t l, const float *r) {
    double mix = 0;
    for (size_t c = 0; c < model->directions; c++) {
        double score = model->bias[l][c];
        for (size_t i = 0; i < model->width; i++)
            score += (double)model->w[l][c * model->width + i] * r[i];
        mix += model->weight[l][c] / (1 + exp(-score));
    }
    return mix;
}

static double dot(const double *x, const double *y, size_t width) {
    double sum = 0;
    for (size_t i = 0; i < width; i++) sum += x[i] * y[i];
    return sum;
}

/* One step from r by f, formulas (10)..(16) in their order. */
static void step_reference(const float *r, const float *f, size_t width, double g, double *next) {
    double *old = allocate(width * sizeof *old), *perp = allocate(width * sizeof *perp), mean = 0;
    for (size_t i = 0; i < width; i++) mean += f[i] / (double)width;
    for (size_t i = 0; i < width; i++) {
        old[i] = r[i];
        perp[i] = f[i] - mean;
    }
    double along = dot(perp, old, width) / dot(old, old, width);
    for (size_t i = 0; i < width; i++) perp[i] -= along * old[i];
    double size = sqrt((double)width) / fmax(sqrt(dot(perp, perp, width)), 1e-6);
    for (size_t i = 0; i < width; i++) next[i] = old[i] + g * size * perp[i];
    double rms = sqrt(dot(next, next, width) / (double)width);
    for (size_t i = 0; i < width; i++) next[i] /= rms;
    free(old);
    free(perp);
}

static void check_begin(const struct model *model, const struct trace *trace) {
    for (size_t row = 0; row < ROWS; row++) {
        const float *e = model->table + row % VOCAB * model->width;
        double squares = 0;
        for (size_t i = 0; i < model->width; i++) squares += (double)e[i] * e[i];
        double rho = sqrt(squares / (double)model->width);
        assert_close(trace->s[0][row], log(rho) + model->log_gain, 1e-6, "s_0");
        for (size_t i = 0; i < model->width; i++) {
            assert_close(trace->r[0][row * model->width + i], e[i] / rho, 1e-6, "r_0");
        }
    }
}

/* The decision must follow from the mix that was stored, and the list from the decisions. */
static void check_decisions(const struct model *model, const struct trace *trace, size_t l) {
    int32_t count = 0;
    for (size_t row = 0; row < ROWS; row++) {
        double expected = mix_reference(model, l, trace->r[l] + row * model->width);
        assert_close(trace->mix[l][row], expected, 4e-6, "mix");
        bool runs = !(trace->mix[l][row] < model->theta[row % TIERS * SUBLAYERS + l]);
        assert_int_equal(trace->run[l][row], runs);
        if (runs) assert_int_equal(trace->running[l][count++], row);
    }
    assert_int_equal(trace->running_count[l], count);
}

/* Running rows take the next places of their slot; the others name one that is there already. */
static void check_places(const struct trace *trace, size_t l) {
    int32_t slot = -1, next = 0;
    for (size_t row = 0; row < ROWS; row++) {
        if (slot_of(row) != slot) {
            slot = slot_of(row);
            next = taken_of(l, slot);
        }
        int32_t other = next > 0 ? next - 1 : 0;
        assert_int_equal(trace->place[l][row], trace->run[l][row] ? next : other);
        next += trace->run[l][row];
    }
}

/* Rows that ran made the step; the others did not move by a bit. */
static void check_step(const struct model *model, const struct trace *trace, size_t l) {
    size_t width = model->width;
    double *next = allocate(width * sizeof *next);
    for (size_t row = 0; row < ROWS; row++) {
        const float *before = trace->r[l] + row * width, *after = trace->r[l + 1] + row * width;
        if (!trace->run[l][row]) {
            assert_memory_equal(after, before, width * sizeof *after);
            assert_memory_equal(&trace->s[l + 1][row], &trace->s[l][row], sizeof(float));
            continue;
        }
        double g = model->alpha[l] * pow(trace->mix[l][row], model->beta[l]);
        step_reference(before, model->f[l] + row * width, width, g, next);
        for (size_t i = 0; i < width; i++) assert_close(after[i], next[i], 2e-6, "r'");
        assert_close(trace->s[l + 1][row], trace->s[l][row] + 0.5 * log1p(g * g), 6e-7, "s'");
    }
    free(next);
}

static void test_formulas(void **state) {
    static const size_t sizes[][2] = {{40, 1}, {192, 16}, {70, 5}, {33, 37}, {16, 1024}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct model model;
        model_create(&model, sizes[i][0], sizes[i][1]);
        for (size_t isa = 0; isa < ISA_COUNT; isa++) {
            struct trace trace;
            trace_create(&trace, &model);
            if (run_model(&model, isa_names[isa], 2, 0, ROWS, isa % 2, &trace)) {
                check_begin(&model, &trace);
                for (size_t l = 0; l < SUBLAYERS; l++) {
                    check_decisions(&model, &trace, l);
                    check_places(&trace, l);
                    check_step(&model, &trace, l);
                }
            }
            trace_destroy(&trace);
        }
        model_destroy(&model);
    }
}

/* <u, r> = 0, ||u||^2 = d, norm gain sqrt(1 + g^2), and the additive form R' = R + rho g u. u is
 * taken back out of the device's r', so an error in any part of the step shows. */
static void test_step_is_orthogonal(void **state) {
    struct model model;
    struct trace trace;
    (void)state;
    model_create(&model, 192, 16);
    trace_create(&trace, &model);
    assert_true(run_model(&model, NULL, 2, 0, ROWS, false, &trace));
    for (size_t l = 0; l < SUBLAYERS; l++) {
        for (size_t row = 0; row < ROWS; row++) {
            if (!trace.run[l][row]) continue;
            double g = model.alpha[l] * pow(trace.mix[l][row], model.beta[l]), along = 0, size = 0,
                   next = 0;
            double gain = exp((double)trace.s[l + 1][row] - trace.s[l][row]);
            assert_close(gain, sqrt(1 + g * g), 1e-6, "norm gain");
            for (size_t i = 0; i < 192; i++) {
                double r = trace.r[l][row * 192 + i], after = trace.r[l + 1][row * 192 + i];
                double u = (after * gain - r) / g;
                along += u * r / 192;
                size += u * u / 192;
                next += after * after / 192;
            }
            assert_close(along, 0, 1e-5, "<u, r>");
            assert_close(size, 1, 1e-5, "||u||^2 / d");
            assert_close(next, 1, 1e-6, "RMS of r'");
        }
    }
    trace_destroy(&trace);
    model_destroy(&model);
}

static void assert_same_rows(const struct model *model, const struct trace *part, size_t first,
                             size_t count, const struct trace *all) {
    for (size_t m = 0; m <= SUBLAYERS; m++) {
        assert_memory_equal(part->r[m], all->r[m] + first * model->width,
                            count * model->width * sizeof(float));
        assert_memory_equal(part->s[m], all->s[m] + first, count * sizeof(float));
        if (m == SUBLAYERS) break;
        assert_memory_equal(part->mix[m], all->mix[m] + first, count * sizeof(float));
        assert_memory_equal(part->run[m], all->run[m] + first, count);
    }
}

/* Packed or not, any rows beside it, any number of threads: the same bits. */
static void test_same_bits(void **state) {
    struct model model;
    struct trace all, part;
    (void)state;
    model_create(&model, 70, 37);
    trace_create(&all, &model);
    trace_create(&part, &model);
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        if (!run_model(&model, isa_names[isa], 1, 0, ROWS, false, &all)) continue;
        for (size_t threads = 1; threads <= 3; threads++) {
            run_model(&model, isa_names[isa], threads, 0, ROWS, true, &part);
            assert_same_rows(&model, &part, 0, ROWS, &all);
        }
        for (size_t first = 0; first < ROWS; first += 5) {
            size_t count = first % 2 ? 1 : ROWS - first;
            run_model(&model, isa_names[isa], 2, first, count, first % 3 == 0, &part);
            assert_same_rows(&model, &part, first, count, &all);
        }
    }
    trace_destroy(&all);
    trace_destroy(&part);
    model_destroy(&model);
}

/* ---- Properties ------------------------------------------------------------------------------ */

/* Multiplying the embedding moves s by the logarithm and nothing else. By four: not one bit of
 * r. */
static void test_scale_invariance(void **state) {
    struct model model;
    struct trace plain, scaled;
    (void)state;
    model_create(&model, 192, 16);
    trace_create(&plain, &model);
    trace_create(&scaled, &model);
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        if (!run_model(&model, isa_names[isa], 1, 0, ROWS, true, &plain)) continue;
        for (size_t i = 0; i < VOCAB * model.width; i++) model.table[i] *= 4;
        run_model(&model, isa_names[isa], 1, 0, ROWS, true, &scaled);
        for (size_t i = 0; i < VOCAB * model.width; i++) model.table[i] /= 4;
        for (size_t m = 0; m <= SUBLAYERS; m++) {
            assert_memory_equal(scaled.r[m], plain.r[m], ROWS * model.width * sizeof(float));
            for (size_t row = 0; row < ROWS; row++) {
                assert_close(scaled.s[m][row], plain.s[m][row] + log(4), 1e-6, "s");
            }
        }
        assert_memory_equal(scaled.run, plain.run, sizeof plain.run);
    }
    trace_destroy(&plain);
    trace_destroy(&scaled);
    model_destroy(&model);
}

/* theta = 0 runs everything; theta above 1 leaves r_0 and s_0. */
static void test_thresholds(void **state) {
    struct model model;
    struct trace trace;
    (void)state;
    model_create(&model, 40, 5);
    trace_create(&trace, &model);
    assert_true(run_model(&model, NULL, 2, 0, ROWS, true, &trace));
    size_t depends = 0;
    for (size_t l = 0; l < SUBLAYERS; l++) {
        for (size_t row = 0; row < ROWS; row++) {
            if (row % TIERS == 0) assert_int_equal(trace.run[l][row], 1);
            if (row % TIERS == 2) assert_int_equal(trace.run[l][row], 0);
            if (row % TIERS == 1) depends += trace.run[l][row];
        }
    }
    assert_in_range(depends, 1, ROWS - 1); /* the middle tier tests both ways */
    for (size_t row = 2; row < ROWS; row += TIERS) {
        assert_memory_equal(trace.r[SUBLAYERS] + row * 40, trace.r[0] + row * 40,
                            40 * sizeof(float));
        assert_true(trace.s[SUBLAYERS][row] == trace.s[0][row]);
    }
    trace_destroy(&trace);
    model_destroy(&model);
}

/* A mix that is no number is never a skip. */
static void test_nan_mix_runs(void **state) {
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct model model;
        struct trace trace;
        model_create(&model, 40, 5);
        trace_create(&trace, &model);
        model.bias[0][3] = NAN;
        if (run_model(&model, isa_names[isa], 1, 0, ROWS, false, &trace)) {
            assert_int_equal(trace.running_count[0], ROWS);
            for (size_t row = 0; row < ROWS; row++) assert_true(isnan(trace.mix[0][row]));
        }
        trace_destroy(&trace);
        model_destroy(&model);
    }
}

/* Directions without a step: an embedding of zeros, a branch that is constant (centred to nothing),
 * one that is parallel to r, and alpha = 0. Finite everywhere, and RMS 1 wherever there is a
 * direction. */
static void test_degenerate_steps(void **state) {
    enum { WIDTH = 70 };
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct model model;
        struct trace trace;
        model_create(&model, WIDTH, 5);
        trace_create(&trace, &model);
        memset(model.table, 0, WIDTH * sizeof(float)); /* token 0: rows 0, 9, 18, 27 */
        for (size_t i = 0; i < VOCAB * WIDTH; i += 2)
            model.table[i + 1] = -model.table[i]; /* centred */
        model.alpha[2] = 0;
        for (size_t l = 0; l < 2; l++) {
            for (size_t i = 0; i < ROWS * WIDTH; i++) {
                float parallel = 3 * model.table[i / WIDTH % VOCAB * WIDTH + i % WIDTH];
                model.f[l][i] = l == 0 ? 5 : parallel;
            }
        }
        if (run_model(&model, isa_names[isa], 1, 0, ROWS, false, &trace)) {
            assert_close(trace.s[0][0], model.log_gain, 0, "s_0 of zeros");
            for (size_t m = 0; m <= SUBLAYERS; m++) {
                for (size_t row = 0; row < ROWS; row++) {
                    double squares = 0;
                    for (size_t i = 0; i < WIDTH; i++) {
                        squares += pow(trace.r[m][row * WIDTH + i], 2) / WIDTH;
                    }
                    assert_true(isfinite(trace.s[m][row]));
                    assert_close(squares, row % VOCAB == 0 ? 0 : 1, 1e-5, "mean square of r");
                }
            }
        }
        trace_destroy(&trace);
        model_destroy(&model);
    }
}

/* Embedding tables of half the width hold the same numbers. */
static void test_table_types(void **state) {
    enum { WIDTH = 40 };
    struct model model;
    struct trace trace;
    uint16_t bf16[VOCAB * WIDTH], f16[VOCAB * WIDTH];
    (void)state;
    model_create(&model, WIDTH, 5);
    trace_create(&trace, &model);
    for (size_t i = 0; i < VOCAB * WIDTH; i++) { /* +- 1.0 .. 1.75, exact in every type */
        uint16_t sign = i % 3 ? 0 : 0x8000, quarter = (uint16_t)(i % 4);
        model.table[i] = (sign ? -1 : 1) * (1 + (float)quarter / 4);
        bf16[i] = (uint16_t)(sign | 0x3f80 | quarter << 5);
        f16[i] = (uint16_t)(sign | 0x3c00 | quarter << 8);
    }
    assert_true(run_model(&model, "portable", 1, 0, ROWS, false, &trace));
    for (int type = DTYPE_BF16; type <= DTYPE_F16; type++) {
        struct lane lane;
        float r[ROWS * WIDTH];
        assert_true(lane_open(&lane, &model, "portable", 1, 0, ROWS));
        struct buffer *table =
            bench_buffer(&lane.bench, type == DTYPE_BF16 ? bf16 : f16, sizeof bf16);
        lane.bench.kernels->nag_begin(lane.bench.device,
                                      &(struct nag_begin){&lane.step, table, (enum dtype)type,
                                                          WIDTH, 0, lane.r, lane.s, &lane.gates[0],
                                                          &lane.decisions, NULL});
        bench_read(&lane.bench, lane.r, r, sizeof r);
        assert_memory_equal(r, trace.r[0], sizeof r);
        bench_close(&lane.bench);
    }
    trace_destroy(&trace);
    model_destroy(&model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formulas),         cmocka_unit_test(test_step_is_orthogonal),
        cmocka_unit_test(test_same_bits),        cmocka_unit_test(test_scale_invariance),
        cmocka_unit_test(test_thresholds),       cmocka_unit_test(test_nan_mix_runs),
        cmocka_unit_test(test_degenerate_steps), cmocka_unit_test(test_table_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
