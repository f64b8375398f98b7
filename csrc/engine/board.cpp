#include "board.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "waiting.h"

namespace cgx {
namespace {

std::vector<std::string> split(const char* text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part);) parts.push_back(part);
  return parts;
}

std::string name_of(const std::vector<std::string>& names, int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(names.size()) ? names[static_cast<size_t>(index)] : "?";
}

bool alike(const cgx_call& a, const cgx_call& b) {
  if (a.ndim < 0 && b.ndim < 0)  // shapes may differ: only what is done to them counts
    return a.operation == b.operation && a.dtype == b.dtype && a.reduction == b.reduction && a.root == b.root;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

void Board::set_names(const char* operations, const char* dtypes, const char* reductions) {
  operations_ = split(operations);
  dtypes_ = split(dtypes);
  reductions_ = split(reductions);
}

// The number may be a peer's word: whatever it is, the entry is one of that rank's.
BoardEntry& Board::entry(int64_t rank, int64_t sequence) const {
  return rows_[static_cast<size_t>(rank)].entries[static_cast<uint64_t>(sequence) % kBoardEntries];
}

int64_t Board::note(const cgx_call& call) {
  const int64_t sequence = ++last_;
  write(rank_, sequence, call);
  return sequence;
}

void Board::note_for(int64_t peer, int64_t sequence, const cgx_call& call) { write(peer, sequence, call); }

void Board::write(int64_t rank, int64_t sequence, const cgx_call& call) {
  BoardEntry& target = entry(rank, sequence);
  target.sequence.store(0, std::memory_order_relaxed);  // a reader in between sees that it read nothing whole
  std::atomic_thread_fence(std::memory_order_release);
  uint64_t words[kCallWords];
  std::memcpy(words, &call, sizeof call);
  for (size_t i = 0; i < kCallWords; ++i) target.call[i].store(words[i], std::memory_order_relaxed);
  target.sequence.store(sequence, std::memory_order_release);
  RankControl& row = *rows_[static_cast<size_t>(rank)].control;
  row.noted_at_ns.store(now_ns(), std::memory_order_relaxed);
  row.noted.store(sequence, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // of two that note and then look, one sees the other's note
}

bool Board::read(int64_t rank, int64_t sequence, cgx_call* call) const {
  const BoardEntry& theirs = entry(rank, sequence);
  if (theirs.sequence.load(std::memory_order_acquire) != sequence) return false;
  uint64_t words[kCallWords];
  for (size_t i = 0; i < kCallWords; ++i) words[i] = theirs.call[i].load(std::memory_order_relaxed);
  std::memcpy(call, words, sizeof *call);
  std::atomic_thread_fence(std::memory_order_acquire);
  return theirs.sequence.load(std::memory_order_relaxed) == sequence;
}

bool Board::differs(int64_t peer, int64_t sequence) const {
  cgx_call mine;
  return read(rank_, sequence, &mine) && differs(peer, sequence, mine);
}

bool Board::differs(int64_t peer, int64_t sequence, const cgx_call& mine) const {
  cgx_call theirs;
  return read(peer, sequence, &theirs) && !alike(mine, theirs);
}

std::string Board::describe(const cgx_call& call) const {
  std::ostringstream text;
  text << name_of(operations_, call.operation) << '(';
  if (call.dtype >= 0) text << name_of(dtypes_, call.dtype);
  if (call.ndim >= 0) {
    text << '[';
    const int shown = std::min<int>(call.ndim, 6);
    for (int i = 0; i < shown; ++i) text << (i ? ", " : "") << call.dims[i];
    if (call.ndim > shown) text << ", ...";
    text << ']';
  }
  if (call.reduction >= 0) text << ", " << name_of(reductions_, call.reduction);
  if (call.root >= 0) text << ", root " << call.root;
  if (call.bits > 0 && call.bits < 32) {
    text << ", " << call.bits << " bits, bucket size " << call.block;
    if (call.kind == CGX_ROTATED) text << ", rotated";
    if (call.kind > CGX_ROTATED) text << ", codec " << call.kind;
  }
  if (call.bits == 32) text << ", exact";
  if (call.layout != 0) text << ", layers and strides #" << std::hex << (call.layout & 0xFFFFFFFF) << std::dec;
  text << ')';
  return text.str();
}

std::string Board::describe(int64_t rank, int64_t sequence) const {
  cgx_call call;
  return read(rank, sequence, &call) ? describe(call) : "a call that is no longer on record";
}

std::string Board::position(int64_t rank) const {
  const RankControl& row = *rows_[static_cast<size_t>(rank)].control;
  const int64_t latest = row.noted.load(std::memory_order_acquire);
  if (latest <= 0) return "has called nothing yet";
  const int64_t now = now_ns();
  const int64_t age_s =
      (now - std::clamp<int64_t>(row.noted_at_ns.load(std::memory_order_relaxed), 0, now)) / 1000000000;
  return "called operation " + std::to_string(latest) + ", " + describe(rank, latest) + ", last, " +
         std::to_string(age_s) + " s ago";
}

}  // namespace cgx
