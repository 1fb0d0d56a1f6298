// What the current device is, asked once, and whether this library has code for it.
#pragma once

#include <string>

namespace fastmax {

struct Device {
  int arch = 0;      // compute capability * 10: 80, 90, ...
  int sm_count = 0;  // multiprocessors
  std::string problem;  // why no kernel runs here, one sentence without a full stop; empty: they run
};

// index as CUDA counts devices; leaves the current device as it was.
const Device& get_device(int index);

}  // namespace fastmax
