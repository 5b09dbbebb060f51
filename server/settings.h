/* What `fathom serve` was told: every flag, checked. Filled once, then read only. */
#ifndef FATHOM_SETTINGS_H
#define FATHOM_SETTINGS_H

#include "engine/engine.h"
#include "server/http_head.h"
#include "server/log.h"

struct serve_settings {
    const char *model_path;
    const char *served_name;     /* NULL: the folder's name */
    const char *default_quality; /* NULL: the checkpoint's */
    const char *chat_format;     /* NULL: what the tokenizer's files say */
    struct auto_options auto_quality; /* objectives of "auto"; 0 seconds: it is the default tier */
    const char *auto_floor;           /* the lowest tier that it may choose; NULL: any */
    struct model_options model;
    struct engine_options engine; /* notify is set by the server */

    const char *host;
    size_t port;              /* 0: any free one */
    const char *tls_certificate, *tls_key; /* PEM files, both or neither */
    const char *api_key_file; /* NULL: none; FATHOM_API_KEY may hold one key */
    const char *cors_origin;  /* NULL: off; "*" or one origin */

    struct http_limits limits;
    size_t max_connections;
    double header_timeout, body_timeout, idle_timeout, send_timeout; /* seconds */
    double ping_interval;                                            /* of silence in a stream */
    size_t send_high_water;
    double drain_timeout;
    double stuck_timeout; /* work waits and no step finished: not healthy */

    enum log_format log_format;
    enum log_level log_level;
    bool vllm_metric_names;
};

#endif
