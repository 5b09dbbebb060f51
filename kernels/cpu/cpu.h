/* The CPU backend's own types, and its operations (contracts: kernels.h). */
#ifndef FATHOM_CPU_H
#define FATHOM_CPU_H

#include "kernels/cpu/pool.h"
#include "kernels/cpu/primitives.h"
#include "kernels/kernels.h"

struct buffer {
    unsigned char *data; /* aligned to 64 bytes */
    size_t bytes;
    struct slab *slab;       /* whose part data is, or NULL */
    size_t mapped;           /* bytes of its own mapping; 0 without a slab: data is malloc'd */
    struct toucher *toucher; /* brings in the pages of a large mapping; NULL: done, or none */
};

/* Panels of 16 outputs; the last one is filled up with zeros. Layout: struct gemm. */
struct matrix {
    struct buffer *panels;
    uint16_t *scales; /* of int8, in the same buffer */
    size_t out, in, panel_count, steps;
    enum dtype type;
};

struct cpu_device {
    struct device base;
    const struct primitives *primitives;
    struct pool *pool;
    size_t max_rows, max_width;
    struct slab *slab;     /* that buffers are being put into; NULL: none yet */
    struct buffer *packed; /* the rows of x of a matrix product: gathered, rounded to pairs */
};

int cpu_open(const struct device_options *options, struct device **device, struct error *error);
enum dtype cpu_preferred_weights(const struct device *device, enum dtype type);

struct buffer *cpu_buffer_create(struct device *device, size_t bytes, struct error *error);
/* Zeros too. For packed weights: a model's many matrices of a few megabytes share mappings. */
struct buffer *cpu_panels_create(struct device *device, size_t bytes, struct error *error);
void cpu_buffer_destroy(struct device *device, struct buffer *buffer);

struct matrix *cpu_matrix_create(struct device *device, const void *data, enum dtype type,
                                 size_t out, size_t in, enum dtype weights, struct error *error);
void cpu_matrix_destroy(struct device *device, struct matrix *matrix);
size_t cpu_matrix_bytes(const struct matrix *matrix);
size_t cpu_kv_block_bytes(const struct kv_layer *kv);

void cpu_nag_begin(struct device *device, const struct nag_begin *begin);
void cpu_nag_end_sublayer(struct device *device, const struct nag_end_sublayer *end);
void cpu_matmul(struct device *device, const struct matmul *matmuls, size_t count);
void cpu_rope(struct device *device, const struct rope *rope);
void cpu_kv_append(struct device *device, const struct kv_append *append);
void cpu_attention(struct device *device, const struct attention *attention);
void cpu_activate(struct device *device, const struct activate *activate);
void cpu_scale_logits(struct device *device, const struct scale_logits *scale);
void cpu_rmsnorm(struct device *device, const struct rmsnorm *norm);
void cpu_standard_begin(struct device *device, const struct standard_begin *begin);
void cpu_standard_end_sublayer(struct device *device, const struct standard_end_sublayer *end);
void cpu_add_bias(struct device *device, const struct add_bias *add);

static inline struct cpu_device *cpu_of(struct device *device) {
    return (struct cpu_device *)device;
}

static inline float *buffer_f32(const struct buffer *buffer) {
    return (float *)buffer->data;
}
static inline int32_t *buffer_i32(const struct buffer *buffer) {
    return (int32_t *)buffer->data;
}

/* The rows of an operation: those of a list, or 0..count-1. */
struct rows {
    const int32_t *indices; /* NULL: row i is i */
    size_t count;
};

static inline struct rows rows_of(const struct row_list *list, size_t all) {
    if (!list) return (struct rows){NULL, all};
    return (struct rows){buffer_i32(list->indices), (size_t)buffer_i32(list->count)[0]};
}

static inline size_t rows_at(const struct rows *rows, size_t i) {
    return rows->indices ? (size_t)rows->indices[i] : i;
}

#endif
