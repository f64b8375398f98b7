// The control segment: what ranks of a group tell each other besides payloads.
//
// Rules of the protocol (docs/engine.md tells them in full, engine/model/slices.pml is checked by spin):
//
// - flag: the writer of a slot stores the slice's number there, with release, once the payload is whole.
// - done: a rank stores the number of the slice that it has left behind; it will read nothing of it any more.
// - halves: slice t lives in half t mod 2 of the data segment, so a rank may write slice t once all peers are done with
//   t - 2.
// - where other ranks are linked, slices overlap: slice t lives in part t mod ring, a mark per slot and part stands for
//   the flag, and a rank may write slice t once all ranks of its node are done with t - ring.
// - bell: a rank that sleeps says on whom it waits, looks once more, and sleeps on its bell; whoever stores a flag or a
//   done rings the bells of those that wait on it. Both sides put a full fence between their store and their look.
//
// All fields are atomic or written once before the segment is shared. Nothing read here is trusted as a length or
// index.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cgx.h"

namespace cgx {

constexpr uint64_t kMagic = 0x315847432D4D4853ull;
constexpr int64_t kBoardEntries = 128;  // calls of each rank that peers can still see
constexpr int64_t kNameNbytes = 64;
constexpr int64_t kPoisonNbytes = 1536;

enum RankLife : uint32_t { kAbsent = 0, kPresent = 1, kLeft = 2 };

struct alignas(64) Flag {
  std::atomic<uint64_t> slice;
  std::atomic<uint64_t> fingerprint[2];  // by half: of the call that the payload belongs to
};

// Where slices overlap: one per slot and part of the memory, at the start of the data segment.
struct Mark {
  std::atomic<uint64_t> slice;  // counted over the group's life, from 1, so that it only grows
  std::atomic<uint64_t> fingerprint;
};

constexpr size_t kCallWords = sizeof(cgx_call) / sizeof(uint64_t);
static_assert(kCallWords * sizeof(uint64_t) == sizeof(cgx_call), "a call is kept as whole words");

struct alignas(64) BoardEntry {
  std::atomic<int64_t> sequence;
  std::atomic<uint64_t> call[kCallWords];  // a cgx_call; atomic, since a peer may read it while it is written over
};

struct alignas(64) RankControl {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> waits_on;  // 1 + the peer that this rank sleeps for; 0: awake
  alignas(64) std::atomic<uint64_t> done;
  alignas(64) std::atomic<uint32_t> life;
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_time;         // of the process, so that a reused pid is not taken for the peer
  std::atomic<uint64_t> mapped_generation;  // of the data segment
  std::atomic<int64_t> noted;               // sequence of its latest call
  std::atomic<int64_t> noted_at_ns;
  std::atomic<uint64_t> agreed;  // sequence of the latest call whose comparison it has begun
};

struct Control {
  uint64_t magic;
  int64_t world;
  int64_t flags_per_rank;

  alignas(64) std::atomic<uint32_t> poison_claimed;
  std::atomic<uint32_t> poisoned;
  std::atomic<int32_t> poison_status;
  std::atomic<int32_t> poison_rank;
  char poison_text[kPoisonNbytes];

  // The data segment: the first rank of the node creates a larger one, writes its name and size, then its generation.
  alignas(64) std::atomic<uint64_t> generation;
  std::atomic<int64_t> data_nbytes;
  std::atomic<int64_t> marks_nbytes;  // of it
  char data_name[kNameNbytes];
};

// Where the arrays behind Control lie.
struct ControlLayout {
  int64_t world;
  int64_t flags_per_rank;
  int64_t ranks_at, flags_at, board_at, nbytes;

  explicit ControlLayout(int64_t ranks) : world(ranks), flags_per_rank(ranks + 1) {
    const auto align = [](int64_t n) { return (n + 63) / 64 * 64; };
    ranks_at = align(sizeof(Control));
    flags_at = ranks_at + world * static_cast<int64_t>(sizeof(RankControl));
    board_at = flags_at + world * flags_per_rank * static_cast<int64_t>(sizeof(Flag));
    nbytes = board_at + world * kBoardEntries * static_cast<int64_t>(sizeof(BoardEntry));
  }
};

}  // namespace cgx
