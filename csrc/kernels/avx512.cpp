// AVX-512 (F, BW, VL, DQ: every server processor since Skylake-SP and Zen 4). Levels are packed with 256-bit registers,
// as on AVX2: a group of 32 is one such register, and packing is a small part of the work. Compiled with those
// instructions on; nothing here may run before the dispatcher has seen that the processor has them.
#ifdef CGX_HAVE_AVX512
#include "engine.h"
#include "x86_bits.h"

namespace {

struct Avx512 : X86Bits {
  static constexpr int kLanes = 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  static Floats splat(float x) { return _mm512_set1_ps(x); }
  static Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }

  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static Floats load(const Half* p) { return _mm512_cvtph_ps(load_32_bytes(p)); }
  static Floats load(const BFloat* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16));
  }
  static void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
  template <class T>
  static void store(T* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, p));
  }

  // Two vectors of decoded values: no NaN among them but the canonical one.
  static void store_decoded(float* p, Floats a, Floats b) {
    store(p, a);
    store(p + kLanes, b);
  }
  static void stream_decoded(float* p, Floats a, Floats b) {
    _mm512_stream_ps(p, a);
    _mm512_stream_ps(p + kLanes, b);
  }
  template <class T>
  static void store_decoded(T* p, Floats a, Floats b) {
    _mm512_storeu_si512(p, narrow_decoded(a, b, p));
  }
  template <class T>
  static void stream_decoded(T* p, Floats a, Floats b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_decoded(a, b, p));
  }

  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static float lowest(Floats x) { return _mm512_reduce_min_ps(x); }
  static float highest(Floats x) { return _mm512_reduce_max_ps(x); }

  static Mask no_mask() { return 0; }
  static Mask note_nan(Mask noted, Floats a, Floats b) {
    return static_cast<Mask>(noted | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
  }
  static Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static bool any(Mask a) { return a != 0; }

  static Ints truncate(Floats x) { return _mm512_cvttps_epi32(x); }
  static Ints round(Floats x) { return _mm512_cvtps_epi32(x); }
  static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints min(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static int32_t highest(Ints x) { return _mm512_reduce_max_epi32(x); }
  static Ints shift_16(Ints x) { return _mm512_srli_epi32(x, 16); }

  static Ints load_levels(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_levels(uint8_t* out, const Ints (&q)[2]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(q[0]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kLanes), _mm512_cvtepi32_epi8(q[1]));
  }

  static void draw(const RandomKey& key, uint32_t pair, uint16_t* out) {
    const auto all = [](uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); };
    const Ints lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Ints u = _mm512_add_epi32(_mm512_mullo_epi32(lanes, all(kIndexFactor)), all(pair * kIndexFactor + key.k0));
    u = _mm512_xor_si512(u, _mm512_srli_epi32(u, 16));
    u = _mm512_add_epi32(_mm512_mullo_epi32(u, all(kFirstFactor)), all(key.k1));
    u = _mm512_xor_si512(u, _mm512_srli_epi32(u, 15));
    u = _mm512_mullo_epi32(u, all(kSecondFactor));
    u = _mm512_xor_si512(u, _mm512_srli_epi32(u, 16));
    _mm512_storeu_si512(out, u);
  }
  static Ints load_random(const uint16_t* p) { return _mm512_cvtepu16_epi32(load_32_bytes(p)); }

  static Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  template <int stride>
  static Floats butterflies(Floats x) {
    Floats partner;
    if constexpr (stride == 1)
      partner = _mm512_permute_ps(x, 0xB1);
    else if constexpr (stride == 2)
      partner = _mm512_permute_ps(x, 0x4E);
    else if constexpr (stride == 4)
      partner = _mm512_shuffle_f32x4(x, x, 0xB1);
    else
      partner = _mm512_shuffle_f32x4(x, x, 0x4E);
    constexpr Mask second = stride == 1 ? 0xAAAA : stride == 2 ? 0xCCCC : stride == 4 ? 0xF0F0 : 0xFF00;
    return _mm512_mask_sub_ps(_mm512_add_ps(partner, x), second, partner, x);
  }
  static float tree(Floats x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
  }
  template <int Bits>
  struct Bins {
    static constexpr int kThresholds = (1 << (Bits - 1)) - 1;
    Floats thresholds[kThresholds ? kThresholds : 1], magnitudes;
    Bins(const float* t, const float* m) : magnitudes(_mm512_castps256_ps512(_mm256_loadu_ps(m))) {
      for (int j = 0; j < kThresholds; ++j) thresholds[j] = splat(t[j]);
    }
    Ints of(Floats x) const {
      Ints below = _mm512_setzero_si512();
      for (int j = 0; j < kThresholds; ++j)
        below = _mm512_mask_add_epi32(below, _mm512_cmp_ps_mask(thresholds[j], x, _CMP_LT_OQ), below, splat_int(1));
      return below;
    }
    Floats magnitude(Ints bin) const { return _mm512_permutexvar_ps(bin, magnitudes); }
  };
  static Ints add_where_negative(Ints a, Floats x, Ints b) {
    return _mm512_mask_add_epi32(a, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), a, b);
  }
  struct Codebook {
    Floats values;
    Codebook() = default;
    explicit Codebook(const float (&v)[16]) : values(load(v)) {}
    Floats operator()(const uint8_t* levels) const { return _mm512_permutexvar_ps(load_levels(levels), values); }
  };

 private:
  static __m256i load_32_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

  static __m256i narrow(Floats x, const Half*) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
  static __m256i narrow(Floats x, const BFloat*) {
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(to_bfloat(x), nan, _mm512_set1_epi32(0x7FC0)));
  }
  static Ints narrow_decoded(Floats a, Floats b, const Half* p) { return joined(narrow(a, p), narrow(b, p)); }
  static Ints narrow_decoded(Floats a, Floats b, const BFloat*) {
    return joined(_mm512_cvtepi32_epi16(to_bfloat(a)), _mm512_cvtepi32_epi16(to_bfloat(b)));
  }
  static Ints joined(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
  // To nearest even, in the low half of each lane. Canonical NaN stays what it is.
  static Ints to_bfloat(Floats x) {
    const Ints bits = _mm512_castps_si512(x);
    const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  }
};

}  // namespace

const cgx_kernels cgx_avx512_kernels = CGX_KERNEL_TABLE(Avx512);
#endif
