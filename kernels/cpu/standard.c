/* Standard models: the state is one vector, to which every sub-layer adds; a norm is before
 * each. */
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"

#include <math.h>

/* `squares`: the sum over the row of x, which is in the cache. */
static void norm_row(const struct primitives *primitives, const struct prenorm *norm, size_t row,
                     float squares) {
    if (!norm->gain) return;
    size_t at = row * norm->width;
    primitives->scale(buffer_f32(norm->x) + at, buffer_f32(norm->gain),
                      1 / sqrtf(squares / (float)norm->width + norm->epsilon),
                      buffer_f32(norm->y) + at, norm->width);
}

struct begin_loop {
    const struct primitives *primitives;
    const struct standard_begin *begin;
};

static void begin_rows(void *context, size_t first, size_t end) {
    const struct begin_loop *loop = context;
    const struct standard_begin *begin = loop->begin;
    size_t width = begin->norm.width;
    for (size_t row = first; row < end; row++) {
        size_t token = (size_t)buffer_i32(begin->step->token)[row];
        float *x = buffer_f32(begin->norm.x) + row * width;
        for (size_t i = 0; i < width; i++) {
            x[i] = number_load(begin->table->data, begin->table_type, token * width + i);
        }
        norm_row(loop->primitives, &begin->norm, row, loop->primitives->sum_squares(x, width));
    }
}

void cpu_standard_begin(struct device *device, const struct standard_begin *begin) {
    struct cpu_device *cpu = cpu_of(device);
    struct begin_loop loop = {cpu->primitives, begin};
    pool_run(cpu->pool, begin->step->rows, begin->norm.width, begin_rows, &loop);
}

struct end_loop {
    const struct primitives *primitives;
    const struct standard_end_sublayer *end;
};

static void end_rows(void *context, size_t first, size_t last) {
    const struct end_loop *loop = context;
    const struct standard_end_sublayer *end = loop->end;
    size_t width = end->norm.width;
    for (size_t row = first; row < last; row++) {
        float squares = loop->primitives->add_squares(buffer_f32(end->f) + row * width,
                                                      buffer_f32(end->norm.x) + row * width, width);
        norm_row(loop->primitives, &end->norm, row, squares);
    }
}

void cpu_standard_end_sublayer(struct device *device, const struct standard_end_sublayer *end) {
    struct cpu_device *cpu = cpu_of(device);
    struct end_loop loop = {cpu->primitives, end};
    pool_run(cpu->pool, end->step->rows, end->norm.width / 4, end_rows, &loop);
}

static void add_bias_rows(void *context, size_t first, size_t end) {
    const struct add_bias *add = context;
    const float *bias = buffer_f32(add->bias);
    for (size_t row = first; row < end; row++) {
        float *x = buffer_f32(add->x) + row * add->width;
        for (size_t i = 0; i < add->width; i++) x[i] += bias[i];
    }
}

void cpu_add_bias(struct device *device, const struct add_bias *add) {
    struct add_bias loop = *add;
    pool_run(cpu_of(device)->pool, add->rows, add->width / 4, add_bias_rows, &loop);
}
