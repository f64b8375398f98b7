// The arithmetic of docs/wire_format.md, one value at a time: types, headers, random numbers.
//
// Everything here is in an unnamed namespace on purpose: this file is compiled once per SIMD level, and the linker
// must not replace one level's copy by another's, which might use instructions that the processor lacks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cgx.h"

namespace {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31;
  const uint32_t mantissa = x.bits & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0));
  if (exponent == 0) return bits_to_float(sign | float_to_bits(static_cast<float>(mantissa) * 0x1p-24f));
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, BFloat* out) {
  const uint32_t bits = float_to_bits(x);
  out->bits = (x != x) ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float x, Half* out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t result;
  if (magnitude > 0x7F800000) {  // NaN: keep the leading payload bits and make it quiet, as F16C does
    result = 0x7E00 | ((magnitude >> 13) & 0x1FF);
  } else if (magnitude >= 0x477FF000) {  // 65520 and above round to infinity
    result = 0x7C00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: a subnormal, whose unit is 2^-24; adding 1/2 rounds to it
    result = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000;
  } else {
    result = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | result);
}

inline float canonical_nan() { return bits_to_float(0x7FC00000); }

// What a block's values share.
struct Header {
  float unit;
  float lo;
};

struct Range {
  float lo;
  float hi;
  bool has_nan;
};

// How a block is quantized: its header, and the reciprocal of its unit. Flat blocks (constant or NaN) have only levels
// 0.
struct BlockScale {
  Header header;
  float inverse;
  bool flat;
};

// top: the highest level, 2^bits - 1.
inline BlockScale scale_of(const Range& range, int32_t top) {
  const float lo = range.lo + 0.0f, hi = range.hi + 0.0f;
  const float width = hi - lo;
  if (range.has_nan || !(std::fabs(width) <= std::numeric_limits<float>::max()))
    return {{canonical_nan(), canonical_nan()}, 0.0f, true};
  if (hi == lo) return {{0.0f, lo}, 0.0f, true};
  float unit = width / static_cast<float>(top);
  if (unit < 0x1p-126f) unit = 0x1p-126f;
  return {{unit, lo}, 1.0f / unit, false};
}

// Counter-based random numbers: one 32-bit hash, under a 64-bit key, gives 16 bits to each of two neighbours.
constexpr uint32_t kIndexFactor = 0x9E3779B1u, kFirstFactor = 0x7FEB352Du, kSecondFactor = 0x846CA68Bu;

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

struct RandomKey {
  uint32_t k0;
  uint32_t k1;
};

inline RandomKey random_key(const cgx_rounding& rounding) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  uint64_t key = mix64(rounding.seed + golden);
  key = mix64((key ^ rounding.op) + golden);
  key = mix64((key ^ (static_cast<uint64_t>(rounding.rank) << 32 | rounding.stage)) + golden);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

inline uint32_t random_pair(const RandomKey& key, uint32_t pair) {
  uint32_t u = pair * kIndexFactor + key.k0;
  u = (u ^ (u >> 16)) * kFirstFactor + key.k1;
  u = (u ^ (u >> 15)) * kSecondFactor;
  return u ^ (u >> 16);
}

// The key of a rotated piece's signs, which all ranks share: drawn anew for each operation in the random mode only.
inline RandomKey sign_key(const cgx_rounding& rounding) {
  cgx_rounding shared = {};
  if (rounding.stochastic) shared.seed = rounding.seed, shared.op = rounding.op;
  return random_key(shared);
}

inline int64_t itemsize(int dtype) {
  return dtype == CGX_FLOAT64 ? 8 : dtype == CGX_FLOAT32 ? 4 : dtype == CGX_BYTES ? 1 : 2;
}

// As how many values a rotated piece codes an incomplete block: a power of two.
constexpr int64_t kSmallestRotation = 64, kLargestRotation = 4096;
inline int64_t rotated_numel(int64_t numel) {
  int64_t n = kSmallestRotation;
  while (n < numel) n *= 2;
  return n;
}

// Where the parts of a piece's payload lie.
struct PieceParts {
  int64_t quantized;  // values that are quantized
  int64_t headers;    // byte offset of the blocks' headers: a rotated piece begins with a key
  int64_t levels;     // byte offset of the level stream
  int64_t levels_nbytes;
  int64_t tail;  // byte offset of the raw values
  int64_t nbytes;

  PieceParts(const cgx_piece& piece, int64_t item_nbytes) {
    const bool rotated = piece.kind == CGX_ROTATED;
    quantized = piece.kind == CGX_RAW ? 0 : piece.numel - piece.raw_tail;
    headers = levels = levels_nbytes = tail = 0;
    if (quantized > 0) {
      const int64_t whole = quantized / piece.block, rest = quantized % piece.block;
      const int64_t coded = rotated && rest > 0 ? whole * piece.block + rotated_numel(rest) : quantized;
      headers = rotated ? sizeof(RandomKey) : 0;
      levels = headers + (whole + (rest > 0)) * static_cast<int64_t>(rotated ? sizeof(float) : sizeof(Header));
      levels_nbytes = (coded * piece.bits + 7) / 8;
      tail = levels + levels_nbytes;
    }
    nbytes = (tail + (piece.numel - quantized) * item_nbytes + 7) / 8 * 8;
  }
};

}  // namespace
