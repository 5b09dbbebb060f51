/* fathom eval: perplexity, skip rates and executed FLOPs of a text, per tier. */
#include "server/command.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct eval_flags {
    struct model_flags model;
    const char *text, *quality;
    size_t window, max_tokens;
    bool json, sublayers;
};

static void show_progress(void *context, double fraction, double perplexity) {
    char detail[48];
    snprintf(detail, sizeof detail, "perplexity %.3f", perplexity);
    command_bar(context, fraction, detail);
}

/* Turns "full,fast" into tier indices; NULL means all. Returns how many, or a negative error. */
static int select_tiers(const struct model *model, const char *list, size_t *tiers,
                        struct error *error) {
    const struct model_info *info = model_get_info(model);
    if (!list) {
        for (size_t i = 0; i < info->tier_count; i++) tiers[i] = i;
        return (int)info->tier_count;
    }
    int count = 0;
    do {
        size_t length = strcspn(list, ",");
        if (count == TIERS_MAX) {
            return error_set(error, FATHOM_INVALID, "--quality names over %d tiers", TIERS_MAX);
        }
        int result = command_find_tier(model, "quality", list, length, &tiers[count++], error);
        if (result != 0) return result;
        list += length + (list[length] == ',');
    } while (*list);
    return count;
}

static void print_header(void) {
    printf("%-12s %11s %10s %8s %10s %9s %12s %12s %9s\n", "tier", "perplexity", "of full",
           "bits/B", "attn skip", "MLP skip", "MFLOP/token", "FLOPs saved", "tok/s");
}

static void print_row(const char *name, const struct evaluation *e, double full_perplexity,
                      double bits_per_byte) {
    char ratio[16] = "-", bits[16] = "-";
    if (full_perplexity > 0)
        snprintf(ratio, sizeof ratio, "%+.2f %%", 100 * (e->perplexity / full_perplexity - 1));
    if (!isnan(bits_per_byte)) snprintf(bits, sizeof bits, "%.4f", bits_per_byte);
    printf("%-12s %11.4f %10s %8s %8.1f %% %7.1f %% %12.4f %10.1f %% %9.0f\n", name, e->perplexity,
           ratio, bits, 100 * e->attn_skip, 100 * e->mlp_skip, e->flops_per_token / 1e6,
           100 * (1 - e->flops_per_token / e->flops_per_token_full),
           (double)e->tokens / e->seconds);
    fflush(stdout);
}

static void print_sublayers(const struct model_info *info, const struct evaluation *e) {
    for (size_t kind = 0; kind < 2; kind++) {
        printf("  %s skip %% by block:", kind ? "MLP      " : "attention");
        for (size_t l = kind; l < info->sublayers; l += 2)
            printf(" %3.0f", 100 * (double)e->sublayer_skip[l]);
        printf("\n");
    }
}

static json_t *row_json(const char *name, const struct model_info *info, const struct evaluation *e,
                        double bits_per_byte) {
    json_t *skips = json_array();
    for (size_t l = 0; l < info->sublayers; l++)
        json_array_append_new(skips, json_real((double)e->sublayer_skip[l]));
    json_t *bits = isnan(bits_per_byte) ? json_null() : json_real(bits_per_byte);
    return json_pack("{s:s, s:I, s:f, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "tier", name,
                     "tokens", (json_int_t)e->tokens, "perplexity", e->perplexity, "bits_per_byte",
                     bits, "attn_skip", e->attn_skip, "mlp_skip", e->mlp_skip, "flops_skip",
                     e->flops_skip, "flops_per_token", e->flops_per_token, "flops_per_token_full",
                     e->flops_per_token_full, "seconds", e->seconds, "sublayer_skip", skips);
}

/* Bits per byte of the text are known only when all of it was predicted; NAN: they are not. */
static double bits_per_byte_of(const struct evaluation *e, size_t bytes) {
    return bytes ? log2(e->perplexity) * (double)e->tokens / (double)bytes : NAN;
}

static int evaluate_tiers(struct model *model, const struct eval_flags *flags,
                          const struct token_list *tokens, size_t bytes, struct error *error) {
    const struct model_info *info = model_get_info(model);
    size_t tiers[TIERS_MAX];
    int count = select_tiers(model, flags->quality, tiers, error);
    if (count < 0) return count;
    if (flags->max_tokens && flags->max_tokens < tokens->count) bytes = 0;
    json_t *rows = json_array();
    double full_perplexity = 0;
    int result = 0;
    for (int i = 0; result == 0 && i < count; i++) {
        const char *name = info->tiers[tiers[i]].name;
        struct evaluate_options options = {
            .window = flags->window,
            .max_tokens = flags->max_tokens,
            .progress = show_progress,
            .progress_context = (void *)(uintptr_t)name,
        };
        struct evaluation evaluation;
        result = model_evaluate(model, tokens->ids, tokens->count, tiers[i], &options, &evaluation,
                                error);
        command_bar_clear();
        if (result != 0) break;
        if (strcmp(name, "full") == 0) full_perplexity = evaluation.perplexity;
        double bits = bits_per_byte_of(&evaluation, bytes);
        if (!flags->json && i == 0) print_header();
        if (flags->json)
            json_array_append_new(rows, row_json(name, info, &evaluation, bits));
        else
            print_row(name, &evaluation, full_perplexity, bits);
        if (!flags->json && flags->sublayers) print_sublayers(info, &evaluation);
        free(evaluation.sublayer_skip);
    }
    if (result == 0 && flags->json) {
        json_dumpf(rows, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        printf("\n");
    }
    json_decref(rows);
    return result;
}

int cmd_eval(int argc, char **argv) {
    struct eval_flags options = {.model = MODEL_FLAGS_DEFAULT};
    const char *path = NULL;
    const struct flag flags[] = {
        {"text", 't', FLAG_TEXT, "FILE", "text to predict (required)", &options.text, 0, 0},
        {"quality", 'q', FLAG_TEXT, "TIER,..", "tiers to measure (all)", &options.quality, 0, 0},
        {"window", 0, FLAG_COUNT, "N", "tokens per independent window (the context)",
         &options.window, 2, 16777216},
        {"max-tokens", 0, FLAG_COUNT, "N", "stop after so many tokens, 0 for all (0)",
         &options.max_tokens, 0, 1e15},
        {"sublayers", 0, FLAG_SWITCH, NULL, "also print each sub-layer's share of skipping tokens",
         &options.sublayers, 0, 0},
        {"json", 0, FLAG_SWITCH, NULL, "print one JSON array", &options.json, 0, 0},
        MODEL_FLAGS(options.model),
    };
    const struct command command = {
        .name = "eval",
        .usage = "MODEL --text FILE [flags]",
        .summary =
            "Measures a text at every quality tier. The text is cut into independent windows; the "
            "first\n"
            "token of each is not predicted. FLOPs are those of the blocks, without the head.",
        .examples = "example: fathom eval models/fathom-tiny --text book.txt --quality full,fast "
                    "--sublayers",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &path,
    };
    struct error error = {0};
    int parsed = flags_parse(&command, argc, argv, &error);
    if (parsed == FLAGS_HELP) return EXIT_OK;
    if (parsed == 0 && !options.text)
        parsed = error_set(&error, FATHOM_INVALID, "--text FILE is required");
    if (parsed != 0) return command_fail("eval", &error, EXIT_USAGE);

    struct model *model = NULL;
    struct token_list tokens = {0};
    size_t bytes = 0;
    int result = command_load_model(path, &options.model, &model, &error);
    if (result == 0) result = command_read_tokens(model, options.text, &tokens, &bytes, &error);
    if (result == 0) result = evaluate_tiers(model, &options, &tokens, bytes, &error);
    free(tokens.ids);
    model_destroy(model);
    return result == 0 ? EXIT_OK : command_fail("eval", &error, EXIT_FAILED);
}
