#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void schedule_decodes(struct scheduler *scheduler);
static void admit_waiting(struct scheduler *scheduler, uint64_t now);
static void schedule_prefills(struct scheduler *scheduler);
static void stop_running(struct scheduler *scheduler, struct sequence *sequence);

int scheduler_create(struct scheduler *scheduler, const struct scheduler_limits *limits,
                     struct error *error) {
    memset(scheduler, 0, sizeof *scheduler);
    scheduler->limits = *limits;
    size_t rows = limits->max_step_rows, slots = limits->max_sequences;
    if (slots > rows) slots = rows;
    scheduler->limits.max_sequences = slots;
    size_t per_slot = kv_blocks_for(limits->max_tokens);
    int result = kv_create(&scheduler->kv, limits->kv_blocks, slots, per_slot, error);
    if (result != 0) return result;
    struct step *step = &scheduler->step;
    scheduler->free_slots = calloc(slots, sizeof *scheduler->free_slots);
    step->token = calloc(rows, sizeof *step->token);
    step->position = calloc(rows, sizeof *step->position);
    step->tier = calloc(rows, sizeof *step->tier);
    step->slot = calloc(rows, sizeof *step->slot);
    step->logit_rows = calloc(rows, sizeof *step->logit_rows);
    step->parts = calloc(rows, sizeof *step->parts);
    if (!scheduler->free_slots || !step->token || !step->position || !step->tier || !step->slot ||
        !step->logit_rows || !step->parts) {
        scheduler_destroy(scheduler);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for steps of %zu rows", rows);
    }
    for (size_t i = 0; i < slots; i++) scheduler->free_slots[i] = (int32_t)(slots - 1 - i);
    scheduler->free_slot_count = slots;
    return 0;
}

void scheduler_destroy(struct scheduler *scheduler) {
    kv_destroy(&scheduler->kv);
    free(scheduler->free_slots);
    free(scheduler->step.token);
    free(scheduler->step.position);
    free(scheduler->step.tier);
    free(scheduler->step.slot);
    free(scheduler->step.logit_rows);
    free(scheduler->step.parts);
    memset(scheduler, 0, sizeof *scheduler);
}

/* Almost always a later arrival goes to the end, so the place is looked for from there. */
static void list_insert(struct sequence_list *list, struct sequence *sequence) {
    struct sequence *before = list->last;
    while (before && sequence_before(sequence, before)) before = before->previous;
    struct sequence *after = before ? before->next : list->first;
    sequence->previous = before;
    sequence->next = after;
    *(before ? &before->next : &list->first) = sequence;
    *(after ? &after->previous : &list->last) = sequence;
    list->count++;
}

static void list_remove(struct sequence_list *list, struct sequence *sequence) {
    struct sequence *before = sequence->previous, *after = sequence->next;
    *(before ? &before->next : &list->first) = after;
    *(after ? &after->previous : &list->last) = before;
    sequence->previous = sequence->next = NULL;
    list->count--;
}

void scheduler_add(struct scheduler *scheduler, struct sequence *sequence) {
    assert(sequence->slot < 0 && sequence_limit(sequence) <= scheduler->limits.max_tokens);
    list_insert(&scheduler->waiting, sequence);
}

void scheduler_remove(struct scheduler *scheduler, struct sequence *sequence) {
    if (sequence->slot >= 0) {
        stop_running(scheduler, sequence);
    } else {
        list_remove(&scheduler->waiting, sequence);
    }
}

const struct step *scheduler_next_step(struct scheduler *scheduler, uint64_t now) {
    struct step *step = &scheduler->step;
    step->rows = step->part_count = step->logit_count = step->slots = 0;
    schedule_decodes(scheduler);
    admit_waiting(scheduler, now);
    schedule_prefills(scheduler);
    assert(step->rows > 0 || scheduler_is_empty(scheduler));
    return step;
}

void scheduler_complete_step(struct scheduler *scheduler) {
    const struct step *step = &scheduler->step;
    for (size_t i = 0; i < step->part_count; i++) {
        struct sequence *sequence = step->parts[i].sequence;
        sequence->computed += step->parts[i].rows;
        if (sequence->computed > sequence->reached) sequence->reached = sequence->computed;
    }
}

static size_t size_min(size_t a, size_t b) { return a < b ? a : b; }

static size_t rows_left(const struct scheduler *scheduler) {
    return scheduler->limits.max_step_rows - scheduler->step.rows;
}

/* The next `rows` rows of a sequence become part of the step. */
static void step_add(struct step *step, struct sequence *sequence, size_t rows) {
    size_t known = sequence->reached - sequence->computed;
    step->parts[step->part_count++] = (struct step_part){
        .sequence = sequence,
        .first_row = step->rows,
        .rows = rows,
        .recomputed = size_min(rows, known),
        .first_logit = step->logit_count,
    };
    size_t slot = (size_t)sequence->slot;
    if (step->slots <= slot) step->slots = slot + 1;
    for (size_t i = 0; i < rows; i++) {
        size_t position = sequence->computed + i, row = step->rows++;
        step->token[row] = sequence->tokens[position];
        step->position[row] = (int32_t)position;
        step->tier[row] = sequence->request.tier;
        step->slot[row] = sequence->slot;
        if (sequence_wants_logits(sequence, position)) {
            step->logit_rows[step->logit_count++] = (int32_t)row;
        }
    }
}

/* Gives up everything that a running sequence holds; its slot is the next one to be used. */
static void stop_running(struct scheduler *scheduler, struct sequence *sequence) {
    kv_release(&scheduler->kv, (size_t)sequence->slot);
    scheduler->free_slots[scheduler->free_slot_count++] = sequence->slot;
    sequence->slot = -1;
    sequence->computed = 0;
    list_remove(&scheduler->running, sequence);
}

static void preempt_last(struct scheduler *scheduler) {
    struct sequence *victim = scheduler->running.last;
    stop_running(scheduler, victim);
    victim->usage.preemptions++;
    scheduler->preemptions++;
    list_insert(&scheduler->waiting, victim);
}

/* Finds a block for the next token, at the expense of sequences later in the order; these have no
 * row in the step yet. False: the sequence was itself the last, and now waits. */
static bool grow_or_preempt(struct scheduler *scheduler, struct sequence *sequence) {
    while (!kv_reserve(&scheduler->kv, (size_t)sequence->slot, sequence->length)) {
        preempt_last(scheduler);
        if (sequence->slot < 0) return false;
    }
    return true;
}

static void schedule_decodes(struct scheduler *scheduler) {
    struct sequence *sequence = scheduler->running.first;
    while (sequence) {
        if (sequence_is_decoding(sequence)) {
            if (!grow_or_preempt(scheduler, sequence)) return;
            step_add(&scheduler->step, sequence, 1);
        }
        sequence = sequence->next; /* read now: growing may have taken the old next off the list */
    }
}

static size_t prefill_rows(const struct scheduler *scheduler, const struct sequence *sequence) {
    size_t rows = sequence->length - sequence->computed, chunk = scheduler->limits.prefill_chunk;
    return chunk ? size_min(rows, chunk) : rows;
}

/* Whether running prefills that go first leave the newcomer a row in this step. */
static bool has_rows_for(const struct scheduler *scheduler, const struct sequence *newcomer) {
    size_t left = rows_left(scheduler);
    const struct sequence *sequence = scheduler->running.first;
    for (; sequence && left > 0 && sequence_before(sequence, newcomer); sequence = sequence->next) {
        if (sequence_is_decoding(sequence)) continue;
        left -= size_min(left, prefill_rows(scheduler, sequence));
    }
    return left > 0;
}

/* Running sequences that will ask for another block some day. A free block is kept for each, or the
 * newcomer would be preempted a few steps after its prefill. */
static size_t count_growing(const struct scheduler *scheduler) {
    size_t growing = 0;
    const struct sequence *sequence = scheduler->running.first;
    for (; sequence; sequence = sequence->next) {
        size_t held = scheduler->kv.held[sequence->slot];
        if (kv_blocks_for(sequence_limit(sequence)) > held) growing++;
    }
    return growing;
}

static void admit_waiting(struct scheduler *scheduler, uint64_t now) {
    struct kv *kv = &scheduler->kv;
    while (scheduler->waiting.first && scheduler->free_slot_count > 0) {
        struct sequence *sequence = scheduler->waiting.first;
        size_t tokens = size_min(sequence->length + 1, sequence_limit(sequence));
        if (!has_rows_for(scheduler, sequence)) return;
        if (kv_blocks_for(tokens) + count_growing(scheduler) > kv->free_count) return;
        list_remove(&scheduler->waiting, sequence);
        sequence->slot = scheduler->free_slots[--scheduler->free_slot_count];
        bool reserved = kv_reserve(kv, (size_t)sequence->slot, tokens);
        assert(reserved);
        (void)reserved; /* counted above; NDEBUG drops the assert */
        list_insert(&scheduler->running, sequence);
        if (sequence->started_ns == 0) sequence->started_ns = now;
    }
}

/* Never needs a block: admission reserved for all tokens known, and a prefill adds none. */
static void schedule_prefills(struct scheduler *scheduler) {
    struct sequence *sequence = scheduler->running.first;
    for (; sequence && rows_left(scheduler) > 0; sequence = sequence->next) {
        if (sequence_is_decoding(sequence)) continue;
        step_add(&scheduler->step, sequence,
                 size_min(rows_left(scheduler), prefill_rows(scheduler, sequence)));
    }
}
