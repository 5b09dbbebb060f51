/* What is known of other servers and not done here. Private to api/. */
#ifndef FATHOM_UNSUPPORTED_H
#define FATHOM_UNSUPPORTED_H

#include "api/fields.h"

/* 400 unsupported_parameter if the body asks for any of it; else 0. */
int unsupported_refuse(const json_t *body, bool is_chat, struct api_error *error);

#endif
