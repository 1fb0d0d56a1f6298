// Pieces of a call's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastmax {

// Hands out 256-byte aligned pieces of the workspace; with a null base, counts bytes.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace fastmax
