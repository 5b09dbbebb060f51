#include "engine/weight_load.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"

#define ROW_COST(columns) ((columns) / 4 + 1) /* of reading a row, as share_out counts */

/* ---- Reading, on all threads ----------------------------------------------------------------- */

struct reading {
    const struct tensor *tensor;
    size_t columns;
    float *out;           /* [rows, columns], or NULL: only to look whether all is finite */
    atomic_bool has_hole; /* something is not */
};

/* Elements that are checked at a time: a constant, so that compilers use vectors. They are copied
 * first, as the file need not be aligned. */
#define CHUNK 64

static bool chunk_is_finite_32(const unsigned char *data, uint32_t exponent) {
    uint32_t bits[CHUNK], bad = 0;
    memcpy(bits, data, sizeof bits);
    for (size_t i = 0; i < CHUNK; i++) bad |= (bits[i] & exponent) == exponent;
    return !bad;
}

static bool chunk_is_finite_16(const unsigned char *data, uint16_t exponent) {
    uint16_t bits[CHUNK], bad = 0;
    memcpy(bits, data, sizeof bits);
    for (size_t i = 0; i < CHUNK; i++) bad |= (bits[i] & exponent) == exponent;
    return !bad;
}

static bool chunk_is_finite(const unsigned char *data, enum dtype type) {
    if (type == DTYPE_F32) return chunk_is_finite_32(data, 0x7f800000);
    return chunk_is_finite_16(data, type == DTYPE_BF16 ? 0x7f80 : 0x7c00);
}

/* No element of 16 or 32 bits has all bits of the exponent. */
static bool is_finite(const unsigned char *data, enum dtype type, size_t count) {
    size_t size = dtype_size(type), at = 0;
    bool finite = true;
    for (; at + CHUNK <= count; at += CHUNK) finite &= chunk_is_finite(data + at * size, type);
    unsigned char rest[CHUNK * sizeof(float)] = {0};
    memcpy(rest, data + at * size, (count - at) * size);
    return finite && chunk_is_finite(rest, type);
}

static void read_rows(void *context, size_t first, size_t end) {
    struct reading *reading = context;
    const struct tensor *tensor = reading->tensor;
    size_t columns = reading->columns;
    bool finite;
    if (reading->out) {
        finite = tensor_read_rows(tensor, first, end, reading->out + first * columns);
    } else {
        size_t row = columns * dtype_size(tensor->type);
        finite = is_finite((const unsigned char *)tensor->data + first * row, tensor->type,
                           (end - first) * columns);
    }
    if (!finite) reading->has_hole = true;
}

static bool read_all(struct device *device, const struct tensor *tensor, size_t columns,
                     float *out) {
    struct reading reading = {tensor, columns, out, false};
    size_t rows = tensor_rows(tensor);
    if (device->kernels->share_out)
        device->kernels->share_out(device, rows, ROW_COST(columns), read_rows, &reading);
    else
        read_rows(&reading, 0, rows);
    return !reading.has_hole;
}

/* Which element it is that is not finite. */
static int refuse(const struct tensor *tensor, size_t count, struct error *error) {
    float *values = malloc(count * sizeof *values);
    error_set(error, FATHOM_NO_MEMORY, "no memory for tensor '%s'", tensor->name);
    if (values) tensor_to_f32(tensor, values, error);
    free(values);
    return error->code;
}

/* A matrix as it lies in the file if that can be read there, else as f32, malloc'd. */
struct source {
    const void *data;
    enum dtype type;
    size_t bytes;
    float *values; /* to be freed; NULL: data is the file's */
};

static int source_open(struct source *source, struct device *device,
                       const struct checkpoint *checkpoint, const char *name, size_t rows,
                       size_t columns, struct error *error) {
    struct tensor tensor;
    int result = checkpoint_tensor(checkpoint, name, rows, columns, &tensor, error);
    if (result != 0) return result;
    *source = (struct source){.data = tensor.data, .type = tensor.type, .bytes = tensor.bytes};
    if (tensor.format || tensor.interleaved) {
        source->bytes = rows * columns * sizeof *source->values;
        source->type = DTYPE_F32;
        source->data = source->values = malloc(source->bytes);
        if (!source->values)
            return error_set(error, FATHOM_NO_MEMORY, "no memory for tensor '%s'", name);
    }
    if (read_all(device, &tensor, columns, source->values)) return 0;
    free(source->values);
    return refuse(&tensor, rows * columns, error);
}

static struct buffer *write_buffer(struct device *device, const void *data, size_t bytes,
                                   struct error *error) {
    struct buffer *buffer = device->kernels->buffer_create(device, bytes, error);
    if (buffer) device->kernels->write(device, buffer, 0, data, bytes);
    return buffer;
}

/* ---- Onto the device ------------------------------------------------------------------------- */

struct buffer *weight_load_vector(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t rows, size_t columns,
                                  struct error *error) {
    struct tensor tensor;
    size_t count = columns ? rows * columns : rows;
    if (checkpoint_tensor(checkpoint, name, rows, columns, &tensor, error) != 0) return NULL;
    float *values = malloc(count * sizeof *values);
    if (!values) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for tensor '%s'", name);
        return NULL;
    }
    struct buffer *buffer = NULL;
    if (tensor_to_f32(&tensor, values, error) == 0)
        buffer = write_buffer(device, values, count * sizeof *values, error);
    free(values);
    return buffer;
}

struct matrix *weight_load_matrix(struct device *device, const struct checkpoint *checkpoint,
                                  const char *name, size_t out, size_t in, enum dtype weights,
                                  struct error *error) {
    struct source source;
    if (source_open(&source, device, checkpoint, name, out, in, error) != 0) return NULL;
    struct matrix *matrix =
        device->kernels->matrix_create(device, source.data, source.type, out, in, weights, error);
    free(source.values);
    return matrix;
}

struct buffer *weight_load_table(struct device *device, const struct checkpoint *checkpoint,
                                 const char *name, size_t rows, size_t columns, enum dtype weights,
                                 enum dtype *type, struct error *error) {
    struct source source;
    if (source_open(&source, device, checkpoint, name, rows, columns, error) != 0) return NULL;
    *type = source.type;
    if (source.values && weights != DTYPE_F32) {
        /* In place: element i is read before its half of the place is written. */
        uint16_t *rounded = (uint16_t *)(void *)source.values;
        for (size_t i = 0; i < rows * columns; i++) {
            uint16_t bits = number_to_bf16(source.values[i]);
            memcpy(&rounded[i], &bits, sizeof bits);
        }
        *type = DTYPE_BF16;
        source.bytes = rows * columns * sizeof *rounded;
    }
    struct buffer *buffer = write_buffer(device, source.data, source.bytes, error);
    free(source.values);
    return buffer;
}
