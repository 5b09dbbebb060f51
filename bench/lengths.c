#include "bench/lengths.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *prefix;
    enum length_kind kind;
    char separator; /* between the two numbers; 0 when there is one */
} forms[] = {
    {"normal:", LENGTH_NORMAL, ':'},
    {"lognormal:", LENGTH_LOGNORMAL, ':'},
    {"exponential:", LENGTH_EXPONENTIAL, 0},
    {"", LENGTH_UNIFORM, '-'},
    {"", LENGTH_FIXED, 0},
};

/* A plain decimal number from `low` to LENGTH_MAX; *end is what follows. */
static bool number_parse(const char *text, double low, const char **end, double *value) {
    if (!isdigit((unsigned char)*text)) return false;
    char *after;
    *value = strtod(text, &after);
    *end = after;
    return isfinite(*value) && *value >= low && *value <= LENGTH_MAX;
}

int lengths_parse(const char *flag, const char *text, struct lengths *lengths,
                  struct error *error) {
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        size_t prefix = strlen(forms[i].prefix);
        if (strncmp(text, forms[i].prefix, prefix) != 0) continue;
        struct lengths parsed = {.kind = forms[i].kind};
        const char *rest;
        if (!number_parse(text + prefix, 1, &rest, &parsed.first)) continue;
        if (forms[i].separator) {
            double low = forms[i].separator == '-' ? parsed.first : 0;
            if (*rest != forms[i].separator) continue;
            if (!number_parse(rest + 1, low, &rest, &parsed.second)) continue;
        }
        if (*rest != '\0') continue;
        *lengths = parsed;
        return 0;
    }
    return error_set(error, FATHOM_INVALID,
                     "--%s must be N, LOW-HIGH, normal:MEAN:DEVIATION, lognormal:MEAN:DEVIATION or "
                     "exponential:MEAN, of 1 to %d tokens; got '%s'",
                     flag, LENGTH_MAX, text);
}

/* The lognormal that has this mean and deviation itself, not those of its logarithm. */
static double lognormal_draw(double mean, double deviation, struct dice *dice) {
    double variance = log1p(deviation * deviation / (mean * mean));
    return exp(log(mean) - variance / 2 + sqrt(variance) * dice_normal(dice));
}

size_t lengths_draw(const struct lengths *lengths, struct dice *dice) {
    double a = lengths->first, b = lengths->second, length = a;
    switch (lengths->kind) {
    case LENGTH_FIXED:
        break;
    case LENGTH_UNIFORM:
        length = floor(a) + (double)dice_below(dice, (uint64_t)(floor(b) - floor(a)) + 1);
        break;
    case LENGTH_NORMAL:
        length = a + b * dice_normal(dice);
        break;
    case LENGTH_LOGNORMAL:
        length = lognormal_draw(a, b, dice);
        break;
    case LENGTH_EXPONENTIAL:
        length = -a * log(dice_unit(dice));
        break;
    }
    if (!(length > 1)) return 1;
    return length < LENGTH_MAX ? (size_t)lround(length) : LENGTH_MAX;
}
