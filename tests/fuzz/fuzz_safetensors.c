/* Any bytes are a safetensors file or an error; what is accepted can be read to the last element,
 * and no two tensors share a byte. */
#include <math.h>

#include "engine/safetensors.h"
#include "tests/fuzz/fuzz.h"

static void read_tensor(const struct tensor *tensor) {
    struct error error = {0};
    size_t count = tensor->bytes / dtype_size(tensor->type), elements = 1;
    for (size_t i = 0; i < tensor->rank; i++) elements *= tensor->shape[i];
    check(elements == count);
    float *out = malloc(count * sizeof *out + 1);
    check(out != NULL);
    int result = tensor_to_f32(tensor, out, &error);
    if (result != 0) {
        check_error(result, &error);
    } else {
        for (size_t i = 0; i < count; i++) check(isfinite(out[i]));
    }
    free(out);
}

static void check_file(const struct safetensors *file, unsigned char *taken) {
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i];
        struct tensor tensor;
        struct error error = {0};
        check(safetensors_find(file, entry->name) == entry);
        check(entry->end <= file->data_bytes && entry->begin <= entry->end);
        for (size_t byte = entry->begin; byte < entry->end; byte++) check(!taken[byte]++);
        int result = safetensors_tensor(file, entry, &tensor, &error);
        if (result == 0) {
            read_tensor(&tensor);
        } else {
            check_error(result, &error);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct safetensors file;
    struct error error = {0};
    int result = safetensors_parse(data, size, &file, &error);
    if (result != 0) {
        check_error(result, &error);
        check(!file.entries);
        return 0;
    }
    check(file.data + file.data_bytes == data + size);
    unsigned char *taken = calloc(file.data_bytes + 1, 1);
    check(taken != NULL);
    check_file(&file, taken);
    free(taken);
    safetensors_close(&file);
    return 0;
}
