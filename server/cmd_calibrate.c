/* fathom calibrate: finds the tiers' thresholds on a text and writes depth.json. */
#include "server/command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct calibrate_flags {
    struct model_flags model;
    const char *text, *measure, *target;
    size_t max_tokens, measure_tokens, window;
};

/* "high=0.10,fast=0.4" into targets; returns how many, or a negative error. */
static int parse_targets(const char *list, struct calibration_target *targets,
                         struct error *error) {
    int count = 0;
    while (*list) {
        size_t length = strcspn(list, ","), name = strcspn(list, "=");
        struct calibration_target *target = &targets[count];
        char *end = NULL;
        if (name < length && name > 0 && name < sizeof target->name)
            target->skip = strtod(list + name + 1, &end);
        if (!end || end != list + length || end == list + name + 1) {
            return error_set(error, FATHOM_INVALID, "--target wants NAME=RATE,...; got '%.*s'",
                             (int)length, list);
        }
        if (!(target->skip > 0 && target->skip <= CALIBRATION_SKIP_MAX)) {
            return error_set(error, FATHOM_INVALID,
                             "--target wants rates above 0 and up to %g; got '%.*s'",
                             CALIBRATION_SKIP_MAX, (int)length, list);
        }
        memcpy(target->name, list, name);
        target->name[name] = '\0';
        list += length + (list[length] == ',');
        if (++count == TIERS_MAX - 1 && *list) {
            return error_set(error, FATHOM_INVALID, "--target names over %d tiers", TIERS_MAX - 1);
        }
    }
    return count ? count : error_set(error, FATHOM_INVALID, "--target names no tier");
}

static void print_line(void *context, const char *line) {
    (void)context;
    printf("%s\n", line);
    fflush(stdout);
}

static size_t at_most(size_t count, size_t limit) {
    return limit && limit < count ? limit : count;
}

static int calibrate(struct model *model, const struct calibrate_flags *flags,
                     const struct calibration_target *targets, size_t target_count,
                     struct error *error) {
    struct token_list tokens = {0}, measured = {0};
    int result = command_read_tokens(model, flags->text, &tokens, NULL, error);
    if (result == 0 && flags->measure)
        result = command_read_tokens(model, flags->measure, &measured, NULL, error);
    if (result == 0 && flags->measure && measured.count < 2) {
        result = error_set(error, FATHOM_INVALID, "%s has %zu tokens, too few to measure on",
                           flags->measure, measured.count);
    }
    if (result == 0) {
        struct calibration calibration = {
            .tokens = tokens.ids,
            .count = at_most(tokens.count, flags->max_tokens),
            .measure_tokens = flags->measure ? measured.ids : tokens.ids,
            .measure_count =
                at_most(flags->measure ? measured.count : tokens.count, flags->measure_tokens),
            .targets = targets,
            .target_count = target_count,
            .window = flags->window,
            .progress = print_line,
        };
        result = model_calibrate(model, &calibration, error);
    }
    free(tokens.ids);
    free(measured.ids);
    return result;
}

int cmd_calibrate(int argc, char **argv) {
    struct calibrate_flags options = {
        .model = MODEL_FLAGS_DEFAULT,
        .target = "high=0.10,balanced=0.25,fast=0.40",
        .max_tokens = 65536,
        .measure_tokens = 262144,
    };
    const char *path = NULL;
    const struct flag flags[] = {
        {"text", 't', FLAG_TEXT, "FILE", "text that the thresholds are fitted on (required)",
         &options.text, 0, 0},
        {"measure", 0, FLAG_TEXT, "FILE", "held-out text for the figures in depth.json (--text)",
         &options.measure, 0, 0},
        {"target", 0, FLAG_TEXT, "N=R,..",
         "tiers and skip rates (high=0.10,balanced=0.25,fast=0.40)", &options.target, 0, 0},
        {"max-tokens", 0, FLAG_COUNT, "N", "tokens to fit on (65536)", &options.max_tokens, 2,
         16777216},
        {"measure-tokens", 0, FLAG_COUNT, "N", "tokens to measure on, 0 for all (262144)",
         &options.measure_tokens, 0, 1e15},
        {"window", 0, FLAG_COUNT, "N", "tokens per independent window (the context)",
         &options.window, 2, 16777216},
        MODEL_FLAGS(options.model),
    };
    const struct command command = {
        .name = "calibrate",
        .usage = "MODEL --text FILE [flags]",
        .summary =
            "Finds, for every target, the size of step below which sub-layers are skipped so that "
            "the wanted\n"
            "share of skippable FLOPs is saved; measures each tier; writes MODEL/depth.json.",
        .examples =
            "example: fathom calibrate models/fathom-tiny --text train.txt --measure heldout.txt",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &path,
    };
    struct error error = {0};
    struct calibration_target targets[TIERS_MAX];
    int target_count = 0, parsed = flags_parse(&command, argc, argv, &error);
    if (parsed == FLAGS_HELP) return EXIT_OK;
    if (parsed == 0 && !options.text)
        parsed = error_set(&error, FATHOM_INVALID, "--text FILE is required");
    if (parsed == 0) target_count = parse_targets(options.target, targets, &error);
    if (parsed != 0 || target_count < 0) return command_fail("calibrate", &error, EXIT_USAGE);

    struct model *model = NULL;
    int result = command_load_model(path, &options.model, &model, &error);
    if (result == 0) result = calibrate(model, &options, targets, (size_t)target_count, &error);
    if (result == 0) printf("wrote %s/depth.json\n", model_get_info(model)->path);
    model_destroy(model);
    return result == 0 ? EXIT_OK : command_fail("calibrate", &error, EXIT_FAILED);
}
