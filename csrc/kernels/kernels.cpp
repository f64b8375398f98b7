// Chooses a SIMD level and walks tables of pieces: the kernels' part of the C ABI.
#include "cgx.h"
#include "levels.h"
#include "numerics.h"

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
  if (simd == CGX_SCALAR) return &cgx_scalar_kernels;
#ifdef CGX_HAVE_AVX2
  if (simd == CGX_AVX2 && cgx_simd_available(CGX_AVX2)) return &cgx_avx2_kernels;
#endif
  return nullptr;
}

bool valid(const cgx_piece& piece, int dtype) {
  const bool raw = piece.bits == 32;
  if (!raw && (piece.bits < 1 || piece.bits > 8 || piece.block < 1 || dtype == CGX_FLOAT64)) return false;
  return piece.offset >= 0 && piece.numel >= 0 && piece.payload >= 0 && piece.raw_tail >= 0 &&
         piece.raw_tail <= piece.numel;
}

bool valid(int dtype, const cgx_piece* pieces, int64_t n_pieces) {
  if (dtype < 0 || dtype > 3) return false;
  for (int64_t i = 0; i < n_pieces; ++i)
    if (!valid(pieces[i], dtype)) return false;
  return true;
}

}  // namespace

int cgx_abi_version(void) { return CGX_ABI_VERSION; }

int cgx_simd_available(int simd) {
  if (simd == CGX_SCALAR) return 1;
#ifdef CGX_HAVE_AVX2
  if (simd == CGX_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? 1 : 0;
#endif
  return 0;
}

int cgx_best_simd(void) { return cgx_simd_available(CGX_AVX2) ? CGX_AVX2 : CGX_SCALAR; }

int64_t cgx_piece_payload_nbytes(const cgx_piece* piece, int dtype) {
  if (!valid(dtype, piece, 1)) return CGX_ERROR_ARGUMENT;
  return PieceParts(*piece, itemsize(dtype)).nbytes;
}

int cgx_encode(int simd, int dtype, const cgx_piece* pieces, int64_t n_pieces, const void* values, uint8_t* payload,
               const cgx_rounding* rounding) {
  const cgx_kernels* kernels = kernels_of(simd);
  if (!kernels || !valid(dtype, pieces, n_pieces)) return CGX_ERROR_ARGUMENT;
  StrictArithmetic strict;
  for (int64_t i = 0; i < n_pieces; ++i) kernels->encode[dtype](pieces[i], values, payload, *rounding);
  return CGX_OK;
}

int cgx_decode(int simd, int dtype, const cgx_piece* pieces, int64_t n_pieces, const uint8_t* payload, void* values,
               int add) {
  const cgx_kernels* kernels = kernels_of(simd);
  if (!kernels || !valid(dtype, pieces, n_pieces)) return CGX_ERROR_ARGUMENT;
  StrictArithmetic strict;
  for (int64_t i = 0; i < n_pieces; ++i) kernels->decode[dtype](pieces[i], payload, values, add != 0);
  return CGX_OK;
}

int cgx_reduce(int simd, int dtype, const cgx_piece* pieces, int64_t n_pieces, void* values,
               const uint8_t* const* payloads, int64_t n_payloads, double scale, uint8_t* out,
               const cgx_rounding* rounding) {
  const cgx_kernels* kernels = kernels_of(simd);
  if (!kernels || !valid(dtype, pieces, n_pieces) || n_payloads < 1) return CGX_ERROR_ARGUMENT;
  StrictArithmetic strict;
  for (int64_t i = 0; i < n_pieces; ++i)
    kernels->reduce[dtype](pieces[i], values, payloads, n_payloads, scale, out, *rounding);
  return CGX_OK;
}
