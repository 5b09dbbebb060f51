/* The field `prompt` in its four shapes, and every prompt's tokens. Private to api/. */
#ifndef FATHOM_PROMPT_H
#define FATHOM_PROMPT_H

#include "api/fields.h"

/* `prompt` of the body: a string, [string], [id] or [[id]], into request->prompts and prompt_count.
 * On failure what was filled is still the request's to free. */
int prompts_read(const struct api_context *context, const json_t *body,
                 struct completion_request *request, struct api_error *error);

void prompt_free(struct prompt *prompt);

#endif
