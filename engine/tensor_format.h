/* How elements lie in a GGUF tensor: plain numbers, or blocks of small codes with scales. */
#ifndef FATHOM_TENSOR_FORMAT_H
#define FATHOM_TENSOR_FORMAT_H

#include "kernels/kernels.h"

struct tensor_format {
    const char *name;
    uint32_t number;     /* in the file */
    size_t block, bytes; /* elements and bytes of one block; plain numbers: one element */
    /* Writes the elements of one block; NULL for plain numbers, which have `type`. */
    void (*unpack)(const unsigned char *block, float *out);
    /* Of plain numbers; of packed ones the type that stands for them best. */
    enum dtype type;
};

extern const char tensor_format_names[]; /* all of them, for messages */

/* NULL: not supported. */
const struct tensor_format *tensor_format_find(uint32_t number);

#endif
