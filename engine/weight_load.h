/* Weights from a checkpoint onto a device. Private to the engine. */
#ifndef FATHOM_WEIGHT_LOAD_H
#define FATHOM_WEIGHT_LOAD_H

#include "engine/checkpoint.h"
#include "kernels/kernels.h"

/* All return NULL and fill error (never NULL here) when the tensor is missing, has another shape,
 * holds NaN or infinity, or when memory is exhausted. */

/* f32 [rows, columns], or [rows] with `columns` 0. */
struct buffer *weight_load_vector(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t rows, size_t columns,
                                  struct error *error);

/* [out, in], packed as `weights`. */
struct matrix *weight_load_matrix(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t out, size_t in, enum dtype weights,
                                  struct error *error);

/* Rows that are looked up, never multiplied: [rows, columns] of *type, which is the file's where
 * the device can read that, else `weights`. */
struct buffer *weight_load_table(struct device *device, const struct checkpoint *checkpoint,
                                 const char *name, size_t rows, size_t columns, enum dtype weights,
                                 enum dtype *type, struct error *error);

#endif
