// Where a sequence lies, for kernels that walk it: rows of x look at the rows of y before them.
//
//   y   virtual rows   0   pad                      boundary
//                      |:::|------------------------|-----------|-----------|-----
//                       none 0 ...                    chunk 0     chunk 1      ... ny - 1
//   x   rows                                        |-----------|-----------|-----
//                                                   0           chunk          ... nx - 1
//
// x row r sees the virtual rows up to boundary + r. n queries at the end of m keys have boundary = pad + m - n; the pad makes it a
// multiple of kBoundary, so that no step crosses it. Not causal: the boundary is past the last row of y, and there is one chunk,
// which sees nothing of its own.
//
// Rows are numbered in the order of the walk. A walk back in time turns "all later queries" of a key into "all earlier rows", and a
// suffix into a prefix, so that there is one kind of walk:
//
//   tokens                 0 1 2 3 4 5 6
//   rows, kForward         0 1 2 3 4 5 6
//   rows, kBackward        6 5 4 3 2 1 0
//
// What a walk meets on the way: factors of a decay from chunk to chunk (linear/fading.h), the bounds of packed sequences, which leave
// chunks where they are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastmax {

// y rows per step of a walk at most; chunk boundaries are multiples of it.
inline constexpr int kBoundary = 128;

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

enum class Time { kForward, kBackward };

struct Sequence {
  int nx, ny;    // rows
  int pad;       // virtual row of y row 0
  int boundary;  // virtual row that x row 0 sees last
  bool causal;
  Time time;

  // before: y rows that x row 0 sees before its own. None where not causal.
  static Sequence dense(int nx, int ny, bool causal, int before, Time time) {
    const int pad = causal ? round_up(before, kBoundary) - before : 0;
    return {nx, ny, pad, causal ? before + pad : round_up(ny, kBoundary), causal, time};
  }

  // As many rows of y as of x, after what a state holds: in its place a pad, so that the first chunk has something before it.
  static Sequence after_state(int n, Time time) { return {n, n, kBoundary, kBoundary, true, time}; }

  // The y row of a virtual row; negative in the pad.
  __host__ __device__ int y_row(int virtual_row) const { return virtual_row - pad; }
  // Virtual rows: past the last row of y, and past what the x rows before x_row see.
  __host__ __device__ int y_end() const { return ny + pad; }
  __host__ __device__ int seen_end(int x_row) const { return boundary + x_row; }
  // Where x rows [x_row, x_row + rows) begin in memory: their first token.
  int first_token(int x_row, int rows) const { return time == Time::kForward ? x_row : nx - x_row - rows; }
};

// In chunks of x rows, with a snapshot of the state before each.
struct ChunkedSequence : Sequence {
  int chunk;   // rows
  int chunks;

  // Virtual row of a chunk's first own row of y, and the chunk of such a row.
  __host__ __device__ int chunk_begin(int c) const { return boundary + c * chunk; }
  __host__ __device__ int chunk_of(int virtual_row) const { return (virtual_row - boundary) / chunk; }
  // Past what snapshots hold.
  __host__ __device__ int end() const { return chunk_begin(chunks - 1); }
  // Whether anything is before a chunk, and the first with something before it that begins at a virtual row or later.
  __host__ __device__ bool has_state(int c) const { return boundary + static_cast<int64_t>(c) * chunk > 0; }
  __host__ __device__ int first_snapshot(int virtual_row) const {
    int c = boundary > 0 ? 0 : 1;
    if (virtual_row > boundary) c = (virtual_row - boundary + chunk - 1) / chunk;
    return c;
  }
  // Where a snapshot lies among those of all states.
  __host__ __device__ int64_t slot(int64_t state, int c) const { return state * chunks + c; }
};

}  // namespace fastmax
