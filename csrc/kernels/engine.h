// Encode, decode and reduce, written once over a SIMD level.
//
// A level is a struct with eight-lane vectors (Floats, Ints) and a few operations on them; see scalar.cpp, the
// shortest. The engine walks pieces, pieces walk blocks, and a block stays in the first-level cache while it is worked
// on:
//   encode: find the block's range, then quantize eight values at a time and pack their levels;
//   decode: unpack eight levels at a time;
//   reduce: own values plus each payload into a float32 scratch block, its range found in the last addition;
//           then encode from the scratch block, writing the decoded values back in the same pass.
// Levels form one bit stream over all blocks of a piece. Where every block starts at a byte (block size a multiple of
// 8, or a single block) the eight-lane path runs; otherwise, and for the last few values of a piece, values go one by
// one.
#pragma once

#include <algorithm>
#include <vector>

#include "numerics.h"

namespace {

constexpr int kLanes = 8;

// Bit streams, one level at a time.
template <int Bits>
inline int32_t read_level(const uint8_t* levels, int64_t position) {
  const int64_t bit = position * Bits;
  const uint8_t* p = levels + (bit >> 3);
  const int shift = static_cast<int>(bit & 7);
  uint32_t word = p[0];
  if (shift + Bits > 8) word |= static_cast<uint32_t>(p[1]) << 8;
  return static_cast<int32_t>((word >> shift) & ((1u << Bits) - 1));
}

// The first level that touches a byte clears it, so the stream needs no zeroing before.
template <int Bits>
inline void write_level(uint8_t* levels, int64_t position, int32_t level) {
  const int64_t bit = position * Bits;
  uint8_t* p = levels + (bit >> 3);
  const int shift = static_cast<int>(bit & 7);
  const uint32_t word = static_cast<uint32_t>(level) << shift;
  const uint8_t kept = static_cast<uint8_t>(p[0] & ((1u << shift) - 1));
  p[0] = static_cast<uint8_t>(kept | word);
  if (shift + Bits > 8) p[1] = static_cast<uint8_t>(word >> 8);
}

// The roundings: r = 1/2, or random. `lanes` gives r for eight values from the index at which the walker stands.
template <class Level>
struct NearestRounding {
  explicit NearestRounding(const cgx_rounding&, int64_t) {}
  static constexpr bool kMayExceed =
      false;  // trunc((x - lo) * inverse + 1/2) <= L: the product is at most L (1 + 2^-22)
  float at(int64_t) const { return 0.5f; }
  typename Level::Floats lanes(int64_t) const { return Level::splat(0.5f); }
};

template <class Level>
struct RandomRounding {
  RandomRounding(const cgx_rounding& rounding, int64_t index)
      : rounding_(rounding), key_(random_key(rounding, index)) {}
  static constexpr bool kMayExceed = true;
  float at(int64_t index) const { return random_unit(random_key(rounding_, index), index); }
  typename Level::Floats lanes(int64_t index) const { return Level::random(key_, static_cast<uint32_t>(index)); }

 private:
  const cgx_rounding& rounding_;
  RandomKey key_;
};

template <class T>
inline Range range_of_few(const T* x, int64_t n, Range range) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = to_float(x[i]);
    range.has_nan |= v != v;
    range.lo = v < range.lo ? v : range.lo;
    range.hi = v > range.hi ? v : range.hi;
  }
  return range;
}

constexpr Range kEmptyRange = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), false};

template <class Level>
struct RangeLanes {
  typename Level::Floats lo = Level::splat(kEmptyRange.lo), hi = Level::splat(kEmptyRange.hi), nan = Level::splat(0.0f);
  inline void take(typename Level::Floats v) {
    lo = Level::min(lo, v);
    hi = Level::max(hi, v);
    nan = Level::note_nan(nan, v);
  }
  Range close() const { return {Level::lowest(lo), Level::highest(hi), Level::any_nan(nan)}; }
};

template <class Level, class T>
inline Range range_of(const T* x, int64_t n) {
  RangeLanes<Level> a, b;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a.take(Level::load(x + i));
    b.take(Level::load(x + i + kLanes));
  }
  for (; i + kLanes <= n; i += kLanes) a.take(Level::load(x + i));
  const Range ra = a.close(), rb = b.close();
  Range range = {std::min(ra.lo, rb.lo), std::max(ra.hi, rb.hi), ra.has_nan || rb.has_nan};
  return range_of_few(x + i, n - i, range);
}

// A place in a piece's level stream: values before it, and where the stream ends.
struct Stream {
  int64_t position;
  int64_t end_nbytes;
  bool aligned;  // position is a multiple of 8
};

struct NoWriteBack {};
template <class Level>
inline void write_back(NoWriteBack, int64_t, typename Level::Floats) {}
template <class Level, class T>
inline void write_back(T* out, int64_t i, typename Level::Floats v) {
  Level::store(out + i, v);
}
inline void write_back_one(NoWriteBack, int64_t, float) {}
template <class T>
inline void write_back_one(T* out, int64_t i, float v) {
  from_float(v, out + i);
}

// Where the tensor goes on behind a block of n values: what x reads, or what is written back.
template <class T>
inline const T* next_block(const T* x, NoWriteBack, int64_t n) {
  return x + n;
}
template <class T, class Back>
inline const Back* next_block(const T*, Back* back, int64_t n) {
  return back + n;
}

// Quantizes n values of one block into the level stream; back, if not NoWriteBack, receives their decoded values.
template <class Level, int Bits, class Rounding, class T, class Back>
inline void quantize_block(const T* x, int64_t n, const BlockScale& scale, const Rounding& rounding, int64_t index,
                           uint8_t* levels, Stream stream, Back back) {
  constexpr int32_t top = (1 << Bits) - 1;
  const auto lo = Level::splat(scale.header.lo), inverse = Level::splat(scale.inverse);
  const auto unit = Level::splat(scale.header.unit);
  const auto quantize_lanes = [&](int64_t i) {
    const auto scaled = Level::mul(Level::sub(Level::load(x + i), lo), inverse);
    auto level = Level::truncate(Level::add(scaled, rounding.lanes(index + i)));
    if (Rounding::kMayExceed) level = Level::min(level, Level::splat_int(top));
    write_back<Level>(back, i, Level::add(lo, Level::mul(unit, Level::to_floats(level))));
    return level;
  };
  int64_t i = 0;
  if (stream.aligned) {
    const int64_t start = stream.position / 8 * Bits;
    constexpr int64_t group = 4 * kLanes;
    const auto* next = next_block(x, back, n);
    for (; i + group <= n; i += group) {
      // Finding the range of a block waits for memory, and this loop does not: it asks for what comes next meanwhile.
      for (size_t line = 0; line < group * sizeof *next; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next + n / 2 + i) + line);
      const auto a = quantize_lanes(i), b = quantize_lanes(i + 8), c = quantize_lanes(i + 16),
                 d = quantize_lanes(i + 24);
      const int64_t at = start + i / 8 * Bits;
      Level::template pack4<Bits>(a, b, c, d, levels + at, stream.end_nbytes - at);
    }
    for (; i + kLanes <= n; i += kLanes) Level::template pack1<Bits>(quantize_lanes(i), levels + start + i / 8 * Bits);
  }
  for (; i < n; ++i) {
    const float scaled = (to_float(x[i]) - scale.header.lo) * scale.inverse;
    const int32_t level = std::min(top, static_cast<int32_t>(scaled + rounding.at(index + i)));
    write_back_one(back, i, dequantize(scale.header, level));
    write_level<Bits>(levels, stream.position + i, level);
  }
}

// A block all of whose levels are 0.
template <class Level, int Bits, class Back>
inline void flat_block(int64_t n, const Header& header, uint8_t* levels, Stream stream, Back back) {
  const float value = dequantize(header, 0);
  int64_t i = 0;
  if (stream.aligned) {
    const int64_t whole = n / 8 * 8;
    std::memset(levels + stream.position / 8 * Bits, 0, static_cast<size_t>(whole / 8 * Bits));
    for (; i < whole; i += kLanes) write_back<Level>(back, i, Level::splat(value));
  }
  for (; i < n; ++i) {
    write_back_one(back, i, value);
    write_level<Bits>(levels, stream.position + i, 0);
  }
}

// A block straddling a multiple of 2^32 changes its random key inside; so does none but that one: it goes value by
// value.
inline bool key_changes(int64_t index, int64_t n) { return (index >> 32) != ((index + n - 1) >> 32); }

template <class Level, int Bits, class Rounding, class T, class Back>
inline void encode_block(const T* x, int64_t n, const Range& range, const cgx_rounding& how, int64_t index,
                         uint8_t* header, uint8_t* levels, Stream stream, Back back) {
  const BlockScale scale = scale_of<Bits>(range);
  std::memcpy(header, &scale.header, sizeof scale.header);
  if (scale.flat) return flat_block<Level, Bits>(n, scale.header, levels, stream, back);
  if (Rounding::kMayExceed && key_changes(index, n)) stream.aligned = false;
  quantize_block<Level, Bits>(x, n, scale, Rounding(how, index), index, levels, stream, back);
}

// Calls visit(i, n, lanes) for n levels of one block, eight lanes at a time, then visit_one(i, value) for the rest.
template <class Level, int Bits, class Visit, class VisitOne>
inline void dequantize_block(const Header& header, const uint8_t* levels, Stream stream, int64_t n, Visit visit,
                             VisitOne visit_one) {
  const auto unit = Level::splat(header.unit), lo = Level::splat(header.lo);
  int64_t i = 0;
  if (stream.aligned) {
    const uint8_t* p = levels + stream.position / 8 * Bits;
    // unpack reads 8 bytes: near the end of the stream it gets a copy.
    const int64_t readable = stream.end_nbytes - stream.position / 8 * Bits - 8;
    const int64_t direct = readable < 0 ? 0 : std::min(n / kLanes, readable / Bits + 1) * kLanes;
    for (; i < direct; i += kLanes, p += Bits)
      visit(i, Level::add(lo, Level::mul(unit, Level::to_floats(Level::template unpack<Bits>(p)))));
    for (; i + kLanes <= n; i += kLanes, p += Bits) {
      uint8_t word[8] = {};
      std::memcpy(word, p, Bits);
      visit(i, Level::add(lo, Level::mul(unit, Level::to_floats(Level::template unpack<Bits>(word)))));
    }
  }
  for (; i < n; ++i) visit_one(i, dequantize(header, read_level<Bits>(levels, stream.position + i)));
}

inline Header read_header(const uint8_t* payload, int64_t block) {
  Header header;
  std::memcpy(&header, payload + block * static_cast<int64_t>(sizeof header), sizeof header);
  return header;
}

// Calls visit(first value, n, block number, stream) for each block of a piece.
template <class Visit>
inline void for_each_block(const cgx_piece& piece, const PieceParts& parts, Visit visit) {
  const bool aligned = piece.block % 8 == 0 || parts.blocks == 1;
  for (int64_t block = 0, first = 0; block < parts.blocks; ++block, first += piece.block) {
    const int64_t n = std::min(piece.block, parts.quantized - first);
    visit(first, n, block, Stream{first, parts.levels_nbytes, aligned});
  }
}

template <class Level, int Bits, class Rounding, class T>
void encode_quantized(const cgx_piece& piece, const PieceParts& parts, const T* values, uint8_t* payload,
                      const cgx_rounding& how) {
  for_each_block(piece, parts, [&](int64_t first, int64_t n, int64_t block, Stream stream) {
    const T* x = values + first;
    encode_block<Level, Bits, Rounding>(x, n, range_of<Level>(x, n), how, piece.offset + first,
                                        payload + block * sizeof(Header), payload + parts.levels, stream,
                                        NoWriteBack{});
  });
}

template <class Level, int Bits, bool Add, class T>
void decode_quantized(const cgx_piece& piece, const PieceParts& parts, const uint8_t* payload, T* values) {
  for_each_block(piece, parts, [&](int64_t first, int64_t n, int64_t block, Stream stream) {
    T* x = values + first;
    dequantize_block<Level, Bits>(
        read_header(payload, block), payload + parts.levels, stream, n,
        [&](int64_t i, typename Level::Floats v) { Level::store(x + i, Add ? Level::add(Level::load(x + i), v) : v); },
        [&](int64_t i, float v) { from_float(Add ? to_float(x[i]) + v : v, x + i); });
  });
}

// sum[i] = (x[i] + decoded[i]) * scale, and the range of the result.
template <class Level, int Bits, class T>
inline Range accumulate(const T* x, const uint8_t* payload, const PieceParts& parts, int64_t block, Stream stream,
                        int64_t n, float scale, float* sum) {
  RangeLanes<Level> lanes;
  Range few = kEmptyRange;
  const auto scales = Level::splat(scale);
  dequantize_block<Level, Bits>(
      read_header(payload, block), payload + parts.levels, stream, n,
      [&](int64_t i, typename Level::Floats v) {
        const auto total = Level::mul(Level::add(Level::load(x + i), v), scales);
        Level::store(sum + i, total);
        lanes.take(total);
      },
      [&](int64_t i, float v) {
        const float total = to_float(x[i]) + v;
        sum[i] = total * scale;
        few = range_of_few(sum + i, 1, few);
      });
  const Range many = lanes.close();
  return {std::min(many.lo, few.lo), std::max(many.hi, few.hi), many.has_nan || few.has_nan};
}

template <class Level, int Bits, class Rounding, class T>
void reduce_quantized(const cgx_piece& piece, const PieceParts& parts, T* values, const uint8_t* const* payloads,
                      int64_t n_payloads, float scale, uint8_t* out, const cgx_rounding& how, float* sum) {
  for_each_block(piece, parts, [&](int64_t first, int64_t n, int64_t block, Stream stream) {
    T* x = values + first;
    Range range = kEmptyRange;
    for (int64_t k = 0; k < n_payloads; ++k) {
      const uint8_t* payload = payloads[k] + piece.payload;
      const float last_scale = k + 1 == n_payloads ? scale : 1.0f;
      range = k == 0 ? accumulate<Level, Bits>(x, payload, parts, block, stream, n, last_scale, sum)
                     : accumulate<Level, Bits>(sum, payload, parts, block, stream, n, last_scale, sum);
    }
    encode_block<Level, Bits, Rounding>(sum, n, range, how, piece.offset + first, out + block * sizeof(Header),
                                        out + parts.levels, stream, x);
  });
}

// Raw values: the tails of pieces, and whole pieces of 32 bits.
constexpr int64_t kRawTile = 1024;

template <class Level, class T>
void add_raw(const uint8_t* payload, T* values, int64_t n) {
  const T* other = reinterpret_cast<const T*>(payload);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Level::store(values + i, Level::add(Level::load(values + i), Level::load(other + i)));
  for (; i < n; ++i) {
    T v;
    std::memcpy(&v, other + i, sizeof v);
    from_float(to_float(values[i]) + to_float(v), values + i);
  }
}

template <class Level, class T>
inline void reduce_raw_one(T* values, const uint8_t* const* payloads, int64_t n_payloads, int64_t at, float scale,
                           T* out) {
  float total = to_float(*values);
  for (int64_t k = 0; k < n_payloads; ++k) {
    T v;
    std::memcpy(&v, payloads[k] + at, sizeof v);
    total = total + to_float(v);
  }
  from_float(total * scale, values);
  std::memcpy(out, values, sizeof *values);
}

// values = (values + sum of payloads) * scale, copied to out. `at`: byte offset of the values in every payload.
template <class Level, class T>
void reduce_raw(T* values, const uint8_t* const* payloads, int64_t n_payloads, int64_t at, int64_t n, float scale,
                uint8_t* out) {
  T* copy = reinterpret_cast<T*>(out);
  const auto scales = Level::splat(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    auto total = Level::load(values + i);
    for (int64_t k = 0; k < n_payloads; ++k)
      total = Level::add(total, Level::load(reinterpret_cast<const T*>(payloads[k] + at) + i));
    total = Level::mul(total, scales);
    Level::store(values + i, total);
    Level::store(copy + i, total);
  }
  for (; i < n; ++i)
    reduce_raw_one<Level>(values + i, payloads, n_payloads, at + i * static_cast<int64_t>(sizeof(T)), scale, copy + i);
}

inline void reduce_raw_double(double* values, const uint8_t* const* payloads, int64_t n_payloads, int64_t at, int64_t n,
                              double scale, uint8_t* out) {
  for (int64_t start = 0; start < n; start += kRawTile) {
    const int64_t count = std::min(kRawTile, n - start);
    double* x = values + start;
    for (int64_t k = 0; k < n_payloads; ++k) {
      const double* other = reinterpret_cast<const double*>(payloads[k] + at) + start;
      for (int64_t i = 0; i < count; ++i) x[i] += other[i];
    }
    for (int64_t i = 0; i < count; ++i) x[i] *= scale;
    std::memcpy(out + start * sizeof(double), x, static_cast<size_t>(count) * sizeof(double));
  }
}

// From run-time width to compile-time width: calls f.template run<Bits>().
template <class F>
inline void with_bits(int64_t bits, F f) {
  switch (bits) {
    case 1:
      return f.template run<1>();
    case 2:
      return f.template run<2>();
    case 3:
      return f.template run<3>();
    case 4:
      return f.template run<4>();
    case 5:
      return f.template run<5>();
    case 6:
      return f.template run<6>();
    case 7:
      return f.template run<7>();
    case 8:
      return f.template run<8>();
    default:
      return;
  }
}

inline void clear_padding(uint8_t* payload, int64_t used, int64_t nbytes) {
  std::memset(payload + used, 0, static_cast<size_t>(nbytes - used));
}

template <class Level>
struct Engine {
  template <class T>
  struct Encode {
    const cgx_piece& piece;
    const PieceParts& parts;
    const T* values;
    uint8_t* payload;
    const cgx_rounding& how;
    template <int Bits>
    void run() const {
      if (how.stochastic)
        encode_quantized<Level, Bits, RandomRounding<Level>>(piece, parts, values, payload, how);
      else
        encode_quantized<Level, Bits, NearestRounding<Level>>(piece, parts, values, payload, how);
    }
  };

  template <class T>
  struct Decode {
    const cgx_piece& piece;
    const PieceParts& parts;
    const uint8_t* payload;
    T* values;
    bool add;
    template <int Bits>
    void run() const {
      if (add)
        decode_quantized<Level, Bits, true>(piece, parts, payload, values);
      else
        decode_quantized<Level, Bits, false>(piece, parts, payload, values);
    }
  };

  template <class T>
  struct Reduce {
    const cgx_piece& piece;
    const PieceParts& parts;
    T* values;
    const uint8_t* const* payloads;
    int64_t n_payloads;
    float scale;
    uint8_t* out;
    const cgx_rounding& how;
    template <int Bits>
    void run() const {
      thread_local std::vector<float> scratch;  // one block; kept, because a call is often shorter than an allocation
      const size_t needed = static_cast<size_t>(std::min(piece.block, parts.quantized));
      if (scratch.size() < needed) scratch.resize(needed);
      if (how.stochastic)
        reduce_quantized<Level, Bits, RandomRounding<Level>>(piece, parts, values, payloads, n_payloads, scale, out,
                                                             how, scratch.data());
      else
        reduce_quantized<Level, Bits, NearestRounding<Level>>(piece, parts, values, payloads, n_payloads, scale, out,
                                                              how, scratch.data());
    }
  };

  template <class T>
  static void encode(const cgx_piece& piece, const void* values, uint8_t* slot, const cgx_rounding& how) {
    const PieceParts parts(piece, sizeof(T));
    const T* x = static_cast<const T*>(values) + piece.offset;
    uint8_t* payload = slot + piece.payload;
    if constexpr (sizeof(T) <= 4) with_bits(piece.bits, Encode<T>{piece, parts, x, payload, how});
    const size_t raw_nbytes = static_cast<size_t>(piece.numel - parts.quantized) * sizeof(T);
    std::memcpy(payload + parts.tail, x + parts.quantized, raw_nbytes);
    clear_padding(payload, parts.tail + static_cast<int64_t>(raw_nbytes), parts.nbytes);
  }

  template <class T>
  static void decode(const cgx_piece& piece, const uint8_t* slot, void* values, bool add) {
    const PieceParts parts(piece, sizeof(T));
    T* x = static_cast<T*>(values) + piece.offset;
    const uint8_t* payload = slot + piece.payload;
    const int64_t raw = piece.numel - parts.quantized;
    if constexpr (sizeof(T) <= 4) {
      with_bits(piece.bits, Decode<T>{piece, parts, payload, x, add});
      if (add) return add_raw<Level>(payload + parts.tail, x + parts.quantized, raw);
    } else if (add) {
      for (int64_t i = 0; i < raw; ++i) x[i] += reinterpret_cast<const double*>(payload)[i];
      return;
    }
    std::memcpy(x + parts.quantized, payload + parts.tail, static_cast<size_t>(raw) * sizeof(T));
  }

  template <class T>
  static void reduce(const cgx_piece& piece, void* values, const uint8_t* const* payloads, int64_t n_payloads,
                     double scale, uint8_t* slot, const cgx_rounding& how) {
    const PieceParts parts(piece, sizeof(T));
    T* x = static_cast<T*>(values) + piece.offset;
    uint8_t* out = slot + piece.payload;
    const int64_t raw = piece.numel - parts.quantized;
    const int64_t at = piece.payload + parts.tail;
    if constexpr (sizeof(T) <= 4) {
      const float narrow = static_cast<float>(scale);
      with_bits(piece.bits, Reduce<T>{piece, parts, x, payloads, n_payloads, narrow, out, how});
      reduce_raw<Level>(x + parts.quantized, payloads, n_payloads, at, raw, narrow, out + parts.tail);
    } else {
      reduce_raw_double(x, payloads, n_payloads, at, raw, scale, out);
    }
    clear_padding(out, parts.tail + raw * static_cast<int64_t>(sizeof(T)), parts.nbytes);
  }
};

}  // namespace
