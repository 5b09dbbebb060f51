/* depth.json: quality tiers, read and written. */
#include "engine/checkpoint_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/json_field.h"

static const char *const kv_policies[] = {"compute", "omit"}; /* in the order of enum kv_policy */

static int read_head(const json_t *object, struct depth_table *table, struct error *error);
static int read_tiers(const json_t *array, struct depth_table *table, struct error *error);
static int read_tier(const json_t *object, struct depth_table *table, size_t tier,
                     struct error *error);
static int read_theta(const json_t *array, size_t sublayers, float *theta, struct error *error);
static int read_default(const json_t *value, struct depth_table *table, struct error *error);
static int read_measured(const json_t *object, struct depth_table *table, struct error *error);
static int check_tier(const struct depth_table *table, size_t tier, struct error *error);
static bool are_figures(const struct tier_info *info);
static bool is_tier_name(const char *name);
static int find_tier(const struct depth_table *table, const char *name);
static int write_synced(const char *path, const struct depth_table *table, struct error *error);
static void print_table(FILE *out, const struct depth_table *table);
static void print_measured(FILE *out, const struct depth_table *table);
static void print_figure(FILE *out, const char *key, double figure);
static int sync_folder(const char *folder, struct error *error);

int depth_table_full(size_t sublayers, struct depth_table *table, struct error *error) {
    memset(table, 0, sizeof *table);
    table->sublayers = sublayers;
    table->tier_count = 1;
    memcpy(table->tiers[0].name, "full", sizeof "full");
    table->theta = calloc(sublayers, sizeof *table->theta);
    return table->theta ? 0 : error_set(error, FATHOM_NO_MEMORY, "no memory for thresholds");
}

int depth_table_parse(const char *text, size_t size, size_t sublayers, struct depth_table *table,
                      struct error *error) {
    json_t *object;
    int result = json_object_parse(text, size, &object, error);
    if (result != 0) return result;
    memset(table, 0, sizeof *table);
    table->sublayers = sublayers;
    result = read_head(object, table, error);
    if (result == 0) result = read_tiers(json_object_field(object, "tiers"), table, error);
    if (result == 0) result = depth_table_check(table, error);
    if (result == 0) result = read_default(json_object_field(object, "default"), table, error);
    if (result == 0) result = read_measured(json_object_field(object, "measured"), table, error);
    json_decref(object);
    if (result != 0) {
        free(table->theta);
        table->theta = NULL;
    }
    return result;
}

static int read_head(const json_t *object, struct depth_table *table, struct error *error) {
    const json_t *policy = json_object_field(object, "kv_policy");
    size_t chosen = KV_COMPUTE;
    int64_t format;
    int result =
        json_read_integer(json_object_field(object, "format"), "format", 1, 1, &format, error);
    if (result == 0 && policy) {
        result = json_read_choice(policy, "kv_policy", kv_policies, 2, &chosen, error);
    }
    table->kv_policy = (enum kv_policy)chosen;
    return result;
}

static int read_tiers(const json_t *array, struct depth_table *table, struct error *error) {
    if (!json_is_array(array)) return json_refuse(array, "tiers", "an array", error);
    table->tier_count = json_array_size(array);
    if (table->tier_count < 1 || table->tier_count > TIERS_MAX) {
        return error_set(error, FATHOM_INVALID, "tiers has %zu entries; 1 to %d are possible",
                         table->tier_count, TIERS_MAX);
    }
    table->theta = calloc(table->tier_count * table->sublayers, sizeof *table->theta);
    if (!table->theta) return error_set(error, FATHOM_NO_MEMORY, "no memory for thresholds");
    for (size_t i = 0; i < table->tier_count; i++) {
        int result = read_tier(json_array_get(array, i), table, i, error);
        if (result != 0) {
            error_prefix(error, "tiers[%zu]", i);
            return result;
        }
    }
    return 0;
}

static int read_tier(const json_t *object, struct depth_table *table, size_t tier,
                     struct error *error) {
    struct tier_info *info = &table->tiers[tier];
    if (!json_is_object(object)) return json_refuse(object, "the tier", "an object", error);
    const json_t *name = json_object_field(object, "name");
    if (!json_is_string(name) || json_string_length(name) >= sizeof info->name) {
        return json_refuse(name, "name", "a text of 1 to 31 bytes", error);
    }
    memcpy(info->name, json_string_value(name), json_string_length(name) + 1);
    int result = json_read_number(json_object_field(object, "target_skip"), "target_skip", 0, 1,
                                  &info->target_skip, error);
    if (result != 0) return result;
    return read_theta(json_object_field(object, "theta"), table->sublayers,
                      table->theta + tier * table->sublayers, error);
}

static int read_theta(const json_t *array, size_t sublayers, float *theta, struct error *error) {
    if (!json_is_array(array)) return json_refuse(array, "theta", "an array", error);
    if (json_array_size(array) != sublayers) {
        return error_set(error, FATHOM_INVALID,
                         "theta has %zu numbers; the model has %zu sub-layers",
                         json_array_size(array), sublayers);
    }
    for (size_t i = 0; i < sublayers; i++) {
        double number;
        int result =
            json_read_number(json_array_get(array, i), "the number", 0, DBL_MAX, &number, error);
        if (result != 0) {
            error_prefix(error, "theta[%zu]", i);
            return result;
        }
        theta[i] = (float)fmin(number, FLT_MAX); /* mix is at most 1: all beyond it are alike */
    }
    return 0;
}

static int read_default(const json_t *value, struct depth_table *table, struct error *error) {
    int tier =
        json_is_string(value) ? find_tier(table, json_string_value(value)) : FATHOM_NOT_FOUND;
    if (tier < 0) return json_refuse(value, "default", "the name of a tier", error);
    table->default_tier = (size_t)tier;
    return 0;
}

/* Optional, for all tiers or some. */
static int read_measured(const json_t *object, struct depth_table *table, struct error *error) {
    if (!object) return 0;
    if (!json_is_object(object)) return json_refuse(object, "measured", "an object", error);
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)object, name, entry) {
        int tier = find_tier(table, name);
        if (tier < 0) {
            return error_set(error, FATHOM_INVALID, "measured '%s': tiers has no such tier", name);
        }
        struct tier_info *info = &table->tiers[tier];
        const struct {
            const char *key;
            double maximum, *out;
        } figures[] = {{"perplexity", DBL_MAX, &info->perplexity},
                       {"attn_skip", 1, &info->attn_skip},
                       {"mlp_skip", 1, &info->mlp_skip},
                       {"flops_per_token", DBL_MAX, &info->flops_per_token}};
        for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
            int result = json_read_number(json_object_field(entry, figures[i].key), figures[i].key,
                                          0, figures[i].maximum, figures[i].out, error);
            if (result != 0) {
                error_prefix(error, "measured '%s'", name);
                return result;
            }
        }
        info->measured = true;
    }
    return 0;
}

int depth_table_check(const struct depth_table *table, struct error *error) {
    if (table->tier_count < 1 || table->tier_count > TIERS_MAX ||
        table->default_tier >= table->tier_count) {
        return error_set(error, FATHOM_INVALID, "%zu tiers with default %zu; 1 to %d are possible",
                         table->tier_count, table->default_tier, TIERS_MAX);
    }
    for (size_t i = 0; i < table->tier_count; i++) {
        int result = check_tier(table, i, error);
        if (result != 0) return result;
    }
    int full = find_tier(table, "full");
    if (full < 0) return error_set(error, FATHOM_INVALID, "tiers has no tier named 'full'");
    const float *theta = table->theta + (size_t)full * table->sublayers;
    for (size_t i = 0; i < table->sublayers; i++) {
        if (theta[i] != 0) {
            return error_set(error, FATHOM_INVALID, "tier 'full': theta[%zu] is %.9g; it must be 0",
                             i, (double)theta[i]);
        }
    }
    return 0;
}

static int check_tier(const struct depth_table *table, size_t tier, struct error *error) {
    const struct tier_info *info = &table->tiers[tier];
    if (!is_tier_name(info->name)) {
        return error_set(
            error, FATHOM_INVALID,
            "tier name '%s' is not 1 to 31 of a-z 0-9 _ . - with a letter or digit first",
            info->name);
    }
    if (strcmp(info->name, "auto") == 0) {
        return error_set(error, FATHOM_INVALID, "tier name 'auto' is reserved for requests");
    }
    if (find_tier(table, info->name) != (int)tier) {
        return error_set(error, FATHOM_INVALID, "tier name '%s' is used twice", info->name);
    }
    if (!(info->target_skip >= 0 && info->target_skip <= 1)) {
        return error_set(error, FATHOM_INVALID,
                         "tier '%s': target_skip is %.9g; 0 to 1 is required", info->name,
                         info->target_skip);
    }
    if (info->measured && !are_figures(info)) {
        return error_set(error, FATHOM_INVALID,
                         "tier '%s': measured figures must be finite, at least 0, skips at most 1",
                         info->name);
    }
    for (size_t i = 0; i < table->sublayers; i++) {
        float theta = table->theta[tier * table->sublayers + i];
        if (!isfinite(theta) || theta < 0) {
            return error_set(
                error, FATHOM_INVALID,
                "tier '%s': theta[%zu] is %.9g; a finite number of at least 0 is required",
                info->name, i, (double)theta);
        }
    }
    return 0;
}

/* False for NaN too. */
static bool are_figures(const struct tier_info *info) {
    return info->perplexity >= 0 && info->perplexity <= DBL_MAX && info->attn_skip >= 0 &&
           info->attn_skip <= 1 && info->mlp_skip >= 0 && info->mlp_skip <= 1 &&
           info->flops_per_token >= 0 && info->flops_per_token <= DBL_MAX;
}

/* No ':' (it separates model and tier in requests), nothing that JSON would have to escape. */
static bool is_tier_name(const char *name) {
    size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_.-");
    return length > 0 && length < TIER_NAME_MAX && name[length] == '\0' && !strchr("_.-", name[0]);
}

static int find_tier(const struct depth_table *table, const char *name) {
    for (size_t i = 0; i < table->tier_count; i++) {
        if (strcmp(table->tiers[i].name, name) == 0) return (int)i;
    }
    return FATHOM_NOT_FOUND;
}

int depth_table_save(const char *folder, const struct depth_table *table, struct error *error) {
    char *path = NULL, *temporary = NULL;
    int result;
    if (asprintf(&path, "%s/depth.json", folder) < 0) path = NULL;
    if (asprintf(&temporary, "%s/depth.json.%ld.new", folder, (long)getpid()) < 0) temporary = NULL;
    if (!path || !temporary) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory to write depth.json");
    } else if ((result = depth_table_check(table, error)) != 0) {
        error_prefix(error, "%s", path);
    } else if ((result = write_synced(temporary, table, error)) == 0) {
        if (rename(temporary, path) != 0) {
            result = error_set(error, FATHOM_IO, "cannot replace %s: %s", path, strerror(errno));
            unlink(temporary);
        } else {
            result = sync_folder(folder, error);
        }
    }
    free(path);
    free(temporary);
    return result;
}

static int write_synced(const char *path, const struct depth_table *table, struct error *error) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    FILE *out = file < 0 ? NULL : fdopen(file, "w");
    if (!out) {
        int result = error_set(error, FATHOM_IO, "cannot write %s: %s", path, strerror(errno));
        if (file >= 0) close(file);
        return result;
    }
    print_table(out, table);
    bool written = fflush(out) == 0 && !ferror(out) && fsync(fileno(out)) == 0;
    int cause = errno;
    if (fclose(out) != 0 && written) {
        written = false;
        cause = errno;
    }
    if (written) return 0;
    unlink(path);
    return error_set(error, FATHOM_IO, "cannot write %s: %s", path, strerror(cause));
}

static void print_table(FILE *out, const struct depth_table *table) {
    fprintf(out, "{\n  \"format\": 1,\n  \"kv_policy\": \"%s\",\n  \"tiers\": [",
            kv_policies[table->kv_policy]);
    for (size_t i = 0; i < table->tier_count; i++) {
        const struct tier_info *tier = &table->tiers[i];
        const float *theta = table->theta + i * table->sublayers;
        fprintf(out, "%s\n    {\n      \"name\": \"%s\",\n      ", i ? "," : "", tier->name);
        print_figure(out, "target_skip", tier->target_skip);
        fprintf(out, ",\n      \"theta\": [");
        for (size_t j = 0; j < table->sublayers; j++) {
            /* 9 digits bring any float back. */
            fprintf(out, "%s%.9g", j ? ", " : "", (double)theta[j]);
        }
        fprintf(out, "]\n    }");
    }
    fprintf(out, "\n  ],\n  \"default\": \"%s\"", table->tiers[table->default_tier].name);
    print_measured(out, table);
    fprintf(out, "\n}\n");
}

static void print_measured(FILE *out, const struct depth_table *table) {
    const char *before = ",\n  \"measured\": {", *after = "";
    for (size_t i = 0; i < table->tier_count; i++) {
        const struct tier_info *tier = &table->tiers[i];
        if (!tier->measured) continue;
        fprintf(out, "%s\n    \"%s\": {", before, tier->name);
        print_figure(out, "perplexity", tier->perplexity);
        fprintf(out, ", ");
        print_figure(out, "attn_skip", tier->attn_skip);
        fprintf(out, ", ");
        print_figure(out, "mlp_skip", tier->mlp_skip);
        fprintf(out, ", ");
        print_figure(out, "flops_per_token", tier->flops_per_token);
        fprintf(out, "}");
        before = ",";
        after = "\n  }";
    }
    fprintf(out, "%s", after);
}

/* A double with as few digits as bring the same value back: 0.1, not 0.10000000000000001. */
static void print_figure(FILE *out, const char *key, double figure) {
    char digits[32];
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, figure);
        if (strtod(digits, NULL) == figure) break;
    }
    fprintf(out, "\"%s\": %s", key, digits);
}

/* Makes the rename itself last through a power cut. */
static int sync_folder(const char *folder, struct error *error) {
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int result = 0;
    if (file < 0 || fsync(file) != 0) {
        result = error_set(error, FATHOM_IO, "cannot sync folder %s: %s", folder, strerror(errno));
    }
    if (file >= 0) close(file);
    return result;
}
