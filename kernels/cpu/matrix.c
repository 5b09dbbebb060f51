/* Weights and the matrix product. */
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- Packing weights ------------------------------------------------------------------------- */

struct packing {
    const struct matrix *matrix;
    const struct primitives *primitives;
    const void *data;
    enum dtype type;
    atomic_bool overflow; /* a finite weight that is infinite in the packed type */
};

/* Inputs first..end-1 of one output, at most INT8_GROUP, as they are; zeros behind them. Inline, so
 * that most often the compiler knows how much is copied. */
static inline __attribute__((always_inline)) void copy_inputs(const struct packing *packing,
                                                              size_t column, size_t first,
                                                              size_t end, size_t size, void *to) {
    const unsigned char *from =
        (const unsigned char *)packing->data + (column * packing->matrix->in + first) * size;
    if (end - first == INT8_GROUP) {
        memcpy(to, from, INT8_GROUP * size);
    } else {
        memset(to, 0, INT8_GROUP * size);
        memcpy(to, from, (end - first) * size);
    }
}

/* The same as floats. */
static void load_inputs(const struct packing *packing, size_t column, size_t first, size_t end,
                        float *to) {
    uint16_t halves[INT8_GROUP];
    if (packing->type == DTYPE_F32) {
        copy_inputs(packing, column, first, end, sizeof *to, to);
        return;
    }
    copy_inputs(packing, column, first, end, sizeof *halves, halves);
    if (packing->type == DTYPE_BF16) {
        for (size_t k = 0; k < INT8_GROUP; k++) to[k] = number_from_bf16(halves[k]);
    } else {
        for (size_t k = 0; k < INT8_GROUP; k++) to[k] = number_from_f16(halves[k]);
    }
}

static void pack_f32(struct packing *packing, size_t column, size_t first, size_t end) {
    size_t in = packing->matrix->in;
    float *to = buffer_f32(packing->matrix->panels) + column / PANEL * in * PANEL + column % PANEL;
    float values[INT8_GROUP];
    load_inputs(packing, column, first, end, values);
    for (size_t k = first; k < end; k++) to[k * PANEL] = values[k - first];
}

static void pack_bf16(struct packing *packing, size_t column, size_t first, size_t end) {
    size_t pairs = (packing->matrix->in + 1) / 2;
    unsigned char *to = packing->matrix->panels->data +
                        ((column / PANEL * pairs + first / 2) * PANEL + column % PANEL) * 4;
    uint16_t halves[INT8_GROUP];
    if (packing->type == DTYPE_BF16) {
        copy_inputs(packing, column, first, end, sizeof *halves, halves);
    } else {
        float values[INT8_GROUP];
        load_inputs(packing, column, first, end, values);
        for (size_t k = 0; k < INT8_GROUP; k++) halves[k] = number_to_bf16(values[k]);
    }
    for (size_t k = 0; k < end - first; k += 2) memcpy(to + k / 2 * PANEL * 4, halves + k, 4);
}

static void pack_f16(struct packing *packing, size_t column, size_t first, size_t end) {
    size_t in = packing->matrix->in;
    uint16_t *to =
        (uint16_t *)packing->matrix->panels->data + column / PANEL * in * PANEL + column % PANEL;
    float values[INT8_GROUP];
    load_inputs(packing, column, first, end, values);
    for (size_t k = first; k < end; k++) {
        uint16_t half = number_to_f16(values[k - first]);
        to[k * PANEL] = half;
        if ((half & 0x7fff) == 0x7c00 && isfinite(values[k - first])) packing->overflow = true;
    }
}

static void pack_int8(struct packing *packing, size_t column, size_t first, size_t end) {
    const struct matrix *matrix = packing->matrix;
    const unsigned char *order = packing->primitives->int8_order;
    size_t group = column / PANEL * matrix->steps + first / INT8_GROUP;
    uint8_t *to = matrix->panels->data + group * INT8_GROUP * PANEL + column % PANEL * 4;
    float values[INT8_GROUP];
    int16_t codes[INT8_GROUP];
    load_inputs(packing, column, first, end, values);
    float scale = packing->primitives->quantise(values, codes);
    matrix->scales[group * PANEL + column % PANEL] = (uint16_t)(number_bits(scale) >> 16);
    for (size_t k = 0; k < INT8_GROUP; k += 4) {
        uint8_t four[4];
        for (size_t i = 0; i < 4; i++) four[i] = (uint8_t)(codes[k + order[i]] + 128);
        memcpy(to + k * PANEL, four, sizeof four);
    }
}

/* All in pieces of one length, so that the 16 outputs of a panel fill its lines while they are in
 * the nearest cache. */
static void pack_panels(void *context, size_t first, size_t end) {
    static void (*const pack[DTYPE_COUNT])(struct packing *, size_t, size_t,
                                           size_t) = {pack_f32, pack_bf16, pack_f16, pack_int8};
    struct packing *packing = context;
    const struct matrix *matrix = packing->matrix;
    for (size_t panel = first; panel < end; panel++) {
        size_t last = (panel + 1) * PANEL < matrix->out ? (panel + 1) * PANEL : matrix->out;
        for (size_t k = 0; k < matrix->in; k += INT8_GROUP) {
            size_t to = k + INT8_GROUP < matrix->in ? k + INT8_GROUP : matrix->in;
            for (size_t column = panel * PANEL; column < last; column++) {
                pack[matrix->type](packing, column, k, to);
            }
        }
    }
}

/* Bytes of the panels: the last panel and the last step of each are whole. Behind them, for int8,
 * one scale of two bytes per step and output. */
static bool panels_bytes(const struct matrix *matrix, const struct gemm_type *gemm, size_t *bytes,
                         size_t *scales) {
    size_t steps;
    if (!size_multiply(matrix->steps, matrix->panel_count, &steps) ||
        !size_multiply(steps, PANEL * gemm->step_inputs, bytes) ||
        !size_multiply(*bytes, dtype_size(matrix->type), bytes)) {
        return false;
    }
    *scales = *bytes;
    if (matrix->type != DTYPE_INT8) return true;
    return size_multiply(steps, PANEL * sizeof(uint16_t), bytes) &&
           size_add(*bytes, *scales, bytes);
}

static int matrix_fill(struct device *device, struct matrix *matrix, const struct gemm_type *gemm,
                       struct error *error) {
    size_t bytes, scales;
    if (matrix->out == 0 || matrix->in == 0 || matrix->in > cpu_of(device)->max_width) {
        return error_set(error, FATHOM_INVALID,
                         "matrix of %zu x %zu: sizes begin at 1, and this device was opened for "
                         "at most %zu inputs",
                         matrix->out, matrix->in, cpu_of(device)->max_width);
    }
    if (!panels_bytes(matrix, gemm, &bytes, &scales)) {
        return error_set(error, FATHOM_NO_MEMORY, "matrix of %zu x %zu is too large", matrix->out,
                         matrix->in);
    }
    matrix->panels = cpu_panels_create(device, bytes, error);
    if (!matrix->panels) return FATHOM_NO_MEMORY;
    matrix->scales = (uint16_t *)(void *)(matrix->panels->data + scales);
    return FATHOM_OK;
}

struct matrix *cpu_matrix_create(struct device *device, const void *data, enum dtype type,
                                 size_t out, size_t in, enum dtype weights, struct error *error) {
    const struct primitives *primitives = cpu_of(device)->primitives;
    const struct gemm_type *gemm = &primitives->gemm[weights];
    assert(type != DTYPE_INT8);
    struct matrix *matrix = malloc(sizeof *matrix);
    if (!matrix) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for a matrix");
        return NULL;
    }
    *matrix = (struct matrix){
        .out = out,
        .in = in,
        .panel_count = out / PANEL + (out % PANEL != 0),
        .steps = in / gemm->step_inputs + (in % gemm->step_inputs != 0),
        .type = weights,
    };
    if (matrix_fill(device, matrix, gemm, error)) {
        free(matrix);
        return NULL;
    }
    struct packing packing = {matrix, primitives, data, type, false};
    pool_run(cpu_of(device)->pool, matrix->panel_count, in * PANEL, pack_panels, &packing);
    if (packing.overflow) {
        error_set(error, FATHOM_INVALID,
                  "a weight is beyond 65504, the largest f16 number; use bf16 or f32 weights");
        cpu_matrix_destroy(device, matrix);
        return NULL;
    }
    return matrix;
}

void cpu_matrix_destroy(struct device *device, struct matrix *matrix) {
    if (!matrix) return;
    cpu_buffer_destroy(device, matrix->panels);
    free(matrix);
}

size_t cpu_matrix_bytes(const struct matrix *matrix) {
    return matrix->panels->bytes;
}

/* ---- Product --------------------------------------------------------------------------------- */

/* Products of the same rows by matrices of one type. To the pool, their panels are one sequence. */
struct products {
    const struct gemm_type *type;
    const float *x;
    struct rows rows;
    unsigned char *packed;
    size_t in, panels, count;
    struct gemm gemm[MATMULS_MAX];
};

/* Rows of x side by side as the inner loop reads them. */
static void pack_rows(void *context, size_t first, size_t end) {
    const struct products *products = context;
    size_t in = products->in, row_bytes = products->gemm->row_bytes;
    for (size_t i = first; i < end; i++) {
        const float *x = products->x + rows_at(&products->rows, i) * in;
        unsigned char *to = products->packed + i * row_bytes;
        if (products->type->round_row) {
            products->type->round_row(x, in, to);
        } else {
            memcpy(to, x, row_bytes);
        }
    }
}

static void run_panels(void *context, size_t first, size_t end) {
    const struct products *products = context;
    size_t before = 0; /* panels of the products before this one */
    for (size_t i = 0; i < products->count && before < end; i++) {
        struct gemm part = products->gemm[i];
        size_t after = before + part.end_panel;
        if (first < after) {
            part.first_panel = first > before ? first - before : 0;
            if (end < after) part.end_panel = end - before;
            products->type->gemm(&part);
        }
        before = after;
    }
}

static void run_rows(void *context, size_t first, size_t end) {
    const struct products *products = context;
    for (size_t i = 0; i < products->count; i++) {
        struct gemm part = products->gemm[i];
        part.first_row = first;
        part.end_row = end;
        products->type->gemm(&part);
    }
}

/* Splitting panels reads the weights once in all; rows are split when there are not panels enough
 * to keep a wide tile on every thread busy. Loading a panel costs about as much as computing four
 * rows. */
static void products_run(struct pool *pool, struct products *products) {
    size_t rows = products->rows.count, panels = products->panels, in = products->in;
    if (panels >= 4 * pool_threads(pool) || rows < 2 * pool_threads(pool)) {
        pool_run(pool, panels, in * (rows + 4), run_panels, products);
    } else {
        pool_run(pool, rows, in * panels, run_rows, products);
    }
}

static struct gemm gemm_of(const struct products *products, const struct matmul *matmul) {
    const struct matrix *w = matmul->w;
    assert(w->in == products->in);
    return (struct gemm){
        .x = matmul->x->data,
        .panels = w->panels->data,
        .scales = w->scales,
        .y = buffer_f32(matmul->y),
        .steps = w->steps,
        .row_bytes = w->steps * products->type->step_bytes,
        .out = w->out,
        .end_row = products->rows.count,
        .end_panel = w->panel_count,
    };
}

void cpu_matmul(struct device *device, const struct matmul *matmuls, size_t count) {
    struct cpu_device *cpu = cpu_of(device);
    const struct matmul *first = matmuls;
    struct products products = {
        .type = &cpu->primitives->gemm[first->w->type],
        .x = buffer_f32(first->x),
        .rows = rows_of(first->gather, first->rows),
        .packed = cpu->packed->data,
        .in = first->w->in,
        .count = count,
    };
    assert(count >= 1 && count <= MATMULS_MAX && products.rows.count <= cpu->max_rows);
    if (products.rows.count == 0) return;
    for (size_t i = 0; i < count; i++) {
        assert(matmuls[i].x == first->x && matmuls[i].gather == first->gather &&
               matmuls[i].w->type == first->w->type);
        products.gemm[i] = gemm_of(&products, &matmuls[i]);
        products.panels += products.gemm[i].end_panel;
    }
    if (products.type->round_row || first->gather) {
        pool_run(cpu->pool, products.rows.count, products.in / PANEL + 1, pack_rows, &products);
        for (size_t i = 0; i < count; i++) products.gemm[i].x = products.packed;
    }
    products_run(cpu->pool, &products);
}
