/* What answers each route; router.c says which is where. Handlers get a complete request. */
#ifndef FATHOM_ENDPOINTS_H
#define FATHOM_ENDPOINTS_H

#include "server/exchange.h"

void completions_handle(struct exchange *exchange); /* completions.c */
void chat_completions_handle(struct exchange *exchange);
/* The engine has events: called on the loop thread, takes a bounded batch. */
void completions_take_events(struct server *server);

void tokenize_handle(struct exchange *exchange); /* tokenize.c */
void detokenize_handle(struct exchange *exchange);

void models_handle(struct exchange *exchange); /* information.c */
void model_handle(struct exchange *exchange);
void health_handle(struct exchange *exchange);
void ready_handle(struct exchange *exchange);
void metrics_handle(struct exchange *exchange);
void steps_handle(struct exchange *exchange);
void version_handle(struct exchange *exchange);

void openapi_handle(struct exchange *exchange); /* openapi.c */

void page_handle(struct exchange *exchange); /* page.c */

#endif
