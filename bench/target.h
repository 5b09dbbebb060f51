/* Where requests go. */
#ifndef FATHOM_BENCH_TARGET_H
#define FATHOM_BENCH_TARGET_H

#include <sys/socket.h>

#include "base/base.h"
#include "tls/tls.h"

struct target {
    bool is_https;
    char host[256], port[8], path[512]; /* path: of the endpoint */
    char models_path[512];
    struct sockaddr_storage address;
    struct tls_context *tls; /* NULL: plain HTTP */
};

/* Splits http[s]://host[:port][/path] and looks the host up. */
int target_parse(const char *url, bool chat, struct target *target, struct error *error);

/* Makes ready to speak TLS, where the URL asks for it; insecure: with whoever answers. */
int target_open(struct target *target, bool insecure, struct error *error);
void target_close(struct target *target);

/* GET of a small JSON document, for the model's name. *body is malloc'd and NUL-terminated. */
int target_get(const struct target *target, const char *path, const char *api_key, double timeout,
               char **body, struct error *error);

#endif
