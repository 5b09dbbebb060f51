/* What the parts of a tokenizer.json have in common. */
#include "engine/tokenizer_private.h"

#include <string.h>

int json_read_flag(const json_t *object, const char *key, bool absent, bool *value,
                   struct error *error) {
    const json_t *member = json_object_get(object, key);
    if (member && !json_is_boolean(member) && !json_is_null(member)) {
        return error_set(error, FATHOM_INVALID, "'%s' is not true or false", key);
    }
    *value = json_is_boolean(member) ? json_is_true(member) : absent;
    return 0;
}

const char *json_type_name(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}

int json_read_steps(const json_t *part, const char *key, json_step_reader *read, void *context,
                    struct error *error) {
    if (strcmp(json_type_name(part), "Sequence") != 0) return read(context, part, error);
    const json_t *steps = json_object_get(part, key);
    int result = 0;
    for (size_t i = 0; i < json_array_size(steps) && result == 0; i++) {
        result = read(context, json_array_get(steps, i), error);
    }
    return result;
}
