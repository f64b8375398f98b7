// What one rank does in one operation, checked once so that the executor can trust it.
#pragma once

#include <cstdint>
#include <vector>

#include "cgx.h"

struct cgx_plan {
  int64_t world;
  int dtype;
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs;
  std::vector<cgx_step> steps;
  int64_t n_slices;
  int64_t ring;
  int64_t part_nbytes;
  int64_t n_flags;

  // Found when the plan is made.
  std::vector<int64_t> slice_steps;  // by slice: how many steps it has
  std::vector<uint32_t> messages;    // by step: the number of what it sends, among all from this rank to its peer
  std::vector<std::vector<int64_t>> incoming;  // by peer: the slots that it sends, by the numbers of its messages
  std::vector<int64_t> peers;                  // that payloads go to or come from
  std::vector<int64_t> sources;                // of moved bytes: those of them that payloads only come from
  std::vector<int64_t> sinks;                  // of moved bytes: those of them that payloads only go to
  bool in_slice_order;
  bool in_memory;  // no slot is at home in a tensor

  int64_t slice_of(const cgx_step& step) const { return slots[static_cast<size_t>(step.slot)].slice; }
  // Whether every index, offset and peer is inside its table, slot and world, and no slot is received twice.
  bool consistent(int64_t world) const;
  void index(int64_t world);
  void number_messages(int64_t world);
};
