// The rotated codec over a SIMD level: blocks of a power of two of values, rotated so that they look Gaussian, and
// coded by the Lloyd-Max levels of the normal distribution. The steps are those of docs/wire_format.md.
//
// An incomplete block is copied and filled up with zeros, so that all arithmetic is on whole blocks.
#pragma once

#include "rotation.h"

namespace {

// ---- the tables ----

// By bits, then by magnitude; float32, exactly.
constexpr float kMagnitudes[4][8] = {
    {0x1.988454p-1f},
    {0x1.cfa592p-2f, 0x1.82aabap+0f},
    {0x1.f5f3f0p-3f, 0x1.831320p-1f, 0x1.580a70p+0f, 0x1.1372f4p+1f},
    {0x1.06f3fap-3f, 0x1.8d5c88p-2f, 0x1.5042bcp-1f, 0x1.e27a72p-1f, 0x1.41985ep+0f, 0x1.9e384ap+0f, 0x1.08d58ep+1f,
     0x1.5dc57ep+1f},
};
// Of the thresholds between magnitudes, the squares.
constexpr float kThresholds[4][7] = {
    {},
    {0x1.ed54a0p-1f},
    {0x1.009030p-2f, 0x1.1a3790p+0f, 0x1.871272p+1f},
    {0x1.111d66p-4f, 0x1.177494p-2f, 0x1.474fb0p-1f, 0x1.355ba0p+0f, 0x1.085dfap+1f, 0x1.b305a4p+1f, 0x1.70e308p+2f},
};

// A block's scale says how it is coded.
inline bool is_constant(float scale) { return float_to_bits(scale) >> 31 != 0 && scale != 0; }
inline uint8_t sign_level(int64_t bits) { return static_cast<uint8_t>(1 << (bits - 1)); }
inline float constant_of(float scale, uint8_t first_level, int64_t bits) {
  return first_level & sign_level(bits) ? scale : -scale;
}

// ---- encoding rotated values ----

// Returns the scale. top: the bits of the largest magnitude.
template <class Level, int Bits>
float quantize_rotated(const float* y, int64_t n, int32_t top, uint8_t* levels) {
  using Floats = typename Level::Floats;
  constexpr int lanes = Level::kLanes, vectors = kVectors<Level>;
  const auto all_zero = [&](float scale) {
    std::memset(levels, 0, static_cast<size_t>(n));
    return scale;
  };
  if (top == 0) return all_zero(0.0f);
  if (top >> 23 == 255) return all_zero(canonical_nan());
  const uint32_t exponent = static_cast<uint32_t>(std::min(std::max(top >> 23, 1), 253));
  const Floats up = Level::splat(bits_to_float((254 - exponent) << 23));
  const float square = tree_sum<Level>(n, [=](int64_t i) {
    GroupOfFloats<Level> out;
    for (int v = 0; v < vectors; ++v) {
      const Floats z = Level::mul(Level::load(y + i + v * lanes), up);
      out.v[v] = Level::mul(z, z);
    }
    return out;
  });
  float thresholds[7] = {};
  const float mean = square * (1.0f / static_cast<float>(n));
  for (int j = 0; j < (1 << (Bits - 1)) - 1; ++j) thresholds[j] = kThresholds[Bits - 1][j] * mean;
  const typename Level::template Bins<Bits> bins(thresholds, kMagnitudes[Bits - 1]);
  const auto sign = Level::splat_int(sign_level(Bits));
  const float product = tree_sum<Level>(n, [=](int64_t i) {
    GroupOfFloats<Level> out;
    typename Level::Ints q[vectors];
    for (int v = 0; v < vectors; ++v) {
      const Floats z = Level::mul(Level::load(y + i + v * lanes), up);
      const auto bin = bins.of(Level::mul(z, z));
      out.v[v] = Level::mul(Level::magnitude(z), bins.magnitude(bin));
      q[v] = Level::add_where_negative(bin, z, sign);
    }
    Level::store_levels(levels + i, q);
    return out;
  });
  const float scale = (square / product) * bits_to_float(exponent << 23);
  return scale <= std::numeric_limits<float>::max() ? scale : all_zero(canonical_nan());
}

// ---- a part of a piece ----

// Where a decoded block goes.
template <class Level, Writing writing, class T>
struct Put {
  T* out;
  void operator()(int64_t i, typename Level::Floats a, typename Level::Floats b) const {
    T* p = out + i;
    if constexpr (writing == Writing::kAdd) {
      Level::store(p, Level::add(Level::load(p), a));
      Level::store(p + Level::kLanes, Level::add(Level::load(p + Level::kLanes), b));
    } else if constexpr (writing == Writing::kStream) {
      Level::stream_decoded(p, a, b);
    } else {
      Level::store_decoded(p, a, b);
    }
  }
};

// Codes one block after the other, as so many values as the last prepare() said.
template <class Level>
class RotatedBlocks {
 public:
  RotatedBlocks(const cgx_piece& piece, const PieceParts& parts, const RandomKey& key)
      : bits_(piece.bits), parts_(parts), key_(key) {
    constexpr int64_t apart = 32;  // arrays at one distance of a page would wait for each other
    const int64_t most = std::min(piece.block, rotated_numel(parts.quantized)), room = most + apart;
    float* scratch = cgx_scratch(6 * room + 16);
    scratch += (64 - reinterpret_cast<uintptr_t>(scratch) % 64) % 64 / sizeof(float);
    y_ = scratch;
    work_ = y_ + room;
    filled_ = work_ + room;
    forward_ = filled_ + room;
    back_ = forward_ + room;
    levels_ = reinterpret_cast<uint8_t*>(back_ + room);
    float codes[16] = {};
    for (int i = 0; i < 1 << bits_; ++i) {
      const float m = kMagnitudes[bits_ - 1][i & (sign_level(bits_) - 1)];
      codes[i] = i & sign_level(bits_) ? -m : m;
    }
    codebook_ = typename Level::Codebook(codes);
  }

  int64_t numel() const { return n_; }
  uint8_t* levels() { return levels_; }
  float* filled() { return filled_; }
  float* work() { return work_; }

  // Of a block with so many real values.
  void prepare(int64_t numel) {
    const int64_t n = rotated_numel(numel);
    if (n == n_) return;
    n_ = n;
    int k = 0;
    while (int64_t{1} << k < n) ++k;
    fill_signs(k / 2, forward_);
    fill_signs(k - k / 2, back_);
  }

  // Copies m values, each through f, and fills up with zeros.
  template <class S, class F>
  const float* fill(const S* x, int64_t m, F f) {
    for (int64_t i = 0; i < m; ++i) filled_[i] = f(to_float(x[i]));
    std::fill(filled_ + m, filled_ + n_, 0.0f);
    return filled_;
  }

  // y = rotate(x).
  template <class S>
  void rotate(const S* x) {
    constexpr int lanes = Level::kLanes;
    typename Level::Ints top = Level::splat_int(0);
    transform<Level>(
        n_, y_, [=](int64_t i) { return Level::mul(Level::load(x + i), Level::load(forward_ + i)); },
        [&](int64_t i, typename Level::Floats a, typename Level::Floats b) {
          Level::store(y_ + i, a);
          Level::store(y_ + i + lanes, b);
          top = Level::max(top, Level::max(Level::bits(Level::magnitude(a)), Level::bits(Level::magnitude(b))));
        });
    top_ = Level::highest(top);
  }

  // Encodes what was rotated; returns the scale.
  float quantize() {
    constexpr float (*widths[])(const float*, int64_t, int32_t, uint8_t*) = {
        quantize_rotated<Level, 1>, quantize_rotated<Level, 2>, quantize_rotated<Level, 3>, quantize_rotated<Level, 4>};
    return widths[bits_ - 1](y_, n_, top_, levels_);
  }

  // Encodes a block, of which m values are real; returns the scale.
  template <class S>
  float encode(const S* x, int64_t m) {
    const float first = to_float(x[0]);
    if (first == to_float(x[m - 1])) {
      const Range range = range_of<Level>(x, m);
      if (range.lo == range.hi && !range.has_nan && std::fabs(first) <= std::numeric_limits<float>::max()) {
        std::memset(levels_, first < 0 ? sign_level(bits_) : 0, static_cast<size_t>(n_));
        return first == 0 ? 0.0f : -std::fabs(first);
      }
    }
    m < n_ ? rotate(fill(x, m, [](float v) { return v; })) : rotate(x);
    return quantize();
  }

  // Adds a payload's block to what was rotated, or (onto_y 0) puts it in its place, and multiplies.
  void accumulate(const uint8_t* levels, float scale, bool onto_y, float factor) {
    constexpr int lanes = Level::kLanes;
    const auto scales = Level::splat(scale), factors = Level::splat(factor);
    typename Level::Ints top = Level::splat_int(0);
    for (int64_t i = 0; i < n_; i += lanes) {
      const auto decoded = Level::mul(scales, codebook_(levels + i));
      const auto sum = Level::mul(onto_y ? Level::add(Level::load(y_ + i), decoded) : decoded, factors);
      Level::store(y_ + i, sum);
      top = Level::max(top, Level::bits(Level::magnitude(sum)));
    }
    top_ = Level::highest(top);
  }

  // Calls put(i, a, b) with two vectors of back(get) from value i on.
  template <class Get, class Out>
  void rotate_back(Get get, Out put) {
    constexpr int lanes = Level::kLanes;
    transform<Level>(n_, work_, get, [&](int64_t i, typename Level::Floats a, typename Level::Floats b) {
      put(i, Level::mul(a, Level::load(back_ + i)), Level::mul(b, Level::load(back_ + i + lanes)));
    });
  }

  // Decodes a block.
  template <class Out>
  void decode(const uint8_t* levels, float scale, Out put) {
    if (!(scale > 0)) {  // constant, zero or NaN
      const auto all = Level::splat(is_constant(scale) ? constant_of(scale, levels[0], bits_) : scale + 0.0f);
      for (int64_t i = 0; i < n_; i += 2 * Level::kLanes) put(i, all, all);
      return;
    }
    const auto scales = Level::splat(scale);
    rotate_back([&](int64_t i) { return codebook_(levels + i); },
                [&](int64_t i, typename Level::Floats a, typename Level::Floats b) {
                  put(i, Level::mul(scales, a), Level::mul(scales, b));
                });
  }

  // What encoding y lost of m values. Where the rotation overflows, nothing is known.
  void lost(float scale, float factor, float* residual, int64_t m) {
    const auto scales = Level::splat(scale), factors = Level::splat(factor);
    auto nan = Level::no_mask();
    rotate_back([&](int64_t i) { return Level::sub(Level::load(y_ + i), Level::mul(scales, codebook_(levels_ + i))); },
                [&](int64_t i, typename Level::Floats a, typename Level::Floats b) {
                  const auto lost_a = Level::mul(a, factors), lost_b = Level::mul(b, factors);
                  Level::store(filled_ + i, lost_a);
                  Level::store(filled_ + i + Level::kLanes, lost_b);
                  nan = Level::note_nan(nan, lost_a, lost_b);
                });
    if (!Level::any(nan)) std::memcpy(residual, filled_, static_cast<size_t>(m) * sizeof(float));
    for (int64_t i = 0; Level::any(nan) && i < m; ++i)
      if (filled_[i] == filled_[i]) residual[i] = filled_[i];
  }

  // back(y), added to m values, times the factor.
  template <class S, class T>
  void add_back(const S* x, int64_t m, float factor, T* values) {
    const auto factors = Level::splat(factor);
    const auto total = [&](const auto* from, auto* to) {
      rotate_back([&](int64_t i) { return Level::load(y_ + i); },
                  [&](int64_t i, typename Level::Floats a, typename Level::Floats b) {
                    constexpr int lanes = Level::kLanes;
                    Level::store(to + i, Level::mul(Level::add(Level::load(from + i), a), factors));
                    Level::store(to + i + lanes, Level::mul(Level::add(Level::load(from + i + lanes), b), factors));
                  });
    };
    if (m == n_) return total(x, values);
    total(x, work_);
    for (int64_t i = 0; i < m; ++i) from_float(work_[i], values + i);
  }

  float read_scale(const uint8_t* payload, int64_t block) const {
    float scale;
    std::memcpy(&scale, payload + parts_.headers + block * int64_t{sizeof scale}, sizeof scale);
    return scale;
  }

  // The value of a constant block that begins with value `first` of its piece.
  float read_constant(const uint8_t* payload, int64_t first, float scale) const {
    return constant_of(scale, payload[parts_.levels + first / 8 * bits_], bits_);
  }

  // Unpacks the levels of the block that begins with this value.
  const uint8_t* read_levels(const uint8_t* payload, int64_t first) {
    const uint8_t* stream = payload + parts_.levels;
    Packing<Level>::of(bits_).unpack(stream + first / 8 * bits_, stream + parts_.levels_nbytes, n_, levels_);
    return levels_;
  }

  void write(uint8_t* payload, int64_t block, int64_t first, float scale) const {
    std::memcpy(payload + parts_.headers + block * int64_t{sizeof scale}, &scale, sizeof scale);
    uint8_t* out = payload + parts_.levels + first / 8 * bits_;
    Packing<Level>::of(bits_).pack(levels_, n_ / kGroup, out, out + n_ / 8 * bits_);
  }

 private:
  void fill_signs(int halvings, float* signs) const {
    const uint32_t size = float_to_bits(1.0f / static_cast<float>(1 << halvings));
    for (int64_t i = 0; i < n_; i += 32) {
      const uint32_t word = random_pair(key_, static_cast<uint32_t>(i / 32));
      for (int bit = 0; bit < 32; ++bit) signs[i + bit] = bits_to_float(size | (word >> bit & 1) << 31);
    }
  }

  const int64_t bits_;
  const PieceParts& parts_;
  const RandomKey key_;
  int64_t n_ = 0;
  int32_t top_ = 0;
  float *y_, *work_, *filled_, *forward_, *back_;
  uint8_t* levels_;
  typename Level::Codebook codebook_;
};

inline void write_key(uint8_t* payload, const RandomKey& key, Span span) {
  if (span.first == 0) std::memcpy(payload, &key, sizeof key);
}

inline RandomKey read_key(const uint8_t* payload) {
  RandomKey key;
  std::memcpy(&key, payload, sizeof key);
  return key;
}

template <class Level, class T>
void encode_rotated(const EncodeTask& task, const cgx_piece& piece, const PieceParts& parts, Span span, const T* values,
                    float* residual) {
  uint8_t* payload = task.slot + piece.payload;
  const RandomKey key = sign_key(*task.rounding);
  write_key(payload, key, span);
  RotatedBlocks<Level> blocks(piece, parts, key);
  for_each_block(piece, parts, span, [&](int64_t first, int64_t m, int64_t block) {
    const T* x = values + first;
    blocks.prepare(m);
    const float scale = blocks.encode(x, m);
    blocks.write(payload, block, first, scale);
    if (!residual || scale != scale) return;
    float* decoded = blocks.work();
    blocks.decode(blocks.levels(), scale, Put<Level, Writing::kStore, float>{decoded});
    float* lost = residual + first;
    int64_t i = 0;
    for (; i + Level::kLanes <= m; i += Level::kLanes)
      Level::store(lost + i, Level::sub(Level::load(x + i), Level::load(decoded + i)));
    for (; i < m; ++i) lost[i] = to_float(x[i]) - decoded[i];
  });
}

template <class Level, Writing writing, class T>
void decode_rotated(const cgx_piece& piece, const PieceParts& parts, Span span, const uint8_t* payload, T* values) {
  RotatedBlocks<Level> blocks(piece, parts, read_key(payload));
  for_each_block(piece, parts, span, [&](int64_t first, int64_t m, int64_t block) {
    T* x = values + first;
    blocks.prepare(m);
    const float scale = blocks.read_scale(payload, block);
    const uint8_t* levels = blocks.read_levels(payload, first);
    if (m == blocks.numel()) return blocks.decode(levels, scale, Put<Level, writing, T>{x});
    const float* decoded = blocks.work();
    blocks.decode(levels, scale, Put<Level, Writing::kStore, float>{blocks.work()});
    for (int64_t i = 0; i < m; ++i)
      from_float(writing == Writing::kAdd ? to_float(x[i]) + decoded[i] : decoded[i], x + i);
  });
}

// What the payloads of a reduction or a sum hold of one block.
struct Contributions {
  int64_t rotated = 0;
  bool constants = false;
  float constant = 0;  // the sum of those that are

  template <class Level>
  Contributions(const RotatedBlocks<Level>& blocks, const uint8_t* const* payloads, int64_t n_payloads, int64_t at,
                int64_t block, int64_t first) {
    for (int64_t k = 0; k < n_payloads; ++k) {
      const float scale = blocks.read_scale(payloads[k] + at, block);
      if (scale == 0) continue;
      if (!is_constant(scale)) {
        ++rotated;
        continue;
      }
      const float value = blocks.read_constant(payloads[k] + at, first, scale);
      constant = constants ? constant + value : value;
      constants = true;
    }
  }
};

// Calls visit(x') with the own values, and what is constant added to them; as many as the block is coded as.
template <class Level, class T, class Visit>
void with_constants(RotatedBlocks<Level>& blocks, const Contributions& others, const T* x, int64_t m, Visit visit) {
  if (others.constants)
    visit(blocks.fill(x, m, [&](float v) { return v + others.constant; }));
  else if (m < blocks.numel())
    visit(blocks.fill(x, m, [](float v) { return v; }));
  else
    visit(x);
}

// Adds up the rotated contributions, onto what was rotated or (onto_y 0) by themselves, and multiplies.
template <class Level>
void accumulate(RotatedBlocks<Level>& blocks, const Contributions& others, bool onto_y, const uint8_t* const* payloads,
                int64_t at, int64_t block, int64_t first, float factor) {
  int64_t left = others.rotated;
  for (int64_t k = 0; left > 0; ++k) {
    const float scale = blocks.read_scale(payloads[k] + at, block);
    if (scale == 0 || is_constant(scale)) continue;
    --left;
    blocks.accumulate(blocks.read_levels(payloads[k] + at, first), scale, onto_y, left == 0 ? factor : 1.0f);
    onto_y = true;
  }
}

template <class Level, class T>
void reduce_rotated(const ReduceTask& task, const cgx_piece& piece, const PieceParts& parts, Span span, T* values,
                    float* residual) {
  uint8_t* out = task.slot + piece.payload;
  const RandomKey key = sign_key(*task.rounding);
  write_key(out, key, span);
  RotatedBlocks<Level> blocks(piece, parts, key);
  const float factor = static_cast<float>(task.scale), loss_factor = static_cast<float>(1.0 / task.scale);
  for_each_block(piece, parts, span, [&](int64_t first, int64_t m, int64_t block) {
    T* x = values + first;
    blocks.prepare(m);
    const Contributions others(blocks, task.payloads, task.n_payloads, piece.payload, block, first);
    float* const decoded = blocks.work();
    const Put<Level, Writing::kStore, float> aside = {decoded};
    if (others.rotated == 0) {
      const float* total =
          blocks.fill(x, m, [&](float v) { return (others.constants ? v + others.constant : v) * factor; });
      const float scale = blocks.encode(total, m);
      blocks.write(out, block, first, scale);
      blocks.decode(blocks.levels(), scale, aside);
      for (int64_t i = 0; i < m; ++i) from_float(decoded[i], x + i);
      if (residual && scale == scale)
        for (int64_t i = 0; i < m; ++i) residual[first + i] = (total[i] - decoded[i]) * loss_factor;
      return;
    }
    with_constants(blocks, others, x, m, [&](const auto* own) { blocks.rotate(own); });
    accumulate(blocks, others, true, task.payloads, piece.payload, block, first, factor);
    const float scale = blocks.quantize();
    blocks.write(out, block, first, scale);
    if (m == blocks.numel()) {
      blocks.decode(blocks.levels(), scale, Put<Level, Writing::kStore, T>{x});
    } else {
      blocks.decode(blocks.levels(), scale, aside);
      for (int64_t i = 0; i < m; ++i) from_float(decoded[i], x + i);
    }
    if (residual && scale == scale) blocks.lost(scale, loss_factor, residual + first, m);
  });
}

template <class Level, class T>
void sum_rotated(const SumTask& task, const cgx_piece& piece, const PieceParts& parts, Span span, T* values) {
  RotatedBlocks<Level> blocks(piece, parts, read_key(task.payloads[0] + piece.payload));
  const float factor = static_cast<float>(task.scale);
  for_each_block(piece, parts, span, [&](int64_t first, int64_t m, int64_t block) {
    T* x = values + first;
    blocks.prepare(m);
    const Contributions others(blocks, task.payloads, task.n_payloads, piece.payload, block, first);
    if (others.rotated == 0) {
      for (int64_t i = 0; i < m; ++i)
        from_float((others.constants ? to_float(x[i]) + others.constant : to_float(x[i])) * factor, x + i);
      return;
    }
    accumulate(blocks, others, false, task.payloads, piece.payload, block, first, 1.0f);
    with_constants(blocks, others, x, m, [&](const auto* own) { blocks.add_back(own, m, factor, x); });
  });
}

}  // namespace
