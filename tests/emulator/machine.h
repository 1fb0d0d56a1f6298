// A block of a Hopper multiprocessor on the CPU: what its threads see of each other and of what runs beside them.
//
// Threads of a block are fibers of one thread of the operating system; blocks of a grid are such threads. A fiber runs until it waits
// for another one (a barrier, a warp's collective) or for nothing (touch), so that a schedule is a number: Schedule says in which
// order what can run does, and when what is asynchronous happens. Whatever is undefined on the device is an error here, or poison
// (NaN): what copies are still to bring, accumulators of products in flight, shared memory that nobody wrote. So are accesses to shared
// memory that no barrier orders, even where a schedule happens to order them (Progress in machine.cpp). Accesses by C++ pointers are
// not seen.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

namespace emulator {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Which warp runs, of those that can, and when copies and products are done: at once, at some time, as late as possible.
struct Schedule {
  enum class Warps { kInTurn, kFirst, kLast, kRandom };
  enum class Asynchronous { kAtOnce, kAtRandom, kLate };
  Warps warps;
  Asynchronous asynchronous;
  uint64_t seed;

  // 0: everything in order and at once. 1, 2: the first, or the last, warp that can run, everything else late. Others: at random.
  static Schedule of(uint64_t number);
};

// Of the calls from here on. resident: blocks of a grid that run side by side; the others follow when these end.
void configure(uint64_t schedule, int resident);

// Ends the block with an error; it is thrown where the kernel was launched.
[[noreturn]] void fail(const std::string& message);

struct Launch {
  std::string name;
  dim3 grid;
  int threads;
  int shared_bytes;
};
void run(const Launch& launch, const std::function<void()>& kernel);

// ---- the thread that runs

const uint3& thread_index();
const uint3& block_index();
const dim3& block_size();
const dim3& grid_size();

// Others may run here.
void touch();
// Nothing that this thread waits for will come before others ran.
void spin();
int64_t clock();

// ---- shared memory, by its 32-bit addresses

uint32_t shared_address(const void* p);
// Bytes there, for ordinary loads.
const unsigned char* shared_to_read(uint32_t address, uint32_t bytes);
// For ordinary stores of this thread: until it executed fence.proxy.async, copies and products may not read them.
unsigned char* shared_to_write(uint32_t address, uint32_t bytes);
void fence_proxy_async();
// What this thread loaded may have gone into an mma.sync, which the assembler moves as it likes.
void use_in_mma();

template <class T>
T load_shared(uint32_t address) {
  if (address % sizeof(T) != 0) fail("a load of shared memory that is not aligned");
  touch();
  T x;
  std::memcpy(&x, shared_to_read(address, sizeof(T)), sizeof(T));
  return x;
}
template <class T>
void store_shared(uint32_t address, const T& x) {
  if (address % sizeof(T) != 0) fail("a store to shared memory that is not aligned");
  touch();
  std::memcpy(shared_to_write(address, sizeof(T)), &x, sizeof(T));
}

// ---- collectives

// What the lanes of a warp gave.
template <class T>
class Lanes {
 public:
  explicit Lanes(const unsigned char* data) : data_(data) {}
  T operator[](int lane) const {
    T x;
    std::memcpy(&x, data_ + lane * kStride, sizeof(T));
    return x;
  }
  static constexpr int kStride = 64;

 private:
  const unsigned char* data_;
};

int lane_index();
int warp_index();
using AllArrived = std::function<void(const unsigned char* of_lanes)>;
const unsigned char* exchange_bytes(const char* what, const void* value, size_t bytes, uint32_t mask, const AllArrived& all_arrived);

// Waits until all lanes of the mask came here, each with a value; all_arrived is called once, before any of them goes on.
template <class T>
Lanes<T> exchange(const char* what, const T& value, uint32_t mask = kAllLanes,
                  const std::function<void(const Lanes<T>&)>& all_arrived = nullptr) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= Lanes<T>::kStride);
  AllArrived call;
  if (all_arrived) call = [&](const unsigned char* data) { all_arrived(Lanes<T>(data)); };
  return Lanes<T>(exchange_bytes(what, &value, sizeof(T), mask, call));
}

// bar.sync and bar.arrive; 0 with 0 threads is __syncthreads, which sums up `value`.
int barrier_sync(int barrier, int threads, int value = 0);
void barrier_arrive(int barrier, int threads);

// ---- mbarrier

void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_arrive(uint32_t address, int arrivals);
void mbarrier_expect(uint32_t address, uint32_t bytes);
bool mbarrier_test(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);

// ---- copies

// What cuTensorMapEncodeTiled leaves in a CUtensorMap here.
struct TensorMap {
  static constexpr uint64_t kMagic = 0x46415354544d4150;
  uint64_t magic;
  unsigned char* base;
  uint64_t strides[3];  // bytes
  uint32_t extents[4];
  uint16_t box[4];
  uint16_t element_bytes, swizzle_bytes;
  bool is_bf16;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

struct Box {
  int at[4];  // column, token, head, batch
};

enum class Combine { kReplace, kAddFloat, kAdd16 };

void load_box(uint32_t dst, const CUtensorMap& map, uint32_t barrier, const Box& box);
void load_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier);
// Brings nothing, but fails where the instruction would.
void prefetch_bulk(const void* src, uint32_t bytes);
void store_box(const CUtensorMap& map, uint32_t src, const Box& box, Combine combine);
void store_bulk(void* dst, uint32_t src, uint32_t bytes, Combine combine);
void bulk_commit();
void bulk_wait(int pending, bool only_read);

// cp.async of one thread
void copy_async(uint32_t dst, const void* src, uint32_t bytes, uint32_t from_memory);
void copy_async_commit();
void copy_async_wait(int pending);

// ---- products of a warpgroup, a warp's rows of them each

struct Product {
  int n;               // columns
  bool is_bf16;        // else fp16
  bool accumulates;    // else D = A B
  bool a_in_registers;
  bool a_transposed, b_transposed;
  uint64_t a, b;       // descriptors
};
void start_product(const Product& product, float* d, const uint32_t* a_registers);
void product_fence();
void product_commit();
void product_wait(int pending);

// setmaxnreg
void set_registers(int registers, bool more);

float bf16_to_float(uint16_t x);
float fp16_to_float(uint16_t x);

}  // namespace emulator
