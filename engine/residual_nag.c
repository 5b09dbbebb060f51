/* The norm-agnostic residual: a direction r of unit RMS, a log-norm s, and a gate before every
 * sub-layer. The formulas are in kernels.h and models/nag.md section 1; here is what a checkpoint
 * stores of them. */
#include "engine/residual.h"
#include "engine/weight_load.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* mix is below 1, so a threshold above it means "never runs"; kept finite so that it can be
 * stored. */
#define THETA_NEVER 2.0

#define RMS_EPSILON 1e-6f /* of the rmsnorm head, under the root */

struct nag {
    struct residual residual;
    struct device *device;
    size_t width, vocab, sublayers, max_rows;
    enum nag_head head_kind;
    enum dtype table_type;
    float log_gain;
    struct buffer *table, *final_gain; /* [V, d]; [d] for the rmsnorm head */
    struct matrix *head;
    struct gate *gates; /* [sublayers] */
    struct buffer *r, *s;
    struct buffer *final; /* [rows, d]: normalised states for the rmsnorm head */
    struct decisions decisions;
};

static struct nag *as_nag(const struct residual *residual) {
    return (struct nag *)(uintptr_t)residual;
}

/* ---- Loading --------------------------------------------------------------------------------- */

static int load_scalar(const struct checkpoint *checkpoint, const char *name, float *value,
                       struct error *error) {
    struct tensor tensor;
    int result = checkpoint_tensor(checkpoint, name, 1, 0, &tensor, error);
    return result != 0 ? result : tensor_to_f32(&tensor, value, error);
}

/* softmax(mix_logits) does not depend on the token: computed once. */
static struct buffer *load_mix_weight(struct nag *nag, const struct checkpoint *checkpoint,
                                      const char *name, size_t count, struct error *error) {
    struct tensor tensor;
    if (checkpoint_tensor(checkpoint, name, count, 0, &tensor, error) != 0) return NULL;
    float *p = malloc(count * sizeof *p);
    struct buffer *buffer = NULL;
    if (!p) {
        error_set(error, FATHOM_NO_MEMORY, "no memory for tensor '%s'", name);
    } else if (tensor_to_f32(&tensor, p, error) == 0) {
        double top = -INFINITY, sum = 0;
        for (size_t c = 0; c < count; c++) top = fmax(top, p[c]);
        for (size_t c = 0; c < count; c++) sum += exp(p[c] - top);
        for (size_t c = 0; c < count; c++) p[c] = (float)(exp(p[c] - top) / sum);
        buffer = nag->device->kernels->buffer_create(nag->device, count * sizeof *p, error);
        if (buffer) nag->device->kernels->write(nag->device, buffer, 0, p, count * sizeof *p);
    }
    free(p);
    return buffer;
}

static int load_gate(struct nag *nag, const struct checkpoint *checkpoint, size_t sublayer,
                     size_t directions, struct error *error) {
    struct gate *gate = &nag->gates[sublayer];
    char prefix[64], name[128];
    snprintf(prefix, sizeof prefix, "model.layers.%zu.%s_nag", sublayer / 2,
             sublayer % 2 ? "mlp" : "attn");
    gate->count = directions;
    snprintf(name, sizeof name, "%s.directions.weight", prefix);
    if (!(gate->directions =
              weight_load_vector(nag->device, checkpoint, name, directions, nag->width, error)))
        return error->code;
    snprintf(name, sizeof name, "%s.directions.bias", prefix);
    if (!(gate->bias = weight_load_vector(nag->device, checkpoint, name, directions, 0, error)))
        return error->code;
    snprintf(name, sizeof name, "%s.mix_logits", prefix);
    if (!(gate->weight = load_mix_weight(nag, checkpoint, name, directions, error)))
        return error->code;
    snprintf(name, sizeof name, "%s.alpha", prefix);
    int result = load_scalar(checkpoint, name, &gate->alpha, error);
    if (result != 0) return result;
    snprintf(name, sizeof name, "%s.beta", prefix);
    if ((result = load_scalar(checkpoint, name, &gate->beta, error)) != 0) return result;
    if (!(gate->beta > 0)) {
        return error_set(error, FATHOM_INVALID, "tensor '%s' is %g; beta must be positive", name,
                         (double)gate->beta);
    }
    return 0;
}

static int load_table(struct nag *nag, const struct checkpoint *checkpoint, enum dtype weights,
                      struct error *error) {
    nag->table = weight_load_table(nag->device, checkpoint, "model.embed_tokens.weight", nag->vocab,
                                   nag->width, weights, &nag->table_type, error);
    if (!nag->table) return error->code;
    return load_scalar(checkpoint, "model.log_gain", &nag->log_gain, error);
}

static int load_head(struct nag *nag, const struct checkpoint *checkpoint, enum dtype weights,
                     struct error *error) {
    nag->head = weight_load_matrix(nag->device, checkpoint, "lm_head.weight", nag->vocab,
                                   nag->width, weights, error);
    if (!nag->head) return error->code;
    if (nag->head_kind != NAG_HEAD_RMSNORM) return 0;
    nag->final_gain =
        weight_load_vector(nag->device, checkpoint, "model.norm.weight", nag->width, 0, error);
    return nag->final_gain ? 0 : error->code;
}

static int create_state(struct nag *nag, enum dtype weights, struct error *error) {
    const struct kernels *kernels = nag->device->kernels;
    struct device *device = nag->device;
    struct decisions *decisions = &nag->decisions;
    size_t rows = nag->max_rows, sublayers = nag->sublayers;
    decisions->max_rows = rows;
    decisions->sublayers = sublayers;
    const struct {
        struct buffer **buffer;
        size_t bytes;
    } parts[] = {
        {&nag->r, rows * nag->width * sizeof(float)},
        {&nag->s, rows * sizeof(float)},
        {&decisions->mix, sublayers * rows * sizeof(float)},
        {&decisions->run, sublayers * rows},
        {&decisions->running.indices, rows * sizeof(int32_t)},
        {&decisions->running.count, sizeof(int32_t)},
        {&decisions->theta, (TIERS_MAX + TIERS_OF_MEASURING) * sublayers * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!(*parts[i].buffer = kernels->buffer_create(device, parts[i].bytes, error)))
            return error->code;
    }
    if (nag->head_kind == NAG_HEAD_RMSNORM) {
        nag->final = kernels->activation_create(device, rows, nag->width, weights, error);
        if (!nag->final) return error->code;
    }
    return 0;
}

static void nag_set_theta(struct residual *residual, size_t tier, const float *theta) {
    struct nag *nag = as_nag(residual);
    size_t bytes = nag->sublayers * sizeof *theta;
    nag->device->kernels->write(nag->device, nag->decisions.theta, tier * bytes, theta, bytes);
}

static void nag_destroy(struct residual *residual) {
    if (!residual) return;
    struct nag *nag = as_nag(residual);
    const struct kernels *kernels = nag->device->kernels;
    for (size_t l = 0; nag->gates && l < nag->sublayers; l++) {
        kernels->buffer_destroy(nag->device, nag->gates[l].directions);
        kernels->buffer_destroy(nag->device, nag->gates[l].bias);
        kernels->buffer_destroy(nag->device, nag->gates[l].weight);
    }
    struct decisions *decisions = &nag->decisions;
    struct buffer *buffers[] = {nag->table,
                                nag->final_gain,
                                nag->r,
                                nag->s,
                                nag->final,
                                decisions->mix,
                                decisions->run,
                                decisions->running.indices,
                                decisions->running.count,
                                decisions->theta};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        kernels->buffer_destroy(nag->device, buffers[i]);
    kernels->matrix_destroy(nag->device, nag->head);
    free(nag->gates);
    free(nag);
}

static int nag_create(struct device *device, const struct checkpoint *checkpoint, size_t max_rows,
                      enum dtype weights, struct residual **residual, struct error *error) {
    const struct config *config = checkpoint_config(checkpoint);
    const struct depth_table *depth = checkpoint_depth(checkpoint);
    struct nag *nag = calloc(1, sizeof *nag);
    if (!nag) return error_set(error, FATHOM_NO_MEMORY, "no memory for the residual");
    nag->residual.kind = &residual_nag;
    nag->device = device;
    nag->width = config->hidden;
    nag->vocab = config->vocab;
    nag->sublayers = 2 * config->blocks;
    nag->max_rows = max_rows;
    nag->head_kind = config->head;
    nag->gates = calloc(nag->sublayers, sizeof *nag->gates);
    int result = nag->gates ? 0 : error_set(error, FATHOM_NO_MEMORY, "no memory for the gates");
    if (result == 0) result = load_table(nag, checkpoint, weights, error);
    if (result == 0) result = load_head(nag, checkpoint, weights, error);
    for (size_t l = 0; result == 0 && l < nag->sublayers; l++) {
        result = load_gate(nag, checkpoint, l, config->directions, error);
    }
    if (result == 0) result = create_state(nag, weights, error);
    if (result != 0) {
        nag_destroy(&nag->residual);
        return result;
    }
    for (size_t t = 0; t < depth->tier_count; t++) {
        nag_set_theta(&nag->residual, t, depth->theta + t * nag->sublayers);
    }
    *residual = &nag->residual;
    return 0;
}

/* ---- A step ---------------------------------------------------------------------------------- */

static void nag_begin_token(struct residual *residual, const struct step_rows *step,
                            const struct kv_place *place) {
    struct nag *nag = as_nag(residual);
    nag->decisions.running.most = step->rows;
    struct nag_begin begin = {
        .step = step,
        .table = nag->table,
        .table_type = nag->table_type,
        .width = nag->width,
        .log_gain = nag->log_gain,
        .r = nag->r,
        .s = nag->s,
        .next = &nag->gates[0],
        .decisions = &nag->decisions,
        .place = place,
    };
    nag->device->kernels->nag_begin(nag->device, &begin);
}

static const struct buffer *nag_input(const struct residual *residual) {
    return as_nag(residual)->r; /* the branch reads r itself: no norm before it */
}

static const struct row_list *nag_decide(const struct residual *residual) {
    return &as_nag(residual)->decisions.running;
}

static void nag_end(struct residual *residual, const struct step_rows *step, size_t sublayer,
                    const struct buffer *f, bool packed, const struct kv_place *place) {
    struct nag *nag = as_nag(residual);
    struct nag_end_sublayer end = {
        .step = step,
        .sublayer = sublayer,
        .width = nag->width,
        .f = f,
        .packed = packed,
        .r = nag->r,
        .s = nag->s,
        .gate = &nag->gates[sublayer],
        .next = sublayer + 1 < nag->sublayers ? &nag->gates[sublayer + 1] : NULL,
        .decisions = &nag->decisions,
        .place = place,
    };
    nag->device->kernels->nag_end_sublayer(nag->device, &end);
}

static void nag_finish(struct residual *residual, const struct step_rows *step,
                       const struct row_list *wanted, struct buffer *logits) {
    struct nag *nag = as_nag(residual);
    const struct kernels *kernels = nag->device->kernels;
    if (nag->head_kind == NAG_HEAD_RMSNORM) {
        struct norm_head head = {nag->final_gain, nag->final, nag->head, nag->width, RMS_EPSILON};
        norm_head_run(nag->device, &head, nag->r, wanted, logits);
        return;
    }
    struct matmul product = {nag->r, nag->head, logits, step->rows, wanted};
    kernels->matmul(nag->device, &product, 1);
    struct scale_logits scale = {logits, nag->s, wanted, nag->vocab, nag->width};
    kernels->scale_logits(nag->device, &scale);
}

static size_t nag_list_results(struct residual *residual, size_t rows, uint8_t *run, float *mix,
                               float *log_norm, struct copy copies[RESULT_COPIES_MAX]) {
    const struct nag *nag = as_nag(residual);
    const struct decisions *decisions = &nag->decisions;
    size_t stride = nag->max_rows, sublayers = nag->sublayers;
    copies[0] = (struct copy){decisions->run, 0, stride, rows, sublayers, run};
    copies[1] =
        (struct copy){decisions->mix, 0, stride * sizeof *mix, rows * sizeof *mix, sublayers, mix};
    copies[2] = (struct copy){nag->s, 0, 0, rows * sizeof *log_norm, 1, log_norm};
    return 3;
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static double nag_step_size(const struct residual *residual, size_t sublayer, double mix) {
    const struct gate *gate = &as_nag(residual)->gates[sublayer];
    return fabs((double)gate->alpha) * pow(mix, (double)gate->beta);
}

/* |alpha| mix^beta < size  <=>  mix < (size / |alpha|)^(1 / beta) */
static double nag_threshold(const struct residual *residual, size_t sublayer, double size) {
    const struct gate *gate = &as_nag(residual)->gates[sublayer];
    if (size <= 0) return 0;
    double alpha = fabs((double)gate->alpha);
    double theta = alpha > 0 ? pow(size / alpha, 1 / (double)gate->beta) : THETA_NEVER;
    return fmin(theta, THETA_NEVER);
}

static size_t nag_weight_bytes(const struct residual *residual) {
    const struct nag *nag = as_nag(residual);
    const struct kernels *kernels = nag->device->kernels;
    size_t bytes = kernels->buffer_bytes(nag->table) + kernels->matrix_bytes(nag->head);
    if (nag->final_gain) bytes += kernels->buffer_bytes(nag->final_gain);
    for (size_t l = 0; l < nag->sublayers; l++) {
        const struct gate *gate = &nag->gates[l];
        bytes += kernels->buffer_bytes(gate->directions) + kernels->buffer_bytes(gate->bias) +
                 kernels->buffer_bytes(gate->weight);
    }
    return bytes;
}

static size_t nag_scratch_bytes(const struct residual *residual) {
    const struct nag *nag = as_nag(residual);
    const struct kernels *kernels = nag->device->kernels;
    size_t bytes = kernels->buffer_bytes(nag->r) + kernels->buffer_bytes(nag->s) +
                   kernels->buffer_bytes(nag->decisions.mix) +
                   kernels->buffer_bytes(nag->decisions.run);
    return nag->final ? bytes + kernels->buffer_bytes(nag->final) : bytes;
}

const struct residual_kind residual_nag = {
    .name = "nag",
    .create = nag_create,
    .destroy = nag_destroy,
    .begin_token = nag_begin_token,
    .input = nag_input,
    .decide = nag_decide,
    .end_sublayer = nag_end,
    .finish = nag_finish,
    .list_results = nag_list_results,
    .step_size = nag_step_size,
    .threshold = nag_threshold,
    .set_theta = nag_set_theta,
    .weight_bytes = nag_weight_bytes,
    .scratch_bytes = nag_scratch_bytes,
};
