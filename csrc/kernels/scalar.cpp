// The portable level: eight lanes as plain arrays, which any compiler may vectorise as far as its target goes.
#include "engine.h"
#include "levels.h"

namespace {

struct Scalar {
  struct Floats {
    float v[kLanes];
  };
  struct Ints {
    int32_t v[kLanes];
  };

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
    return each([&](int i) {
      T x;
      std::memcpy(&x, p + i, sizeof x);
      return to_float(x);
    });
  }
  template <class T>
  static void store(T* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) {
      T narrow;
      from_float(x.v[i], &narrow);
      std::memcpy(p + i, &narrow, sizeof narrow);
    }
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
  static Ints min(Ints a, Ints b) {
    return each_int([&](int i) { return b.v[i] < a.v[i] ? b.v[i] : a.v[i]; });
  }
  static Floats note_nan(Floats noted, Floats x) {
    return each([&](int i) { return x.v[i] != x.v[i] ? 1.0f : noted.v[i]; });
  }
  static bool any_nan(Floats noted) {
    for (float x : noted.v)
      if (x != 0.0f) return true;
    return false;
  }
  static float lowest(Floats x) { return *std::min_element(x.v, x.v + kLanes); }
  static float highest(Floats x) { return *std::max_element(x.v, x.v + kLanes); }
  static Ints truncate(Floats x) {
    return each_int([&](int i) { return static_cast<int32_t>(x.v[i]); });
  }
  static Floats to_floats(Ints x) {
    return each([&](int i) { return static_cast<float>(x.v[i]); });
  }
  static Floats random(const RandomKey& key, uint32_t index) {
    return each([&](int i) { return random_unit(key, static_cast<uint32_t>(index + static_cast<uint32_t>(i))); });
  }

  // Eight levels of Bits bits are Bits bytes: one little-endian word.
  template <int Bits>
  static void pack1(Ints x, uint8_t* out) {
    uint64_t word = 0;
    for (int i = 0; i < kLanes; ++i) word |= static_cast<uint64_t>(x.v[i]) << (i * Bits);
    for (int i = 0; i < Bits; ++i) out[i] = static_cast<uint8_t>(word >> (8 * i));
  }
  template <int Bits>
  static void pack4(Ints a, Ints b, Ints c, Ints d, uint8_t* out, int64_t) {
    pack1<Bits>(a, out);
    pack1<Bits>(b, out + Bits);
    pack1<Bits>(c, out + 2 * Bits);
    pack1<Bits>(d, out + 3 * Bits);
  }
  template <int Bits>
  static Ints unpack(const uint8_t* p) {
    uint64_t word = 0;
    for (int i = 0; i < Bits; ++i) word |= static_cast<uint64_t>(p[i]) << (8 * i);
    return each_int([&](int i) { return static_cast<int32_t>((word >> (i * Bits)) & ((1u << Bits) - 1)); });
  }
};

}  // namespace

const cgx_kernels cgx_scalar_kernels = CGX_KERNEL_TABLE(Scalar);
