// The portable level: eight lanes as plain arrays, which any compiler may vectorise as far as its target goes.
#include "engine.h"

namespace {

struct Scalar {
  static constexpr int kLanes = 8;
  struct Floats {
    float v[kLanes];
  };
  struct Ints {
    int32_t v[kLanes];
  };
  using Mask = bool;

  template <class F>
  static inline Floats each(F f) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
    return out;
  }
  template <class F>
  static inline Ints each_int(F f) {
    Ints out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
    return out;
  }

  static Floats splat(float x) {
    return each([&](int) { return x; });
  }
  static Ints splat_int(int32_t x) {
    return each_int([&](int) { return x; });
  }
  template <class T>
  static Floats load(const T* p) {
    const char* bytes = reinterpret_cast<const char*>(p);
    return each([&](int i) {
      T x;
      std::memcpy(&x, bytes + i * sizeof x, sizeof x);
      return to_float(x);
    });
  }
  template <class T>
  static void store(T* p, Floats x) {
    char* bytes = reinterpret_cast<char*>(p);
    for (int i = 0; i < kLanes; ++i) {
      T narrow;
      from_float(x.v[i], &narrow);
      std::memcpy(bytes + i * sizeof narrow, &narrow, sizeof narrow);
    }
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
  static Floats add(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static Floats sub(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static Floats mul(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static Floats min(Floats a, Floats b) {
    return each([&](int i) { return b.v[i] < a.v[i] ? b.v[i] : a.v[i]; });
  }
  static Floats max(Floats a, Floats b) {
    return each([&](int i) { return b.v[i] > a.v[i] ? b.v[i] : a.v[i]; });
  }
  static float lowest(Floats x) { return *std::min_element(x.v, x.v + kLanes); }
  static float highest(Floats x) { return *std::max_element(x.v, x.v + kLanes); }

  static Mask no_mask() { return false; }
  static Mask note_nan(Mask noted, Floats a, Floats b) {
    bool nan = noted;
    for (int i = 0; i < kLanes; ++i) nan |= (a.v[i] != a.v[i]) | (b.v[i] != b.v[i]);
    return nan;
  }
  static Mask either(Mask a, Mask b) { return a || b; }
  static bool any(Mask a) { return a; }

  static Ints truncate(Floats x) {
    return each_int([&](int i) { return static_cast<int32_t>(x.v[i]); });
  }
  static Ints round(Floats x) {
    return each_int([&](int i) { return static_cast<int32_t>(std::lrint(x.v[i])); });
  }
  static Floats to_floats(Ints x) {
    return each([&](int i) { return static_cast<float>(x.v[i]); });
  }
  static Ints add(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] + b.v[i]; });
  }
  static Ints min(Ints a, Ints b) {
    return each_int([&](int i) { return b.v[i] < a.v[i] ? b.v[i] : a.v[i]; });
  }
  static Ints max(Ints a, Ints b) {
    return each_int([&](int i) { return b.v[i] > a.v[i] ? b.v[i] : a.v[i]; });
  }
  static int32_t highest(Ints x) { return *std::max_element(x.v, x.v + kLanes); }
  static Ints shift_16(Ints x) {
    return each_int([&](int i) { return x.v[i] >> 16; });
  }

  static Ints load_levels(const uint8_t* p) {
    return each_int([&](int i) { return p[i]; });
  }
  static void store_levels(uint8_t* out, const Ints (&q)[kGroup / kLanes]) {
    for (int i = 0; i < kGroup; ++i) out[i] = static_cast<uint8_t>(q[i / kLanes].v[i % kLanes]);
  }

  // 32 random numbers from 16 hashes.
  static void draw(const RandomKey& key, uint32_t pair, uint16_t* out) {
    for (uint32_t i = 0; i < kGroup / 2; ++i) {
      const uint32_t u = random_pair(key, pair + i);
      out[2 * i] = static_cast<uint16_t>(u);
      out[2 * i + 1] = static_cast<uint16_t>(u >> 16);
    }
  }
  static Ints load_random(const uint16_t* p) {
    return each_int([&](int i) { return p[i]; });
  }

  // ---- rotated blocks ----

  static Floats magnitude(Floats x) {
    return each([&](int i) { return std::fabs(x.v[i]); });
  }
  static Ints bits(Floats x) {
    return each_int([&](int i) { return static_cast<int32_t>(float_to_bits(x.v[i])); });
  }
  // Of all pairs of lanes that are `stride` apart, sum and difference.
  template <int stride>
  static Floats butterflies(Floats x) {
    return each([&](int i) { return i & stride ? x.v[i - stride] - x.v[i] : x.v[i] + x.v[i + stride]; });
  }
  // The sum of all lanes, halves first.
  static float tree(Floats x) {
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) x.v[i] = x.v[i] + x.v[i + half];
    return x.v[0];
  }
  // How many of the thresholds are below a value, and the magnitude that it means.
  template <int Bits>
  struct Bins {
    const float* thresholds;
    const float* magnitudes;
    Bins(const float* t, const float* m) : thresholds(t), magnitudes(m) {}
    Ints of(Floats x) const {
      return each_int([&](int i) {
        const float* end = thresholds + (1 << (Bits - 1)) - 1;
        return static_cast<int32_t>(std::lower_bound(thresholds, end, x.v[i]) - thresholds);
      });
    }
    Floats magnitude(Ints bin) const {
      return each([&](int i) { return magnitudes[bin.v[i]]; });
    }
  };
  static Ints add_where_negative(Ints a, Floats x, Ints b) {
    return each_int([&](int i) { return a.v[i] + (x.v[i] < 0 ? b.v[i] : 0); });
  }
  // The value of each of 16 levels.
  struct Codebook {
    float values[16];
    Codebook() = default;
    explicit Codebook(const float (&v)[16]) { std::memcpy(values, v, sizeof values); }
    Floats operator()(const uint8_t* levels) const {
      return each([&](int i) { return values[levels[i]]; });
    }
  };

  // Eight levels of Bits bits are Bits bytes: one little-endian word.
  template <int Bits>
  static void pack(const uint8_t* levels, uint8_t* out) {
    for (int eight = 0; eight < kGroup / 8; ++eight, levels += 8, out += Bits) {
      uint64_t word = 0;
      for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(levels[i]) << (i * Bits);
      for (int i = 0; i < Bits; ++i) out[i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
  template <int Bits>
  static void unpack(const uint8_t* in, uint8_t* levels) {
    for (int eight = 0; eight < kGroup / 8; ++eight, in += Bits, levels += 8) {
      uint64_t word = 0;
      for (int i = 0; i < Bits; ++i) word |= static_cast<uint64_t>(in[i]) << (8 * i);
      for (int i = 0; i < 8; ++i) levels[i] = static_cast<uint8_t>((word >> (i * Bits)) & ((1u << Bits) - 1));
    }
  }
};

}  // namespace

const cgx_kernels cgx_scalar_kernels = CGX_KERNEL_TABLE(Scalar);
