// FASTMAX_DEBUG=1 in the environment: a line on stderr for every call, with what computes it. Read once.
#pragma once

#include <cstdlib>
#include <string>

namespace fastmax {

inline bool is_debugging() {
  static const bool on = [] {
    const char* value = std::getenv("FASTMAX_DEBUG");
    return value != nullptr && *value != '\0' && std::string(value) != "0";
  }();
  return on;
}

}  // namespace fastmax
