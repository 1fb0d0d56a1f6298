"""csrc/core/launch.cu on the host with a stand-in for the CUDA runtime: what it asks for before it launches a kernel."""

import subprocess

from common import compile_probe

PROBE = """
#include <cstdio>
#include <cuda_runtime.h>
#include "core/driver.h"

static int device, context, static_bytes;

extern "C" {
cudaError_t cudaGetDevice(int* current) { return *current = device, cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return *attributes = {}, attributes->sharedSizeBytes = static_bytes, cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) { return std::printf("%d", bytes), cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
}
CUcontext fastmax::current_context() { return reinterpret_cast<CUcontext>(static_cast<size_t>(context)); }

#include "core/launch.cu"

int main() {
  static const char kernels[4] = {};
  int kernel, bytes;
  while (std::scanf("%d %d %d %d %d", &kernel, &device, &context, &static_bytes, &bytes) == 5) {
    fastmax::allow_shared_memory("kernel", kernels + kernel, bytes);
    std::printf("\\n");
  }
}
"""


def test_shared_memory_is_asked_for_once_in_each_context():
    calls = [  # kernel, device, context, static bytes, bytes; what is asked for
        ((0, 0, 1, 0, 100_000), "100000"),
        ((0, 0, 1, 0, 100_000), ""),
        ((0, 0, 1, 0, 60_000), ""),
        ((0, 0, 2, 0, 60_000), "100000"),  # another context: no less than before, as a function may be of all
        ((0, 0, 2, 0, 100_000), ""),
        ((0, 0, 1, 0, 120_000), "120000"),
        ((0, 0, 2, 0, 60_000), "120000"),
        ((0, 1, 3, 0, 60_000), "60000"),  # another device, another kernel
        ((1, 0, 1, 0, 60_000), "60000"),
        ((2, 0, 1, 0, 48 * 1024), ""),  # what every kernel has
        ((3, 0, 1, 16, 48 * 1024), str(48 * 1024)),
    ]
    lines = "".join(" ".join(map(str, call)) + "\n" for call, _ in calls)
    done = subprocess.run([compile_probe(PROBE)], input=lines, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [asked for _, asked in calls]
