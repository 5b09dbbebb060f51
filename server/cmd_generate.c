/* fathom generate: completes one prompt on standard output, no server. */
#include "server/command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct generate_flags {
    struct model_flags model;
    const char *prompt, *quality;
    size_t max_tokens, top_k;
    double temperature, top_p;
    uint64_t seed;
    bool show_depth;
};

/* Prints one token; with --show-depth behind a mark of how many sub-layers it took. */
static void print_token(const struct model *model, const struct engine_event *event,
                        bool show_depth) {
    size_t length;
    const char *bytes = tokenizer_bytes(model_get_tokenizer(model), event->token, &length);
    if (event->is_stop) return;
    if (show_depth) printf("[%u]", event->depth);
    fwrite(bytes, 1, length, stdout);
    fflush(stdout);
}

static void print_summary(const struct model *model, const struct engine_usage *usage,
                          size_t tier) {
    double seconds = (double)usage->decode_ns / 1e9;
    double attn = usage->attn_total ? (double)usage->attn_run / (double)usage->attn_total : 1;
    double mlp = usage->mlp_total ? (double)usage->mlp_run / (double)usage->mlp_total : 1;
    fprintf(stderr,
            "%zu prompt + %zu new tokens at '%s': first token after %.1f ms, then %.0f tok/s; ",
            usage->prompt_tokens, usage->completion_tokens, model_get_info(model)->tiers[tier].name,
            (double)usage->prefill_ns / 1e6,
            usage->completion_tokens > 1 && seconds > 0
                ? (double)(usage->completion_tokens - 1) / seconds
                : 0);
    fprintf(stderr, "skipped %.1f %% of attention, %.1f %% of MLP\n", 100 * (1 - attn),
            100 * (1 - mlp));
}

/* Takes events until the request has finished. */
static enum finish_reason follow(const struct model *model, struct engine *engine,
                                 const struct generate_flags *flags, struct engine_usage *usage) {
    for (;;) {
        struct engine_event event;
        engine_wait(engine, 1000);
        while (engine_take_events(engine, &event, 1) == 1) {
            if (event.kind == EVENT_TOKEN) print_token(model, &event, flags->show_depth);
            if (event.kind != EVENT_FINISHED) continue;
            *usage = event.usage;
            return event.finish;
        }
    }
}

static int build_prompt(const struct model *model, const char *text, struct token_list *tokens,
                        struct error *error) {
    const struct tokenizer *tokenizer = command_tokenizer(model, error);
    if (!tokenizer) return FATHOM_UNSUPPORTED;
    int32_t start = model_start_token(model_get_info(model), tokenizer, *text == '\0');
    if (*text == '\0' && start < 0) {
        return error_set(error, FATHOM_INVALID,
                         "the prompt is empty and the model has no start token; give -p some text");
    }
    int result = start >= 0 ? token_list_push(tokens, start, error) : 0;
    if (result != 0) return result;
    return tokenizer_encode(tokenizer, text, strlen(text), true, tokens, error);
}

static int generate(struct model *model, const struct generate_flags *flags, struct error *error) {
    const struct model_info *info = model_get_info(model);
    const char *quality = flags->quality;
    size_t tier = info->default_tier;
    struct token_list tokens = {0};
    struct engine *engine = NULL;
    struct engine_options options = {
        .kv_budget = model_kv_bytes(info, info->context),
        .max_sequences = 1,
    };
    int result = 0;
    if (quality) {
        result = command_find_tier(model, "quality", quality, strlen(quality), &tier, error);
    }
    if (result == 0) result = build_prompt(model, flags->prompt, &tokens, error);
    if (result == 0) result = engine_create(model, &options, &engine, error);
    struct engine_request request = {
        .id = 1,
        .prompt = tokens.ids,
        .prompt_length = tokens.count,
        .max_tokens = flags->max_tokens,
        .tier = (int32_t)tier,
        .sampling = {.temperature = (float)flags->temperature,
                     .top_p = (float)flags->top_p,
                     .top_k = (int32_t)flags->top_k,
                     .repetition_penalty = 1,
                     .seed = flags->seed},
        .top_logprobs = -1,
    };
    if (result == 0) result = engine_submit(engine, &request, error);
    if (result == 0) {
        struct engine_usage usage = {0};
        printf("%s", flags->prompt);
        enum finish_reason finish = follow(model, engine, flags, &usage);
        printf("\n");
        print_summary(model, &usage, tier);
        if (finish == FINISH_ERROR) {
            result = error_set(error, FATHOM_INVALID,
                               "the model gave no usable probabilities: its logits are not finite");
        }
    }
    engine_destroy(engine);
    free(tokens.ids);
    return result;
}

int cmd_generate(int argc, char **argv) {
    struct generate_flags options = {
        .model = MODEL_FLAGS_DEFAULT, .max_tokens = 64, .temperature = 0.8, .top_p = 0.95};
    if (getrandom(&options.seed, sizeof options.seed, 0) != sizeof options.seed)
        options.seed = time_now_ns();
    const char *path = NULL;
    const struct flag flags[] = {
        {"prompt", 'p', FLAG_TEXT, "TEXT", "text to continue (required)", &options.prompt, 0, 0},
        {"max-tokens", 'n', FLAG_COUNT, "N", "tokens to generate (64)", &options.max_tokens, 1,
         16777216},
        {"quality", 'q', FLAG_TEXT, "TIER", "how deep each token may go (the model's default)",
         &options.quality, 0, 0},
        {"temperature", 0, FLAG_REAL, "T", "0 is greedy (0.8)", &options.temperature, 0, 2},
        {"top-p", 0, FLAG_REAL, "P", "nucleus, 1 is off (0.95)", &options.top_p, 1e-6, 1},
        {"top-k", 0, FLAG_COUNT, "K", "most likely tokens, 0 is off (0)", &options.top_k, 0, 1e9},
        {"seed", 's', FLAG_SEED, "S", "same seed, same text (random)", &options.seed, 0, 0},
        {"show-depth", 0, FLAG_SWITCH, NULL, "print the sub-layers run before each token",
         &options.show_depth, 0, 0},
        MODEL_FLAGS(options.model),
        COST_CACHE_FLAG(options.model),
    };
    const struct command command = {
        .name = "generate",
        .usage = "MODEL -p TEXT [flags]",
        .summary = "Completes one prompt. Text goes to standard output, figures to standard error.",
        .examples =
            "example: fathom generate models/fathom-tiny -p 'Once upon a time' -n 100 -q balanced",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &path,
    };
    struct error error = {0};
    int parsed = flags_parse(&command, argc, argv, &error);
    if (parsed == FLAGS_HELP) return EXIT_OK;
    if (parsed == 0 && !options.prompt)
        parsed = error_set(&error, FATHOM_INVALID, "-p TEXT is required");
    if (parsed != 0) return command_fail("generate", &error, EXIT_USAGE);
    struct model *model = NULL;
    int result = command_load_model(path, &options.model, &model, &error);
    if (result == 0) result = generate(model, &options, &error);
    model_destroy(model);
    return result == 0 ? EXIT_OK : command_fail("generate", &error, EXIT_FAILED);
}
