/* GET /openapi.json: api/openapi.yaml, which is JSON, byte for byte inside the program. */
#include "server/endpoints.h"

extern const char openapi_text[], openapi_end[];

/* The assembler reads the file; CMakeLists.txt names it, and builds again when it changes. */
__asm__(".pushsection .rodata\n"
        ".hidden openapi_text, openapi_end\n"
        ".globl openapi_text, openapi_end\n"
        "openapi_text: .incbin \"" FATHOM_OPENAPI "\"\n"
        "openapi_end: .byte 0\n"
        ".popsection\n");

void openapi_handle(struct exchange *exchange) {
    exchange_answer(exchange, 200, "application/json", openapi_text,
                    (size_t)(openapi_end - openapi_text));
}
