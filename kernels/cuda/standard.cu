/* Standard models: the state is one vector, to which every sub-layer adds; a norm is before each.
 * A block works on one row, and a thread on elements that no other touches until the norm. */
#include "kernels/cuda/block.h"

#include <math.h>

/* What the next sub-layer reads of x. */
struct norming {
    struct active rows;
    float *x, *y;
    const float *gain; /* NULL: nothing */
    uint16_t *copy;
    enum dtype half;
    int width;
    float epsilon;
};

/* `squares`: this thread's share of the sum over x. */
static __device__ __forceinline__ void norm_row(const struct norming &norming, int row,
                                                float squares) {
    __shared__ float scratch[WARP];
    int width = norming.width;
    if (!norming.gain) return;
    size_t at = (size_t)row * width;
    float factor = 1 / sqrtf(block_sum(squares, scratch) / (float)width + norming.epsilon);
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        float y = norming.x[at + i] * factor * norming.gain[i];
        norming.y[at + i] = y;
        norming.copy[at + i] = half_bits(y, norming.half);
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * 14);
}

static __global__ void __launch_bounds__(THREADS)
    start_kernel(struct norming norming, const int32_t *tokens, const void *table,
                 enum dtype table_type) {
    int row = (int)blockIdx.x, width = norming.width;
    if (row >= active_count(norming.rows)) return;
    size_t entry = (size_t)tokens[row] * width;
    float squares = 0;
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        float x = table_value(table, table_type, entry + i);
        norming.x[(size_t)row * width + i] = x;
        squares += x * x;
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * (4 + (table_type == DTYPE_F32 ? 4 : 2)));
    norm_row(norming, row, squares);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) add_kernel(struct norming norming, const T *f) {
    int row = (int)blockIdx.x, width = norming.width;
    if (row >= active_count(norming.rows)) return;
    float squares = 0;
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        size_t at = (size_t)row * width + i;
        float x = norming.x[at] + number_of(f[at]);
        norming.x[at] = x;
        squares += x * x;
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * (8 + sizeof(T)));
    norm_row(norming, row, squares);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    bias_kernel(struct active rows, T *x, const float *bias, int width) {
    int row = (int)blockIdx.y, i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= active_count(rows) || i >= width) return;
    T *at = &x[(size_t)row * width + i];
    number_store(at, number_of(*at) + bias[i]);
    COUNT_BYTES(2 * sizeof(T) + sizeof(float));
}

/* ---- Host ------------------------------------------------------------------------------------ */

static struct norming norming_of(struct cuda_device *cuda, const struct prenorm *norm,
                                 const struct step_rows *step) {
    struct norming norming = {};
    norming.rows = cuda_rows(cuda, NULL, step->rows);
    norming.x = (float *)norm->x->data;
    norming.y = (float *)norm->y->data;
    norming.gain = norm->gain ? (const float *)norm->gain->data : NULL;
    norming.copy = cuda->copy;
    norming.half = cuda->half;
    norming.width = (int)norm->width;
    norming.epsilon = norm->epsilon;
    return norming;
}

/* What was packed of the y before is true no longer. */
static void note_norm(struct cuda_device *cuda, const struct prenorm *norm) {
    cuda->packed_of = NULL;
    if (norm->gain) cuda->copy_of = norm->y;
}

void cuda_standard_begin(struct device *device, const struct standard_begin *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct norming norming = norming_of(cuda, &args->norm, args->step);
    LAUNCH(start_kernel, dim3((unsigned)norming.rows.most), dim3(threads_of(args->norm.width)), 0,
           cuda->stream, norming, (const int32_t *)args->step->token->data,
           (const void *)args->table->data, args->table_type);
    note_norm(cuda, &args->norm);
}

void cuda_standard_end_sublayer(struct device *device, const struct standard_end_sublayer *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct norming norming = norming_of(cuda, &args->norm, args->step);
    dim3 grid((unsigned)norming.rows.most), block(threads_of(args->norm.width));
    if (args->f->type == DTYPE_F32) {
        LAUNCH(add_kernel<float>, grid, block, 0, cuda->stream, norming,
               (const float *)args->f->data);
    } else {
        LAUNCH(add_kernel<__nv_bfloat16>, grid, block, 0, cuda->stream, norming,
               (const __nv_bfloat16 *)args->f->data);
    }
    note_norm(cuda, &args->norm);
}

void cuda_add_bias(struct device *device, const struct add_bias *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    cuda_rotate_now(cuda, args->x);
    struct active rows = cuda_rows(cuda, NULL, args->rows);
    if (rows.most == 0) return;
    dim3 grid((unsigned)((args->width + THREADS - 1) / THREADS), (unsigned)rows.most);
    const float *bias = (const float *)args->bias->data;
    if (args->x->type == DTYPE_F32) {
        LAUNCH(bias_kernel<float>, grid, dim3(THREADS), 0, cuda->stream, rows,
               (float *)args->x->data, bias, (int)args->width);
    } else {
        LAUNCH(bias_kernel<__nv_bfloat16>, grid, dim3(THREADS), 0, cuda->stream, rows,
               (__nv_bfloat16 *)args->x->data, bias, (int)args->width);
    }
}
