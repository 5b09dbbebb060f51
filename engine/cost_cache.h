/* The times of a model's parts on this machine, kept in a file for the next start.
 *
 * One file for each model shape, device, weight type and processor, which it names in full: a file
 * that says anything else, or anything that cannot be, is not used. Nobody's answer depends on
 * what it says, only which body computes it and how many rows a step takes. */
#ifndef FATHOM_COST_CACHE_H
#define FATHOM_COST_CACHE_H

#include "engine/engine.h"

/* FATHOM_NOT_FOUND: no cache, or no file; else what is wrong with the file. */
int cost_cache_read(const struct model *model, struct cost_model *cost, struct error *error);

/* Makes the folder and its parent if need be; replaces the file in one go. 0 without a cache. */
int cost_cache_write(const struct model *model, const struct cost_model *cost, struct error *error);

#endif
