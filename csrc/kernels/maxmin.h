// The max-min codec: pieces walk blocks, blocks walk segments, and a segment stays in the first-level cache while it is
// worked on.
//   encode: find the block's range, quantize to one level a byte, pack;
//   decode: unpack to one level a byte, dequantize;
//   reduce: own values plus each payload into a float32 scratch block, its range found in the last addition; then
//           encode from there, writing the decoded values back in the same pass;
//   sum:    own values plus each payload into a float32 scratch segment, and from there back.
// bits.h packs, blocks.h calculates; this file knows where things are.
#pragma once

#include "blocks.h"

namespace {

inline uint8_t* header_at(uint8_t* payload, int64_t block) { return payload + block * int64_t{sizeof(Header)}; }

inline Header read_header(const uint8_t* payload, int64_t block) {
  Header header;
  std::memcpy(&header, payload + block * int64_t{sizeof header}, sizeof header);
  return header;
}

// Calls visit(first, n) for the segments of n values.
template <class Visit>
inline void for_each_segment(int64_t n, Visit visit) {
  for (int64_t first = 0; first < n; first += kSegment) visit(first, std::min(kSegment, n - first));
}

// Random numbers for a segment that starts at any value of its tensor.
template <class Level>
class Random {
 public:
  explicit Random(const cgx_rounding& rounding) : key_(random_key(rounding)) {}
  const uint16_t* numbers(int64_t index, int64_t n) {
    const int64_t aside = index % 2;  // a pair has one hash
    uint32_t pair = static_cast<uint32_t>(index / 2);
    for (int64_t i = 0; i < whole_groups(n) + aside; i += kGroup, pair += kGroup / 2)
      Level::draw(key_, pair, numbers_ + i);
    return numbers_ + aside;
  }

 private:
  RandomKey key_;
  alignas(64) uint16_t numbers_[kSegment + 2 * kGroup];
};

struct NoRandom {
  explicit NoRandom(const cgx_rounding&) {}
};

// Encodes blocks one after the other into the part of a payload that belongs to a span.
template <class Level, bool stochastic>
class BlockEncoder {
 public:
  BlockEncoder(const cgx_piece& piece, const PieceParts& parts, Span span, uint8_t* payload,
               const cgx_rounding& rounding, float loss_factor)
      : payload_(payload),
        top_((1 << piece.bits) - 1),
        loss_factor_(loss_factor),
        offset_(piece.offset),
        random_(rounding),
        packer_(piece.bits, payload + parts.levels + span.first / 8 * piece.bits,
                payload + parts.levels + (std::min(span.end, parts.quantized) * piece.bits + 7) / 8) {}

  // first: the block's first value in its piece.
  template <class T, class Next, class Back, class Loss>
  void encode(const T* x, int64_t first, int64_t n, int64_t block, const Range& range, Prefetch<Next> next, Back back,
              Loss loss) {
    const BlockScale scale = scale_of(range, top_);
    std::memcpy(header_at(payload_, block), &scale.header, sizeof scale.header);
    if (scale.flat) return flat(x, n, scale.header, back, loss);
    for_each_segment(n, [&](int64_t i, int64_t count) {
      const Quantizing<Level, Back, Loss> how = {Level::splat(scale.header.lo),
                                                 Level::splat(scale.inverse),
                                                 Level::splat(scale.header.unit),
                                                 Level::splat(loss_factor_),
                                                 back + i,
                                                 loss + i};
      if constexpr (stochastic)
        quantize<Level>(x + i, count, how, Stochastic<Level>{Level::splat_int(top_)},
                        random_.numbers(offset_ + first + i, count), packer_.next(count), next + i);
      else
        quantize<Level>(x + i, count, how, Nearest<Level>{}, static_cast<const uint16_t*>(nullptr), packer_.next(count),
                        next + i);
      packer_.took(count);
    });
  }

  void finish() { packer_.finish(); }

 private:
  // A block all of whose levels are 0: constant, or with a NaN in it.
  template <class T, class Back, class Loss>
  void flat(const T* x, int64_t n, const Header& header, Back back, Loss loss) {
    for_each_segment(n, [&](int64_t, int64_t count) {
      std::memset(packer_.next(count), 0, static_cast<size_t>(count));
      packer_.took(count);
    });
    if constexpr (!std::is_same_v<Loss, Nowhere>)
      if (header.lo == header.lo)
        for (int64_t i = 0; i < n; ++i) loss[i] = (to_float(x[i]) - header.lo) * loss_factor_;
    if constexpr (!std::is_same_v<Back, Nowhere>)
      for (int64_t i = 0; i < n; ++i) from_float(header.lo, back + i);
  }

  uint8_t* const payload_;
  const int32_t top_;
  const float loss_factor_;
  const int64_t offset_;
  std::conditional_t<stochastic, Random<Level>, NoRandom> random_;
  Packer<Level> packer_;
};

template <class Level, bool stochastic, class T, class Loss>
void encode_blocks(const cgx_piece& piece, const PieceParts& parts, Span span, const T* values, uint8_t* payload,
                   const cgx_rounding& rounding, Loss loss) {
  BlockEncoder<Level, stochastic> encoder(piece, parts, span, payload, rounding, 1.0f);
  for_each_block(piece, parts, span, [&](int64_t first, int64_t n, int64_t block) {
    const T* x = values + first;
    const Prefetch ahead{x + n};
    encoder.encode(x, first, n, block, range_of<Level>(x, n), ahead, Nowhere{}, loss + first);
  });
  encoder.finish();
}

template <class Level, Writing writing, class T>
void decode_blocks(const cgx_piece& piece, const PieceParts& parts, Span span, const uint8_t* payload, T* values) {
  Unpacker<Level> unpacker(piece.bits, payload + parts.levels, parts.levels_nbytes);
  for_each_block(piece, parts, span, [&](int64_t first, int64_t n, int64_t block) {
    const Header header = read_header(payload, block);
    for_each_segment(n, [&](int64_t i, int64_t count) {
      dequantize<Level, writing>(unpacker.levels(first + i, count), count, header, values + first + i);
    });
  });
}

template <class Level, bool stochastic, class T, class Loss>
void reduce_blocks(const cgx_piece& piece, const PieceParts& parts, Span span, T* values, const ReduceTask& task,
                   float* sum, Loss loss) {
  uint8_t* out = task.slot + piece.payload;
  BlockEncoder<Level, stochastic> encoder(piece, parts, span, out, *task.rounding,
                                          static_cast<float>(1.0 / task.scale));
  for_each_block(piece, parts, span, [&](int64_t first, int64_t n, int64_t block) {
    T* x = values + first;
    Range range = {};
    for (int64_t k = 0; k < task.n_payloads; ++k) {
      const uint8_t* payload = task.payloads[k] + piece.payload;
      const Header header = read_header(payload, block);
      const float scale = k + 1 == task.n_payloads ? static_cast<float>(task.scale) : 1.0f;
      Unpacker<Level> unpacker(piece.bits, payload + parts.levels, parts.levels_nbytes);
      RangeLanes<Level> lanes;
      for_each_segment(n, [&](int64_t i, int64_t count) {
        const uint8_t* levels = unpacker.levels(first + i, count);
        if (k == 0)
          accumulate<Level>(levels, count, header, x + i, scale, sum + i, lanes);
        else
          accumulate<Level>(levels, count, header, sum + i, scale, sum + i, lanes);
      });
      if (k + 1 == task.n_payloads) range = lanes.close();
    }
    const Prefetch ahead{x + n + n / 2};
    encoder.encode(sum, first, n, block, range, ahead, x, loss + first);
  });
  encoder.finish();
}

template <class Level, class T>
inline void store_sum(const float* sum, int64_t n, T* x) {
  int64_t i = 0;
  for (; i + Level::kLanes <= n; i += Level::kLanes) Level::store(x + i, Level::load(sum + i));
  for (; i < n; ++i) from_float(sum[i], x + i);
}

template <class Level, class T>
void sum_blocks(const cgx_piece& piece, const PieceParts& parts, Span span, T* values, const SumTask& task,
                float* sum) {
  RangeLanes<Level> unused;
  for_each_block(piece, parts, span, [&](int64_t first, int64_t n, int64_t block) {
    for_each_segment(n, [&](int64_t i, int64_t count) {
      T* x = values + first + i;
      for (int64_t k = 0; k < task.n_payloads; ++k) {
        const uint8_t* payload = task.payloads[k] + piece.payload;
        const Header header = read_header(payload, block);
        const float scale = k + 1 == task.n_payloads ? static_cast<float>(task.scale) : 1.0f;
        Unpacker<Level> unpacker(piece.bits, payload + parts.levels, parts.levels_nbytes);
        const uint8_t* levels = unpacker.levels(first + i, count);
        if (k == 0)
          accumulate<Level>(levels, count, header, x, scale, sum, unused);
        else
          accumulate<Level>(levels, count, header, sum, scale, sum, unused);
      }
      store_sum<Level>(sum, count, x);
    });
  });
}

template <class Level, class T>
void encode_maxmin(const EncodeTask& task, const cgx_piece& piece, const PieceParts& parts, Span span, const T* x,
                   float* residual) {
  uint8_t* payload = task.slot + piece.payload;
  const cgx_rounding& how = *task.rounding;
  if (how.stochastic)
    residual ? encode_blocks<Level, true>(piece, parts, span, x, payload, how, residual)
             : encode_blocks<Level, true>(piece, parts, span, x, payload, how, Nowhere{});
  else
    residual ? encode_blocks<Level, false>(piece, parts, span, x, payload, how, residual)
             : encode_blocks<Level, false>(piece, parts, span, x, payload, how, Nowhere{});
}

template <class Level, class T>
void reduce_maxmin(const ReduceTask& task, const cgx_piece& piece, const PieceParts& parts, Span span, T* x,
                   float* residual) {
  float* sum = cgx_scratch(std::min(piece.block, parts.quantized));
  if (task.rounding->stochastic)
    residual ? reduce_blocks<Level, true>(piece, parts, span, x, task, sum, residual)
             : reduce_blocks<Level, true>(piece, parts, span, x, task, sum, Nowhere{});
  else
    residual ? reduce_blocks<Level, false>(piece, parts, span, x, task, sum, residual)
             : reduce_blocks<Level, false>(piece, parts, span, x, task, sum, Nowhere{});
}

}  // namespace
