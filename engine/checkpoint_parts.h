/* The texts beside the weights, as parsers over bytes in memory. Private to the checkpoint. */
#ifndef FATHOM_CHECKPOINT_PARTS_H
#define FATHOM_CHECKPOINT_PARTS_H

#include "engine/checkpoint.h"

#define CONFIG_BYTES_MAX ((size_t)1 << 20)
#define DEPTH_BYTES_MAX  ((size_t)16 << 20)

/* config.json. */
int config_parse(const char *text, size_t size, struct config *config, struct error *error);

/* generation_config.json: its bos_token_id and eos_token_id go before those of config.json. */
int config_parse_generation(const char *text, size_t size, struct config *config,
                            struct error *error);

/* depth.json of a model with `sublayers` sub-layers; the caller frees table->theta. */
int depth_table_parse(const char *text, size_t size, size_t sublayers, struct depth_table *table,
                      struct error *error);

/* What a checkpoint without depth.json has: "full" alone. The caller frees table->theta. */
int depth_table_full(size_t sublayers, struct depth_table *table, struct error *error);

#endif
