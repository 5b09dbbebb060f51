/* The CUDA backend's own types, and its operations (contracts: kernels.h). */
#ifndef FATHOM_CUDA_H
#define FATHOM_CUDA_H

#include "kernels/cuda/blas.h"
#include "kernels/cuda/platform.h"

#define WARP           32
#define THREADS        256  /* of a block that works on one row, at most */
#define SCORES_MAX     1024 /* gate directions */
#define GATE_PARTS_MAX 8    /* blocks that share the directions of one row */
#define DRAW_PARTS_MAX 64   /* of a vocabulary */
#define DRAW_ROWS_MAX  256  /* rows of logits that are drawn from at once */
#define NARROW_ROWS    256  /* up to here products over all rows cost no more than over some */
#define LENGTHS_MAX    8    /* of a list, for which a wide step has branches */

/* A rotation of q or k that was asked for and not yet done: whoever reads the buffer next does it
 * on the way, which saves a launch and a pass over memory. */
struct rotation {
    const int32_t *position, *indices; /* indices NULL: all rows */
    const int32_t *count;              /* of rows, on the device; NULL: `rows` */
    int rows;
    const float *table;
    int heads, head_size;
    enum qk_norm norm;
    float scale, epsilon;
    const float *gain; /* [head_size] of the norm, or NULL */
};

struct buffer {
    unsigned char *data; /* on the device, aligned to 256 bytes */
    size_t bytes;
    enum dtype type; /* of an activation: BF16 where the weights are, else F32 */
    bool is_rotated; /* `rotation` waits */
    struct rotation rotation;
};

struct matrix {
    unsigned char *data; /* [out, in] row-major; int8: int8.h */
    size_t out, in, bytes;
    enum dtype type;
};

/* Rows that an operation works on: at most `most`, and exactly *count when there is one. */
struct active {
    const int32_t *indices; /* NULL: row i is i */
    const int32_t *count;   /* on the device; NULL: `most` */
    int most;
};

/* What steps of like shape differ in; kernels of a recorded step find it in memory. */
enum { SHAPE_ROWS, SHAPE_SLOTS, SHAPE_BLOCKS, SHAPE_INTS };

struct recorder;

struct draw_state; /* scratch of a row of logits: draw.h */

struct cuda_device {
    struct device base;
    int ordinal;
    cudaStream_t stream;
    struct blas *blas;
    size_t max_rows, max_width, shared_limit;

    /* Rows of the state for matrix products, in the weights' type: all of them (16-bit types only),
     * and those of a list, packed. Which state and which list they belong to; NULL: neither. */
    enum dtype half;       /* of 16-bit weights: BF16 or F16 */
    uint16_t *copy;        /* [max_rows, max_width] */
    unsigned char *packed; /* [max_rows, max_width] in any of the weights' types */
    const struct buffer *copy_of;
    const struct buffer *packed_of, *packed_list;
    enum dtype packed_type;
    int packed_rows; /* at most */

    float *scores;    /* [max_rows, SCORES_MAX] of gate directions */
    int32_t *place;   /* [max_rows]: where a running row is in the list */
    int32_t *arrived; /* [max_rows]: blocks that are done with a row */
    struct draw_state *draw_states; /* [min(max_rows, DRAW_ROWS_MAX)] */
    float *partials;  /* of attention over parts of a context: attention.cu */
    size_t partials_bytes;
    int32_t *parts_arrived; /* [parts_arrived_count] */
    size_t parts_arrived_count;

    /* A product that waits for its twin: K for V, gate for up. */
    bool has_product;
    struct product product;

    /* The count of the list that was last read by the host. */
    const struct buffer *known_list;
    size_t known_count;

    /* While a step is recorded: bounds of its rows and of its blocks per slot, and in a branch of
     * the list's length. 0: none is. */
    size_t bucket, block_bucket, branch_rows;
    int32_t *shape; /* [SHAPE_INTS] */
    struct recorder *recorder;

    /* Pinned memory of the host: where reads land without a wait each, and where what was written
     * stays until it is copied; `sent` bytes of that are in use. */
    unsigned char *staging, *sending; /* [STAGING_BYTES], [SENDING_BYTES] */
    size_t sent;
};

/* Threads for a row of `width`: a function of the width alone, since sums over a row are made in an
 * order that depends on it. */
static inline unsigned threads_of(size_t width) {
    return width <= 128 ? 64 : width <= 512 ? 128 : THREADS;
}

/* The first call of every operation. CUDA's choice of a device is a thread's own, and the engine's
 * thread is not the one that loaded the model: it is made here. */
struct cuda_device *cuda_of(struct device *device);

/* Stops the process with a sentence: operations cannot fail, and after an error of the device
 * nothing that it says can be used. */
void cuda_must(cudaError_t status, const char *what);

/* More than 48 KiB of shared memory must be asked for. */
#define ALLOW_SHARED(kernel, bytes)                                                                \
    if ((bytes) > ((size_t)48 << 10))                                                              \
    cuda_must(                                                                                     \
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)),   \
        "shared memory of a block")

/* The start of every operation: a product that waits for a twin is issued. */
void cuda_flush(struct cuda_device *cuda);

struct active cuda_rows(struct cuda_device *cuda, const struct row_list *list, size_t rows);

/* Powers of two: one algorithm for all products of about the same size. */
static inline size_t bucket_of(size_t rows) {
    size_t bucket = 1;
    while (bucket < rows) bucket *= 2;
    return bucket;
}

/* What steps of about the same size are recorded for: up to it, more rows are no more work for a
 * product. Wide steps pay for each row. */
static inline size_t recorded_rows(const struct cuda_device *cuda, size_t rows) {
    size_t most = rows <= NARROW_ROWS ? bucket_of(rows) : (rows + 63) / 64 * 64;
    return most < cuda->max_rows ? most : cuda->max_rows;
}

int cuda_recorder_create(struct cuda_device *cuda, struct error *error);
void cuda_recorder_destroy(struct cuda_device *cuda);
bool cuda_step_begin(struct device *device, const struct step_shape *shape);
bool cuda_step_end(struct device *device);
bool cuda_branch_begin(struct device *device, const struct row_list *list, size_t attempt);
void cuda_branch_end(struct device *device);

/* What the next list sets where a step is recorded whose lists have branches. Of several it chooses
 * that of the least length which it has room in. */
struct condition {
    cudaGraphConditionalHandle handle;
    int length[LENGTHS_MAX]; /* ascending */
    int count;               /* 0: there is none */
};
void cuda_condition(struct cuda_device *cuda, int rows, struct condition *condition);

void *cuda_allocate(size_t bytes, struct error *error);
void cuda_send(struct cuda_device *cuda, void *to, const void *data, size_t size);
struct buffer *cuda_buffer_create(struct device *device, size_t bytes, struct error *error);
void cuda_buffer_destroy(struct device *device, struct buffer *buffer);
size_t cuda_row_count(struct device *device, const struct row_list *list);

struct matrix *cuda_matrix_create(struct device *device, const void *data, enum dtype type,
                                  size_t out, size_t in, enum dtype weights, struct error *error);
void cuda_matrix_destroy(struct device *device, struct matrix *matrix);
size_t cuda_matrix_bytes(const struct matrix *matrix);
void cuda_matmul(struct device *device, const struct matmul *matmuls, size_t count);

void cuda_nag_begin(struct device *device, const struct nag_begin *begin);
void cuda_nag_end_sublayer(struct device *device, const struct nag_end_sublayer *end);

void cuda_standard_begin(struct device *device, const struct standard_begin *begin);
void cuda_standard_end_sublayer(struct device *device, const struct standard_end_sublayer *end);
void cuda_add_bias(struct device *device, const struct add_bias *add);

void cuda_rope(struct device *device, const struct rope *rope);
void cuda_rotate_now(struct cuda_device *cuda, struct buffer *buffer);
size_t cuda_kv_block_bytes(const struct kv_layer *kv);
void cuda_kv_append(struct device *device, const struct kv_append *append);
int cuda_attention_create(struct cuda_device *cuda, struct error *error);
void cuda_attention(struct device *device, const struct attention *attention);

void cuda_activate(struct device *device, const struct activate *activate);
void cuda_scale_logits(struct device *device, const struct scale_logits *scale);
void cuda_rmsnorm(struct device *device, const struct rmsnorm *norm);
int cuda_draw_create(struct cuda_device *cuda, struct error *error);
void cuda_draw(struct device *device, const struct draw *draw);

#endif
