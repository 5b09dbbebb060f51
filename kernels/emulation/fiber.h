/* A stack of its own for each thread of a block, and the switch between them. */
#ifndef FATHOM_EMULATION_FIBER_H
#define FATHOM_EMULATION_FIBER_H

#include <cstddef>

#if !defined(__x86_64__) || defined(FATHOM_EMULATION_UCONTEXT)
#define FIBER_UCONTEXT 1
#include <ucontext.h>
#else
#define FIBER_UCONTEXT 0
#endif

#define FIBER_STACK_BYTES ((size_t)256 << 10) /* pages that are never touched cost nothing */

struct fiber {
    void *stack_pointer;  /* while it does not run */
    unsigned char *stack; /* FIBER_STACK_BYTES, below them a page that must not be touched */
    size_t top;           /* where its use begins, from `stack` */
    void *sanitizer_stack;
#if FIBER_UCONTEXT
    ucontext_t context;
#endif
};

/* Makes the fiber begin at `entry` when it is next switched to. `entry` must not return. */
void fiber_prepare(struct fiber *fiber, void (*entry)());
/* Saves this place in `from` and goes on in `to`. `ends`: nobody will switch back to `from`. */
void fiber_switch(struct fiber *from, struct fiber *to, bool ends);
/* The first thing to do in `entry`. */
void fiber_arrived(struct fiber *fiber);

#endif
