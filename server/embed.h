/* A file, byte for byte inside the program.
 *
 * EMBED(name, "path") defines name_text and name_end: the file lies in between, and a NUL follows.
 * The assembler reads the file; CMakeLists.txt gives the path, and builds again when it changes.
 */
#ifndef FATHOM_EMBED_H
#define FATHOM_EMBED_H

#define EMBED(name, path)                                                                          \
    extern const char name##_text[], name##_end[];                                                 \
    __asm__(".pushsection .rodata\n"                                                               \
            ".hidden " #name "_text, " #name "_end\n"                                              \
            ".globl " #name "_text, " #name "_end\n" #name "_text: .incbin \"" path "\"\n" #name   \
            "_end: .byte 0\n"                                                                      \
            ".popsection\n")

#endif
