/* Any bytes are a GGUF file or an error; what is accepted can be read to the last element, no two
 * tensors share a byte, and its configuration and tokenizer are sound or refused. */
#include <math.h>

#include "engine/gguf.h"
#include "engine/tensor_format.h"
#include "tests/fuzz/fuzz.h"

static void check_tensors(const struct gguf *file) {
    for (size_t i = 0; i < file->tensor_count; i++) {
        const struct gguf_tensor *tensor = &file->tensors[i];
        const struct tensor_format *format = tensor_format_find(tensor->type);
        check(format && tensor->rank - 1 < 4);
        check(tensor->offset <= file->data_bytes);
        check(tensor->bytes <= file->data_bytes - tensor->offset);
        check(tensor->elements / format->block * format->bytes == tensor->bytes);
        for (size_t j = 0; j < i; j++) {
            const struct gguf_tensor *other = &file->tensors[j];
            check(other->offset + other->bytes <= tensor->offset ||
                  tensor->offset + tensor->bytes <= other->offset);
        }
    }
}

static void check_config(const struct gguf *file, const struct config *config) {
    check(config->heads - 1 < 1024 && config->kv_heads - 1 < 1024 && config->blocks - 1 < 1024);
    check(config->head_size - 1 < HEAD_SIZE_MAX && config->head_size % 2 == 0);
    check(config->heads % config->kv_heads == 0 && config->hidden - 1 < 32768);
    for (size_t i = 0; i < config->eos_count; i++) {
        check(config->eos[i] >= 0 && (size_t)config->eos[i] < config->vocab);
    }
    struct tensor tensor;
    struct error error = {0};
    int result = gguf_get_tensor(file, config, "model.embed_tokens.weight", &tensor, &error);
    check(result == 0 || error.code == result);
    if (result != 0) return;
    size_t count = tensor.shape[0] * tensor.shape[1];
    float *out = malloc(count * sizeof *out + 1);
    check(out != NULL);
    if (tensor_to_f32(&tensor, out, &error) == 0) {
        for (size_t i = 0; i < count; i++) check(isfinite(out[i]));
    }
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct gguf file;
    struct config config;
    struct tokenizer *tokenizer;
    struct error error = {0};
    int result = gguf_parse(data, size, &file, &error);
    if (result != 0) {
        check_error(result, &error);
        return 0;
    }
    check_tensors(&file);
    result = gguf_read_config(&file, &config, &error);
    if (result != 0) {
        check_error(result, &error);
    } else {
        check_config(&file, &config);
    }
    error = (struct error){0};
    result = gguf_load_tokenizer(&file, &tokenizer, &error);
    if (result != 0) {
        check_error(result, &error);
    } else {
        check(tokenizer_size(tokenizer) > 0);
        tokenizer_destroy(tokenizer);
    }
    gguf_close(&file);
    return 0;
}
