// Debug output: a line on stderr for every call, with the kernels that compute it. Enabled by FASTMAX_DEBUG=1 in the
// environment, which is read once, or by fastmax_set_debugging.
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>

namespace fastmax {

inline std::atomic<bool>& debugging() {
  static std::atomic<bool> on{[] {
    const char* value = std::getenv("FASTMAX_DEBUG");
    return value != nullptr && *value != '\0' && std::string(value) != "0";
  }()};
  return on;
}

inline bool is_debugging() { return debugging().load(std::memory_order_relaxed); }

}  // namespace fastmax
