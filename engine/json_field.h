/* Reading JSON that nobody has vouched for: bounded parsing, and values with a type and a range.
 *
 * Private to the files of a checkpoint. Every refusal names the key, what was found and what would
 * be right; the caller puts the file's path in front.
 */
#ifndef FATHOM_JSON_FIELD_H
#define FATHOM_JSON_FIELD_H

#include <jansson.h>

#include "base/base.h"

/* Parses one JSON object; the caller json_decref's it. Duplicate keys are refused, and so are
 * documents that would take far more memory as a tree than as text. */
int json_object_parse(const char *text, size_t size, json_t **object, struct error *error);

/* A member, or NULL when it is absent or null: in these files null means "not given". */
json_t *json_object_field(const json_t *object, const char *key);

/* The readers below refuse a `value` of NULL as missing. `name` is how messages call it. */

/* A number written without fraction or exponent, minimum..maximum. */
int json_read_integer(const json_t *value, const char *name, int64_t minimum, int64_t maximum,
                      int64_t *out, struct error *error);

/* Any number, minimum..maximum. */
int json_read_number(const json_t *value, const char *name, double minimum, double maximum,
                     double *out, struct error *error);

/* One of `count` words; *out is its index. Another word is FATHOM_UNSUPPORTED. */
int json_read_choice(const json_t *value, const char *name, const char *const *words, size_t count,
                     size_t *out, struct error *error);

/* The refusal itself: "NAME is VALUE; EXPECTED is required", or "NAME is missing; ...". */
int json_refuse(const json_t *value, const char *name, const char *expected, struct error *error);

#endif
