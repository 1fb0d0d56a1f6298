// Cycles of the product rule on the CUDA cores, by warps of a scheduler, without and with wgmma beside it.
//
//     nvcc -std=c++17 -O2 -Icsrc -gencode arch=compute_90a,code=sm_90a trials/hlin_micro.cu -o /tmp/micro && /tmp/micro
//
// A gradient at head dim 64 takes about 540 cycles for a tile of both warpgroups: 256 of products on the tensor cores, 200 instructions
// on each scheduler. If 64 FFMA of one warp take 64 cycles here and 128 of two, registers beside wgmma are what holds them up
// (compare `both` with the larger of the other two); if they take 128 and 128, four warps a scheduler would be faster.
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
#include "core/sm90/wgmma.h"
#include "core/sm90/tiles.h"
using namespace fastmax;

__device__ __forceinline__ void add_products(const float* w, float* gradient, const float* b, const float (&star_x)[2][8], float (&star_sum)[2][8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    gradient[0] = fmaf(star_x[0][i], w[4 * i], gradient[0]), gradient[1] = fmaf(star_x[0][i], w[4 * i + 1], gradient[1]);
    gradient[2] = fmaf(star_x[1][i], w[4 * i + 2], gradient[2]), gradient[3] = fmaf(star_x[1][i], w[4 * i + 3], gradient[3]);
    star_sum[0][i] = fmaf(b[1], w[4 * i + 1], fmaf(b[0], w[4 * i], star_sum[0][i]));
    star_sum[1][i] = fmaf(b[3], w[4 * i + 3], fmaf(b[2], w[4 * i + 2], star_sum[1][i]));
  }
}

// mode 0: products alone; 1: wgmma alone (2 groups in flight); 2: both.
template <int kMode>
__global__ void __launch_bounds__(256, 1) run(const float* in, float* out, long long* cycles, int iterations) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t at = (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023) / 1024 * 1024;
  using Tile = SwizzledTile<64, 64>;
  float w[2][64], grad[32], star_x[2][8], star_sum[2][8], b[4];
  const float* mine = in + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 64; ++i) w[0][i] = mine[i * 256], w[1][i] = mine[i * 256 + 7];
#pragma unroll
  for (int i = 0; i < 32; ++i) grad[i] = mine[i * 256 + 3];
#pragma unroll
  for (int i = 0; i < 8; ++i) star_x[0][i] = mine[i * 256 + 4], star_x[1][i] = mine[i * 256 + 5], star_sum[0][i] = star_sum[1][i] = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = mine[i * 256 + 6];
  const Operand<Tile> x(at + (threadIdx.x / 128) * 8192), features(at + 16384);
  const auto issue = [&](float (&w)[64]) {
    wgmma_fence();
    Wgmma<Bf16, 128>::template ss_first<Major::kK, Major::kK>(w, x.k_major(0), features.k_major(0));
#pragma unroll
    for (int k = 1; k < 4; ++k) Wgmma<Bf16, 128>::template ss<Major::kK, Major::kK>(w, x.k_major(k), features.k_major(k));
    wgmma_commit();
  };
  __syncthreads();
  const long long start = clock64();
  for (int it = 0; it < iterations; ++it) {
    if (kMode > 0) issue(w[0]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (kMode > 0) {
        if (i < 7) issue(w[(i + 1) % 2]), wgmma_wait<1>();
        else wgmma_wait<0>();
      }
      keep(w[i % 2]);
      if (kMode != 1) {
        add_products(w[i % 2], grad + 4 * (i % 8), b, star_x, star_sum);
        add_products(w[i % 2] + 32, grad + 4 * ((i + 1) % 8), b, star_x, star_sum);
      }
      if (kMode == 0) keep(grad);
    }
  }
  const long long end = clock64();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) sum += grad[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += star_sum[0][i] + star_sum[1][i];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += w[0][i] + w[1][i];
  out[threadIdx.x + blockIdx.x * blockDim.x] = sum;
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = end - start;
}

static double host(const long long* x) { long long y = 0; cudaMemcpy(&y, x, 8, cudaMemcpyDeviceToHost); return double(y); }

// Products alone, of one w, in 128 registers: up to four warps a scheduler.
__global__ void __launch_bounds__(512, 1) narrow(const float* in, float* out, long long* cycles, int iterations) {
  float w[32], grad[32], star_x[2][8], star_sum[2][8], b[4];
  const float* mine = in + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 32; ++i) w[i] = mine[i * 256], grad[i] = mine[i * 256 + 3];
#pragma unroll
  for (int i = 0; i < 8; ++i) star_x[0][i] = mine[i * 256 + 4], star_x[1][i] = mine[i * 256 + 5], star_sum[0][i] = star_sum[1][i] = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = mine[i * 256 + 6];
  __syncthreads();
  const long long start = clock64();
  for (int it = 0; it < iterations; ++it) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      keep(w);
      add_products(w, grad + 4 * (i % 8), b, star_x, star_sum);
    }
    keep(grad);
  }
  const long long end = clock64();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) sum += grad[i] + w[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += star_sum[0][i] + star_sum[1][i];
  out[threadIdx.x + blockIdx.x * blockDim.x] = sum;
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = end - start;
}

template <int kMode>
void report(const char* what) {
  float *in, *out;
  long long* cycles;
  cudaMalloc(&in, 1 << 20), cudaMalloc(&out, 1 << 20), cudaMalloc(&cycles, 8);
  cudaMemset(in, 0, 1 << 20);
  cudaFuncSetAttribute(run<kMode>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  for (int threads : {128, 256}) {
    run<kMode><<<132, threads, 65536>>>(in, out, cycles, 2000);
    cudaDeviceSynchronize();
    run<kMode><<<132, threads, 65536>>>(in, out, cycles, 2000);
    const cudaError_t error = cudaDeviceSynchronize();
    printf("%-28s %d warps a scheduler: %.0f cycles per two tiles of all warps (%s)\n", what, threads / 128, host(cycles) / 16000., cudaGetErrorString(error));
  }
}
int main() {
  float *in, *out;
  long long* cycles;
  cudaMalloc(&in, 1 << 20), cudaMalloc(&out, 1 << 20), cudaMalloc(&cycles, 8);
  cudaMemset(in, 0, 1 << 20);
  for (int threads : {128, 256, 384, 512}) {
    for (int i = 0; i < 2; ++i) narrow<<<132, threads>>>(in, out, cycles, 2000);
    printf("one w, 64 FFMA a warp: %d warps a scheduler: %.0f cycles per tile of all warps\n", threads / 128, host(cycles) / 16000.);
  }
  report<0>("products, 128 FFMA a warp");
  report<1>("W, 4 x m64n128k16");
  report<2>("both");
}
