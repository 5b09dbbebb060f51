/* The CUDA device: opening it, its memory, and its table of operations. */
#include "kernels/cuda/int8.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STAGING_BYTES ((size_t)16 << 20)
#define SENDING_BYTES ((size_t)4 << 20) /* more than steps read, but for very long block tables */
#define RESERVE_BYTES                                                                              \
    ((size_t)1 << 30) /* for recorded steps, kernels yet to be loaded, and others */

void cuda_must(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "fathom: CUDA: %s: %s\n", what, cudaGetErrorString(status));
    abort();
}

static thread_local int current_ordinal = -1; /* of this thread; -1: it has chosen none */

static cudaError_t choose_device(int ordinal) {
    cudaError_t status = cudaSetDevice(ordinal);
    current_ordinal = status == cudaSuccess ? ordinal : -1;
    return status;
}

struct cuda_device *cuda_of(struct device *device) {
    struct cuda_device *cuda = (struct cuda_device *)device;
    if (current_ordinal != cuda->ordinal)
        cuda_must(choose_device(cuda->ordinal), "a device for this thread");
    return cuda;
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Zero-filled; NULL with the error set when there is none. */
void *cuda_allocate(size_t bytes, struct error *error) {
    void *memory = NULL;
    cudaError_t status = cudaMalloc(&memory, bytes ? bytes : 1);
    if (status == cudaSuccess) {
        cuda_must(cudaMemset(memory, 0, bytes ? bytes : 1), "clearing memory");
        return memory;
    }
    cudaGetLastError(); /* handled here: later calls must not report it again */
    error_set(error, FATHOM_NO_MEMORY, "no device memory for %zu bytes: %s", bytes,
              cudaGetErrorString(status));
    return NULL;
}

static struct buffer *buffer_of(size_t bytes, enum dtype type, struct error *error) {
    struct buffer *buffer = (struct buffer *)calloc(1, sizeof *buffer);
    if (!buffer) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for a buffer");
        return NULL;
    }
    buffer->bytes = bytes;
    buffer->type = type;
    buffer->data = (unsigned char *)cuda_allocate(bytes, error);
    if (buffer->data) return buffer;
    free(buffer);
    return NULL;
}

struct buffer *cuda_buffer_create(struct device *device, size_t bytes, struct error *error) {
    cuda_of(device);
    return buffer_of(bytes, DTYPE_F32, error);
}

static struct buffer *cuda_activation_create(struct device *device, size_t rows, size_t width,
                                             enum dtype weights, struct error *error) {
    size_t bytes;
    enum dtype type = weights == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
    if (!size_multiply(rows, width, &bytes) || !size_multiply(bytes, dtype_size(type), &bytes)) {
        error_set(error, FATHOM_NO_MEMORY, "an activation of %zu rows of %zu is too large", rows,
                  width);
        return NULL;
    }
    cuda_of(device);
    return buffer_of(bytes, type, error);
}

void cuda_buffer_destroy(struct device *device, struct buffer *buffer) {
    struct cuda_device *cuda = cuda_of(device);
    if (!buffer) return;
    cuda_flush(cuda);
    if (cuda->copy_of == buffer) cuda->copy_of = NULL;
    if (cuda->packed_of == buffer || cuda->packed_list == buffer) cuda->packed_of = NULL;
    if (cuda->known_list == buffer) cuda->known_list = NULL;
    cudaFree(buffer->data);
    free(buffer);
}

static size_t cuda_buffer_bytes(const struct buffer *buffer) {
    return buffer->bytes;
}

/* What the device remembers of a buffer is true no longer. */
static void forget(struct cuda_device *cuda, const struct buffer *buffer) {
    if (cuda->copy_of == buffer) cuda->copy_of = NULL;
    cuda->packed_of = NULL;
    cuda->known_list = NULL;
}

/* From pinned memory, while there is some that no copy still reads, the host does not wait; other
 * memory has been read when the copy returns. */
void cuda_send(struct cuda_device *cuda, void *to, const void *data, size_t size) {
    if (size == 0) return;
    if (size <= SENDING_BYTES - cuda->sent) {
        data = memcpy(cuda->sending + cuda->sent, data, size);
        cuda->sent += (size + 15) / 16 * 16;
        if (cuda->sent > SENDING_BYTES) cuda->sent = SENDING_BYTES;
    }
    cuda_must(cudaMemcpyAsync(to, data, size, cudaMemcpyHostToDevice, cuda->stream), "writing");
}

/* Everything that was issued is done. */
static void wait_for_device(struct cuda_device *cuda) {
    cuda_must(cudaStreamSynchronize(cuda->stream), "reading");
    cuda->sent = 0;
}

static void cuda_write(struct device *device, struct buffer *buffer, size_t offset,
                       const void *data, size_t size) {
    struct cuda_device *cuda = cuda_of(device);
    assert(!cuda->bucket); /* no part of a recorded step */
    cuda_flush(cuda);
    cuda_rotate_now(cuda, buffer);
    forget(cuda, buffer);
    cuda_send(cuda, buffer->data + offset, data, size);
}

static void cuda_read(struct device *device, const struct buffer *buffer, size_t offset, void *data,
                      size_t size) {
    struct cuda_device *cuda = cuda_of(device);
    assert(!cuda->bucket);
    cuda_flush(cuda);
    cuda_rotate_now(cuda, (struct buffer *)buffer);
    if (size == 0) return;
    cuda_must(
        cudaMemcpyAsync(data, buffer->data + offset, size, cudaMemcpyDeviceToHost, cuda->stream),
        "reading");
    wait_for_device(cuda);
}

/* Pieces that fit land in memory from which they are handed out once all have come; a copy straight
 * into the caller's may wait by itself. */
static void cuda_read_all(struct device *device, const struct copy *copies, size_t count) {
    struct cuda_device *cuda = cuda_of(device);
    size_t used = 0;
    cuda_flush(cuda);
    for (size_t i = 0; i < count; i++) {
        const struct copy *copy = &copies[i];
        size_t bytes = copy->width * copy->rows;
        if (bytes == 0) continue;
        cuda_rotate_now(cuda, (struct buffer *)copy->from);
        bool is_staged = bytes <= STAGING_BYTES - used;
        void *to = is_staged ? cuda->staging + used : copy->to;
        size_t pitch = is_staged ? copy->width : copy->stride;
        if (copy->rows == 1) {
            cuda_must(cudaMemcpyAsync(to, copy->from->data + copy->offset, bytes,
                                      cudaMemcpyDeviceToHost, cuda->stream),
                      "reading");
        } else {
            cuda_must(cudaMemcpy2DAsync(to, pitch, copy->from->data + copy->offset, copy->stride,
                                        copy->width, copy->rows, cudaMemcpyDeviceToHost,
                                        cuda->stream),
                      "reading");
        }
        if (is_staged) used += bytes;
    }
    wait_for_device(cuda);
    used = 0;
    for (size_t i = 0; i < count; i++) {
        const struct copy *copy = &copies[i];
        size_t bytes = copy->width * copy->rows;
        if (bytes > STAGING_BYTES - used) continue;
        for (size_t row = 0; row < copy->rows; row++) {
            memcpy((unsigned char *)copy->to + row * copy->stride,
                   cuda->staging + used + row * copy->width, copy->width);
        }
        used += bytes;
    }
}

/* Halves are read into the second half of `out`, and widened from the front: none is overwritten
 * before it is read. */
static void cuda_read_activation(struct device *device, const struct buffer *buffer, size_t first,
                                 size_t count, float *out) {
    if (buffer->type == DTYPE_F32) {
        cuda_read(device, buffer, first * sizeof *out, out, count * sizeof *out);
        return;
    }
    unsigned char *halves = (unsigned char *)out + count * sizeof(uint16_t);
    cuda_read(device, buffer, first * sizeof(uint16_t), halves, count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, halves + i * sizeof half, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

static size_t cuda_memory_spare(const struct device *device) {
    size_t free_bytes = 0, total = 0;
    cuda_of((struct device *)device);
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return free_bytes > 2 * RESERVE_BYTES ? free_bytes - RESERVE_BYTES : free_bytes / 2;
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* A recorded step has room for all that its bucket may hold; rows of a branch are such a bound. */
static size_t bound_of(const struct cuda_device *cuda, size_t rows) {
    return cuda->bucket && !cuda->branch_rows ? recorded_rows(cuda, rows) : rows;
}

/* Where a wide step is not recorded the host asks, once per list: products over the running rows
 * alone save such a step more than the answer costs. */
size_t cuda_row_count(struct device *device, const struct row_list *list) {
    struct cuda_device *cuda = cuda_of(device);
    if (cuda->branch_rows) return cuda->branch_rows;
    if (cuda->bucket || list->is_exact || list->most <= NARROW_ROWS)
        return bound_of(cuda, list->most);
    if (cuda->known_list != list->indices) {
        int32_t count;
        cuda_read(device, list->count, 0, &count, sizeof count);
        cuda->known_list = list->indices;
        cuda->known_count = (size_t)count;
    }
    return cuda->known_count;
}

struct active cuda_rows(struct cuda_device *cuda, const struct row_list *list, size_t rows) {
    struct active active = {};
    if (list) {
        active.indices = (const int32_t *)list->indices->data;
        active.count = (const int32_t *)list->count->data;
        active.most = (int)cuda_row_count(&cuda->base, list);
    } else {
        active.count = cuda->bucket ? cuda->shape + SHAPE_ROWS : NULL;
        active.most = (int)bound_of(cuda, rows);
    }
    return active;
}

/* ---- The device ------------------------------------------------------------------------------ */

static void cuda_close(struct device *device) {
    struct cuda_device *cuda = cuda_of(device);
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    cuda_recorder_destroy(cuda);
    blas_close(cuda->blas);
    void *memory[] = {cuda->copy,          cuda->packed,  cuda->scores,
                      cuda->place,         cuda->arrived, cuda->partials,
                      cuda->parts_arrived, cuda->shape,   cuda->draw_states};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cudaFree(memory[i]);
    cudaFreeHost(cuda->staging);
    cudaFreeHost(cuda->sending);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    free(cuda);
}

static uint64_t cuda_finish_ns(struct device *device) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    cuda_must(cudaStreamSynchronize(cuda->stream), "timing");
    return DEVICE_NOW_NS();
}

static enum dtype cuda_preferred_weights(const struct device *device, enum dtype type) {
    (void)device;
    return type;
}

/* C++17 has no designated initialisers: the table is filled once, by name. */
static struct kernels table_make() {
    struct kernels table = {};
    table.name = "cuda";
    table.close = cuda_close;
    table.finish_ns = cuda_finish_ns;
    table.preferred_weights = cuda_preferred_weights;
    table.buffer_create = cuda_buffer_create;
    table.buffer_destroy = cuda_buffer_destroy;
    table.buffer_bytes = cuda_buffer_bytes;
    table.write = cuda_write;
    table.read = cuda_read;
    table.read_all = cuda_read_all;
    table.memory_spare = cuda_memory_spare;
    table.activation_create = cuda_activation_create;
    table.read_activation = cuda_read_activation;
    table.matrix_create = cuda_matrix_create;
    table.matrix_destroy = cuda_matrix_destroy;
    table.matrix_bytes = cuda_matrix_bytes;
    table.kv_block_bytes = cuda_kv_block_bytes;
    table.row_count = cuda_row_count;
    table.lists_are_packed = true;
    table.step_begin = cuda_step_begin;
    table.step_end = cuda_step_end;
    table.branch_begin = cuda_branch_begin;
    table.branch_end = cuda_branch_end;
    table.nag_begin = cuda_nag_begin;
    table.nag_end_sublayer = cuda_nag_end_sublayer;
    table.matmul = cuda_matmul;
    table.rope = cuda_rope;
    table.kv_append = cuda_kv_append;
    table.attention = cuda_attention;
    table.activate = cuda_activate;
    table.scale_logits = cuda_scale_logits;
    table.rmsnorm = cuda_rmsnorm;
    table.draw = cuda_draw;
    table.standard_begin = cuda_standard_begin;
    table.standard_end_sublayer = cuda_standard_end_sublayer;
    table.add_bias = cuda_add_bias;
    return table;
}

static const struct kernels cuda_kernels = table_make();

/* "cuda" is the first device, "cuda:N" the one with that number. */
static int ordinal_of(const char *name, int *ordinal, struct error *error) {
    char *end = NULL;
    long number = 0;
    if (!strncmp(name, "cuda:", 5) && name[5] >= '0' && name[5] <= '9') {
        number = strtol(name + 5, &end, 10);
    }
    if ((end && *end) || (!end && strcmp(name, "cuda") && strcmp(name, "auto")) || number > 999) {
        return error_set(error, FATHOM_INVALID,
                         "device \"%.32s\" is unknown; use \"cuda\" or \"cuda:0\" to \"cuda:999\"",
                         name);
    }
    *ordinal = (int)number;
    return FATHOM_OK;
}

static int device_choose(int ordinal, struct cudaDeviceProp *properties, struct error *error) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        return error_set(error, FATHOM_UNSUPPORTED, "CUDA cannot be used here: %s",
                         cudaGetErrorString(status));
    }
    if (ordinal >= count) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "there is no CUDA device %d; this machine has %d", ordinal, count);
    }
    status = choose_device(ordinal);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(properties, ordinal);
    if (status != cudaSuccess) {
        return error_set(error, FATHOM_UNSUPPORTED, "CUDA device %d cannot be used: %s", ordinal,
                         cudaGetErrorString(status));
    }
    if (properties->major < 8) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "CUDA device %d (%.64s) is of compute capability %d.%d; 8.0 is the least",
                         ordinal, properties->name, properties->major, properties->minor);
    }
    return FATHOM_OK;
}

/* All scratch there is: one set for steps of every size. */
static int scratch_create(struct cuda_device *cuda, struct error *error) {
    size_t elements;
    if (!size_multiply(cuda->max_rows, cuda->max_width, &elements) ||
        elements > SIZE_MAX / sizeof(float)) {
        return error_set(error, FATHOM_NO_MEMORY, "scratch of %zu rows of %zu is too large",
                         cuda->max_rows, cuda->max_width);
    }
    cuda->half = DTYPE_BF16;
    cuda->copy = (uint16_t *)cuda_allocate(elements * sizeof(uint16_t), error);
    if (!cuda->copy) return FATHOM_NO_MEMORY;
    size_t floats = cuda->max_width * sizeof(float), codes = int8_row_bytes(cuda->max_width);
    size_t row = floats > codes ? floats : codes; /* codes need more for the narrowest */
    cuda->packed = (unsigned char *)cuda_allocate(cuda->max_rows * row, error);
    if (!cuda->packed) return FATHOM_NO_MEMORY;
    cuda->scores = (float *)cuda_allocate(cuda->max_rows * SCORES_MAX * sizeof(float), error);
    cuda->place = (int32_t *)cuda_allocate(cuda->max_rows * sizeof(int32_t), error);
    cuda->arrived = (int32_t *)cuda_allocate(cuda->max_rows * sizeof(int32_t), error);
    cuda->shape = (int32_t *)cuda_allocate(SHAPE_INTS * sizeof(int32_t), error);
    if (!cuda->scores || !cuda->place || !cuda->arrived || !cuda->shape) return FATHOM_NO_MEMORY;
    int result = cuda_draw_create(cuda, error);
    if (result) return result;
    if (cudaMallocHost((void **)&cuda->staging, STAGING_BYTES) != cudaSuccess ||
        cudaMallocHost((void **)&cuda->sending, SENDING_BYTES) != cudaSuccess) {
        cudaGetLastError();
        return error_set(error, FATHOM_NO_MEMORY,
                         "no pinned memory to exchange data with a device");
    }
    return cuda_attention_create(cuda, error);
}

static int device_prepare(struct cuda_device *cuda, struct error *error) {
    cudaError_t status = cudaStreamCreate(&cuda->stream);
    if (status != cudaSuccess) {
        return error_set(error, FATHOM_UNSUPPORTED, "CUDA stream: %s", cudaGetErrorString(status));
    }
    int result = blas_open(cuda->stream, &cuda->blas, error);
    if (!result) result = cuda_recorder_create(cuda, error);
    return result ? result : scratch_create(cuda, error);
}

/* What libfathom_cuda.so is loaded for. */
extern "C" __attribute__((visibility("default"))) int
fathom_cuda_open(const struct device_options *options, struct device **device,
                 struct error *error) {
    struct cudaDeviceProp properties;
    int ordinal = 0;
    int result = ordinal_of(options->name ? options->name : "auto", &ordinal, error);
    if (!result) result = device_choose(ordinal, &properties, error);
    if (result) return result;
    if (options->max_rows > INT32_MAX / 2 || options->max_width > INT32_MAX / 2) {
        return error_set(error, FATHOM_NO_MEMORY, "steps of %zu rows of %zu are too large",
                         options->max_rows, options->max_width);
    }
    struct cuda_device *cuda = (struct cuda_device *)calloc(1, sizeof *cuda);
    if (!cuda) return error_set(error, FATHOM_NO_MEMORY, "no memory for a device");
    cuda->base.kernels = &cuda_kernels;
    cuda->ordinal = ordinal;
    cuda->max_rows = options->max_rows;
    cuda->max_width = options->max_width;
    cuda->shared_limit =
        properties.sharedMemPerBlockOptin - 1024; /* static variables, the system */
    snprintf(cuda->base.description, sizeof cuda->base.description, "cuda:%d %.80s", ordinal,
             properties.name);
    result = device_prepare(cuda, error);
    if (result) {
        cuda_close(&cuda->base);
        return result;
    }
    *device = &cuda->base;
    return FATHOM_OK;
}
