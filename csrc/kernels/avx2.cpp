// AVX2 with F16C. Compiled with those instructions on; nothing here may run before the dispatcher has seen that the
// processor has them.
#ifdef CGX_HAVE_AVX2
#include <immintrin.h>

#include "engine.h"
#include "levels.h"

namespace {

struct Avx2 {
  using Floats = __m256;
  using Ints = __m256i;

  static Floats splat(float x) { return _mm256_set1_ps(x); }
  static Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }

  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static Floats load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Floats load(const BFloat* p) {
    const Ints wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }

  static void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
  static void store(Half* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(BFloat* p, Floats x) {
    const Ints bits = _mm256_castps_si256(x);
    const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    Ints rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const Ints nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    const Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }

  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  // The instructions give their second operand where one is NaN: this order keeps the extremum of the others.
  static Floats min(Floats a, Floats b) { return _mm256_min_ps(b, a); }
  static Floats max(Floats a, Floats b) { return _mm256_max_ps(b, a); }
  static Ints min(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
  static Floats note_nan(Floats noted, Floats x) { return _mm256_or_ps(noted, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  static bool any_nan(Floats noted) { return _mm256_movemask_ps(noted) != 0; }
  static float lowest(Floats x) {
    alignas(32) float v[kLanes];
    _mm256_store_ps(v, x);
    return *std::min_element(v, v + kLanes);
  }
  static float highest(Floats x) {
    alignas(32) float v[kLanes];
    _mm256_store_ps(v, x);
    return *std::max_element(v, v + kLanes);
  }
  static Ints truncate(Floats x) { return _mm256_cvttps_epi32(x); }
  static Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }

  static Floats random(const RandomKey& key, uint32_t index) {
    const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    Ints u = _mm256_mullo_epi32(lane, _mm256_set1_epi32(static_cast<int32_t>(kIndexFactor)));
    u = _mm256_add_epi32(u, _mm256_set1_epi32(static_cast<int32_t>(index * kIndexFactor + key.k0)));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(u, 16));
    u = _mm256_mullo_epi32(u, _mm256_set1_epi32(static_cast<int32_t>(kFirstFactor)));
    u = _mm256_add_epi32(u, _mm256_set1_epi32(static_cast<int32_t>(key.k1)));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(u, 15));
    u = _mm256_mullo_epi32(u, _mm256_set1_epi32(static_cast<int32_t>(kSecondFactor)));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(u, 16));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(u, 8)), _mm256_set1_ps(0x1p-24f));
  }

  // Thirty-two levels as bytes, in order.
  static Ints to_bytes(Ints a, Ints b, Ints c, Ints d) {
    const Ints mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  // 32 levels are 4 * Bits bytes. Neighbours are joined by multiply-adds: 8-bit fields of Bits bits to 16-bit fields of
  // 2 Bits, those to 32-bit fields of 4 Bits, and a shift makes 64-bit words of 8 Bits, whose bytes a shuffle brings
  // together. The stores are wider than what they hold; the next group overwrites the rest, and near the end of the
  // stream (room) a copy takes just what belongs there.
  template <int Bits>
  static void pack4(Ints a, Ints b, Ints c, Ints d, uint8_t* out, int64_t room) {
    const Ints bytes = to_bytes(a, b, c, d);
    if constexpr (Bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
    } else if constexpr (Bits == 1) {
      const int32_t word = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7));
      std::memcpy(out, &word, sizeof word);
    } else if constexpr (Bits == 4) {  // the most used width: pairs of levels are bytes already
      const Ints pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(1 | (16 << 8)), bytes);
      const Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
    } else {
      const Ints factors8 = _mm256_set1_epi16(static_cast<int16_t>(1 | (1 << (Bits + 8))));
      const Ints pairs = _mm256_maddubs_epi16(factors8, bytes);
      const Ints factors16 = _mm256_set1_epi32(1 | (1 << (2 * Bits + 16)));
      const Ints fours = _mm256_madd_epi16(pairs, factors16);
      const Ints low = _mm256_set1_epi64x(0xFFFFFFFF);
      const Ints eights = _mm256_or_si256(_mm256_and_si256(fours, low),
                                          _mm256_srli_epi64(_mm256_andnot_si256(low, fours), 32 - 4 * Bits));
      const Ints joined = _mm256_shuffle_epi8(eights, join_shuffle<Bits>());
      const __m128i first = _mm256_castsi256_si128(joined), second = _mm256_extracti128_si256(joined, 1);
      if (room >= 2 * Bits + 16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), first);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * Bits), second);
      } else {
        std::memcpy(out, &first, 2 * Bits);
        std::memcpy(out + 2 * Bits, &second, 2 * Bits);
      }
    }
  }

  template <int Bits>
  static void pack1(Ints x, uint8_t* out) {
    alignas(32) uint32_t v[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(v), x);
    uint64_t word = 0;
    for (int i = 0; i < kLanes; ++i) word |= static_cast<uint64_t>(v[i]) << (i * Bits);
    std::memcpy(out, &word, Bits);
  }

  // Every lane takes the two bytes that hold its level, shifts and masks. Reads 8 bytes.
  template <int Bits>
  static Ints unpack(const uint8_t* p) {
    if constexpr (Bits == 8) {
      return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else {
      int64_t word;
      std::memcpy(&word, p, sizeof word);
      const Ints spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(word), spread_shuffle<Bits>());
      const Ints shifts = _mm256_setr_epi32(0, Bits & 7, 2 * Bits & 7, 3 * Bits & 7, 4 * Bits & 7, 5 * Bits & 7,
                                            6 * Bits & 7, 7 * Bits & 7);
      return _mm256_and_si256(_mm256_srlv_epi32(spread, shifts), _mm256_set1_epi32((1 << Bits) - 1));
    }
  }

 private:
  template <int Bits>
  static Ints join_shuffle() {
    alignas(32) int8_t index[32];
    for (int i = 0; i < 16; ++i) {
      const int from = i < Bits ? i : i < 2 * Bits ? 8 + i - Bits : -1;
      index[i] = index[16 + i] = static_cast<int8_t>(from);
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(index));
  }

  template <int Bits>
  static Ints spread_shuffle() {
    alignas(32) int8_t index[32];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int byte = lane * Bits / 8;
      index[4 * lane] = static_cast<int8_t>(byte);
      index[4 * lane + 1] = static_cast<int8_t>(byte + 1 < Bits ? byte + 1 : -1);
      index[4 * lane + 2] = index[4 * lane + 3] = -1;
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(index));
  }
};

}  // namespace

const cgx_kernels cgx_avx2_kernels = CGX_KERNEL_TABLE(Avx2);
#endif
