/* What the engine's thread owns, and the two things that it does with it: a step, and the end of a
 * sequence. Private to engine.c and engine_step.c. */
#ifndef FATHOM_ENGINE_THREAD_H
#define FATHOM_ENGINE_THREAD_H

#include "engine/auto_tier.h"
#include "engine/event_queue.h"
#include "engine/forward.h"
#include "engine/inbox.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/step_log.h"

struct engine {
    struct model *model;
    const struct model_info *info;
    struct engine_options options; /* defaults resolved */
    struct request_limits limits;
    struct inbox inbox;
    struct event_queue events;
    uint64_t secret;             /* of prefix_root */
    size_t same_tier[TIERS_MAX]; /* the first tier with the same thresholds */
    pthread_t thread;
    bool started;

    /* The engine thread's. */
    struct kv_arena *arena;
    struct cost_model cost; /* read only */
    struct scheduler scheduler;
    struct sampler sampler;
    struct engine_stats stats;
    uint16_t *attn_depth, *mlp_depth; /* [max_step_rows] sub-layers that ran for each row */
    struct draw_batch draws; /* zero: the device draws nothing */
    uint32_t *skips; /* [parts of a step, kv_groups] rows that took no place in the KV cache */
    uint64_t busy_ns, ended_ns; /* when it last woke; when a request last ended since, or 0 */
    double seconds_per_end;     /* recent time between two ends; 0: not known */
    double tokens_per_end;      /* prompt and generated */
    uint64_t swept_ns;          /* when the queue was last looked through for expired requests */
    bool unannounced;           /* events were pushed since the consumer was last told */

    double mean_work;          /* share of all sub-layers that recent rows ran */
    double slowness;           /* real over modelled time of recent steps */
    struct step_record record; /* of the step that runs */
    struct step_log step_log;  /* written under stats_lock */

    pthread_mutex_t stats_lock;      /* of what follows, and of step_log */
    struct engine_stats published;   /* a copy of `stats` */
    struct auto_load published_load; /* its rates, of recent work */
    size_t computed_tokens;          /* of the prompts of running sequences */
};

/* Runs the next step and tells what came of it. There must be a sequence. */
void engine_step(struct engine *engine);

/* The only way out for a sequence: blocks back, id free, EVENT_FINISHED. */
void engine_finish(struct engine *engine, struct sequence *sequence, enum finish_reason reason);

/* Wakes the consumer if there are events that it was not told of. */
void engine_announce(struct engine *engine);

#endif
