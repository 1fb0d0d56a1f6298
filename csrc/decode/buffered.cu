// Decoding that reads the state in every step and writes it only in every T-th.
//
// There are two launches. In the first, a block takes a range of rows of a state, or a tile of its buffered and local tokens,
// and writes partial sums to memory. The states are divided finely enough to fill the device. Each block reads the count of
// buffered tokens on the device, and first adds them to its rows if there are T, so that the same CUDA graph serves every step.
// In the second launch one block per state combines the partial sums in a fixed order and stores the token.

#include "decode/buffered.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "decode/features.h"

namespace fastmax {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnroll = 4;  // vectors that a lane has in flight
constexpr int kTile = 32;   // tokens per tile, one per lane
constexpr int kMinLog2Slice = 2, kMaxLog2Slice = 5;
constexpr int kMaxHeads = 8;  // query heads per launch
constexpr int kStagedLoads = 8;  // elements per thread in flight to shared memory

// Partial sums of a query head. Its parts are splits of the rows, then tiles of global tokens, then tiles of local tokens. The
// sums of local tokens are in units of exp(maximum), and those of a tile decay up to its last token.
struct Partials {
  float* numerators;    // (b h, parts, dv)
  float* denominators;  // (b h, parts)
  float* maxima;        // (b h, tiles)
};

struct Work {
  int group, first_head;  // first_head: first query head of each group in this launch
  int slices, log2_vectors;
  int splits, tiles;
  Partials partials;

  __host__ __device__ int parts() const { return splits + 2 * tiles; }
  __host__ __device__ int first_global() const { return splits; }
  __host__ __device__ int first_local() const { return splits + tiles; }
};

__device__ __forceinline__ int places(const BufferedParams& p) { return p.exact_window + p.flush_interval; }

__device__ __forceinline__ float gate_at(const BufferedParams& p, int64_t place) {
  return p.local_gates != nullptr ? p.local_gates[place] : 0.f;
}

// Contents of a state at the beginning of a step.
struct Held {
  // whether the buffer is full and is flushed first
  bool flushes;
  int before;     // tokens before the new one, after the flush
  int64_t first;  // slot of the oldest of them, over all states

  __device__ Held(const BufferedParams& p, int state) {
    const int buffered = p.buffered[state];
    flushes = buffered >= p.flush_interval;
    before = p.exact_window + (flushes ? 0 : max(buffered, 0));
    first = int64_t{state} * places(p) + (flushes ? p.flush_interval : 0);
  }
};

// In sums a NaN decay counts as 0: a later -inf resets it with everything before. NanDecays finds the NaN decays that matter.
__device__ __forceinline__ float without_nan(float decay) { return isnan(decay) ? 0.f : decay; }

// Whether a NaN decay lies between a key and the query at the last token.
struct NanDecays {
  bool token = false;  // the key is one of these tokens
  bool sums = false;   // the key is in the sums before the first token

  // Takes the tokens in the order of time.
  __device__ void take(float decay, bool joins) {
    if (decay == -INFINITY) is_reset_ = true, has_key_ = token = sums = false;
    if (isnan(decay)) token |= has_key_, sums |= !is_reset_;
    has_key_ |= joins;
  }

 private:
  bool has_key_ = false, is_reset_ = false;
};

// Sum over the lanes after this one.
__device__ __forceinline__ float sum_of_later_lanes(float x) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const float y = __shfl_down_sync(~0u, x, step);
    if (lane + step < 32) x += y;
  }
  const float behind = __shfl_down_sync(~0u, x, 1);
  return lane == 31 ? 0.f : behind;
}
__device__ __forceinline__ float sum_range(const float* x, int begin, int end) {  // of decays
  float sum = 0.f;
  for (int i = begin + threadIdx.x % 32; i < end; i += 32) sum += without_nan(x[i]);
  return sum_lanes(sum, 1);
}

// Source of rows: rows[i], except row `fresh_row`, which is at `fresh`.
struct Rows {
  const void* rows;
  int64_t first, row_stride, column_stride;  // in elements
  int fresh_row = -1;                        // -1: none
  const void* fresh = nullptr;
  int64_t fresh_first = 0, fresh_stride = 0;
};

// Loads `count` rows into shared memory. Rows whose bit in `there` is 0 become zeros.
template <class Element, int kStaged>
__device__ __forceinline__ void load_rows(const Rows& from, int count, int columns, uint32_t there, float factor,
                                          float* __restrict__ to, int to_stride) {
  const Element* __restrict__ rows = static_cast<const Element*>(from.rows) + from.first;
  const Element* __restrict__ fresh = static_cast<const Element*>(from.fresh) + from.fresh_first;
  const int total = count * columns;
  for (int i0 = threadIdx.x; i0 < total; i0 += kStaged * kThreads) {
    float x[kStaged];
#pragma unroll
    for (int j = 0; j < kStaged; ++j) {
      const int i = i0 + j * kThreads, row = i / columns, column = i - row * columns;
      x[j] = 0.f;
      if (i < total && (there >> row & 1)) {
        x[j] = factor * to_float(row == from.fresh_row ? fresh[column * from.fresh_stride] : rows[row * from.row_stride + column * from.column_stride]);
      }
    }
#pragma unroll
    for (int j = 0; j < kStaged; ++j) {
      const int i = i0 + j * kThreads, row = i / columns, column = i - row * columns;
      if (i < total) to[row * to_stride + column] = x[j];
    }
  }
}
template <int kStaged>
__device__ __forceinline__ void load_rows(MathMode math, const Rows& from, int count, int columns, uint32_t there, float factor,
                                          float* to, int to_stride) {
  switch (math) {
    case MathMode::kBF16: load_rows<__nv_bfloat16, kStaged>(from, count, columns, there, factor, to, to_stride); break;
    case MathMode::kFP16: load_rows<__half, kStaged>(from, count, columns, there, factor, to, to_stride); break;
    default: load_rows<float, kStaged>(from, count, columns, there, factor, to, to_stride); break;
  }
}

// Whether rows of the buffer are whole 16-byte words.
template <class Element>
__device__ __forceinline__ bool has_words(const Rows& from, int columns) {
  constexpr int kWord = 16 / sizeof(Element);
  const auto* rows = static_cast<const Element*>(from.rows) + from.first;
  return columns % kWord == 0 && from.row_stride % kWord == 0 && reinterpret_cast<uintptr_t>(rows) % 16 == 0;
}

// The rows of k and v of a tile, in their buffers contiguous columns. Loads of both are in flight together.
template <class Element>
__device__ __forceinline__ void load_tile(const Rows& of_keys, int d, float* keys, int stride, const Rows& of_values, int dv, float* values,
                                          int value_stride, uint32_t there) {
  constexpr int kWord = 16 / sizeof(Element);
  if (!has_words<Element>(of_keys, d) || !has_words<Element>(of_values, dv)) {
    load_rows<Element, kStagedLoads>(of_keys, kTile, d, there, 1.f, keys, stride);
    load_rows<Element, kStagedLoads>(of_values, kTile, dv, there, 1.f, values, value_stride);
    return;
  }
  struct alignas(16) Word {
    Element x[kWord];
  };
  const auto word_at = [&](const Rows& from, int row, int column) {
    const auto* rows = static_cast<const Element*>(from.rows) + from.first;
    const bool loads = (there >> row & 1) && row != from.fresh_row;
    return loads ? *reinterpret_cast<const Word*>(rows + row * from.row_stride + column) : Word{};
  };
  const auto put = [&](const Word& word, float* to) {
#pragma unroll
    for (int i = 0; i < kWord; ++i) to[i] = to_float(word.x[i]);
  };
  const int key_words = kTile * (d / kWord), value_words = kTile * (dv / kWord);
  for (int i = threadIdx.x; i < max(key_words, value_words); i += kThreads) {
    const int key_row = i / (d / kWord), key_column = i % (d / kWord) * kWord;
    const int value_row = i / (dv / kWord), value_column = i % (dv / kWord) * kWord;
    const bool has_key = i < key_words, has_value = i < value_words;
    const Word key = has_key ? word_at(of_keys, key_row, key_column) : Word{};
    const Word value = has_value ? word_at(of_values, value_row, value_column) : Word{};
    if (has_key && key_row != of_keys.fresh_row) put(key, keys + key_row * stride + key_column);
    if (has_value && value_row != of_values.fresh_row) put(value, values + value_row * value_stride + value_column);
  }
  const int fresh = of_keys.fresh_row;
  if (fresh < 0 || fresh >= kTile) return;
  const auto load_fresh = [&](const Rows& from, int columns, float* to) {
    const auto* row = static_cast<const Element*>(from.fresh) + from.fresh_first;
    for (int c = threadIdx.x; c < columns; c += kThreads) to[c] = there >> fresh & 1 ? to_float(row[c * from.fresh_stride]) : 0.f;
  };
  load_fresh(of_keys, d, keys + fresh * stride);
  load_fresh(of_values, dv, values + fresh * value_stride);
}

// Loads the queries times scale, as rows of d columns.
__device__ __forceinline__ void load_queries(const DecodeParams& p, int batch, int first_head, int heads, float* to) {
  const Rows rows{p.q, batch * p.q_stride.batch + first_head * p.q_stride.head, p.q_stride.head, p.q_stride.column};
  load_rows<2>(p.math, rows, heads, p.d, ~0u, p.scale, to, p.d);
}

// Sizes in floats of shared memory.
__host__ __device__ inline int round4(int x) { return (x + 3) / 4 * 4; }
__host__ __device__ inline int query_floats(const DecodeParams& p, int heads) { return round4(heads * p.d); }
// A tile has keys, at an odd stride because lanes read a column of many keys, and values.
__host__ __device__ inline int key_stride(int d) { return d | 1; }
__host__ __device__ inline int tile_floats(int d, int columns) { return kTile * (key_stride(d) + round4(columns)); }

// x times the decay factor. 0 stays 0 even for a NaN factor, as there may be no key in the sum. NaN stays NaN unless the state
// is reset, even if the factor underflows.
__device__ __forceinline__ float decayed_sum(float x, float factor, bool is_reset) {
  return x == 0.f || (isnan(x) && !is_reset) ? x : decayed(x, factor);
}
__device__ __forceinline__ float4 decayed_sum(float4 x, float factor, bool is_reset) {
  return make_float4(decayed_sum(x.x, factor, is_reset), decayed_sum(x.y, factor, is_reset), decayed_sum(x.z, factor, is_reset),
                     decayed_sum(x.w, factor, is_reset));
}

// The factor of a token with its gate; 0 where it is 0, even of a NaN gate.
__device__ __forceinline__ float gated(float factor, float gate) { return decayed(expf(gate), factor); }

// Adds the buffered tokens to rows [begin, end) of a state, for this slice's columns, in the order of time.
template <class Vector>
__device__ void flush(const BufferedParams& p, const Work& work, int state, int slice, int begin, int end, float* smem) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  const DecodeParams& s = p.step;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = decode_rows(s.d, s.order), log2 = work.log2_vectors;
  const int lane_row = lane >> log2, lane_column = (lane & ((1 << log2) - 1)) * kWidth;
  const int rows_per_load = 32 >> log2, rows_per_batch = kUnroll * rows_per_load;
  const int first_column = slice * (kWidth << log2), columns = min(kWidth << log2, s.dv - first_column);
  const bool has_column = lane_column < columns;
  const int value_stride = round4(columns), stride = key_stride(s.d);
  float* keys = smem;
  float* values = keys + kTile * stride;
  float* factors = values + kTile * value_stride;
  float* features = factors + kTile + warp * kTile * rows_per_batch;  // for a batch of rows, by token
  const int64_t first_place = int64_t{state} * places(p);
  const float* decays = p.local_decays + first_place;
  bool has_nan = false;
  for (int i = lane; i < p.flush_interval; i += 32) has_nan |= isnan(decays[i]);
  NanDecays nan_decays;
  if (__any_sync(~0u, has_nan)) {
    for (int i = 0; i < p.flush_interval; ++i) nan_decays.take(decays[i], p.local_mask[first_place + i] != 0);
  }

  for (int first = 0; first < p.flush_interval; first += kTile) {
    const int count = min(kTile, p.flush_interval - first);
    const bool there = lane < count && p.local_mask[first_place + first + lane] != 0;
    const float after =
        sum_of_later_lanes(lane < count ? without_nan(decays[first + lane]) : 0.f) + sum_range(decays, first + kTile, p.flush_interval);
    const float token_factor = !there ? 0.f : nan_decays.token ? nanf("") : gated(expf(after), gate_at(p, first_place + first + lane));
    const float of_sums = first > 0 ? 0.f : sum_range(decays, 0, p.flush_interval), factor = nan_decays.sums && first == 0 ? nanf("") : expf(of_sums);
    const bool is_reset = of_sums == -INFINITY;
    const uint32_t takes_part = __ballot_sync(~0u, token_factor != 0.f);
    __syncthreads();
    if (warp == 0) factors[lane] = token_factor;
    const Rows of_keys{p.local_keys, (first_place + first) * s.d, s.d, 1};
    const Rows of_values{p.local_values, (first_place + first) * s.dv + first_column, s.dv, 1};
    load_rows<2>(s.math, of_keys, kTile, s.d, takes_part, 1.f, keys, stride);
    load_rows<2>(s.math, of_values, kTile, columns, takes_part, 1.f, values, value_stride);
    __syncthreads();
    for (int row0 = begin + warp * rows_per_batch; row0 < end; row0 += kWarps * rows_per_batch) {
      float* row_kv_state = s.new_kv_state + (int64_t{state} * rows + row0 + lane_row) * s.dv + first_column + lane_column;
      Vector x[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool mine = has_column && row0 + i * rows_per_load + lane_row < end;
        x[i] = mine ? __ldcg(reinterpret_cast<const Vector*>(row_kv_state + int64_t{i} * rows_per_load * s.dv)) : Vector{};
      }
      // Each lane computes features of one row of the batch for some of the tokens. They are stored in the order in which lanes
      // read them.
      const int r = lane & (rows_per_batch - 1), row = row0 + r;
      const Feature columns_of_row(min(row, end - 1), s.d);
      float sum = 0.f;
      for (int t = lane / rows_per_batch; t < kTile; t += 32 / rows_per_batch) {
        const float feature = factors[t] * columns_of_row.of(keys + t * stride);
        features[t * rows_per_batch + (r & (rows_per_load - 1)) * kUnroll + r / rows_per_load] = feature;
        sum += feature;
      }
      sum = sum_lanes(sum, rows_per_batch);
      if (slice == 0 && lane < rows_per_batch && row < end) {
        float* k_sum = s.new_k_sum + int64_t{state} * rows + row;
        *k_sum = decayed_sum(__ldcg(k_sum), factor, is_reset) + sum;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) x[i] = decayed_sum(x[i], factor, is_reset);
#pragma unroll 2
      for (int t = 0; t < count; ++t) {
        const Vector value = has_column ? *reinterpret_cast<const Vector*>(values + t * value_stride + lane_column) : Vector{};
        const float4 feature = *reinterpret_cast<const float4*>(features + t * rows_per_batch + lane_row * kUnroll);
        x[0] = multiply_add(feature.x, value, x[0]);
        x[1] = multiply_add(feature.y, value, x[1]);
        x[2] = multiply_add(feature.z, value, x[2]);
        x[3] = multiply_add(feature.w, value, x[3]);
      }
      static_assert(kUnroll == 4, "a float4 of features");
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool mine = has_column && row0 + i * rows_per_load + lane_row < end;
        if (mine) __stcg(reinterpret_cast<Vector*>(row_kv_state + int64_t{i} * rows_per_load * s.dv), x[i]);
      }
      __syncwarp();
    }
  }
  __syncthreads();  // the rows that other warps wrote are read next
}

// Computes the partial sums of a range of rows.
template <class Vector, int kHeads>
__device__ void read_rows(const BufferedParams& p, const Work& work, int state, int slice, int split, float* smem) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  const DecodeParams& s = p.step;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform: loops over rows do not diverge
  const int batch = state / s.hk, kv_head = state % s.hk;
  const int first_head = kv_head * work.group + work.first_head, heads = min(kHeads, work.group - work.first_head);
  const int rows = decode_rows(s.d, s.order), log2 = work.log2_vectors;
  const int begin = static_cast<int>(int64_t{rows} * split / work.splits), end = static_cast<int>(int64_t{rows} * (split + 1) / work.splits);
  const int warp_rows = (end - begin + kWarps - 1) / kWarps;
  const int row_begin = min(begin + warp * warp_rows, end), row_end = min(row_begin + warp_rows, end);
  const int slice_vectors = 1 << log2, slice_columns = slice_vectors * kWidth;
  const int lane_row = lane >> log2, lane_column = (lane & (slice_vectors - 1)) * kWidth;
  const int rows_per_load = 32 >> log2, rows_per_batch = kUnroll * rows_per_load;
  const int column = slice * slice_columns + lane_column;
  const bool has_column = column < s.dv;
  float* queries = smem;
  float* region = smem + query_floats(s, kHeads);
  float* weights = region + warp * 32 * kHeads;  // for 32 rows and each query head

  const int64_t first_row = int64_t{state} * rows + row_begin;
  const float* source = s.kv_state + (first_row + lane_row) * s.dv + column;
  const int step = rows_per_load * s.dv;
  int rows_left = has_column ? row_end - row_begin - lane_row : 0;  // rows left to load
  Vector pending[kUnroll];
  const auto load = [&](Vector& x) {
    x = rows_left > 0 ? __ldcg(reinterpret_cast<const Vector*>(source)) : Vector{};
    source += step, rows_left -= rows_per_load;
  };
  // Vectors in flight are refilled one by one as they are used. The first ones load while the rest is fetched.
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) load(pending[i]);
  if (work.first_head == 0 && Held(p, state).flushes) {
    flush<Vector>(p, work, state, slice, begin, end, region);
    source -= kUnroll * step, rows_left += rows_per_batch;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) load(pending[i]);
  }
  load_queries(s, batch, first_head, heads, queries);
  __syncthreads();

  Vector numerator[kHeads] = {};
  float denominator[kHeads] = {};
  for (int chunk = 0; chunk < row_end - row_begin; chunk += 32) {
    // This lane's row of the chunk: f's coefficient times its feature of q for each query head. Its sum loads while the rows are added.
    const int row = row_begin + chunk + lane;
    const float sum = slice == 0 && row < row_end ? __ldcg(s.k_sum + first_row + chunk + lane) : 0.f;
    float weight[kHeads] = {};
    if (row < row_end) {
      const Feature columns(row, s.d);
      const float coefficient = columns.b < 0 ? s.a0 : columns.a < 0 ? s.a1 : columns.a == columns.b ? s.a2 : 2.f * s.a2;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < heads) weight[h] = coefficient * columns.of(queries + h * s.d);
      }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) weights[lane * kHeads + h] = weight[h];
    __syncwarp();
#pragma unroll 1
    for (int row0 = 0; row0 < min(32, row_end - row_begin - chunk); row0 += rows_per_batch) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const float* of_row = weights + (row0 + i * rows_per_load + lane_row) * kHeads;
        const Vector x = pending[i];
        load(pending[i]);
        if constexpr (kHeads % 4 == 0) {
#pragma unroll
          for (int h = 0; h < kHeads; h += 4) {
            const float4 w = *reinterpret_cast<const float4*>(of_row + h);
            numerator[h] = multiply_add(w.x, x, numerator[h]);
            numerator[h + 1] = multiply_add(w.y, x, numerator[h + 1]);
            numerator[h + 2] = multiply_add(w.z, x, numerator[h + 2]);
            numerator[h + 3] = multiply_add(w.w, x, numerator[h + 3]);
          }
        } else {
#pragma unroll
          for (int h = 0; h < kHeads; ++h) numerator[h] = multiply_add(of_row[h], x, numerator[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) denominator[h] = fmaf(weights[lane * kHeads + h], sum, denominator[h]);
  }

  __syncthreads();
  float* warp_numerators = region;                                                // (kHeads, warps, columns of the slice)
  float* warp_denominators = warp_numerators + kHeads * kWarps * slice_columns;  // (kHeads, warps)
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Vector sum = sum_lanes(numerator[h], slice_vectors);
    if (lane < slice_vectors) *reinterpret_cast<Vector*>(warp_numerators + (h * kWarps + warp) * slice_columns + lane_column) = sum;
    const float total = sum_lanes(denominator[h], 1);
    if (lane == 0) warp_denominators[h * kWarps + warp] = total;
  }
  __syncthreads();
  const int64_t head = int64_t{batch} * s.h + first_head;
  for (int i = threadIdx.x; i < heads * slice_columns; i += kThreads) {
    const int h = i / slice_columns, c = i % slice_columns;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += warp_numerators[(h * kWarps + w) * slice_columns + c];
    if (slice * slice_columns + c < s.dv) {
      work.partials.numerators[((head + h) * work.parts() + split) * s.dv + slice * slice_columns + c] = sum;
    }
  }
  if (slice == 0 && threadIdx.x < heads) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += warp_denominators[threadIdx.x * kWarps + w];
    work.partials.denominators[(head + threadIdx.x) * work.parts() + split] = sum;
  }
}

// Computes the partial sums of a tile of local and buffered tokens and the new token.
template <int kHeads>
__device__ void read_tokens(const BufferedParams& p, const Work& work, int state, int tile, float* smem) {
  constexpr int kParts = kWarps / kHeads;  // slices of the columns of keys
  const DecodeParams& s = p.step;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = tile * kTile;
  const Held held(p, state);
  if (first > held.before) return;
  const int batch = state / s.hk, kv_head = state % s.hk;
  const int first_head = kv_head * work.group + work.first_head, heads = min(kHeads, work.group - work.first_head);
  const int stride = key_stride(s.d), value_stride = round4(s.dv);
  float* queries = smem;
  float* keys = queries + query_floats(s, kHeads);
  float* values = keys + kTile * stride;
  float* scores = values + kTile * value_stride;  // (warps, tokens)
  float* global_weights = scores + kWarps * kTile;   // (heads, tokens)
  float* local_weights = global_weights + kHeads * kTile;

  const int token = first + lane;
  bool there = false;
  float decay = 0.f, gate = 0.f;
  if (token < held.before) {
    there = p.local_mask[held.first + token] != 0;
    decay = without_nan(p.local_decays[held.first + token]), gate = gate_at(p, held.first + token);
  } else if (token == held.before) {
    there = joins_state(s, batch);
    decay = without_nan(decay_of_token(s, batch, kv_head)), gate = gate_of_token(s, batch, kv_head);
  }
  const uint32_t takes_part = __ballot_sync(~0u, there);
  const int fresh_row = held.before - first;  // row of the new token; outside the tile if it is in another
  const Rows of_keys{p.local_keys, (held.first + first) * s.d, s.d, 1, fresh_row,
                     s.k, batch * s.k_stride.batch + kv_head * s.k_stride.head, s.k_stride.column};
  const Rows of_values{p.local_values, (held.first + first) * s.dv, s.dv, 1, fresh_row,
                       s.v, batch * s.v_stride.batch + kv_head * s.v_stride.head, s.v_stride.column};
  const auto load_as = [&](auto element) {
    load_tile<decltype(element)>(of_keys, s.d, keys, stride, of_values, s.dv, values, value_stride, takes_part);
  };
  switch (s.math) {
    case MathMode::kBF16: load_as(__nv_bfloat16{}); break;
    case MathMode::kFP16: load_as(__half{}); break;
    default: load_as(float{}); break;
  }
  load_queries(s, batch, first_head, heads, queries);
  const float after = sum_of_later_lanes(decay);
  __syncthreads();

  {
    const int h = warp % kHeads, columns = (s.d + kParts - 1) / kParts, begin = warp / kHeads * columns;
    float score = 0.f;
    if (h < heads) {
      for (int c = begin; c < min(begin + columns, s.d); ++c) score = fmaf(queries[h * s.d + c], keys[lane * stride + c], score);
    }
    scores[warp * kTile + lane] = score;
  }
  __syncthreads();
  const int64_t head = int64_t{batch} * s.h + first_head;
  if (warp < heads) {
    float score = 0.f;
    for (int part = 0; part < kParts; ++part) score += scores[(part * kHeads + warp) * kTile + lane];
    const bool is_local = token > held.before - p.exact_window;
    const float factor = gated(expf(after), gate), a2 = s.order == 2 ? s.a2 : 0.f;
    const float f = there && !is_local && factor != 0.f ? factor * fmaf(score, fmaf(a2, score, s.a1), s.a0) : 0.f;
    const float exponent = there && is_local ? score + after : -INFINITY, maximum = max_of_lanes(exponent);
    const float w = exponent == -INFINITY ? 0.f : expf(exponent - maximum);
    global_weights[warp * kTile + lane] = f, local_weights[warp * kTile + lane] = w;
    const float global_sum = sum_lanes(f, 1), local_sum = sum_lanes(w, 1);
    if (lane == 0) {
      float* denominators = work.partials.denominators + (head + warp) * work.parts();
      denominators[work.first_global() + tile] = global_sum, denominators[work.first_local() + tile] = local_sum;
      work.partials.maxima[(head + warp) * work.tiles + tile] = maximum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * s.dv; i += kThreads) {
    const int h = i / s.dv, c = i - h * s.dv;
    float global = 0.f, local = 0.f;
#pragma unroll 8
    for (int t = 0; t < kTile; ++t) {
      const float value = values[t * value_stride + c], f = global_weights[h * kTile + t], w = local_weights[h * kTile + t];
      if (f != 0.f) global = fmaf(f, value, global);
      if (w != 0.f) local = fmaf(w, value, local);
    }
    float* numerators = work.partials.numerators + (head + h) * work.parts() * s.dv + c;
    numerators[int64_t{work.first_global() + tile} * s.dv] = global, numerators[int64_t{work.first_local() + tile} * s.dv] = local;
  }
}

template <class Vector, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads == 1 ? 4 : kHeads == 4 ? 3 : 2)
    buffered_kernel(const BufferedParams p, const Work work) {
  extern __shared__ __align__(128) char shared[];
  float* smem = reinterpret_cast<float*>(shared);
  // Blocks of tokens wait for memory, blocks of rows need its bandwidth: those of a state are neighbours, so that both kinds run together.
  const int of_rows = work.slices * work.splits, blocks = of_rows + work.tiles;
  const int state = blockIdx.x / blocks, part = blockIdx.x % blocks;
  if (part < of_rows) read_rows<Vector, kHeads>(p, work, state, part / work.splits, part % work.splits, smem);
  else read_tokens<kHeads>(p, work, state, part - of_rows, smem);
}

// Moves the last W tokens to the front, in pieces that do not overwrite tokens that are still to be read.
template <class Element>
__device__ void move_to_front(Element* x, int window, int shift, int columns) {
  const int64_t piece = int64_t{shift} * columns, total = int64_t{window} * columns;
  for (int64_t begin = 0; begin < total; begin += piece) {
    const int64_t end = min(begin + piece, total);
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) x[i] = x[i + piece];
    __syncthreads();
  }
}

template <class Element>
__device__ __forceinline__ void append_row(void* to, int64_t first, const void* from, int64_t from_first, int64_t stride, int columns) {
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    static_cast<Element*>(to)[first + c] = static_cast<const Element*>(from)[from_first + c * stride];
  }
}

// Element: a type with the size of q's elements.
template <class Element>
__device__ void append_token(const BufferedParams& p, const Held& held, int state) {
  const DecodeParams& s = p.step;
  const int batch = state / s.hk, kv_head = state % s.hk;
  const int64_t first = int64_t{state} * places(p), place = first + held.before;
  if (held.flushes) {
    move_to_front(static_cast<Element*>(p.local_keys) + first * s.d, p.exact_window, p.flush_interval, s.d);
    move_to_front(static_cast<Element*>(p.local_values) + first * s.dv, p.exact_window, p.flush_interval, s.dv);
    move_to_front(p.local_mask + first, p.exact_window, p.flush_interval, 1);
    move_to_front(p.local_decays + first, p.exact_window, p.flush_interval, 1);
    if (p.local_gates != nullptr) move_to_front(p.local_gates + first, p.exact_window, p.flush_interval, 1);
  }
  append_row<Element>(p.local_keys, place * s.d, s.k, batch * s.k_stride.batch + kv_head * s.k_stride.head, s.k_stride.column, s.d);
  append_row<Element>(p.local_values, place * s.dv, s.v, batch * s.v_stride.batch + kv_head * s.v_stride.head, s.v_stride.column, s.dv);
  if (threadIdx.x == 0) {
    p.local_mask[place] = joins_state(s, batch);
    p.local_decays[place] = decay_of_token(s, batch, kv_head);
    if (p.local_gates != nullptr) p.local_gates[place] = gate_of_token(s, batch, kv_head);
    p.buffered[state] = held.before - p.exact_window + 1;
  }
}

// One block per state.
__global__ void __launch_bounds__(kThreads, 4) combine_kernel(const BufferedParams p, const Work work) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float halves[kThreads];
  const DecodeParams& s = p.step;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, state = blockIdx.x;
  const int batch = state / s.hk, kv_head = state % s.hk, parts = work.parts();
  float* after = reinterpret_cast<float*>(shared);  // (tiles + 1): sum of the decays from this tile on
  float* factors = after + work.tiles + 1;                // (heads of a turn, parts)
  const Held held(p, state);
  const int tiles = held.before / kTile + 1;

  bool has_nan = false;
  for (int tile = warp; tile < tiles; tile += kWarps) {
    const int token = tile * kTile + lane;
    const float decay = token < held.before    ? p.local_decays[held.first + token]
                        : token == held.before ? decay_of_token(s, batch, kv_head)
                                               : 0.f;
    has_nan |= isnan(decay);
    const float sum = sum_lanes(without_nan(decay), 1);
    if (lane == 0) after[tile] = sum;
  }
  NanDecays nan_decays;
  if (__syncthreads_or(has_nan)) {
    for (int i = 0; i < held.before; ++i) nan_decays.take(p.local_decays[held.first + i], p.local_mask[held.first + i] != 0);
    nan_decays.take(decay_of_token(s, batch, kv_head), joins_state(s, batch));
    nan_decays.sums &= s.new_k_sum[int64_t{state} * decode_rows(s.d, s.order)] != 0.f;
  }
  if (threadIdx.x == 0) {
    after[tiles] = 0.f;
    for (int tile = tiles - 1; tile >= 0; --tile) after[tile] += after[tile + 1];
  }
  __syncthreads();
  const bool state_is_nan = isnan(s.new_k_sum[int64_t{state} * decode_rows(s.d, s.order)]) && after[0] != -INFINITY;
  const bool is_nan = nan_decays.token || nan_decays.sums || state_is_nan;

  for (int turn = 0; turn < work.group; turn += kMaxHeads) {
    const int heads = min(kMaxHeads, work.group - turn);
    const int64_t head = int64_t{batch} * s.h + kv_head * work.group + turn;
    if (warp < heads) {
      const float* denominators = work.partials.denominators + (head + warp) * parts;
      const float* maxima = work.partials.maxima + (head + warp) * work.tiles;
      float* factor = factors + warp * parts;
      const float of_state = expf(after[0]);
      float sum = 0.f, global = 0.f, maximum = -INFINITY, local = 0.f;
      for (int i = lane; i < work.splits; i += 32) sum += denominators[i];
      global = decayed(sum, of_state);
      for (int t = lane; t < tiles; t += 32) {
        global += decayed(denominators[work.first_global() + t], expf(after[t + 1]));
        maximum = fmaxf(maximum, maxima[t] + after[t + 1]);
      }
      global = sum_lanes(global, 1);
      maximum = max_of_lanes(maximum);
      const bool sees_local = maximum != -INFINITY;
      for (int t = lane; t < tiles && sees_local; t += 32) {
        local += denominators[work.first_local() + t] * expf(maxima[t] + after[t + 1] - maximum);
      }
      local = sum_lanes(local, 1);
      // The scales express both sums in units of exp(base).
      float base = 0.f, global_scale = 1.f, local_scale = 0.f;
      if (p.exact_window > 0) {
        const float global_log = global == 0.f ? -INFINITY : logf(global), local_log = sees_local ? maximum + logf(local) : -INFINITY;
        base = global == 0.f || local_log > global_log ? local_log : global_log;
        global_scale = global == 0.f ? 0.f : expf(-base), local_scale = sees_local ? expf(maximum - base) : 0.f;
      }
      const float total = global * global_scale + local * local_scale, inverse = total == 0.f ? 0.f : 1.f / total;
      if (lane == 0) p.lse[head + warp] = is_nan ? nanf("") : total == 0.f ? -INFINITY : base + logf(total);
      global_scale *= inverse, local_scale *= inverse;
      for (int i = lane; i < work.splits; i += 32) factor[i] = decayed(global_scale, of_state);
      for (int t = lane; t < work.tiles; t += 32) {
        factor[work.first_global() + t] = t < tiles ? decayed(global_scale, expf(after[t + 1])) : 0.f;
        const float exponent = t < tiles && sees_local ? maxima[t] + after[t + 1] - maximum : -INFINITY;
        factor[work.first_local() + t] = exponent == -INFINITY ? 0.f : local_scale * expf(exponent);
      }
    }
    __syncthreads();
    // If there are few outputs, several threads sum each.
    const int outputs = heads * s.dv, shares = max(1, min(kWarps, kThreads / outputs));
    for (int first = 0; first < outputs; first += kThreads) {
      const int i = shares > 1 ? threadIdx.x % outputs : first + threadIdx.x, share = shares > 1 ? threadIdx.x / outputs : 0;
      float sum = 0.f;
      if (i < outputs && share < shares) {
        const int h = i / s.dv, c = i - h * s.dv;
        const float* numerators = work.partials.numerators + (head + h) * parts * s.dv + c;
#pragma unroll 8
        for (int part = share; part < parts; part += shares) {
          const float factor = factors[h * parts + part];
          if (factor != 0.f) sum = fmaf(factor, numerators[int64_t{part} * s.dv], sum);
        }
      }
      if (shares > 1) {
        halves[threadIdx.x] = sum;
        __syncthreads();
        sum = 0.f;
        for (int j = 0; j < shares && threadIdx.x < outputs; ++j) sum += halves[j * outputs + threadIdx.x];
      }
      if (i < outputs && share == 0) store(s.o, s.math, head * s.dv + i, is_nan ? nanf("") : sum);
    }
    __syncthreads();
  }
  if (s.math == MathMode::kBF16 || s.math == MathMode::kFP16) return append_token<uint16_t>(p, held, state);
  append_token<uint32_t>(p, held, state);
}

struct Tiling {
  int heads, log2_vectors, slices, splits;
};

int heads_of_launch(const DecodeParams& p) {
  const int group = p.h / p.hk;
  return group == 1 ? 1 : group <= 4 ? 4 : kMaxHeads;
}

bool takes_vectors(const DecodeParams& p) {
  return p.dv % 4 == 0 && reinterpret_cast<uintptr_t>(p.kv_state) % sizeof(float4) == 0;
}

// Chooses the number of splits for which all blocks end soonest. Four or fewer blocks fit on a multiprocessor at a time, and
// each block has a fixed cost.
Tiling choose_tiling(const DecodeParams& p) {
  constexpr int kRowsOfStart = 48, kMinRows = 32;
  const int vectors = takes_vectors(p) ? p.dv / 4 : p.dv;
  Tiling tiling{heads_of_launch(p), kMinLog2Slice, 1, 1};
  while (tiling.log2_vectors < kMaxLog2Slice && (1 << tiling.log2_vectors) < vectors) ++tiling.log2_vectors;
  tiling.slices = ((vectors - 1) >> tiling.log2_vectors) + 1;
  const int rows = decode_rows(p.d, p.order), resident = p.sm_count * (tiling.heads == 1 ? 4 : tiling.heads == 4 ? 3 : 2);
  int64_t best = INT64_MAX;
  for (int splits = 1; splits <= std::max(1, std::min(rows / kMinRows, resident)); ++splits) {
    const int64_t waves = (int64_t{p.b} * p.hk * tiling.slices * splits + resident - 1) / resident;
    const int64_t cost = waves * ((rows + splits - 1) / splits + kRowsOfStart);
    if (cost < best) best = cost, tiling.splits = splits;
  }
  return tiling;
}

int tiles_of(const BufferedParams& p) { return (p.exact_window + p.flush_interval + kTile - 1) / kTile; }

size_t shared_floats(const DecodeParams& p, const Tiling& tiling) {
  const int width = takes_vectors(p) ? 4 : 1, columns = width << tiling.log2_vectors;
  const int rows_per_batch = kUnroll * (32 >> tiling.log2_vectors);
  const int flushing = tile_floats(p.d, std::min(columns, p.dv)) + kTile + kWarps * kTile * rows_per_batch;
  const int reading = std::max(kWarps * 32 * tiling.heads, tiling.heads * kWarps * (columns + 1));
  const int tokens = tile_floats(p.d, p.dv) + (kWarps + 2 * tiling.heads) * kTile;
  return query_floats(p, tiling.heads) + std::max({flushing, reading, tokens});
}

template <class Vector, int kHeads>
void launch(const BufferedParams& p, const Tiling& tiling, const Work& work, cudaStream_t stream) {
  const int64_t states = int64_t{p.step.b} * p.step.hk;
  const int smem_bytes = static_cast<int>(shared_floats(p.step, tiling) * sizeof(float));
  launch_kernel("buffered", buffered_kernel<Vector, kHeads>, grid_1d(states * (tiling.slices * tiling.splits + work.tiles)), kThreads,
                smem_bytes, stream, p, work);
}

template <class Vector>
void launch(const BufferedParams& p, const Tiling& tiling, const Work& work, cudaStream_t stream) {
  if (tiling.heads == 1) return launch<Vector, 1>(p, tiling, work, stream);
  if (tiling.heads == 4) return launch<Vector, 4>(p, tiling, work, stream);
  launch<Vector, kMaxHeads>(p, tiling, work, stream);
}

}  // namespace

size_t buffered_workspace_bytes(const BufferedParams& p) {
  const size_t parts = choose_tiling(p.step).splits + 2 * tiles_of(p), heads = size_t(p.step.b) * p.step.h;
  return sizeof(float) * heads * (parts * (p.step.dv + 1) + tiles_of(p));
}

void launch_buffered(const BufferedParams& p, cudaStream_t stream) {
  const Tiling tiling = choose_tiling(p.step);
  Work work{p.step.h / p.step.hk, 0, tiling.slices, tiling.log2_vectors, tiling.splits, tiles_of(p), {}};
  const int64_t heads = int64_t{p.step.b} * p.step.h, states = int64_t{p.step.b} * p.step.hk;
  work.partials.numerators = static_cast<float*>(p.workspace);
  work.partials.denominators = work.partials.numerators + heads * work.parts() * p.step.dv;
  work.partials.maxima = work.partials.denominators + heads * work.parts();
  for (; work.first_head < work.group; work.first_head += tiling.heads) {
    takes_vectors(p.step) ? launch<float4>(p, tiling, work, stream) : launch<float>(p, tiling, work, stream);
  }
  const int smem_bytes = static_cast<int>(sizeof(float)) * (work.tiles + 1 + kMaxHeads * work.parts());
  launch_kernel("buffered", combine_kernel, grid_1d(states), kThreads, smem_bytes, stream, p, work);
}

}  // namespace fastmax
