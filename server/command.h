/* The sub-commands, and what they share: flags that say how a model is loaded, a loading bar, text
 * files. */
#ifndef FATHOM_COMMAND_H
#define FATHOM_COMMAND_H

#include "engine/engine.h"
#include "server/flags.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* Each takes argv[0] = its own name and returns the process's exit code; usage and results go to
 * standard output, errors and figures by the way to standard error. */
int cmd_serve(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_calibrate(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_bench(int argc, char **argv);

/* How a model is loaded. Put MODEL_FLAGS(variable) into the command's table of flags. */
struct model_flags {
    const char *device, *weights, *isa;
    const char *cost_cache; /* folder; NULL: the default one; "off" */
    size_t threads, max_context;
};

#define MODEL_FLAGS_DEFAULT                                                                        \
    { .device = "auto", .weights = "auto" }

/* clang-format off */
#define MODEL_FLAGS(m)                                                                             \
    {"device", 0, FLAG_TEXT, "D", "auto, cpu or cuda:N (auto)", &(m).device, 0, 0},                \
    {"threads", 0, FLAG_COUNT, "N", "compute threads, 0 for one per processor (0)",                \
     &(m).threads, 0, 64},                                                                         \
    {"weights", 0, FLAG_TEXT, "T", "auto (as the file), f32, bf16, f16 or int8 (auto)",            \
     &(m).weights, 0, 0},                                                                          \
    {"max-context", 0, FLAG_COUNT, "N", "longest prompt + completion, tokens (the model's)",       \
     &(m).max_context, 0, 16777216},                                                               \
    {"isa", 0, FLAG_TEXT, "I", "avx512bf16, avx512vnni, avx512, avx2 or portable (best there is)", \
     &(m).isa, 0, 0}

/* For commands that predict times. */
#define COST_CACHE_FLAG(m)                                                                         \
    {"cost-cache", 0, FLAG_TEXT, "DIR", "where measured times are kept, or off (~/.cache/fathom)", \
     &(m).cost_cache, 0, 0}
/* clang-format on */

/* Turns flags into options; an unknown weight type is FATHOM_INVALID. */
int model_flags_options(const struct model_flags *flags, struct model_options *options,
                        struct error *error);

/* Loads with a bar on standard error when that is a terminal. */
int command_load_model(const char *path, const struct model_flags *flags, struct model **model,
                       struct error *error);

/* The model's tokenizer; NULL, and an error that says so, where it has none. */
const struct tokenizer *command_tokenizer(const struct model *model, struct error *error);

/* Reads a text file, of 1 GiB at most, and tokenizes it, special tokens as ordinary text; *bytes
 * (may be NULL) is its size. */
int command_read_tokens(const struct model *model, const char *path, struct token_list *tokens,
                        size_t *bytes, struct error *error);

/* The index of the tier name[0..length), which --FLAG named; the error lists those of the model. */
int command_find_tier(const struct model *model, const char *flag, const char *name, size_t length,
                      size_t *tier, struct error *error);

/* Prints "fathom NAME: message" and returns `code`. */
int command_fail(const char *name, const struct error *error, int code);

/* Draws "label [####    ] 42 %  detail" on standard error over the last one, if it is a
 * terminal. */
void command_bar(const char *label, double fraction, const char *detail);
void command_bar_clear(void);

#endif
