// Kernels that prepare inputs of the passes: g and e of a backward, fp32 copies of fp16, decayed copies of rows.
//
// shards: FASTMAX_MATH

#include <type_traits>

#include "core/lanes.h"
#include "core/launch.h"
#include "linear/order2/features.h"

namespace fastmax {
namespace {

// A row per kLanes lanes, 16 bytes per load. e is computed from the rounded g: where o is close to v the two cancel in g.v + e.
template <class In, class G, int kLanes>
__global__ void __launch_bounds__(256) linear_prepare_kernel(const PrepareArgs a, const int head_blocks) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(In));
  const int head_index = blockIdx.x / head_blocks;
  const int i = blockIdx.x % head_blocks * (static_cast<int>(blockDim.x) / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int64_t row = int64_t{head_index} * a.n + i;
  const int lane = threadIdx.x % kLanes;
  float e = 0.f, inverse = 0.f;
  if (i < a.n) {
    const int batch = head_index / a.heads, head = head_index % a.heads;
    const float z = a.z[row];
    inverse = z == 0.f ? 0.f : 1.f / z;
    if (a.shift != nullptr) {
      const float sum = 1.4426950408889634f * z;
      const float largest = a.is_gated ? PrepareArgs::kLargestGatedExponent : PrepareArgs::kLargestExponent;
      const float exponent = sum < PrepareArgs::kLeastExponent || sum > largest ? largest : sum;
      const bool is_empty = z == -INFINITY;  // no key is visible
      inverse = is_empty ? 0.f : exp2f(-exponent);
      if (lane == 0) a.shift[head_index * a.e_head + i] = is_empty ? 0.f : sum - exponent;
    }
    G* g_row = const_cast<G*>(head_pointer<G>(a.g, batch, head)) + i * a.g.token;
    const auto load = [&](In(&dst)[kVector], const View& v, int c) {
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(head_pointer<In>(v, batch, head) + i * v.token + c);
    };
    for (int c = kVector * lane; c < a.dv; c += kVector * kLanes) {
      alignas(16) In grad[kVector], o[kVector], noise[kVector];
      load(grad, a.grad_o, c);
      load(o, a.o, c);
      if (a.noise.data != nullptr) load(noise, a.noise, c);
      alignas(16) G g[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float scaled = to_float(grad[j]) * inverse;
        if (a.noise.data == nullptr) {
          g[j] = from_float<G>(scaled);
          e -= to_float(g[j]) * to_float(o[j]);
        } else {
          const float exact = scaled * fmaf(a.dropout, to_float(noise[j]), 1.f);
          g[j] = from_float<G>(exact);
          const float product = scaled * to_float(o[j]);
          e -= exact == 0.f ? product : product * (to_float(g[j]) / exact);
        }
      }
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(g)) / 16; ++j) {
        reinterpret_cast<uint4*>(g_row + c)[j] = reinterpret_cast<const uint4*>(g)[j];
      }
    }
  }
  e = sum_of_lanes<kLanes>(e);
  if (i < a.n && lane == 0) {
    if (a.grad_z != nullptr && a.shift != nullptr) e += a.z[row] == -INFINITY ? 0.f : inverse * a.grad_z[row];
    else if (a.grad_z != nullptr && a.z[row] != 0.f) e += a.grad_z[row];
    a.e[head_index * a.e_head + i] = e;
  }
}

// A row per 16 lanes.
template <class Element>
__global__ void __launch_bounds__(256) linear_widen_kernel(const View src, float* __restrict__ dst, const int heads, const int tokens,
                                                           const int columns, const int64_t rows) {
  constexpr int kLanes = 16;
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const int head_index = static_cast<int>(row / tokens), i = static_cast<int>(row % tokens);
  for (int c = threadIdx.x % kLanes * 2; c < columns; c += 2 * kLanes) {
    const float2 x = load_row_pair<Element>(src, false, head_index / heads, head_index % heads, i, c);
    store_pair(dst + row * columns + c, x.x, x.y);
  }
}

// A block has the kBoundary virtual rows of a group: their factors first, a row per thread, then w.
template <class Element>
__global__ void __launch_bounds__(256) linear_decay_kernel(const DecayArgs a, const int groups) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
  __shared__ float factors[kBoundary];
  const int head_index = blockIdx.x / groups, heads = a.state_heads * a.y_group;
  const int virtual_begin = blockIdx.x % groups * kBoundary;
  const int64_t first = static_cast<int64_t>(head_index) * a.ny;
  const auto token_of = [&](int y_row) { return a.time == Time::kForward ? y_row : a.ny - 1 - y_row; };  // in memory

  const int own_row = a.y_row(virtual_begin + static_cast<int>(threadIdx.x)), token = token_of(own_row);
  float* own_e = a.decayed_e + head_index * a.e_head + token;
  bool drops = false;
  if (threadIdx.x < kBoundary && own_row >= 0 && own_row < a.ny) {
    const int64_t state = head_index / a.y_group;
    const uint8_t* mask = mask_pointer(a.mask, head_index / heads);
    const float2 edge = a.decay.at_edge(a, state, a.decay.edge_after(a, virtual_begin + static_cast<int>(threadIdx.x) + 1));
    float factor = exp2f(Decay::between(a, edge, a.decay.at_row(a, state, own_row)));
    if (mask != nullptr && mask[static_cast<int64_t>(token) * a.mask.token] == 0) factor = 0.f;
    drops = factor == 0.f;
    factors[threadIdx.x] = factor;
    const float e = a.e.data == nullptr ? 1.f : a.e.data[head_index * a.e.head + static_cast<int64_t>(token) * a.e.token];
    *own_e = drops ? 0.f : e * factor;
    a.attended[first + token] = !drops;
  } else if (threadIdx.x < kBoundary) {
    *own_e = 0.f;
  }
  drops = __syncthreads_or(drops);
  if (threadIdx.x == 0) a.whole[blockIdx.x] = !drops;

  // Dropped rows are not read.
  const Element* source = head_pointer<Element>(a.w, head_index / heads, head_index % heads);
  const int vectors = a.dv / kVector;
#pragma unroll 4
  for (int i = threadIdx.x; i < kBoundary * vectors; i += static_cast<int>(blockDim.x)) {
    const int row = i / vectors, y_row = a.y_row(virtual_begin + row);
    if (y_row < 0 || y_row >= a.ny || factors[row] == 0.f) continue;
    const int token = token_of(y_row), column = i % vectors * kVector;
    alignas(16) Element x[kVector];
    *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(source + token * a.w.token + column);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = from_float<Element>(to_float(x[j]) * factors[row]);
    *reinterpret_cast<uint4*>(static_cast<Element*>(a.decayed_w) + (first + token) * a.dv + column) = *reinterpret_cast<const uint4*>(x);
  }
}

__global__ void __launch_bounds__(256) linear_carry_kernel(const DecayArgs a) {
  const int index = blockIdx.x * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int state = index / a.chunks, chunk = index % a.chunks;
  if (state < a.states()) a.carries[index] = DecayFactor::of(a.decay.passing(a, state, chunk, chunk + 1)).code;
}

}  // namespace

template <>
void linear_prepare<FASTMAX_MATH>(const PrepareArgs& a, cudaStream_t stream) {
  using In = FASTMAX_MATH::Element;
  using G = std::conditional_t<kIs16Bit<FASTMAX_MATH> && !kBf16State<FASTMAX_MATH>, float, In>;
  const auto launch = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kThreads = 256, kRows = kThreads / kLanes;
    const int head_blocks = (a.n + kRows - 1) / kRows;
    launch_kernel("linear_prepare", linear_prepare_kernel<In, G, kLanes>, grid_1d(int64_t{head_blocks} * a.batch * a.heads), kThreads, 0,
                  stream, a, head_blocks);
  };
  // As many as load something.
  constexpr int kVector = 16 / static_cast<int>(sizeof(In));
  if (a.dv <= 4 * kVector) launch(std::integral_constant<int, 4>());
  else launch(std::integral_constant<int, 8>());
}

template <>
void linear_decay<FASTMAX_MATH>(const DecayArgs& a, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int groups = a.groups();
  launch_kernel("linear_decay", linear_decay_kernel<FASTMAX_MATH::Element>, grid_1d(int64_t{groups} * a.states() * a.y_group), kThreads, 0,
                stream, a, groups);
  launch_kernel("linear_carry", linear_carry_kernel, grid_1d((int64_t{a.states()} * a.chunks + kThreads - 1) / kThreads), kThreads, 0,
                stream, a);
}

template <>
void linear_widen<FASTMAX_MATH>(const View& src, float* dst, int batch, int heads, int tokens, int columns, cudaStream_t stream) {
  const int64_t rows = int64_t{batch} * heads * tokens;
  constexpr int kThreads = 256, kRows = kThreads / 16;
  launch_kernel("linear_widen", linear_widen_kernel<FASTMAX_MATH::Element>, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream,
                src, dst, heads, tokens, columns, rows);
}

}  // namespace fastmax
