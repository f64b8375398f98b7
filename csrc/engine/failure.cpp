// Everything that can end a group: how a rank notices it, words it, and tells its peers. Keeps the promises "no hang"
// and "no lie".
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "group.h"
#include "waiting.h"

namespace cgx {

std::string Group::operation_name(const Operation& op) const {
  return "operation " + std::to_string(op.sequence) + ", " + board_.describe(rank_, op.sequence);
}

bool Group::is_gone(int64_t peer) {
  const RankControl& them = row(peer);
  if (const Link* link = link_to(peer)) return link->is_down();
  return them.life.load(std::memory_order_acquire) == kPresent &&
         watch_.is_dead(peer, them.pid.load(), them.start_time.load());
}

int Group::fail_lost(int64_t peer, const std::string& operation) {
  const bool left = row(peer).life.load(std::memory_order_acquire) == kLeft;
  std::string state = link_to(peer) ? "it " : "its process (pid " + std::to_string(row(peer).pid.load()) + ") ";
  if (left)
    state += "has left the group (destroy_process_group, or the end of its script)";
  else
    state += link_to(peer) ? link_state(peer) : "is gone (killed, crashed or out of memory)";
  fail(CGX_ERROR_PEER_LOST, name(rank_) + " lost " + name(peer) + " in " + operation + ": " + state +
                                ". Look at that rank's output for the cause, then restart all ranks.");
  return status_.load();
}

int Group::look_for_trouble(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer) {
  if (poison_arrived()) return status_.load();
  for (int64_t other = 0; other < world_; ++other) {
    if (other == rank_) continue;
    if (board_.differs(other, op.sequence)) return fail_mismatch(other, op.sequence);
    // A dead rank that has not even called takes part in nothing any more, whoever is waited for first.
    if (other != peer && row(other).noted.load(std::memory_order_acquire) < op.sequence && is_gone(other))
      return fail_lost(other, operation_name(op));
  }
  if (row(peer).life.load(std::memory_order_acquire) == kLeft || is_gone(peer)) {
    // It may have done its part before it left.
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
    return poison_arrived() ? status_.load() : fail_lost(peer, operation_name(op));
  }
  return look_at_clock(op, peer);
}

int Group::look_at_clock(const Operation& op, int64_t peer) {
  const int64_t waited_ms = (now_ns() - op.started_ns) / 1000000;
  // A peer that has made this call may itself wait for the one that has not. Whoever waits for that one speaks first.
  const bool has_called = row(peer).noted.load(std::memory_order_acquire) >= op.sequence;
  const int64_t patience_ms = has_called ? std::clamp<int64_t>(op.what.timeout_ms / 20, 250, 2000) : 0;
  if (waited_ms >= op.what.timeout_ms + patience_ms) {
    const std::string state = linked_ ? link_state(peer) : "";
    fail(CGX_ERROR_TIMEOUT,
         name(rank_) + ": Timed out after " + std::to_string(waited_ms) + " ms waiting for " + name(peer) + " in " +
             operation_name(op) + "; " + name(peer) + " " + board_.position(peer) +
             (state.empty() ? "" : "; it " + state) +
             ". Make sure that all ranks call the same collectives, or give init_process_group a longer timeout.");
    return CGX_ERROR_TIMEOUT;
  }
  return CGX_OK;
}

int Group::check(int64_t sequence) {
  if (status_.load() != CGX_OK) return status_.load();
  if (poison_arrived()) return status_.load();
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    if (board_.differs(peer, sequence)) return fail_mismatch(peer, sequence);
  }
  return CGX_OK;
}

int Group::check_peers(int64_t sequence, bool any) {
  const int status = check(sequence);
  if (status != CGX_OK) return status;
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    // Who has made the call may have done its part and ended, for all we know; unless a connection was lost (`any`).
    const bool missing = row(peer).noted.load(std::memory_order_acquire) < sequence;
    const bool left = row(peer).life.load(std::memory_order_acquire) == kLeft;
    if ((missing || any) && (left || is_gone(peer)))
      return fail_lost(peer, "operation " + std::to_string(sequence) + ", " + board_.describe(rank_, sequence));
  }
  return CGX_OK;
}

std::string Group::laggards(int64_t sequence) const {
  std::string text;
  for (int64_t peer = 0; peer < world_; ++peer)
    if (peer != rank_ && row(peer).noted.load(std::memory_order_acquire) < sequence)
      text += (text.empty() ? "" : "; ") + name(peer) + " " + board_.position(peer);
  return text;
}

int Group::fail_mismatch(int64_t peer, int64_t sequence) {
  fail(CGX_ERROR_MISMATCH,
       "ranks have lost step at operation " + std::to_string(sequence) + ": " + name(rank_) + " called " +
           board_.describe(rank_, sequence) + ", " + name(peer) + " called " + board_.describe(peer, sequence) +
           ". All ranks must make the same calls with the same shapes, types and settings, in one order.");
  return status_.load();
}

// Whether this is the first failure that the control segment hears of.
bool Group::write_poison(int64_t culprit, int status, const std::string& text) {
  uint32_t unclaimed = 0;
  if (!control_->poison_claimed.compare_exchange_strong(unclaimed, 1)) return false;
  const size_t length = std::min<size_t>(text.size(), kPoisonNbytes - 1);
  std::memcpy(control_->poison_text, text.data(), length);
  control_->poison_text[length] = 0;
  control_->poison_rank.store(static_cast<int32_t>(culprit));
  control_->poison_status.store(status);
  control_->poisoned.store(1, std::memory_order_release);
  return true;
}

// The first failure of a rank is kept, told to the peers, and wakes whoever waits.
void Group::fail(int status, const std::string& text) {
  if (getpid() != owner_pid_) return;  // a forked child is no member of the group
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (status_.load() != CGX_OK) return;
    error_ = text;
    status_.store(status, std::memory_order_release);
  }
  if (status != CGX_ERROR_CLOSED && write_poison(rank_, status, text)) {
    ring_all(true);
    if (linked_) poison_links(status, text);
  }
  row(rank_).bell.fetch_add(1);  // another thread of this rank may be asleep in an operation
  futex_wake(&row(rank_).bell);
  if (linked_) ring_holder();
  std::lock_guard<std::mutex> lock(queue_mutex_);
  work_done_.notify_all();
}

bool Group::poison_arrived() {
  if (status_.load() != CGX_OK) return true;
  if (control_->poisoned.load(std::memory_order_acquire) == 0) return false;
  const int64_t culprit = control_->poison_rank.load();
  if (culprit == rank_ || culprit < 0 || culprit >= world_) return false;
  const std::string text(control_->poison_text, strnlen(control_->poison_text, kPoisonNbytes));
  const int status = control_->poison_status.load();
  // A lost peer, lost step or a full /dev/shm concerns this rank as much as the one that saw it first.
  const bool shared =
      status == CGX_ERROR_MISMATCH || status == CGX_ERROR_PEER_LOST || status == CGX_ERROR_SHARED_MEMORY;
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (status_.load() == CGX_OK) {
    error_ = shared ? text : name(culprit) + " failed, and so " + name(rank_) + " cannot go on: " + text;
    error_ += " (" + name(rank_) + " " + board_.position(rank_) + ")";
    status_.store(shared ? status : CGX_ERROR_POISONED, std::memory_order_release);
  }
  return true;
}

int Group::error(std::string* text) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  *text = error_;
  return status_.load();
}

}  // namespace cgx
