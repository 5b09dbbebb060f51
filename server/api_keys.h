/* The keys that open the API: from a file, one a line, or FATHOM_API_KEY. */
#ifndef FATHOM_API_KEYS_H
#define FATHOM_API_KEYS_H

#include "base/base.h"

#define API_KEY_MAX 512 /* bytes */

struct api_keys {
    char **keys;  /* malloc'd strings */
    size_t count; /* 0: the API is open */
};

/* path and single may be NULL. Lines that are empty or start with '#' are no keys; a file without a
 * key and an empty `single` are errors, because they would open what they were meant to close. */
int api_keys_load(struct api_keys *keys, const char *path, const char *single, struct error *error);
void api_keys_free(struct api_keys *keys);

/* Checks an Authorization value, "Bearer KEY". The time tells neither which key nor how much of one
 * matched. */
bool api_keys_accept(const struct api_keys *keys, const char *authorization, size_t length);

#endif
