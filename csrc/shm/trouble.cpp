// Waiting for peers, and everything that can go wrong meanwhile: the part of Group that keeps the promises "no hang"
// and "no lie".
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "group.h"
#include "waiting.h"

namespace cgx {
namespace {

constexpr int64_t kNapNs = 20000000;  // between two looks at whether the peer lives

}  // namespace

int Group::wait_for(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t until_ns) {
  if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
  const int64_t begin_ns = now_ns();
  if (op.waiting_for != peer) {  // else it was left at this wait, and is taken up again
    op.waiting_for = peer;
    op.waiting_since_ns = begin_ns;
  }
  const int status = wait_long(op, word, value, peer, begin_ns, until_ns);
  const int64_t waited_ns = now_ns() - begin_ns;
  waited_ns_[static_cast<size_t>(peer)] += waited_ns;
  op.phase_ns[kWaitNs - kEncodeNs] += waited_ns;
  if (status == CGX_OK) op.waiting_for = -1;
  return status;
}

int Group::wait_long(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t begin_ns,
                     int64_t until_ns) {
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
      pause_briefly();
    }
  } while (now_ns() < std::min(begin_ns + spin_ns_, until_ns));
  while (now_ns() < std::min(begin_ns + yield_ns_, until_ns)) {
    sched_yield();
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
  }

  RankControl& me = ranks_[rank_];
  {
    std::lock_guard<std::mutex> lock(records_mutex_);
    running_ = record_of(op, CGX_RECORD_RUNNING);
  }
  for (;;) {
    const uint32_t bell = me.bell.load(std::memory_order_acquire);
    me.waits_on.store(static_cast<uint32_t>(peer) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (word.load(std::memory_order_acquire) >= value) {
      me.waits_on.store(0, std::memory_order_relaxed);
      return CGX_OK;
    }
    const int trouble = look_for_trouble(op, word, value, peer);
    // Closing rings this bell as well, but may have done so before it was read above.
    if (trouble == CGX_OK && !closed_.load())
      futex_wait(&me.bell, bell, std::max<int64_t>(0, std::min(kNapNs, until_ns - now_ns())));
    me.waits_on.store(0, std::memory_order_relaxed);
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
    if (trouble != CGX_OK) return trouble;
    if (closed_.load(std::memory_order_relaxed)) return CGX_ERROR_CLOSED;
    if (now_ns() >= until_ns) return CGX_PENDING;
  }
}

void Group::ring(int64_t peer) {
  RankControl& other = ranks_[peer];
  if (peer == rank_ || other.waits_on.load(std::memory_order_relaxed) != static_cast<uint32_t>(rank_) + 1) return;
  other.bell.fetch_add(1, std::memory_order_release);
  futex_wake(&other.bell);
}

std::string Group::operation_name(const Operation& op) const {
  return "operation " + std::to_string(op.sequence) + ", " + board_.describe(rank_, op.sequence);
}

bool Group::is_gone(int64_t peer) {
  const RankControl& them = ranks_[peer];
  return them.life.load(std::memory_order_acquire) == kPresent &&
         watch_.is_dead(peer, them.pid.load(), them.start_time.load());
}

int Group::fail_lost(int64_t peer, const std::string& operation) {
  const bool left = ranks_[peer].life.load(std::memory_order_acquire) == kLeft;
  fail(CGX_ERROR_PEER_LOST, name(rank_) + " lost " + name(peer) + " in " + operation + ": its process (pid " +
                                std::to_string(ranks_[peer].pid.load()) + ") " +
                                (left ? "has left the group (destroy_process_group, or the end of its script)"
                                      : "is gone (killed, crashed or out of memory)") +
                                ". Look at that rank's output for the cause, then restart all ranks.");
  return status_.load();
}

int Group::look_for_trouble(const Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer) {
  if (poison_arrived()) return status_.load();
  for (int64_t other = 0; other < world_; ++other) {
    if (other == rank_) continue;
    if (board_.differs(other, op.sequence)) return fail_mismatch(other, op.sequence);
    // A dead rank that has not even called takes part in nothing any more, whoever is waited for first.
    if (other != peer && ranks_[other].noted.load(std::memory_order_acquire) < op.sequence && is_gone(other))
      return fail_lost(other, operation_name(op));
  }
  if (ranks_[peer].life.load(std::memory_order_acquire) == kLeft || is_gone(peer)) {
    // It may have done its part before it left.
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
    return poison_arrived() ? status_.load() : fail_lost(peer, operation_name(op));
  }
  const int64_t waited_ms = (now_ns() - op.started_ns) / 1000000;
  if (waited_ms >= op.what.timeout_ms) {
    fail(CGX_ERROR_TIMEOUT,
         name(rank_) + " waited " + std::to_string(waited_ms) + " ms for " + name(peer) + " in " + operation_name(op) +
             "; " + name(peer) + " " + board_.position(peer) +
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
    const bool missing = ranks_[peer].noted.load(std::memory_order_acquire) < sequence;
    const bool left = ranks_[peer].life.load(std::memory_order_acquire) == kLeft;
    if ((missing || any) && (left || is_gone(peer)))
      return fail_lost(peer, "operation " + std::to_string(sequence) + ", " + board_.describe(rank_, sequence));
  }
  return CGX_OK;
}

std::string Group::laggards(int64_t sequence) const {
  std::string text;
  for (int64_t peer = 0; peer < world_; ++peer)
    if (peer != rank_ && ranks_[peer].noted.load(std::memory_order_acquire) < sequence)
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

// The first failure of a rank is kept, told to the peers, and wakes whoever waits.
void Group::fail(int status, const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (status_.load() != CGX_OK) return;
    error_ = text;
    status_.store(status, std::memory_order_release);
  }
  uint32_t unclaimed = 0;
  if (status != CGX_ERROR_CLOSED && control_->poison_claimed.compare_exchange_strong(unclaimed, 1)) {
    const size_t length = std::min<size_t>(text.size(), kPoisonNbytes - 1);
    std::memcpy(control_->poison_text, text.data(), length);
    control_->poison_text[length] = 0;
    control_->poison_rank.store(static_cast<int32_t>(rank_));
    control_->poison_status.store(status);
    control_->poisoned.store(1, std::memory_order_release);
    for (int64_t peer = 0; peer < world_; ++peer) {
      ranks_[peer].bell.fetch_add(1);
      futex_wake(&ranks_[peer].bell);
    }
  }
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
