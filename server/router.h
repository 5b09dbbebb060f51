/* Which endpoint answers, and whether the caller may have it. */
#ifndef FATHOM_ROUTER_H
#define FATHOM_ROUTER_H

#include "server/exchange.h"

/* What there is at all. A method that nobody knows is refused before its path is looked at. */
#define ROUTER_METHODS "GET, HEAD, POST, OPTIONS"

/* Looks at a complete head before any body is taken: sets the exchange's handler, or its refusal
 * (404, 405, 401, 503, 411, 415), its CORS headers, and whether the body matters. */
void router_admit(struct exchange *exchange);

#endif
