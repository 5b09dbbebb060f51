/* Weights and matrix products: which rows, in which type, and which two products are one launch. */
#include "kernels/cuda/int8.h"
#include "kernels/cuda/rows.h"

extern "C" {
#include "kernels/number.h"
}

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)64 << 20) /* weights are converted and copied in pieces */

/* ---- Weights --------------------------------------------------------------------------------- */

/* What a file has of a matrix. */
struct source {
    const void *data;
    enum dtype type;
    size_t in;
};

/* Elements first..first+count-1 in `type`. False: a finite one is infinite in it. */
static bool convert(const struct source *source, size_t first, size_t count, enum dtype type,
                    void *out) {
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        float value = number_load(source->data, source->type, first + i);
        uint16_t half = type == DTYPE_F16 ? number_to_f16(value) : number_to_bf16(value);
        if (type == DTYPE_F32)
            ((float *)out)[i] = value;
        else
            ((uint16_t *)out)[i] = half;
        if (type == DTYPE_F16 && (half & 0x7fff) == 0x7c00 && isfinite(value)) fits = false;
    }
    return fits;
}

/* Outputs first..first+count-1: codes and scales. */
static void quantise(const struct source *source, size_t first, size_t count, int8_t *codes,
                     uint16_t *scales) {
    size_t in = source->in;
    for (size_t i = first * in; i < (first + count) * in; i += in) {
        for (size_t k = 0; k < in; k += INT8_GROUP) {
            float values[INT8_GROUP] = {};
            int16_t wide[INT8_GROUP];
            for (size_t j = 0; j < INT8_GROUP && k + j < in; j++)
                values[j] = number_load(source->data, source->type, i + k + j);
            *scales++ = (uint16_t)(number_bits(number_quantise(values, wide)) >> 16);
            for (size_t j = 0; j < INT8_GROUP; j++) *codes++ = (int8_t)wide[j];
        }
    }
}

static void copy_weights(struct cuda_device *cuda, void *to, const void *from, size_t bytes) {
    cuda_must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cuda->stream),
              "copying weights");
    cuda_must(cudaStreamSynchronize(cuda->stream), "copying weights");
}

/* Some outputs at a time, by way of `staging`. */
static int fill_pieces(struct cuda_device *cuda, struct matrix *matrix, const struct source *source,
                       size_t piece, unsigned char *staging, struct error *error) {
    bool is_int8 = matrix->type == DTYPE_INT8;
    size_t in = matrix->in, size = dtype_size(matrix->type);
    size_t row = is_int8 ? int8_codes_bytes(in) : in * size;
    size_t scales_row = row / INT8_GROUP * sizeof(uint16_t);
    unsigned char *scales = matrix->data + matrix->out * row;
    for (size_t first = 0; first < matrix->out; first += piece) {
        size_t some = matrix->out - first < piece ? matrix->out - first : piece;
        if (is_int8) {
            quantise(source, first, some, (int8_t *)staging, (uint16_t *)(staging + some * row));
            copy_weights(cuda, scales + first * scales_row, staging + some * row,
                         some * scales_row);
        } else if (!convert(source, first * in, some * in, matrix->type, staging)) {
            return error_set(
                error, FATHOM_INVALID,
                "a weight is beyond 65504, the largest f16 number; use bf16 or f32 weights");
        }
        copy_weights(cuda, matrix->data + first * row, staging, some * row);
    }
    return FATHOM_OK;
}

static int matrix_fill(struct cuda_device *cuda, struct matrix *matrix, const struct source *source,
                       struct error *error) {
    size_t row = matrix->bytes / matrix->out, piece = PIECE_BYTES / row;
    if (piece == 0) piece = 1;
    if (piece > matrix->out) piece = matrix->out;
    unsigned char *staging = (unsigned char *)malloc(piece * row);
    if (!staging) return error_set(error, FATHOM_NO_MEMORY, "no memory to convert weights");
    int result = fill_pieces(cuda, matrix, source, piece, staging, error);
    free(staging);
    return result;
}

static int matrix_check(const struct cuda_device *cuda, size_t out, size_t in, enum dtype weights,
                        size_t *bytes, struct error *error) {
    if (out == 0 || in == 0 || in > cuda->max_width) {
        return error_set(error, FATHOM_INVALID,
                         "matrix of %zu x %zu: sizes begin at 1, and this device was opened for "
                         "at most %zu inputs",
                         out, in, cuda->max_width);
    }
    size_t row = in * dtype_size(weights);
    if (weights == DTYPE_INT8)
        row = int8_codes_bytes(in) / INT8_GROUP * (INT8_GROUP + sizeof(uint16_t));
    if (!size_multiply(out, row, bytes) || out > INT32_MAX) {
        return error_set(error, FATHOM_NO_MEMORY, "matrix of %zu x %zu is too large", out, in);
    }
    return FATHOM_OK;
}

struct matrix *cuda_matrix_create(struct device *device, const void *data, enum dtype type,
                                  size_t out, size_t in, enum dtype weights, struct error *error) {
    struct cuda_device *cuda = cuda_of(device);
    size_t bytes = 0;
    if (matrix_check(cuda, out, in, weights, &bytes, error)) return NULL;
    struct matrix *matrix = (struct matrix *)calloc(1, sizeof *matrix);
    if (!matrix) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for a matrix");
        return NULL;
    }
    matrix->out = out;
    matrix->in = in;
    matrix->bytes = bytes;
    matrix->type = weights;
    struct source source = {data, type, in};
    matrix->data = (unsigned char *)cuda_allocate(bytes, error);
    if (!matrix->data || matrix_fill(cuda, matrix, &source, error)) {
        cuda_matrix_destroy(device, matrix);
        return NULL;
    }
    if (dtype_size(weights) == 2 && weights != cuda->half) {
        cuda->half = weights;
        cuda->copy_of = cuda->packed_of = NULL; /* made in the other type */
    }
    return matrix;
}

void cuda_matrix_destroy(struct device *device, struct matrix *matrix) {
    if (!matrix) return;
    cuda_flush(cuda_of(device));
    cudaFree(matrix->data);
    free(matrix);
}

size_t cuda_matrix_bytes(const struct matrix *matrix) {
    return matrix->bytes;
}

/* ---- Product --------------------------------------------------------------------------------- */

void cuda_flush(struct cuda_device *cuda) {
    if (!cuda->has_product) return;
    cuda->has_product = false;
    blas_multiply(cuda->blas, &cuda->product);
}

/* The rows of x as the product reads them: where they are, or packed now. */
static const void *product_rows(struct cuda_device *cuda, const struct matmul *args,
                                struct active rows) {
    const struct buffer *x = args->x;
    enum dtype type = args->w->type;
    if (!args->gather) {
        if (x->type == type) return x->data;
        if (x == cuda->copy_of && type == cuda->half) return cuda->copy;
    }
    const struct buffer *list = args->gather ? args->gather->indices : NULL;
    if (cuda->packed_of == x && cuda->packed_list == list && cuda->packed_type == type &&
        (type != DTYPE_INT8 || cuda->packed_rows == rows.most)) /* scales are behind all codes */
        return cuda->packed;
    cuda_flush(cuda); /* the product that waits may read what was packed before */
    if (type == DTYPE_INT8)
        int8_pack(cuda, rows, x, cuda->packed, args->w->in);
    else
        cuda_pack(cuda, rows, x, cuda->packed, type, args->w->in);
    /* Whoever writes a list, or a state, says so; other rows may change unseen. */
    cuda->packed_of = list || x == cuda->copy_of ? x : NULL;
    cuda->packed_list = list;
    cuda->packed_type = type;
    cuda->packed_rows = rows.most;
    return cuda->packed;
}

static bool is_twin(const struct product *a, const struct product *b) {
    return a->x == b->x && a->rows == b->rows && a->out == b->out && a->in == b->in &&
           a->type == b->type && a->y_type == b->y_type && !a->second_w && a->y != b->y;
}

/* K and V, and gate and up, are products of the same rows and shape: the first waits for the
 * second, and both are one launch. */
static void multiply(struct cuda_device *cuda, const struct matmul *args) {
    const struct matrix *w = args->w;
    cuda_rotate_now(cuda, (struct buffer *)args->x);
    struct active rows = cuda_rows(cuda, args->gather, args->rows);
    assert((size_t)rows.most <= cuda->max_rows);
    assert(w->type == DTYPE_BF16 || args->y->type == DTYPE_F32);
    args->y->is_rotated = false;
    if (rows.most == 0) return;
    struct product product = {};
    product.x = product_rows(cuda, args, rows);
    if (w->type == DTYPE_INT8) {
        cuda_flush(cuda);
        int8_multiply(cuda, rows, product.x, w, args->y);
        return;
    }
    product.w = w->data;
    product.y = args->y->data;
    product.rows = (size_t)rows.most;
    product.out = w->out;
    product.in = w->in;
    product.bucket = bucket_of(product.rows);
    product.type = w->type;
    product.y_type = args->y->type;
    if (cuda->has_product && is_twin(&cuda->product, &product)) {
        cuda->product.second_w = product.w;
        cuda->product.second_y = product.y;
        cuda_flush(cuda);
        return;
    }
    cuda_flush(cuda);
    cuda->product = product;
    cuda->has_product = true;
}

void cuda_matmul(struct device *device, const struct matmul *matmuls, size_t count) {
    for (size_t i = 0; i < count; i++) multiply(cuda_of(device), &matmuls[i]);
}
