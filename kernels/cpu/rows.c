/* Operations on the elements of rows: activation, logits, norm. */
#include "kernels/cpu/cpu.h"

#include <math.h>

struct activate_loop {
    const struct primitives *primitives;
    const struct activate *activate;
};

static void activate_rows(void *context, size_t first, size_t end) {
    const struct activate_loop *loop = context;
    const struct activate *activate = loop->activate;
    size_t at = first * activate->width;
    const float *gate = activate->gate ? buffer_f32(activate->gate) + at : NULL;
    loop->primitives->activate(activate->kind, gate, buffer_f32(activate->up) + at,
                               buffer_f32(activate->out) + at, (end - first) * activate->width);
}

/* A vector of activations costs about as much as twenty multiply-adds: an exponential and a
 * division. */
void cpu_activate(struct device *device, const struct activate *activate) {
    struct cpu_device *cpu = cpu_of(device);
    struct activate_loop loop = {cpu->primitives, activate};
    struct rows rows = rows_of(activate->list, activate->rows);
    pool_run(cpu->pool, rows.count, activate->width / PANEL * 20, activate_rows, &loop);
}

struct scale_loop {
    const struct primitives *primitives;
    const struct scale_logits *scale;
    struct rows rows;
};

static void scale_rows(void *context, size_t first, size_t end) {
    const struct scale_loop *loop = context;
    const struct scale_logits *scale = loop->scale;
    for (size_t i = first; i < end; i++) {
        float s = buffer_f32(scale->s)[rows_at(&loop->rows, i)];
        float *logits = buffer_f32(scale->logits) + i * scale->vocab;
        loop->primitives->scale(logits, NULL, expf(s) / (float)scale->width, logits, scale->vocab);
    }
}

void cpu_scale_logits(struct device *device, const struct scale_logits *scale) {
    struct cpu_device *cpu = cpu_of(device);
    struct scale_loop loop = {cpu->primitives, scale, rows_of(scale->list, 0)};
    pool_run(cpu->pool, loop.rows.count, scale->vocab / PANEL, scale_rows, &loop);
}

struct norm_loop {
    const struct primitives *primitives;
    const struct rmsnorm *norm;
    struct rows rows;
};

static void norm_rows(void *context, size_t first, size_t end) {
    const struct norm_loop *loop = context;
    const struct rmsnorm *norm = loop->norm;
    size_t width = norm->width;
    for (size_t i = first; i < end; i++) {
        const float *x = buffer_f32(norm->x) + rows_at(&loop->rows, i) * width;
        float square = loop->primitives->sum_squares(x, width) / (float)width;
        loop->primitives->scale(x, buffer_f32(norm->gain), 1 / sqrtf(square + norm->epsilon),
                                buffer_f32(norm->y) + i * width, width);
    }
}

void cpu_rmsnorm(struct device *device, const struct rmsnorm *norm) {
    struct cpu_device *cpu = cpu_of(device);
    struct norm_loop loop = {cpu->primitives, norm, rows_of(norm->list, 0)};
    pool_run(cpu->pool, loop.rows.count, norm->width / 4, norm_rows, &loop);
}
