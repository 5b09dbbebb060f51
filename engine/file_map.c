#include "engine/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int map_descriptor(const char *path, int descriptor, struct file_map *map,
                          struct error *error) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        return error_set(error, FATHOM_IO, "cannot read %s: %s", path, strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return error_set(error, FATHOM_INVALID, "%s is not a regular file", path);
    }
    if (status.st_size == 0) { /* cannot be mapped */
        return error_set(error, FATHOM_INVALID, "%s is empty", path);
    }
    size_t size = (size_t)status.st_size;
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (bytes == MAP_FAILED) {
        return error_set(error, FATHOM_IO, "cannot map %s: %s", path, strerror(errno));
    }
    *map = (struct file_map){bytes, size};
    return 0;
}

int file_map_open(const char *path, file_parser *parse, void *file, struct file_map *map,
                  struct error *error) {
    /* Opening a pipe would wait for a writer; a regular file does not mind. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) {
        int code = errno == ENOENT ? FATHOM_NOT_FOUND : FATHOM_IO;
        return error_set(error, code, "cannot open %s: %s", path, strerror(errno));
    }
    struct file_map mapped;
    int result = map_descriptor(path, descriptor, &mapped, error);
    close(descriptor);
    if (result != 0) return result;
    result = parse(mapped.bytes, mapped.size, file, error);
    if (result != 0) {
        file_map_close(&mapped);
        error_prefix(error, "%s", path);
        return result;
    }
    *map = mapped; /* may be a part of `file`, which parsing has filled anew */
    return 0;
}

void file_map_close(struct file_map *map) {
    if (map->bytes) munmap(map->bytes, map->size);
    *map = (struct file_map){0};
}

void file_map_let_go(const struct file_map *map) {
    if (map->bytes) madvise(map->bytes, map->size, MADV_DONTNEED);
}
