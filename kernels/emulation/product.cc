/* Matrix products in place of cuBLASLt's: by the formula, in one order. */
#include "kernels/cuda/blas.h"
#include "kernels/emulation/fault.h"

#include <vector>

struct blas {
    cudaStream_t stream;
};

int blas_open(cudaStream_t stream, struct blas **blas, struct error *) {
    struct blas made = {stream};
    *blas = new auto(made);
    return FATHOM_OK;
}

void blas_close(struct blas *blas) {
    delete blas;
}

void blas_set_stream(struct blas *blas, cudaStream_t stream) {
    blas->stream = stream;
}

static std::vector<float> floats(const void *data, enum dtype type, size_t count) {
    std::vector<float> out(count);
    for (size_t i = 0; i < count; i++) out[i] = number_load(data, type, i);
    return out;
}

/* Sixteen sums side by side, so that the compiler can use vectors. */
static float dot(const float *x, const float *w, size_t in) {
    float sums[16] = {}, sum = 0;
    size_t k = 0;
    for (; k + 16 <= in; k += 16) {
        for (size_t i = 0; i < 16; i++) sums[i] += x[k + i] * w[k + i];
    }
    for (; k < in; k++) sum += x[k] * w[k];
    for (float part : sums) sum += part;
    return sum;
}

static void multiply_one(const struct product &product, const void *w_data, void *y) {
    size_t in = product.in, out = product.out;
    std::vector<float> x = floats(product.x, product.type, product.rows * in);
    std::vector<float> w = floats(w_data, product.type, out * in);
    for (size_t row = 0; row < product.rows; row++) {
        for (size_t column = 0; column < out; column++) {
            float sum = dot(&x[row * in], &w[column * in], in);
            if (product.y_type == DTYPE_F32)
                ((float *)y)[row * out + column] = sum;
            else
                ((__nv_bfloat16 *)y)[row * out + column] = __float2bfloat16(sum);
        }
    }
}

void blas_multiply(struct blas *blas, const struct product *product) {
    struct product copy = *product;
    emulation_issue(blas->stream, [=] {
        size_t w_bytes = copy.out * copy.in * dtype_size(copy.type);
        size_t x_bytes = copy.rows * copy.in * dtype_size(copy.type);
        size_t y_bytes = copy.rows * copy.out * dtype_size(copy.y_type);
        multiply_one(copy, copy.w, copy.y);
        if (copy.second_w) multiply_one(copy, copy.second_w, copy.second_y);
        emulation_count_product(x_bytes + (w_bytes + y_bytes) * (copy.second_w ? 2 : 1));
    });
}
