// Loads of the rows of y and w that a block of the state kernel adds, stage by stage into shared memory.
#pragma once

#include <climits>

#include "linear/order2/features.h"

namespace fastmax {

// The rows that a block adds to a state.
struct Work {
  int state;
  int begin, end;  // virtual y rows
};

// A segment of a state pass; index: among all segments of all states, states side by side. The last segments may have fewer rows, or none.
// Blocks of a launch take the segments from first_segment on.
__device__ __forceinline__ Work locate_segment(const StateArgs& a, int index) {
  const int begin = min(a.begin + index / a.states() * a.segment_rows, a.end());
  return {index % a.states(), begin, min(begin + a.segment_rows, a.end())};
}

// Copies a [token][column] tensor 16 rows at a time, without branches and with few instructions, so that the compiler can put them
// between the products of the state kernel.
template <class Element, int kCols, int kThreads>
struct RowsLoader {
  using Layout = TileLayout<Element, kCols>;
  static constexpr int kSegment = Layout::kChunks & -Layout::kChunks;  // chunks of a row that neighbouring threads copy
  static constexpr int kSegments = Layout::kChunks / kSegment;
  static constexpr int kPassRows = kThreads / kSegment < 16 ? kThreads / kSegment : 16;
  static_assert(16 % kPassRows == 0, "passes cover 16 rows");

  const Element* source;  // of this thread's first chunk
  int rows;               // left, from that chunk's on; none where the tensor does not have its columns
  int columns;            // left, likewise
  uint32_t offset;        // of that chunk in a tile

  // The first row to copy, how many there are, and their columns.
  __device__ __forceinline__ RowsLoader(const Element* src, int64_t token_stride, int rows_left, int cols) {
    const int chunk = static_cast<int>(threadIdx.x) % kSegment, row = static_cast<int>(threadIdx.x) / kSegment;
    source = src + row * token_stride + chunk * Layout::kChunkElements;
    columns = cols - chunk * Layout::kChunkElements;
    rows = kSegments == 1 && columns <= 0 ? INT_MIN / 2 : rows_left - row;
    offset = Layout::chunk_offset(row, chunk);
  }

  __device__ __forceinline__ void advance(int64_t elements, int count) { source += elements, rows -= count; }

  // The next 16 rows, those that do not exist as zeros.
  __device__ __forceinline__ void copy(uint32_t tile, int64_t token_stride, bool enabled) {
#pragma unroll
    for (int pass = 0; pass < 16; pass += kPassRows) {
      const uint32_t dst = kPassRows % 8 == 0
                               ? tile + offset + pass * Layout::kRowBytes
                               : tile + Layout::chunk_offset(static_cast<int>(threadIdx.x) / kSegment + pass, threadIdx.x % kSegment);
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const int shift = segment * kSegment;
        const bool inside = pass < rows && (kSegments == 1 || shift * Layout::kChunkElements < columns);
        if (enabled && (kThreads == kPassRows * kSegment || threadIdx.x < kPassRows * kSegment)) {
          ptx::cp_async_16(Layout::move_right(dst, shift), source + pass * token_stride + shift * Layout::kChunkElements, inside ? 16 : 0);
        }
      }
    }
    advance(16 * token_stride, 16);
  }
};

template <class Tile>
__device__ __forceinline__ uint32_t stage_after(uint32_t stage, uint32_t ring) {
  return stage == ring + (Tile::kStages - 1) * Tile::kStageBytes ? ring : stage + Tile::kStageBytes;
}

// The loader of a block's rows of y and w: stages of kTokens rows, every y head of the group in turn.
template <class Tile, class Math, int kHeadDim>
struct RowWalk {
  using Element = typename Math::Element;

  const StateArgs& a;
  uint32_t ring, stage;  // where the next stage goes
  int first_value;
  int y_head;  // of the next stage, (batch, y head) flattened
  int row;     // its first
  int stages;  // left to load
  bool whole;  // none of its rows is dropped; looked up a stage early
  RowsLoader<Element, kHeadDim, Tile::kThreads> y;
  RowsLoader<Element, Tile::kValues, Tile::kThreads> w;

  __device__ __forceinline__ RowWalk(const StateArgs& a, const Work& work, int first_value, uint32_t ring)
      : a(a),
        ring(ring),
        stage(ring),
        first_value(first_value),
        y_head(work.state * a.y_group),
        row(a.y_row(work.begin)),
        stages((work.end - work.begin) / Tile::kTokens * a.y_group),
        y(y_rows() + row * a.y.token, a.y.token, a.ny - row, a.d),
        w(w_rows() + row * a.w.token, a.w.token, a.ny - row, a.dv - first_value) {
    look_up();
  }

  __device__ __forceinline__ int batch() const { return y_head / (a.state_heads * a.y_group); }
  __device__ __forceinline__ int batch_head() const { return y_head % (a.state_heads * a.y_group); }
  __device__ __forceinline__ const Element* y_rows() const { return head_pointer<Element>(a.y, batch(), batch_head()); }
  __device__ __forceinline__ const Element* w_rows() const { return head_pointer<Element>(a.w, batch(), batch_head()) + first_value; }

  // Whether no row of the next stage is dropped or lies before the tensor's first. Where it does not hold, finish() copies.
  __device__ __forceinline__ bool plain() const { return row >= 0 && whole; }
  __device__ __forceinline__ void look_up() {
    whole = a.attended.data == nullptr ? a.mask.data == nullptr
                                   : stages > 0 && a.attended.whole[static_cast<int64_t>(y_head) * a.attended.groups + (row + a.pad) / kBoundary] != 0;
  }
  __device__ __forceinline__ const uint8_t* mask() const {
    return a.attended.data != nullptr ? a.attended.data + y_head * a.attended.head : mask_pointer(a.mask, batch());
  }
  __device__ __forceinline__ int mask_step() const { return a.attended.data != nullptr ? a.attended.token : a.mask.token; }

  // Rows [16 part, 16 part + 16) of the next stage, parts in order, if it is plain.
  __device__ __forceinline__ void copy_y(int part, bool plain) {
    y.copy(stage + part * TileLayout<Element, kHeadDim>::bytes(16), a.y.token, plain);
  }
  __device__ __forceinline__ void copy_w(int part, bool plain) {
    w.copy(stage + Tile::kYBytes + part * TileLayout<Element, Tile::kValues>::bytes(16), a.w.token, plain);
  }

  // Ends the stage: loads what the parts did not, and the rows' e.
  __device__ __forceinline__ void finish() {
    const uint8_t* mask = this->mask();
    if (!plain()) {
      load_masked_tile_async<Element, Tile::kTokens, kHeadDim>(stage, y_rows(), a.y.token, row, a.ny, a.d, mask, mask_step());
      load_masked_tile_async<Element, Tile::kTokens, Tile::kValues>(stage + Tile::kYBytes, w_rows(), a.w.token, row, a.ny,
                                                                    a.dv - first_value, mask, mask_step());
    }
    if (threadIdx.x < Tile::kTokens) {
      const int source = row + static_cast<int>(threadIdx.x);
      const uint32_t dst = stage + Tile::kYBytes + Tile::kWBytes + threadIdx.x * 4;
      const bool inside = source >= 0 && source < a.ny;
      if (a.y_scale.data != nullptr) {
        const float* e = a.y_scale.data + y_head * a.y_scale.head;
        ptx::cp_async_small<4>(dst, inside ? e + static_cast<int64_t>(source) * a.y_scale.token : e, inside ? 4 : 0);
      } else {
        const bool taken = inside && (mask == nullptr || mask[static_cast<int64_t>(source) * mask_step()] != 0);
        ptx::store_shared_f32(dst, taken ? 1.f : 0.f);
      }
    }
    ptx::cp_async_commit();
    --stages;
    stage = stage_after<Tile>(stage, ring);
    if (a.y_group == 1) {
      row += Tile::kTokens;
    } else if (++y_head % a.y_group != 0) {  // the same rows of the next head
      y.advance(a.y.head - Tile::kTokens * a.y.token, -Tile::kTokens);
      w.advance(a.w.head - Tile::kTokens * a.w.token, -Tile::kTokens);
    } else {
      y_head -= a.y_group, row += Tile::kTokens;
      y.advance((1 - a.y_group) * a.y.head, 0);
      w.advance((1 - a.y_group) * a.w.head, 0);
    }
    look_up();
  }

  __device__ __forceinline__ void load_stage() {
#pragma unroll 1
    for (int part = 0; part < Tile::kTokens / 16; ++part) {
      copy_y(part, plain());
      copy_w(part, plain());
    }
    finish();
  }
};

}  // namespace fastmax
