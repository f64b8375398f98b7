// What goes over a connection: frames, each a header and the bytes that it announces. Little-endian, as every processor
// that this library is built for.
//
// Data connections carry CALL (what a rank calls, before the first payload of the operation) and PAYLOAD. The control
// connection of a pair carries POISON (status, then text), LEAVE (with the last sequence,
// then that of the last operation that was done), PING and PONG. Nothing in a
// header is trusted: the receiver looks up the message and its length in its own plan.
#pragma once

#include <cstdint>
#include <cstring>

#include "cgx.h"

namespace cgx {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are written as they lie in memory");

enum class FrameKind : uint8_t { kCall = 1, kPayload = 2, kPoison = 3, kLeave = 4, kPing = 5, kPong = 6 };

struct FrameHeader {
  uint64_t sequence;     // of the operation; LEAVE, PING, PONG: of the sender's latest call
  uint64_t fingerprint;  // of its call
  uint32_t message;      // PAYLOAD: its number among those of the operation from this rank to that
  uint16_t reserved;
  FrameKind kind;
  uint8_t stream;
  uint64_t nbytes;  // that follow
  uint64_t check;   // of all above: tells frames from noise
};
static_assert(sizeof(FrameHeader) == 40, "part of the protocol");

constexpr uint64_t kLongestControlNbytes = 2048;

inline uint64_t check_of(const FrameHeader& header) {
  uint64_t words[4];
  std::memcpy(words, &header, sizeof words);
  uint64_t hash = 0x43475846524D3031ull;
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

inline FrameHeader make_header(FrameKind kind, uint64_t sequence, uint64_t fingerprint, uint32_t message,
                               uint64_t nbytes, uint8_t stream = 0) {
  FrameHeader header = {sequence, fingerprint, message, 0, kind, stream, nbytes, 0};
  header.check = check_of(header);
  return header;
}

}  // namespace cgx
