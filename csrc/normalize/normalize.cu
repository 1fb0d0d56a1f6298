// Scales rows back onto a sphere, bound by memory: q and k in one launch, with every row read once and written once.
//
// A power of two of neighbouring lanes of a warp share a row. Each lane holds kElements of its elements, in 16-byte words if
// rows are aligned. A lane takes several rows and starts all their loads before it uses the first.

#include "normalize/normalize.h"

#include <type_traits>

#include "core/dtype.h"
#include "core/launch.h"
#include "core/word.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // per lane and row
static_assert(32 * kElements == kMaxNormalizedDim);
// Rows per lane: aligned rows have 64 bytes in flight (bf16); in other rows each element is a load of its own.
template <bool kAligned>
constexpr int kForwardRows = kAligned ? 4 : 1;
template <bool kAligned>
constexpr int kBackwardRows = kAligned ? 2 : 1;  // the backward reads two tensors

// A row index in components: (outermost * outer + middle) * inner + innermost.
struct RowIndex {
  int outermost, middle, innermost;
};

struct Launch {
  int lanes_log2;     // log2 of the lanes per row
  int rows;           // rows per pass of a block
  unsigned q_blocks;  // blocks for rows of q, which come first
  RowIndex step[2];      // `rows` in components, for q and k
};

// The rows of a lane: index `first` and every launch.rows-th row after it.
template <int kRows>
struct LaneRows {
  const Launch& launch;
  const int which;
  const NormalizedTensor& tensor;
  const int lane, lanes, first;

  __device__ __forceinline__ LaneRows(const NormalizeParams& p, const Launch& launch)
      : launch(launch),
        which(blockIdx.x < launch.q_blocks ? 0 : 1),
        tensor(p.tensors[which]),
        lane(threadIdx.x & ((1 << launch.lanes_log2) - 1)),
        lanes(1 << launch.lanes_log2),
        first((blockIdx.x - (which == 0 ? 0 : launch.q_blocks)) * kRows * launch.rows + (threadIdx.x >> launch.lanes_log2)) {}

  __device__ __forceinline__ int number(int r) const { return first + r * launch.rows; }
  __device__ __forceinline__ bool exists(int r) const { return number(r) < tensor.rows; }

  // Calls function(r, index) for every row. The index is undefined if the row does not exist.
  template <class Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    const unsigned inner = tensor.inner, outer = tensor.outer, rest = first / inner;
    RowIndex at{static_cast<int>(rest / outer), static_cast<int>(rest % outer), static_cast<int>(first % inner)};
    const RowIndex step = launch.step[which];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      function(r, at);
      at.innermost += step.innermost, at.middle += step.middle, at.outermost += step.outermost;
      if (at.innermost >= tensor.inner) at.innermost -= tensor.inner, ++at.middle;
      if (at.middle >= tensor.outer) at.middle -= tensor.outer, ++at.outermost;
    }
  }

  __device__ __forceinline__ int64_t offset(const RowIndex& at, const Stride& stride) const {
    return at.outermost * stride.batch + at.middle * (tensor.token_major ? stride.token : stride.head) +
           at.innermost * (tensor.token_major ? stride.head : stride.token);
  }
};

template <class Element>
struct Single {
  static constexpr int kElements = 1;
  Element x;
};

// A lane's elements of a row, with zeros beyond the end.
template <class Element, bool kAligned>
struct Slice {
  using Unit = std::conditional_t<kAligned, Word<Element>, Single<Element>>;
  static constexpr int kUnits = kElements / Unit::kElements;
  Unit units[kUnits];

  static __device__ __forceinline__ int column(int unit, int lane, int lanes) { return (unit * lanes + lane) * Unit::kElements; }

  __device__ __forceinline__ void load(const void* tensor, int64_t offset, int lane, int lanes, int d) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = column(i, lane, lanes);
      const Element* source = static_cast<const Element*>(tensor) + offset + at;
      if constexpr (kAligned) ptx::load_global_or_zero(units[i].r, source, at < d);
      else units[i].x = at < d ? *source : from_float<Element>(0.f);
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kAligned) {
      const float2 pair = units[i / Unit::kElements].pair(i % Unit::kElements / 2);
      return i % 2 == 0 ? pair.x : pair.y;
    } else {
      return to_float(units[i].x);
    }
  }

  // Stores function(i) as element i.
  template <class Function>
  static __device__ __forceinline__ void store(void* tensor, int64_t offset, int lane, int lanes, int d, const Function& function) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = column(i, lane, lanes);
      if (at >= d) continue;
      Unit unit;
      if constexpr (kAligned) {
#pragma unroll
        for (int j = 0; j < Unit::kPairs; ++j) {
          unit.set_pair(j, function(i * Unit::kElements + 2 * j), function(i * Unit::kElements + 2 * j + 1));
        }
      } else {
        unit.x = from_float<Element>(function(i));
      }
      *reinterpret_cast<Unit*>(static_cast<Element*>(tensor) + offset + at) = unit;
    }
  }
};

// Sums over the lanes of a row, for every row. All its lanes get the same bits.
template <int kRows>
__device__ __forceinline__ void sum_over_lanes(float (&sums)[kRows], int lanes) {
  for (int bit = lanes / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] += __shfl_xor_sync(~0u, sums[r], bit);
  }
}

template <class Slice>
__device__ __forceinline__ float sum_of_squares(const Slice& x, float scale) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float scaled = scale * x[i];
    sum = fmaf(scaled, scaled, sum);
  }
  return sum;
}

// Limits of sums of squares in which no element that matters overflowed or was rounded away.
constexpr float kLeastSum = 0x1p-96f, kMostSum = 0x1p120f;
// Factors for rows with other sums. Such rows are shorter than 2^-48, down to 2^-149, or longer than 2^60, up to 2^132. Squares
// of the elements that matter are then between 2^-98 and 2^104.
constexpr float kScaleUp = 0x1p100f, kScaleDown = 0x1p-80f;
constexpr float kBelowOne = 0x1.fffffep-1f;

// kScales: else only the factors are written.
template <class Element, bool kAligned, bool kScales>
__global__ void __launch_bounds__(kThreads)
    normalize_tokens_kernel(const __grid_constant__ NormalizeParams p, const __grid_constant__ Launch launch) {
  constexpr int kRows = kForwardRows<kAligned>;
  using Slice = fastmax::Slice<Element, kAligned>;
  const LaneRows<kRows> rows(p, launch);
  const NormalizedTensor& tensor = rows.tensor;

  Slice x[kRows];
  rows.visit([&](int r, const RowIndex& at) {
    x[r].load(tensor.x, rows.offset(at, tensor.x_stride), rows.lane, rows.lanes, rows.exists(r) ? p.d : 0);
  });
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = sum_of_squares(x[r], 1.f);
  sum_over_lanes(sums, rows.lanes);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float scale = 1.f;
    const bool is_exact = sums[r] >= kLeastSum && sums[r] <= kMostSum;
    if (__any_sync(~0u, !is_exact)) {
      const float other_scale = sums[r] < 1.f ? kScaleUp : kScaleDown;
      float other[1] = {sum_of_squares(x[r], other_scale)};
      sum_over_lanes(other, rows.lanes);
      if (!is_exact) scale = other_scale, sums[r] = other[0];
    }
    if (!rows.exists(r)) continue;
    const float lim = p.lim * scale;
    const bool too_long = sums[r] > lim * lim;  // also correct if the square overflows or underflows, as sums do not
    const float back = too_long ? p.lim * rsqrtf(sums[r]) : 1.f;
    scale = too_long ? scale : 1.f;
    if constexpr (kScales) {
      Slice::store(tensor.out, int64_t{rows.number(r)} * p.d, rows.lane, rows.lanes, p.d,
                   [&](int i) { return x[r][i] * scale * back; });
    }
    if (rows.lane == 0) tensor.factor[rows.number(r)] = too_long ? fminf(scale * back, kBelowOne) : 1.f;
  }
}

// With out = F x and F = lim / |x|, the gradient of a scaled row is F (grad - out (grad . out) / lim^2).
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads) normalize_tokens_backward_kernel(const __grid_constant__ NormalizeParams p,
                                                                             const __grid_constant__ Launch launch, float over_lim) {
  constexpr int kRows = kBackwardRows<kAligned>;
  using Slice = fastmax::Slice<Element, kAligned>;
  const LaneRows<kRows> rows(p, launch);
  const NormalizedTensor& tensor = rows.tensor;

  Slice x[kRows], grad[kRows];
  float factor[kRows];
  rows.visit([&](int r, const RowIndex& at) {
    const int d = rows.exists(r) ? p.d : 0;
    x[r].load(tensor.x, rows.offset(at, tensor.x_stride), rows.lane, rows.lanes, d);
    grad[r].load(tensor.grad, rows.offset(at, tensor.grad_stride), rows.lane, rows.lanes, d);
    factor[r] = rows.exists(r) ? tensor.factor[rows.number(r)] : 1.f;
  });
  float products[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) products[r] = fmaf(grad[r][i], x[r][i], products[r]);
  }
  sum_over_lanes(products, rows.lanes);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!rows.exists(r)) continue;
    const float along = factor[r] < 1.f ? products[r] * over_lim * over_lim : 0.f;
    Slice::store(tensor.out, int64_t{rows.number(r)} * p.d, rows.lane, rows.lanes, p.d,
                 [&](int i) { return factor[r] * fmaf(-along, x[r][i], grad[r][i]); });
  }
}

RowIndex row_index(int rows, const NormalizedTensor& x) {
  if (x.rows == 0) return {};
  return {rows / x.inner / x.outer, rows / x.inner % x.outer, rows % x.inner};
}

template <class Kernel, class... Args>
void launch_rows(const char* name, Kernel kernel, int rows_of_lane, const NormalizeParams& p, cudaStream_t stream, const Args&... args) {
  Launch launch{};
  while ((kElements << launch.lanes_log2) < p.d) ++launch.lanes_log2;
  launch.rows = kThreads >> launch.lanes_log2;
  for (int i = 0; i < 2; ++i) launch.step[i] = row_index(launch.rows, p.tensors[i]);
  const int64_t of_block = int64_t{launch.rows} * rows_of_lane;
  const auto blocks = [&](const NormalizedTensor& x) { return (x.rows + of_block - 1) / of_block; };
  launch.q_blocks = grid_1d(blocks(p.tensors[0]));
  const unsigned grid = grid_1d(launch.q_blocks + blocks(p.tensors[1]));
  launch_kernel(name, kernel, grid, kThreads, 0, stream, p, launch, args...);
}

// Calls function(element, std::bool_constant<aligned>()).
template <class Function>
void dispatch(const NormalizeParams& p, const Function& function) {
  const auto run = [&](auto element) { p.aligned ? function(element, std::true_type()) : function(element, std::false_type()); };
  switch (p.math) {
    case MathMode::kBF16: return run(__nv_bfloat16());
    case MathMode::kFP16: return run(__half());
    default: return run(float());
  }
}

}  // namespace

void launch_normalize_tokens(const NormalizeParams& p, cudaStream_t stream) {
  dispatch(p, [&](auto element, auto aligned) {
    launch_rows("normalize_tokens", normalize_tokens_kernel<decltype(element), aligned, true>, kForwardRows<aligned>, p, stream);
  });
}

void launch_token_factors(const NormalizeParams& p, cudaStream_t stream) {
  launch_rows("token_factors", normalize_tokens_kernel<__nv_bfloat16, true, false>, kForwardRows<true>, p, stream);
}

void launch_normalize_tokens_backward(const NormalizeParams& p, cudaStream_t stream) {
  dispatch(p, [&](auto element, auto aligned) {
    launch_rows("normalize_tokens_backward", normalize_tokens_backward_kernel<decltype(element), aligned>, kBackwardRows<aligned>, p,
                stream, 1.f / p.lim);
  });
}

}  // namespace fastmax
