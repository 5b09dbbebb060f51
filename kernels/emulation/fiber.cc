/* The C library's swapcontext saves the signal mask with a system call each time, which is most of
 * its price; a kernel switches at every barrier and shuffle of every thread. So the switch is
 * written out for x86-64, and swapcontext is for the rest. */
#include "kernels/emulation/fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define FIBER_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FIBER_SANITIZED 1
#endif
#endif
#if defined(FIBER_SANITIZED)
#include <sanitizer/common_interface_defs.h>
#endif

static const size_t GUARD = 4096;

/* Stacks lie whole pages apart, and what is in use of them would share a few lines of the cache:
 * each begins a little lower than the one before. */
static size_t stack_top() {
    static size_t made;
    return FIBER_STACK_BYTES - made++ % 16 * 256;
}

static void stack_create(struct fiber *fiber) {
    void *map = mmap(NULL, GUARD + FIBER_STACK_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map, GUARD, PROT_NONE) != 0) {
        fprintf(stderr, "emulation: no memory for the stack of a thread\n");
        abort();
    }
    fiber->stack = (unsigned char *)map + GUARD;
    fiber->top = stack_top();
}

#if FIBER_UCONTEXT

void fiber_prepare(struct fiber *fiber, void (*entry)()) {
    if (!fiber->stack) stack_create(fiber);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = fiber->top;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, entry, 0);
}

static void switch_stacks(struct fiber *from, struct fiber *to) {
    swapcontext(&from->context, &to->context);
}

#else

/* Only the registers that a called function must keep: to the compiler this is a call. */
extern "C" void fathom_fiber_switch(void **save, void *load);
asm(".text\n"
    ".type fathom_fiber_switch, @function\n"
    "fathom_fiber_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size fathom_fiber_switch, . - fathom_fiber_switch\n");

/* As if `entry` had been called and had switched away before its first instruction: at a function's
 * start the stack pointer is 8 above a multiple of 16. */
void fiber_prepare(struct fiber *fiber, void (*entry)()) {
    if (!fiber->stack) stack_create(fiber);
    void **top = (void **)(void *)(fiber->stack + fiber->top);
    *--top = NULL; /* where `entry` would return to */
    *--top = (void *)(uintptr_t)entry;
    for (int i = 0; i < 6; i++) *--top = NULL;
    fiber->stack_pointer = top;
}

static void switch_stacks(struct fiber *from, struct fiber *to) {
    fathom_fiber_switch(&from->stack_pointer, to->stack_pointer);
}

#endif

/* The sanitizer must know which stack is in use. A thread's own has no `stack`: where it lies is told
 * to a fiber that begins when it is left. */
#if defined(FIBER_SANITIZED)
static const void *main_stack;
static size_t main_bytes;
static const struct fiber *left; /* where the last switch came from */

void fiber_switch(struct fiber *from, struct fiber *to, bool ends) {
    const void *bottom = to->stack ? to->stack : main_stack;
    size_t bytes = to->stack ? FIBER_STACK_BYTES : main_bytes;
    left = from;
    __sanitizer_start_switch_fiber(ends ? NULL : &from->sanitizer_stack, bottom, bytes);
    switch_stacks(from, to);
    __sanitizer_finish_switch_fiber(from->sanitizer_stack, NULL, NULL);
}

void fiber_arrived(struct fiber *fiber) {
    (void)fiber;
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (left->stack) return;
    main_stack = bottom;
    main_bytes = bytes;
}
#else
void fiber_switch(struct fiber *from, struct fiber *to, bool ends) {
    (void)ends;
    switch_stacks(from, to);
}

void fiber_arrived(struct fiber *fiber) {
    (void)fiber;
}
#endif
