/* fathom inspect: what a checkpoint is, how much memory it takes, its tiers. */
#include "server/command.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static double full_flops(const struct model_info *info) {
    return info->flops_fixed + info->flops_attn + info->flops_mlp +
           (double)info->context / 2 * info->flops_attn_per_context;
}

/* Who skips an attention takes no KV there. */
static void print_kv_per_token(const struct model_info *info, double share) {
    double bytes = share * (double)model_kv_bytes(info, info->kv_block_tokens);
    char text[32];
    printf("  KV %s", size_format((size_t)bytes / info->kv_block_tokens, text, sizeof text));
}

static void print_tiers(const struct model_info *info) {
    printf("\n  %-12s %10s %11s %10s %9s %13s\n", "tier", "skip goal", "perplexity", "attn skip",
           "MLP skip", "MFLOP/token");
    for (size_t i = 0; i < info->tier_count; i++) {
        const struct tier_info *tier = &info->tiers[i];
        printf("  %-12s %8.0f %%", tier->name, 100 * tier->target_skip);
        if (tier->measured) {
            printf(" %11.3f %8.1f %% %7.1f %% %13.3f", tier->perplexity, 100 * tier->attn_skip,
                   100 * tier->mlp_skip, tier->flops_per_token / 1e6);
            if (info->kv_policy == KV_OMIT) print_kv_per_token(info, 1 - tier->attn_skip);
        }
        printf("%s\n", i == info->default_tier ? "  (default)" : "");
    }
}

static void print_text(const struct model_info *info) {
    char a[32], b[32], c[32], d[32];
    printf("%s: %s residual, %.2f M parameters\n", info->name, info->residual,
           (double)info->parameters / 1e6);
    printf("  shape      %zu blocks x %zu, %zu heads x %zu (%zu key/value), inner %zu, vocabulary "
           "%zu\n",
           info->blocks, info->hidden, info->heads, info->head_size, info->kv_heads, info->inner,
           info->vocab);
    printf("  depth      %zu sub-layers, %zu gate directions, kv_policy %s\n", info->sublayers,
           info->directions, info->kv_policy == KV_COMPUTE ? "compute" : "omit");
    printf("  context    %zu tokens\n", info->context);
    printf("  compute    %.2f MFLOP per token in the blocks at full depth, mid-context\n",
           full_flops(info) / 1e6);
    printf("  device     %s, %s weights\n", info->device, info->weights);
    printf("  memory     weights %s, scratch %s, KV cache %s per token (%s for a full context)\n",
           size_format(info->weight_bytes, a, sizeof a),
           size_format(info->scratch_bytes, b, sizeof b),
           size_format(model_kv_bytes(info, info->kv_block_tokens) / info->kv_block_tokens, c,
                       sizeof c),
           size_format(model_kv_bytes(info, info->context), d, sizeof d));
    print_tiers(info);
}

static void print_cost(const struct model *model) {
    const struct model_info *info = model_get_info(model);
    const struct cost_model *cost = model_get_cost(model);
    printf("\n  time, us: a step with all skipped, and what is added by running rows\n");
    printf("  %6s %10s %12s %10s %10s\n", "rows", "step", "attention", "MLP", "head");
    for (size_t i = 0; i < cost->count; i++) {
        const struct cost_point *point = &cost->points[i];
        printf("  %6zu %10.1f %12.2f %10.2f %10.1f\n", point->rows, point->step_ns / 1e3,
               point->attn_ns / 1e3, point->mlp_ns / 1e3, point->head_ns / 1e3);
    }
    printf("  attention and MLP: of one of the %zu blocks; and %.3f ns per position attended to\n",
           info->blocks, cost->attended_ns);
    printf("  packing rows makes a sub-layer %.2f times as dear; ", cost->gather_factor);
    if (cost->ridge) {
        printf("ridge at %zu rows: from there each skip pays\n", cost->ridge);
    } else {
        printf("ridge beyond the rows of a step: a skip pays when no row runs\n");
    }
    printf("  %s\n", model_get_cost_note(model));
}

static json_t *json_tiers(const struct model_info *info) {
    json_t *tiers = json_array();
    for (size_t i = 0; i < info->tier_count; i++) {
        const struct tier_info *tier = &info->tiers[i];
        json_t *entry =
            json_pack("{s:s, s:f}", "name", tier->name, "target_skip", tier->target_skip);
        if (tier->measured) {
            json_object_set_new(entry, "perplexity", json_real(tier->perplexity));
            json_object_set_new(entry, "attn_skip", json_real(tier->attn_skip));
            json_object_set_new(entry, "mlp_skip", json_real(tier->mlp_skip));
            json_object_set_new(entry, "flops_per_token", json_real(tier->flops_per_token));
        }
        json_array_append_new(tiers, entry);
    }
    return tiers;
}

/* What print_cost prints; ridge_rows is null where a skip pays only when no row runs. */
static json_t *json_cost(const struct model *model) {
    const struct cost_model *cost = model_get_cost(model);
    json_t *points = json_array();
    for (size_t i = 0; i < cost->count; i++) {
        const struct cost_point *point = &cost->points[i];
        json_array_append_new(
            points, json_pack("{s:I, s:f, s:f, s:f, s:f}", "rows", (json_int_t)point->rows,
                              "step_us", point->step_ns / 1e3, "attn_us", point->attn_ns / 1e3,
                              "mlp_us", point->mlp_ns / 1e3, "head_us", point->head_ns / 1e3));
    }
    return json_pack("{s:o, s:f, s:f, s:o, s:s}", "points", points, "attended_ns",
                     cost->attended_ns, "gather_factor", cost->gather_factor, "ridge_rows",
                     cost->ridge ? json_integer((json_int_t)cost->ridge) : json_null(), "note",
                     model_get_cost_note(model));
}

static int print_json(const struct model *model, bool with_cost) {
    const struct model_info *info = model_get_info(model);
    json_t *root = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:s, s:s, s:I, s:I, "
        "s:I, s:f, s:s, s:o}",
        "name", info->name, "residual", info->residual, "parameters", (json_int_t)info->parameters,
        "vocab_size", (json_int_t)info->vocab, "hidden_size", (json_int_t)info->hidden, "blocks",
        (json_int_t)info->blocks, "sublayers", (json_int_t)info->sublayers, "heads",
        (json_int_t)info->heads, "kv_heads", (json_int_t)info->kv_heads, "head_size",
        (json_int_t)info->head_size, "inner", (json_int_t)info->inner, "kv_policy",
        info->kv_policy == KV_COMPUTE ? "compute" : "omit", "context", (json_int_t)info->context,
        "device", info->device, "weights", info->weights, "weight_bytes",
        (json_int_t)info->weight_bytes, "scratch_bytes", (json_int_t)info->scratch_bytes,
        "kv_bytes_per_token",
        (json_int_t)(model_kv_bytes(info, info->kv_block_tokens) / info->kv_block_tokens),
        "flops_per_token_full", full_flops(info), "default_tier",
        info->tiers[info->default_tier].name, "tiers", json_tiers(info));
    if (root && with_cost) json_object_set_new(root, "cost", json_cost(model));
    int result = root ? json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : -1;
    printf("\n");
    json_decref(root);
    return result;
}

int cmd_inspect(int argc, char **argv) {
    struct model_flags model_flags = MODEL_FLAGS_DEFAULT;
    bool json = false, cost = false;
    const char *path = NULL;
    const struct flag flags[] = {
        {"json", 0, FLAG_SWITCH, NULL, "print one JSON object", &json, 0, 0},
        {"cost", 0, FLAG_SWITCH, NULL, "measure what steps take here and print it", &cost, 0, 0},
        MODEL_FLAGS(model_flags),
        COST_CACHE_FLAG(model_flags),
    };
    const struct command command = {
        .name = "inspect",
        .usage = "MODEL [flags]",
        .summary = "Shows what a checkpoint holds: shape, memory, tiers and their measured "
                   "quality.",
        .examples = "example: fathom inspect models/fathom-tiny",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &path,
    };
    struct error error = {0};
    int parsed = flags_parse(&command, argc, argv, &error);
    if (parsed == FLAGS_HELP) return EXIT_OK;
    if (parsed != 0) return command_fail("inspect", &error, EXIT_USAGE);
    struct model *model;
    if (command_load_model(path, &model_flags, &model, &error) != 0) {
        return command_fail("inspect", &error, EXIT_FAILED);
    }
    if (!json) print_text(model_get_info(model)); /* at once: measuring takes a while */
    int result = cost ? model_measure_cost(model, &error) : 0;
    if (result != 0) {
        command_fail("inspect", &error, EXIT_FAILED);
    } else if (json) {
        result = print_json(model, cost);
    } else if (cost) {
        print_cost(model);
    }
    model_destroy(model);
    return result == 0 ? EXIT_OK : EXIT_FAILED;
}
