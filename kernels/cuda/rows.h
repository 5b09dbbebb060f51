/* Packing: what matrix products need of rows.cu. */
#ifndef FATHOM_CUDA_ROWS_H
#define FATHOM_CUDA_ROWS_H

#include "kernels/cuda/cuda.h"

/* Row i of y is row i of `rows` of x, in `type`: not INT8; F16 from F32 only. */
void cuda_pack(struct cuda_device *cuda, struct active rows, const struct buffer *x, void *y,
               enum dtype type, size_t width);

#endif
