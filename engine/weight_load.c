#include "engine/weight_load.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"

/* A tensor's elements as f32, malloc'd. */
static float *load_values(const struct checkpoint *checkpoint, const char *name, size_t rows,
                          size_t columns, struct tensor *tensor, struct error *error) {
    if (checkpoint_tensor(checkpoint, name, rows, columns, tensor, error) != 0) return NULL;
    float *values = malloc((columns ? rows * columns : rows) * sizeof *values);
    if (!values) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for tensor '%s'", name);
    } else if (tensor_to_f32(tensor, values, error) != 0) {
        free(values);
        values = NULL;
    }
    return values;
}

static struct buffer *write_buffer(struct device *device, const void *data, size_t bytes,
                                   struct error *error) {
    struct buffer *buffer = device->kernels->buffer_create(device, bytes, error);
    if (buffer) device->kernels->write(device, buffer, 0, data, bytes);
    return buffer;
}

struct buffer *weight_load_vector(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t rows, size_t columns,
                                  struct error *error) {
    struct tensor tensor;
    float *values = load_values(checkpoint, name, rows, columns, &tensor, error);
    if (!values) return NULL;
    size_t count = columns ? rows * columns : rows;
    struct buffer *buffer = write_buffer(device, values, count * sizeof *values, error);
    free(values);
    return buffer;
}

struct matrix *weight_load_matrix(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t out, size_t in, enum dtype weights,
                                  struct error *error) {
    struct tensor tensor;
    float *values = load_values(checkpoint, name, out, in, &tensor, error);
    if (!values) return NULL;
    struct matrix *matrix =
        device->kernels->matrix_create(device, values, DTYPE_F32, out, in, weights, error);
    free(values);
    return matrix;
}

struct buffer *weight_load_table(struct device *device, const struct checkpoint *checkpoint,
                                 const char *name, size_t rows, size_t columns, enum dtype weights,
                                 enum dtype *type, struct error *error) {
    struct tensor tensor;
    float *values = load_values(checkpoint, name, rows, columns, &tensor, error); /* a check, too */
    if (!values) return NULL;
    struct buffer *buffer;
    if (!tensor.format) {
        *type = tensor.type;
        buffer = write_buffer(device, tensor.data, tensor.bytes, error);
    } else if (weights == DTYPE_F32) {
        *type = DTYPE_F32;
        buffer = write_buffer(device, values, rows * columns * sizeof *values, error);
    } else {
        /* In place: element i is read before its half of the place is written. */
        uint16_t *rounded = (uint16_t *)(void *)values;
        for (size_t i = 0; i < rows * columns; i++) {
            uint16_t bits = number_to_bf16(values[i]);
            memcpy(&rounded[i], &bits, sizeof bits);
        }
        *type = DTYPE_BF16;
        buffer = write_buffer(device, rounded, rows * columns * sizeof *rounded, error);
    }
    free(values);
    return buffer;
}
