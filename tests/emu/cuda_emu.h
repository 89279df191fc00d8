// A CPU emulation of CUDA threads, good enough to run this project's kernels unmodified under g++
// with AddressSanitizer and UBSan, on machines without a GPU.
//
// HOW TO USE IT
//   #include "cuda_emu.h"
//   #include "cuda/some_kernel.cuh"      // no torch, no <<<>>>, no inline PTX
//   emu::launch(some_kernel<float>, dim3(grid), dim3(block), arg, arg);
//   emu::launch(some_kernel<float>, dim3(grid), dim3(block), emu::SharedBytes{n}, arg, arg);
// Compile with -I tests/emu -I tests/emu/include (stand-ins for <cuda_runtime.h>, <cuda_fp16.h>,
// <cuda_bf16.h>) -I cuda_src. tests/test_emu.py compiles and runs every tests/emu/test_*.cpp like
// that. Kernels take dynamic shared memory through GSP_DYNAMIC_SHARED(T, name), which
// cuda/device.cuh defines for nvcc.
// Give kernels buffers of the exact size (`std::vector<T> v(n)`, not one that grew): ASan cannot
// see an overrun into spare capacity.
//
// HOW IT WORKS
// Every CUDA thread is a fiber with its own stack; all run on one CPU thread, and blocks run one
// after another. A fiber runs until it meets a *_sync function or a barrier, and resumes when all
// the others that it waits for have come. `emu::order` says which ready fiber runs next: results
// that differ between kForward, kReverse and kShuffled mean that a kernel relies on an order that
// CUDA does not promise.
//
// WHAT IT FINDS, each ends the process with a message: reads and writes out of bounds and
// misaligned vector accesses (through the sanitizers); a mask that leaves the caller out, or names
// a lane that has exited; a shuffle that reads a lane outside the mask; lanes that meet at
// different *_sync functions; lanes and barriers that wait for each other forever; launches over
// CUDA's limits, of shared memory also those that were not raised; a stack that overflows. Dynamic
// shared memory starts as NaN in every block.
//
// WHAT IT DOES NOT FIND: races between lanes that no order shows, weak memory order, static
// __shared__ memory that is read before it is written, two blocks that depend on each other,
// registers, occupancy, speed. Not emulated: inline PTX, asynchronous copies, cooperative groups,
// tensor cores, textures. compute-sanitizer on a GPU remains the real test.
#pragma once

#include <math.h>  // device code says isnan() and the like without std::
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define GSP_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GSP_EMU_ASAN 1
#endif
#endif
#ifdef GSP_EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// ---- Language
// ---------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
#define GSP_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(emu::dynamic_shared())

constexpr int warpSize = 32;

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// ---- Vector types: aligned as in CUDA, so that UBSan reports a misaligned access
// ----------------------------

#define GSP_EMU_VECTOR2(T, name)       \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
  };                                   \
  inline name make_##name(T x, T y) { return {x, y}; }
#define GSP_EMU_VECTOR4(T, name)                             \
  struct alignas(std::min<size_t>(16, 4 * sizeof(T))) name { \
    T x, y, z, w;                                            \
  };                                                         \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
GSP_EMU_VECTOR2(char, char2)
GSP_EMU_VECTOR2(unsigned char, uchar2)
GSP_EMU_VECTOR2(short, short2)
GSP_EMU_VECTOR2(unsigned short, ushort2)
GSP_EMU_VECTOR2(int, int2)
GSP_EMU_VECTOR2(unsigned, uint2)
GSP_EMU_VECTOR2(float, float2)
GSP_EMU_VECTOR2(double, double2)
GSP_EMU_VECTOR2(long long, longlong2)
GSP_EMU_VECTOR2(unsigned long long, ulonglong2)
GSP_EMU_VECTOR4(char, char4)
GSP_EMU_VECTOR4(unsigned char, uchar4)
GSP_EMU_VECTOR4(short, short4)
GSP_EMU_VECTOR4(unsigned short, ushort4)
GSP_EMU_VECTOR4(int, int4)
GSP_EMU_VECTOR4(unsigned, uint4)
GSP_EMU_VECTOR4(float, float4)
GSP_EMU_VECTOR4(double, double4)
#undef GSP_EMU_VECTOR2
#undef GSP_EMU_VECTOR4

// ---- Fibers and their scheduler
// ---------------------------------------------------------------------------

namespace emu {

enum class Order { kForward, kReverse, kShuffled };
inline Order order = Order::kForward;
inline std::minstd_rand shuffle_seed{
    1};  // of kShuffled; assign to it to repeat or to vary an order

struct SharedBytes {
  size_t count;
};

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPageBytes = 4096;
constexpr size_t kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kFreeSharedBytes = 48 << 10;  // more has to be asked for, kernel by kernel

[[noreturn, gnu::format(printf, 1, 2)]] inline void die(const char* format, ...) {
  std::fprintf(stderr, "cuda_emu: ");
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::fprintf(stderr, "\n");
  std::abort();
}

// One execution context that can be left and entered again.
class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    if (mapping_) munmap(mapping_, kPageBytes + kStackBytes);
  }

  // Makes the next entry start `entry` on an empty stack.
  void reset(void (*entry)()) {
    if (!mapping_) {
      mapping_ = static_cast<char*>(mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (mapping_ == MAP_FAILED) die("no memory for the stack of a thread");
      mprotect(mapping_, kPageBytes, PROT_NONE);  // an overflow faults instead of running on
      bottom_ = mapping_ + kPageBytes;
      size_ = kStackBytes;
    }
#ifdef __x86_64__
    char* const end = mapping_ + kPageBytes + kStackBytes;
#ifdef GSP_EMU_ASAN
    // The frames that were live when the last thread exited here have left their red zones behind.
    if (char* live = static_cast<char*>(stack_pointer_)) {
      __asan_unpoison_memory_region(live, size_t(end - live));
    }
#endif
    void** top = reinterpret_cast<void**>(end);
    *--top =
        nullptr;  // where `entry` would return to; also leaves the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&state_);
    state_.uc_stack.ss_sp = mapping_ + kPageBytes;
    state_.uc_stack.ss_size = kStackBytes;
    state_.uc_link = nullptr;
    makecontext(&state_, entry, 0);
#endif
  }

  // Leaves this context for `next`; returns when something switches back. `last`: nothing ever
  // will.
  void switch_to(Context& next, bool last = false) {
    came_from_ = this;
#ifdef GSP_EMU_ASAN
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, next.bottom_, next.size_);
#endif
#ifdef __x86_64__
    swap_stacks(&stack_pointer_, next.stack_pointer_);
#else
    swapcontext(&state_, &next.state_);
#endif
#ifdef GSP_EMU_ASAN
    arrived(fake_stack);
#endif
    (void)last;
  }

  // To be called first thing on a fresh stack.
  static void arrived([[maybe_unused]] void* fake_stack = nullptr) {
#ifdef GSP_EMU_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, &came_from_->bottom_, &came_from_->size_);
#endif
  }

 private:
#ifdef __x86_64__
  // swapcontext() makes a system call each time; this saves what the ABI says a call preserves, and
  // no more.
  [[gnu::naked, gnu::noinline]] static void swap_stacks(void**, void*) {
    asm volatile(
        "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15;"
        "movq %rsp, (%rdi); movq %rsi, %rsp;"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
  }
  void* stack_pointer_ = nullptr;
#else
  ucontext_t state_;
#endif
  char* mapping_ = nullptr;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  static inline Context* came_from_ = nullptr;
};

// What a lane gets from a *_sync function, given what every lane of the warp brought.
using Combine = uint64_t (*)(const uint64_t* brought, unsigned mask, int source);

struct Thread {
  enum State { kReady, kAtWarp, kAtBlock, kExited };
  Context context;
  State state = kExited;
  uint3 index{};
  const char* function = "";  // the one it waits in
  Combine combine = nullptr;
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0;  // brought, then received
};

class Block {
  struct Warp {
    unsigned waiting = 0,
             exited = 0;  // a bit for each lane; lanes past the end of the block count as exited
  };

 public:
  template <typename Body>
  void run(dim3 block, size_t shared_bytes, const Body& body) {
    body_ = body;
    count_ = int(block.x * block.y * block.z);
    while (int(threads_.size()) < count_) threads_.push_back(std::make_unique<Thread>());
    shared_ = static_cast<unsigned char*>(::operator new(shared_bytes, std::align_val_t(16)));
    std::memset(shared_, 0xff, shared_bytes);
    alive_ = count_;
    at_barrier_ = 0;
    ready_.clear();
    warps_.assign(size_t(count_ + 31) / 32, Warp{});
    if (count_ % 32) warps_.back().exited = 0xffffffffu << count_ % 32;
    for (int i = 0; i < count_; ++i) {
      Thread& t = *threads_[i];
      t.index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
      t.context.reset(&enter);
      make_ready(i);
    }
    current_ = take_ready();
    threadIdx = threads_[current_]->index;
    outside_.switch_to(threads_[current_]->context);
    ::operator delete(shared_, std::align_val_t(16));
    current_ = -1;
  }

  void* shared() const { return shared_; }

  // Brings `value`, waits for every lane of `mask`, and returns what `combine` makes of it for this
  // lane. All lanes of the mask must come with the same function and mask; `source` is the lane a
  // shuffle reads.
  uint64_t warp_wait(const char* function, unsigned mask, uint64_t value, int source,
                     Combine combine) {
    Thread& me = *threads_[current_];
    const int lane = current_ & 31, first = current_ & ~31;
    if (!(mask >> lane & 1)) die("%s: lane %d is not in its own mask %08x", function, lane, mask);
    if (source >= 0 && !(mask >> source & 1)) {
      die("%s: lane %d reads lane %d, which mask %08x leaves out", function, lane, source, mask);
    }
    me.function = function;
    me.mask = mask;
    me.value = value;
    me.source = source;
    me.combine = combine;
    me.state = Thread::kAtWarp;
    Warp& warp = warps_[current_ / 32];
    if (const unsigned gone = mask & warp.exited) {
      die("%s: mask %08x of lane %d names lane %d, which has exited", function, mask, lane,
          __builtin_ctz(gone));
    }
    warp.waiting |= 1u << lane;
    if ((warp.waiting & mask) == mask) release_warp(warp, first, mask);
    leave();
    return me.value;
  }

  struct Votes {
    int yes, all;
  };

  // Waits for every thread of the block that has not exited; returns how they voted.
  Votes barrier(const char* function, bool vote) {
    Thread& me = *threads_[current_];
    me.function = function;
    me.value = vote;
    me.state = Thread::kAtBlock;
    ++at_barrier_;
    release_barrier();
    leave();
    return votes_;
  }

 private:
  static void enter();

  void exit_thread() {
    Thread& me = *threads_[current_];
    me.state = Thread::kExited;
    --alive_;
    const int lane = current_ & 31, first = current_ & ~31;
    Warp& warp = warps_[current_ / 32];
    warp.exited |= 1u << lane;
    for (unsigned left = warp.waiting; left; left &= left - 1) {
      const int i = __builtin_ctz(left);
      const Thread& other = *threads_[first + i];
      if (other.mask >> lane & 1) {
        die("%s: mask %08x of lane %d names lane %d, which has exited", other.function, other.mask,
            i, lane);
      }
    }
    release_barrier();
    if (alive_ == 0) {
      me.context.switch_to(outside_, true);
    } else {
      leave(true);
    }
    die("a thread that has exited was resumed");
  }

  // All lanes of `mask` are waiting: if for the same thing, gives each its result.
  void release_warp(Warp& warp, int first, unsigned mask) {
    uint64_t brought[32] = {};
    const Thread& mine = *threads_[current_];
    for (unsigned left = mask; left; left &= left - 1) {
      const int i = __builtin_ctz(left);
      const Thread& other = *threads_[first + i];
      brought[i] = other.value;
      if (std::strcmp(other.function, mine.function) != 0 || other.mask != mask) {
        die("lanes %d and %d of a warp meet at different functions or masks: %s %08x, %s %08x",
            current_ - first, i, mine.function, mask, other.function, other.mask);
      }
    }
    warp.waiting &= ~mask;
    for (unsigned left = mask; left; left &= left - 1) {
      const int i = __builtin_ctz(left);
      Thread& other = *threads_[first + i];
      other.value = other.combine(brought, mask, other.source);
      make_ready(first + i);
    }
  }

  void release_barrier() {
    if (at_barrier_ == 0 || at_barrier_ < alive_) return;
    votes_ = {0, at_barrier_};
    at_barrier_ = 0;
    const char* function = nullptr;
    for (int i = 0; i < count_; ++i) {
      const Thread& t = *threads_[i];
      if (t.state != Thread::kAtBlock) continue;
      if (function && std::strcmp(t.function, function) != 0) {
        die("threads of a block meet at different barriers: %s, %s", function, t.function);
      }
      function = t.function;
      votes_.yes += int(t.value);
      make_ready(i);
    }
  }

  void make_ready(int i) {
    threads_[i]->state = Thread::kReady;
    ready_.push_back(i);
  }

  int take_ready() {
    if (ready_.empty()) {
      for (int i = 0; i < count_; ++i) {
        const Thread& t = *threads_[i];
        if (t.state == Thread::kExited) continue;
        std::fprintf(stderr, "cuda_emu: thread %d waits in %s", i, t.function);
        if (t.state == Thread::kAtWarp) std::fprintf(stderr, ", mask %08x", t.mask);
        std::fprintf(stderr, "\n");
      }
      die("deadlock in block (%u, %u, %u): the threads above wait for each other", blockIdx.x,
          blockIdx.y, blockIdx.z);
    }
    if (order == Order::kShuffled) std::swap(ready_.back(), ready_[shuffle_seed() % ready_.size()]);
    const int next = order == Order::kForward ? ready_.front() : ready_.back();
    order == Order::kForward ? ready_.pop_front() : ready_.pop_back();
    return next;
  }

  void leave(bool last = false) {
    const int from = current_, to = take_ready();
    if (from == to) return;
    current_ = to;
    threadIdx = threads_[to]->index;
    threads_[from]->context.switch_to(threads_[to]->context, last);
  }

  std::vector<std::unique_ptr<Thread>> threads_;  // kept from block to block for their stacks
  std::vector<Warp> warps_;
  std::deque<int> ready_;
  std::function<void()> body_;
  Context outside_;
  Votes votes_{};  // of the last barrier: the next one needs every thread, so all have read them by
                   // then
  unsigned char* shared_ = nullptr;
  int count_ = 0, alive_ = 0, at_barrier_ = 0, current_ = -1;
};

inline Block block;

inline void Block::enter() {
  Context::arrived();
  block.body_();
  block.exit_thread();
}

inline void* dynamic_shared() { return block.shared(); }

inline std::map<const void*, size_t> granted;  // bytes of shared memory that kernels asked for

// Runs `kernel` for every thread of every block, like kernel<<<grid, threads, shared>>>(args...).
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 threads, SharedBytes shared, Args... args) {
  const size_t count = size_t(threads.x) * threads.y * threads.z;
  if (count == 0 || count > kMaxThreads || threads.z > 64)
    die("launch: %zu threads a block", count);
  if (size_t(grid.x) * grid.y * grid.z == 0) die("launch: an empty grid");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    die("launch: the grid is too large");
  if (shared.count > kMaxSharedBytes) die("launch: %zu bytes of shared memory", shared.count);
  if (shared.count > std::max(kFreeSharedBytes, granted[reinterpret_cast<const void*>(kernel)]))
    die("launch: %zu bytes of shared memory, which were not asked for", shared.count);
  gridDim = grid;
  blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        block.run(threads, shared.count, [&] { kernel(args...); });
      }
    }
  }
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 threads, Args... args) {
  launch(kernel, grid, threads, SharedBytes{0}, args...);
}

template <typename To, typename From>
To bit_cast(const From& from) {
  static_assert(std::is_trivially_copyable_v<From> && std::is_trivially_copyable_v<To>);
  To to{};
  std::memcpy(static_cast<void*>(&to), &from, std::min(sizeof(To), sizeof(From)));
  return to;
}

template <typename T>
T shuffle(const char* function, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  return bit_cast<T>(
      block.warp_wait(function, mask, bit_cast<uint64_t>(value), source,
                      [](const uint64_t* brought, unsigned, int from) { return brought[from]; }));
}

inline int lane() {
  const unsigned linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return int(linear & 31);
}

inline void check_width(const char* function, int width) {
  if (width < 1 || width > 32 || (width & (width - 1))) die("%s: width %d", function, width);
}

template <typename T>
T reduce(const char* function, unsigned mask, T value, Combine combine) {
  return T(block.warp_wait(function, mask, uint64_t(value), -1, combine));
}

}  // namespace emu

// ---- Warp and block functions
// ------------------------------------------------------------------------------

inline void __syncthreads() { emu::block.barrier(__func__, false); }
inline int __syncthreads_count(int predicate) {
  return emu::block.barrier(__func__, predicate != 0).yes;
}
inline int __syncthreads_or(int predicate) {
  return emu::block.barrier(__func__, predicate != 0).yes != 0;
}
inline int __syncthreads_and(int predicate) {
  const auto votes = emu::block.barrier(__func__, predicate != 0);
  return votes.yes == votes.all;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu::block.warp_wait("__syncwarp", mask, 0, -1,
                       [](const uint64_t*, unsigned, int) -> uint64_t { return 0; });
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  emu::check_width(__func__, width);
  return emu::shuffle(__func__, mask, value, (emu::lane() & -width) | (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  emu::check_width(__func__, width);
  const int lane = emu::lane(), first = lane & -width;
  const bool inside = delta <= unsigned(lane - first);
  return emu::shuffle(__func__, mask, value, inside ? lane - int(delta) : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  emu::check_width(__func__, width);
  const int lane = emu::lane(), last = lane | (width - 1);
  const bool inside = delta <= unsigned(last - lane);
  return emu::shuffle(__func__, mask, value, inside ? lane + int(delta) : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  emu::check_width(__func__, width);
  const int lane = emu::lane(), source = lane ^ lane_mask;
  const bool inside = source >= 0 && source <= (lane | (width - 1));
  return emu::shuffle(__func__, mask, value, inside ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emu::reduce<unsigned>(__func__, mask, predicate != 0,
                               [](const uint64_t* brought, unsigned named, int) {
                                 uint64_t votes = 0;
                                 for (int i = 0; i < 32; ++i)
                                   votes |= uint64_t(named >> i & brought[i] & 1) << i;
                                 return votes;
                               });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    same |= unsigned(emu::bit_cast<uint64_t>(emu::shuffle(__func__, mask, value, i)) ==
                     emu::bit_cast<uint64_t>(value))
            << i;
  }
  return same;
}

#define GSP_EMU_REDUCE(name, T, expression)                                                      \
  inline T name(unsigned mask, T value) {                                                        \
    return emu::reduce<T>(#name, mask, value, [](const uint64_t* brought, unsigned named, int) { \
      const int first = __builtin_ctz(named);                                                    \
      T a = T(brought[first]);                                                                   \
      for (int i = first + 1; i < 32; ++i) {                                                     \
        if (!(named >> i & 1)) continue;                                                         \
        const T b = T(brought[i]);                                                               \
        a = T(expression);                                                                       \
      }                                                                                          \
      return uint64_t(a);                                                                        \
    });                                                                                          \
  }
GSP_EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
GSP_EMU_REDUCE(__reduce_add_sync, int, unsigned(a) + unsigned(b))
GSP_EMU_REDUCE(__reduce_min_sync, unsigned, std::min(a, b))
GSP_EMU_REDUCE(__reduce_min_sync, int, std::min(a, b))
GSP_EMU_REDUCE(__reduce_max_sync, unsigned, std::max(a, b))
GSP_EMU_REDUCE(__reduce_max_sync, int, std::max(a, b))
GSP_EMU_REDUCE(__reduce_and_sync, unsigned, a& b)
GSP_EMU_REDUCE(__reduce_or_sync, unsigned, a | b)
GSP_EMU_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef GSP_EMU_REDUCE

inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { emu::die("__trap()"); }

// ---- Runtime: as much as launchers use. A launch has ended when it returns, and its mistakes end
// the process -----

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  emu::granted[reinterpret_cast<const void*>(kernel)] = size_t(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

// ---- Memory: a fiber is never interrupted, so a plain read-modify-write is atomic
// --------------------------

template <typename T>
T atomicExch(T* address, T value) {
  return std::exchange(*address, value);
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, T(*address + value));
}
template <typename T>
T atomicSub(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, T(*address - value));
}
template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, std::max(*address, value));
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, std::min(*address, value));
}
template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, T(*address | value));
}
template <typename T>
T atomicAnd(T* address, std::common_type_t<T> value) {
  return std::exchange(*address, T(*address & value));
}

#define GSP_EMU_LOAD(name)   \
  template <typename T>      \
  T name(const T* address) { \
    return *address;         \
  }
#define GSP_EMU_STORE(name)                                   \
  template <typename T>                                       \
  void name(T* address, const std::common_type_t<T>& value) { \
    *address = value;                                         \
  }
GSP_EMU_LOAD(__ldg)
GSP_EMU_LOAD(__ldca)
GSP_EMU_LOAD(__ldcg)
GSP_EMU_LOAD(__ldcs)
GSP_EMU_LOAD(__ldcv)
GSP_EMU_LOAD(__ldlu)
GSP_EMU_STORE(__stcg)
GSP_EMU_STORE(__stcs)
GSP_EMU_STORE(__stwb)
GSP_EMU_STORE(__stwt)
#undef GSP_EMU_LOAD
#undef GSP_EMU_STORE

// ---- Arithmetic
// ---------------------------------------------------------------------------------------------

#define GSP_EMU_MIN_MAX(T)                            \
  constexpr T min(T a, T b) { return a < b ? a : b; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
GSP_EMU_MIN_MAX(int)
GSP_EMU_MIN_MAX(unsigned)
GSP_EMU_MIN_MAX(long)
GSP_EMU_MIN_MAX(unsigned long)
GSP_EMU_MIN_MAX(long long)
GSP_EMU_MIN_MAX(unsigned long long)
#undef GSP_EMU_MIN_MAX
inline float min(float a, float b) {
  return std::fmin(a, b);
}  // of a number and NaN, CUDA takes the number
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
// volatile: like on the GPU, these must not be contracted into a fused multiply-add.
inline float __fadd_rn(float a, float b) {
  volatile float r = a + b;
  return r;
}
inline float __fsub_rn(float a, float b) {
  volatile float r = a - b;
  return r;
}
inline float __fmul_rn(float a, float b) {
  volatile float r = a * b;
  return r;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) {
  volatile double r = a + b;
  return r;
}
inline double __dsub_rn(double a, double b) {
  volatile double r = a - b;
  return r;
}
inline double __dmul_rn(double a, double b) {
  volatile double r = a * b;
  return r;
}
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline int __float_as_int(float v) { return emu::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return emu::bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return emu::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return emu::bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return emu::bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return emu::bit_cast<double>(v); }

// ---- half and bfloat16: storage and conversions, which is all that kernels accumulating in fp32
// use ----------

namespace emu {

// Rounds to nearest, ties to even, as the GPU does. kExponentBits of an IEEE format of 16 bits.
template <int kExponentBits>
struct Float16Bits {
  static constexpr int kMantissaBits = 15 - kExponentBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;

  static uint16_t from_float(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) return uint16_t(0x7fff);  // CUDA's one NaN
    const int drop = 23 - kMantissaBits;
    int exponent = int(magnitude >> 23) - 127 + kBias;
    uint64_t mantissa = (magnitude & 0x7fffffu) | (magnitude >> 23 ? 0x800000u : 0);
    if (magnitude >> 23 == 0)
      ++exponent;  // a subnormal float has the exponent of the smallest normal one
    int shift = drop;
    if (exponent < 1) {
      shift += 1 - exponent;
      exponent = 1;
    }
    if (shift > 40) return uint16_t(sign);
    const uint64_t half = uint64_t(1) << shift >> 1, low = mantissa & ((uint64_t(1) << shift) - 1);
    uint64_t kept = mantissa >> shift;
    if (low > half || (low == half && half != 0 && (kept & 1))) ++kept;
    // Adding the implicit bit to the exponent field carries subnormals, normals and overflow alike.
    const uint64_t result = (uint64_t(exponent - 1) << kMantissaBits) + kept;
    return uint16_t(sign | std::min<uint64_t>(result, kInfinity));
  }

  static float to_float(uint16_t bits) {
    const int exponent = bits >> kMantissaBits & ((1 << kExponentBits) - 1);
    const int mantissa = bits & ((1 << kMantissaBits) - 1);
    float value;
    if (exponent == (1 << kExponentBits) - 1) {
      value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
      value = std::ldexp(float(mantissa), 1 - kBias - kMantissaBits);
    } else {
      value = std::ldexp(float(mantissa | 1 << kMantissaBits), exponent - kBias - kMantissaBits);
    }
    return bits & 0x8000 ? -value : value;
  }
};

}  // namespace emu

#define GSP_EMU_FLOAT16(name, name2, pair, exponent_bits, tag, tag2)                   \
  struct name {                                                                        \
    uint16_t bits;                                                                     \
    name() = default;                                                                  \
    name(float value) : bits(emu::Float16Bits<exponent_bits>::from_float(value)) {}    \
    operator float() const { return emu::Float16Bits<exponent_bits>::to_float(bits); } \
  };                                                                                   \
  struct alignas(4) name2 {                                                            \
    name x, y;                                                                         \
  };                                                                                   \
  inline float __##tag##2float(name v) { return v; }                                   \
  inline name __float2##tag(float v) { return v; }                                     \
  inline name __float2##tag##_rn(float v) { return v; }                                \
  inline name2 __floats2##tag2##_rn(float x, float y) { return {name(x), name(y)}; }   \
  inline name2 __float22##tag2##_rn(float2 v) { return {name(v.x), name(v.y)}; }       \
  inline float2 __##tag2##2float2(name2 v) { return {float(v.x), float(v.y)}; }        \
  inline float __low2float(name2 v) { return v.x; }                                    \
  inline float __high2float(name2 v) { return v.y; }                                   \
  inline name2 pair(name x, name y) { return {x, y}; }                                 \
  inline unsigned short __##tag##_as_ushort(name v) { return v.bits; }                 \
  inline name __ushort_as_##tag(unsigned short v) { return emu::bit_cast<name>(v); }
GSP_EMU_FLOAT16(__half, __half2, __halves2half2, 5, half, half2)
GSP_EMU_FLOAT16(__nv_bfloat16, __nv_bfloat162, __halves2bfloat162, 8, bfloat16, bfloat162)
#undef GSP_EMU_FLOAT16
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
