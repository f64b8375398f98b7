// NEON of 64-bit ARM, which every such processor has.
#ifdef CGX_HAVE_NEON
#include <arm_neon.h>

#include <array>

#include "engine.h"

namespace {

template <class F>
constexpr std::array<uint8_t, 16> sixteen(F byte) {
  std::array<uint8_t, 16> table{};
  for (int i = 0; i < 16; ++i) table[static_cast<size_t>(i)] = static_cast<uint8_t>(byte(i));
  return table;
}
constexpr int kNoByte = 0xFF;

// The Bits bytes of each 64-bit word, side by side.
template <int Bits>
constexpr auto kJoin = sixteen([](int i) { return i < Bits       ? i
                                                  : i < 2 * Bits ? 8 + i - Bits
                                                                 : kNoByte; });

// For each 16-bit lane, the first byte that its level is in, and the next.
template <int Bits, int First>
constexpr auto kSpread = sixteen([](int i) { return (First + i / 2) * Bits / 8 + i % 2; });

struct Neon {
  static constexpr int kLanes = 4;
  using Floats = float32x4_t;
  using Ints = int32x4_t;
  using Mask = uint32x4_t;

  static Floats splat(float x) { return vdupq_n_f32(x); }
  static Ints splat_int(int32_t x) { return vdupq_n_s32(x); }

  // By way of bytes, for raw values need not be aligned.
  static Floats load(const float* p) { return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p))); }
  static Floats load(const Half* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))));
  }
  static Floats load(const BFloat* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))), 16));
  }
  static void store(float* p, Floats x) { vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_f32(x)); }
  static void store(Half* p, Floats x) { vst1_u8(reinterpret_cast<uint8_t*>(p), vreinterpret_u8_f16(vcvt_f16_f32(x))); }
  static void store(BFloat* p, Floats x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
    const uint32x4_t number = vceqq_f32(x, x);
    const uint16x4_t narrow = vmovn_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7FC0)));
    vst1_u8(reinterpret_cast<uint8_t*>(p), vreinterpret_u8_u16(narrow));
  }
  // Two vectors of decoded values: no NaN among them but the canonical one.
  template <class T>
  static void store_decoded(T* p, Floats a, Floats b) {
    store(p, a);
    store(p + kLanes, b);
  }
  template <class T>
  static void stream_decoded(T* p, Floats a, Floats b) {
    store_decoded(p, a, b);
  }

  static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
  static Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
  static Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static Floats min(Floats a, Floats b) { return vminq_f32(a, b); }
  static Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
  static float lowest(Floats x) { return vminvq_f32(x); }
  static float highest(Floats x) { return vmaxvq_f32(x); }

  static Mask no_mask() { return vdupq_n_u32(0); }
  static Mask note_nan(Mask noted, Floats a, Floats b) {
    return vorrq_u32(noted, vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))));
  }
  static Mask either(Mask a, Mask b) { return vorrq_u32(a, b); }
  static bool any(Mask a) { return vmaxvq_u32(a) != 0; }

  static Ints truncate(Floats x) { return vcvtq_s32_f32(x); }
  static Ints round(Floats x) { return vcvtnq_s32_f32(x); }
  static Floats to_floats(Ints x) { return vcvtq_f32_s32(x); }
  static Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
  static Ints min(Ints a, Ints b) { return vminq_s32(a, b); }
  static Ints max(Ints a, Ints b) { return vmaxq_s32(a, b); }
  static int32_t highest(Ints x) { return vmaxvq_s32(x); }
  static Ints shift_16(Ints x) { return vshrq_n_s32(x, 16); }

  static Ints load_levels(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  static void store_levels(uint8_t* out, const Ints (&q)[8]) {
    for (int i = 0; i < 8; i += 4) {
      const uint16x8_t first = vcombine_u16(vmovn_u32(unsigned_of(q[i])), vmovn_u32(unsigned_of(q[i + 1])));
      const uint16x8_t second = vcombine_u16(vmovn_u32(unsigned_of(q[i + 2])), vmovn_u32(unsigned_of(q[i + 3])));
      vst1q_u8(out + 4 * i, vcombine_u8(vmovn_u16(first), vmovn_u16(second)));
    }
  }

  static void draw(const RandomKey& key, uint32_t pair, uint16_t* out) {
    const uint32_t steps[4] = {0, kIndexFactor, 2 * kIndexFactor, 3 * kIndexFactor};
    for (uint32_t i = 0; i < kGroup / 2; i += 4) {
      uint32x4_t u = vaddq_u32(vld1q_u32(steps), vdupq_n_u32((pair + i) * kIndexFactor + key.k0));
      u = veorq_u32(u, vshrq_n_u32(u, 16));
      u = vaddq_u32(vmulq_u32(u, vdupq_n_u32(kFirstFactor)), vdupq_n_u32(key.k1));
      u = veorq_u32(u, vshrq_n_u32(u, 15));
      u = vmulq_u32(u, vdupq_n_u32(kSecondFactor));
      u = veorq_u32(u, vshrq_n_u32(u, 16));
      vst1q_u16(out + 2 * i, vreinterpretq_u16_u32(u));
    }
  }
  static Ints load_random(const uint16_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))); }

  static Floats magnitude(Floats x) { return vabsq_f32(x); }
  static Ints bits(Floats x) { return vreinterpretq_s32_f32(x); }
  template <int stride>
  static Floats butterflies(Floats x) {
    constexpr uint32_t sign = 1u << 31, kSigns[] = {0, stride == 1 ? sign : 0, stride == 1 ? 0 : sign, sign};
    const uint32x4_t signs = vld1q_u32(kSigns);
    const Floats partner = stride == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
    return add(partner, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), signs)));
  }
  static float tree(Floats x) {
    const float32x2_t v = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(v, 0) + vget_lane_f32(v, 1);
  }
  template <int Bits>
  struct Bins {
    static constexpr int kThresholds = (1 << (Bits - 1)) - 1;
    Floats thresholds[kThresholds ? kThresholds : 1];
    uint8x16x2_t magnitudes;
    Bins(const float* t, const float* m) : magnitudes{{bytes_at(m), bytes_at(m + 4)}} {
      for (int j = 0; j < kThresholds; ++j) thresholds[j] = splat(t[j]);
    }
    Ints of(Floats x) const {
      uint32x4_t below = vdupq_n_u32(0);
      for (int j = 0; j < kThresholds; ++j) below = vsubq_u32(below, vcltq_f32(thresholds[j], x));
      return vreinterpretq_s32_u32(below);
    }
    Floats magnitude(Ints bin) const { return vreinterpretq_f32_u8(vqtbl2q_u8(magnitudes, bytes_of_lanes(bin))); }
  };
  static Ints add_where_negative(Ints a, Floats x, Ints b) {
    return add(a, vandq_s32(vreinterpretq_s32_u32(vcltzq_f32(x)), b));
  }
  struct Codebook {
    uint8x16x4_t values;
    Codebook() = default;
    explicit Codebook(const float (&v)[16])
        : values{{bytes_at(v), bytes_at(v + 4), bytes_at(v + 8), bytes_at(v + 12)}} {}
    Floats operator()(const uint8_t* levels) const {
      return vreinterpretq_f32_u8(vqtbl4q_u8(values, bytes_of_lanes(load_levels(levels))));
    }
  };

  // Neighbours are joined by shifts: fields of Bits bits to 16-bit fields of 2 Bits, to 32-bit fields of 4 Bits, to
  // 64-bit fields of 8 Bits, whose bytes a shuffle brings together.
  template <int Bits>
  static void pack(const uint8_t* levels, uint8_t* out) {
    for (int half = 0; half < 2; ++half, levels += 16, out += 2 * Bits) {
      const uint8x16_t bytes = vld1q_u8(levels);
      if constexpr (Bits == 8) {
        vst1q_u8(out, bytes);
      } else {
        const uint16x8_t ones = vreinterpretq_u16_u8(bytes);
        const uint16x8_t pairs = vorrq_u16(vandq_u16(ones, vdupq_n_u16(255)), vshlq_n_u16(vshrq_n_u16(ones, 8), Bits));
        const uint32x4_t twos = vreinterpretq_u32_u16(pairs);
        const uint32x4_t fours =
            vorrq_u32(vandq_u32(twos, vdupq_n_u32(0xFFFF)), vshlq_n_u32(vshrq_n_u32(twos, 16), 2 * Bits));
        const uint64x2_t words = vreinterpretq_u64_u32(fours);
        const uint64x2_t eights =
            vorrq_u64(vandq_u64(words, vdupq_n_u64(0xFFFFFFFF)), vshlq_n_u64(vshrq_n_u64(words, 32), 4 * Bits));
        const uint8x16_t joined = vqtbl1q_u8(vreinterpretq_u8_u64(eights), vld1q_u8(kJoin<Bits>.data()));
        vst1q_u8(out, joined);
      }
    }
  }

  // Each 16-bit lane takes the two bytes that hold its level, shifts and masks.
  template <int Bits>
  static void unpack(const uint8_t* in, uint8_t* levels) {
    for (int half = 0; half < 2; ++half, in += 2 * Bits, levels += 16) {
      const uint8x16_t bytes = vld1q_u8(in);
      if constexpr (Bits == 8) {
        vst1q_u8(levels, bytes);
      } else {
        const int16_t right[8] = {0,
                                  -(1 * Bits % 8),
                                  -(2 * Bits % 8),
                                  -(3 * Bits % 8),
                                  -(4 * Bits % 8),
                                  -(5 * Bits % 8),
                                  -(6 * Bits % 8),
                                  -(7 * Bits % 8)};
        const int16x8_t shifts = vld1q_s16(right);
        const auto eight = [&](const std::array<uint8_t, 16>& spread) {
          const uint16x8_t lanes = vreinterpretq_u16_u8(vqtbl1q_u8(bytes, vld1q_u8(spread.data())));
          return vmovn_u16(vandq_u16(vshlq_u16(lanes, shifts), vdupq_n_u16((1 << Bits) - 1)));
        };
        vst1q_u8(levels, vcombine_u8(eight(kSpread<Bits, 0>), eight(kSpread<Bits, 8>)));
      }
    }
  }

 private:
  static uint32x4_t unsigned_of(Ints x) { return vreinterpretq_u32_s32(x); }
  static uint8x16_t bytes_at(const float* p) { return vld1q_u8(reinterpret_cast<const uint8_t*>(p)); }
  // Where the bytes of each lane's float32 lie in a table of them.
  static uint8x16_t bytes_of_lanes(Ints index) {
    return vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), unsigned_of(index), 0x04040404));
  }
};

}  // namespace

const cgx_kernels cgx_neon_kernels = CGX_KERNEL_TABLE(Neon);
#endif
