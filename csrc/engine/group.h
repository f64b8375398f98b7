// One rank's view of a group: its queue of operations, and who runs them.
//
// The ranks of a node share memory, and ranks of different nodes are linked by connections (linked.cpp). A group may
// have one node, or one rank on each, or both. What is known of ranks elsewhere stands in a segment of this rank's own,
// which is filled in by what arrives.
//
// Operations run in the order of submission, one at a time, by whoever holds the role: the group's own thread, or a
// caller that waits (so that a synchronous call needs no hand-over between threads). An operation can be left in the
// middle, at a wait, and taken up by another holder.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "board.h"
#include "links/link.h"
#include "peers.h"
#include "plan.h"
#include "segment/control.h"
#include "segment/segment.h"

namespace cgx {

struct Operation {
  cgx_submission what;
  int64_t sequence;      // of its call on the board
  cgx_call call;         // the board forgets it when many more are queued
  uint64_t fingerprint;  // of that call: what tells payloads of other calls apart
  int64_t number;
  int64_t submitted_ns;
  int64_t started_ns = 0;
  int64_t phase_ns[4] = {};  // encode, wait, reduce, decode
  int64_t sent_nbytes = 0;
  int64_t waiting_for = -1;  // a peer
  int64_t waiting_since_ns = 0;
  int64_t pinged_ns = 0;
  int64_t begun = 0;  // slices
  size_t step = 0;
};

// How far a slice of the operation under way has come.
struct SliceProgress {
  int64_t steps_left;
  int64_t unsent;  // payloads that wait in a link's queue
};

class Group : private Receiver, private ControlListener {
 public:
  // `home`: the ranks that share the control segment, this one included, in ascending order. `shares_memory`: by rank,
  // whether it is not alone on its node.
  Group(Segment control, Segment elsewhere, std::vector<int64_t> home, std::vector<bool> shares_memory, int64_t rank,
        int64_t world, const int32_t* global_ranks, const cgx_means& means, int64_t segment_limit_nbytes);
  ~Group() override;

  int link(int64_t peer, int64_t stream, int file);
  int link_by_mpi(int64_t peer, cgx_mpi* library, int tag);
  int set_bell(int64_t peer, int file);

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
  int begin_slices(Operation& op, int64_t end, int64_t until_ns);  // all below `end`
  int wait_for_room(Operation& op, int64_t slice, int64_t until_ns);
  void finish_slice();
  int execute(Operation& op, const cgx_step& step, int64_t until_ns);
  void finish(const Operation& op);
  void work();
  void wake_thread();  // with queue_mutex_ held

  // Waiting for a peer to bring `word` to `value`.
  int wait_for(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t until_ns);
  int wait_long(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t begin_ns,
                int64_t until_ns);
  // Between two naps: CGX_OK, or why the wait is over (CGX_OK too if it turns out that the peer had done its part).
  int look_for_trouble(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer);
  int look_at_clock(const Operation& op, int64_t peer);
  bool is_gone(int64_t peer);
  int fail_lost(int64_t peer, const std::string& operation);
  void ring(int64_t peer);
  void ring_all(bool even_if_awake);  // of this node
  int ensure_segment(Operation& op, int64_t until_ns);
  int create_segment(Operation& op, int64_t marks_nbytes, int64_t slots_nbytes, int64_t until_ns);
  int map_segment(Operation& op, int64_t marks_nbytes, int64_t slots_nbytes, int64_t until_ns);

  // Links; only by the holder of the role, but for what the group's thread hears on control connections.
  Link* open_link(int64_t peer);
  void begin_linked(Operation& op);
  void tell_call(const Operation& op, Link& link);
  int agree(Operation& op, int64_t until_ns);
  int hear_calls(Operation& op, int64_t until_ns);  // of those to whom payloads only go
  int flush(Operation& op, int64_t until_ns);       // until all that was queued has left
  int ensure_private(int64_t needed);
  bool has_room(int64_t slice) const;
  void set_mark(const Operation& op, const cgx_slot& slot);
  int wait_for_mark(Operation& op, const cgx_slot& slot, int64_t until_ns);
  void send_payload(Operation& op, const cgx_step& step, const cgx_slot& slot);
  void free_slices();
  int64_t peer_with_queue() const;
  void pump();
  int wait_on_links(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer, int64_t begin_ns,
                    int64_t until_ns);
  void sleep_on_links(int64_t nap_ns);
  int look_for_link_trouble(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer);
  void work_linked();
  void ring_holder();
  bool is_lost(int64_t peer, int64_t sequence, int64_t slice, int64_t waiting_since_ns) const;
  std::string link_state(int64_t peer) const;
  void poison_links(int status, const std::string& text);
  void leave_links();
  Answer place(int64_t peer, const FrameHeader& header, uint8_t** destination) override;
  void payload_arrived(int64_t peer, const FrameHeader& header) override;
  void frame_left(int64_t slice) override;
  void call_arrived(int64_t peer, uint64_t sequence, const cgx_call& call) override;
  void noise_arrived(int64_t peer) override;
  void carrier_failed(int64_t peer) override;
  void poison_arrived_from(int64_t peer, int status, const std::string& text) override;
  void peer_left(int64_t peer, uint64_t last_sequence) override;
  uint64_t latest_sequence() const override;

  // The flight recorder.
  cgx_record record_of(const Operation& op, cgx_record_state state) const;  // only by the holder of the role
  void keep(const cgx_record& record);

  bool write_poison(int64_t culprit, int status, const std::string& text);
  bool poison_arrived();
  int fail_mismatch(int64_t peer, int64_t sequence);
  std::string name(int64_t rank) const { return "rank " + std::to_string(global_ranks_[static_cast<size_t>(rank)]); }
  std::string operation_name(const Operation& op) const;

  RankControl& row(int64_t rank) const { return *rows_[static_cast<size_t>(rank)].control; }
  Link* link_to(int64_t peer) const { return links_[static_cast<size_t>(peer)].get(); }  // NULL: on this node
  bool shares() const { return home_.size() > 1; }
  Flag& flag(int64_t rank, int64_t index) const { return flags_[rank * layout_.flags_per_rank + index]; }
  Mark& mark(const Operation& op, const cgx_slot& slot) const;
  uint8_t* slot_data(const Operation& op, int64_t slot) const;
  std::vector<const uint8_t*> input_data(const Operation& op, const cgx_step& step) const;
  void count(Counter counter, int64_t amount) { counters_[counter].fetch_add(amount, std::memory_order_relaxed); }

  const ControlLayout layout_;
  Segment control_segment_, elsewhere_segment_, data_;
  Control* control_;
  Flag* flags_;
  const std::vector<Row> rows_;  // by rank
  Board board_;
  const std::vector<int64_t> home_;  // the ranks of this node
  const bool linked_;                // there are others
  const std::vector<bool> shares_memory_;
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
  int64_t marks_nbytes_ = 0;  // at the start of data_, where a linked group shares it
  uint64_t base_ = 0;         // linked: slices of all operations before this one
  bool mapped_ = false;       // linked: data_ has room for the operation under way

  std::vector<SliceProgress> progress_;  // of the operation under way, by slice

  std::vector<std::unique_ptr<Link>> links_;    // by peer; NULL: this rank, or none yet
  std::vector<int64_t> linked_peers_;           // whose control connection is there; with queue_mutex_ held
  std::vector<int64_t> thread_peers_;           // the same, as the group's thread knows them
  std::vector<pollfd> pollfds_;                 // of the holder
  cgx_mpi* mpi_ = nullptr;                      // where some links go over it
  uint64_t finished_sequence_ = 0;              // of the last operation that was done
  int holder_bell_ = -1, thread_bell_ = -1;     // eventfds
  int bell_ = -1;                               // a pipe that ranks of this node write to while this one sleeps
  std::vector<int> bells_;                      // by rank: the other end of theirs; -1: not of this node
  bool thread_holds_ = false;                   // the role
  Operation* current_ = nullptr;                // what payloads may arrive for
  std::vector<std::atomic<uint64_t>> arrived_;  // by slot of the operation under way: 1 once it is here
  std::vector<bool> placed_;                    // by slot: its payload has begun to arrive
  std::atomic<uint64_t> freed_{0};              // slices, from the first on, whose part can be used again
  std::atomic<uint64_t> left_{0};               // frames of this operation that have left
  uint64_t queued_ = 0;

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
  mutable std::mutex records_mutex_;                                     // locked after queue_mutex_, where both are
  std::vector<cgx_record> records_ = std::vector<cgx_record>(kRecords);  // number 0: none yet
  cgx_record running_ = {};                                              // of the operation that last slept
  std::vector<int64_t> waited_ns_;                                       // by peer, of the operation that runs
  std::atomic<int64_t> counters_[kCounters] = {};
};

}  // namespace cgx
