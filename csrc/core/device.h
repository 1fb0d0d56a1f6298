// Properties of the current device, queried once, and whether this library has code for it.
#pragma once

#include <string>

namespace fastmax {

inline constexpr int kMinArch = 80;

// Shared memory that a block may use, in bytes. arch: compute capability * 10.
constexpr int shared_limit(int arch) {
  const bool small = arch == 86 || arch == 89 || arch >= 120;
  return (small ? 99 : arch < 90 ? 163 : 227) * 1024;
}
// The smallest limit of all supported architectures, which the tiles of the portable kernels respect.
inline constexpr int kMaxSharedBytes = shared_limit(86);

struct Device {
  int arch = 0;      // compute capability * 10: 80, 90, ...
  int sm_count = 0;  // multiprocessors
  std::string problem;  // why kernels cannot run here, a sentence without a full stop; empty: they can
};

// index: CUDA device index. The current device stays as it is.
const Device& get_device(int index);

}  // namespace fastmax
