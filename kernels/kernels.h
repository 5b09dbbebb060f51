/* The arithmetic of a forward pass: one table of operations, filled once per backend.
 *
 * A backend (a `struct device`) owns its memory and its threads or stream. Outside kernels/ a
 * buffer is an opaque handle: the engine never sees a device pointer. Nothing here knows a
 * sequence, a tier's name or a request; rows, tables of block numbers and thresholds are all there
 * is.
 *
 * Order and time. A device is used by one thread at a time: the one that loads the model, then the
 * engine thread. Operations take effect in the order of issue. They may return before they are
 * done; `read` waits for everything issued before it. The struct of an operation is read when it is
 * issued, what it points to must stay until it is done. None of them allocates or fails: whatever
 * can fail is a `create`.
 *
 * Determinism. The result for a row is a function of that row's inputs alone: it does not depend on
 * the number of rows, on their order, on whether rows were gathered, or on the number of threads.
 * Every reduction (over a hidden dimension, over positions of the cache) has an order fixed by its
 * length.
 *
 * Names of sizes: rows (of this step), d = hidden size, C = gate directions, V = vocabulary,
 * H = query heads, G = key/value heads, D = head size, L = number of sub-layers (2 per block).
 */
#ifndef FATHOM_KERNELS_H
#define FATHOM_KERNELS_H

#include "base/base.h"

#define KV_BLOCK_TOKENS 16 /* positions in one block of the KV cache */

/* INT8 is a type of packed weights only: codes -127..127 in groups of INT8_GROUP inputs of one
 * output, each with a scale. */
enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_INT8 };
#define DTYPE_COUNT 4
#define INT8_GROUP  64

/* Bytes of one element, the scales of INT8 apart. */
static inline size_t dtype_size(enum dtype type) {
    return type == DTYPE_F32 ? 4 : type == DTYPE_INT8 ? 1 : 2;
}

/* "f32", "bf16", "f16", "int8" */
const char *dtype_name(enum dtype type);

struct buffer; /* memory of a device; zero-filled when created, large ones touched from the front */
struct matrix; /* a weight [out, in], packed for the device's matrix product */

/* Rows that take part in an operation, by index into the step's rows, ascending. */
struct row_list {
    struct buffer *indices; /* int32 [max rows] */
    struct buffer *count;   /* int32 [1] */
    size_t most;            /* what the host knows of the count: it is not above this, */
    bool is_exact;          /* or it is this */
};

/* What the host says about a step's rows; device buffers, written with `write` before the step. */
struct step_rows {
    size_t rows;                /* in use now, at most what the buffers were made for */
    struct buffer *token;       /* int32 [max rows], in [0, V) */
    struct buffer *position;    /* int32 [max rows], in [0, context) */
    struct buffer *tier;        /* int32 [max rows], row of `theta` */
    struct buffer *slot;        /* int32 [max rows], row of `block_table` */
    struct buffer *block_table; /* int32 [layers, slots, blocks_per_slot]: block of position / 16 */
    size_t blocks_per_slot;
    size_t slots, layer; /* which table is meant, where every layer has its own; else 0 */
};

/* One gate: mix = sum_c p_c * sigmoid(<w_c, r> + b_c), g = alpha * mix^beta. (models/nag.md section
 * 1) */
struct gate {
    struct buffer *directions; /* f32 [C, d] */
    struct buffer *bias;       /* f32 [C] */
    struct buffer *weight;     /* f32 [C]: softmax(mix_logits), computed at load */
    size_t count;              /* C, 1..1024 */
    float alpha, beta;
};

/* The decisions of a step. The row of sub-layer l starts at element l * max_rows. */
struct decisions {
    struct buffer *mix;      /* f32 [L, max rows] */
    struct buffer *run;      /* uint8 [L, max rows]: 1 = the row runs the sub-layer */
    struct row_list running; /* rows that run the sub-layer decided last */
    size_t max_rows;
    struct buffer *theta; /* f32 [tiers, L] */
    size_t sublayers;     /* L */
};

/* Where a layer caches only the rows that run it: they take the places of their slot in order,
 * those that earlier steps left. One that does not run gets the place before, or 0: it may be read,
 * and what is computed of it is ignored. */
struct kv_place {
    const struct buffer *taken; /* int32 [layers, slots] */
    size_t layer;
    struct buffer *place; /* out: int32 [rows] */
};

enum activation { ACTIVATION_SILU_GATED, ACTIVATION_RELU2, ACTIVATION_GELU };
enum qk_norm { QK_NORM_NONE, QK_NORM_BEFORE_ROPE, QK_NORM_AFTER_ROPE };

/* e = row of `table` for the token; r = e / rho, s = ln rho + log_gain, rho = ||e|| / sqrt(d). A
 * row of zeros gives r = 0, s = log_gain. Then the decision of sub-layer 0 by `next`. */
struct nag_begin {
    const struct step_rows *step;
    const struct buffer *table; /* [V, d] of table_type */
    enum dtype table_type;
    size_t width; /* d */
    float log_gain;
    struct buffer *r, *s; /* out: f32 [rows, d], f32 [rows] */
    const struct gate *next;
    const struct decisions *decisions;
    const struct kv_place *place; /* of the rows that run next, or NULL */
};

/* The end of sub-layer `sublayer`, one pass: centre f, remove its part along r, scale to RMS 1,
 * step by g, renormalise by the measured RMS, s += log1p(g^2)/2 for rows that ran; rows that did
 * not keep r and s bit for bit. Then, for every row, mix and decision of sub-layer + 1 and the new
 * list of running rows (skipped when `next` is NULL: the last sub-layer). g uses the mix stored for
 * `sublayer`. packed true:  f row i belongs to the i-th running row (body "gather", and "none" with
 * zero rows). packed false: f row i belongs to row i; rows with run = 0 are ignored (body "dense").
 */
struct nag_end_sublayer {
    const struct step_rows *step;
    size_t sublayer, width;
    const struct buffer *f; /* activation [rows or running, d] */
    bool packed;
    struct buffer *r, *s;
    const struct gate *gate, *next;
    const struct decisions *decisions;
    const struct kv_place *place; /* of the rows that run next, or NULL */
};

/* The state of a standard model, and what the branch of the next sub-layer reads of it:
 *   y = x / sqrt(mean(x^2) + epsilon) * gain */
struct prenorm {
    size_t width;              /* d */
    struct buffer *x, *y;      /* f32 [rows, d] both */
    const struct buffer *gain; /* f32 [d], of the next sub-layer; NULL behind the last: no y */
    float epsilon;
};

/* x = the table's row for each token, then the norm before sub-layer 0. */
struct standard_begin {
    const struct step_rows *step;
    const struct buffer *table; /* [V, d] of table_type */
    enum dtype table_type;
    struct prenorm norm;
};

/* x += f for every row, then the norm before the next sub-layer. */
struct standard_end_sublayer {
    const struct step_rows *step;
    const struct buffer *f; /* activation [rows, d] */
    struct prenorm norm;
};

/* x += bias, for each of `rows` rows. In place. */
struct add_bias {
    struct buffer *x;          /* activation [rows, width] */
    const struct buffer *bias; /* f32 [width] */
    size_t rows, width;
};

/* y = x W^T. With `gather`, row i of y comes from row gather[i] of x; else y has `rows` rows.
 * Products that are given together differ in w and y alone, and in the number of outputs. */
#define MATMULS_MAX 3
struct matmul {
    const struct buffer *x; /* activation, or r: f32 [rows, in] */
    const struct matrix *w; /* [out, in] */
    struct buffer *y;       /* activation [rows or gathered, out] */
    size_t rows;
    const struct row_list *gather; /* or NULL */
};

/* Q/K norm, RoPE on split halves (first half rotates with second), q and k multiplied by `scale`.
 * Row i of x is the step's row i, or running[i] with `list`. In place. */
struct rope {
    const struct step_rows *step;
    const struct row_list *list; /* or NULL: all rows */
    struct buffer *x;            /* activation [.., heads * D] */
    size_t heads, head_size;
    enum qk_norm norm; /* RMS over the head, epsilon under the root, times gain if there is one */
    float scale;
    const struct buffer
        *table;                /* f32 [context, D]: cos in the first D/2 columns, sin in the rest */
    const struct buffer *gain; /* f32 [D], or NULL */
    float epsilon;
};

/* One layer's share of the paged cache. `arena` is the whole cache; the device chooses the layout
 * inside a block. */
struct kv_layer {
    struct buffer *arena;
    size_t layer, layers;
    size_t kv_heads, head_size;
    enum dtype type;
};

/* Stores K and V of rows at their position. With `list`, row i of k and v belongs to row
 * list[i]. */
struct kv_append {
    const struct step_rows *step;
    const struct kv_layer *kv;
    const struct buffer *k, *v;  /* activation [.., G * D] */
    const struct row_list *list; /* or NULL: all rows */
};

/* Softmax attention of each listed row over positions 0..its own, scores scaled by 1/sqrt(D). Query
 * head h reads key/value head h / (H / G). Row i of q and out is the step's row i, or list[i]. */
struct attention {
    const struct step_rows *step;
    const struct kv_layer *kv;
    const struct buffer *q;
    struct buffer *out; /* activation [.., H * D] */
    size_t heads;
    const struct row_list *list; /* or NULL: all rows */
};

/* out = silu(gate) * up, or relu(up)^2, or gelu(up) (erf form); `gate` NULL when ungated. May be in
 * place on up. */
struct activate {
    const struct buffer *gate, *up;
    struct buffer *out; /* activation [rows, width] */
    size_t rows, width;
    enum activation kind;
    const struct row_list *list; /* packed rows of this list: no more than it has. NULL: `rows` */
};

/* x row i of logits *= exp(s[list[i]]) / d: the cosine_scale head. */
struct scale_logits {
    struct buffer *logits; /* f32 [listed, V] */
    const struct buffer *s;
    const struct row_list *list;
    size_t vocab, width;
};

/* y row i = x[list[i]] / rms(x[list[i]]) * gain, epsilon under the root. */
struct rmsnorm {
    const struct buffer *x, *gain; /* f32 [rows, d], f32 [d] */
    struct buffer *y;              /* activation [listed, d] */
    const struct row_list *list;
    size_t width;
    float epsilon;
};

#define DRAW_BEST_MAX 20 /* tokens told beside the one that was drawn */

enum draw_kind { DRAW_TOKEN, DRAW_SCORE, DRAW_NOTHING };

/* What is asked of one row of logits; terms and ranges of struct sampling (engine.h). All zero: the
 * best token, and nothing told. */
struct draw_row {
    double uniform; /* where the draw falls, in [0, 1) */
    int32_t kind;   /* DRAW_SCORE: `token` is given; DRAW_NOTHING: the row is left out */
    int32_t token;
    float temperature; /* 0: the best, the lowest id among equals */
    float top_p, min_p;
    int32_t top_k;
    float repetition, presence, frequency;
    int32_t is_told, best_count; /* logprobs are wanted, and those of so many best */
    int32_t changes, bias_count, used_count, ban_count; /* the first of its changes; of each kind */
};

/* One token's logit changes; of DRAW_TOKEN only. In this order: biases, penalties, bans. */
struct draw_change {
    int32_t token; /* in [0, V); once among the used */
    union {
        float bias;
        uint32_t generated; /* times; that it was used at all is what `repetition` is for */
    } by;
};

/* What comes back of a row. logprob of a logit = logit - best - ln(sum / WEIGHT_UNIT). */
struct draw_outcome {
    int32_t token; /* -1: none is possible. DRAW_SCORE: the given one */
    /* Of rows that are told, after changes: */
    float logit, best;
    uint64_t sum; /* of all weights, at temperature 1 */
};

struct draw_best {
    int32_t token; /* descending by logit, ties by lower id */
    float logit;
};

/* The next token of each listed row, by the rules of engine/sampler.h and in whole numbers
 * (weight.h): the same token on every device. What is no number is -inf, +inf the largest float.
 * Logits are changed in place. */
struct draw {
    struct buffer *logits; /* f32 [listed, V] */
    const struct row_list *list;
    size_t vocab;
    bool is_plain; /* no row has changes, or a cut by top_k, top_p or min_p: less is issued */
    const struct buffer *asked;   /* draw_row [listed] */
    const struct buffer *changes; /* draw_change [..] */
    struct buffer *outcome;       /* out: draw_outcome [listed] */
    struct buffer *best; /* out: draw_best [listed, DRAW_BEST_MAX], min(best_count, V) of each */
};

/* Rows of `width` bytes, `stride` apart in the buffer, from `offset` on, as on the host. */
struct copy {
    const struct buffer *from;
    size_t offset, stride, width, rows;
    void *to;
};

/* All that operations of a step follow from, besides what is in buffers. */
struct step_shape {
    const struct step_rows *step;
    size_t logits;  /* rows whose logits are wanted */
    bool is_packed; /* sub-layers run packed, each in a branch; else all rows run */
    bool is_drawn;  /* tokens are drawn from the logits, */
    bool is_plain;  /* as struct draw has it */
    const struct buffer *arena;
};

struct device;

/* One backend. Operations take rows from `step->rows` or from the list they are given. */
struct kernels {
    const char *name;                     /* "cpu", "cuda" */
    void (*close)(struct device *device); /* after all that was made on it is destroyed */

    /* Memory. `create` returns NULL and fills error: FATHOM_NO_MEMORY. write/read copy `size` bytes
     * at byte `offset`, inside the buffer; `data` may be used again when they return. */
    struct buffer *(*buffer_create)(struct device *, size_t bytes, struct error *);
    void (*buffer_destroy)(struct device *, struct buffer *); /* NULL is allowed */
    size_t (*buffer_bytes)(const struct buffer *);
    void (*write)(struct device *, struct buffer *, size_t offset, const void *data, size_t size);
    void (*read)(struct device *, const struct buffer *, size_t offset, void *data, size_t size);
    /* Several reads that wait for the device once. */
    void (*read_all)(struct device *, const struct copy *, size_t count);

    /* Where a buffer's bytes lie, to be looked at between a `read` and the next operation: for
     * results too large to copy. NULL on a device whose memory the host cannot see. */
    void *(*look)(const struct buffer *);

    /* Work of the host, on the threads that the device computes with: body(context, first, end) for
     * parts of 0..items-1, several at once, and waits; the body calls nothing of the device. `cost`
     * is a rough price of one item, in operations on 16 floats. NULL where there are no such
     * threads. */
    void (*share_out)(struct device *, size_t items, size_t cost,
                      void (*body)(void *context, size_t first, size_t end), void *context);

    /* Bytes that may go to a KV cache where nobody says how many: what is free, less a reserve.
     * NULL where memory is the host's. */
    size_t (*memory_spare)(const struct device *);

    /* Activations: [rows, width] in the type in which the device computes with such weights (as in
     * matrix_create), or f32 from buffer_create; read_activation converts. Logits are always
     * f32. */
    struct buffer *(*activation_create)(struct device *, size_t rows, size_t width,
                                        enum dtype weights, struct error *);
    void (*read_activation)(struct device *, const struct buffer *, size_t first, size_t count,
                            float *out);

    /* Packs a row-major [out, in] weight of `type` (not INT8) for matmul, as `weights`. Sums are
     * fp32. With BF16 the other factor is rounded to bf16 too (nearest even). With F16 it is not on
     * a CPU, and is to f16 elsewhere (infinite beyond 65504); a weight beyond 65504 is refused.
     * With INT8 both factors become codes times a scale per group, sums within a group are exact
     * integers, and groups are added in ascending order: the same bits on every instruction set
     * and device. `data` may be freed after. NULL: FATHOM_INVALID for a shape or a weight,
     * FATHOM_UNSUPPORTED for a type that the device does not have, FATHOM_NO_MEMORY. */
    struct matrix *(*matrix_create)(struct device *, const void *data, enum dtype type, size_t out,
                                    size_t in, enum dtype weights, struct error *);
    void (*matrix_destroy)(struct device *, struct matrix *); /* NULL is allowed */
    size_t (*matrix_bytes)(const struct matrix *);

    /* The time, in nanoseconds of a clock that steps are timed by, when everything issued is done.
     * NULL where the work is this thread's, or is shared with it: the host's clocks will do. */
    uint64_t (*finish_ns)(struct device *);

    /* device_preferred_weights. */
    enum dtype (*preferred_weights)(const struct device *, enum dtype type);

    /* Bytes that one block (KV_BLOCK_TOKENS positions of all layers, K and V) takes in the
     * arena. */
    size_t (*kv_block_bytes)(const struct kv_layer *);

    /* Rows in a list: exact where the host can know it at once, an upper bound elsewhere. */
    size_t (*row_count)(struct device *, const struct row_list *);
    bool lists_are_packed; /* a list comes with its rows side by side: gathering costs nothing */

    /* A device may record the operations of a step, and run them for all steps of like shape. NULL,
     * all four, on one that does not. step_begin: false: a recorded step runs, nothing is to be
     * issued; true: the operations up to step_end are to be issued, and must follow from the shape.
     * step_end: false: they could not be recorded; they are to be issued once more.
     * Operations that matter only if somebody is on the list are issued between branch_begin and
     * branch_end, for attempt = 0, 1, .. while branch_begin is true: a device may record them for
     * several lengths of the list. */
    bool (*step_begin)(struct device *, const struct step_shape *);
    bool (*step_end)(struct device *);
    bool (*branch_begin)(struct device *, const struct row_list *, size_t attempt);
    void (*branch_end)(struct device *);

    void (*nag_begin)(struct device *, const struct nag_begin *);
    void (*nag_end_sublayer)(struct device *, const struct nag_end_sublayer *);
    void (*matmul)(struct device *, const struct matmul *, size_t count); /* 1..MATMULS_MAX */
    void (*rope)(struct device *, const struct rope *);
    void (*kv_append)(struct device *, const struct kv_append *);
    void (*attention)(struct device *, const struct attention *);
    void (*activate)(struct device *, const struct activate *);
    void (*scale_logits)(struct device *, const struct scale_logits *);
    void (*rmsnorm)(struct device *, const struct rmsnorm *);

    void (*draw)(struct device *, const struct draw *); /* NULL: the host draws */

    /* Standard models. */
    void (*standard_begin)(struct device *, const struct standard_begin *);
    void (*standard_end_sublayer)(struct device *, const struct standard_end_sublayer *);
    void (*add_bias)(struct device *, const struct add_bias *);
};

/* Every backend's device begins with this. */
struct device {
    const struct kernels *kernels;
    char isa[16];         /* "avx512bf16" */
    char description[96]; /* "cpu avx512bf16, 2 threads" */
};

struct device_options {
    const char *name; /* "auto", "cpu", "cuda" or "cuda:N"; NULL means auto */
    size_t threads;   /* CPU: 1..64; 0 means one per processor that this process may use */
    const char *isa;  /* CPU: "avx512bf16", "avx512vnni", "avx512", "avx2", "portable"; NULL means
                         the best there is */
    size_t max_rows;  /* rows of the largest step; scratch is made for it */
    size_t max_width; /* widest input of a matrix product, in elements */
};

/* Opens a device; close it with device->kernels->close. "auto" is the first CUDA device where the
 * backend, its driver and a device are there, else the CPU. The CUDA backend is a library of its
 * own, libfathom_cuda.so, looked for beside the program and where the system looks; the
 * environment's FATHOM_CUDA_LIBRARY names another file. FATHOM_INVALID: the name is none, or a
 * number is out of its range. FATHOM_UNSUPPORTED: this machine or build has no such device or
 * instruction set; the error says what there is. Any thread. */
int device_open(const struct device_options *options, struct device **device, struct error *error);

/* The type in which the device multiplies fastest by weights that a file has as `type`, without
 * losing any of their bits: `type` itself where the halved memory traffic pays, else F32. */
enum dtype device_preferred_weights(const struct device *device, enum dtype type);

#endif
