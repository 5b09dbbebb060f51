#include "server/command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BAR_WIDTH = 30 };
#define TEXT_LIMIT ((size_t)1 << 30)

int command_fail(const char *name, const struct error *error, int code) {
    fprintf(stderr, "fathom %s: %s\n", name, error->message);
    return code;
}

void command_bar(const char *label, double fraction, const char *detail) {
    if (!isatty(STDERR_FILENO)) return;
    char bar[BAR_WIDTH + 1];
    for (int i = 0; i < BAR_WIDTH; i++) bar[i] = fraction * BAR_WIDTH > i ? '#' : ' ';
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r%s [%s] %3.0f %%  %s\x1b[K", label, bar, 100 * fraction, detail);
}

void command_bar_clear(void) {
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r\x1b[K");
}

static void show_loading(void *context, double fraction, const char *phase) {
    (void)context;
    command_bar("loading", fraction, phase);
}

/* Of the XDG base directories; NULL when neither it nor a home is known. */
static const char *find_cost_cache(const char *flag) {
    static char folder[512];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = -1;
    if (flag) return strcmp(flag, "off") == 0 ? NULL : flag;
    if (cache && cache[0] == '/') {
        length = snprintf(folder, sizeof folder, "%s/fathom", cache);
    } else if (home && home[0] == '/') {
        length = snprintf(folder, sizeof folder, "%s/.cache/fathom", home);
    }
    return length > 0 && (size_t)length < sizeof folder ? folder : NULL;
}

int model_flags_options(const struct model_flags *flags, struct model_options *options,
                        struct error *error) {
    static const char *const names[] = {
        [WEIGHTS_AUTO] = "auto", [WEIGHTS_F32] = "f32",   [WEIGHTS_BF16] = "bf16",
        [WEIGHTS_F16] = "f16",   [WEIGHTS_INT8] = "int8",
    };
    *options = (struct model_options){
        .device = flags->device,
        .isa = flags->isa,
        .threads = flags->threads,
        .max_context = flags->max_context,
        .cost_cache = find_cost_cache(flags->cost_cache),
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(flags->weights, names[i]) != 0) continue;
        options->weights = (enum weight_type)i;
        return 0;
    }
    return error_set(error, FATHOM_INVALID,
                     "--weights must be auto, f32, bf16, f16 or int8; got '%s'", flags->weights);
}

int command_load_model(const char *path, const struct model_flags *flags, struct model **model,
                       struct error *error) {
    struct model_options options;
    int result = model_flags_options(flags, &options, error);
    if (result != 0) return result;
    options.progress = show_loading;
    result = model_load(path, &options, model, error);
    command_bar_clear();
    return result;
}

const struct tokenizer *command_tokenizer(const struct model *model, struct error *error) {
    const struct tokenizer *tokenizer = model_get_tokenizer(model);
    if (!tokenizer) {
        error_set(error, FATHOM_UNSUPPORTED,
                  "%s has no tokenizer.json, so text cannot be read; copy the one that belongs to "
                  "the model into its folder",
                  model_get_info(model)->path);
    }
    return tokenizer;
}

int command_read_tokens(const struct model *model, const char *path, struct token_list *tokens,
                        size_t *bytes, struct error *error) {
    char *text;
    size_t size;
    const struct tokenizer *tokenizer = command_tokenizer(model, error);
    if (!tokenizer) return FATHOM_UNSUPPORTED;
    int result = file_read(path, TEXT_LIMIT, &text, &size, error);
    if (result != 0) return result;
    result = tokenizer_encode(tokenizer, text, size, false, tokens, error);
    free(text);
    if (bytes) *bytes = size;
    return result;
}

int command_find_tier(const struct model *model, const char *flag, const char *name, size_t length,
                      size_t *tier, struct error *error) {
    const struct model_info *info = model_get_info(model);
    char names[TIERS_MAX * (TIER_NAME_MAX + 2)] = "";
    for (size_t i = 0; i < info->tier_count; i++) {
        const char *known = info->tiers[i].name;
        if (strlen(known) == length && memcmp(known, name, length) == 0) {
            *tier = i;
            return 0;
        }
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", known);
    }
    return error_set(error, FATHOM_INVALID, "--%s names no tier '%.*s'; the model has %s", flag,
                     (int)(length < TIER_NAME_MAX ? length : TIER_NAME_MAX), name, names);
}
