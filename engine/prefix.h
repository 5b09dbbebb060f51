/* Reuse of prefixes by running sequences: what was computed once, for anyone, is not again.
 *
 * Only full blocks are reused, and never the row whose logits are wanted. A block is published as
 * soon as its last row is in a step: a sequence later in the same step may already read it, because
 * every layer stores the K and V of all rows before any row attends. Two that compute the same
 * block in parallel keep one of the two copies afterwards, which are equal bit for bit.
 *
 * Holds for every sequence that takes part: all its full blocks of positions below `computed` are
 * published between steps. Engine thread only.
 */
#ifndef FATHOM_PREFIX_H
#define FATHOM_PREFIX_H

#include "engine/kv.h"
#include "engine/sequence.h"

/* Moves `computed` forward over blocks that are there; the sequence has a slot and no row in this
 * step yet. Returns the positions that are new to the sequence: not reached before. */
size_t prefix_reuse(struct kv *kv, struct sequence *sequence);

/* The sequence's next `rows` rows are in this step: publishes the blocks that they complete. */
void prefix_announce(struct kv *kv, const struct sequence *sequence, size_t rows);

/* The step with the last `rows` rows below `computed` is done: equal blocks become one. */
void prefix_settle(struct kv *kv, const struct sequence *sequence, size_t rows);

#endif
