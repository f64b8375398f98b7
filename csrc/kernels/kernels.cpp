// Chooses a SIMD level and walks tables of pieces: the kernels' part of the C ABI.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "cgx.h"
#include "levels.h"
#include "numerics.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// The arithmetic needs subnormal numbers and rounding to nearest; the calling thread may have been told otherwise
// (torch.set_flush_denormal). Restored on leaving.
class StrictArithmetic {
 public:
#if defined(__x86_64__)
  StrictArithmetic() : saved_(_mm_getcsr()) {
    if (saved_ & kUnwanted) _mm_setcsr(saved_ & ~kUnwanted);
  }
  ~StrictArithmetic() {
    if (saved_ & kUnwanted) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kUnwanted = 0x8000 | 0x0040 | 0x6000;  // flush to zero, denormals are zero, rounding mode
  unsigned saved_;
#elif defined(__aarch64__)
  StrictArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kUnwanted));
  }
  ~StrictArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  static constexpr uint64_t kUnwanted = 0x1C00000;
  uint64_t saved_;
#else
  StrictArithmetic() {}
#endif
};

const cgx_kernels* kernels_of(int simd) {
  if (!cgx_simd_available(simd)) return nullptr;
  switch (simd) {
#ifdef CGX_HAVE_AVX2
    case CGX_AVX2:
      return &cgx_avx2_kernels;
#endif
#ifdef CGX_HAVE_AVX512
    case CGX_AVX512:
      return &cgx_avx512_kernels;
#endif
#ifdef CGX_HAVE_NEON
    case CGX_NEON:
      return &cgx_neon_kernels;
#endif
    default:
      return &cgx_scalar_kernels;
  }
}

bool valid(const cgx_piece& piece, int dtype) {
  const bool quantizable = dtype != CGX_FLOAT64 && dtype != CGX_BYTES;
  switch (piece.kind) {
    case CGX_RAW:
      break;
    case CGX_MAXMIN:
      if (piece.bits < 1 || piece.bits > 8 || piece.block < 1 || !quantizable) return false;
      break;
    case CGX_ROTATED:
      if (piece.bits < 1 || piece.bits > 4 || rotated_numel(piece.block) != piece.block ||
          piece.block > kLargestRotation || !quantizable)
        return false;
      break;
    default:
      return false;
  }
  return piece.offset >= 0 && piece.numel >= 0 && piece.payload >= 0 && piece.raw_tail >= 0 &&
         piece.raw_tail <= piece.numel;
}

bool valid(int dtype, const cgx_piece* pieces, int64_t n_pieces) {
  if (dtype < 0 || dtype > CGX_BYTES) return false;
  for (int64_t i = 0; i < n_pieces; ++i)
    if (!valid(pieces[i], dtype)) return false;
  return true;
}

// A part of a piece for one thread.
struct Part {
  const cgx_piece* piece;
  Span span;
};

constexpr int64_t kPartNumel = 1 << 16;  // some ten microseconds, about what it takes to wake a helper

// Cuts that leave no byte of a payload to two parts.
int64_t part_numel(const cgx_piece& piece) {
  const int64_t unit = piece.kind == CGX_RAW ? 8 : std::lcm(piece.block, int64_t{8});
  return (kPartNumel + unit - 1) / unit * unit;
}

std::vector<Part> cut(const cgx_piece* pieces, int64_t n_pieces) {
  std::vector<Part> parts;
  for (const cgx_piece* piece = pieces; piece < pieces + n_pieces; ++piece) {
    const int64_t step = part_numel(*piece);
    for (int64_t first = 0; first < piece->numel; first += step)
      parts.push_back({piece, {first, std::min(piece->numel, first + step)}});
  }
  return parts;
}

int64_t total_numel(const cgx_piece* pieces, int64_t n_pieces) {
  int64_t total = 0;
  for (int64_t i = 0; i < n_pieces; ++i) total += pieces[i].numel;
  return total;
}

template <class Task>
struct Call {
  void (*kernel)(const Task&, const cgx_piece&, Span);
  const Task& task;
  std::vector<Part> parts;

  static void work(void* context, int64_t i) {
    const Call& call = *static_cast<const Call*>(context);
    const StrictArithmetic strict;
    call.kernel(call.task, *call.parts[static_cast<size_t>(i)].piece, call.parts[static_cast<size_t>(i)].span);
  }
};

template <class Task>
void run(void (*kernel)(const Task&, const cgx_piece&, Span), const Task& task, int threads, const cgx_piece* pieces,
         int64_t n_pieces) {
  if (threads > 1 && total_numel(pieces, n_pieces) >= 2 * kPartNumel) {
    Call<Task> call{kernel, task, cut(pieces, n_pieces)};
    cgx_parallel(threads, static_cast<int64_t>(call.parts.size()), Call<Task>::work, &call);
    return;
  }
  const StrictArithmetic strict;
  for (int64_t i = 0; i < n_pieces; ++i) kernel(task, pieces[i], {0, pieces[i].numel});
}

// Whether these can be summed up: bytes cannot.
bool summable(int dtype, const cgx_piece* pieces, int64_t n_pieces, int64_t n_payloads) {
  return dtype != CGX_BYTES && n_payloads >= 1 && valid(dtype, pieces, n_pieces);
}

void copy_in(const EncodeTask& task, const cgx_piece& piece, Span span) {
  std::memcpy(task.slot + piece.payload + span.first,
              static_cast<const uint8_t*>(task.values) + piece.offset + span.first,
              static_cast<size_t>(span.end - span.first));
  const int64_t padding = cgx_piece_payload_nbytes(&piece, CGX_BYTES) - piece.numel;
  if (span.end == piece.numel) std::memset(task.slot + piece.payload + piece.numel, 0, static_cast<size_t>(padding));
}

void copy_out(const DecodeTask& task, const cgx_piece& piece, Span span) {
  std::memcpy(static_cast<uint8_t*>(task.values) + piece.offset + span.first, task.slot + piece.payload + span.first,
              static_cast<size_t>(span.end - span.first));
}

// Decoding so much would push everything out of the caches: it goes past them.
constexpr int64_t kStreamNbytes = 16 << 20;

}  // namespace

float* cgx_scratch(int64_t numel) {
  thread_local std::vector<float> scratch;  // kept, because a call is often shorter than an allocation
  if (scratch.size() < static_cast<size_t>(numel)) scratch.resize(static_cast<size_t>(numel));
  return scratch.data();
}

int cgx_abi_version(void) { return CGX_ABI_VERSION; }

int cgx_simd_available(int simd) {
  switch (simd) {
    case CGX_SCALAR:
      return 1;
#ifdef CGX_HAVE_AVX2
    case CGX_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? 1 : 0;
#endif
#ifdef CGX_HAVE_AVX512
    case CGX_AVX512:
#ifdef CGX_TEST_ASSUME_AVX512  // a test that emulates the instructions
      return 1;
#else
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                 ? 1
                 : 0;
#endif
#endif
#ifdef CGX_HAVE_NEON
    case CGX_NEON:
      return 1;
#endif
    default:
      return 0;
  }
}

int cgx_best_simd(void) {
  for (const int simd : {CGX_AVX512, CGX_AVX2, CGX_NEON})
    if (cgx_simd_available(simd)) return simd;
  return CGX_SCALAR;
}

int64_t cgx_piece_payload_nbytes(const cgx_piece* piece, int dtype) {
  if (!valid(dtype, piece, 1)) return CGX_ERROR_ARGUMENT;
  return PieceParts(*piece, itemsize(dtype)).nbytes;
}

int cgx_encode(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, const void* values,
               uint8_t* payload, const cgx_rounding* rounding, float* residual) {
  const cgx_kernels* kernels = kernels_of(means->simd);
  if (!kernels || !valid(dtype, pieces, n_pieces)) return CGX_ERROR_ARGUMENT;
  const auto encode = dtype == CGX_BYTES ? copy_in : kernels->encode[dtype];
  run(encode, EncodeTask{values, payload, rounding, residual}, means->threads, pieces, n_pieces);
  return CGX_OK;
}

int cgx_decode(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, const uint8_t* payload,
               void* values, int add) {
  const cgx_kernels* kernels = kernels_of(means->simd);
  if (!kernels || !valid(dtype, pieces, n_pieces) || (add && dtype == CGX_BYTES)) return CGX_ERROR_ARGUMENT;
  const bool large = total_numel(pieces, n_pieces) * itemsize(dtype) >= kStreamNbytes;
  const Writing writing = add ? Writing::kAdd : large ? Writing::kStream : Writing::kStore;
  const auto decode = dtype == CGX_BYTES ? copy_out : kernels->decode[dtype];
  run(decode, DecodeTask{payload, values, writing}, means->threads, pieces, n_pieces);
  return CGX_OK;
}

int cgx_reduce(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, void* values,
               const uint8_t* const* payloads, int64_t n_payloads, double scale, uint8_t* out,
               const cgx_rounding* rounding, float* residual) {
  const cgx_kernels* kernels = kernels_of(means->simd);
  if (!kernels || !summable(dtype, pieces, n_pieces, n_payloads)) return CGX_ERROR_ARGUMENT;
  const ReduceTask task{values, payloads, n_payloads, scale, out, rounding, residual};
  run(kernels->reduce[dtype], task, means->threads, pieces, n_pieces);
  return CGX_OK;
}

int cgx_sum(const cgx_means* means, int dtype, const cgx_piece* pieces, int64_t n_pieces, void* values,
            const uint8_t* const* payloads, int64_t n_payloads, double scale) {
  const cgx_kernels* kernels = kernels_of(means->simd);
  if (!kernels || !summable(dtype, pieces, n_pieces, n_payloads)) return CGX_ERROR_ARGUMENT;
  run(kernels->sum[dtype], SumTask{values, payloads, n_payloads, scale}, means->threads, pieces, n_pieces);
  return CGX_OK;
}
