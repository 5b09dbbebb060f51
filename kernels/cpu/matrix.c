/* Weights and the matrix product. */
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- Packing weights ------------------------------------------------------------------------- */

struct packing {
    const struct matrix *matrix;
    const void *data;
    enum dtype type;
};

static void pack_panels_f32(void *context, size_t first, size_t end) {
    const struct packing *packing = context;
    const struct matrix *matrix = packing->matrix;
    size_t in = matrix->in, last = end * PANEL < matrix->out ? end * PANEL : matrix->out;
    for (size_t column = first * PANEL; column < last; column++) {
        float *to = buffer_f32(matrix->panels) + column / PANEL * in * PANEL + column % PANEL;
        for (size_t k = 0; k < in; k++) {
            to[k * PANEL] = number_load(packing->data, packing->type, column * in + k);
        }
    }
}

static void pack_panels_bf16(void *context, size_t first, size_t end) {
    const struct packing *packing = context;
    const struct matrix *matrix = packing->matrix;
    size_t in = matrix->in, last = end * PANEL < matrix->out ? end * PANEL : matrix->out;
    for (size_t column = first * PANEL; column < last; column++) {
        uint16_t *to = (uint16_t *)matrix->panels->data +
                       column / PANEL * ((in + 1) / 2) * 2 * PANEL + column % PANEL * 2;
        for (size_t k = 0; k < in; k++) {
            float value = number_load(packing->data, packing->type, column * in + k);
            to[k / 2 * 2 * PANEL + k % 2] = number_to_bf16(value);
        }
    }
}

/* Bytes of the panels: the last panel is whole, and an odd `in` is made even for pairs. */
static bool panels_bytes(const struct matrix *matrix, size_t *bytes) {
    size_t in = matrix->in, size = matrix->type == DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
    if (matrix->type == DTYPE_BF16 && !size_add(in, in % 2, &in)) return false;
    return size_multiply(in, matrix->panel_count, bytes) &&
           size_multiply(*bytes, PANEL * size, bytes);
}

static int matrix_fill(struct device *device, struct matrix *matrix, struct error *error) {
    size_t bytes;
    if (matrix->out == 0 || matrix->in == 0 || matrix->in > cpu_of(device)->max_width) {
        return error_set(error, FATHOM_INVALID,
                         "matrix of %zu x %zu: sizes begin at 1, and this device was opened for "
                         "at most %zu inputs",
                         matrix->out, matrix->in, cpu_of(device)->max_width);
    }
    if (matrix->type != DTYPE_F32 && matrix->type != DTYPE_BF16) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "weights are computed with as f32 or bf16 only");
    }
    if (!panels_bytes(matrix, &bytes)) {
        return error_set(error, FATHOM_NO_MEMORY, "matrix of %zu x %zu is too large", matrix->out,
                         matrix->in);
    }
    matrix->panels = cpu_buffer_create(device, bytes, error);
    return matrix->panels ? FATHOM_OK : FATHOM_NO_MEMORY;
}

struct matrix *cpu_matrix_create(struct device *device, const void *data, enum dtype type,
                                 size_t out, size_t in, enum dtype weights, struct error *error) {
    struct matrix *matrix = malloc(sizeof *matrix);
    if (!matrix) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for a matrix");
        return NULL;
    }
    size_t panel_count = out / PANEL + (out % PANEL != 0);
    *matrix = (struct matrix){NULL, out, in, panel_count, weights};
    if (matrix_fill(device, matrix, error)) {
        free(matrix);
        return NULL;
    }
    struct packing packing = {matrix, data, type};
    pool_run(cpu_of(device)->pool, panel_count, in * PANEL,
             weights == DTYPE_F32 ? pack_panels_f32 : pack_panels_bf16, &packing);
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

struct product {
    const struct primitives *primitives;
    const struct matrix *w;
    const float *x;
    struct rows rows;
    unsigned char *packed;
    struct gemm gemm;
};

/* Rows of x side by side as the inner loop reads them. */
static void pack_rows(void *context, size_t first, size_t end) {
    const struct product *product = context;
    const struct primitives *primitives = product->primitives;
    size_t in = product->w->in;
    bool pairs = product->w->type == DTYPE_BF16;
    size_t row_bytes = product->gemm.steps * (pairs ? primitives->pair_bytes : sizeof(float));
    for (size_t i = first; i < end; i++) {
        const float *x = product->x + rows_at(&product->rows, i) * in;
        unsigned char *to = product->packed + i * row_bytes;
        if (pairs) {
            primitives->round_pairs(x, in, to);
        } else {
            memcpy(to, x, row_bytes);
        }
    }
}

static void run_part(const struct product *product, const struct gemm *part) {
    if (product->w->type == DTYPE_BF16) {
        product->primitives->gemm_bf16(part);
    } else {
        product->primitives->gemm_f32(part);
    }
}

static void run_panels(void *context, size_t first, size_t end) {
    const struct product *product = context;
    struct gemm part = product->gemm;
    part.first_panel = first;
    part.end_panel = end;
    run_part(product, &part);
}

static void run_rows(void *context, size_t first, size_t end) {
    const struct product *product = context;
    struct gemm part = product->gemm;
    part.first_row = first;
    part.end_row = end;
    run_part(product, &part);
}

/* Splitting panels reads the weights once in all; rows are split when there are not panels enough
 * to keep a wide tile on every thread busy. Loading a panel costs about as much as computing four
 * rows. */
static void product_run(struct pool *pool, struct product *product) {
    size_t rows = product->rows.count, panels = product->w->panel_count;
    size_t steps = product->gemm.steps;
    if (panels >= 4 * pool_threads(pool) || rows < 2 * pool_threads(pool)) {
        pool_run(pool, panels, steps * (rows + 4), run_panels, product);
    } else {
        pool_run(pool, rows, steps * panels, run_rows, product);
    }
}

void cpu_matmul(struct device *device, const struct matmul *matmul) {
    struct cpu_device *cpu = cpu_of(device);
    const struct matrix *w = matmul->w;
    struct product product = {
        .primitives = cpu->primitives,
        .w = w,
        .x = buffer_f32(matmul->x),
        .rows = rows_of(matmul->gather, matmul->rows),
        .packed = cpu->packed->data,
        .gemm = {.x = matmul->x->data,
                 .panels = w->panels->data,
                 .y = buffer_f32(matmul->y),
                 .steps = w->type == DTYPE_BF16 ? (w->in + 1) / 2 : w->in,
                 .out = w->out,
                 .end_panel = w->panel_count},
    };
    product.gemm.end_row = product.rows.count;
    assert(product.rows.count <= cpu->max_rows);
    if (product.rows.count == 0) return;
    if (w->type == DTYPE_BF16 || matmul->gather) {
        pool_run(cpu->pool, product.rows.count, w->in / PANEL + 1, pack_rows, &product);
        product.gemm.x = product.packed;
    }
    product_run(cpu->pool, &product);
}
