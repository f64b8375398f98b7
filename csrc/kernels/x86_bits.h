// Packing with 256-bit registers, for both levels of x86-64 that have them.
#pragma once

#include <immintrin.h>

#include <array>

#include "bits.h"

namespace {

using ShuffleTable = std::array<uint8_t, 32>;  // two lanes of 16 bytes, alike

template <class F>
constexpr ShuffleTable lanes_of(F byte) {
  ShuffleTable table{};
  for (int i = 0; i < 32; ++i) table[static_cast<size_t>(i)] = static_cast<uint8_t>(byte(i % 16));
  return table;
}
constexpr int kNoByte = 0x80;

// The Bits bytes of each 64-bit word, side by side.
template <int Bits>
constexpr ShuffleTable kJoin = lanes_of([](int i) { return i < Bits       ? i
                                                           : i < 2 * Bits ? 8 + i - Bits
                                                                          : kNoByte; });

// For each 16-bit lane, the first byte that its level is in, and the next.
template <int Bits, int First>
constexpr ShuffleTable kSpread = lanes_of([](int i) { return (First + i / 2) * Bits / 8 + i % 2; });

// What brings the level of each 16-bit lane to the lane's top.
template <int Bits>
constexpr ShuffleTable kToTop = lanes_of([](int i) {
  const int factor = 1 << (16 - Bits - (i / 2) * Bits % 8);
  return i % 2 == 0 ? factor & 255 : factor >> 8;
});

struct X86Bits {
  using Ints = __m256i;

  // Neighbours are joined by multiply-adds: 8-bit fields of Bits bits to 16-bit fields of 2 Bits, those to 32-bit
  // fields of 4 Bits, and a shift makes 64-bit words of 8 Bits, whose bytes a shuffle brings together.
  template <int Bits>
  static void pack(const uint8_t* levels, uint8_t* out) {
    const Ints bytes = _mm256_loadu_si256(reinterpret_cast<const Ints*>(levels));
    if constexpr (Bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<Ints*>(out), bytes);
    } else if constexpr (Bits == 1) {
      const int32_t word = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7));
      std::memcpy(out, &word, sizeof word);
    } else if constexpr (Bits == 4) {  // the most used width: pairs of levels are bytes already
      const Ints pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(1 | (16 << 8)), bytes);
      const Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
    } else {
      const Ints pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(static_cast<int16_t>(1 | (1 << (Bits + 8)))), bytes);
      const Ints fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | (1 << (2 * Bits + 16))));
      const Ints low = _mm256_set1_epi64x(0xFFFFFFFF);
      const Ints eights = _mm256_or_si256(_mm256_and_si256(fours, low),
                                          _mm256_srli_epi64(_mm256_andnot_si256(low, fours), 32 - 4 * Bits));
      const Ints joined = _mm256_shuffle_epi8(eights, load(kJoin<Bits>));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(joined));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * Bits), _mm256_extracti128_si256(joined, 1));
    }
  }

  // Each 16-bit lane takes the two bytes that hold its level; a multiplication moves it to the lane's top, where what
  // does not belong to it is shifted out on both sides.
  template <int Bits>
  static void unpack(const uint8_t* in, uint8_t* levels) {
    Ints bytes;
    if constexpr (Bits == 8) {
      bytes = _mm256_loadu_si256(reinterpret_cast<const Ints*>(in));
    } else if constexpr (Bits == 4) {
      const Ints pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
      bytes = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    } else {
      const Ints halves =
          _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(in + 2 * Bits), reinterpret_cast<const __m128i*>(in));
      const Ints factors = load(kToTop<Bits>);
      const auto eight = [&](const ShuffleTable& spread) {
        return _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(halves, load(spread)), factors), 16 - Bits);
      };
      bytes = _mm256_packus_epi16(eight(kSpread<Bits, 0>), eight(kSpread<Bits, 8>));
    }
    _mm256_storeu_si256(reinterpret_cast<Ints*>(levels), bytes);
  }

 private:
  static Ints load(const ShuffleTable& table) {
    return _mm256_loadu_si256(reinterpret_cast<const Ints*>(table.data()));
  }
};

}  // namespace
