/* A file mapped into memory and read where it lies. Private to the checkpoint. */
#ifndef FATHOM_FILE_MAP_H
#define FATHOM_FILE_MAP_H

#include "base/base.h"

/* Zero-filled is none. */
struct file_map {
    void *bytes;
    size_t size;
};

/* Fills `file` from bytes that stay where they are; on failure there is nothing to undo. */
typedef int file_parser(const void *bytes, size_t size, void *file, struct error *error);

/* Maps a regular file that is not empty, of any format, to be read only, and has it parsed. *map is
 * to be closed with what `parse` has filled; on failure nothing is left of either.
 * FATHOM_NOT_FOUND, FATHOM_IO, FATHOM_INVALID or what `parse` says: the error names the path. The
 * file must not be truncated while it is mapped. Any thread. */
int file_map_open(const char *path, file_parser *parse, void *file, struct file_map *map,
                  struct error *error);
void file_map_close(struct file_map *map); /* a zero-filled one is allowed */

/* Its pages need not stay in memory: those that are read again come back from the file. */
void file_map_let_go(const struct file_map *map);

#endif
