// Threads that a program switches between by itself, and their stacks.
#pragma once

#include <cstddef>
#include <stdexcept>

#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

inline constexpr size_t kStackBytes = 256 * 1024;

#ifdef __x86_64__
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
struct Context {
  void* stack_pointer = nullptr;
  void start(unsigned char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + bytes) - 1;  // where a function finds its return address
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
};
inline void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }
#else
struct Context {
  ucontext_t context;
  void start(unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = bytes, context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

// Stacks of a block's fibers, kept by the thread for its next block.
struct Stacks {
  unsigned char* data = nullptr;
  size_t bytes = 0;
  void reserve(int threads) {
    if (bytes >= threads * kStackBytes) return;
    release();
    bytes = threads * kStackBytes;
    data = static_cast<unsigned char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (data == MAP_FAILED) throw std::runtime_error("no memory for the stacks of a block");
  }
  void release() {
    if (data != nullptr) munmap(data, bytes);
    data = nullptr, bytes = 0;
  }
  ~Stacks() { release(); }
};

}  // namespace emulator
