/* Products of codes: weights and rows of x in groups of 64 inputs, each group with a scale
 * (kernels.h). Sums within a group are exact; groups are scaled and added in ascending order,
 * without fused operations: the bits are the CPU's, whatever the tile. */
#include "kernels/cuda/block.h"
#include "kernels/cuda/int8.h"

#define GROUP_VECTORS (INT8_GROUP / (int)sizeof(uint4))

static int groups_of(size_t in) {
    return (int)(in / INT8_GROUP + (in % INT8_GROUP != 0));
}

size_t int8_codes_bytes(size_t in) {
    return (size_t)groups_of(in) * INT8_GROUP;
}

size_t int8_row_bytes(size_t in) {
    return (size_t)groups_of(in) * (INT8_GROUP + sizeof(float));
}

/* ---- Rows of x ------------------------------------------------------------------------------- */

/* As number_quantise, by one warp: two numbers to a lane. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    quantise_kernel(struct active rows, const T *x, int width, int groups, int8_t *codes,
                    float *scales) {
    const float shift = 0x1.8p23f;
    int i = (int)blockIdx.x, lane = (int)threadIdx.x % WARP;
    if (i >= active_count(rows)) return;
    const T *from = x + (size_t)active_row(rows, i) * width;
    for (int group = (int)threadIdx.x / WARP; group < groups; group += (int)blockDim.x / WARP) {
        int k = group * INT8_GROUP + 2 * lane;
        float a = k < width ? number_of(from[k]) : 0;
        float b = k + 1 < width ? number_of(from[k + 1]) : 0;
        unsigned top = __float_as_uint(a) & 0x7fffffff, other = __float_as_uint(b) & 0x7fffffff;
        if (other > top) top = other;
        for (int bits = WARP / 2; bits > 0; bits /= 2) {
            other = __shfl_xor_sync(ALL_LANES, top, bits);
            if (other > top) top = other;
        }
        bool finite = top < 0x7f800000;
        float largest = finite && top >= __float_as_uint(0x1p-100f) ? __uint_as_float(top) : 0;
        float scale = __uint_as_float((__float_as_uint(largest / 127) + 0xffff) & 0xffff0000);
        float inverse = largest == 0 ? 0 : 1 / scale;
        a = __fadd_rn(finite ? __fmul_rn(a, inverse) : 0, shift);
        b = __fadd_rn(finite ? __fmul_rn(b, inverse) : 0, shift);
        int8_t *to = codes + (size_t)i * groups * INT8_GROUP + k;
        to[0] = (int8_t)(__float_as_uint(a) - __float_as_uint(shift));
        to[1] = (int8_t)(__float_as_uint(b) - __float_as_uint(shift));
        if (lane == 0)
            scales[(size_t)i * groups + group] = finite ? scale : __uint_as_float(0x7fc00000);
    }
    if (threadIdx.x == 0)
        COUNT_BYTES((size_t)width * sizeof(T) + (size_t)groups * (INT8_GROUP + sizeof(float)));
}

/* Codes of `rows` rows, then their scales. */
static float *scales_of(void *to, int rows, size_t in) {
    return (float *)((unsigned char *)to + (size_t)rows * int8_codes_bytes(in));
}

void int8_pack(struct cuda_device *cuda, struct active rows, const struct buffer *x, void *to,
               size_t in) {
    dim3 grid((unsigned)rows.most), block(threads_of(in));
    float *scales = scales_of(to, rows.most, in);
    if (x->type == DTYPE_F32) {
        LAUNCH(quantise_kernel<float>, grid, block, 0, cuda->stream, rows, (const float *)x->data,
               (int)in, groups_of(in), (int8_t *)to, scales);
    } else {
        LAUNCH(quantise_kernel<__nv_bfloat16>, grid, block, 0, cuda->stream, rows,
               (const __nv_bfloat16 *)x->data, (int)in, groups_of(in), (int8_t *)to, scales);
    }
}

/* ---- Product --------------------------------------------------------------------------------- */

struct coded {
    const uint4 *x, *w; /* [rows, groups, GROUP_VECTORS], [out, groups, GROUP_VECTORS] */
    const float *x_scale;
    const uint16_t *w_scale; /* bf16 */
    float *y;
    int out, groups;
};

static __device__ __forceinline__ int dot(uint4 a, uint4 b, int sum) {
    sum = __dp4a((int)a.x, (int)b.x, sum);
    sum = __dp4a((int)a.y, (int)b.y, sum);
    sum = __dp4a((int)a.z, (int)b.z, sum);
    return __dp4a((int)a.w, (int)b.w, sum);
}

/* Vectors first..first+count-1 of each of `rows` rows, zeros behind the last row. */
static __device__ __forceinline__ void load_tile(uint4 *tile, int stride, const uint4 *from,
                                                 size_t width, int rows, int tile_rows, int first,
                                                 int count) {
    for (int at = (int)threadIdx.x; at < tile_rows * count; at += (int)blockDim.x) {
        int row = at / count, vector = at % count;
        uint4 value = {0, 0, 0, 0};
        if (row < rows) value = from[row * width + first + vector];
        tile[row * stride + vector] = value;
    }
}

/* A block makes OUT outputs of ROWS rows, a thread one output of EACH rows, from GROUPS groups at a
 * time. Grid: tiles of outputs, tiles of rows. */
template <int OUT, int ROWS, int EACH, int GROUPS>
static __global__ void __launch_bounds__(OUT *ROWS / EACH)
    product_kernel(struct active active, struct coded coded) {
    const int stride = GROUPS * GROUP_VECTORS + 1; /* outputs begin in different banks */
    __shared__ uint4 w[OUT * (GROUPS * GROUP_VECTORS + 1)];
    __shared__ uint4 x[ROWS * (GROUPS * GROUP_VECTORS + 1)];
    int column = (int)threadIdx.x % OUT, first = (int)threadIdx.x / OUT * EACH;
    int first_out = (int)blockIdx.x * OUT, first_row = (int)blockIdx.y * ROWS;
    int rows = active_count(active) - first_row, outs = coded.out - first_out;
    int groups = coded.groups;
    if (rows <= 0) return;
    size_t width = (size_t)groups * GROUP_VECTORS;
    float total[EACH] = {};
    for (int group = 0; group < groups; group += GROUPS) {
        int some = groups - group < GROUPS ? groups - group : GROUPS;
        __syncthreads();
        load_tile(w, stride, coded.w + first_out * width, width, outs, OUT, group * GROUP_VECTORS,
                  some * GROUP_VECTORS);
        load_tile(x, stride, coded.x + first_row * width, width, rows, ROWS, group * GROUP_VECTORS,
                  some * GROUP_VECTORS);
        __syncthreads();
        for (int g = 0; g < some && column < outs; g++) {
            size_t at = (size_t)(first_out + column) * groups + group + g;
            float w_scale = __uint_as_float((unsigned)coded.w_scale[at] << 16);
            UNROLL for (int i = 0; i < EACH; i++) {
                if (first + i >= rows) continue;
                int sum = 0;
                UNROLL for (int v = 0; v < GROUP_VECTORS; v++) {
                    int at_vector = g * GROUP_VECTORS + v;
                    sum = dot(w[column * stride + at_vector], x[(first + i) * stride + at_vector],
                              sum);
                }
                size_t row = (size_t)(first_row + first + i);
                float scale = __fmul_rn(w_scale, coded.x_scale[row * groups + group + g]);
                total[i] = __fadd_rn(total[i], __fmul_rn(scale, (float)sum));
            }
        }
    }
    UNROLL for (int i = 0; i < EACH; i++) {
        if (first + i < rows && column < outs)
            coded.y[(size_t)(first_row + first + i) * coded.out + first_out + column] = total[i];
    }
    if (threadIdx.x != 0) return;
    if (rows > ROWS) rows = ROWS;
    if (outs > OUT) outs = OUT;
    COUNT_BYTES((size_t)groups * (rows * (INT8_GROUP + sizeof(float)) + outs * (INT8_GROUP + 2)) +
                (size_t)rows * outs * sizeof(float));
}

template <int OUT, int ROWS, int EACH, int GROUPS>
static void launch_product(struct cuda_device *cuda, struct active rows,
                           const struct coded &coded) {
    dim3 grid((unsigned)((coded.out + OUT - 1) / OUT), (unsigned)((rows.most + ROWS - 1) / ROWS));
    LAUNCH((product_kernel<OUT, ROWS, EACH, GROUPS>), grid, dim3(OUT * ROWS / EACH), 0,
           cuda->stream, rows, coded);
}

/* Where rows are few, weights are what is read: narrow tiles keep more of the device reading. */
void int8_multiply(struct cuda_device *cuda, struct active rows, const void *x,
                   const struct matrix *w, struct buffer *y) {
    struct coded coded = {};
    coded.x = (const uint4 *)x;
    coded.x_scale = scales_of((void *)x, rows.most, w->in);
    coded.w = (const uint4 *)w->data;
    coded.w_scale = (const uint16_t *)(w->data + w->out * int8_codes_bytes(w->in));
    coded.y = (float *)y->data;
    coded.out = (int)w->out;
    coded.groups = groups_of(w->in);
    if (rows.most <= 8)
        launch_product<16, 8, 1, 8>(cuda, rows, coded);
    else
        launch_product<64, 32, 8, 2>(cuda, rows, coded);
}
