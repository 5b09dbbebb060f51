/* GET /openapi.json: api/openapi.yaml, which is JSON. */
#include "server/embed.h"
#include "server/endpoints.h"

EMBED(openapi, FATHOM_OPENAPI);

void openapi_handle(struct exchange *exchange) {
    exchange_answer(exchange, 200, "application/json", openapi_text,
                    (size_t)(openapi_end - openapi_text));
}
