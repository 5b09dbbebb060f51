/* The ordinary pre-norm residual: x + f, a norm with gain before every sub-layer and before the
 * head. Nothing is decided: every row runs every sub-layer, whatever its tier. */
#include "engine/residual.h"
#include "engine/weight_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct standard {
    struct residual residual;
    struct device *device;
    size_t width, vocab, sublayers, max_rows;
    float epsilon;
    enum dtype table_type;
    struct buffer *table; /* [V, d] */
    struct matrix *head;
    struct buffer **gains;     /* [sublayers + 1] of [d]; the last is the final norm's */
    struct buffer *x, *normed; /* f32 [rows, d] */
    struct buffer *final;      /* [rows, d]: what the head reads */
};

static struct standard *as_standard(const struct residual *residual) {
    return (struct standard *)(uintptr_t)residual;
}

/* ---- Loading --------------------------------------------------------------------------------- */

static int load_weights(struct standard *standard, const struct checkpoint *checkpoint,
                        enum dtype weights, struct error *error) {
    static const char table[] = "model.embed_tokens.weight";
    struct device *device = standard->device;
    size_t width = standard->width, vocab = standard->vocab;
    standard->table = weight_load_table(device, checkpoint, table, vocab, width, weights,
                                        &standard->table_type, error);
    if (!standard->table) return error->code;
    const char *head = checkpoint_config(checkpoint)->tied_head ? table : "lm_head.weight";
    standard->head = weight_load_matrix(device, checkpoint, head, vocab, width, weights, error);
    return standard->head ? 0 : error->code;
}

static int load_gains(struct standard *standard, const struct checkpoint *checkpoint,
                      struct error *error) {
    standard->gains = calloc(standard->sublayers + 1, sizeof *standard->gains);
    if (!standard->gains) return error_set(error, FATHOM_NO_MEMORY, "no memory for the norms");
    for (size_t l = 0; l <= standard->sublayers; l++) {
        char name[80];
        snprintf(name, sizeof name, "model.layers.%zu.%s_layernorm.weight", l / 2,
                 l % 2 ? "post_attention" : "input");
        if (l == standard->sublayers) snprintf(name, sizeof name, "model.norm.weight");
        standard->gains[l] =
            weight_load_vector(standard->device, checkpoint, name, standard->width, 0, error);
        if (!standard->gains[l]) return error->code;
    }
    return 0;
}

static int create_state(struct standard *standard, enum dtype weights, struct error *error) {
    const struct kernels *kernels = standard->device->kernels;
    struct device *device = standard->device;
    size_t rows = standard->max_rows, bytes = rows * standard->width * sizeof(float);
    standard->x = kernels->buffer_create(device, bytes, error);
    if (!standard->x) return error->code;
    standard->normed = kernels->buffer_create(device, bytes, error);
    if (!standard->normed) return error->code;
    standard->final = kernels->activation_create(device, rows, standard->width, weights, error);
    return standard->final ? 0 : error->code;
}

static void standard_destroy(struct residual *residual) {
    if (!residual) return;
    struct standard *standard = as_standard(residual);
    const struct kernels *kernels = standard->device->kernels;
    struct buffer *buffers[] = {standard->table, standard->x, standard->normed, standard->final};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        kernels->buffer_destroy(standard->device, buffers[i]);
    for (size_t l = 0; standard->gains && l <= standard->sublayers; l++)
        kernels->buffer_destroy(standard->device, standard->gains[l]);
    kernels->matrix_destroy(standard->device, standard->head);
    free(standard->gains);
    free(standard);
}

static int standard_create(struct device *device, const struct checkpoint *checkpoint,
                           size_t max_rows, enum dtype weights, struct residual **residual,
                           struct error *error) {
    const struct config *config = checkpoint_config(checkpoint);
    struct standard *standard = calloc(1, sizeof *standard);
    if (!standard) return error_set(error, FATHOM_NO_MEMORY, "no memory for the residual");
    standard->residual.kind = &residual_standard;
    standard->device = device;
    standard->width = config->hidden;
    standard->vocab = config->vocab;
    standard->sublayers = 2 * config->blocks;
    standard->max_rows = max_rows;
    standard->epsilon = config->norm_epsilon;
    int result = load_weights(standard, checkpoint, weights, error);
    if (result == 0) result = load_gains(standard, checkpoint, error);
    if (result == 0) result = create_state(standard, weights, error);
    if (result != 0) {
        standard_destroy(&standard->residual);
        return result;
    }
    *residual = &standard->residual;
    return 0;
}

/* ---- A step ---------------------------------------------------------------------------------- */

/* The norm before sub-layer `l`; there is none behind the last, since only rows whose logits are
 * wanted need the final one. */
static struct prenorm norm_before(const struct standard *standard, size_t l) {
    return (struct prenorm){
        .width = standard->width,
        .x = standard->x,
        .y = standard->normed,
        .gain = l < standard->sublayers ? standard->gains[l] : NULL,
        .epsilon = standard->epsilon,
    };
}

static void standard_begin_token(struct residual *residual, const struct step_rows *step,
                                 const struct kv_place *place) {
    (void)place; /* every row runs: places are positions */
    struct standard *standard = as_standard(residual);
    struct standard_begin begin = {
        .step = step,
        .table = standard->table,
        .table_type = standard->table_type,
        .norm = norm_before(standard, 0),
    };
    standard->device->kernels->standard_begin(standard->device, &begin);
}

static const struct buffer *standard_input(const struct residual *residual) {
    return as_standard(residual)->normed;
}

static const struct row_list *standard_decide(const struct residual *residual) {
    (void)residual;
    return NULL;
}

static void standard_end(struct residual *residual, const struct step_rows *step, size_t sublayer,
                         const struct buffer *f, bool packed, const struct kv_place *place) {
    (void)packed;
    (void)place;
    struct standard *standard = as_standard(residual);
    struct standard_end_sublayer end = {
        .step = step, .f = f, .norm = norm_before(standard, sublayer + 1)};
    standard->device->kernels->standard_end_sublayer(standard->device, &end);
}

static void standard_finish(struct residual *residual, const struct step_rows *step,
                            const struct row_list *wanted, struct buffer *logits) {
    (void)step;
    struct standard *standard = as_standard(residual);
    struct norm_head head = {standard->gains[standard->sublayers], standard->final, standard->head,
                             standard->width, standard->epsilon};
    norm_head_run(standard->device, &head, standard->x, wanted, logits);
}

/* A mix of 1 is what a gate gives that skips at no threshold below it; there is no log-norm. */
static size_t standard_list_results(struct residual *residual, size_t rows, uint8_t *run,
                                    float *mix, float *log_norm,
                                    struct copy copies[RESULT_COPIES_MAX]) {
    (void)copies;
    const struct standard *standard = as_standard(residual);
    for (size_t l = 0; l < standard->sublayers; l++) {
        memset(run + l * standard->max_rows, 1, rows);
        for (size_t row = 0; row < rows; row++) mix[l * standard->max_rows + row] = 1;
    }
    memset(log_norm, 0, rows * sizeof *log_norm);
    return 0;
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static size_t standard_weight_bytes(const struct residual *residual) {
    const struct standard *standard = as_standard(residual);
    const struct kernels *kernels = standard->device->kernels;
    size_t bytes = kernels->buffer_bytes(standard->table) + kernels->matrix_bytes(standard->head);
    for (size_t l = 0; l <= standard->sublayers; l++)
        bytes += kernels->buffer_bytes(standard->gains[l]);
    return bytes;
}

static size_t standard_scratch_bytes(const struct residual *residual) {
    const struct standard *standard = as_standard(residual);
    const struct kernels *kernels = standard->device->kernels;
    return kernels->buffer_bytes(standard->x) + kernels->buffer_bytes(standard->normed) +
           kernels->buffer_bytes(standard->final);
}

const struct residual_kind residual_standard = {
    .name = "standard",
    .create = standard_create,
    .destroy = standard_destroy,
    .begin_token = standard_begin_token,
    .input = standard_input,
    .decide = standard_decide,
    .end_sublayer = standard_end,
    .finish = standard_finish,
    .list_results = standard_list_results,
    .weight_bytes = standard_weight_bytes,
    .scratch_bytes = standard_scratch_bytes,
};
