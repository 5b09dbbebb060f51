/* How a token's state passes through the sub-layers. NAG and the standard pre-norm residual are its
 * members; layer code assumes none.
 *
 * A step goes: begin_token, then for every sub-layer in order: read `input` for the rows in
 * `running`, compute the branch, end_sublayer; at last `finish`. Engine thread only; nothing here
 * allocates after `create`.
 */
#ifndef FATHOM_RESIDUAL_H
#define FATHOM_RESIDUAL_H

#include "engine/checkpoint.h"
#include "kernels/kernels.h"

/* Rows of the theta table behind those of tiers: to measure what sub-layers cost. */
#define TIERS_OF_MEASURING 2
#define RESULT_COPIES_MAX  3

struct residual;

struct residual_kind {
    const char *name; /* as in model_info.residual */

    int (*create)(struct device *device, const struct checkpoint *checkpoint, size_t max_rows,
                  enum dtype weights, struct residual **residual, struct error *error);
    void (*destroy)(struct residual *residual);

    /* The state of every row of the step from its token, and which rows run sub-layer 0. `place`,
     * here and below: of those that run next in a cache of their own, or NULL. */
    void (*begin_token)(struct residual *residual, const struct step_rows *step,
                        const struct kv_place *place);

    /* What the branch of the coming sub-layer reads: f32 [rows, hidden]. */
    const struct buffer *(*input)(const struct residual *residual);

    /* The rows that run the coming sub-layer: decided when the one before ended. NULL where nothing
     * is ever skipped: all of them. */
    const struct row_list *(*decide)(const struct residual *residual);

    /* Adds the branch's output f to the rows that ran (packed: row i of f is the i-th running row;
     * else row i is the step's row i), then decides the next sub-layer for all rows. */
    void (*end_sublayer)(struct residual *residual, const struct step_rows *step, size_t sublayer,
                         const struct buffer *f, bool packed, const struct kv_place *place);

    /* Logits of the wanted rows, [wanted, vocab], after the last sub-layer. */
    void (*finish)(struct residual *residual, const struct step_rows *step,
                   const struct row_list *wanted, struct buffer *logits);

    /* Host copies of the step's decisions, [sublayers, max_rows], and of the log-norms [rows]:
     * writes what needs no device, lists the other reads, and returns how many those are. */
    size_t (*list_results)(struct residual *residual, size_t rows, uint8_t *run, float *mix,
                           float *log_norm, struct copy copies[RESULT_COPIES_MAX]);

    /* The next three are NULL, all of them, where nothing is ever skipped.
     *
     * |g| of a sub-layer as a function of mix, and the threshold on mix for |g| < size: what
     * calibration needs. */
    double (*step_size)(const struct residual *residual, size_t sublayer, double mix);
    double (*threshold)(const struct residual *residual, size_t sublayer, double size);

    /* Replaces the thresholds of one tier, or of one of TIERS_OF_MEASURING behind them: theta
     * [sublayers]. */
    void (*set_theta)(struct residual *residual, size_t tier, const float *theta);

    size_t (*weight_bytes)(const struct residual *residual);
    size_t (*scratch_bytes)(const struct residual *residual);
};

/* Every kind's state begins with this. */
struct residual {
    const struct residual_kind *kind;
};

extern const struct residual_kind residual_nag, residual_standard;

/* The head of a model that normalises its last states: logits = rmsnorm(x) W^T. */
struct norm_head {
    const struct buffer *gain;   /* f32 [hidden] */
    struct buffer *normed;       /* activation [max rows, hidden], scratch */
    const struct matrix *matrix; /* W: [vocab, hidden] */
    size_t width;                /* hidden */
    float epsilon;               /* under the root */
};

/* For `finish`: x f32 [rows, hidden], logits f32 [wanted, vocab]. */
void norm_head_run(struct device *device, const struct norm_head *head, const struct buffer *x,
                   const struct row_list *wanted, struct buffer *logits);

/* Sub-layers can be skipped at all. */
static inline bool residual_skips(const struct residual *residual) {
    return residual->kind->set_theta != NULL;
}

#endif
