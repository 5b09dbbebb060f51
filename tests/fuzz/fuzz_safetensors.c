/* Any bytes are a safetensors file or an error; what is accepted can be read to the last element.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_tensor(const struct tensor *tensor) {
    struct error error;
    float *out = malloc(tensor->bytes / dtype_size(tensor->type) * sizeof *out + 1);
    if (!out) return;
    int result = tensor_to_f32(tensor, out, &error);
    if (result != 0 && !strstr(error.message, "at element")) abort();
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct safetensors file;
    struct error error = {0};
    int result = safetensors_parse(data, size, &file, &error);
    if (result != 0) {
        if (error.code != result || error.message[0] == '\0' || file.entries) abort();
        return 0;
    }
    for (size_t i = 0; i < file.count; i++) {
        const struct safetensors_entry *entry = &file.entries[i];
        struct tensor tensor;
        if (safetensors_find(&file, entry->name) != entry) abort();
        if (entry->end > file.data_bytes || entry->begin > entry->end) abort();
        if (safetensors_tensor(&file, entry, &tensor, &error) == 0) read_tensor(&tensor);
    }
    safetensors_close(&file);
    return 0;
}
