// The arithmetic on the values of one block, written once over a SIMD level.
//
// A level is a struct of vectors (Floats, Ints) of kLanes values and a few operations on them; scalar.cpp is the
// shortest. Everything here works on groups of 32 values. What is left at the end of a block is copied into a group of
// its own, filled up with copies of the last value: so there is one arithmetic, and nobody reads or writes outside.
#pragma once

#include "bits.h"
#include "levels.h"

namespace {

template <class Level>
constexpr int kVectors = kGroup / Level::kLanes;

// A group's worth of T, of which the first n are real.
template <class T>
struct Padded {
  alignas(64) T v[kGroup];
  Padded() = default;
  Padded(const T* x, int64_t n) {
    std::memcpy(v, x, static_cast<size_t>(n) * sizeof(T));
    for (int64_t i = n; i < kGroup; ++i) v[i] = v[n - 1];
  }
  void copy_to(T* out, int64_t n) const { std::memcpy(out, v, static_cast<size_t>(n) * sizeof(T)); }
};

// Calls visit(first value, n, block number) for each block of the span.
template <class Visit>
inline void for_each_block(const cgx_piece& piece, const PieceParts& parts, Span span, Visit visit) {
  const int64_t end = std::min(span.end, parts.quantized);
  for (int64_t first = span.first; first < end; first += piece.block)
    visit(first, std::min(piece.block, end - first), first / piece.block);
}

// ---- the range of a block ----

template <class Level>
class RangeLanes {
 public:
  void take(typename Level::Floats a, typename Level::Floats b) {
    lo_ = Level::min(lo_, Level::min(a, b));
    hi_ = Level::max(hi_, Level::max(a, b));
    nan_ = Level::note_nan(nan_, a, b);
  }
  void take(const RangeLanes& other) {
    lo_ = Level::min(lo_, other.lo_);
    hi_ = Level::max(hi_, other.hi_);
    nan_ = Level::either(nan_, other.nan_);
  }
  Range close() const { return {Level::lowest(lo_), Level::highest(hi_), Level::any(nan_)}; }

 private:
  typename Level::Floats lo_ = Level::splat(std::numeric_limits<float>::infinity());
  typename Level::Floats hi_ = Level::splat(-std::numeric_limits<float>::infinity());
  typename Level::Mask nan_ = Level::no_mask();
};

template <class Level, class T>
inline void take_group(const T* x, RangeLanes<Level>& even, RangeLanes<Level>& odd) {
  constexpr int lanes = Level::kLanes;
  for (int v = 0; v < kVectors<Level>; v += 2)
    (v % 4 == 0 ? even : odd).take(Level::load(x + v * lanes), Level::load(x + (v + 1) * lanes));
}

template <class Level, class T>
Range range_of(const T* x, int64_t n) {
  RangeLanes<Level> a, b, c;
  int64_t i = 0;
  for (; i + 2 * kGroup <= n; i += 2 * kGroup) {  // a level with two vectors a group has no odd pair
    take_group<Level>(x + i, a, b);
    take_group<Level>(x + i + kGroup, c, b);
  }
  if (i + kGroup <= n) {
    take_group<Level>(x + i, a, b);
    i += kGroup;
  }
  if (i < n) take_group<Level>(n >= kGroup ? x + n - kGroup : Padded<T>(x, n).v, a, b);
  a.take(b);
  a.take(c);
  return a.close();
}

// ---- values to levels ----

// The two roundings: trunc(x + 1/2), which never exceeds the highest level (the product is at most top (1 + 2^-22)),
// and a sum with 16 random bits below the point.
template <class Level>
struct Nearest {
  static constexpr bool kRandom = false;
  typename Level::Ints operator()(typename Level::Floats scaled, const uint16_t*) const {
    return Level::truncate(Level::add(scaled, Level::splat(0.5f)));
  }
};

template <class Level>
struct Stochastic {
  static constexpr bool kRandom = true;
  typename Level::Ints top;
  typename Level::Ints operator()(typename Level::Floats scaled, const uint16_t* random) const {
    const auto fixed = Level::round(Level::mul(scaled, Level::splat(65536.0f)));
    return Level::min(Level::shift_16(Level::add(fixed, Level::load_random(random))), top);
  }
};

// Where decoded values, and what encoding lost, are written; or nowhere.
struct Nowhere {
  Nowhere operator+(int64_t) const { return {}; }
};

template <class Level>
inline void put(Nowhere, typename Level::Floats, typename Level::Floats) {}
template <class Level, class T>
inline void put(T* out, typename Level::Floats a, typename Level::Floats b) {
  Level::store_decoded(out, a, b);
}

template <class T>
struct GroupOf;
template <>
struct GroupOf<Nowhere> {
  Nowhere v;
  void copy_to(Nowhere, int64_t) const {}
};
template <class T>
struct GroupOf<T*> : Padded<T> {};

template <class Level, class Back, class Loss>
struct Quantizing {
  typename Level::Floats lo, inverse, unit, loss_factor;
  Back back;
  Loss loss;
};

template <class Level, class Rounding, class T, class Back, class Loss>
inline void quantize_group(const T* x, Quantizing<Level, Back, Loss> how, Rounding round, const uint16_t* random,
                           uint8_t* levels, Back back, Loss loss) {
  constexpr int lanes = Level::kLanes;
  constexpr bool decodes = !(std::is_same_v<Back, Nowhere> && std::is_same_v<Loss, Nowhere>);
  typename Level::Ints q[kVectors<Level>];
  for (int v = 0; v < kVectors<Level>; v += 2) {
    const auto value_a = Level::load(x + v * lanes), value_b = Level::load(x + (v + 1) * lanes);
    q[v] = round(Level::mul(Level::sub(value_a, how.lo), how.inverse), random + v * lanes);
    q[v + 1] = round(Level::mul(Level::sub(value_b, how.lo), how.inverse), random + (v + 1) * lanes);
    if constexpr (decodes) {
      const auto a = Level::add(how.lo, Level::mul(how.unit, Level::to_floats(q[v])));
      const auto b = Level::add(how.lo, Level::mul(how.unit, Level::to_floats(q[v + 1])));
      put<Level>(loss + v * lanes, Level::mul(Level::sub(value_a, a), how.loss_factor),
                 Level::mul(Level::sub(value_b, b), how.loss_factor));
      put<Level>(back + v * lanes, a, b);
    }
  }
  Level::store_levels(levels, q);
}

// Finding the range of a block waits for memory, and quantizing does not: it asks for what comes next meanwhile.
template <class T>
struct Prefetch {
  const T* next;
  Prefetch operator+(int64_t i) const { return {next + i}; }
  void group(int64_t i) const {
    const char* line = reinterpret_cast<const char*>(next + i);
    for (size_t nbytes = 0; nbytes < kGroup * sizeof(T); nbytes += 64) __builtin_prefetch(line + nbytes);
  }
};
template <class T>
Prefetch(const T*) -> Prefetch<T>;

// Quantizes n values, at most a segment, of one block. The last group may overlap the one before: it only repeats it.
template <class Level, class Rounding, class T, class Back, class Loss, class Next>
inline void quantize(const T* x, int64_t n, Quantizing<Level, Back, Loss> how, Rounding round, const uint16_t* random,
                     uint8_t* levels, Prefetch<Next> next) {
  const auto group = [&](int64_t i) {
    quantize_group<Level>(x + i, how, round, random + i, levels + i, how.back + i, how.loss + i);
  };
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    next.group(i);
    group(i);
  }
  if (i == n) return;
  if (n >= kGroup) return group(n - kGroup);
  const Padded<T> last(x, n);
  GroupOf<Back> back;
  GroupOf<Loss> loss;
  quantize_group<Level>(last.v, how, round, random, levels, Back{back.v}, Loss{loss.v});
  back.copy_to(how.back, n);
  loss.copy_to(how.loss, n);
}

// ---- levels to values ----

template <class Level>
struct Dequantizing {
  typename Level::Floats unit, lo;
  explicit Dequantizing(const Header& header) : unit(Level::splat(header.unit)), lo(Level::splat(header.lo)) {}
  typename Level::Floats operator()(const uint8_t* levels) const {
    return Level::add(lo, Level::mul(unit, Level::to_floats(Level::load_levels(levels))));
  }
};

template <class Level, Writing writing, class T>
inline void dequantize_group(const uint8_t* levels, const Dequantizing<Level>& decoded, T* x) {
  constexpr int lanes = Level::kLanes;
  for (int v = 0; v < kVectors<Level>; v += 2) {
    auto a = decoded(levels + v * lanes), b = decoded(levels + (v + 1) * lanes);
    T* out = x + v * lanes;
    if constexpr (writing == Writing::kAdd) {
      Level::store(out, Level::add(Level::load(out), a));
      Level::store(out + lanes, Level::add(Level::load(out + lanes), b));
    } else if constexpr (writing == Writing::kStream) {
      Level::stream_decoded(out, a, b);
    } else {
      Level::store_decoded(out, a, b);
    }
  }
}

template <class Level, Writing writing, class T>
inline void dequantize(const uint8_t* levels, int64_t n, const Header& header, T* x) {
  const Dequantizing<Level> decoded(header);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) dequantize_group<Level, writing>(levels + i, decoded, x + i);
  if (i == n) return;
  if (writing != Writing::kAdd && n >= kGroup)
    return dequantize_group<Level, Writing::kStore>(levels + n - kGroup, decoded, x + n - kGroup);
  constexpr Writing buffered = writing == Writing::kAdd ? Writing::kAdd : Writing::kStore;
  Padded<T> last(x + i, n - i);
  dequantize_group<Level, buffered>(levels + i, decoded, last.v);
  last.copy_to(x + i, n - i);
}

// sum = (x + decoded) * scale; takes the range of the result.
template <class Level, class T>
inline void accumulate_group(const uint8_t* levels, const Dequantizing<Level>& decoded, const T* x,
                             typename Level::Floats scale, float* sum, RangeLanes<Level>& even,
                             RangeLanes<Level>& odd) {
  constexpr int lanes = Level::kLanes;
  for (int v = 0; v < kVectors<Level>; ++v)
    Level::store(sum + v * lanes,
                 Level::mul(Level::add(Level::load(x + v * lanes), decoded(levels + v * lanes)), scale));
  take_group<Level>(sum, even, odd);
}

template <class Level, class T>
inline void accumulate(const uint8_t* levels, int64_t n, const Header& header, const T* x, float scale, float* sum,
                       RangeLanes<Level>& range) {
  const Dequantizing<Level> decoded(header);
  const auto scales = Level::splat(scale);
  RangeLanes<Level> odd;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) accumulate_group<Level>(levels + i, decoded, x + i, scales, sum + i, range, odd);
  if (i < n) {
    const Padded<uint8_t> last_levels(levels + i, n - i);
    const Padded<T> last(x + i, n - i);
    Padded<float> last_sum;
    accumulate_group<Level>(last_levels.v, decoded, last.v, scales, last_sum.v, range, odd);
    last_sum.copy_to(sum + i, n - i);
  }
  range.take(odd);
}

}  // namespace
