#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fiber.h"

namespace emulator {
namespace {

constexpr int kSharedWindow = 1 << 18;  // what 14 bits of an address by 16 bytes reach
constexpr int kRegisters = 65536;
constexpr uint32_t kNever = UINT32_MAX;
constexpr double kSpinSeconds = 20;  // without progress of any block, while some wait for each other

}  // namespace

// Dynamic shared memory, under the names that kernels declare it by.
extern "C" {
__attribute__((aligned(1024))) thread_local unsigned char emulator_shared[kSharedWindow];
#define EMULATOR_SHARED(name, symbol) \
  extern __attribute__((alias("emulator_shared"))) thread_local unsigned char emulator_shared_##name[] asm(symbol);
EMULATOR_SHARED(a, "_ZN7fastmax6sharedE")
EMULATOR_SHARED(b, "_ZN7fastmax12_GLOBAL__N_16sharedE")
#undef EMULATOR_SHARED
}

namespace {

// ---- what threads wait for

enum class Waits { kNothing, kOthersFirst, kExchange, kBarrier, kMbarrier, kRegisters };

struct Write {  // a copy from shared memory
  bool is_box;
  CUtensorMap map;
  Box box;
  unsigned char* dst;
  uint32_t src, bytes;
  Combine combine;
  std::vector<unsigned char> data;
  bool is_read = false, is_written = false, is_waited_for = false;
};

struct SmallCopy {
  uint32_t dst, bytes, from_memory;
  const void* src;
};

// How far a warp is known to have come: `issued` counts its accesses to shared memory, `loaded` those up to which its ordinary loads have
// their values, `retired` its products that it waited for. Accesses and products are numbered by the same counts. A vector clock:
// arriving at a barrier hands on what a warp knows, waiting for it takes that over.
struct Progress {
  uint32_t issued = 0, loaded = 0, retired = 0;
};
// What a warp, or a barrier, knows of each warp.
using Known = std::vector<Progress>;

void learn(Known& known, const Known& more) {
  for (size_t w = 0; w < known.size(); ++w) {
    known[w].issued = std::max(known[w].issued, more[w].issued);
    known[w].loaded = std::max(known[w].loaded, more[w].loaded);
    known[w].retired = std::max(known[w].retired, more[w].retired);
  }
}

struct Fiber {
  Context context;
  uint3 index;
  Waits waits = Waits::kNothing;
  const char* what = nullptr;  // the collective
  uint32_t address = 0, parity = 0;
  uint64_t phase = 0;  // when it began to wait
  bool exited = false;
  std::vector<std::unique_ptr<Write>> open_group;
  std::deque<std::vector<std::unique_ptr<Write>>> groups;
  std::vector<SmallCopy> open_copies;
  std::deque<std::vector<SmallCopy>> copies;
  std::vector<uint32_t> unfenced;  // granules of shared memory
  // Of its ordinary loads that may still be on their way, the first and the last; and the first of those that an mma may have used.
  uint32_t first_load = kNever, last_load = 0, first_in_mma = kNever;
};

struct Exchange {
  uint32_t mask = 0, arrived = 0;
  uint64_t generation = 0;
  const char* what = nullptr;
  alignas(16) unsigned char values[2][kWarp * Lanes<int>::kStride];
};

// Accumulators of a warp that products in flight write, by rows.
struct Accumulators {
  std::array<float*, kWarp> of_lanes;
  int n;
  std::vector<float> sums;  // 16 x n
  int users = 0;            // products in flight
};

struct PendingProduct {
  Product product;
  Accumulators* d;
  // As they were: which registers are free before the wait is the compiler's business, not the source's.
  uint32_t a[kWarp][4];
  uint32_t number = 0, loads_before = 0;  // of the warp's products; of its accesses
  bool is_done = false;
};

struct Warp {
  uint32_t can_run = 0;
  std::deque<Exchange> exchanges;
  std::vector<std::unique_ptr<Accumulators>> accumulators;
  std::deque<std::vector<PendingProduct>> groups;  // committed
  std::vector<PendingProduct> open_group;
  bool is_fenced = false;
  int registers = 0;
  Known known;
  uint32_t now = 1, products = 0, retired = 0;  // counts of Progress; products: that were started
};

struct NamedBarrier {
  int threads = 0, arrived = 0, sum = 0, result[2] = {0, 0};
  uint64_t generation = 0;
  Known arriving, known[2];  // known: of the generation that ended

  void end_generation() {
    result[generation % 2] = sum, known[generation % 2] = arriving;
    arrived = sum = 0, ++generation;
  }
};

struct Mbarrier {
  int count, pending;
  int64_t bytes;  // still to come
  uint64_t phase;
  Known arriving, known;  // known: of the phase that ended
};

struct Load {
  bool is_box;
  CUtensorMap map;
  Box box;
  const void* src;
  uint32_t dst, bytes, barrier;
};

struct LaunchState {
  const Launch* launch;
  const std::function<void()>* kernel;
  Schedule schedule;
  std::atomic<uint64_t> next_block{0};
  std::atomic<uint64_t> progress{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;
};

const TensorMap& tensor_map_of(const CUtensorMap& map) {
  const TensorMap& m = reinterpret_cast<const TensorMap&>(map);
  if (m.magic != TensorMap::kMagic) fail("a copy by what is no tensor map");
  return m;
}

// sums[row][i] += sum over k of a[k][row] * b[k][i], with one rounding after the other, on every CPU.
#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
void add_product(const float* a, const float* b, int n, float* sums) {
  constexpr int kColumns = 8;  // in registers; n is a multiple
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < n; first += kColumns) {
      float* to = sums + row * n + first;
      float sum[kColumns];
      for (int i = 0; i < kColumns; ++i) sum[i] = to[i];
      for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < kColumns; ++i) sum[i] += a[k * 16 + row] * b[k * n + first + i];
      }
      for (int i = 0; i < kColumns; ++i) to[i] = sum[i];
    }
  }
}

void fiber_entry();

struct Failure {};  // outside of a fiber; what failed is in Block::error

class Block {
 public:
  Block(LaunchState& state, uint3 index, uint64_t number, Stacks& stacks)
      : state(state),
        index(index),
        schedule(state.schedule),
        random(schedule.seed * 1000003 + number),
        warps(state.launch->threads / kWarp),
        fibers(state.launch->threads),
        dim(state.launch->threads),
        live(state.launch->threads) {
    if (state.launch->threads % kWarp != 0) throw std::logic_error("a block is whole warps");
    // Where shared memory begins is not said, but for the alignment that kernels declare.
    first_address = 1024 + (schedule.warps == Schedule::Warps::kRandom ? random() % 8 * 128 : 0);
    if (first_address + state.launch->shared_bytes > kSharedWindow) first_address = 1024;
    std::memset(emulator_shared, 0xff, sizeof(emulator_shared));
    granules.assign(kSharedWindow / 16, {});
    const size_t used = (state.launch->shared_bytes + 15) / 16;
    last_loads.assign(4 * used * warps.size(), 0), last_products.assign(used * warps.size(), 0), last_stores.assign(4 * used, {});
    for (Warp& warp : warps) warp.known.resize(warps.size());
    for (NamedBarrier& barrier : barriers) barrier.arriving = barrier.known[0] = barrier.known[1] = Known(warps.size());
    stacks.reserve(dim);
    for (int i = 0; i < dim; ++i) {
      Fiber& f = fibers[i];
      f.index = {static_cast<unsigned>(i), 0, 0};
      f.context.start(stacks.data + i * kStackBytes, kStackBytes, fiber_entry);
      warps[i / kWarp].can_run |= 1u << i % kWarp;
    }
    registers_at_launch = kRegisters / dim / 8 * 8;
    for (Warp& warp : warps) warp.registers = std::min(registers_at_launch, 255);
  }

  // As one more block of the kernel shares the multiprocessor: __launch_bounds__ says how many do, and is not seen here.
  void share_registers() {
    const int before = registers_at_launch;
    registers_at_launch = kRegisters / dim / ++sharing_blocks / 8 * 8;
    for (Warp& warp : warps) {
      if (warp.registers == before) warp.registers = registers_at_launch;
      else free_registers -= before - registers_at_launch;
    }
  }

  // Until all threads ended, or one failed.
  void run() {
    try {
      run_threads();
    } catch (const Failure&) {
    }
  }
  void run_threads() {
    while (live > 0 && error.empty()) {
      if (state.failed.load(std::memory_order_relaxed)) return;
      asynchronous_step();
      const int warp = pick_warp();
      if (warp < 0) {
        if (finish_one_load()) continue;
        if (wake_spinning()) continue;
        error = "deadlock: " + who_waits();
        break;
      }
      run_warp(warp);
      if (++steps % 64 == 0) state.progress.fetch_add(1, std::memory_order_relaxed);
    }
    if (error.empty()) check_end();
  }

  void run_warp(int w) {
    Warp& warp = warps[w];
    const int first = schedule.warps == Schedule::Warps::kRandom ? random() % kWarp : 0;
    for (int i = 0; i < kWarp && error.empty(); ++i) {
      const int lane = (first + i) % kWarp;
      if ((warp.can_run >> lane & 1u) == 0) continue;
      current = w * kWarp + lane;
      in_fiber = true;
      switch_context(scheduler, fibers[current].context);
      in_fiber = false;
    }
  }

  Fiber& fiber() { return fibers[current]; }
  Warp& warp() { return warps[current / kWarp]; }
  int lane() const { return current % kWarp; }

  void back_to_scheduler() {
    Fiber& f = fiber();
    switch_context(f.context, scheduler);
  }
  void wait(Waits waits) {
    fiber().waits = waits;
    warp().can_run &= ~(1u << lane());
    back_to_scheduler();
  }
  void wake(int thread) {
    fibers[thread].waits = Waits::kNothing;
    warps[thread / kWarp].can_run |= 1u << thread % kWarp;
  }
  template <class Condition>
  void wake_all(const Condition& condition) {
    for (int i = 0; i < dim; ++i) {
      if (!fibers[i].exited && fibers[i].waits != Waits::kNothing && condition(fibers[i])) wake(i);
    }
  }

  bool chance(unsigned one_in) { return random() % one_in == 0; }

  // ---- shared memory

  struct Granule {  // 16 bytes of dynamic shared memory
    uint16_t writer;    // thread + 1, until it fenced
    uint16_t incoming;  // copies to it on their way
    uint16_t readers;   // products and copies that read it at some time until they are waited for
  };

  bool is_dynamic(uint32_t address) const { return address >= first_address && address < kSharedWindow + first_address; }
  unsigned char* shared(uint32_t address, uint32_t bytes) {
    if (!is_dynamic(address)) return emulator_shared + static_cast<int32_t>(address - first_address);  // static
    const uint32_t offset = address - first_address;
    if (offset + bytes > static_cast<uint32_t>(state.launch->shared_bytes)) {
      fail("shared memory: bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of " +
           std::to_string(state.launch->shared_bytes));
    }
    return emulator_shared + offset;
  }
  template <class Function>
  void for_each_granule(uint32_t address, uint32_t bytes, const Function& fn) {
    if (!is_dynamic(address)) return;
    const uint32_t offset = address - first_address;
    for (uint32_t i = offset / 16; i <= (offset + bytes - 1) / 16; ++i) fn(granules[i], i);
  }
  // To be read: by ordinary loads, or (by whom) by copies and products.
  const unsigned char* shared_to_read(uint32_t address, uint32_t bytes, const char* reader) {
    unsigned char* p = shared(address, bytes);
    for_each_granule(address, bytes, [&](const Granule& granule, uint32_t) {
      if (granule.incoming == 0 && (reader == nullptr || granule.writer == 0)) return;
      const std::string what = (reader == nullptr ? "a load" : reader) + (" of " + name_of(address));
      if (granule.incoming > 0) fail(what + ", to which a copy is on its way");
      fail(what + ", which thread " + std::to_string(granule.writer - 1) + " wrote without fence.proxy.async");
    });
    return p;
  }
  const unsigned char* load(uint32_t address, uint32_t bytes) {
    const unsigned char* p = shared_to_read(address, bytes, nullptr);
    Fiber& f = fiber();
    f.last_load = warp().now, f.first_load = std::min(f.first_load, f.last_load);
    check_was_stored(address, bytes, "a load");
    for_each_word(address, bytes, [&](uint32_t i) { loads_of(i)[warp_index()] = f.last_load; });
    return p;
  }
  unsigned char* shared_to_write(uint32_t address, uint32_t bytes, const char* writer) {
    unsigned char* p = shared(address, bytes);
    for_each_granule(address, bytes, [&](const Granule& granule, uint32_t) {
      if (granule.incoming > 0) fail(writer + (" to " + name_of(address)) + ", to which a copy is on its way");
      if (granule.readers > 0) fail(writer + (" to " + name_of(address)) + ", which a product or a copy in flight reads");
    });
    return p;
  }

  // ---- the order of accesses that barriers, fences and waits guarantee, whatever the order in which threads happen to run

  struct Store {
    uint32_t count;  // Progress::issued
    int warp;
  };
  template <class Function>
  void for_each_word(uint32_t address, uint32_t bytes, const Function& fn) {
    if (!is_dynamic(address)) return;
    const uint32_t offset = address - first_address;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) fn(i);
  }
  uint32_t* loads_of(uint32_t word) { return last_loads.data() + word * warps.size(); }
  uint32_t* products_of(uint32_t granule) { return last_products.data() + granule * warps.size(); }
  int warp_index() const { return current / kWarp; }

  // Progress::loaded of the warp that runs: before its first load that neither a fence nor a product settled (core/sm90/pipeline.h).
  uint32_t loaded() const {
    uint32_t first = warps[warp_index()].now + 1;
    for (int i = 0; i < kWarp; ++i) {
      const Fiber& f = fibers[warp_index() * kWarp + i];
      first = std::min({first, f.first_load, f.first_in_mma});
    }
    return first - 1;
  }
  // What a barrier learns when the warp that runs arrives.
  const Known& tell() {
    Warp& w = warp();
    w.known[warp_index()] = {w.now, loaded(), w.retired};
    ++w.now;
    return w.known;
  }
  void learn(const Known& known) { emulator::learn(warp().known, known); }

  // Before a read: stores by other warps.
  void check_was_stored(uint32_t address, uint32_t bytes, const char* reader) {
    for_each_word(address, bytes, [&](uint32_t i) {
      const Store& last = last_stores[i];
      if (last.count == 0 || last.warp == warp_index() || last.count <= warp().known[last.warp].issued) return;
      fail(reader + (" of " + name_of(address)) + ", which warp " + std::to_string(last.warp) + " wrote; no barrier tells so");
    });
  }
  // Before a write: loads, products and stores by other warps. by_copy: by the copy engine, for which a load has to have its value, also
  // one of the same warp; other writes follow loads that were issued.
  void check_was_used(uint32_t address, uint32_t bytes, bool by_copy) {
    const auto refuse = [&](int w, const char* why) {
      fail((by_copy ? "a copy to " : "a store to ") + name_of(address) + ", which warp " + std::to_string(w) + why);
    };
    Known& known = warp().known;
    known[warp_index()] = {warp().now, by_copy ? loaded() : 0, warp().retired};
    const int count = static_cast<int>(warps.size());
    for_each_granule(address, bytes, [&](const Granule&, uint32_t i) {
      for (int w = 0; w < count; ++w) {
        if (products_of(i)[w] > known[w].retired) refuse(w, " has in a product; no barrier tells that it waited for it");
      }
    });
    for_each_word(address, bytes, [&](uint32_t i) {
      for (int w = 0; w < count; ++w) {
        if (loads_of(i)[w] > known[w].issued) refuse(w, " loaded; no barrier tells so");
        if (by_copy && loads_of(i)[w] > known[w].loaded) {
          refuse(w, " released while its load of it may be on its way: neither a fence nor a product waited for it");
        }
      }
      const Store& store = last_stores[i];
      if (store.count > 0 && store.count > known[store.warp].issued) refuse(store.warp, " wrote; no barrier tells so");
    });
  }

  // ---- mbarriers

  Mbarrier& mbarrier(uint32_t address) {
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) fail("an mbarrier at " + name_of(address) + " that was not initialised");
    uint64_t word;
    std::memcpy(&word, shared(address, 8), 8);
    if (word != mbarrier_word(address)) fail("the mbarrier at " + name_of(address) + " was overwritten");
    return found->second;
  }
  static uint64_t mbarrier_word(uint32_t address) { return 0x4d42415252494552 ^ address; }
  // From the first multiple of 1024 on, where kernels count from.
  std::string name_of(uint32_t address) const {
    return "byte " + std::to_string(static_cast<int64_t>(address) - (first_address + 1023) / 1024 * 1024);
  }

  void end_phase_if_complete(uint32_t address, Mbarrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    ++barrier.phase, barrier.pending = barrier.count, barrier.known = barrier.arriving;
    wake_all([&](const Fiber& f) { return f.waits == Waits::kMbarrier && f.address == address && barrier.phase > f.phase; });
  }

  // ---- copies

  // fn(shared address, global address or null outside, bytes) for each 16 bytes of a box, swizzled.
  template <class Function>
  void for_each_chunk(const TensorMap& m, uint32_t address, const Box& box, const Function& fn) {
    const uint32_t row_bytes = m.box[0] * m.element_bytes;
    const uint32_t mask = m.swizzle_bytes / 16 - 1;
    for (uint32_t row = 0; row < m.box[1]; ++row) {
      for (uint32_t chunk = 0; chunk < row_bytes; chunk += 16) {
        uint32_t at = address + row * row_bytes + chunk;
        if (m.swizzle_bytes > 16) at ^= (at >> 7 & mask) << 4;
        const int64_t column = box.at[0] + chunk / m.element_bytes, token = box.at[1] + static_cast<int64_t>(row);
        const bool inside = token >= 0 && token < m.extents[1] && box.at[2] >= 0 && static_cast<uint32_t>(box.at[2]) < m.extents[2] &&
                            box.at[3] >= 0 && static_cast<uint32_t>(box.at[3]) < m.extents[3] && column >= 0;
        const int64_t columns = inside ? std::clamp<int64_t>(m.extents[0] - column, 0, 16 / m.element_bytes) : 0;
        unsigned char* memory = m.base + column * m.element_bytes + token * static_cast<int64_t>(m.strides[0]) +
                                box.at[2] * static_cast<int64_t>(m.strides[1]) + box.at[3] * static_cast<int64_t>(m.strides[2]);
        fn(at, memory, static_cast<uint32_t>(columns * m.element_bytes));
      }
    }
  }

  void check_box(const TensorMap& m, uint32_t address) {
    const uint32_t alignment = m.swizzle_bytes >= 128 ? 1024 : m.swizzle_bytes == 64 ? 512 : m.swizzle_bytes == 32 ? 256 : 128;
    if (address % alignment != 0) fail("a box in shared memory that does not begin at a multiple of the swizzle's period");
  }
  static uint32_t box_bytes(const TensorMap& m) { return uint32_t{m.box[0]} * m.box[1] * m.box[2] * m.box[3] * m.element_bytes; }

  void start_load(Load&& load) {
    touch();
    std::memset(shared_to_write(load.dst, load.bytes, "a copy"), 0xff, load.bytes);
    check_was_used(load.dst, load.bytes, true);
    for_each_granule(load.dst, load.bytes, [](Granule& granule, uint32_t) { ++granule.incoming, granule.writer = 0; });
    for_each_word(load.dst, load.bytes, [&](uint32_t i) { last_stores[i] = {}; });
    mbarrier(load.barrier);
    if (schedule.asynchronous == Schedule::Asynchronous::kAtOnce) {
      finish(load);
    } else {
      loads.push_back(std::move(load));
    }
  }
  void finish(const Load& load) {
    if (load.is_box) {
      for_each_chunk(tensor_map_of(load.map), load.dst, load.box, [&](uint32_t at, const unsigned char* memory, uint32_t bytes) {
        unsigned char* to = shared(at, 16);
        std::memset(to, 0, 16);
        if (bytes > 0) std::memcpy(to, memory, bytes);
      });
    } else {
      std::memcpy(shared(load.dst, load.bytes), load.src, load.bytes);
    }
    for_each_granule(load.dst, load.bytes, [](Granule& granule, uint32_t) { --granule.incoming; });
    Mbarrier& barrier = mbarrier(load.barrier);
    barrier.bytes -= load.bytes;
    if (barrier.bytes < 0) fail("more bytes came to the mbarrier at " + name_of(load.barrier) + " than its phase expects");
    end_phase_if_complete(load.barrier, barrier);
  }
  bool finish_one_load() {
    if (loads.empty()) return false;
    const size_t i = schedule.asynchronous == Schedule::Asynchronous::kAtRandom ? random() % loads.size() : loads.size() - 1;
    const Load load = std::move(loads[i]);
    loads.erase(loads.begin() + i);
    finish(load);
    return true;
  }

  void start_write(std::unique_ptr<Write> write) {
    touch();
    shared(write->src, write->bytes);
    check_was_stored(write->src, write->bytes, "a copy");
    for_each_granule(write->src, write->bytes, [](Granule& granule, uint32_t) { ++granule.readers; });
    if (schedule.asynchronous == Schedule::Asynchronous::kAtOnce) read(*write), this->write(*write);
    fiber().open_group.push_back(std::move(write));
  }
  void read(Write& w) {
    if (w.is_read) return;
    const unsigned char* from = shared_to_read(w.src, w.bytes, "a copy");
    w.data.assign(from, from + w.bytes);
    w.is_read = true;
  }
  void write(Write& w) {
    if (w.is_written) return;
    read(w);
    w.is_written = true;
    if (w.is_box) {
      for_each_chunk(tensor_map_of(w.map), w.src, w.box, [&](uint32_t at, unsigned char* memory, uint32_t bytes) {
        combine(memory, w.data.data() + (at - w.src), bytes, w.combine, tensor_map_of(w.map).is_bf16);
      });
    } else {
      combine(w.dst, w.data.data(), w.bytes, w.combine, false);
    }
  }
  static void combine(unsigned char* to, const unsigned char* from, uint32_t bytes, Combine how, bool is_bf16) {
    if (how == Combine::kReplace) {
      std::memcpy(to, from, bytes);
    } else if (how == Combine::kAddFloat) {
      for (uint32_t i = 0; i < bytes; i += 4) {
        float a, b;
        std::memcpy(&a, to + i, 4), std::memcpy(&b, from + i, 4);
        a += b;
        std::memcpy(to + i, &a, 4);
      }
    } else {
      for (uint32_t i = 0; i < bytes; i += 2) {
        uint16_t a, b;
        std::memcpy(&a, to + i, 2), std::memcpy(&b, from + i, 2);
        if (is_bf16) {
          const __nv_bfloat16 sum = __float2bfloat16_rn(bf16_to_float(a) + bf16_to_float(b));
          std::memcpy(&a, &sum, 2);
        } else {
          const __half sum = __float2half_rn(fp16_to_float(a) + fp16_to_float(b));
          std::memcpy(&a, &sum, 2);
        }
        std::memcpy(to + i, &a, 2);
      }
    }
  }

  // ---- products

  static uint32_t swizzle_mask(uint64_t descriptor) {
    constexpr uint32_t kMasks[4] = {0, 7, 3, 1};
    return kMasks[descriptor >> 62];
  }
  // fn(address, k, i, is_along_k) for each 16 bytes of 16 numbers of the sum by `count` rows (or columns) of an operand, from its row
  // `first` on: numbers k .. k + 7 of row i, or number k of rows i .. i + 7.
  template <class Function>
  void for_each_operand_chunk(uint64_t descriptor, bool transposed, int first, int count, const Function& fn) {
    const uint32_t mask = swizzle_mask(descriptor), row_bytes = (mask + 1) * 16;
    if (mask == 0) fail("a wgmma operand without a swizzle");
    const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    const auto swizzled = [&](uint32_t address) { return address ^ (address >> 7 & mask) << 4; };
    if (!transposed) {  // a row has the sum's numbers
      for (int i = 0; i < count; ++i) {
        const uint32_t row = first + i, at = start + row / 8 * stride + row % 8 * row_bytes;
        fn(swizzled(at), 0, i), fn(swizzled(at + 16), 8, i);
      }
    } else {
      for (int i = 0; i < count; i += 8) {
        const uint32_t column_bytes = (first + i) * 2, at = start + column_bytes / row_bytes * leading + column_bytes % row_bytes;
        for (int k = 0; k < 16; ++k) fn(swizzled(at + k / 8 * stride + k % 8 * row_bytes), k, i);
      }
    }
  }
  // out[k * count + i]
  void decode(uint64_t descriptor, bool transposed, bool is_bf16, int first, int count, float* out) {
    for_each_operand_chunk(descriptor, transposed, first, count, [&](uint32_t address, int k, int i) {
      uint16_t numbers[8];
      std::memcpy(numbers, shared_to_read(address, 16, "wgmma"), 16);
      for (int j = 0; j < 8; ++j) {
        out[transposed ? k * count + i + j : (k + j) * count + i] = is_bf16 ? bf16_to_float(numbers[j]) : fp16_to_float(numbers[j]);
      }
    });
  }
  // fn(granule, its index, address) for all that a product reads. Each warp counts as a reader of all 64 rows of A: the manual does not
  // say which warp reads which rows in shared memory.
  template <class Function>
  void for_each_operand(const Product& p, const Function& fn) {
    const auto chunk = [&](uint32_t address, int, int) {
      shared(address, 16);
      for_each_granule(address, 16, [&](Granule& granule, uint32_t i) { fn(granule, i, address); });
    };
    if (!p.a_in_registers) for_each_operand_chunk(p.a, p.a_transposed, 0, 64, chunk);
    for_each_operand_chunk(p.b, p.b_transposed, 0, p.n, chunk);
  }

  void compute(int w, PendingProduct& pending) {
    if (pending.is_done) return;
    pending.is_done = true;
    const Product& p = pending.product;
    float a[16 * 16], b[16 * 256];  // [k][row], [k][column]
    if (p.a_in_registers) {
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < 4; ++i) {
          for (int e = 0; e < 2; ++e) {
            const uint16_t x = static_cast<uint16_t>(pending.a[lane][i] >> 16 * e);
            a[(lane % 4 * 2 + e + i / 2 * 8) * 16 + lane / 4 + i % 2 * 8] = p.is_bf16 ? bf16_to_float(x) : fp16_to_float(x);
          }
        }
      }
    } else {
      decode(p.a, p.a_transposed, p.is_bf16, w % 4 * 16, 16, a);
    }
    decode(p.b, p.b_transposed, p.is_bf16, 0, p.n, b);
    float* sums = pending.d->sums.data();
    if (!p.accumulates) std::fill_n(sums, 16 * p.n, 0.f);
    add_product(a, b, p.n, sums);
  }
  bool compute_next(int w) {
    for (auto& group : warps[w].groups) {
      for (PendingProduct& p : group) {
        if (!p.is_done) return compute(w, p), true;
      }
    }
    for (PendingProduct& p : warps[w].open_group) {
      if (!p.is_done) return compute(w, p), true;
    }
    return false;
  }
  static float& of_lane(Accumulators& d, int lane, int i) {
    return d.sums[(lane / 4 + i / 2 % 2 * 8) * d.n + i / 4 * 8 + lane % 4 * 2 + i % 2];
  }

  void start(Warp& warp, int w, const Product& product, const std::array<float*, kWarp>& d, const std::array<const uint32_t*, kWarp>& a) {
    if (!warp.is_fenced) fail("wgmma without wgmma.fence after registers were read");
    Accumulators* accumulators = nullptr;
    for (const auto& known : warp.accumulators) {
      if (known->of_lanes[0] == d[0]) accumulators = known.get();
    }
    if (accumulators == nullptr) {
      warp.accumulators.push_back(std::make_unique<Accumulators>());
      accumulators = warp.accumulators.back().get();
      accumulators->of_lanes = d, accumulators->n = product.n, accumulators->sums.resize(16 * product.n);
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < product.n / 2; ++i) {
          of_lane(*accumulators, lane, i) = d[lane][i];
          std::memset(d[lane] + i, 0xff, 4);
        }
      }
    } else if (accumulators->of_lanes != d || accumulators->n != product.n) {
      fail("a product into some of the accumulators of another one in flight");
    }
    ++accumulators->users;
    PendingProduct pending{product, accumulators, {}};
    pending.number = ++warp.products, pending.loads_before = warp.now++;
    for_each_operand(product, [&](Granule& granule, uint32_t i, uint32_t address) {
      check_was_stored(address, 16, "wgmma");
      ++granule.readers, products_of(i)[w] = pending.number;
    });
    if (product.a_in_registers) {
      for (int lane = 0; lane < kWarp; ++lane) std::memcpy(pending.a[lane], a[lane], 16);
    }
    warp.open_group.push_back(pending);
    if (schedule.asynchronous == Schedule::Asynchronous::kAtOnce) compute(w, warp.open_group.back());
  }
  // A group is over: its accumulators are whole where nothing else in flight writes them.
  void retire(Warp& warp, int w, std::vector<PendingProduct>& group) {
    for (PendingProduct& p : group) {
      compute(w, p);
      for_each_operand(p.product, [](Granule& granule, uint32_t, uint32_t) { --granule.readers; });
      warp.retired = p.number;
      // Loads before it count as operands of it: values are not followed.
      for (int i = 0; p.product.a_in_registers && i < kWarp; ++i) {
        Fiber& f = fibers[w * kWarp + i];
        if (f.first_load <= p.loads_before) f.first_load = f.last_load > p.loads_before ? p.loads_before + 1 : kNever;
      }
      if (--p.d->users > 0) continue;
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < p.d->n / 2; ++i) {
          uint32_t bits;
          std::memcpy(&bits, p.d->of_lanes[lane] + i, 4);
          if (bits != 0xffffffffu) fail("accumulators of a product in flight were written");
          p.d->of_lanes[lane][i] = of_lane(*p.d, lane, i);
        }
      }
      std::erase_if(warp.accumulators, [&](const auto& x) { return x.get() == p.d; });
    }
  }

  // ---- the schedule

  void asynchronous_step() {
    if (schedule.asynchronous != Schedule::Asynchronous::kAtRandom) return;
    if (!loads.empty() && chance(4)) finish_one_load();
    if (chance(2)) compute_next(random() % warps.size());
    if (chance(16)) {
      Fiber& f = fibers[random() % dim];
      for (auto& group : f.groups) {
        for (auto& w : group) {
          if (!w->is_read) return read(*w);
          if (!w->is_written) return write(*w);
        }
      }
    }
  }

  int pick_warp() {
    const int count = static_cast<int>(warps.size());
    int first = 0, step = 1;
    switch (schedule.warps) {
      case Schedule::Warps::kInTurn: first = (last_warp + 1) % count; break;
      case Schedule::Warps::kFirst: break;
      case Schedule::Warps::kLast: first = count - 1, step = count - 1; break;
      case Schedule::Warps::kRandom: first = random() % count; break;
    }
    for (int i = 0; i < count; ++i) {
      const int w = (first + i * step) % count;
      if (warps[w].can_run != 0) return last_warp = w;
    }
    return -1;
  }

  // Threads that look again and again for what another block does.
  bool wake_spinning() {
    bool any = false;
    wake_all([&](const Fiber& f) { return f.waits == Waits::kOthersFirst && (any = true); });
    if (!any) return false;
    const uint64_t progress = state.progress.load();
    const auto now = std::chrono::steady_clock::now();
    if (progress != seen_progress) seen_progress = progress, seen_at = now;
    if (std::chrono::duration<double>(now - seen_at).count() > kSpinSeconds) {
      error = "blocks wait for each other: " + who_waits();
    }
    std::this_thread::yield();
    return true;
  }

  std::string who_waits() const {
    std::map<std::string, std::string> threads;  // by what they wait for
    for (size_t w = 0; w < warps.size(); ++w) {
      std::map<std::string, int> lanes;
      for (int lane = 0; lane < kWarp; ++lane) {
        const Fiber& f = fibers[w * kWarp + lane];
        if (!f.exited) ++lanes[describe(f)];
      }
      for (const auto& [what, count] : lanes) {
        std::string& text = threads[what];
        text += (text.empty() ? "warp " : ", ") + std::to_string(w) + (count < kWarp ? " (" + std::to_string(count) + " lanes)" : "");
      }
    }
    std::string text;
    for (const auto& [what, who] : threads) text += (text.empty() ? "" : "; ") + who + " for " + what;
    return text;
  }
  std::string describe(const Fiber& f) const {
    switch (f.waits) {
      case Waits::kNothing: return "nothing";
      case Waits::kOthersFirst: return "other blocks";
      case Waits::kExchange: return std::string("its lanes in ") + f.what;
      case Waits::kBarrier: {
        const NamedBarrier& b = barriers[f.address];
        return "barrier " + std::to_string(f.address) + " (" + std::to_string(b.arrived) + " of " + std::to_string(b.threads) +
               " threads came)";
      }
      case Waits::kMbarrier: {
        const Mbarrier& b = mbarriers.at(f.address);
        return "mbarrier at " + name_of(f.address) + ", parity " + std::to_string(f.parity) + " (phase " + std::to_string(b.phase) +
               ", " + std::to_string(b.pending) + " of " + std::to_string(b.count) + " arrivals and " + std::to_string(b.bytes) +
               " bytes to come)";
      }
      case Waits::kRegisters: return "registers";
    }
    return "?";
  }

  void check_end() {
    if (!loads.empty()) error = "the block ended before copies to its shared memory";
    for (const Warp& w : warps) {
      if (!w.groups.empty() || !w.open_group.empty()) error = "the block ended before its products";
    }
    for (const auto& [address, barrier] : mbarriers) {
      if (barrier.bytes != 0) error = "the block ended while the mbarrier at " + name_of(address) + " expects bytes";
    }
    for (Fiber& f : fibers) {
      if (!f.open_group.empty()) error = "the block ended with copies that were not committed";
      for (auto& group : f.groups) {
        for (auto& w : group) {
          if (!w->is_waited_for) error = "the block ended before copies from its shared memory were waited for";
          else write(*w);
        }
      }
      f.groups.clear();
    }
  }

  LaunchState& state;
  uint3 index;
  Schedule schedule;
  std::mt19937_64 random;
  std::vector<Warp> warps;
  std::vector<Fiber> fibers;
  int dim, live, current = 0, last_warp = -1;
  bool in_fiber = false;
  uint32_t first_address = 0;
  uint64_t steps = 0, seen_progress = 0;
  std::chrono::steady_clock::time_point seen_at = std::chrono::steady_clock::now();
  int64_t clock = 0;
  Context scheduler;
  std::string error;
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  std::vector<Load> loads;
  std::vector<Granule> granules;
  // The last ones, as counts of Progress: loads by word and warp, products by granule and warp, stores by word.
  std::vector<uint32_t> last_loads, last_products;
  std::vector<Store> last_stores;
  int registers_at_launch = 0, sharing_blocks = 1, free_registers = 0;
};

thread_local Block* block = nullptr;

void fiber_entry() {
  (*block->state.kernel)();
  Fiber& f = block->fiber();
  f.exited = true;
  --block->live;
  block->warp().can_run &= ~(1u << block->lane());
  NamedBarrier& all = block->barriers[0];
  if (all.arrived > 0 && all.arrived == block->live) {
    all.end_generation();
    block->wake_all([](const Fiber& g) { return g.waits == Waits::kBarrier && g.address == 0; });
  }
  for (;;) block->back_to_scheduler();
}

uint64_t schedule_number = 0;
int resident_blocks = 2;

}  // namespace

Schedule Schedule::of(uint64_t number) {
  switch (number) {
    case 0: return {Warps::kInTurn, Asynchronous::kAtOnce, 0};
    case 1: return {Warps::kFirst, Asynchronous::kLate, 1};
    case 2: return {Warps::kLast, Asynchronous::kLate, 2};
    default: return {Warps::kRandom, Asynchronous::kAtRandom, number};
  }
}

void configure(uint64_t schedule, int resident) { schedule_number = schedule, resident_blocks = std::max(1, resident); }

void fail(const std::string& message) {
  if (block == nullptr) throw std::runtime_error(message);
  if (block->error.empty()) {
    block->error = message + (block->in_fiber ? " (thread " + std::to_string(block->current) + ")" : "");
  }
  if (!block->in_fiber) throw Failure();
  for (;;) block->back_to_scheduler();
}

void run(const Launch& launch, const std::function<void()>& kernel) {
  LaunchState state{&launch, &kernel, Schedule::of(schedule_number)};
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (launch.shared_bytes > 227 * 1024) throw std::runtime_error("emulator: " + launch.name + ": too much shared memory");
  const auto work = [&] {
    Stacks stacks;
    for (uint64_t i; !state.failed && (i = state.next_block++) < blocks;) {
      const uint3 index{static_cast<unsigned>(i % launch.grid.x), static_cast<unsigned>(i / launch.grid.x % launch.grid.y),
                        static_cast<unsigned>(i / launch.grid.x / launch.grid.y)};
      Block now(state, index, i, stacks);
      block = &now;
      now.run();
      block = nullptr;
      ++state.progress;
      if (!now.error.empty()) {
        const std::lock_guard<std::mutex> lock(state.mutex);
        if (state.error.empty()) state.error = "block " + std::to_string(i) + ": " + now.error;
        state.failed = true;
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < std::min<uint64_t>(blocks, resident_blocks); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  if (state.failed) throw std::runtime_error("emulator: " + launch.name + ": " + state.error);
}

const uint3& thread_index() { return block->fiber().index; }
const uint3& block_index() { return block->index; }
const dim3& block_size() {
  static thread_local dim3 size;
  size = dim3(block->dim);
  return size;
}
const dim3& grid_size() { return block->state.launch->grid; }
int lane_index() { return block->lane(); }
int warp_index() { return block->current / kWarp; }

void touch() {
  if (block->schedule.warps == Schedule::Warps::kRandom && block->chance(64)) block->back_to_scheduler();
}
void spin() {
  block->wait(Waits::kOthersFirst);
}
int64_t clock() {
  block->back_to_scheduler();
  return block->clock += 1000;
}

uint32_t shared_address(const void* p) {
  return block->first_address + static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emulator_shared);
}
const unsigned char* shared_to_read(uint32_t address, uint32_t bytes) { return block->load(address, bytes); }
unsigned char* shared_to_write(uint32_t address, uint32_t bytes) {
  unsigned char* p = block->shared_to_write(address, bytes, "a store");
  block->check_was_used(address, bytes, false);
  block->for_each_granule(address, bytes, [](Block::Granule& granule, uint32_t i) {
    granule.writer = static_cast<uint16_t>(block->current + 1);
    block->fiber().unfenced.push_back(i);
  });
  block->for_each_word(address, bytes, [](uint32_t i) { block->last_stores[i] = {block->warp().now, block->warp_index()}; });
  return p;
}
void fence_proxy_async() {
  for (const uint32_t i : block->fiber().unfenced) {
    Block::Granule& granule = block->granules[i];
    if (granule.writer == block->current + 1) granule.writer = 0;
  }
  Fiber& f = block->fiber();
  f.unfenced.clear();
  f.first_load = f.first_in_mma = kNever;
  ++block->warp().now;
}
void use_in_mma() {
  Fiber& f = block->fiber();
  f.first_in_mma = std::min(f.first_in_mma, f.first_load);
}

const unsigned char* exchange_bytes(const char* what, const void* value, size_t bytes, uint32_t mask, const AllArrived& all_arrived) {
  Warp& warp = block->warp();
  const int lane = block->lane();
  Exchange* exchange = nullptr;
  for (Exchange& known : warp.exchanges) {
    if (known.mask == mask) exchange = &known;
  }
  if (exchange == nullptr) {
    exchange = &warp.exchanges.emplace_back();
    exchange->mask = mask;
  }
  if ((mask >> lane & 1u) == 0) fail(std::string(what) + " by a lane that its mask does not have");
  if (exchange->arrived == 0) exchange->what = what;
  if (exchange->what != what) fail(std::string("lanes of a warp are apart, in ") + what + " and " + exchange->what);
  unsigned char* values = exchange->values[exchange->generation % 2];
  std::memcpy(values + lane * Lanes<int>::kStride, value, bytes);
  exchange->arrived |= 1u << lane;
  if (exchange->arrived == mask) {
    exchange->arrived = 0, ++exchange->generation;
    if (all_arrived) all_arrived(values);
    const int first = block->current - lane;
    for (int i = 0; i < kWarp; ++i) {
      Fiber& f = block->fibers[first + i];
      if (f.waits == Waits::kExchange && f.address == mask) block->wake(first + i);
    }
    return values;
  }
  block->fiber().what = what, block->fiber().address = mask;
  block->wait(Waits::kExchange);
  return values;
}

namespace {

NamedBarrier& arrive(int barrier, int threads, int value) {
  if (barrier < 0 || barrier > 15) fail("barrier " + std::to_string(barrier) + ": there are 0 to 15");
  if ((barrier == 0) != (threads == 0)) fail("barrier 0 is __syncthreads");
  NamedBarrier& b = block->barriers[barrier];
  if (barrier == 0) threads = block->live;
  if (b.arrived > 0 && b.threads != threads && barrier != 0) {
    fail("barrier " + std::to_string(barrier) + " is of " + std::to_string(b.threads) + " threads, and of " + std::to_string(threads));
  }
  b.threads = threads, b.sum += value;
  learn(b.arriving, block->tell());
  if (++b.arrived == threads) {
    b.end_generation();
    block->wake_all([&](const Fiber& f) { return f.waits == Waits::kBarrier && f.address == static_cast<uint32_t>(barrier); });
  }
  return b;
}

}  // namespace

int barrier_sync(int barrier, int threads, int value) {
  touch();
  const uint64_t generation = barrier >= 0 && barrier < 16 ? block->barriers[barrier].generation : 0;
  NamedBarrier& b = arrive(barrier, threads, value);
  if (b.generation == generation) {
    block->fiber().address = barrier;
    block->wait(Waits::kBarrier);
  }
  block->learn(b.known[generation % 2]);
  return b.result[generation % 2];
}
void barrier_arrive(int barrier, int threads) {
  touch();
  arrive(barrier, threads, 0);
}

void mbarrier_init(uint32_t address, int arrivals) {
  if (address % 8 != 0 || arrivals < 1) fail("an mbarrier that is not aligned, or of no arrivals");
  const uint64_t word = Block::mbarrier_word(address);
  std::memcpy(block->shared(address, 8), &word, 8);
  const Known nothing(block->warps.size());
  if (!block->mbarriers.insert({address, {arrivals, arrivals, 0, 0, nothing, nothing}}).second) fail("an mbarrier that is initialised twice");
}
void mbarrier_arrive(uint32_t address, int arrivals) {
  touch();
  Mbarrier& barrier = block->mbarrier(address);
  if (arrivals > barrier.pending) fail("more arrivals at the mbarrier at " + block->name_of(address) + " than its phase waits for");
  barrier.pending -= arrivals;
  learn(barrier.arriving, block->tell());
  block->end_phase_if_complete(address, barrier);
}
void mbarrier_expect(uint32_t address, uint32_t bytes) {
  touch();
  block->mbarrier(address).bytes += bytes;
}
bool mbarrier_test(uint32_t address, uint32_t parity) {
  block->back_to_scheduler();
  const Mbarrier& barrier = block->mbarrier(address);
  if ((barrier.phase & 1) == parity) return false;
  block->learn(barrier.known);
  return true;
}
void mbarrier_wait(uint32_t address, uint32_t parity) {
  touch();
  const Mbarrier& barrier = block->mbarrier(address);
  if (parity > 1) fail("a parity is 0 or 1");
  const uint64_t phase = barrier.phase;
  if ((phase & 1) != parity) return block->learn(barrier.known);
  Fiber& fiber = block->fiber();
  fiber.address = address, fiber.parity = parity, fiber.phase = phase;
  block->wait(Waits::kMbarrier);
  if (block->mbarrier(address).phase != phase + 1) {
    fail("the mbarrier at " + block->name_of(address) + " went on by more than a phase while a thread waited for one");
  }
  block->learn(barrier.known);
}

void load_box(uint32_t dst, const CUtensorMap& map, uint32_t barrier, const Box& box) {
  const TensorMap& m = tensor_map_of(map);
  block->check_box(m, dst);
  block->start_load({true, map, box, nullptr, dst, Block::box_bytes(m), barrier});
}
namespace {

void check_bulk(const void* global, uint32_t shared, uint32_t bytes) {
  if (shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("a bulk copy of no multiples of 16");
  }
}

}  // namespace

void load_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  check_bulk(src, dst, bytes);
  block->start_load({false, {}, {}, src, dst, bytes, barrier});
}
void prefetch_bulk(const void* src, uint32_t bytes) {
  touch();
  check_bulk(src, 0, bytes);
}
void store_box(const CUtensorMap& map, uint32_t src, const Box& box, Combine combine) {
  const TensorMap& m = tensor_map_of(map);
  block->check_box(m, src);
  for (const int at : box.at) {
    if (at < 0) fail("a box that is stored at a negative coordinate");
  }
  auto write = std::make_unique<Write>();
  write->is_box = true, write->map = map, write->box = box, write->src = src, write->bytes = Block::box_bytes(m), write->combine = combine;
  block->start_write(std::move(write));
}
void store_bulk(void* dst, uint32_t src, uint32_t bytes, Combine combine) {
  check_bulk(dst, src, bytes);
  auto write = std::make_unique<Write>();
  write->is_box = false, write->dst = static_cast<unsigned char*>(dst), write->src = src, write->bytes = bytes, write->combine = combine;
  block->start_write(std::move(write));
}
void bulk_commit() {
  Fiber& f = block->fiber();
  f.groups.push_back(std::move(f.open_group));
  f.open_group.clear();
}
void bulk_wait(int pending, bool only_read) {
  touch();
  Fiber& f = block->fiber();
  const int over = std::max(0, static_cast<int>(f.groups.size()) - pending);
  for (int i = 0; i < over; ++i) {
    for (auto& w : f.groups[i]) {
      block->read(*w);
      if (!w->is_waited_for) {
        block->for_each_granule(w->src, w->bytes, [](Block::Granule& granule, uint32_t) { --granule.readers; });
      }
      w->is_waited_for = true;
      if (!only_read) block->write(*w);
    }
  }
  if (!only_read) f.groups.erase(f.groups.begin(), f.groups.begin() + over);
}

void copy_async(uint32_t dst, const void* src, uint32_t bytes, uint32_t from_memory) {
  touch();
  std::memset(shared_to_write(dst, bytes), 0xff, bytes);
  block->fiber().open_copies.push_back({dst, bytes, from_memory, src});
}
void copy_async_commit() {
  Fiber& f = block->fiber();
  f.copies.push_back(std::move(f.open_copies));
  f.open_copies.clear();
}
void copy_async_wait(int pending) {
  Fiber& f = block->fiber();
  while (static_cast<int>(f.copies.size()) > pending) {
    for (const SmallCopy& copy : f.copies.front()) {
      unsigned char* to = shared_to_write(copy.dst, copy.bytes);
      std::memset(to, 0, copy.bytes);
      if (copy.from_memory > 0) std::memcpy(to, copy.src, copy.from_memory);
    }
    f.copies.pop_front();
  }
}

void start_product(const Product& product, float* d, const uint32_t* a) {
  struct OfLane {
    float* d;
    const uint32_t* a;
    uint64_t a_descriptor, b_descriptor;
  };
  touch();
  exchange<OfLane>("wgmma", {d, a, product.a, product.b}, kAllLanes, [&](const Lanes<OfLane>& lanes) {
    std::array<float*, kWarp> of_lanes;
    std::array<const uint32_t*, kWarp> a_of_lanes;
    for (int i = 0; i < kWarp; ++i) {
      const OfLane x = lanes[i];
      if (x.a_descriptor != product.a || x.b_descriptor != product.b) fail("wgmma with other operands in other lanes");
      of_lanes[i] = x.d, a_of_lanes[i] = x.a;
    }
    block->start(block->warp(), warp_index(), product, of_lanes, a_of_lanes);
  });
}
void product_fence() {
  exchange<int>("wgmma.fence", 0, kAllLanes, [](const Lanes<int>&) { block->warp().is_fenced = true; });
}
void product_commit() {
  exchange<int>("wgmma.commit_group", 0, kAllLanes, [](const Lanes<int>&) {
    Warp& warp = block->warp();
    warp.groups.push_back(std::move(warp.open_group));
    warp.open_group.clear();
  });
}
void product_wait(int pending) {
  touch();
  exchange<int>("wgmma.wait_group", pending, kAllLanes, [&](const Lanes<int>&) {
    Warp& warp = block->warp();
    while (static_cast<int>(warp.groups.size()) > pending) {
      block->retire(warp, warp_index(), warp.groups.front());
      warp.groups.pop_front();
    }
    warp.is_fenced = false;
  });
}

void set_registers(int registers, bool more) {
  exchange<int>("setmaxnreg", registers, kAllLanes, [&](const Lanes<int>&) {
    Warp& warp = block->warp();
    if (more && registers < warp.registers && block->free_registers >= 0) block->share_registers();
    if (registers % 8 != 0 || registers < 24 || registers > 256 || (registers < warp.registers) == more) {
      fail("setmaxnreg from " + std::to_string(warp.registers) + " to " + std::to_string(registers));
    }
    if (!more) {
      block->free_registers += warp.registers - registers;
      warp.registers = registers;
      block->wake_all([](const Fiber& f) { return f.waits == Waits::kRegisters; });
    }
  });
  if (!more) return;
  for (;;) {
    Warp& warp = block->warp();
    if (warp.registers == registers) break;  // another lane has taken them
    if (block->free_registers >= registers - warp.registers) {
      block->free_registers -= registers - warp.registers;
      warp.registers = registers;
      break;
    }
    block->wait(Waits::kRegisters);
  }
}

float bf16_to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
float fp16_to_float(uint16_t x) {
  static const std::vector<float> table = [] {
    std::vector<float> values(65536);
    for (int i = 0; i < 65536; ++i) {
      const __half_raw raw{static_cast<unsigned short>(i)};
      values[i] = __half2float(__half(raw));
    }
    return values;
  }();
  return table[x];
}

}  // namespace emulator
