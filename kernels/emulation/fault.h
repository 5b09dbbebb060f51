/* Private to the emulation. */
#ifndef FATHOM_EMULATION_FAULT_H
#define FATHOM_EMULATION_FAULT_H

#include <cstddef>

void emulation_fault(const char *message);
void emulation_count_product(size_t bytes);
void emulation_count_graph();
void emulation_count_record();
void emulation_count_wait();
void emulation_count_copy(size_t bytes);

#endif
