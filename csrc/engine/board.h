// The board: each rank writes down every collective that it calls, so that ranks that have lost step find out.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "segment/control.h"

namespace cgx {

// What one rank has told of itself: in the segment of its node, or, of a rank elsewhere, in this process.
struct Row {
  RankControl* control;
  BoardEntry* entries;
};

class Board {
 public:
  Board(std::vector<Row> rows, int64_t rank) : rows_(std::move(rows)), rank_(rank) {}

  // Names for messages, each list separated by '\n'.
  void set_names(const char* operations, const char* dtypes, const char* reductions);

  int64_t note(const cgx_call& call);
  // Write down the call of a peer that has a board of its own.
  void note_for(int64_t peer, int64_t sequence, const cgx_call& call);
  bool read(int64_t rank, int64_t sequence, cgx_call* call) const;
  // Whether the peer is known to have made another call than this rank under the same number.
  bool differs(int64_t peer, int64_t sequence) const;
  bool differs(int64_t peer, int64_t sequence, const cgx_call& mine) const;
  // "all_reduce(float32[1000], SUM, 4 bits, bucket size 512)", or what is known instead.
  std::string describe(int64_t rank, int64_t sequence) const;
  // Where a peer stands, for messages.
  std::string position(int64_t rank) const;

 private:
  BoardEntry& entry(int64_t rank, int64_t sequence) const;
  void write(int64_t rank, int64_t sequence, const cgx_call& call);
  std::string describe(const cgx_call& call) const;

  const std::vector<Row> rows_;  // by rank
  const int64_t rank_;
  int64_t last_ = 0;
  std::vector<std::string> operations_, dtypes_, reductions_;
};

}  // namespace cgx
