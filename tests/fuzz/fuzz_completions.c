/* Any bytes are a body of POST /v1/completions or a 4xx; what is accepted keeps its limits, and its
 * answer is the same JSON streamed or whole. */
#include "tests/fuzz/fuzz_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct text_buffer body = {0};
    struct completion_request request;
    struct api_error error = {0};
    make_context();
    make_body(data, size, "{\"model\":\"m\",\"prompt\":\"a\"", &body);
    int result = completion_request_parse(&context, body.data, body.length, NULL, &request, &error);
    if (result == 0) {
        check_request(&request);
        result = completion_request_tokenize(&context, &request, NULL, &error);
        if (result == 0) check_answer(&request, data, size);
        completion_request_free(&request);
    }
    if (result != 0) check_refusal(&error);
    text_free(&body);
    return 0;
}
