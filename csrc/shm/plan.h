// What one rank does in one operation, checked once so that the executor can trust it.
#pragma once

#include <cstdint>
#include <vector>

#include "cgx.h"

struct cgx_plan {
  int dtype;
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs;
  std::vector<cgx_step> steps;
  std::vector<int64_t> slice_steps;
  int64_t half_nbytes;

  int64_t slices() const { return static_cast<int64_t>(slice_steps.size()) - 1; }
  // Whether every index, offset and peer is inside its table, slot and world.
  bool consistent(int64_t world, int64_t flags_per_rank) const;
};
