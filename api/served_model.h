/* What is served: the model's name with its optional tier suffix, and the tiers. Private to
 * api/. */
#ifndef FATHOM_SERVED_MODEL_H
#define FATHOM_SERVED_MODEL_H

#include "api/api.h"

/* Index of the tier called name[0..length) ("auto" is the default), or FATHOM_NOT_FOUND. */
int tier_find(const struct api_context *context, const char *name, size_t length);

/* 400 that names the tiers there are. */
int tier_refuse(const struct api_context *context, const char *param, const char *name,
                struct api_error *error);

/* `name` must be the served name, alone or with ":TIER". *tier is the suffix's tier, or stays as it
 * was. Another name is 404 model_not_found. */
int served_model_find(const struct api_context *context, const char *name, size_t length,
                      size_t *tier, struct api_error *error);

#endif
