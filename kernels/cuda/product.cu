/* Weights and matrix products: which rows, in which type, and which two products are one launch. */
#include "kernels/cuda/rows.h"

extern "C" {
#include "kernels/number.h"
}

#include <assert.h>
#include <stdlib.h>

#define PIECE_BYTES ((size_t)64 << 20) /* weights are converted and copied in pieces */

/* ---- Weights --------------------------------------------------------------------------------- */

/* Elements first..first+count-1 in the type of the matrix. */
static void convert(const void *data, enum dtype type, size_t first, size_t count, enum dtype to,
                    void *out) {
    for (size_t i = 0; i < count; i++) {
        float value = number_load(data, type, first + i);
        if (to == DTYPE_F32)
            ((float *)out)[i] = value;
        else
            ((uint16_t *)out)[i] = number_to_bf16(value);
    }
}

static int matrix_fill(struct cuda_device *cuda, struct matrix *matrix, const void *data,
                       enum dtype type, struct error *error) {
    size_t size = dtype_size(matrix->type), count = matrix->out * matrix->in;
    size_t piece = PIECE_BYTES / size < count ? PIECE_BYTES / size : count;
    void *staging = malloc(piece * size);
    if (!staging) return error_set(error, FATHOM_NO_MEMORY, "no memory to convert weights");
    for (size_t first = 0; first < count; first += piece) {
        size_t some = count - first < piece ? count - first : piece;
        convert(data, type, first, some, matrix->type, staging);
        cuda_must(cudaMemcpyAsync(matrix->data + first * size, staging, some * size,
                                  cudaMemcpyHostToDevice, cuda->stream),
                  "copying weights");
        cuda_must(cudaStreamSynchronize(cuda->stream), "copying weights");
    }
    free(staging);
    return FATHOM_OK;
}

static int matrix_check(const struct cuda_device *cuda, size_t out, size_t in, enum dtype weights,
                        size_t *bytes, struct error *error) {
    if (out == 0 || in == 0 || in > cuda->max_width) {
        return error_set(error, FATHOM_INVALID,
                         "matrix of %zu x %zu: sizes begin at 1, and this device was opened for "
                         "at most %zu inputs",
                         out, in, cuda->max_width);
    }
    if (weights != DTYPE_F32 && weights != DTYPE_BF16) {
        return error_set(
            error, FATHOM_UNSUPPORTED,
            "a CUDA device computes with f32 or bf16 weights; --device cpu has all types");
    }
    if (!size_multiply(out, in, bytes) || !size_multiply(*bytes, dtype_size(weights), bytes)) {
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
    matrix->data = (unsigned char *)cuda_allocate(bytes, error);
    if (!matrix->data || matrix_fill(cuda, matrix, data, type, error)) {
        cuda_matrix_destroy(device, matrix);
        return NULL;
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
        if (x == cuda->copy_of) return cuda->copy;
    }
    const struct buffer *list = args->gather ? args->gather->indices : NULL;
    bool is_packed =
        list && cuda->packed_of == x && cuda->packed_list == list && cuda->packed_type == type;
    if (!is_packed) {
        cuda_flush(cuda); /* the product that waits may read what was packed before */
        cuda_pack(cuda, rows, x, cuda->packed, type, args->w->in);
        cuda->packed_of = list ? x : NULL;
        cuda->packed_list = list;
        cuda->packed_type = type;
    }
    return cuda->packed;
}

static bool is_twin(const struct product *a, const struct product *b) {
    return a->x == b->x && a->rows == b->rows && a->out == b->out && a->in == b->in &&
           a->type == b->type && a->y_type == b->y_type && !a->second_w && a->y != b->y;
}

/* K and V, and gate and up, are products of the same rows and shape: the first waits for the
 * second, and both are one launch. */
void cuda_matmul(struct device *device, const struct matmul *args) {
    struct cuda_device *cuda = cuda_of(device);
    const struct matrix *w = args->w;
    cuda_rotate_now(cuda, (struct buffer *)args->x);
    struct active rows = cuda_rows(cuda, args->gather, args->rows);
    assert((size_t)rows.most <= cuda->max_rows);
    assert(w->type == DTYPE_BF16 || args->y->type == DTYPE_F32);
    args->y->is_rotated = false;
    if (rows.most == 0) return;
    struct product product = {};
    product.x = product_rows(cuda, args, rows);
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
