#include "server/flags.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUGGEST_LENGTH_MAX = 64 };

/* Levenshtein distance; names longer than SUGGEST_LENGTH_MAX are near to nothing. */
static size_t edit_distance(const char *a, const char *b) {
    size_t a_length = strlen(a), b_length = strlen(b), row[SUGGEST_LENGTH_MAX + 1];
    if (a_length > SUGGEST_LENGTH_MAX || b_length > SUGGEST_LENGTH_MAX) return SUGGEST_LENGTH_MAX;
    for (size_t j = 0; j <= b_length; j++) row[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            size_t insert = row[j - 1] + 1, delete = row[j] + 1;
            row[j] = replace < insert ? replace : insert;
            if (delete < row[j]) row[j] = delete;
        }
    }
    return row[b_length];
}

const char *flags_suggest(const char *text, const char *const *names, size_t count) {
    const char *best = NULL;
    size_t best_distance = strlen(text) / 3 + 2; /* farther than this is a different word */
    for (size_t i = 0; i < count; i++) {
        size_t distance = edit_distance(text, names[i]);
        if (distance < best_distance) {
            best_distance = distance;
            best = names[i];
        }
    }
    return best;
}

void flags_print_help(const struct command *command) {
    printf("usage: fathom %s %s\n\n%s\n", command->name, command->usage, command->summary);
    if (command->flag_count) printf("\n");
    for (size_t i = 0; i < command->flag_count; i++) {
        const struct flag *flag = &command->flags[i];
        char left[64];
        snprintf(left, sizeof left, "%c%c%s --%s%s%s", flag->letter ? '-' : ' ',
                 flag->letter ? flag->letter : ' ', flag->letter ? "," : " ", flag->name,
                 flag->placeholder ? " " : "", flag->placeholder ? flag->placeholder : "");
        printf("  %-30s %s\n", left, flag->help);
    }
    if (command->examples) printf("\n%s\n", command->examples);
}

static int parse_whole(const char *text, uint64_t *value) {
    if (!isdigit((unsigned char)*text)) return FATHOM_INVALID;
    char *end;
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0') return FATHOM_INVALID;
    *value = parsed;
    return 0;
}

static int parse_seed(const char *text, uint64_t *value) {
    bool negative = *text == '-';
    uint64_t magnitude;
    if (parse_whole(text + negative, &magnitude) != 0) return FATHOM_INVALID;
    if (negative && magnitude > (uint64_t)INT64_MAX + 1) return FATHOM_INVALID;
    *value = negative ? 0 - magnitude : magnitude;
    return 0;
}

static int parse_real(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end == text || *end != '\0' || !isfinite(*value) ? FATHOM_INVALID : 0;
}

static int bounds_error(const struct flag *flag, const char *text, struct error *error) {
    return error_set(error, FATHOM_INVALID, "--%s must be between %.15g and %.15g; got '%s'",
                     flag->name, flag->low, flag->high, text);
}

static int flag_set(const struct flag *flag, const char *text, struct error *error) {
    switch (flag->kind) {
    case FLAG_TEXT:
        *(const char **)flag->value = text;
        return 0;
    case FLAG_BYTES: {
        size_t bytes;
        int result = size_parse(text, &bytes, error);
        if (result != 0) {
            error_prefix(error, "--%s", flag->name);
            return result;
        }
        if ((double)bytes < flag->low || (double)bytes > flag->high)
            return bounds_error(flag, text, error);
        *(size_t *)flag->value = bytes;
        return 0;
    }
    case FLAG_COUNT: {
        uint64_t count;
        if (parse_whole(text, &count) != 0 || (double)count < flag->low ||
            (double)count > flag->high) {
            return bounds_error(flag, text, error);
        }
        *(size_t *)flag->value = (size_t)count;
        return 0;
    }
    case FLAG_SEED:
        if (parse_seed(text, flag->value) == 0) return 0;
        return error_set(error, FATHOM_INVALID, "--%s must be a 64-bit whole number; got '%s'",
                         flag->name, text);
    case FLAG_REAL: {
        double real;
        if (parse_real(text, &real) != 0 || real < flag->low || real > flag->high) {
            return bounds_error(flag, text, error);
        }
        *(double *)flag->value = real;
        return 0;
    }
    case FLAG_SWITCH:
        break;
    }
    bool on = strcmp(text, "1") == 0 || strcmp(text, "true") == 0 || strcmp(text, "yes") == 0;
    bool off = strcmp(text, "0") == 0 || strcmp(text, "false") == 0 || strcmp(text, "no") == 0;
    if (!on && !off) {
        return error_set(error, FATHOM_INVALID,
                         "--%s is a switch; 'true' and 'false' are its values, not '%s'",
                         flag->name, text);
    }
    *(bool *)flag->value = on;
    return 0;
}

static int flags_from_environment(const struct command *command, struct error *error) {
    for (size_t i = 0; i < command->flag_count; i++) {
        char name[64];
        int length = snprintf(name, sizeof name, "FATHOM_%s", command->flags[i].name);
        for (int j = 0; j < length; j++) {
            name[j] = name[j] == '-' ? '_' : (char)toupper((unsigned char)name[j]);
        }
        const char *text = getenv(name);
        if (!text || !*text) continue;
        int result = flag_set(&command->flags[i], text, error);
        if (result != 0) {
            error_prefix(error, "%s in the environment", name);
            return result;
        }
    }
    return 0;
}

static int unknown_flag(const struct command *command, const char *name, struct error *error) {
    const char *names[128];
    size_t count = command->flag_count < 128 ? command->flag_count : 128;
    for (size_t i = 0; i < count; i++) names[i] = command->flags[i].name;
    const char *near = flags_suggest(name, names, count);
    if (near) {
        return error_set(error, FATHOM_INVALID, "unknown flag --%s; did you mean --%s?", name,
                         near);
    }
    return error_set(error, FATHOM_INVALID, "unknown flag --%s; see 'fathom %s --help'", name,
                     command->name);
}

/* Finds the flag that an argument names; *attached is what follows '=', or NULL. */
static const struct flag *flag_find(const struct command *command, const char *argument,
                                    const char **attached) {
    const char *name = argument + (argument[1] == '-' ? 2 : 1);
    size_t length = strcspn(name, "=");
    *attached = name[length] == '=' ? name + length + 1 : NULL;
    for (size_t i = 0; i < command->flag_count; i++) {
        const struct flag *flag = &command->flags[i];
        bool is_long = argument[1] == '-' && strlen(flag->name) == length &&
                       memcmp(flag->name, name, length) == 0;
        bool is_short = argument[1] != '-' && length == 1 && flag->letter == name[0];
        if (is_long || is_short) return flag;
    }
    return NULL;
}

int flags_parse(const struct command *command, int argc, char **argv, struct error *error) {
    int result = flags_from_environment(command, error);
    if (result != 0) return result;
    size_t positionals = 0;
    bool flags_ended = false;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (!flags_ended && strcmp(argument, "--") == 0) {
            flags_ended = true;
            continue;
        }
        if (flags_ended || argument[0] != '-' || argument[1] == '\0') {
            if (positionals == command->positional_count) {
                return error_set(error, FATHOM_INVALID,
                                 "unexpected argument '%s'; usage: fathom %s %s", argument,
                                 command->name, command->usage);
            }
            command->positionals[positionals++] = argument;
            continue;
        }
        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            flags_print_help(command);
            return FLAGS_HELP;
        }
        const char *value;
        const struct flag *flag = flag_find(command, argument, &value);
        if (!flag) return unknown_flag(command, argument + (argument[1] == '-' ? 2 : 1), error);
        if (!value && flag->kind == FLAG_SWITCH) value = "true";
        if (!value && i + 1 < argc) value = argv[++i];
        if (!value) {
            return error_set(error, FATHOM_INVALID, "--%s needs a value: --%s %s", flag->name,
                             flag->name, flag->placeholder);
        }
        result = flag_set(flag, value, error);
        if (result != 0) return result;
    }
    if (positionals < command->positional_count) {
        return error_set(error, FATHOM_INVALID, "missing argument; usage: fathom %s %s",
                         command->name, command->usage);
    }
    return 0;
}
