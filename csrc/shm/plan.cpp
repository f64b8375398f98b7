#include "plan.h"

#include <algorithm>
#include <memory>
#include <new>

#include "control.h"

namespace {

bool range_inside(int64_t first, int64_t count, size_t size) {
  return first >= 0 && count >= 0 && first <= static_cast<int64_t>(size) - count;
}

int64_t payload_end(const cgx_plan& plan, const cgx_step& step) {
  int64_t end = 0;
  for (int64_t i = 0; i < step.n_pieces; ++i) {
    const cgx_piece& piece = plan.pieces[static_cast<size_t>(step.first_piece + i)];
    const int64_t nbytes = cgx_piece_payload_nbytes(&piece, plan.dtype);
    if (nbytes < 0) return INT64_MAX;
    end = std::max(end, piece.payload + nbytes);
  }
  return end;
}

}  // namespace

bool cgx_plan::consistent(int64_t world, int64_t flags_per_rank) const {
  for (const cgx_slot& slot : slots) {
    if (slot.offset < 0 || slot.nbytes < 0 || slot.offset > half_nbytes - slot.nbytes) return false;
    if (slot.writer < 0 || slot.writer >= world || slot.flag < 0 || slot.flag >= flags_per_rank) return false;
  }
  const auto is_slot = [&](int64_t i) { return i >= 0 && i < static_cast<int64_t>(slots.size()); };
  const auto fits = [&](const cgx_step& step, int64_t slot) {
    return range_inside(step.first_piece, step.n_pieces, pieces.size()) &&
           payload_end(*this, step) <= slots[static_cast<size_t>(slot)].nbytes;
  };
  for (const cgx_step& step : steps) {
    if (!is_slot(step.slot)) return false;
    switch (step.kind) {
      case CGX_STEP_SEND:
      case CGX_STEP_RECEIVE:
        if (step.peer < 0 || step.peer >= world) return false;
        break;
      case CGX_STEP_REDUCE:
      case CGX_STEP_SUM:
        if (step.n_inputs < 1 || !range_inside(step.first_input, step.n_inputs, inputs.size())) return false;
        for (int64_t i = 0; i < step.n_inputs; ++i)
          if (const int64_t input = inputs[static_cast<size_t>(step.first_input + i)];
              !is_slot(input) || !fits(step, input))
            return false;
        [[fallthrough]];
      case CGX_STEP_ENCODE:
      case CGX_STEP_DECODE:
        if (!fits(step, step.slot)) return false;
        break;
      default:
        return false;
    }
  }
  for (size_t i = 0; i + 1 < slice_steps.size(); ++i)
    if (slice_steps[i] > slice_steps[i + 1]) return false;
  return !slice_steps.empty() && slice_steps.front() == 0 && slice_steps.back() == static_cast<int64_t>(steps.size());
}

cgx_plan* cgx_plan_new(int64_t world, int dtype, const cgx_piece* pieces, int64_t n_pieces, const cgx_slot* slots,
                       int64_t n_slots, const int64_t* inputs, int64_t n_inputs, const cgx_step* steps, int64_t n_steps,
                       const int64_t* slice_steps, int64_t n_slices, int64_t half_nbytes) try {
  using cgx::ControlLayout;
  auto plan = std::make_unique<cgx_plan>();
  plan->dtype = dtype;
  plan->pieces.assign(pieces, pieces + n_pieces);
  plan->slots.assign(slots, slots + n_slots);
  plan->inputs.assign(inputs, inputs + n_inputs);
  plan->steps.assign(steps, steps + n_steps);
  plan->slice_steps.assign(slice_steps, slice_steps + n_slices + 1);
  plan->half_nbytes = half_nbytes;
  return plan->consistent(world, ControlLayout(world).flags_per_rank) ? plan.release() : nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

void cgx_plan_free(cgx_plan* plan) { delete plan; }
