// Rows, virtual rows and chunks of a linear pass, in which every row of x sees the rows of y before it.
//
//   y   virtual rows   0   pad                      boundary
//                      |:::|------------------------|-----------|-----------|-----
//                       none 0 ...                    chunk 0     chunk 1      ... ny - 1
//   x   rows                                        |-----------|-----------|-----
//                                                   0           chunk          ... nx - 1
//
// x row r sees the virtual rows up to boundary + r. n queries at the end of m keys have boundary = pad + m - n; the pad makes it a
// multiple of kBoundary, so that no step crosses it. Without causality the boundary is past the last row of y, and there is one chunk
// without an intra-chunk part.
//
// For an exact window, states lag: x row r sees the virtual rows up to boundary + lag + r, the last `lag` of them at least in its chunk and
// not in the state before it.
//
// Rows are numbered in the order in which a pass visits them. grad_k and grad_v go back in time, over reversed rows: "all later queries"
// of a key are then "all earlier rows", a suffix is a prefix, and every pass works in the same way:
//
//   tokens                 0 1 2 3 4 5 6
//   rows, kForward         0 1 2 3 4 5 6
//   rows, kBackward        6 5 4 3 2 1 0
//
// Decays (linear/decay.h) and the bounds of packed sequences do not change where chunks begin.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastmax {

// The most y rows that a kernel adds in a step; chunk boundaries are multiples of it.
inline constexpr int kBoundary = 128;

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

enum class Time { kForward, kBackward };

struct Sequence {
  int nx, ny;    // rows
  int pad;       // virtual row of y row 0
  int boundary;  // virtual row that x row 0 sees last, less the lag
  bool causal;
  Time time;
  int lag;       // of states

  // before: y rows that x row 0 sees before its own; 0 where not causal. lag: of states, only where causal.
  static Sequence dense(int nx, int ny, bool causal, int before, Time time, int lag = 0) {
    const int boundary = round_up(causal ? before > lag ? before - lag : 0 : ny, kBoundary);
    return {nx, ny, causal ? boundary + lag - before : 0, boundary, causal, time, lag};
  }

  // As many rows of y as of x, after a carried state. A pad takes the place of the state's tokens, so that the first chunk reads a state.
  static Sequence after_state(int n, Time time) { return {n, n, kBoundary, kBoundary, true, time, 0}; }

  // The y row of a virtual row; negative in the pad.
  __host__ __device__ int y_row(int virtual_row) const { return virtual_row - pad; }
  // Ends in virtual rows: of y, and of what the x rows before x_row see, less the lag.
  __host__ __device__ int y_end() const { return ny + pad; }
  __host__ __device__ int seen_end(int x_row) const { return boundary + x_row; }
  // The first token of x rows [x_row, x_row + rows) in memory.
  int first_token(int x_row, int rows) const { return time == Time::kForward ? x_row : nx - x_row - rows; }
};

// A sequence in chunks of x rows. A snapshot of the state is stored before each chunk.
struct ChunkedSequence : Sequence {
  int chunk;   // rows
  int chunks;

  // The virtual row of the first y row in a chunk, and the chunk of a virtual row.
  __host__ __device__ int chunk_begin(int c) const { return boundary + c * chunk; }
  __host__ __device__ int chunk_of(int virtual_row) const { return (virtual_row - boundary) / chunk; }
  // The end of the virtual rows that snapshots contain.
  __host__ __device__ int end() const { return chunk_begin(chunks - 1); }
  // Whether a chunk has rows before it; and the first such chunk that begins at a virtual row or later.
  __host__ __device__ bool has_state(int c) const { return boundary + static_cast<int64_t>(c) * chunk > 0; }
  __host__ __device__ int first_snapshot(int virtual_row) const {
    int c = boundary > 0 ? 0 : 1;
    if (virtual_row > boundary) c = (virtual_row - boundary + chunk - 1) / chunk;
    return c;
  }
  // The index of a chunk's snapshot among those of all states.
  __host__ __device__ int64_t slot(int64_t state, int c) const { return state * chunks + c; }
};

}  // namespace fastmax
