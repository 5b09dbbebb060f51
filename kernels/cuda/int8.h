/* Products of int8 weights: what product.cu needs of int8.cu.
 *
 * A matrix is [out, groups * 64] codes, then [out, groups] scales in bf16; packed rows of x are
 * [rows, groups * 64] codes, then [rows, groups] scales in fp32. The last group is filled up with
 * zeros. */
#ifndef FATHOM_CUDA_INT8_H
#define FATHOM_CUDA_INT8_H

#include "kernels/cuda/cuda.h"

size_t int8_codes_bytes(size_t in); /* of one row, or of one output */
size_t int8_row_bytes(size_t in);   /* of a row of x with its scales */

/* Row i of `to` is row i of `rows` of x. */
void int8_pack(struct cuda_device *cuda, struct active rows, const struct buffer *x, void *to,
               size_t in);
/* y = x W^T of rows that were packed for the same `rows`. */
void int8_multiply(struct cuda_device *cuda, struct active rows, const void *x,
                   const struct matrix *w, struct buffer *y);

#endif
