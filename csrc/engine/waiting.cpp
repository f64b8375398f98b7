// How the holder of the role waits for a peer: it spins, yields, then sleeps on its bell; and how peers ring that bell.
#include "waiting.h"

#include <sched.h>

#include <algorithm>

#include "group.h"

namespace cgx {
namespace {

constexpr int64_t kNapNs = 20000000;  // between two looks at whether the peer lives

void write_byte(int bell) {
  if (bell >= 0 && write(bell, "", 1) < 0) {
    // It is full, so that its reader will wake; or there is no reader any more.
  }
}

}  // namespace

int Group::wait_for(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t until_ns) {
  if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
  const int64_t begin_ns = now_ns();
  if (op.waiting_for != peer) {  // else it was left at this wait, and is taken up again
    op.waiting_for = peer;
    op.waiting_since_ns = begin_ns;
  }
  const int status = linked_ ? wait_on_links(op, word, value, peer, begin_ns, until_ns)
                             : wait_long(op, word, value, peer, begin_ns, until_ns);
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

  RankControl& me = row(rank_);
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

// After a full fence, which stands between what was stored and this look.
void Group::ring(int64_t peer) {
  RankControl& other = row(peer);
  const uint32_t waits_on = other.waits_on.load(std::memory_order_relaxed);
  if (peer == rank_ || waits_on == 0) return;
  if (linked_) {  // whoever it waits for, a payload from elsewhere may now have room
    write_byte(bells_[static_cast<size_t>(peer)]);
    return;
  }
  if (waits_on != static_cast<uint32_t>(rank_) + 1) return;
  other.bell.fetch_add(1, std::memory_order_release);
  futex_wake(&other.bell);
}

void Group::ring_all(bool even_if_awake) {
  for (const int64_t peer : home_) {
    if (peer == rank_) continue;
    if (!even_if_awake) {
      ring(peer);
    } else if (linked_) {
      write_byte(bells_[static_cast<size_t>(peer)]);
    } else {
      row(peer).bell.fetch_add(1);
      futex_wake(&row(peer).bell);
    }
  }
}

}  // namespace cgx
