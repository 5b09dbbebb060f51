/* config.json by model family. Private to config.c and config_standard.c. */
#ifndef FATHOM_CONFIG_PARTS_H
#define FATHOM_CONFIG_PARTS_H

#include "engine/checkpoint_parts.h"
#include "engine/json_field.h"

/* What the families "llama", "mistral", "qwen2" and "qwen3" say beside the counts, which are read:
 * head_size and kv_heads are 0 where they were not given. */
int config_read_standard(const json_t *object, const char *family, struct config *config,
                         struct error *error);

#endif
