/* Command-line flags of one sub-command: typed, bounded, also settable from the environment.
 *
 * `--name value` and `--name=value`; a switch takes no value. FATHOM_NAME in the environment
 * (dashes as underscores) sets the same flag unless it is empty; the command line wins. `--` ends
 * the flags. An unknown flag is an error that suggests the nearest one. Values point into argv or the
 * environment: they live as long.
 */
#ifndef FATHOM_FLAGS_H
#define FATHOM_FLAGS_H

#include "base/base.h"

enum flag_kind {
    FLAG_TEXT,   /* const char * */
    FLAG_BYTES,  /* size_t; 4096, 64MiB; bounded by low and high */
    FLAG_COUNT,  /* size_t; a whole number, bounded by low and high */
    FLAG_SEED,   /* uint64_t; any 64-bit number, a negative one by its two's complement */
    FLAG_REAL,   /* double; finite, bounded by low and high */
    FLAG_SWITCH, /* bool */
};

struct flag {
    const char *name; /* without dashes */
    char letter;      /* one-letter form, or 0 */
    enum flag_kind kind;
    const char *placeholder; /* "FILE", "N"; NULL for a switch */
    const char *help;        /* one line, with the default */
    void *value;             /* holds the default before, the result after */
    double low, high;        /* inclusive bounds of FLAG_BYTES, FLAG_COUNT and FLAG_REAL */
};

struct command {
    const char *name;     /* "serve" */
    const char *usage;    /* "MODEL [flags]" */
    const char *summary;  /* what it does; may have several lines */
    const char *examples; /* printed last; NULL for none */
    const struct flag *flags;
    size_t flag_count;
    size_t positional_count;  /* exactly this many are required */
    const char **positionals; /* out: [positional_count] */
};

enum { FLAGS_OK = 0, FLAGS_HELP = 1 };

/* argv[0] is the sub-command's name. FLAGS_HELP: --help was asked for and printed to standard
 * output. Negative: FATHOM_INVALID, error says which flag and what would be right (exit code 2). */
int flags_parse(const struct command *command, int argc, char **argv, struct error *error);

/* One-screen help. */
void flags_print_help(const struct command *command);

/* Nearest of `names` to `text` by edit distance, or NULL when none is near. */
const char *flags_suggest(const char *text, const char *const *names, size_t count);

#endif
