#include "api/completion.h"

#include <stdlib.h>
#include <string.h>

#include "api/fields.h"

/* What every answer and every chunk begins with. */
static void make_prefix(struct completion *completion, const char *id, int64_t created) {
    const struct api_context *context = completion->context;
    const struct completion_request *request = completion->request;
    const char *tier = context->model->tiers[request->tier].name;
    const char *object = !request->is_chat ? "text_completion"
                         : request->stream ? "chat.completion.chunk"
                                           : "chat.completion";
    struct text_buffer *out = &completion->prefix, fingerprint = {0}, name = {0};
    text_append_format(&name, "%s-%.128s", request->is_chat ? "chatcmpl" : "cmpl", id);
    text_append_format(&fingerprint, "fathom-" FATHOM_VERSION "-%s-%s", context->model->weights,
                       tier);
    text_append_string(out, "{\"id\":");
    text_append_json(out, name.data, name.length);
    text_append_format(out, ",\"object\":\"%s\",\"created\":%lld,\"model\":", object,
                       (long long)created);
    text_append_json(out, context->served_name, strlen(context->served_name));
    text_append_string(out, ",\"system_fingerprint\":");
    text_append_json(out, fingerprint.data, fingerprint.length);
    text_append_string(out, ",\"quality\":");
    text_append_json(out, tier, strlen(tier));
    if (request->tier_reason) {
        text_append_format(out, ",\"quality_reason\":\"%s\"", request->tier_reason);
    }
    if (request->service_tier) text_append_string(out, ",\"service_tier\":\"default\"");
    text_append_string(out, ",\"choices\":[");
    out->failed |= name.failed || fingerprint.failed;
    text_free(&name);
    text_free(&fingerprint);
}

int completion_create(const struct api_context *context, const struct completion_request *request,
                      const char *id, int64_t created, uint64_t random_seed,
                      struct completion **completion, struct api_error *error) {
    size_t count = request->prompt_count * request->choices_per_prompt; /* at most 2^15 */
    struct completion *made = calloc(1, sizeof *made + count * sizeof *made->choices);
    if (!made) return refuse_no_memory(error);
    made->context = context;
    made->request = request;
    made->seed = request->has_seed ? request->sampling.seed : random_seed;
    made->choice_count = count;
    make_prefix(made, id, created);
    bool failed = made->prefix.failed;
    for (size_t i = 0; i < count; i++) {
        choice_init(&made->choices[i], request, &request->prompts[i / request->choices_per_prompt],
                    context->tokenizer);
        failed |= made->choices[i].text.failed;
    }
    if (failed) {
        completion_destroy(made);
        return refuse_no_memory(error);
    }
    *completion = made;
    return 0;
}

void completion_destroy(struct completion *completion) {
    if (!completion) return;
    for (size_t i = 0; i < completion->choice_count; i++) choice_free(&completion->choices[i]);
    text_free(&completion->prefix);
    free(completion);
}

size_t completion_choice_count(const struct completion *completion) {
    return completion->choice_count;
}

void completion_fill(const struct completion *completion, size_t choice, uint64_t engine_id,
                     struct engine_request *engine_request) {
    const struct completion_request *request = completion->request;
    const struct prompt *prompt = completion->choices[choice].prompt;
    size_t index = choice % request->choices_per_prompt;
    *engine_request = (struct engine_request){
        .id = engine_id,
        .prompt = prompt->tokens.ids,
        .prompt_length = prompt->tokens.count,
        .max_tokens = prompt->max_tokens,
        .min_tokens =
            request->min_tokens < prompt->max_tokens ? request->min_tokens : prompt->max_tokens,
        .ignore_eos = request->ignore_eos,
        .stop_tokens = request->stop_tokens,
        .stop_token_count = request->stop_token_count,
        .tier = (int32_t)request->tier,
        .priority = request->priority,
        .sampling = request->sampling,
        .top_logprobs = request->top_logprobs,
        .prompt_logprobs = choice_scores_prompt(request),
        .cache_salt = request->cache_salt,
        .cache_salt_length = request->cache_salt ? strlen(request->cache_salt) : 0,
    };
    /* Neighbouring choices must not draw alike. */
    engine_request->sampling.seed =
        index == 0 ? completion->seed : mix_bits(completion->seed + index * MIX_STEP);
}

unsigned completion_push(struct completion *completion, size_t choice,
                         const struct engine_event *event) {
    unsigned flags = choice_push(&completion->choices[choice], event);
    if (flags & PUSH_DONE) completion->ended++;
    return flags;
}

bool completion_is_done(const struct completion *completion) {
    return completion->ended == completion->choice_count;
}

const char *completion_finish_reason(const struct completion *completion, size_t choice) {
    return completion->choices[choice].finish;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

void completion_get_usage(const struct completion *completion, struct engine_usage *usage) {
    *usage = (struct engine_usage){0};
    for (size_t i = 0; i < completion->choice_count; i++) {
        const struct choice *choice = &completion->choices[i];
        const struct engine_usage *part = &choice->usage;
        if (i % completion->request->choices_per_prompt == 0) {
            usage->prompt_tokens += choice->prompt->tokens.count;
            usage->cached_tokens += part->cached_tokens;
        }
        usage->completion_tokens += choice->completion_tokens;
        if (!choice->ended) continue;
        size_t overrun = choice->overrun_rows * completion->context->model->blocks;
        usage->attn_run += part->attn_run - choice->overrun_attn;
        usage->attn_total += part->attn_total - overrun;
        usage->mlp_run += part->mlp_run - choice->overrun_mlp;
        usage->mlp_total += part->mlp_total - overrun;
        usage->preemptions += part->preemptions;
        usage->queue_ns = later(usage->queue_ns, part->queue_ns);
        usage->prefill_ns = later(usage->prefill_ns, part->prefill_ns);
        usage->decode_ns = later(usage->decode_ns, part->decode_ns);
    }
}
