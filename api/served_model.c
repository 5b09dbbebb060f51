#include "api/served_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "api/chat.h"

static bool is_name(const char *text, size_t length, const char *name) {
    return strlen(name) == length && memcmp(text, name, length) == 0;
}

int tier_find(const struct api_context *context, const char *name, size_t length) {
    if (is_name(name, length, "auto")) return (int)context->default_tier;
    for (size_t i = 0; i < context->model->tier_count; i++) {
        if (is_name(name, length, context->model->tiers[i].name)) return (int)i;
    }
    return FATHOM_NOT_FOUND;
}

int tier_refuse(const struct api_context *context, const char *param, const char *name,
                struct api_error *error) {
    char tiers[320] = "";
    for (size_t i = 0, used = 0; i < context->model->tier_count && used < sizeof tiers; i++) {
        int length =
            snprintf(tiers + used, sizeof tiers - used, "%s, ", context->model->tiers[i].name);
        used += length > 0 ? (size_t)length : 0;
    }
    return api_error_set(error, 400, "unknown_quality", param,
                         "%s: '%.64s' is not a quality tier of this model; there are %sauto", param,
                         name, tiers);
}

int served_model_find(const struct api_context *context, const char *name, size_t length,
                      size_t *tier, struct api_error *error) {
    if (is_name(name, length, context->served_name)) return 0;
    const char *colon = memrchr(name, ':', length);
    if (!colon || !is_name(name, (size_t)(colon - name), context->served_name)) {
        return api_error_set(error, 404, "model_not_found", "model",
                             "model '%.128s' is not served here; '%s' is", name,
                             context->served_name);
    }
    int found = tier_find(context, colon + 1, length - (size_t)(colon - name) - 1);
    if (found < 0) return tier_refuse(context, "model", colon + 1, error);
    *tier = (size_t)found;
    return 0;
}

/* A measured figure; what is not finite is not known. */
static void write_figure(const char *name, double value, struct text_buffer *out) {
    if (isfinite(value)) {
        text_append_format(out, "\"%s\":%.9g", name, value);
    } else {
        text_append_format(out, "\"%s\":null", name);
    }
}

static void write_or_null(const char *name, const char *value, struct text_buffer *out) {
    text_append_format(out, "\"%s\":", name);
    if (value) {
        text_append_json(out, value, strlen(value));
    } else {
        text_append_string(out, "null");
    }
}

static void write_tier(const struct tier_info *tier, struct text_buffer *out) {
    text_append_string(out, "{\"name\":");
    text_append_json(out, tier->name, strlen(tier->name));
    text_append_string(out, ",");
    write_figure("target_skip", tier->target_skip, out);
    text_append_string(out, ",\"measured\":");
    if (!tier->measured) {
        text_append_string(out, "null}");
        return;
    }
    text_append_string(out, "{");
    write_figure("perplexity", tier->perplexity, out);
    text_append_string(out, ",");
    write_figure("attn_skip", tier->attn_skip, out);
    text_append_string(out, ",");
    write_figure("mlp_skip", tier->mlp_skip, out);
    text_append_string(out, ",");
    write_figure("flops_per_token", tier->flops_per_token, out);
    text_append_string(out, "}}");
}

/* max_model_len stands where vLLM's clients look for it. */
static void write_model_object(const struct api_context *context, struct text_buffer *out) {
    const struct model_info *model = context->model;
    text_append_string(out, "{\"id\":");
    text_append_json(out, context->served_name, strlen(context->served_name));
    text_append_format(out,
                       ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"fathom\","
                       "\"max_model_len\":%zu,\"fathom\":{\"residual\":",
                       (long long)context->created, model->context);
    text_append_json(out, model->residual, strlen(model->residual));
    text_append_format(
        out,
        ",\"parameters\":%zu,\"context_length\":%zu,\"max_sequence\":%zu,"
        "\"sublayers\":%zu,\"kv_policy\":\"%s\",\"kv_bytes_per_token\":%zu,\"weights\":",
        model->parameters, model->context, context->max_sequence, model->sublayers,
        model->kv_policy == KV_COMPUTE ? "compute" : "omit",
        model_kv_bytes(model, model->kv_block_tokens) / model->kv_block_tokens);
    text_append_json(out, model->weights, strlen(model->weights));
    text_append_string(out, ",\"device\":");
    text_append_json(out, model->device, strlen(model->device));
    text_append_string(out, ",");
    write_or_null("chat_format", chat_format_stated(context), out);
    text_append_string(out, ",\"default_quality\":");
    const char *tier = model->tiers[context->default_tier].name;
    text_append_json(out, tier, strlen(tier));
    text_append_string(out, ",\"tiers\":[");
    for (size_t i = 0; i < model->tier_count; i++) {
        if (i > 0) text_append_string(out, ",");
        write_tier(&model->tiers[i], out);
    }
    text_append_string(out, "]}}");
}

void models_write(const struct api_context *context, struct text_buffer *out) {
    text_append_string(out, "{\"object\":\"list\",\"data\":[");
    write_model_object(context, out);
    text_append_string(out, "]}");
}

int model_write(const struct api_context *context, const char *id, struct text_buffer *out,
                struct api_error *error) {
    size_t tier;
    int result = served_model_find(context, id, strlen(id), &tier, error);
    if (result != 0) {
        error->status = 404; /* of a path, a wrong suffix is as absent as a wrong name */
        error->code = "model_not_found";
        return result;
    }
    write_model_object(context, out);
    return 0;
}

void version_write(const struct version_info *info, struct text_buffer *out) {
    text_append_string(out, "{");
    write_or_null("version", info->version, out);
    text_append_string(out, ",");
    write_or_null("build", info->build, out);
    text_append_string(out, ",");
    write_or_null("backend", info->backend, out);
    text_append_string(out, ",");
    write_or_null("isa", info->isa, out);
    text_append_string(out, "}");
}
