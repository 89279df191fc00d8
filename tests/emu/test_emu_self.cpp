// Tests of the emulation itself: what its functions return, and that each mistake it promises to
// find ends the process.
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_emu.h"

namespace {

int failures = 0;

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                         \
    }                                                                     \
  } while (0)

constexpr emu::Order kOrders[] = {emu::Order::kForward, emu::Order::kReverse,
                                  emu::Order::kShuffled};
constexpr unsigned kAll = 0xffffffffu;

// Runs `act` in a child process, which must be ended by a message that contains `expected`.
template <typename Act>
void check_dies(const char* expected, const Act& act) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    act();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, size_t(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const bool died = !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  if (!died || text.find(expected) == std::string::npos) {
    std::printf("expected the process to die with '%s', status %d, got: %s\n", expected, status,
                text.c_str());
    ++failures;
  }
}

// ---- Shuffles and votes
// -----------------------------------------------------------------------------------

template <typename T>
void shuffles(int* mismatches, int width, int amount) {
  const int lane = int(threadIdx.x & 31), first = lane / width * width, last = first + width - 1;
  const auto value = [](int of) { return T(of * 3 + 1); };
  const T mine = value(lane);
  const int up = lane - amount < first ? lane : lane - amount;
  const int down = lane + amount > last ? lane : lane + amount;
  const int other = (lane ^ amount) > last ? lane : lane ^ amount;
  int wrong = 0;
  wrong += __shfl_sync(kAll, mine, amount, width) != value(first + amount % width);
  wrong += __shfl_up_sync(kAll, mine, unsigned(amount), width) != value(up);
  wrong += __shfl_down_sync(kAll, mine, unsigned(amount), width) != value(down);
  wrong += __shfl_xor_sync(kAll, mine, amount, width) != value(other);
  atomicAdd(mismatches, wrong);
}

void test_shuffles() {
  for (int width = 1; width <= 32; width *= 2) {
    for (int amount = 0; amount < 32; ++amount) {
      int mismatches = 0;
      emu::launch(shuffles<float>, dim3(1), dim3(64), &mismatches, width, amount);
      emu::launch(shuffles<double>, dim3(1), dim3(64), &mismatches, width, amount);
      emu::launch(shuffles<int64_t>, dim3(1), dim3(64), &mismatches, width, amount);
      emu::launch(shuffles<__half>, dim3(1), dim3(64), &mismatches, width, amount);
      CHECK(mismatches == 0);
    }
  }
}

void votes(int* mismatches) {
  const int lane = int(threadIdx.x & 31);
  int wrong = 0;
  wrong += __ballot_sync(kAll, lane % 3 == 0) != 0x49249249u;
  wrong += __any_sync(kAll, lane == 31) != 1;
  wrong += __any_sync(kAll, 0) != 0;
  wrong += __all_sync(kAll, 1) != 1;
  wrong += __all_sync(kAll, lane != 7) != 0;
  wrong += __match_any_sync(kAll, lane & 1) != (lane & 1 ? 0xaaaaaaaau : 0x55555555u);
  wrong += __reduce_add_sync(kAll, lane) != 496;
  wrong += __reduce_add_sync(kAll, -lane) != -496;
  wrong += __reduce_min_sync(kAll, -lane) != -31;
  wrong += __reduce_max_sync(kAll, unsigned(lane)) != 31u;
  wrong += __reduce_or_sync(kAll, 1u << lane) != kAll;
  // The two halves of a warp go their own ways, with different numbers of calls.
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  for (int i = 0; i < (lane < 16 ? 1 : 5); ++i) {
    wrong += __ballot_sync(half, 1) != half;
    wrong += __shfl_xor_sync(half, lane, 8) != (lane ^ 8);
  }
  __syncwarp();
  atomicAdd(mismatches, wrong);
}

void test_votes() {
  int mismatches = 0;
  emu::launch(votes, dim3(3), dim3(96), &mismatches);
  CHECK(mismatches == 0);
}

// ---- Blocks
// -----------------------------------------------------------------------------------------------

void block_sum(const float* in, float* out) {
  GSP_DYNAMIC_SHARED(float, partial);
  __shared__ int arrived;
  if (threadIdx.x == 0) arrived = 0;
  if (!(partial[threadIdx.x] != partial[threadIdx.x])) __trap();  // starts as NaN in every block
  __syncthreads();
  partial[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&arrived, 1);
  for (unsigned n = blockDim.x / 2; n; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) partial[threadIdx.x] += partial[threadIdx.x + n];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = arrived == int(blockDim.x) ? partial[0] : NAN;
}

void block_votes(int* mismatches) {
  const int thread = int(threadIdx.x);
  int wrong = 0;
  wrong += __syncthreads_count(thread % 3 == 0) != 32;
  wrong += __syncthreads_or(thread == 95) != 1;
  wrong += __syncthreads_or(0) != 0;
  wrong += __syncthreads_and(1) != 1;
  wrong += __syncthreads_and(thread != 95) != 0;
  atomicAdd(mismatches, wrong);
}

void early_exit(int* out) {
  if (threadIdx.x >= 32) return;  // barriers count the threads that are left
  __syncthreads();
  out[threadIdx.x] = 1;
}

void indices(int* seen) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  seen[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

void unordered(int* last) { *last = int(threadIdx.x); }

void test_blocks() {
  std::vector<float> in(4 * 128), out(4);
  for (size_t i = 0; i < in.size(); ++i) in[i] = float(i % 128);
  for (const auto order : kOrders) {
    emu::order = order;
    emu::launch(block_sum, dim3(4), dim3(128), emu::SharedBytes{128 * sizeof(float)},
                static_cast<const float*>(in.data()), out.data());
    for (const float sum : out) CHECK(sum == 127 * 64);
    int mismatches = 0;
    emu::launch(block_votes, dim3(2), dim3(96), &mismatches);
    CHECK(mismatches == 0);
    std::vector<int> flags(32);
    emu::launch(early_exit, dim3(1), dim3(80), flags.data());
    CHECK(std::count(flags.begin(), flags.end(), 1) == 32);
    std::vector<int> seen(2 * 3 * 4 * 5 * 6 * 7);
    emu::launch(indices, dim3(2, 3, 4), dim3(5, 6, 7), seen.data());
    CHECK(std::count(seen.begin(), seen.end(), 1) == int(seen.size()));
  }
  int forward = -1, reverse = -1;
  emu::order = emu::Order::kForward;
  emu::launch(unordered, dim3(1), dim3(64), &forward);
  emu::order = emu::Order::kReverse;
  emu::launch(unordered, dim3(1), dim3(64), &reverse);
  CHECK(forward == 63 && reverse == 0);
  emu::order = emu::Order::kForward;
}

void atomics(int* sum, float* total, unsigned* most, int* least, unsigned long long* wide) {
  atomicAdd(sum, 2);
  atomicAdd(total, 0.5f);
  atomicMax(most, threadIdx.x);
  atomicMin(least, -int(threadIdx.x));
  atomicAdd(wide, 1ull << 33);
}

void test_atomics() {
  int sum = 0, least = 0;
  float total = 0;
  unsigned most = 0;
  unsigned long long wide = 0;
  emu::launch(atomics, dim3(2), dim3(64), &sum, &total, &most, &least, &wide);
  CHECK(sum == 256 && total == 64 && most == 63 && least == -63 && wide == 128ull << 33);
}

// ---- Numbers
// ----------------------------------------------------------------------------------------------

uint16_t bfloat16_by_hand(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = emu::bit_cast<uint32_t>(value);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void test_numbers() {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const __half h = __ushort_as_half(uint16_t(bits));
    const __nv_bfloat16 b = __ushort_as_bfloat16(uint16_t(bits));
    const float wide = __bfloat162float(b);
    if (wide == wide) {
      CHECK(emu::bit_cast<uint32_t>(wide) == bits << 16);
      CHECK(__bfloat16_as_ushort(__float2bfloat16(wide)) == bits);
    }
    const float value = __half2float(h);
    if (value == value) CHECK(__half_as_ushort(__float2half(value)) == bits);
#ifdef __FLT16_MANT_DIG__
    if (value == value) CHECK(value == float(emu::bit_cast<_Float16>(uint16_t(bits))));
#endif
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    uint32_t bits = uint32_t(random());
    if (i % 4 == 1)
      bits = (bits & 0x80001fffu) | (100 + bits / 8192 % 50) << 23;  // near half's range
    if (i % 4 == 2) bits &= 0xfffff000u;                             // exact ties
    const float value = emu::bit_cast<float>(bits);
    CHECK(__bfloat16_as_ushort(__float2bfloat16(value)) == bfloat16_by_hand(value));
#ifdef __FLT16_MANT_DIG__
    if (value == value) {
      CHECK(__half_as_ushort(__float2half(value)) == emu::bit_cast<uint16_t>(_Float16(value)));
    }
#endif
  }
  const __half2 two = __floats2half2_rn(1.5f, -2.0f);
  CHECK(__half22float2(two).x == 1.5f && __high2float(two) == -2.0f);
  CHECK(__bfloat1622float2(__floats2bfloat162_rn(3.0f, 4.0f)).y == 4.0f);
  CHECK(__half_as_ushort(__float2half(NAN)) == 0x7fff);
  CHECK(__half2float(__float2half(65520.0f)) == INFINITY);
  CHECK(max(NAN, 1.0f) == 1.0f && min(2, 1) == 1 && __clz(1) == 31 && __ffs(8) == 4);
  CHECK(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(int2) == 8 &&
        alignof(uchar4) == 4);
}

// ---- Mistakes that must be found
// ----------------------------------------------------------------------------

// The classic: lanes past the end leave before a shuffle over the whole warp.
void leaves_early(float* out, int n) {
  const int i = int(threadIdx.x);
  if (i >= n) return;
  float sum = 1;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  out[i] = sum;
}
void leaves_mask() { __syncwarp(threadIdx.x == 3 ? 0xfffffff7u : kAll); }
void reads_outside() {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 20);
}
void mixes_functions() {
  if (threadIdx.x % 2) {
    __syncwarp();
  } else {
    __ballot_sync(kAll, 1);
  }
}
void mixes_barriers() {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
void mixes_votes() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads_or(1);
  }
}
void partial_warp() { __ballot_sync(kAll, 1); }
#ifdef GSP_EMU_ASAN
void overruns(float* out) { out[threadIdx.x] = 1; }
void overruns_shared() {
  GSP_DYNAMIC_SHARED(int, space);
  space[threadIdx.x] = 1;
}
void misaligned(float* out) { *reinterpret_cast<float4*>(out + 1) = make_float4(1, 2, 3, 4); }
[[gnu::noinline]] int deep(int n) {
  volatile char space[1024];
  space[0] = char(n);
  return n ? deep(n - 1) + space[0] : 0;
}
void overflows_stack(int* out) { *out = deep(100000); }
#endif

void test_mistakes() {
  std::vector<float> out(32);
  for (const auto order : kOrders) {
    emu::order = order;
    check_dies("has exited", [&] { emu::launch(leaves_early, dim3(1), dim3(32), out.data(), 20); });
    check_dies("is not in its own mask", [] { emu::launch(leaves_mask, dim3(1), dim3(32)); });
    check_dies("reads lane 20", [] { emu::launch(reads_outside, dim3(1), dim3(32)); });
    check_dies("different functions", [] { emu::launch(mixes_functions, dim3(1), dim3(32)); });
    check_dies("different barriers", [] { emu::launch(mixes_votes, dim3(1), dim3(64)); });
    check_dies("deadlock", [] { emu::launch(mixes_barriers, dim3(1), dim3(64)); });
    check_dies("has exited", [] { emu::launch(partial_warp, dim3(1), dim3(40)); });
  }
  emu::order = emu::Order::kForward;
  check_dies("launch", [] { emu::launch(partial_warp, dim3(1), dim3(2048)); });
  check_dies("launch", [] { emu::launch(partial_warp, dim3(0), dim3(32)); });
  check_dies("launch", [] { emu::launch(partial_warp, dim3(1, 65536), dim3(32)); });
#ifdef GSP_EMU_ASAN
  check_dies("heap-buffer-overflow", [&] { emu::launch(overruns, dim3(1), dim3(33), out.data()); });
  check_dies("heap-buffer-overflow", [] {
    emu::launch(overruns_shared, dim3(1), dim3(33), emu::SharedBytes{32 * sizeof(int)});
  });
  check_dies("misaligned address", [&] { emu::launch(misaligned, dim3(1), dim3(1), out.data()); });
  check_dies("stack", [] {
    int result = 0;
    emu::launch(overflows_stack, dim3(1), dim3(1), &result);
  });
#endif
}

}  // namespace

int main() {
  test_shuffles();
  test_votes();
  test_blocks();
  test_atomics();
  test_numbers();
  test_mistakes();
  if (failures) std::printf("%d checks failed\n", failures);
  return failures != 0;
}
