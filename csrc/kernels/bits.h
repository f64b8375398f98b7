// The stream of levels: from one level a byte, which the arithmetic works on, to Bits bits a level, and back.
//
// Both directions go by groups of 32 levels, which are 4 * Bits bytes. A level's pack and unpack may touch up to 32
// bytes where a group has fewer; here is seen to it that they never leave the stream.
#pragma once

#include <algorithm>

#include "numerics.h"

namespace {

constexpr int kGroup = 32;
constexpr int64_t whole_groups(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

constexpr int64_t kSegment = 2048;  // values worked on at a time: they, their levels and their random numbers fit L1

template <class Level, int Bits>
void pack_groups(const uint8_t* levels, int64_t n_groups, uint8_t* out, const uint8_t* end) {
  if (Bits == 8) {
    std::memcpy(out, levels, static_cast<size_t>(n_groups * kGroup));
    return;
  }
  for (; n_groups > 0 && end - out >= kGroup; --n_groups, levels += kGroup, out += 4 * Bits)
    Level::template pack<Bits>(levels, out);
  for (; n_groups > 0; --n_groups, levels += kGroup, out += 4 * Bits) {
    uint8_t last[kGroup];
    Level::template pack<Bits>(levels, last);
    std::memcpy(out, last, 4 * Bits);
  }
}

// Unpacks n levels, and up to 31 beyond.
template <class Level, int Bits>
void unpack_groups(const uint8_t* in, const uint8_t* end, int64_t n, uint8_t* levels) {
  for (; n > 0 && end - in >= kGroup; n -= kGroup, levels += kGroup, in += 4 * Bits)
    Level::template unpack<Bits>(in, levels);
  for (; n > 0; n -= kGroup, levels += kGroup, in += 4 * Bits) {
    uint8_t last[kGroup] = {};
    if (end > in) std::memcpy(last, in, static_cast<size_t>(std::min<int64_t>(4 * Bits, end - in)));
    Level::template unpack<Bits>(last, levels);
  }
}

// The two of them for a width that is known at run time.
template <class Level>
struct Packing {
  void (*pack)(const uint8_t* levels, int64_t n_groups, uint8_t* out, const uint8_t* end);
  void (*unpack)(const uint8_t* in, const uint8_t* end, int64_t n, uint8_t* levels);

  template <int Bits>
  static constexpr Packing width() {
    return {pack_groups<Level, Bits>, unpack_groups<Level, Bits>};
  }
  static const Packing& of(int64_t bits) {
    static constexpr Packing widths[] = {width<1>(), width<2>(), width<3>(), width<4>(),
                                         width<5>(), width<6>(), width<7>(), width<8>()};
    return widths[bits - 1];
  }
};

// Takes levels, a segment at a time, and writes whole groups to the stream; a block may end within a byte.
template <class Level>
class Packer {
 public:
  // out, end: the bytes of the span's levels.
  Packer(int64_t bits, uint8_t* out, const uint8_t* end)
      : packing_(Packing<Level>::of(bits)), group_nbytes_(4 * bits), out_(out), end_(end) {}

  // Where the next n levels go. With fewer than a whole number of groups, up to a group more may be written there.
  // Levels of 8 bits are bytes of the stream already.
  uint8_t* next(int64_t n) {
    direct_ = group_nbytes_ == kGroup && waiting_ == 0 && n % kGroup == 0;
    return direct_ ? out_ : levels_ + waiting_;
  }

  void took(int64_t n) {
    if (direct_) {
      out_ += n;
      return;
    }
    waiting_ += n;
    const int64_t groups = waiting_ / kGroup;
    packing_.pack(levels_, groups, out_, end_);
    out_ += groups * group_nbytes_;
    waiting_ -= groups * kGroup;
    if (waiting_ > 0 && groups > 0) std::memcpy(levels_, levels_ + groups * kGroup, kGroup);
  }

  // The bits behind the last level are 0.
  void finish() {
    if (waiting_ == 0) return;
    uint8_t last[kGroup] = {};
    std::memset(levels_ + waiting_, 0, static_cast<size_t>(kGroup - waiting_));
    packing_.pack(levels_, 1, last, last);
    std::memcpy(out_, last, static_cast<size_t>(end_ - out_));
  }

 private:
  const Packing<Level>& packing_;
  const int64_t group_nbytes_;
  uint8_t* out_;
  const uint8_t* end_;
  bool direct_ = false;
  int64_t waiting_ = 0;  // levels in levels_; between segments fewer than a group
  alignas(64) uint8_t levels_[kSegment + 3 * kGroup];
};

// Hands out levels of a piece's stream from any position.
template <class Level>
class Unpacker {
 public:
  Unpacker(int64_t bits, const uint8_t* stream, int64_t stream_nbytes)
      : packing_(Packing<Level>::of(bits)), bits_(bits), stream_(stream), end_(stream + stream_nbytes) {}

  // n levels, at most a segment; what fills up the last group can be read too.
  const uint8_t* levels(int64_t position, int64_t n) {
    const int64_t aside = position % 8;  // eight levels are whole bytes
    packing_.unpack(stream_ + (position - aside) / 8 * bits_, end_, whole_groups(n) + aside, levels_);
    return levels_ + aside;
  }

 private:
  const Packing<Level>& packing_;
  const int64_t bits_;
  const uint8_t* stream_;
  const uint8_t* end_;
  alignas(64) uint8_t levels_[kSegment + 3 * kGroup];
};

}  // namespace
