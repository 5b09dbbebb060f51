/* Runs a fuzz target on the files given as arguments: replays findings where there is no libFuzzer.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

#define INPUT_BYTES_MAX ((size_t)256 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int count, char **arguments) {
    for (int i = 1; i < count; i++) {
        char *data;
        size_t size;
        struct error error;
        if (file_read(arguments[i], INPUT_BYTES_MAX, &data, &size, &error) != 0) {
            fprintf(stderr, "%s\n", error.message);
            return 1;
        }
        /* Without the NUL that file_read appends, a read past the end is a read past the block. */
        char *exact = realloc(data, size > 0 ? size : 1);
        LLVMFuzzerTestOneInput((const uint8_t *)(exact ? exact : data), size);
        free(exact ? exact : data);
        printf("%s: %zu bytes, no finding\n", arguments[i], size);
    }
    return 0;
}
