/* Matrix products: cuBLASLt on a device, a plain loop in the emulation. */
#ifndef FATHOM_CUDA_BLAS_H
#define FATHOM_CUDA_BLAS_H

#include "kernels/cuda/platform.h"

struct blas;

/* y = x W^T, all row-major: x [rows, in], w [out, in], y [rows, out]. `second_w` and `second_y`:
 * one more product of the same x and shape, or NULL. Sums are fp32. */
struct product {
    const void *x, *w, *second_w;
    void *y, *second_y;
    size_t rows, out, in;
    size_t bucket;     /* >= rows: the size that the algorithm is chosen for */
    enum dtype type;   /* of x and w: F32, BF16 or F16 */
    enum dtype y_type; /* F32, or BF16 when type is */
};

int blas_open(cudaStream_t stream, struct blas **blas, struct error *error);
void blas_close(struct blas *blas); /* NULL is allowed */
void blas_set_stream(struct blas *blas, cudaStream_t stream);
void blas_multiply(struct blas *blas, const struct product *product);

#endif
