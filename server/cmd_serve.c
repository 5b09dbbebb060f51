/* fathom serve: flags to settings, then the server. */
#include "server/command.h"

#include <stdlib.h>
#include <string.h>

#include "server/server.h"

#define TIB 1099511627776.0

/* A step's target when none is given. On a slow machine decoding alone may take it: prompts still
 * have three quarters of a step, or first tokens would come later than without any target. */
#define NOT_GIVEN      (-1)
#define STEP_TARGET_MS 50
#define PREFILL_SHARE  0.75

/* What flags hold before it is checked and put where it belongs. */
struct serve_flags {
    struct model_flags model;
    const char *model_path, *log_format, *log_level;
    double step_target_ms, queue_timeout, ttft_slo_ms, tpot_slo_ms;
    struct serve_settings settings;
};

static const struct serve_flags flags_default = {
    .model = MODEL_FLAGS_DEFAULT,
    .log_format = "text",
    .log_level = "info",
    .step_target_ms = NOT_GIVEN,
    .ttft_slo_ms = 1000,
    .tpot_slo_ms = 100,
    .settings =
        {
            .engine = {.max_sequences = 256, .queue_limit = 1024, .queue_tokens = (size_t)4 << 20},
            .host = "127.0.0.1",
            .port = 8080,
            .limits = {.head_bytes = (size_t)32 << 10, .body_bytes = (size_t)16 << 20},
            .max_connections = 4096,
            .header_timeout = 15,
            .body_timeout = 30,
            .idle_timeout = 75,
            .send_timeout = 30,
            .ping_interval = 15,
            .send_high_water = (size_t)1 << 20,
            .drain_timeout = 30,
            .stuck_timeout = 30,
        },
};

/* scheme://host or scheme://host:port, as browsers write an origin: anything else never matches. */
static bool is_origin(const char *text) {
    const char *host = strstr(text, "://");
    if (!host || host == text || !host[3]) return false;
    for (const char *c = text; *c; c++) {
        if (*c <= 0x20 || *c >= 0x7f) return false;
    }
    return !strpbrk(host + 3, "/?#@") && (size_t)(host - text) == strcspn(text, ":/?#@");
}

static int flags_to_settings(struct serve_flags *flags, struct error *error) {
    struct serve_settings *settings = &flags->settings;
    size_t step_rows = settings->model.max_step_rows;
    settings->model_path = flags->model_path;
    settings->auto_quality.first_token = flags->ttft_slo_ms / 1e3;
    settings->auto_quality.per_token = flags->tpot_slo_ms / 1e3;
    settings->engine.queue_timeout_ms = (size_t)(flags->queue_timeout * 1e3);
    bool has_target = flags->step_target_ms != NOT_GIVEN;
    double target_ms = has_target ? flags->step_target_ms : STEP_TARGET_MS;
    settings->engine.step_target_us = (size_t)(target_ms * 1e3);
    settings->engine.prefill_share = has_target ? 0 : PREFILL_SHARE;
    int result = model_flags_options(&flags->model, &settings->model, error);
    settings->model.max_step_rows = step_rows;
    if (result == 0) result = log_parse_format(flags->log_format, &settings->log_format, error);
    if (result == 0) result = log_parse_level(flags->log_level, &settings->log_level, error);
    if (result == 0 && !settings->tls_certificate != !settings->tls_key) {
        result = error_set(error, FATHOM_INVALID, "--tls-cert and --tls-key need each other");
    }
    /* An empty variable sets no flag, but this one would open what it was meant to close. */
    const char *key_file = getenv("FATHOM_API_KEY_FILE");
    if (settings->api_key_file) key_file = settings->api_key_file;
    if (result == 0 && key_file && !*key_file) {
        result = error_set(error, FATHOM_INVALID,
                           "--api-key-file, or FATHOM_API_KEY_FILE, is empty; leave it out to need "
                           "no key");
    }
    const char *origin = settings->cors_origin;
    if (result == 0 && origin && strcmp(origin, "*") != 0 && !is_origin(origin)) {
        result = error_set(error, FATHOM_INVALID,
                           "--cors-origin must be * or an origin such as https://app.example; got "
                           "'%s'",
                           origin);
    }
    if (result == 0 && settings->chat_format && !chat_format_is_known(settings->chat_format)) {
        result = error_set(error, FATHOM_INVALID, "--chat-format must be one of %s; got '%s'",
                           chat_format_names, settings->chat_format);
    }
    return result;
}

int cmd_serve(int argc, char **argv) {
    struct serve_flags values = flags_default;
    struct serve_settings *s = &values.settings;
    const struct flag flags[] = {
        {"host", 0, FLAG_TEXT, "H", "address to listen on (127.0.0.1)", &s->host, 0, 0},
        {"port", 'p', FLAG_COUNT, "N", "0 takes a free one and prints it (8080)", &s->port, 0,
         65535},
        {"served-name", 0, FLAG_TEXT, "NAME", "what clients call the model (the folder's name)",
         &s->served_name, 0, 0},
        {"default-quality", 0, FLAG_TEXT, "TIER", "for requests that name none (the model's)",
         &s->default_quality, 0, 0},
        {"chat-format", 0, FLAG_TEXT, "F", "chatml, llama3, mistral, zephyr or plain (the model's)",
         &s->chat_format, 0, 0},
        {"ttft-slo-ms", 0, FLAG_REAL, "MS",
         "quality auto: what a first token may take, 0 for no choice (1000)", &values.ttft_slo_ms,
         0, 1e9},
        {"tpot-slo-ms", 0, FLAG_REAL, "MS", "quality auto: what each further token may take (100)",
         &values.tpot_slo_ms, 0, 1e9},
        {"auto-floor", 0, FLAG_TEXT, "TIER", "quality auto: the lowest tier it may choose (any)",
         &s->auto_floor, 0, 0},
        {"debug-steps", 0, FLAG_COUNT, "N", "steps that GET /debug/steps shows, 0 for off (0)",
         &s->engine.step_log, 0, 65536},
        {"kv-budget", 0, FLAG_BYTES, "SIZE", "memory for KV, taken at start (512MiB; a GPU's free)",
         &s->engine.kv_budget, 1, TIB},
        {"max-sequences", 0, FLAG_COUNT, "N", "running at once (256)", &s->engine.max_sequences, 1,
         65536},
        {"queue-limit", 0, FLAG_COUNT, "N", "waiting beyond those; more get 429 (1024)",
         &s->engine.queue_limit, 1, 1048576},
        {"queue-tokens", 0, FLAG_COUNT, "N",
         "their prompt tokens, beyond what KV holds, 0 for any (4194304)", &s->engine.queue_tokens,
         0, 1e12},
        {"queue-timeout", 0, FLAG_REAL, "S", "seconds to wait for a first step, 0 for any (0)",
         &values.queue_timeout, 0, 86400},
        {"prefill-chunk", 0, FLAG_COUNT, "N",
         "prompt tokens of one request per step, 0 for any (0)", &s->engine.prefill_chunk, 0,
         1048576},
        {"step-target-ms", 0, FLAG_REAL, "MS",
         "prefill beside decode keeps to it, 0 for any (50, or 4 decodes)",
         &values.step_target_ms, 0, 1e6},
        {"no-prefix-cache", 0, FLAG_SWITCH, NULL, "compute every prompt anew, whatever is known",
         &s->engine.no_prefix_cache, 0, 0},
        {"max-step-rows", 0, FLAG_COUNT, "N", "rows of one step, 0 for 256 (0)",
         &s->model.max_step_rows, 0, STEP_ROWS_MAX},
        MODEL_FLAGS(values.model),
        COST_CACHE_FLAG(values.model),
        {"tls-cert", 0, FLAG_TEXT, "FILE", "certificate chain, PEM: speak HTTPS (none)",
         &s->tls_certificate, 0, 0},
        {"tls-key", 0, FLAG_TEXT, "FILE", "its key, PEM, without passphrase (none)", &s->tls_key, 0,
         0},
        {"api-key-file", 0, FLAG_TEXT, "FILE",
         "keys, one a line; FATHOM_API_KEY may hold one (none)", &s->api_key_file, 0, 0},
        {"cors-origin", 0, FLAG_TEXT, "O", "origin whose pages may call, or * (none)",
         &s->cors_origin, 0, 0},
        {"max-body", 0, FLAG_BYTES, "SIZE", "longest request body (16MiB)", &s->limits.body_bytes,
         1, 1073741824},
        {"max-header", 0, FLAG_BYTES, "SIZE", "longest request head (32KiB)", &s->limits.head_bytes,
         256, 1048576},
        {"max-connections", 0, FLAG_COUNT, "N", "open at once (4096)", &s->max_connections, 1,
         1048576},
        {"header-timeout", 0, FLAG_REAL, "S", "seconds for a request head (15)", &s->header_timeout,
         0.1, 86400},
        {"body-timeout", 0, FLAG_REAL, "S", "for a body, and 1 more per 16 KiB (30)",
         &s->body_timeout, 0.1, 86400},
        {"idle-timeout", 0, FLAG_REAL, "S", "between requests (75)", &s->idle_timeout, 0.1, 86400},
        {"send-timeout", 0, FLAG_REAL, "S", "for a client that takes nothing (30)",
         &s->send_timeout, 0.1, 86400},
        {"send-high-water", 0, FLAG_BYTES, "SIZE", "unread bytes of a stream that end it (1MiB)",
         &s->send_high_water, 1, 1073741824},
        {"ping-interval", 0, FLAG_REAL, "S", "of silence in a stream (15)", &s->ping_interval, 0.1,
         86400},
        {"drain-timeout", 0, FLAG_REAL, "S", "to finish running work at SIGTERM, INT, HUP (30)",
         &s->drain_timeout, 0, 86400},
        {"stuck-timeout", 0, FLAG_REAL, "S", "without a step while work waits: unhealthy (30)",
         &s->stuck_timeout, 0.1, 86400},
        {"log-format", 0, FLAG_TEXT, "F", "text or json (text)", &values.log_format, 0, 0},
        {"log-level", 0, FLAG_TEXT, "L", "error, warning, info or debug (info)", &values.log_level,
         0, 0},
        {"vllm-metric-names", 0, FLAG_SWITCH, NULL, "also export what gateways scrape of vLLM",
         &s->vllm_metric_names, 0, 0},
    };
    const struct command command = {
        .name = "serve",
        .usage = "MODEL [flags]",
        .summary = "Answers completions over HTTP. MODEL is a checkpoint folder or a GGUF file.\n"
                   "Sizes take KiB, MiB, GiB. Every flag can be set in the environment: "
                   "--kv-budget as FATHOM_KV_BUDGET.",
        .examples = "  fathom serve models/fathom-tiny --port 8080\n"
                    "  curl localhost:8080/v1/completions -H 'Content-Type: application/json' \\\n"
                    "       -d '{\"model\": \"fathom-tiny\", \"prompt\": \"Once upon a time\", "
                    "\"max_tokens\": 32}'",
        .flags = flags,
        .flag_count = sizeof flags / sizeof *flags,
        .positional_count = 1,
        .positionals = &values.model_path,
    };
    struct error error;
    int result = flags_parse(&command, argc, argv, &error);
    if (result == FLAGS_HELP) return EXIT_OK;
    if (result == 0) result = flags_to_settings(&values, &error);
    if (result != 0) return command_fail("serve", &error, EXIT_USAGE);
    return server_run(&values.settings);
}
