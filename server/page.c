/* GET /: page.html, the page for people. Only what carries the nonce of its answer may run or
 * style in it, and it may talk to this server alone. */
#include <stdio.h>
#include <string.h>

#include "server/embed.h"
#include "server/endpoints.h"
#include "server/server.h"

#define NONCE_MARK "@NONCE@" /* in page.html */

EMBED(page, FATHOM_PAGE);

static void page_write(const char *nonce, struct text_buffer *out) {
    const char *at = page_text, *mark;
    while ((mark = strstr(at, NONCE_MARK))) {
        text_append(out, at, (size_t)(mark - at));
        text_append_string(out, nonce);
        at = mark + strlen(NONCE_MARK);
    }
    text_append(out, at, (size_t)(page_end - at));
}

void page_handle(struct exchange *exchange) {
    struct text_buffer body = {0};
    char nonce[33], fields[512];
    snprintf(nonce, sizeof nonce, "%016llx%016llx", (unsigned long long)server_random(),
             (unsigned long long)server_random());
    snprintf(fields, sizeof fields,
             "Content-Security-Policy: default-src 'none'; script-src 'nonce-%s'; "
             "style-src 'nonce-%s'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
             "frame-ancestors 'none'\r\n"
             "Referrer-Policy: no-referrer\r\n"
             "X-Content-Type-Options: nosniff\r\n"
             "Cache-Control: no-store\r\n",
             nonce, nonce);
    page_write(nonce, &body);
    exchange->more_fields = fields;
    exchange_answer_text(exchange, "text/html; charset=utf-8", &body);
}
