/* Loads a checkpoint onto a device: packs every weight once and makes all the memory that steps
 * need. */
#include "engine/model.h"
#include "engine/weight_load.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_STEP_ROWS 256

/* ---- Weights --------------------------------------------------------------------------------- */

struct loader {
    struct model *model;
    const struct model_options *options;
    enum dtype weights;
    size_t packed_bytes;
};

static void report(const struct model_options *options, double fraction, const char *phase) {
    if (options->progress) options->progress(options->progress_context, fraction, phase);
}

static int load_matrix(struct loader *loader, size_t block, const char *part, size_t out, size_t in,
                       struct matrix **matrix, struct error *error) {
    struct device *device = loader->model->device;
    char name[128];
    snprintf(name, sizeof name, "model.layers.%zu.%s.weight", block, part);
    *matrix = weight_load_matrix(device, loader->model->checkpoint, name, out, in, loader->weights,
                                 error);
    if (!*matrix) return error->code;
    loader->packed_bytes += device->kernels->matrix_bytes(*matrix);
    return 0;
}

/* "self_attn.q_proj.bias", "self_attn.q_norm.weight": [width]. */
static int load_vector(struct loader *loader, size_t block, const char *part, size_t width,
                       struct buffer **vector, struct error *error) {
    struct device *device = loader->model->device;
    char name[128];
    snprintf(name, sizeof name, "model.layers.%zu.%s", block, part);
    *vector = weight_load_vector(device, loader->model->checkpoint, name, width, 0, error);
    if (!*vector) return error->code;
    loader->packed_bytes += device->kernels->buffer_bytes(*vector);
    return 0;
}

static int load_vectors(struct loader *loader, size_t block, struct error *error) {
    const struct config *config = &loader->model->config;
    struct layer *layer = &loader->model->layers[block];
    size_t q = config->heads * config->head_size, k = config->kv_heads * config->head_size;
    const struct {
        bool there;
        const char *part;
        size_t width;
        struct buffer **vector;
    } parts[] = {
        {config->qkv_bias, "self_attn.q_proj.bias", q, &layer->q_bias},
        {config->qkv_bias, "self_attn.k_proj.bias", k, &layer->k_bias},
        {config->qkv_bias, "self_attn.v_proj.bias", k, &layer->v_bias},
        {config->output_bias, "self_attn.o_proj.bias", config->hidden, &layer->o_bias},
        {config->mlp_bias, "mlp.gate_proj.bias", config->inner, &layer->gate_bias},
        {config->mlp_bias, "mlp.up_proj.bias", config->inner, &layer->up_bias},
        {config->mlp_bias, "mlp.down_proj.bias", config->hidden, &layer->down_bias},
        {config->qk_gain, "self_attn.q_norm.weight", config->head_size, &layer->q_gain},
        {config->qk_gain, "self_attn.k_norm.weight", config->head_size, &layer->k_gain},
    };
    int result = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts && result == 0; i++) {
        if (!parts[i].there) continue;
        result = load_vector(loader, block, parts[i].part, parts[i].width, parts[i].vector, error);
    }
    return result;
}

static int load_layer(struct loader *loader, size_t block, struct error *error) {
    const struct config *config = &loader->model->config;
    struct layer *layer = &loader->model->layers[block];
    size_t d = config->hidden, inner = config->inner;
    size_t q = config->heads * config->head_size, k = config->kv_heads * config->head_size;
    const struct {
        const char *part;
        size_t out, in;
        struct matrix **matrix;
    } parts[] = {
        {"self_attn.q_proj", q, d, &layer->q},     {"self_attn.k_proj", k, d, &layer->k},
        {"self_attn.v_proj", k, d, &layer->v},     {"self_attn.o_proj", d, q, &layer->o},
        {"mlp.up_proj", inner, d, &layer->up},     {"mlp.down_proj", d, inner, &layer->down},
        {"mlp.gate_proj", inner, d, &layer->gate},
    };
    size_t count = sizeof parts / sizeof *parts;
    if (config->activation != ACTIVATION_SILU_GATED) count--; /* gate_proj is last */
    for (size_t i = 0; i < count; i++) {
        int result = load_matrix(loader, block, parts[i].part, parts[i].out, parts[i].in,
                                 parts[i].matrix, error);
        if (result != 0) return result;
    }
    return load_vectors(loader, block, error);
}

/* Radians per position of each pair of a head, frequencies[D / 2]. */
static int rope_frequencies(const struct model *model, double *frequencies, struct error *error) {
    const struct config *config = &model->config;
    const struct rope_scaling *scaling = &config->rope_scaling;
    size_t half = config->head_size / 2;
    for (size_t i = 0; i < half; i++) {
        double frequency = pow(config->rope_theta, -(double)i / (double)half);
        if (scaling->kind == ROPE_LINEAR) frequency /= scaling->factor;
        if (scaling->kind == ROPE_LLAMA3) {
            /* Turns within the original context: many keep their speed, few are slowed down, and in
             * between the two are blended. */
            double turns = scaling->original_context * frequency / (2 * 3.14159265358979323846);
            double blend = (turns - scaling->low_factor) /
                           (scaling->high_factor - scaling->low_factor);
            blend = fmin(fmax(blend, 0), 1);
            frequency *= (1 - blend) / scaling->factor + blend;
        }
        frequencies[i] = frequency;
    }
    if (!config->rope_factors) return 0;
    struct tensor tensor;
    float factors[HEAD_SIZE_MAX / 2];
    int result =
        checkpoint_tensor(model->checkpoint, "rope_freqs.weight", half, 0, &tensor, error);
    if (result == 0) result = tensor_to_f32(&tensor, factors, error);
    for (size_t i = 0; i < half && result == 0; i++) {
        if (!(factors[i] > 0)) {
            result = error_set(error, FATHOM_INVALID, "rope_freqs.weight has %g, not above 0",
                               (double)factors[i]);
        }
        frequencies[i] /= (double)factors[i];
    }
    return result;
}

/* cos in the first half of each row, sin in the second; angles in double, since positions can be
 * large. */
static int make_rope(struct model *model, struct error *error) {
    const struct config *config = &model->config;
    size_t half = config->head_size / 2, context = model->info.context, bytes;
    if (!size_multiply(context, config->head_size * sizeof(float), &bytes)) {
        return error_set(error, FATHOM_INVALID, "context of %zu tokens is too long", context);
    }
    double frequencies[HEAD_SIZE_MAX / 2];
    int result = rope_frequencies(model, frequencies, error);
    if (result != 0) return result;
    float *table = malloc(bytes);
    if (!table) return error_set(error, FATHOM_NO_MEMORY, "no memory for the RoPE table");
    for (size_t p = 0; p < context; p++) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)p * frequencies[i];
            table[p * config->head_size + i] = (float)cos(angle);
            table[p * config->head_size + half + i] = (float)sin(angle);
        }
    }
    model->rope = model->device->kernels->buffer_create(model->device, bytes, error);
    if (model->rope) model->device->kernels->write(model->device, model->rope, 0, table, bytes);
    free(table);
    return model->rope ? 0 : error->code;
}

/* ---- Scratch --------------------------------------------------------------------------------- */

static int make_step_buffers(struct model *model, struct error *error) {
    struct scratch *scratch = &model->scratch;
    struct step_rows *step = &scratch->step;
    size_t rows = model->info.max_step_rows;
    size_t blocks = (model->info.context + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    size_t groups = model->info.kv_groups, draws = model_draws(model) ? rows : 0;
    /* A step has at most one sequence per row. */
    if (!size_multiply(rows, blocks, &scratch->table_capacity) ||
        !size_multiply(scratch->table_capacity, groups, &scratch->table_capacity)) {
        return error_set(error, FATHOM_INVALID, "block tables of %zu x %zu x %zu are too large",
                         groups, rows, blocks);
    }
    const struct {
        struct buffer **buffer;
        size_t count; /* of 4 bytes */
    } parts[] = {
        {&step->token, rows},
        {&step->position, rows},
        {&step->tier, rows},
        {&step->slot, rows},
        {&step->block_table, scratch->table_capacity},
        {&scratch->place, rows},
        {&scratch->taken, groups * rows},
        {&scratch->wanted.indices, rows},
        {&scratch->wanted.count, 1},
        {&scratch->asked, draws * sizeof(struct draw_row) / 4},
        {&scratch->changes, draws ? DRAW_CHANGES_MAX * sizeof(struct draw_change) / 4 : 0},
        {&scratch->outcome, draws * sizeof(struct draw_outcome) / 4},
        {&scratch->best, draws * DRAW_BEST_MAX * sizeof(struct draw_best) / 4},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].buffer = model->device->kernels->buffer_create(
            model->device, parts[i].count * sizeof(int32_t), error);
        if (!*parts[i].buffer) return error->code;
    }
    return 0;
}

static int make_activations(struct model *model, struct error *error) {
    const struct config *config = &model->config;
    struct scratch *scratch = &model->scratch;
    size_t rows = model->info.max_step_rows;
    size_t q = config->heads * config->head_size, k = config->kv_heads * config->head_size;
    const struct {
        struct buffer **buffer;
        size_t width;
    } parts[] = {
        {&scratch->q, q},
        {&scratch->k, k},
        {&scratch->v, k},
        {&scratch->mixed, q},
        {&scratch->up, config->inner},
        {&scratch->f, config->hidden},
        {&scratch->gate, config->inner},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].buffer =
            model->device->kernels->activation_create(model->device, rows, parts[i].width,
                                                      model->weights, error);
        if (!*parts[i].buffer) return error->code;
        model->info.scratch_bytes += model->device->kernels->buffer_bytes(*parts[i].buffer);
    }
    scratch->logits = model->device->kernels->activation_create(model->device, rows, config->vocab,
                                                                DTYPE_F32, error);
    if (!scratch->logits) return error->code;
    model->info.scratch_bytes += model->device->kernels->buffer_bytes(scratch->logits);
    return 0;
}

static int make_host_results(struct model *model, struct error *error) {
    struct host_results *host = &model->host;
    size_t rows = model->info.max_step_rows, decisions = rows * model->info.sublayers;
    const struct kernels *kernels = model->device->kernels;
    host->logits = kernels->look ? kernels->look(model->scratch.logits)
                                 : calloc(rows * model->config.vocab, sizeof *host->logits);
    host->mix = calloc(decisions, sizeof *host->mix);
    host->run = calloc(decisions, sizeof *host->run);
    host->log_norm = calloc(rows, sizeof *host->log_norm);
    host->outcome = calloc(rows, sizeof *host->outcome);
    host->best = calloc(rows * DRAW_BEST_MAX, sizeof *host->best);
    if (host->logits && host->mix && host->run && host->log_norm && host->outcome && host->best)
        return 0;
    return error_set(error, FATHOM_NO_MEMORY, "no memory for the results of a step of %zu rows",
                     rows);
}

/* ---- Description ----------------------------------------------------------------------------- */

static void describe_flops(struct model *model) {
    const struct config *config = &model->config;
    struct model_info *info = &model->info;
    double d = (double)config->hidden, blocks = (double)config->blocks;
    double q = (double)(config->heads * config->head_size),
           k = (double)(config->kv_heads * config->head_size);
    double gates =
        2 * 2 * (double)config->directions * d; /* of both sub-layers: what a skip still costs */
    double kv = 4 * d * k, matrices = config->activation == ACTIVATION_SILU_GATED ? 3 : 2;
    bool omit = info->kv_policy == KV_OMIT;
    info->flops_fixed = blocks * (gates + (omit ? 0 : kv));
    info->flops_attn = blocks * (4 * d * q + (omit ? kv : 0));
    info->flops_attn_per_context = blocks * 4 * q;
    info->flops_mlp = blocks * matrices * 2 * d * (double)config->inner;
}

double model_skip_flops(const struct model *model, size_t sublayer, size_t context) {
    const struct model_info *info = &model->info;
    double blocks = (double)info->blocks;
    if (sublayer % 2) return info->flops_mlp / blocks;
    return (info->flops_attn + (double)context * info->flops_attn_per_context) / blocks;
}

static void describe_path(struct model_info *info, const char *path) {
    snprintf(info->path, sizeof info->path, "%s", path);
    size_t end = strlen(info->path);
    while (end > 1 && info->path[end - 1] == '/') info->path[--end] = '\0';
    const char *slash = strrchr(info->path, '/');
    snprintf(info->name, sizeof info->name, "%.127s", slash && slash[1] ? slash + 1 : info->path);
    size_t length = strlen(info->name);
    if (length > 5 && strcmp(info->name + length - 5, ".gguf") == 0) info->name[length - 5] = '\0';
}

static void describe_shape(struct model *model, const struct model_options *options) {
    const struct config *config = &model->config;
    const struct depth_table *depth = checkpoint_depth(model->checkpoint);
    struct model_info *info = &model->info;
    info->parameters = checkpoint_parameters(model->checkpoint);
    info->vocab = config->vocab;
    info->hidden = config->hidden;
    info->blocks = config->blocks;
    info->sublayers = 2 * config->blocks;
    info->heads = config->heads;
    info->kv_heads = config->kv_heads;
    info->head_size = config->head_size;
    info->inner = config->inner;
    info->directions = config->directions;
    info->context = config->context;
    if (options->max_context) info->context = options->max_context;
    info->max_step_rows = options->max_step_rows ? options->max_step_rows : DEFAULT_STEP_ROWS;
    info->kv_policy = depth->kv_policy;
    info->kv_groups = info->kv_policy == KV_OMIT ? info->blocks : 1;
    info->tier_count = depth->tier_count;
    info->default_tier = depth->default_tier;
    memcpy(info->tiers, depth->tiers, sizeof info->tiers);
    describe_flops(model);
}

/* ---- Public ---------------------------------------------------------------------------------- */

/* 16-bit weights lose nothing when the file has the same; a file keeps its precision unless
 * asked. */
static enum dtype choose_weights(struct model *model, enum weight_type asked) {
    static const enum dtype types[] = {[WEIGHTS_F32] = DTYPE_F32,
                                       [WEIGHTS_BF16] = DTYPE_BF16,
                                       [WEIGHTS_F16] = DTYPE_F16,
                                       [WEIGHTS_INT8] = DTYPE_INT8};
    if (asked != WEIGHTS_AUTO) return types[asked];
    struct tensor tensor;
    const struct config *config = &model->config;
    size_t q = config->heads * config->head_size;
    const char *sample = "model.layers.0.self_attn.q_proj.weight";
    if (checkpoint_tensor(model->checkpoint, sample, q, config->hidden, &tensor, NULL) != 0)
        return DTYPE_F32;
    return device_preferred_weights(model->device, tensor.type);
}

static int open_device(struct model *model, const struct model_options *options,
                       struct error *error) {
    const struct config *config = &model->config;
    size_t widths[] = {config->hidden, config->inner, config->heads * config->head_size},
           widest = 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        if (widths[i] > widest) widest = widths[i];
    }
    struct device_options device = {
        .name = options->device,
        .threads = options->threads,
        .isa = options->isa,
        .max_rows = model->info.max_step_rows,
        .max_width = widest,
    };
    int result = device_open(&device, &model->device, error);
    if (result != 0) return result;
    snprintf(model->info.device, sizeof model->info.device, "%s", model->device->description);
    snprintf(model->info.backend, sizeof model->info.backend, "%s", model->device->kernels->name);
    snprintf(model->info.isa, sizeof model->info.isa, "%s", model->device->isa);
    return 0;
}

/* Adds a token that ends a text, once. */
static void add_eos(struct model_info *info, int32_t token) {
    for (size_t i = 0; i < info->eos_count; i++) {
        if (info->eos[i] == token) return;
    }
    if (info->eos_count < EOS_MAX) info->eos[info->eos_count++] = token;
}

static void describe_ends(struct model *model) {
    const struct config *config = &model->config;
    struct model_info *info = &model->info;
    info->bos = config->bos;
    if (model->tokenizer) {
        if (tokenizer_bos(model->tokenizer) >= 0) info->bos = tokenizer_bos(model->tokenizer);
        if (tokenizer_eos(model->tokenizer) >= 0) add_eos(info, tokenizer_eos(model->tokenizer));
    }
    for (size_t i = 0; i < config->eos_count; i++) add_eos(info, config->eos[i]);
}

/* The tokenizer is read while the weights are packed: one thread can do no more for it. */
struct tokenizer_reading {
    const struct checkpoint *checkpoint;
    struct tokenizer *tokenizer;
    pthread_t thread;
    bool is_running;
    int result;
    struct error error;
};

static void *tokenizer_read(void *context) {
    struct tokenizer_reading *reading = context;
    reading->result =
        checkpoint_load_tokenizer(reading->checkpoint, &reading->tokenizer, &reading->error);
    return NULL;
}

static void tokenizer_begin(struct tokenizer_reading *reading, const struct model *model) {
    *reading = (struct tokenizer_reading){.checkpoint = model->checkpoint};
    reading->is_running = pthread_create(&reading->thread, NULL, tokenizer_read, reading) == 0;
    if (!reading->is_running) tokenizer_read(reading);
}

/* The tokenizer is optional for whoever brings token ids; its ids must be ones that the model
 * has. */
static int tokenizer_end(struct tokenizer_reading *reading, struct model *model,
                         struct error *error) {
    if (reading->is_running) pthread_join(reading->thread, NULL);
    model->tokenizer = reading->tokenizer;
    if (reading->result != 0 && reading->result != FATHOM_NOT_FOUND) {
        *error = reading->error;
        return reading->result;
    }
    describe_ends(model);
    if (reading->result != 0) return 0;
    size_t size = tokenizer_size(model->tokenizer);
    if (size <= model->config.vocab) return 0;
    return error_set(error, FATHOM_INVALID,
                     "tokenizer.json has %zu entries; config.json says vocab_size %zu", size,
                     model->config.vocab);
}

static int load_weights(struct model *model, const struct model_options *options,
                        struct error *error) {
    struct loader loader = {model, options, choose_weights(model, options->weights), 0};
    model->weights = loader.weights;
    snprintf(model->info.weights, sizeof model->info.weights, "%s", dtype_name(loader.weights));
    const struct residual_kind *kind =
        model->config.is_standard ? &residual_standard : &residual_nag;
    int result = kind->create(model->device, model->checkpoint, model->info.max_step_rows,
                              loader.weights, &model->residual, error);
    if (result != 0) return result;
    checkpoint_let_go(model->checkpoint); /* what is packed need not be there twice */
    snprintf(model->info.residual, sizeof model->info.residual, "%s", kind->name);
    model->layers = calloc(model->config.blocks, sizeof *model->layers);
    if (!model->layers) return error_set(error, FATHOM_NO_MEMORY, "no memory for the layers");
    for (size_t i = 0; i < model->config.blocks; i++) {
        report(options, (double)i / (double)model->config.blocks, "packing weights");
        if ((result = load_layer(&loader, i, error)) != 0) return result;
        checkpoint_let_go(model->checkpoint);
    }
    model->info.weight_bytes = loader.packed_bytes + kind->weight_bytes(model->residual);
    return 0;
}

static int make_parts(struct model *model, const struct model_options *options,
                      struct error *error) {
    int result = open_device(model, options, error);
    if (result == 0) result = load_weights(model, options, error);
    if (result == 0) result = make_rope(model, error);
    if (result == 0) result = make_step_buffers(model, error);
    if (result == 0) result = make_activations(model, error);
    return result == 0 ? make_host_results(model, error) : result;
}

int model_load(const char *path, const struct model_options *options, struct model **out,
               struct error *error) {
    static const struct model_options defaults;
    struct error local = {0};
    if (!error) error = &local; /* codes are read back from it below */
    if (!options) options = &defaults;
    if (strlen(path) >= sizeof((struct model_info *)0)->path) {
        return error_set(error, FATHOM_INVALID, "the path of the model is longer than %zu bytes",
                         sizeof((struct model_info *)0)->path - 1);
    }
    if (options->cost_cache &&
        strlen(options->cost_cache) >= sizeof((struct model *)0)->cost_cache) {
        return error_set(error, FATHOM_INVALID,
                         "the path of the cost cache is longer than %zu bytes",
                         sizeof((struct model *)0)->cost_cache - 1);
    }
    if (options->max_step_rows > STEP_ROWS_MAX) {
        return error_set(error, FATHOM_INVALID, "max_step_rows %zu is over the limit of %d",
                         options->max_step_rows, STEP_ROWS_MAX);
    }
    struct model *model = calloc(1, sizeof *model);
    if (!model) return error_set(error, FATHOM_NO_MEMORY, "no memory for the model");
    report(options, 0, "mapping");
    describe_path(&model->info, path);
    int result = checkpoint_open(path, &model->checkpoint, error);
    if (result == 0) {
        model->config = *checkpoint_config(model->checkpoint);
        describe_shape(model, options);
        if (model->info.context > model->config.context) {
            result = error_set(error, FATHOM_INVALID,
                               "a context of %zu tokens is asked for; the model has %zu",
                               model->info.context, model->config.context);
        }
    }
    if (result == 0) {
        struct tokenizer_reading reading;
        struct error tokenizer_error = {0};
        tokenizer_begin(&reading, model);
        result = make_parts(model, options, error);
        int read = tokenizer_end(&reading, model, &tokenizer_error);
        if (read != 0) { /* the smaller file is looked at first */
            *error = tokenizer_error;
            result = read;
        }
    }
    if (result != 0) {
        model_destroy(model);
        return result;
    }
    model->info.scratch_bytes += model->residual->kind->scratch_bytes(model->residual);
    model->info.kv_block_tokens = KV_BLOCK_TOKENS;
    model->info.kv_block_bytes = model_kv_block_bytes(model);
    if (options->cost_cache) {
        snprintf(model->cost_cache, sizeof model->cost_cache, "%s", options->cost_cache);
    }
    result = model_try(model, error);
    if (result != 0) {
        error_prefix(error, "%s", path);
        model_destroy(model);
        return result;
    }
    report(options, 1, "packing weights");
    *out = model;
    return 0;
}

static void destroy_layer(struct model *model, struct layer *layer) {
    struct matrix *matrices[] = {layer->q,    layer->k,  layer->v,   layer->o,
                                 layer->gate, layer->up, layer->down};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        model->device->kernels->matrix_destroy(model->device, matrices[i]);
    }
    struct buffer *vectors[] = {layer->q_bias,    layer->k_bias,  layer->v_bias,
                                layer->o_bias,    layer->gate_bias, layer->up_bias,
                                layer->down_bias, layer->q_gain,  layer->k_gain};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        model->device->kernels->buffer_destroy(model->device, vectors[i]);
    }
}

static void destroy_scratch(struct model *model) {
    struct scratch *scratch = &model->scratch;
    struct step_rows *step = &scratch->step;
    struct buffer *buffers[] = {
        scratch->q,
        scratch->k,
        scratch->v,
        scratch->mixed,
        scratch->gate,
        scratch->up,
        scratch->f,
        scratch->logits,
        step->token,
        step->position,
        step->tier,
        step->slot,
        step->block_table,
        scratch->place,
        scratch->taken,
        scratch->wanted.indices,
        scratch->wanted.count,
        scratch->asked,
        scratch->changes,
        scratch->outcome,
        scratch->best,
        model->rope,
    };
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        model->device->kernels->buffer_destroy(model->device, buffers[i]);
    }
}

void model_destroy(struct model *model) {
    if (!model) return;
    if (model->device) {
        for (size_t i = 0; model->layers && i < model->config.blocks; i++)
            destroy_layer(model, &model->layers[i]);
        destroy_scratch(model);
        if (model->residual) model->residual->kind->destroy(model->residual);
        if (!model->device->kernels->look) free(model->host.logits);
        model->device->kernels->close(model->device);
    }
    free(model->layers);
    free(model->host.mix);
    free(model->host.run);
    free(model->host.log_norm);
    free(model->host.outcome);
    free(model->host.best);
    tokenizer_destroy(model->tokenizer);
    checkpoint_close(model->checkpoint);
    free(model);
}

const struct model_info *model_get_info(const struct model *model) {
    return &model->info;
}

const struct tokenizer *model_get_tokenizer(const struct model *model) {
    return model->tokenizer;
}

int model_find_tier(const struct model *model, const char *name) {
    for (size_t i = 0; i < model->info.tier_count; i++) {
        if (strcmp(model->info.tiers[i].name, name) == 0) return (int)i;
    }
    return FATHOM_NOT_FOUND;
}
