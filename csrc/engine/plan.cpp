#include "plan.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "kernels/numerics.h"

namespace {

bool range_inside(int64_t first, int64_t count, size_t size) {
  return first >= 0 && count >= 0 && first <= static_cast<int64_t>(size) - count;
}

// Who writes a payload pads it. Nobody reads the padding, so a payload that comes from a tensor has none.
int64_t payload_end(const cgx_plan& plan, const cgx_step& step, bool writes) {
  int64_t end = 0;
  for (int64_t i = 0; i < step.n_pieces; ++i) {
    const cgx_piece& piece = plan.pieces[static_cast<size_t>(step.first_piece + i)];
    const int64_t padded = cgx_piece_payload_nbytes(&piece, plan.dtype);
    if (padded < 0) return INT64_MAX;
    const bool as_it_lies = piece.kind == CGX_RAW && !writes;
    end = std::max(end, piece.payload + (as_it_lies ? piece.numel * itemsize(plan.dtype) : padded));
  }
  return end;
}

// Whether the values of this step are the bytes of a slot that is at home in the tensor.
bool is_at_home(const cgx_plan& plan, const cgx_step& step, const cgx_slot& slot) {
  const bool writes = step.kind == CGX_STEP_ENCODE || step.kind == CGX_STEP_REDUCE;
  if (step.n_pieces != 1 || (writes ? slot.home != CGX_HOME_VALUES : step.kind != CGX_STEP_DECODE)) return false;
  const cgx_piece& piece = plan.pieces[static_cast<size_t>(step.first_piece)];
  return piece.kind == CGX_RAW && piece.payload == 0 && piece.offset * itemsize(plan.dtype) == slot.offset &&
         piece.numel * itemsize(plan.dtype) == slot.nbytes;
}

}  // namespace

bool cgx_plan::consistent(int64_t world) const {
  if (world < 1 || n_flags < 0 || n_slices < 0 || ring < 2 || part_nbytes < 0 || slots.size() > UINT32_MAX ||
      n_flags > UINT32_MAX)
    return false;
  std::vector<bool> received(slots.size());
  for (const cgx_slot& slot : slots) {
    if (slot.home < CGX_HOME_MEMORY || slot.home > CGX_HOME_RESULT || slot.offset < 0 || slot.nbytes < 0) return false;
    if (slot.home == CGX_HOME_MEMORY && slot.offset > part_nbytes - slot.nbytes) return false;
    if (slot.slice < 0 || slot.slice >= n_slices) return false;
    if (slot.writer < 0 || slot.writer >= world || slot.flag < 0 || slot.flag >= n_flags) return false;
  }
  const auto is_slot = [&](int64_t i) { return i >= 0 && i < static_cast<int64_t>(slots.size()); };
  const auto fits = [&](const cgx_step& step, const cgx_slot& slot, bool writes) {
    return slot.home == CGX_HOME_MEMORY ? payload_end(*this, step, writes) <= slot.nbytes
                                        : is_at_home(*this, step, slot);
  };
  for (const cgx_step& step : steps) {
    if (!is_slot(step.slot)) return false;
    const cgx_slot& slot = slots[static_cast<size_t>(step.slot)];
    const bool moves = step.kind == CGX_STEP_SEND || step.kind == CGX_STEP_RECEIVE;
    if (!moves && !range_inside(step.first_piece, step.n_pieces, pieces.size())) return false;
    const bool sums = step.kind == CGX_STEP_REDUCE || step.kind == CGX_STEP_SUM || step.kind == CGX_STEP_ADD;
    if (sums && dtype == CGX_BYTES) return false;
    switch (step.kind) {
      case CGX_STEP_SEND:
      case CGX_STEP_RECEIVE:
        if (step.peer < 0 || step.peer >= world) return false;
        if (step.kind == CGX_STEP_RECEIVE) {
          if (received[static_cast<size_t>(step.slot)]) return false;
          received[static_cast<size_t>(step.slot)] = true;
        }
        break;
      case CGX_STEP_REDUCE:
      case CGX_STEP_SUM:
        if (step.n_inputs < 1 || !range_inside(step.first_input, step.n_inputs, inputs.size())) return false;
        for (int64_t i = 0; i < step.n_inputs; ++i)
          if (const int64_t input = inputs[static_cast<size_t>(step.first_input + i)];
              !is_slot(input) || slots[static_cast<size_t>(input)].home != CGX_HOME_MEMORY ||
              !fits(step, slots[static_cast<size_t>(input)], false))
            return false;
        if (step.kind == CGX_STEP_REDUCE && !fits(step, slot, true)) return false;
        break;
      case CGX_STEP_ENCODE:
      case CGX_STEP_DECODE:
      case CGX_STEP_ADD:
        if (!fits(step, slot, step.kind == CGX_STEP_ENCODE)) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}

void cgx_plan::index(int64_t world) {
  slice_steps.assign(static_cast<size_t>(n_slices), 0);
  in_memory = std::all_of(slots.begin(), slots.end(), [](const cgx_slot& s) { return s.home == CGX_HOME_MEMORY; });
  in_slice_order = true;
  int64_t latest = 0;
  std::vector<int64_t> givers, takers;
  const auto add = [](std::vector<int64_t>& ranks, int64_t rank) {
    if (!std::count(ranks.begin(), ranks.end(), rank)) ranks.push_back(rank);
  };
  for (const cgx_step& step : steps) {
    const int64_t slice = slice_of(step);
    ++slice_steps[static_cast<size_t>(slice)];
    in_slice_order = in_slice_order && slice >= latest;
    latest = slice;
    if (step.kind == CGX_STEP_RECEIVE || step.kind == CGX_STEP_SEND) add(peers, step.peer);
    if (step.kind == CGX_STEP_SEND) add(takers, step.peer);
    if (step.kind == CGX_STEP_RECEIVE) add(givers, step.peer);
  }
  number_messages(world);
  if (dtype != CGX_BYTES) return;  // where sums are made, every rank needs something of every other
  for (const int64_t peer : peers) {
    if (!std::count(takers.begin(), takers.end(), peer)) sources.push_back(peer);
    if (!std::count(givers.begin(), givers.end(), peer)) sinks.push_back(peer);
  }
}

// The sender and the receiver of a message each count those between them in the order of their tables of slots.
void cgx_plan::number_messages(int64_t world) {
  incoming.assign(static_cast<size_t>(world), {});
  std::vector<std::vector<std::pair<int64_t, size_t>>> outgoing(static_cast<size_t>(world));  // slots and steps
  for (size_t i = 0; i < steps.size(); ++i) {
    const cgx_step& step = steps[i];
    if (step.kind == CGX_STEP_RECEIVE) incoming[static_cast<size_t>(step.peer)].push_back(step.slot);
    if (step.kind == CGX_STEP_SEND) outgoing[static_cast<size_t>(step.peer)].emplace_back(step.slot, i);
  }
  for (std::vector<int64_t>& received : incoming) std::sort(received.begin(), received.end());
  messages.assign(steps.size(), 0);
  for (auto& sent : outgoing) {
    std::sort(sent.begin(), sent.end());
    for (size_t number = 0; number < sent.size(); ++number)
      messages[sent[number].second] = static_cast<uint32_t>(number);
  }
}

cgx_plan* cgx_plan_new(int64_t world, int dtype, const cgx_piece* pieces, int64_t n_pieces, const cgx_slot* slots,
                       int64_t n_slots, const int64_t* inputs, int64_t n_inputs, const cgx_step* steps, int64_t n_steps,
                       int64_t n_slices, int64_t ring, int64_t part_nbytes, int64_t n_flags, int* status) try {
  *status = CGX_ERROR_ARGUMENT;
  auto plan = std::make_unique<cgx_plan>();
  plan->world = world;
  plan->dtype = dtype;
  plan->pieces.assign(pieces, pieces + n_pieces);
  plan->slots.assign(slots, slots + n_slots);
  plan->inputs.assign(inputs, inputs + n_inputs);
  plan->steps.assign(steps, steps + n_steps);
  plan->n_slices = n_slices;
  plan->ring = ring;
  plan->part_nbytes = part_nbytes;
  plan->n_flags = n_flags;
  if (!plan->consistent(world)) return nullptr;
  plan->index(world);
  *status = CGX_OK;
  return plan.release();
} catch (const std::bad_alloc&) {
  *status = CGX_ERROR_SHARED_MEMORY;
  return nullptr;
}

void cgx_plan_free(cgx_plan* plan) { delete plan; }
