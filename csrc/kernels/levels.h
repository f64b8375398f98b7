// What the dispatcher asks of a SIMD level: a table of functions, each of which works on a part of one piece.
#pragma once

#include "cgx.h"

// Values of a piece, counted from its start. Parts of one piece can be worked on in any order and at the same time:
// they start at multiples of 8 and of the block size, so that they share no byte of the payload.
struct Span {
  int64_t first;
  int64_t end;
};

struct EncodeTask {
  const void* values;
  uint8_t* slot;
  const cgx_rounding* rounding;
  float* residual;  // or null
};

enum class Writing { kStore, kStream, kAdd };  // streaming leaves the cache alone: for more values than fit it

struct DecodeTask {
  const uint8_t* slot;
  void* values;
  Writing writing;
};

struct ReduceTask {
  void* values;
  const uint8_t* const* payloads;
  int64_t n_payloads;
  double scale;
  uint8_t* slot;
  const cgx_rounding* rounding;
  float* residual;  // or null
};

struct SumTask {
  void* values;
  const uint8_t* const* payloads;
  int64_t n_payloads;
  double scale;
};

// Room for so many values, this thread's own until it asks again. Not in the engine, because code of the standard
// library that was compiled with a level's instructions could end up serving the whole program.
float* cgx_scratch(int64_t numel);

// Indexed by cgx_dtype.
struct cgx_kernels {
  void (*encode[4])(const EncodeTask& task, const cgx_piece& piece, Span span);
  void (*decode[4])(const DecodeTask& task, const cgx_piece& piece, Span span);
  void (*reduce[4])(const ReduceTask& task, const cgx_piece& piece, Span span);
  void (*sum[4])(const SumTask& task, const cgx_piece& piece, Span span);
};

#define CGX_KERNEL_TABLE(Level)                                                                  \
  {                                                                                              \
      {encode<Level, float>, encode<Level, Half>, encode<Level, BFloat>, encode<Level, double>}, \
      {decode<Level, float>, decode<Level, Half>, decode<Level, BFloat>, decode<Level, double>}, \
      {reduce<Level, float>, reduce<Level, Half>, reduce<Level, BFloat>, reduce<Level, double>}, \
      {sum<Level, float>, sum<Level, Half>, sum<Level, BFloat>, sum<Level, double>},             \
  }

extern const cgx_kernels cgx_scalar_kernels;
#ifdef CGX_HAVE_AVX2
extern const cgx_kernels cgx_avx2_kernels;
#endif
#ifdef CGX_HAVE_AVX512
extern const cgx_kernels cgx_avx512_kernels;
#endif
#ifdef CGX_HAVE_NEON
extern const cgx_kernels cgx_neon_kernels;
#endif
