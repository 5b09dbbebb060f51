/* The forward pass: every sub-layer over the rows that run it.
 *
 * Three bodies compute the same function. none: no row runs, the weights are not touched. dense:
 * all rows run and the epilogue ignores those that skip. gather: running rows are packed by the
 * first matrix product, run, and scattered back by the epilogue. Under kv_policy compute attention
 * has two row lists: all rows for K and V, the running ones for Q, scores and O. Under omit every
 * layer has a block table of its own, and rows have places in it that are known only once the rows
 * that run are.
 *
 * The host chooses a body where it knows how many rows run. A device that keeps that to itself
 * packs them in any case, and leaves out what follows when there are none. */
#include "engine/forward.h"

#include "engine/cost.h"
#include "engine/model.h"

#include <stdlib.h>
#include <string.h>

#define QK_NORM_EPSILON 1e-6f /* of NAG models, under the root */

struct kv_arena {
    struct buffer *buffer;
};

static struct kv_layer kv_layer_of(const struct model *model, struct kv_arena *arena,
                                   size_t layer) {
    bool omit = model->info.kv_policy == KV_OMIT;
    return (struct kv_layer){
        .arena = arena ? arena->buffer : NULL,
        .layer = omit ? 0 : layer,
        .layers = omit ? 1 : model->config.blocks,
        .kv_heads = model->config.kv_heads,
        .head_size = model->config.head_size,
        .type = model->weights == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16,
    };
}

size_t model_kv_block_bytes(const struct model *model) {
    struct kv_layer kv = kv_layer_of(model, NULL, 0);
    return model->device->kernels->kv_block_bytes(&kv);
}

size_t model_default_kv_budget(const struct model *model) {
    const struct kernels *kernels = model->device->kernels;
    return kernels->memory_spare ? kernels->memory_spare(model->device) : KV_BUDGET_DEFAULT;
}

int kv_arena_create(struct model *model, size_t blocks, struct kv_arena **arena,
                    struct error *error) {
    size_t bytes;
    if (blocks == 0 || !size_multiply(blocks, model->info.kv_block_bytes, &bytes)) {
        return error_set(error, FATHOM_INVALID, "a KV cache of %zu blocks is not possible", blocks);
    }
    struct kv_arena *made = calloc(1, sizeof *made);
    if (!made) return error_set(error, FATHOM_NO_MEMORY, "no memory for the KV cache");
    made->buffer = model->device->kernels->buffer_create(model->device, bytes, error);
    if (!made->buffer) {
        free(made);
        error_prefix(error, "KV cache");
        return FATHOM_NO_MEMORY;
    }
    *arena = made;
    return 0;
}

void kv_arena_destroy(struct model *model, struct kv_arena *arena) {
    if (!arena) return;
    model->device->kernels->buffer_destroy(model->device, arena->buffer);
    free(arena);
}

/* ---- One sub-layer --------------------------------------------------------------------------- */

enum body { NONE, DENSE, GATHER };

static enum body choose_body(const struct model *model, const struct row_list *running,
                             const struct batch *batch, size_t sublayer) {
    if (batch->body == BODY_DENSE || !running) return DENSE;
    size_t count = model->device->kernels->row_count(model->device, running);
    if (count == 0) return NONE;
    if (batch->body == BODY_GATHER || model->device->kernels->lists_are_packed) return GATHER;
    return cost_prefers_gather(batch->cost, sublayer, count, batch->rows) ? GATHER : DENSE;
}

static void multiply(struct model *model, const struct matmul *products, size_t count) {
    model->device->kernels->matmul(model->device, products, count);
}

/* `rows` of x hold outputs. */
static void add_bias(struct model *model, struct buffer *x, const struct buffer *bias, size_t width,
                     size_t rows) {
    if (!bias) return;
    struct add_bias add = {x, bias, rows, width};
    model->device->kernels->add_bias(model->device, &add);
}

static void rotate(struct model *model, struct buffer *x, size_t heads, const struct buffer *gain,
                   const struct row_list *list) {
    const struct config *config = &model->config;
    struct rope rope = {
        .step = &model->scratch.step,
        .list = list,
        .x = x,
        .heads = heads,
        .head_size = config->head_size,
        .norm = config->qk_norm,
        .scale = config->qk_scale,
        .table = model->rope,
        .gain = gain,
        .epsilon = config->is_standard ? config->norm_epsilon : QK_NORM_EPSILON,
    };
    model->device->kernels->rope(model->device, &rope);
}

/* Once, unless the device wants it once more. */
static bool branch_begin(struct model *model, enum body body, const struct row_list *running,
                         size_t attempt) {
    const struct kernels *kernels = model->device->kernels;
    if (body != GATHER || !kernels->branch_begin) return attempt == 0;
    return kernels->branch_begin(model->device, running, attempt);
}

static void branch_end(struct model *model, enum body body) {
    const struct kernels *kernels = model->device->kernels;
    if (body == GATHER && kernels->branch_end) kernels->branch_end(model->device);
}

static void write_ids(struct device *device, struct buffer *buffer, const int32_t *ids,
                      size_t count) {
    device->kernels->write(device, buffer, 0, ids, count * sizeof *ids);
}

/* K and V of the rows of a list, or of all; and Q, where those are its rows too. */
static void project(struct model *model, const struct layer *layer, const struct buffer *input,
                    const struct row_list *list, bool with_q) {
    struct scratch *scratch = &model->scratch;
    size_t rows = scratch->step.rows;
    struct matmul products[] = {{input, layer->k, scratch->k, rows, list},
                                {input, layer->v, scratch->v, rows, list},
                                {input, layer->q, scratch->q, rows, list}};
    multiply(model, products, with_q ? 3 : 2);
}

static void store_kv(struct model *model, const struct kv_layer *kv, const struct step_rows *placed,
                     const struct layer *layer, const struct row_list *list) {
    struct scratch *scratch = &model->scratch;
    size_t rows = scratch->step.rows;
    if (layer->k_bias) {
        size_t width = model->config.kv_heads * model->config.head_size;
        size_t written = list ? model->device->kernels->row_count(model->device, list) : rows;
        add_bias(model, scratch->k, layer->k_bias, width, written);
        add_bias(model, scratch->v, layer->v_bias, width, written);
    }
    rotate(model, scratch->k, model->config.kv_heads, layer->k_gain, list);
    struct kv_append append = {placed, kv, scratch->k, scratch->v, list};
    model->device->kernels->kv_append(model->device, &append);
}

/* Scores and O, of a projected Q. */
static void attend(struct model *model, const struct kv_layer *kv, const struct step_rows *placed,
                   const struct layer *layer, const struct row_list *list) {
    struct scratch *scratch = &model->scratch;
    size_t rows = scratch->step.rows;
    if (list) rows = model->device->kernels->row_count(model->device, list);
    add_bias(model, scratch->q, layer->q_bias, model->config.heads * model->config.head_size, rows);
    rotate(model, scratch->q, model->config.heads, layer->q_gain, list);
    struct attention attention = {
        .step = placed,
        .kv = kv,
        .q = scratch->q,
        .out = scratch->mixed,
        .heads = model->config.heads,
        .list = list,
    };
    model->device->kernels->attention(model->device, &attention);
    multiply(model, &(struct matmul){scratch->mixed, layer->o, scratch->f, rows, NULL}, 1);
    add_bias(model, scratch->f, layer->o_bias, model->config.hidden, rows);
}

/* K and V are those of every row under compute, of the running rows under omit. */
static void run_attention(struct model *model, struct kv_arena *arena, size_t block,
                          enum body body) {
    struct scratch *scratch = &model->scratch;
    const struct layer *layer = &model->layers[block];
    const struct residual_kind *residual = model->residual->kind;
    const struct buffer *input = residual->input(model->residual);
    const struct row_list *running = residual->decide(model->residual);
    const struct row_list *list = body == GATHER ? running : NULL;
    struct kv_layer kv = kv_layer_of(model, arena, block);
    bool omit = model->info.kv_policy == KV_OMIT;
    const struct row_list *kv_list = omit ? running : NULL;
    const struct step_rows *placed = omit ? &scratch->placed : &scratch->step;
    bool with_q = body != NONE && list == kv_list;
    if (body == NONE && omit) return;
    scratch->placed.layer = block;
    if (!omit) {
        project(model, layer, input, NULL, with_q);
        store_kv(model, &kv, placed, layer, NULL);
    }
    if (body == NONE) return;
    for (size_t i = 0; branch_begin(model, body, running, i); i++) {
        if (omit) {
            project(model, layer, input, running, with_q);
            store_kv(model, &kv, placed, layer, running);
        }
        if (!with_q) {
            struct matmul q = {input, layer->q, scratch->q, scratch->step.rows, list};
            multiply(model, &q, 1);
        }
        attend(model, &kv, placed, layer, list);
        branch_end(model, body);
    }
}

static void feed_forward(struct model *model, const struct layer *layer, const struct buffer *input,
                         const struct row_list *list) {
    struct scratch *scratch = &model->scratch;
    size_t rows = scratch->step.rows;
    struct matmul products[] = {{input, layer->up, scratch->up, rows, list},
                                {input, layer->gate, scratch->gate, rows, list}};
    multiply(model, products, layer->gate ? 2 : 1);
    if (list) rows = model->device->kernels->row_count(model->device, list);
    add_bias(model, scratch->gate, layer->gate_bias, model->config.inner, rows);
    add_bias(model, scratch->up, layer->up_bias, model->config.inner, rows);
    struct activate activate = {
        .gate = layer->gate ? scratch->gate : NULL,
        .up = scratch->up,
        .out = scratch->up,
        .rows = rows,
        .width = model->config.inner,
        .kind = model->config.activation,
        .list = list,
    };
    model->device->kernels->activate(model->device, &activate);
    multiply(model, &(struct matmul){scratch->up, layer->down, scratch->f, rows, NULL}, 1);
    add_bias(model, scratch->f, layer->down_bias, model->config.hidden, rows);
}

static void run_mlp(struct model *model, size_t block, enum body body) {
    if (body == NONE) return;
    const struct residual_kind *residual = model->residual->kind;
    const struct buffer *input = residual->input(model->residual);
    const struct row_list *list = body == GATHER ? residual->decide(model->residual) : NULL;
    for (size_t i = 0; branch_begin(model, body, list, i); i++) {
        feed_forward(model, &model->layers[block], input, list);
        branch_end(model, body);
    }
}

/* ---- One step -------------------------------------------------------------------------------- */

bool model_draws(const struct model *model) {
    return model->device->kernels->draw != NULL;
}

static bool is_drawn(const struct model *model, const struct batch *batch) {
    return model_draws(model) && batch->draws && batch->logit_count;
}

static void write_step(struct model *model, const struct batch *batch) {
    struct device *device = model->device;
    struct step_rows *step = &model->scratch.step;
    step->rows = batch->rows;
    step->blocks_per_slot = batch->blocks_per_slot;
    step->slots = batch->slots;
    write_ids(device, step->token, batch->token, batch->rows);
    write_ids(device, step->position, batch->position, batch->rows);
    write_ids(device, step->tier, batch->tier, batch->rows);
    write_ids(device, step->slot, batch->slot, batch->rows);
    size_t sequences = model->info.kv_groups * batch->slots;
    write_ids(device, step->block_table, batch->block_table, sequences * batch->blocks_per_slot);
    if (model->info.kv_policy == KV_OMIT) {
        write_ids(device, model->scratch.taken, batch->places, sequences);
        model->scratch.placed = *step;
        model->scratch.placed.position = model->scratch.place;
    }
    int32_t count = (int32_t)batch->logit_count;
    write_ids(device, model->scratch.wanted.indices, batch->logit_rows, batch->logit_count);
    write_ids(device, model->scratch.wanted.count, &count, 1);
    model->scratch.wanted.most = batch->logit_count;
    model->scratch.wanted.is_exact = true;
    if (!is_drawn(model, batch)) return;
    const struct draw_batch *draws = batch->draws;
    device->kernels->write(device, model->scratch.asked, 0, draws->rows,
                           batch->logit_count * sizeof *draws->rows);
    device->kernels->write(device, model->scratch.changes, 0, draws->changes,
                           draws->change_count * sizeof *draws->changes);
}

/* The device's answers, and the logits of rows that it was asked nothing of. */
static size_t list_draws(struct model *model, const struct batch *batch, struct copy *copies,
                         struct step_result *result) {
    struct host_results *host = &model->host;
    const struct draw_row *rows = batch->draws ? batch->draws->rows : NULL;
    size_t first = 0, end = batch->logit_count, row = model->config.vocab * sizeof *host->logits;
    size_t count = 0;
    result->drawn = NULL;
    result->best = NULL;
    if (is_drawn(model, batch)) {
        size_t told = 0;
        for (size_t i = 0; i < end; i++) {
            if (rows[i].is_told && (size_t)rows[i].best_count > told)
                told = (size_t)rows[i].best_count;
        }
        size_t bytes = end * sizeof *host->outcome;
        copies[count++] = (struct copy){model->scratch.outcome, 0, 0, bytes, 1, host->outcome};
        size_t stride = DRAW_BEST_MAX * sizeof *host->best;
        if (told)
            copies[count++] = (struct copy){model->scratch.best,       0,   stride,
                                            told * sizeof *host->best, end, host->best};
        result->drawn = host->outcome;
        result->best = host->best;
        while (first < end && rows[first].kind != DRAW_NOTHING) first++;
        while (first < end && rows[end - 1].kind != DRAW_NOTHING) end--;
    }
    if (first < end && !model->device->kernels->look) {
        copies[count++] = (struct copy){
            .from = model->scratch.logits,
            .offset = first * row,
            .width = (end - first) * row,
            .rows = 1,
            .to = (char *)host->logits + first * row,
        };
    }
    result->logits = first < end ? host->logits : NULL;
    return count;
}

static void read_results(struct model *model, const struct batch *batch,
                         struct step_result *result) {
    struct host_results *host = &model->host;
    struct copy copies[RESULT_COPIES_MAX + 3];
    size_t count = model->residual->kind->list_results(model->residual, batch->rows, host->run,
                                                       host->mix, host->log_norm, copies);
    count += list_draws(model, batch, copies + count, result);
    model->device->kernels->read_all(model->device, copies, count);
    result->run = host->run;
    result->mix = host->mix;
    result->log_norm = host->log_norm;
}

/* Where rows that run the sub-layer go in its cache, if it has one of its own. */
static const struct kv_place *place_of(const struct model *model, size_t sublayer,
                                       struct kv_place *place) {
    bool is_attention = sublayer % 2 == 0 && sublayer < model->info.sublayers;
    if (model->info.kv_policy != KV_OMIT || !is_attention) return NULL;
    *place = (struct kv_place){model->scratch.taken, sublayer / 2, model->scratch.place};
    return place;
}

static void issue_operations(struct model *model, struct kv_arena *arena, const struct batch *batch,
                             size_t bodies[3]) {
    const struct residual_kind *residual = model->residual->kind;
    const struct step_rows *step = &model->scratch.step;
    struct kv_place place;
    residual->begin_token(model->residual, step, place_of(model, 0, &place));
    for (size_t sublayer = 0; sublayer < model->info.sublayers; sublayer++) {
        enum body body = choose_body(model, residual->decide(model->residual), batch, sublayer);
        bodies[body]++;
        if (sublayer % 2 == 0)
            run_attention(model, arena, sublayer / 2, body);
        else
            run_mlp(model, sublayer / 2, body);
        residual->end_sublayer(model->residual, step, sublayer, model->scratch.f, body != DENSE,
                               place_of(model, sublayer + 1, &place));
    }
    if (batch->logit_count) {
        residual->finish(model->residual, step, &model->scratch.wanted, model->scratch.logits);
    }
    if (!is_drawn(model, batch)) return;
    const struct scratch *scratch = &model->scratch;
    struct draw draw = {
        .logits = scratch->logits,
        .list = &scratch->wanted,
        .vocab = model->config.vocab,
        .is_plain = batch->draws->is_plain,
        .asked = scratch->asked,
        .changes = scratch->changes,
        .outcome = scratch->outcome,
        .best = scratch->best,
    };
    model->device->kernels->draw(model->device, &draw);
}

static void issue_step(struct model *model, struct kv_arena *arena, const struct batch *batch,
                       size_t bodies[3]) {
    const struct kernels *kernels = model->device->kernels;
    struct step_shape shape = {
        .step = &model->scratch.step,
        .logits = batch->logit_count,
        .is_packed = batch->body != BODY_DENSE && residual_skips(model->residual),
        .is_drawn = is_drawn(model, batch),
        .is_plain = is_drawn(model, batch) && batch->draws->is_plain,
        .arena = arena->buffer,
    };
    if (kernels->step_begin && !kernels->step_begin(model->device, &shape)) {
        bodies[shape.is_packed ? GATHER : DENSE] = model->info.sublayers;
        return;
    }
    do {
        memset(bodies, 0, 3 * sizeof *bodies);
        issue_operations(model, arena, batch, bodies);
    } while (kernels->step_end && !kernels->step_end(model->device));
}

/* A device that packs rows by itself was given sub-layers for which there were none. */
static void count_empty(const struct model *model, const struct batch *batch, size_t bodies[3]) {
    if (!model->device->kernels->lists_are_packed || bodies[GATHER] == 0) return;
    size_t empty = 0;
    for (size_t l = 0; l < model->info.sublayers; l++) {
        empty += !memchr(model->host.run + l * model->info.max_step_rows, 1, batch->rows);
    }
    bodies[GATHER] -= empty - bodies[NONE];
    bodies[NONE] = empty;
}

void model_step(struct model *model, struct kv_arena *arena, const struct batch *batch,
                struct step_result *result) {
    size_t bodies[3] = {0};
    write_step(model, batch);
    issue_step(model, arena, batch, bodies);
    read_results(model, batch, result);
    count_empty(model, batch, bodies);
    result->body_none = bodies[NONE];
    result->body_dense = bodies[DENSE];
    result->body_gather = bodies[GATHER];
}
