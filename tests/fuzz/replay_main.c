/* Runs a fuzz target on files, and on every file of a folder: replays a corpus and findings where
 * there is no libFuzzer. */
#include <dirent.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

#define INPUT_BYTES_MAX ((size_t)256 << 20)

static int replay(const char *path, size_t *count);

static int replay_file(const char *path) {
    char *data;
    size_t size;
    struct error error;
    if (file_read(path, INPUT_BYTES_MAX, &data, &size, &error) != 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    /* Without the NUL that file_read appends, a read past the end is a read past the block. */
    char *exact = copy_exact(data, size);
    free(data);
    fprintf(stderr, "%s\n", path); /* the last line before a crash names the input */
    LLVMFuzzerTestOneInput((const uint8_t *)exact, size);
    free(exact);
    return 0;
}

static int replay_folder(const char *path, size_t *count) {
    struct dirent **entries;
    int result = 0, listed = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < listed; i++) {
        char inner[4096];
        snprintf(inner, sizeof inner, "%s/%s", path, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.') result |= replay(inner, count);
        free(entries[i]);
    }
    if (listed >= 0) free(entries);
    return result | (listed < 0);
}

static int replay(const char *path, size_t *count) {
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) return replay_folder(path, count);
    ++*count;
    return replay_file(path);
}

int main(int argc, char **argv) {
    size_t count = 0;
    int result = 0;
    for (int i = 1; i < argc; i++) result |= replay(argv[i], &count);
    printf("%zu inputs, no finding\n", count);
    return result | (count == 0); /* an empty corpus tests nothing */
}
