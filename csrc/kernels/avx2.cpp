// AVX2 with F16C. Compiled with those instructions on; nothing here may run before the dispatcher has seen that the
// processor has them.
#ifdef CGX_HAVE_AVX2
#include "engine.h"
#include "x86_bits.h"

namespace {

struct Avx2 : X86Bits {
  static constexpr int kLanes = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256;

  static Floats splat(float x) { return _mm256_set1_ps(x); }
  static Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }

  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static Floats load(const Half* p) { return _mm256_cvtph_ps(load_16_bytes(p)); }
  static Floats load(const BFloat* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
  }
  static void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
  template <class T>
  static void store(T* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x, p));
  }

  // Two vectors of decoded values: no NaN among them but the canonical one.
  static void store_decoded(float* p, Floats a, Floats b) {
    store(p, a);
    store(p + kLanes, b);
  }
  static void stream_decoded(float* p, Floats a, Floats b) {
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + kLanes, b);
  }
  template <class T>
  static void store_decoded(T* p, Floats a, Floats b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_decoded(a, b, p));
  }
  template <class T>
  static void stream_decoded(T* p, Floats a, Floats b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_decoded(a, b, p));
  }

  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static float lowest(Floats x) {
    __m128 v = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    v = _mm_min_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_min_ss(v, _mm_movehdup_ps(v)));
  }
  static float highest(Floats x) {
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
  }

  static Mask no_mask() { return _mm256_setzero_ps(); }
  static Mask note_nan(Mask noted, Floats a, Floats b) {
    return _mm256_or_ps(noted, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }
  static Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
  static bool any(Mask a) { return _mm256_movemask_ps(a) != 0; }

  static Ints truncate(Floats x) { return _mm256_cvttps_epi32(x); }
  static Ints round(Floats x) { return _mm256_cvtps_epi32(x); }
  static Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
  static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints min(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  static int32_t highest(Ints x) {
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xB1)));
  }
  static Ints shift_16(Ints x) { return _mm256_srli_epi32(x, 16); }

  static Ints load_levels(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_levels(uint8_t* out, const Ints (&q)[4]) {
    const Ints mixed = _mm256_packus_epi16(_mm256_packus_epi32(q[0], q[1]), _mm256_packus_epi32(q[2], q[3]));
    const Ints ordered = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), ordered);
  }

  static void draw(const RandomKey& key, uint32_t pair, uint16_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), hashes(key, pair));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), hashes(key, pair + 8));
  }
  static Ints load_random(const uint16_t* p) { return _mm256_cvtepu16_epi32(load_16_bytes(p)); }

  static Floats magnitude(Floats x) { return _mm256_andnot_ps(splat(-0.0f), x); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  template <int stride>
  static Floats butterflies(Floats x) {
    const auto sign = [](int i) { return i & stride ? -0.0f : 0.0f; };
    const Floats signs = _mm256_setr_ps(sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7));
    Floats partner;
    if constexpr (stride == 4)
      partner = _mm256_permute2f128_ps(x, x, 1);
    else
      partner = _mm256_permute_ps(x, stride == 1 ? 0xB1 : 0x4E);
    return add(partner, _mm256_xor_ps(x, signs));
  }
  static float tree(Floats x) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
  }
  template <int Bits>
  struct Bins {
    static constexpr int kThresholds = (1 << (Bits - 1)) - 1;
    Floats thresholds[kThresholds ? kThresholds : 1], magnitudes;
    Bins(const float* t, const float* m) : magnitudes(load(m)) {
      for (int j = 0; j < kThresholds; ++j) thresholds[j] = splat(t[j]);
    }
    Ints of(Floats x) const {
      Ints below = _mm256_setzero_si256();
      for (int j = 0; j < kThresholds; ++j)
        below = _mm256_sub_epi32(below, _mm256_castps_si256(_mm256_cmp_ps(thresholds[j], x, _CMP_LT_OQ)));
      return below;
    }
    Floats magnitude(Ints bin) const { return _mm256_permutevar8x32_ps(magnitudes, bin); }
  };
  static Ints add_where_negative(Ints a, Floats x, Ints b) {
    const Ints negative = _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
    return add(a, _mm256_and_si256(negative, b));
  }
  struct Codebook {
    Floats low, high;
    Codebook() = default;
    explicit Codebook(const float (&v)[16]) : low(load(v)), high(load(v + 8)) {}
    Floats operator()(const uint8_t* levels) const {
      const Ints i = load_levels(levels);
      const Floats is_high = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i), is_high);
    }
  };

 private:
  static __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

  static __m128i narrow(Floats x, const Half*) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
  static __m128i narrow(Floats x, const BFloat*) {
    const Ints nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Ints rounded = _mm256_blendv_epi8(to_bfloat(x), _mm256_set1_epi32(0x7FC0), nan);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08));
  }
  static Ints narrow_decoded(Floats a, Floats b, const Half* p) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(narrow(a, p)), narrow(b, p), 1);
  }
  static Ints narrow_decoded(Floats a, Floats b, const BFloat*) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bfloat(a), to_bfloat(b)), 0xD8);
  }
  // To nearest even, in the low half of each lane. Canonical NaN stays what it is.
  static Ints to_bfloat(Floats x) {
    const Ints bits = _mm256_castps_si256(x);
    const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  }

  static Ints hashes(const RandomKey& key, uint32_t pair) {
    const auto all = [](uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); };
    const Ints lane = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), all(kIndexFactor));
    Ints u = _mm256_add_epi32(lane, all(pair * kIndexFactor + key.k0));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(u, 16));
    u = _mm256_add_epi32(_mm256_mullo_epi32(u, all(kFirstFactor)), all(key.k1));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(u, 15));
    u = _mm256_mullo_epi32(u, all(kSecondFactor));
    return _mm256_xor_si256(u, _mm256_srli_epi32(u, 16));
  }
};

}  // namespace

const cgx_kernels cgx_avx2_kernels = CGX_KERNEL_TABLE(Avx2);
#endif
