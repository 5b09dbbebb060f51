/* Operations on the elements of rows: packing for matrix products, activation, logits, norm. */
#include "kernels/cuda/rows.h"
#include "kernels/cuda/block.h"

#include <assert.h>
#include <math.h>

/* ---- Packing --------------------------------------------------------------------------------- */

template <typename In, typename Out>
static __global__ void __launch_bounds__(THREADS)
    pack_kernel(struct active rows, const In *x, Out *y, int width) {
    int i = (int)blockIdx.x;
    if (i >= active_count(rows)) return;
    const In *from = x + (size_t)active_row(rows, i) * width;
    for (int k = (int)threadIdx.x; k < width; k += (int)blockDim.x) {
        number_store(&y[(size_t)i * width + k], number_of(from[k]));
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * (sizeof(In) + sizeof(Out)));
}

void cuda_pack(struct cuda_device *cuda, struct active rows, const struct buffer *x, void *y,
               enum dtype type, size_t width) {
    dim3 grid((unsigned)rows.most), block(threads_of(width));
    const float *x_f32 = (const float *)x->data;
    const __nv_bfloat16 *x_bf16 = (const __nv_bfloat16 *)x->data;
    float *y_f32 = (float *)y;
    __nv_bfloat16 *y_bf16 = (__nv_bfloat16 *)y;
    if (type == DTYPE_F16) {
        assert(x->type == DTYPE_F32);
        LAUNCH((pack_kernel<float, __half>), grid, block, 0, cuda->stream, rows, x_f32, (__half *)y,
               (int)width);
    } else if (x->type == DTYPE_F32 && type == DTYPE_F32) {
        LAUNCH((pack_kernel<float, float>), grid, block, 0, cuda->stream, rows, x_f32, y_f32,
               (int)width);
    } else if (x->type == DTYPE_F32) {
        LAUNCH((pack_kernel<float, __nv_bfloat16>), grid, block, 0, cuda->stream, rows, x_f32,
               y_bf16, (int)width);
    } else if (type == DTYPE_F32) {
        LAUNCH((pack_kernel<__nv_bfloat16, float>), grid, block, 0, cuda->stream, rows, x_bf16,
               y_f32, (int)width);
    } else {
        LAUNCH((pack_kernel<__nv_bfloat16, __nv_bfloat16>), grid, block, 0, cuda->stream, rows,
               x_bf16, y_bf16, (int)width);
    }
}

/* ---- Activation ------------------------------------------------------------------------------ */

static __device__ __forceinline__ float activated(enum activation kind, float gate, float up) {
    if (kind == ACTIVATION_SILU_GATED) return gate / (1 + expf(-gate)) * up;
    if (kind == ACTIVATION_GELU) return 0.5f * up * (1 + erff(up * 0.70710678f));
    float x = up < 0 ? 0 : up; /* a NaN stays one */
    return x * x;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    activate_kernel(struct active rows, const T *gate, const T *up, T *out, int width,
                    enum activation kind) {
    int row = (int)blockIdx.y, i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= active_count(rows) || i >= width) return;
    size_t at = (size_t)row * width + i;
    number_store(&out[at], activated(kind, gate ? number_of(gate[at]) : 0, number_of(up[at])));
    COUNT_BYTES(sizeof(T) * (gate ? 3 : 2));
}

void cuda_activate(struct device *device, const struct activate *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct active rows = cuda_rows(cuda, args->list, args->rows);
    if (rows.most == 0) return;
    /* Rows are the second dimension of the grid, which has a limit that no step reaches. */
    dim3 grid((unsigned)((args->width + THREADS - 1) / THREADS), (unsigned)rows.most);
    const void *gate = args->gate ? args->gate->data : NULL;
    if (args->up->type == DTYPE_F32) {
        LAUNCH(activate_kernel<float>, grid, dim3(THREADS), 0, cuda->stream, rows,
               (const float *)gate, (const float *)args->up->data, (float *)args->out->data,
               (int)args->width, args->kind);
    } else {
        LAUNCH(activate_kernel<__nv_bfloat16>, grid, dim3(THREADS), 0, cuda->stream, rows,
               (const __nv_bfloat16 *)gate, (const __nv_bfloat16 *)args->up->data,
               (__nv_bfloat16 *)args->out->data, (int)args->width, args->kind);
    }
}

/* ---- The head -------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS)
    scale_kernel(struct active rows, float *logits, const float *s, int vocab, float width) {
    int i = (int)blockIdx.y, v = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= active_count(rows) || v >= vocab) return;
    logits[(size_t)i * vocab + v] *= expf(s[active_row(rows, i)]) / width;
    COUNT_BYTES(2 * sizeof(float));
}

void cuda_scale_logits(struct device *device, const struct scale_logits *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct active rows = cuda_rows(cuda, args->list, 0);
    if (rows.most == 0) return;
    dim3 grid((unsigned)((args->vocab + THREADS - 1) / THREADS), (unsigned)rows.most);
    LAUNCH(scale_kernel, grid, dim3(THREADS), 0, cuda->stream, rows, (float *)args->logits->data,
           (const float *)args->s->data, (int)args->vocab, (float)args->width);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    rmsnorm_kernel(struct active rows, const float *x, const float *gain, T *y, int width,
                   float epsilon) {
    __shared__ float scratch[WARP];
    int i = (int)blockIdx.x;
    if (i >= active_count(rows)) return;
    const float *from = x + (size_t)active_row(rows, i) * width;
    float squares = 0;
    for (int k = (int)threadIdx.x; k < width; k += (int)blockDim.x) squares += from[k] * from[k];
    float factor = 1 / sqrtf(block_sum(squares, scratch) / (float)width + epsilon);
    for (int k = (int)threadIdx.x; k < width; k += (int)blockDim.x) {
        number_store(&y[(size_t)i * width + k], from[k] * factor * gain[k]);
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * (8 + sizeof(T)));
}

void cuda_rmsnorm(struct device *device, const struct rmsnorm *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct active rows = cuda_rows(cuda, args->list, 0);
    if (rows.most == 0) return;
    const float *x = (const float *)args->x->data, *gain = (const float *)args->gain->data;
    if (args->y->type == DTYPE_F32) {
        LAUNCH(rmsnorm_kernel<float>, dim3((unsigned)rows.most), dim3(threads_of(args->width)), 0,
               cuda->stream, rows, x, gain, (float *)args->y->data, (int)args->width,
               args->epsilon);
    } else {
        LAUNCH(rmsnorm_kernel<__nv_bfloat16>, dim3((unsigned)rows.most),
               dim3(threads_of(args->width)), 0, cuda->stream, rows, x, gain,
               (__nv_bfloat16 *)args->y->data, (int)args->width, args->epsilon);
    }
}
