#include "server/metrics.h"

#include <string.h>

#include "server/server.h"

/* ---- Histograms ------------------------------------------------------------------------------ */

static const struct {
    size_t count;
    double values[HISTOGRAM_EDGES_MAX];
} edges[] = {
    [EDGES_FIRST_TOKEN] = {22, {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                                1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560}},
    [EDGES_INTER_TOKEN] = {19,
                           {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
                            5, 7.5, 10, 20, 40, 80}},
    [EDGES_REQUEST] = {21, {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                            30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680}},
};

void metrics_init(struct metrics *metrics) {
    *metrics = (struct metrics){.loop_lag = {.edges = EDGES_FIRST_TOKEN}};
    for (size_t i = 0; i < TIERS_MAX; i++) {
        struct request_metrics *tier = &metrics->tiers[i];
        tier->time_to_first_token.edges = EDGES_FIRST_TOKEN;
        tier->inter_token.edges = EDGES_INTER_TOKEN;
        tier->end_to_end.edges = tier->queue.edges = EDGES_REQUEST;
        tier->prefill.edges = tier->decode.edges = EDGES_REQUEST;
    }
}

void histogram_observe_ns(struct histogram *histogram, uint64_t nanoseconds) {
    double seconds = (double)nanoseconds / 1e9;
    size_t bucket = 0, count = edges[histogram->edges].count;
    while (bucket < count && seconds > edges[histogram->edges].values[bucket]) bucket++;
    histogram->counts[bucket]++;
    histogram->count++;
    histogram->sum += seconds;
}

void metrics_count_response(struct metrics *metrics, int status) {
    if (status > 0 && status < STATUS_CODES) metrics->responses[status]++;
}

/* ---- Prometheus text ------------------------------------------------------------------------- */

/* What is written: the server's counters, the engine's, and the labels common to all lines. */
struct page {
    struct text_buffer *out;
    const struct server *server;
    const struct model_info *model;
    struct engine_stats stats;
};

static void page_start(struct page *page, const char *name, const char *type, const char *help) {
    text_append_format(page->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* A label's value: backslash, quote and line feed are escaped in this format. */
static void page_label(struct page *page, const char *name, const char *value) {
    text_append_format(page->out, "%s=\"", name);
    for (; *value; value++) {
        if (*value == '\n') {
            text_append_string(page->out, "\\n");
            continue;
        }
        if (*value == '"' || *value == '\\') text_append_string(page->out, "\\");
        text_append(page->out, value, 1);
    }
    text_append_string(page->out, "\"");
}

/* name{model="..."[,first="..."][,second="..."]} — NULL names are left out. */
static void page_line(struct page *page, const char *name, double value, const char *first,
                      const char *first_value, const char *second, const char *second_value) {
    text_append_format(page->out, "%s{", name);
    page_label(page, "model", page->server->context.served_name);
    if (first) text_append_string(page->out, ",");
    if (first) page_label(page, first, first_value);
    if (second) text_append_string(page->out, ",");
    if (second) page_label(page, second, second_value);
    text_append_format(page->out, "} %.15g\n", value);
}

static void page_value(struct page *page, const char *name, const char *type, const char *help,
                       double value) {
    page_start(page, name, type, help);
    page_line(page, name, value, NULL, NULL, NULL, NULL);
}

static double ratio(size_t part, size_t whole) {
    return whole ? (double)part / (double)whole : 0;
}

/* Without a sum: that of predictions and of real times say more. */
static void page_step_errors(struct page *page) {
    const char *name = "fathom_step_prediction_error";
    uint64_t cumulative = 0;
    page_start(page, name, "gauge", "Steps whose real time was off its prediction by up to this.");
    for (size_t i = 0; i <= STEP_ERROR_EDGES; i++) {
        char edge[32] = "+Inf";
        if (i < STEP_ERROR_EDGES) snprintf(edge, sizeof edge, "%g", step_error_edges[i]);
        cumulative += page->stats.step_errors[i];
        page_line(page, name, (double)cumulative, "le", edge, NULL, NULL);
    }
}

static void page_load(struct page *page) {
    const struct engine_stats *stats = &page->stats;
    page_value(page, "fathom_num_requests_running", "gauge", "Sequences in steps.",
               (double)stats->running);
    page_value(page, "fathom_num_requests_waiting", "gauge", "Sequences in the queue.",
               (double)stats->waiting);
}

static void page_kv(struct page *page) {
    const struct engine_stats *stats = &page->stats;
    page_value(page, "fathom_kv_cache_usage_ratio", "gauge", "KV blocks in use, 0 to 1.",
               ratio(stats->kv_blocks_used, stats->kv_blocks_total));
    page_value(page, "fathom_kv_blocks_used", "gauge", "KV blocks in use.",
               (double)stats->kv_blocks_used);
    page_value(page, "fathom_kv_blocks_cached", "gauge",
               "KV blocks in no use, kept for prompts that begin alike.",
               (double)stats->kv_blocks_cached);
    page_value(page, "fathom_prefix_cache_queries_total", "counter",
               "Prompt tokens looked for in the prefix cache.", (double)stats->prefix_queries);
    page_value(page, "fathom_prefix_cache_hits_total", "counter",
               "Prompt tokens found in the prefix cache, not computed again.",
               (double)stats->prefix_hits);
    page_value(page, "fathom_kv_bytes_used", "gauge", "KV bytes in use.",
               (double)stats->kv_bytes_used);
    page_value(page, "fathom_kv_bytes_saved", "gauge",
               "KV bytes that running sequences do not need because tokens were omitted.",
               (double)stats->kv_bytes_saved);
    page_value(page, "fathom_kv_bytes_budget", "gauge", "KV bytes of all blocks.",
               (double)stats->kv_bytes_budget);
}

static void page_work(struct page *page) {
    const struct engine_stats *stats = &page->stats;
    page_value(page, "fathom_prompt_tokens_total", "counter", "Prompt tokens executed.",
               (double)stats->prompt_tokens);
    page_value(page, "fathom_generation_tokens_total", "counter", "Tokens generated.",
               (double)stats->generated_tokens);
    page_value(page, "fathom_host_draws_total", "counter",
               "Rows of logits that the host drew or scored by; a GPU leaves few to it.",
               (double)stats->host_draws);
    page_value(page, "fathom_num_preemptions_total", "counter",
               "Sequences put back for lack of KV.", (double)stats->preemptions);
    page_value(page, "fathom_requests_cancelled_total", "counter",
               "Sequences cancelled: nobody waits for them any more.",
               (double)page->server->metrics.choices_cancelled);
    page_value(page, "fathom_requests_expired_total", "counter",
               "Sequences that waited too long for their first step.", (double)stats->expired);
    page_value(page, "fathom_queue_drain_seconds", "gauge",
               "Until those waiting will have started, by how fast others ended lately.",
               stats->drain_seconds);
}

static void page_steps(struct page *page) {
    const struct engine_stats *stats = &page->stats;
    const char *name = "fathom_bodies_total";
    page_value(page, "fathom_steps_total", "counter", "Steps of the engine.", (double)stats->steps);
    page_value(page, "fathom_step_rows_total", "counter", "Rows over all steps.",
               (double)stats->step_rows);
    page_value(page, "fathom_step_seconds_total", "counter", "Time in steps.",
               (double)stats->step_ns_total / 1e9);
    page_value(page, "fathom_step_predicted_seconds_total", "counter",
               "Time in steps, as predicted before each.", (double)stats->predicted_ns_total / 1e9);
    page_step_errors(page);
    page_start(page, name, "counter", "Sub-layer executions by how their rows were run.");
    page_line(page, name, (double)stats->body_none, "body", "none", NULL, NULL);
    page_line(page, name, (double)stats->body_dense, "body", "dense", NULL, NULL);
    page_line(page, name, (double)stats->body_gather, "body", "gather", NULL, NULL);
}

static void page_sublayers(struct page *page, const char *name, const char *help,
                           const uint64_t *attn, const uint64_t *mlp) {
    page_start(page, name, "counter", help);
    for (size_t i = 0; i < page->model->tier_count; i++) {
        const char *tier = page->model->tiers[i].name;
        page_line(page, name, (double)attn[i], "quality", tier, "kind", "attn");
        page_line(page, name, (double)mlp[i], "quality", tier, "kind", "mlp");
    }
}

static void page_finished(struct page *page) {
    static const char *const reasons[] = {[FINISH_STOP] = "stop",
                                          [FINISH_LENGTH] = "length",
                                          [FINISH_CANCELLED] = "abort",
                                          [FINISH_ERROR] = "error",
                                          [FINISH_EXPIRED] = "expired"};
    const char *name = "fathom_request_success_total";
    page_start(page, name, "counter", "Choices finished, requests aborted or failed.");
    for (size_t i = 0; i < page->model->tier_count; i++) {
        for (size_t reason = 0; reason < FINISH_REASONS; reason++) {
            page_line(page, name, (double)page->server->metrics.tiers[i].finished[reason],
                      "quality", page->model->tiers[i].name, "finished_reason", reasons[reason]);
        }
    }
}

static void page_auto_choices(struct page *page) {
    static const char *const reasons[AUTO_REASONS] = {[AUTO_WITHIN] = "within",
                                                      [AUTO_FIRST_TOKEN] = "first_token",
                                                      [AUTO_PER_TOKEN] = "per_token"};
    const char *name = "fathom_auto_quality_total";
    page_start(page, name, "counter",
               "Requests that left their tier to the server, by its choice.");
    for (size_t i = 0; i < page->model->tier_count; i++) {
        for (size_t reason = 0; reason < AUTO_REASONS; reason++) {
            page_line(page, name, (double)page->server->metrics.auto_choices[i][reason], "quality",
                      page->model->tiers[i].name, "reason", reasons[reason]);
        }
    }
}

/* `tier` NULL: a histogram of the whole process. */
static void page_histogram(struct page *page, const char *name, const char *tier,
                           const struct histogram *histogram) {
    const char *label = tier ? "quality" : NULL;
    char line_name[96], edge[32];
    uint64_t cumulative = 0;
    snprintf(line_name, sizeof line_name, "%s_bucket", name);
    for (size_t i = 0; i < edges[histogram->edges].count; i++) {
        cumulative += histogram->counts[i];
        snprintf(edge, sizeof edge, "%.15g", edges[histogram->edges].values[i]);
        page_line(page, line_name, (double)cumulative, label, tier, "le", edge);
    }
    page_line(page, line_name, (double)histogram->count, label, tier, "le", "+Inf");
    snprintf(line_name, sizeof line_name, "%s_sum", name);
    page_line(page, line_name, histogram->sum, label, tier, NULL, NULL);
    snprintf(line_name, sizeof line_name, "%s_count", name);
    page_line(page, line_name, (double)histogram->count, label, tier, NULL, NULL);
}

static void page_histograms(struct page *page) {
    static const struct {
        const char *name, *help;
        size_t offset;
    } all[] = {
        {"fathom_time_to_first_token_seconds", "From the request to its first token.",
         offsetof(struct request_metrics, time_to_first_token)},
        {"fathom_inter_token_latency_seconds", "Between tokens of a choice.",
         offsetof(struct request_metrics, inter_token)},
        {"fathom_e2e_request_latency_seconds", "From the request to the end of its answer.",
         offsetof(struct request_metrics, end_to_end)},
        {"fathom_request_queue_time_seconds", "Waiting for the first step.",
         offsetof(struct request_metrics, queue)},
        {"fathom_request_prefill_time_seconds", "From the first step to the first token.",
         offsetof(struct request_metrics, prefill)},
        {"fathom_request_decode_time_seconds", "From the first token to the last.",
         offsetof(struct request_metrics, decode)},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        page_start(page, all[i].name, "histogram", all[i].help);
        for (size_t tier = 0; tier < page->model->tier_count; tier++) {
            const char *metrics = (const char *)&page->server->metrics.tiers[tier];
            page_histogram(page, all[i].name, page->model->tiers[tier].name,
                           (const struct histogram *)(metrics + all[i].offset));
        }
    }
}

/* What gateways that balance over vLLM servers scrape. */
static void page_vllm_names(struct page *page) {
    const struct engine_stats *stats = &page->stats;
    double usage = ratio(stats->kv_blocks_used, stats->kv_blocks_total);
    page_value(page, "vllm:num_requests_running", "gauge", "As fathom_num_requests_running.",
               (double)stats->running);
    page_value(page, "vllm:num_requests_waiting", "gauge", "As fathom_num_requests_waiting.",
               (double)stats->waiting);
    page_value(page, "vllm:kv_cache_usage_perc", "gauge", "As fathom_kv_cache_usage_ratio.", usage);
    page_value(page, "vllm:gpu_cache_usage_perc", "gauge", "As fathom_kv_cache_usage_ratio.",
               usage);
}

static void page_process(struct page *page) {
    const struct server *server = page->server;
    const char *name = "fathom_http_responses_total";
    size_t resident = 0;
    uv_resident_set_memory(&resident);
    page_start(page, name, "counter", "Answers by status; 499: the client left first.");
    for (size_t status = 0; status < STATUS_CODES; status++) {
        if (server->metrics.responses[status] == 0) continue;
        char code[16];
        snprintf(code, sizeof code, "%zu", status);
        page_line(page, name, (double)server->metrics.responses[status], "code", code, NULL, NULL);
    }
    page_value(page, "fathom_http_connections", "gauge", "Open connections.",
               (double)server->connection_count);
    page_value(page, "fathom_ready", "gauge", "1 when requests are accepted.",
               server->lifecycle.phase == PHASE_READY);
    page_value(page, "fathom_engine_stalled_seconds", "gauge",
               "While work waits: since the engine last finished a step.",
               server_stalled_s(server));
    name = "fathom_event_loop_lag_seconds";
    page_start(page, name, "histogram", "How late the event loop comes to what is due.");
    page_histogram(page, name, NULL, &server->metrics.loop_lag);
    page_value(page, "fathom_log_lines_dropped_total", "counter", "Log lines nobody read in time.",
               (double)server->log.dropped);
    text_append_format(page->out,
                       "# HELP process_resident_memory_bytes Resident memory.\n"
                       "# TYPE process_resident_memory_bytes gauge\n"
                       "process_resident_memory_bytes %zu\n"
                       "# HELP process_start_time_seconds Start, Unix time.\n"
                       "# TYPE process_start_time_seconds gauge\n"
                       "process_start_time_seconds %lld\n",
                       resident, (long long)server->started_at);
}

void metrics_write(struct server *server, struct text_buffer *out) {
    static const struct model_info no_model; /* still loading: no tiers to report on */
    struct page page = {.out = out, .server = server, .model = &no_model};
    if (server->model) page.model = model_get_info(server->model);
    if (server->engine) engine_get_stats(server->engine, &page.stats);
    page_load(&page);
    page_kv(&page);
    page_work(&page);
    page_steps(&page);
    page_sublayers(&page, "fathom_sublayers_run_total", "Sub-layers run, times rows.",
                   page.stats.attn_run, page.stats.mlp_run);
    page_sublayers(&page, "fathom_sublayers_skipped_total", "Sub-layers skipped, times rows.",
                   page.stats.attn_skipped, page.stats.mlp_skipped);
    page_finished(&page);
    page_auto_choices(&page);
    page_histograms(&page);
    if (server->settings->vllm_metric_names) page_vllm_names(&page);
    page_process(&page);
}
