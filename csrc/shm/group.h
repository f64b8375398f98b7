// One rank's view of a group on shared memory: its queue of operations, and who runs them.
//
// Operations run in the order of submission, one at a time, by whoever holds the role: the group's own thread, or a
// caller that waits (so that a synchronous call needs no hand-over between threads). An operation can be left in the
// middle, at a wait, and taken up by another holder.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "board.h"
#include "control.h"
#include "peers.h"
#include "plan.h"
#include "segment.h"

namespace cgx {

struct Operation {
  cgx_submission what;
  int64_t sequence;      // of its call on the board
  uint64_t fingerprint;  // of that call: what tells payloads of other calls apart
  int64_t number;
  int64_t submitted_ns;
  int64_t started_ns = 0;
  int64_t phase_ns[4] = {};  // encode, wait, reduce, decode
  int64_t sent_nbytes = 0;
  int64_t waiting_for = -1;  // a peer
  int64_t waiting_since_ns = 0;
  int64_t slice = 0;
  int64_t step = 0;
  bool slice_begun = false;
};

class Group {
 public:
  Group(Segment control, int64_t rank, int64_t world, const int32_t* global_ranks, const cgx_means& means,
        int64_t segment_limit_nbytes);
  ~Group();

  void start(const char* operations, const char* dtypes, const char* reductions);
  int64_t note(const cgx_call& call);
  int64_t submit(const cgx_call& call, cgx_submission* what);
  int wait(int64_t number, int64_t slice_ms);
  void kick();
  int64_t completed() const { return completed_.load(std::memory_order_acquire); }
  int check(int64_t sequence);  // poison and lost step
  // And peers that died: those that cannot have made this call, or `any`.
  int check_peers(int64_t sequence, bool any);
  std::string laggards(int64_t sequence) const;
  void fail(int status, const std::string& text);
  int error(std::string* text);
  bool record(int64_t number, cgx_record* found) const;
  std::string peer(int64_t rank, cgx_peer* found);
  cgx_stats stats() const;
  void reset_stats();
  void close();

 private:
  enum Counter {
    kOperations,
    kCompressed,
    kBefore,
    kAfter,
    kSent,
    kEncodeNs,
    kWaitNs,
    kReduceNs,
    kDecodeNs,
    kCounters
  };

  // Running; only by the holder of the role. `until_ns`: give up waiting then (CGX_PENDING), though not for good.
  int run_queue(int64_t target, int64_t until_ns);
  int advance(Operation& op, int64_t until_ns);
  int begin_slice(Operation& op, int64_t until_ns);
  int execute(Operation& op, const cgx_step& step, int64_t until_ns);
  void finish(const Operation& op);
  void work();

  // Waiting for a peer to bring `word` to `value`.
  int wait_for(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t until_ns);
  int wait_long(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t begin_ns,
                int64_t until_ns);
  // Between two naps: CGX_OK, or why the wait is over (CGX_OK too if it turns out that the peer had done its part).
  int look_for_trouble(const Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer);
  bool is_gone(int64_t peer);
  int fail_lost(int64_t peer, const std::string& operation);
  void ring(int64_t peer);
  int ensure_segment(Operation& op, int64_t until_ns);

  // The flight recorder.
  cgx_record record_of(const Operation& op, cgx_record_state state) const;  // only by the holder of the role
  void keep(const cgx_record& record);

  bool poison_arrived();
  int fail_mismatch(int64_t peer, int64_t sequence);
  std::string name(int64_t rank) const { return "rank " + std::to_string(global_ranks_[static_cast<size_t>(rank)]); }
  std::string operation_name(const Operation& op) const;

  Flag& flag(int64_t rank, int64_t index) const { return flags_[rank * layout_.flags_per_rank + index]; }
  uint8_t* slot_data(const Operation& op, int64_t slot) const;
  std::vector<const uint8_t*> input_data(const Operation& op, const cgx_step& step) const;
  void count(Counter counter, int64_t amount) { counters_[counter].fetch_add(amount, std::memory_order_relaxed); }

  const ControlLayout layout_;
  Segment control_segment_, data_;
  Control* control_;
  RankControl* ranks_;
  Flag* flags_;
  Board board_;
  const int64_t rank_, world_;
  const std::vector<int32_t> global_ranks_;
  const cgx_means means_;
  const int64_t segment_limit_nbytes_;
  const int owner_pid_;
  int64_t spin_ns_, yield_ns_;  // how long a wait spins, and how long after its start it still yields
  PeerWatch watch_;

  uint64_t slice_number_ = 0;  // of the slice being run, counted over the group's life
  uint64_t generation_ = 0;    // of data_
  bool created_generation_ = false;

  std::mutex role_;
  mutable std::mutex queue_mutex_;
  std::condition_variable work_arrived_, work_done_;
  std::deque<Operation> queue_;
  bool thread_wanted_ = false;
  bool stopping_ = false;
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> submitted_{0}, completed_{0};
  std::thread thread_;

  mutable std::mutex error_mutex_;
  std::atomic<int> status_{CGX_OK};
  std::string error_;

  static constexpr int64_t kRecords = 1024;
  mutable std::mutex records_mutex_;  // locked after queue_mutex_, where both are
  std::vector<cgx_record> records_{kRecords, cgx_record{-1}};
  cgx_record running_{-1};          // of the operation that last slept
  std::vector<int64_t> waited_ns_;  // by peer, of the operation that runs
  std::atomic<int64_t> counters_[kCounters] = {};
};

}  // namespace cgx
