/* The fields of a JSON body: bounded parsing, then one reader per type that checks range and
 * finiteness and names the field when it refuses. Private to api/.
 *
 * An absent field and an explicit null are the same thing: a reader then leaves *out as it was.
 * Integers may be written with a fraction of zero (3.0), since JavaScript clients do; strings and
 * booleans are never numbers. A repeated key is refused: two readers could each take another value.
 */
#ifndef FATHOM_FIELDS_H
#define FATHOM_FIELDS_H

#include <jansson.h>

#include "api/api.h"

/* One JSON object, at most JSON_DEPTH_MAX deep; the caller json_decref's it. What cannot be read is
 * refused by the name of the member in which it stands. */
int body_parse(const char *body, size_t length, json_t **object, struct api_error *error);

/* The member, or NULL when it is absent or null. */
const json_t *field_get(const json_t *object, const char *name);

int field_read_bool(const json_t *object, const char *name, bool *out, struct api_error *error);
int field_read_integer(const json_t *object, const char *name, int64_t low, int64_t high,
                       int64_t *out, struct api_error *error);
/* low..high, or (low, high] when open_low. */
int field_read_number(const json_t *object, const char *name, double low, double high,
                      bool open_low, double *out, struct api_error *error);

/* 400 "NAME must be EXPECTED, not FOUND"; `found` may be NULL (missing). */
int field_refuse(const char *name, const json_t *found, struct api_error *error,
                 const char *expected, ...) __attribute__((format(printf, 4, 5)));

/* "NAME[index]" into out[64]. */
const char *field_element(const char *name, size_t index, char out[64]);

/* True and *out for 3 and 3.0; false for anything else. */
bool value_to_integer(const json_t *value, int64_t *out);

/* True for that string and no other: one that goes on behind a NUL is another. */
bool value_is_word(const json_t *value, const char *word);

/* A new list from an array of ids below `vocab`; `name` is how a message calls the array. On
 * failure *list is as it was. */
int value_to_tokens(const json_t *array, const char *name, size_t vocab, struct token_list *list,
                    struct api_error *error);

/* 400 unsupported_parameter: the field is known, and not done here. */
int refuse_unsupported(const char *name, struct api_error *error);

/* 500, for the one thing that is not the client's mistake. */
int refuse_no_memory(struct api_error *error);
/* 503, which nobody reads: the work was given up. */
int refuse_abandoned(struct api_error *error);

#endif
