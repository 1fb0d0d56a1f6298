// csrc/linear/order2/launch.cpp with kernels of its own, on the host: a state is one number, the sum of y[0] w[0], of which snapshots have
// f's coefficient of the first order times as much, and what is read of it that product; a gradient also has x2[0] of its row. So everything
// between a call and its kernels is here: phases, snapshots with their weights, what is saved and what is added to it, and where g is.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "linear/order2/launch.cpp"

extern "C" cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(data) + i * pitch, value, width);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpy2DAsync(void* to, size_t pitch, const void* from, size_t step, size_t width, size_t height, cudaMemcpyKind,
                                         cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memcpy(static_cast<char*>(to) + i * pitch, static_cast<const char*>(from) + i * step, width);
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) { std::abort(); }

namespace fastmax {

void linear_decay_tiles(const DecayTilesArgs&, cudaStream_t) { std::abort(); }
void linear_zero_dropped(const StateArgs&, cudaStream_t) { std::abort(); }
void linear_zero_masked(const ZeroArgs&, cudaStream_t) { std::abort(); }
template <class Math, class Args>
void linear_pass(const Args&, int, cudaStream_t) { std::abort(); }
template <class Math>
void linear_decay(const DecayArgs&, cudaStream_t) { std::abort(); }
template <class Math>
void linear_load_state(const CarriedArgs&, int, cudaStream_t) { std::abort(); }
template <class Math>
void linear_store_state(const CarriedArgs&, int, cudaStream_t) { std::abort(); }
template <class Math>
void linear_add_state(const AddArgs&, cudaStream_t) { std::abort(); }
template <class Math>
void linear_widen(const View&, float*, int, int, int, int, cudaStream_t) { std::abort(); }
void linear_load_part_state(const CarriedArgs&, int, cudaStream_t) { std::abort(); }
void linear_store_part_state(const CarriedArgs&, int, cudaStream_t) { std::abort(); }
size_t decay_sum_bytes(const AttentionParams&) { std::abort(); }
void fill_decay_sums(AttentionParams&, Resets, void*, cudaStream_t) { std::abort(); }
size_t pair_sum_bytes(const BwdParams&) { std::abort(); }
PairSums pair_sums(const BwdParams&, void*) { std::abort(); }
size_t decay_gradient_bytes(const BwdParams&) { std::abort(); }
void fill_decay_gradient(const BwdParams&, const PairSums&, void*, cudaStream_t) { std::abort(); }
template <class Math>
void linear_prepare(const PrepareArgs& a, cudaStream_t) {
  const float* grad_o = static_cast<const float*>(a.grad_o.data);
  float* g = static_cast<float*>(const_cast<void*>(a.g.data));
  for (int row = 0; row < a.batch * a.heads * a.n; ++row, grad_o += a.dv) {
    const int head = row / a.n;
    std::copy(grad_o, grad_o + a.dv, g + head / a.heads * a.g.batch + head % a.heads * a.g.head + row % a.n * a.g.token);
  }
}

namespace {

constexpr int64_t kSnapshotBytes = 1 << 12, kAccumulators = (kAccumulatorBytes / 4) / 3;  // of three states at a time
constexpr int64_t kSumFloats = 4;
bool adds_while_reading = false;
int saved_chunk = 0;

float& number(void* snapshots, int64_t slot) { return *reinterpret_cast<float*>(static_cast<char*>(snapshots) + slot * kSnapshotBytes); }
float at(const View& v, const LinearProblem& p, int rows, int batch, int head, int row) {
  const int token = p.time == Time::kForward ? row : rows - 1 - row;
  return static_cast<const float*>(v.data)[batch * v.batch + head * v.head + token * v.token];
}
// The sum of a virtual row over the y heads of a state.
float of_row(const LinearProblem& p, const View& y, const View& w, int state, int virtual_row) {
  const int row = p.y_row(virtual_row), batch = state / p.state_heads;
  float sum = 0.f;
  for (int i = 0; row >= 0 && row < p.ny && i < p.y_group; ++i) {
    const int head = state % p.state_heads * p.y_group + i;
    sum += at(y, p, p.ny, batch, head, row) * at(w, p, p.ny, batch, head, row);
  }
  return sum;
}

void sum(const Problem&, const StateArgs& a, cudaStream_t) {
  for (int state = 0; state < a.states(); ++state) {
    float total = a.begin > 0 ? a.accumulators[state * kAccumulators] : 0.f;
    for (int row = a.begin;; ++row) {
      if (row >= a.boundary && (row - a.boundary) % a.chunk == 0) {
        const int64_t slot = a.slot(state, a.chunk_of(row));
        number(a.snapshots, slot) = a.weights.linear * total, a.sums[slot * kSumFloats] = total;
      }
      if (row == a.end()) break;
      total += of_row(a, a.y, a.w, state, row);
    }
    if (a.hands_on) a.accumulators[state * kAccumulators] = total;
  }
}

// Both numbers of a state, and its own chunk's rows, for each row of x, and what x2 has there. c1: f's coefficient of the first order.
template <class Args>
void read(const Args& a, const View& x2, const View& w, float c1) {
  for (int state = 0; state < a.states(); ++state) {
    for (int i = 0; i < a.x_group; ++i) {
      for (int row = 0; row < a.nx; ++row) {
        const int chunk = row / a.chunk, head = state % a.state_heads * a.x_group + i;
        const int64_t slot = a.slot(state, chunk);
        float total = number(const_cast<void*>(a.snapshots), slot) + c1 * 1000.f * a.sums[slot * kSumFloats];
        if (a.added != nullptr) total += number(const_cast<void*>(a.added), state);
        for (int y = a.chunk_begin(chunk); y <= a.seen_end(row); ++y) total += c1 * 1001.f * of_row(a, a.y, w, state, y);
        if (x2.data != nullptr) total += at(x2, a, a.nx, state / a.state_heads, head, row);
        const int token = a.time == Time::kForward ? row : a.nx - 1 - row;
        float* out = static_cast<float*>(const_cast<void*>(a.out.data));
        out[state / a.state_heads * a.out.batch + head * a.out.head + token * a.out.token] = total;
      }
    }
  }
}

void add(const Problem&, const AddArgs& a, cudaStream_t) {
  for (int state = 0; state < a.states(); ++state) {
    for (int c = 0; c * a.chunk < a.nx; ++c) {
      const int64_t slot = a.slot(state, c);
      if (a.state != nullptr) number(a.snapshots, slot) += number(const_cast<void*>(a.state), state);
      a.sums[slot * kSumFloats] += a.state_sums[state * kSumFloats];
    }
  }
}

StateSizes sizes(const Problem&) { return {256, kSnapshotBytes, kSumFloats, 0, 1, kAccumulators, saved_chunk}; }
// Of k[0] v[0], in the values of a carried state.
int64_t place(const CarriedState& state, int index) { return (index * decode_rows(state.d, 2) + 1) * state.dv; }
void load(const Problem&, const CarriedArgs& a, cudaStream_t) {
  for (int i = 0; i < a.states; ++i) a.accumulators[i * kAccumulators] = a.state.kv_state[place(a.state, i)] * a.factors.first;
}
void store(const Problem&, const CarriedArgs& a, cudaStream_t) {
  for (int i = 0; i < a.states; ++i) a.state.new_kv_state[place(a.state, i)] = a.accumulators[i * kAccumulators] * a.factors.first;
}

StatePasses kernels = [] {
  StatePasses passes{};
  passes.sizes = sizes, passes.sum = sum, passes.load = load, passes.store = store, passes.add = add;
  passes.read = [](const Problem&, const ReadArgs& a, cudaStream_t) { read(a, {}, a.w, a.c1); };
  passes.grad = [](const Problem&, const GradArgs& a, cudaStream_t) { read(a, a.x2, a.y2, a.g0); };
  passes.adds_while_reading = [](const Problem&, Time) { return adds_while_reading; };
  return passes;
}();

using Numbers = std::vector<float>;

// Small whole numbers: sums of them are exact.
Numbers numbers(int64_t count) {
  Numbers x(count);
  for (float& value : x) value = static_cast<float>(std::rand() % 5 - 2);
  return x;
}

template <class Params>
void fill(Params& p, int b, int h, int hk, int n, const Numbers& q, const Numbers& k, const Numbers& v) {
  p.b = b, p.h = h, p.hk = hk, p.n = p.m = n, p.d = p.dv = 4, p.head_dim_qk = p.head_dim_v = 64, p.math = MathMode::kFP32;
  p.order = 2;
  p.scale = 0.5f, p.a0 = 3.f, p.a1 = 8.f, p.a2 = 64.f, p.causal = true, p.sm_arch = 90, p.sm_count = 1;
  const Stride of_queries{int64_t{h} * n * 4, int64_t{n} * 4, 4}, of_keys{int64_t{hk} * n * 4, int64_t{n} * 4, 4};
  p.q = q.data(), p.q_stride = of_queries, p.k = k.data(), p.k_stride = of_keys, p.v = v.data(), p.v_stride = of_keys;
}

// How much smaller the workspace is where g is in the memory of grad_q.
int64_t workspace_saved_by_writing_over_x2(const BwdParams& p) {
  StatePasses with = kernels, without = kernels;
  with.writes_over_x2 = true, without.writes_over_x2 = false;
  return static_cast<int64_t>(linear2_bwd_workspace_bytes(p, without) - linear2_bwd_workspace_bytes(p, with));
}

void run(FwdParams p) {
  const std::unique_ptr<char[]> workspace(new char[linear2_fwd_workspace_bytes(p, kernels)]);  // hundreds of MB, hardly touched
  p.workspace = workspace.get();
  launch_linear2_fwd(p, kernels, nullptr);
}
void run(BwdParams p) {
  const std::unique_ptr<char[]> workspace(new char[linear2_bwd_workspace_bytes(p, kernels)]);
  p.workspace = workspace.get();
  launch_linear2_bwd(p, kernels, nullptr);
}

// Of a call in one go and of one that continues from saved states: the number of differences.
int differences(int b, int h, int hk, int n) {
  const int64_t queries = int64_t{b} * h * n * 4, keys = int64_t{b} * hk * n * 4, rows = int64_t{b} * hk * decode_rows(4, 2);
  const Numbers q = numbers(queries), k = numbers(keys), v = numbers(keys), state = numbers(rows * 4), weights(rows), none(rows * 4);
  const Numbers not_read(rows * 4, NAN);
  const Numbers grad_o = numbers(queries), grad_state = numbers(rows * 4);
  int found = 0;
  const auto compare = [&](const char* name, const Numbers& x, const Numbers& y) {
    for (size_t i = 0; i < x.size(); i += 4) {
      if (x[i] != y[i] && found++ == 0) std::printf("%s[%zu]: %g, not %g; b %d h %d hk %d n %d\n", name, i, x[i], y[i], b, h, hk, n);
    }
  };

  Numbers new_state(rows * 4), new_weights(rows), o(queries), from_saved(queries), z(queries / 4), total(rows * 4), unread(rows * 4);
  FwdParams p{};
  fill(p, b, h, hk, n, q, k, v);
  p.mode = FwdMode::kOutputsAndState;
  p.o = o.data(), p.o_stride = p.q_stride, p.z = z.data();
  p.state = {state.data(), weights.data(), new_state.data(), new_weights.data(), 4, 4};
  run(p);

  FwdParams alone{};
  fill(alone, b, hk, hk, n, k, k, v);  // as state_of_keys has no queries
  alone.mode = FwdMode::kStateAndSaved;
  alone.state = {none.data(), weights.data(), total.data(), new_weights.data(), 4, 4};
  std::vector<char> saved(linear2_fwd_saved_bytes(alone, kernels));
  alone.saved = saved.data();
  run(alone);
  p.mode = FwdMode::kOutputsFromSaved;
  p.o = from_saved.data(), p.saved = saved.data(), p.state.new_kv_state = p.state.new_k_sum = nullptr;
  if (saved.size() != linear2_fwd_saved_bytes(p, kernels) || saved.empty()) return std::printf("saved: %zu bytes\n", saved.size());
  const std::vector<char> saved_first = saved;
  run(p);
  compare("o", from_saved, o);
  {
    saved = saved_first;
    FwdParams first = p;
    first.from_zero_state = true, first.state.kv_state = not_read.data();
    run(first);
    first.mode = FwdMode::kOutputsAndState, first.saved = nullptr;
    first.state.kv_state = none.data(), first.state.new_kv_state = unread.data(), first.state.new_k_sum = new_weights.data();
    Numbers again(queries);
    first.o = again.data();
    run(first);
    compare("o, nothing before", from_saved, again);
  }
  for (int i = 0; i < b * hk; ++i) total[place(p.state, i)] += state[place(p.state, i)];
  compare("the state", total, new_state);

  Numbers grad_q(queries, NAN), grad_k(keys), grad_v(keys), piece_q(queries), piece_k(keys), piece_v(keys), of_state(rows * 4), unused(rows * 4);
  BwdParams g{};
  fill(g, b, h, hk, n, q, k, v);
  g.o = o.data(), g.grad_o = grad_o.data(), g.o_stride = g.grad_o_stride = g.q_stride, g.z = z.data();
  BwdParams queries_alone = g;
  g.mode = BwdMode::kInputsAndState, queries_alone.mode = BwdMode::kStateAndSaved;
  g.grad_q_stride = {int64_t{n} * h * 4, 4, int64_t{h} * 4};  // in the order of tokens
  g.grad_k_stride = g.grad_v_stride = g.k_stride;
  g.grad_q = grad_q.data(), g.grad_k = grad_k.data(), g.grad_v = grad_v.data();
  g.state = {state.data(),      weights.data(), state.data(),    weights.data(),     grad_state.data(),
             weights.data(), of_state.data(), new_weights.data(), 4, 4};
  run(g);
  // g is a float for each column of a query, in pieces of 256 bytes.
  if (workspace_saved_by_writing_over_x2(g) != (queries * 4 + 255) / 256 * 256) found += std::printf("g is not in grad_q\n");

  queries_alone.state = {none.data(), weights.data(), none.data(),   weights.data(),     none.data(),
                         weights.data(), unused.data(), new_weights.data(), 4, 4};
  std::vector<char> saved_by_queries(linear2_bwd_saved_bytes(queries_alone, kernels));
  queries_alone.saved = saved_by_queries.data();
  run(queries_alone);
  const std::vector<char> saved_before = saved_by_queries;
  for (int i = 0; i < b * hk; ++i) unused[place(p.state, i)] += grad_state[place(p.state, i)];
  compare("the gradient of the state", unused, of_state);

  // In pieces, of g and e.
  BwdParams piece = g;
  const Numbers e(queries / 4);
  piece.o = piece.grad_o = nullptr, piece.z = nullptr;
  piece.g = grad_o.data(), piece.g_stride = g.grad_o_stride, piece.e = e.data();
  piece.state = {}, piece.state.d = piece.state.dv = 4;
  BwdParams of_keys = piece;
  piece.mode = BwdMode::kQueries, of_keys.mode = BwdMode::kKeys;
  piece.grad_q = piece_q.data(), piece.grad_k = piece.grad_v = nullptr;
  piece.state.kv_state = state.data(), piece.state.k_sum = weights.data();
  run(piece);
  compare("grad_q", piece_q, grad_q);
  BwdParams adding = g, wider = g;
  adding.adds = true, wider.dv = 8;
  for (const BwdParams& other : {piece, adding, wider}) {
    if (workspace_saved_by_writing_over_x2(other) != 0) found += std::printf("grad_q has no place for g\n");
  }

  of_keys.grad_q = nullptr, of_keys.grad_k = piece_k.data(), of_keys.grad_v = piece_v.data();
  of_keys.state.kv_state = of_keys.state.grad_new_kv_state = grad_state.data();
  of_keys.state.k_sum = of_keys.state.grad_new_k_sum = weights.data();
  run(of_keys);
  compare("grad_k", piece_k, grad_k), compare("grad_v", piece_v, grad_v);
  of_keys.mode = BwdMode::kKeysFromSaved, of_keys.saved = saved_by_queries.data();
  std::fill(piece_k.begin(), piece_k.end(), 0.f), std::fill(piece_v.begin(), piece_v.end(), 0.f);
  run(of_keys);
  compare("grad_k from saved states", piece_k, grad_k), compare("grad_v from saved states", piece_v, grad_v);

  // With nothing behind.
  g.state.grad_new_kv_state = none.data();
  run(g);
  saved_by_queries = saved_before, of_keys.from_zero_state = true, of_keys.state.grad_new_kv_state = not_read.data();
  run(of_keys);
  compare("grad_k, nothing behind", piece_k, grad_k), compare("grad_v, nothing behind", piece_v, grad_v);
  if (saved_by_queries != saved_before) found += std::printf("saved states were written\n");
  return found;
}

}  // namespace
}  // namespace fastmax

int main() {
  int found = 0;
  for (const bool adds : {false, true}) {
    fastmax::adds_while_reading = fastmax::kernels.writes_over_x2 = adds, fastmax::saved_chunk = adds ? 0 : 512;
    for (const int n : {1, 256, 257, 700}) {
      found += fastmax::differences(1, 4, 2, n) + fastmax::differences(2, 7, 7, n);
    }
  }
  std::printf("%d differences\n", found);
  return found != 0;
}
