// The table of functions that each SIMD level fills in; the dispatcher chooses one.
#pragma once

#include "cgx.h"

struct cgx_kernels {
  void (*encode[4])(const cgx_piece& piece, const void* values, uint8_t* slot, const cgx_rounding& how);
  void (*decode[4])(const cgx_piece& piece, const uint8_t* slot, void* values, bool add);
  void (*reduce[4])(const cgx_piece& piece, void* values, const uint8_t* const* payloads, int64_t n_payloads,
                    double scale, uint8_t* slot, const cgx_rounding& how);
};

// Indexed by cgx_dtype.
#define CGX_KERNEL_TABLE(Level)                                                                  \
  {                                                                                              \
      {Engine<Level>::encode<float>, Engine<Level>::encode<Half>, Engine<Level>::encode<BFloat>, \
       Engine<Level>::encode<double>},                                                           \
      {Engine<Level>::decode<float>, Engine<Level>::decode<Half>, Engine<Level>::decode<BFloat>, \
       Engine<Level>::decode<double>},                                                           \
      {Engine<Level>::reduce<float>, Engine<Level>::reduce<Half>, Engine<Level>::reduce<BFloat>, \
       Engine<Level>::reduce<double>},                                                           \
  }

extern const cgx_kernels cgx_scalar_kernels;
#ifdef CGX_HAVE_AVX2
extern const cgx_kernels cgx_avx2_kernels;
#endif
