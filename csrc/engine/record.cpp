// What the flight recorder reads: of this rank's latest operations, and of its peers.
#include <algorithm>

#include "group.h"

namespace cgx {

cgx_record Group::record_of(const Operation& op, cgx_record_state state) const {
  cgx_record record = {};
  record.number = op.number;
  record.sequence = op.sequence;
  record.state = state;
  record.submitted_ns = op.submitted_ns;
  record.started_ns = op.started_ns;
  record.encode_ns = op.phase_ns[0];
  record.wait_ns = op.phase_ns[1];
  record.reduce_ns = op.phase_ns[2];
  record.decode_ns = op.phase_ns[3];
  record.bytes_before = op.what.bytes_before;
  record.bytes_after = op.what.bytes_after;
  record.bytes_sent = op.sent_nbytes;
  record.waited_for = -1;
  record.waiting_for = op.waiting_for;
  record.waiting_since_ns = op.waiting_for < 0 ? 0 : op.waiting_since_ns;
  if (op.started_ns == 0) return record;
  const auto longest = std::max_element(waited_ns_.begin(), waited_ns_.end());
  if (*longest > 0) {
    record.waited_for = longest - waited_ns_.begin();
    record.waited_for_ns = *longest;
  }
  return record;
}

void Group::keep(const cgx_record& record) {
  std::lock_guard<std::mutex> lock(records_mutex_);
  records_[static_cast<size_t>(record.number % kRecords)] = record;
}

bool Group::record(int64_t number, cgx_record* found) const {
  if (number <= 0) return false;
  std::lock_guard<std::mutex> queue_lock(queue_mutex_);
  std::lock_guard<std::mutex> lock(records_mutex_);
  const cgx_record& kept = records_[static_cast<size_t>(number % kRecords)];
  if (kept.number == number || running_.number == number) {
    *found = kept.number == number ? kept : running_;
    return true;
  }
  const int64_t index = queue_.empty() ? -1 : number - queue_.front().number;
  if (index < 0 || index >= static_cast<int64_t>(queue_.size())) return false;
  // Whoever holds the role may be about to run it, so only what does not change any more is read.
  const Operation& op = queue_[static_cast<size_t>(index)];
  *found = {};
  found->number = op.number;
  found->sequence = op.sequence;
  found->submitted_ns = op.submitted_ns;
  found->bytes_before = op.what.bytes_before;
  found->bytes_after = op.what.bytes_after;
  found->waited_for = found->waiting_for = -1;
  return true;
}

std::string Group::peer(int64_t rank, cgx_peer* found) {
  const RankControl& them = row(rank);
  found->pid = them.pid.load();
  found->life = rank != rank_ && is_gone(rank) ? 3 : them.life.load(std::memory_order_acquire);
  found->noted = them.noted.load(std::memory_order_acquire);
  found->noted_at_ns = them.noted_at_ns.load(std::memory_order_relaxed);
  found->waits_on = static_cast<int64_t>(them.waits_on.load(std::memory_order_relaxed)) - 1;
  return found->noted > 0 ? board_.describe(rank, found->noted) : "";
}

}  // namespace cgx
