/* Parsing JSON when memory may run out. jansson's lexer does not look whether it did: it would call
 * a file's or a client's text wrong, or meet an assertion of its own. Apart from base.h for those
 * who know no jansson. */
#ifndef FATHOM_JSON_H
#define FATHOM_JSON_H

#include <jansson.h>

#include "base/base.h"

/* json_loadb; on failure *no_memory says whether that was the reason, else `syntax` has it. */
json_t *json_parse(const char *text, size_t length, size_t flags, json_error_t *syntax,
                   bool *no_memory);

#endif
