/* Continuous batching: which rows of which sequences make up the next step.
 *
 * A sequence waits, runs (prefill, then one decode row per step), and leaves. A step takes the
 * decode rows of all running sequences first, so that a long prompt never stops a stream, then
 * prefill chunks while rows are left and, when somebody decodes, while the predicted time of the
 * step is within its target. Prefill gets one block's rows in any case, so that it always moves.
 * Order everywhere: sequence_before, earlier submission and lower priority value first; nobody
 * overtakes.
 *
 * Blocks. Admission takes over what the prefix cache has, reserves all else that is known of a
 * sequence and one token more; afterwards it grows by a block at a time. When none is free the
 * prefix cache gives one; when it has none the last running sequence in the order is preempted: its
 * blocks go back, it waits at its old place in the order, and its tokens are recomputed later. The
 * first in the order can therefore always go on: it must only fit the cache alone, which submission
 * checks.
 *
 * Under kv_policy omit a sequence has tables for several groups of layers (struct kv). How many
 * places its rows take there is known only afterwards: all are reserved for, and what was not taken
 * goes back when the step is complete.
 *
 * A pure state machine: no clock, no thread, no allocation after creation. Engine thread only.
 */
#ifndef FATHOM_SCHEDULER_H
#define FATHOM_SCHEDULER_H

#include "engine/cost.h"
#include "engine/kv.h"
#include "engine/sequence.h"

struct scheduler_limits {
    size_t max_sequences; /* running at once; at most max_step_rows are, so that each can decode */
    size_t max_step_rows;
    size_t prefill_chunk;        /* rows of one sequence in a step; 0: no limit of its own */
    size_t kv_blocks, kv_groups; /* tables of a sequence: struct kv; 0: 1 */
    size_t max_tokens;           /* of one sequence, prompt and generated: kv_blocks hold them */
    bool prefix_cache; /* reuse blocks that hold the same tokens, of whoever computed them; one
                          group only */
    const struct cost_model *cost; /* NULL: steps are bounded by rows alone */
    double step_target_ns;         /* of a step with decode rows; 0: none */
    double prefill_share; /* of a step's time that prefill may take beyond the target too: [0, 1) */
};

/* A sequence's rows in a step: first_row .. first_row + rows - 1, ascending in position. */
struct step_part {
    struct sequence *sequence;
    size_t first_row, rows;
    size_t recomputed;  /* leading rows that ran before a preemption and were reported then */
    size_t reused;      /* positions just before the first row that the prefix cache spared it */
    size_t first_logit; /* index into logit_rows of the first of its rows there, if any */
};

/* As struct batch wants it; valid until the next call of scheduler_next_step. */
struct step {
    size_t rows, part_count, logit_count;
    int32_t *token, *position, *tier, *slot; /* [max_step_rows]; a row's slot is its part */
    int32_t *logit_rows;                     /* [max_step_rows] */
    struct step_part *parts;                 /* [max_step_rows] */
    int32_t *block_table; /* [kv_groups, part_count, blocks_per_part]: what of the sequences' tables
                             this step reads and writes; 0 behind it */
    int32_t *places;      /* [kv_groups, part_count]: of the part's first row that takes one */
    size_t blocks_per_part;
    double modelled_ns;  /* by the cost model; 0 without one */
    double predicted_ns; /* times what steps of this size took longer of late */
};

#define SCHEDULER_DRIFTS 14 /* sizes of steps: 1, 2, 3, .. 13 bits, STEP_ROWS_MAX */

struct sequence_list {
    struct sequence *first, *last;
    size_t count;
};

struct scheduler {
    struct scheduler_limits limits;
    struct kv kv;
    struct sequence_list waiting, running; /* both in the order of sequence_before */
    int32_t *free_slots;
    size_t free_slot_count;
    struct step step;
    struct cost_load load; /* of `step` */
    /* Real over predicted time of recent steps, by the logarithm of their rows; 0: none yet. */
    double drift[SCHEDULER_DRIFTS];
    uint64_t preemptions;
    uint64_t prefix_queries, prefix_hits; /* prompt tokens looked for in the prefix cache; found */
};

int scheduler_create(struct scheduler *scheduler, const struct scheduler_limits *limits,
                     struct error *error);

/* The sequences are the caller's. A zeroed scheduler is allowed. */
void scheduler_destroy(struct scheduler *scheduler);

/* Takes a new sequence into the waiting list. Its limit must be at most limits.max_tokens. */
void scheduler_add(struct scheduler *scheduler, struct sequence *sequence);

/* Chooses the rows of the next step: none only when there is no sequence. `now` stamps the
 * sequences that start. */
const struct step *scheduler_next_step(struct scheduler *scheduler, uint64_t now);

/* The chosen rows were computed; with several kv_groups, skips [part_count, kv_groups] says how
 * many of each part's took no place in each. Call before any token of theirs is appended. */
void scheduler_complete_step(struct scheduler *scheduler, const uint32_t *skips);

/* How long the step took: later predictions learn from it. Call after complete_step. */
void scheduler_observe_step(struct scheduler *scheduler, double real_ns);

/* Takes a sequence out for good, waiting or running, and its blocks back. Not between next_step and
 * complete_step. */
void scheduler_remove(struct scheduler *scheduler, struct sequence *sequence);

static inline bool scheduler_is_empty(const struct scheduler *scheduler) {
    return scheduler->waiting.count + scheduler->running.count == 0;
}

#endif
