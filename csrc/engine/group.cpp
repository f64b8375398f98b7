#include "group.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "waiting.h"

namespace cgx {
namespace {

constexpr int kThreadNice = -5;

uint64_t fingerprint_of(const cgx_call& call, int64_t sequence) {
  uint64_t hash = 0xCBF29CE484222325ull ^ static_cast<uint64_t>(sequence);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&call);
  for (size_t i = 0; i < sizeof call; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3ull;
  return hash;
}

// What is known of ranks that share no memory with this one stands in `elsewhere`.
std::vector<Row> rows_in(const Segment& control, const Segment& elsewhere, const std::vector<int64_t>& home,
                         const ControlLayout& layout) {
  std::vector<Row> rows;
  for (int64_t rank = 0; rank < layout.world; ++rank) {
    uint8_t* base = (std::count(home.begin(), home.end(), rank) ? control : elsewhere).data();
    rows.push_back({reinterpret_cast<RankControl*>(base + layout.ranks_at) + rank,
                    reinterpret_cast<BoardEntry*>(base + layout.board_at) + rank * kBoardEntries});
  }
  return rows;
}

// Where decoded values go.
uint8_t* result_of(const Operation& op) {
  return static_cast<uint8_t*>(op.what.share ? op.what.share : op.what.values);
}

int64_t aligned(int64_t nbytes) { return (nbytes + 127) / 128 * 128; }

}  // namespace

Group::Group(Segment control, Segment elsewhere, std::vector<int64_t> home, std::vector<bool> shares_memory,
             int64_t rank, int64_t world, const int32_t* global_ranks, const cgx_means& means,
             int64_t segment_limit_nbytes)
    : layout_(world),
      control_segment_(std::move(control)),
      elsewhere_segment_(std::move(elsewhere)),
      control_(reinterpret_cast<Control*>(control_segment_.data())),
      flags_(reinterpret_cast<Flag*>(control_segment_.data() + layout_.flags_at)),
      rows_(rows_in(control_segment_, elsewhere_segment_, home, layout_)),
      board_(rows_, rank),
      home_(std::move(home)),
      linked_(static_cast<int64_t>(home_.size()) < world),
      shares_memory_(std::move(shares_memory)),
      rank_(rank),
      world_(world),
      global_ranks_(global_ranks, global_ranks + world),
      means_(means),
      segment_limit_nbytes_(segment_limit_nbytes),
      owner_pid_(getpid()),
      watch_(world),
      links_(static_cast<size_t>(world)),
      bells_(static_cast<size_t>(world), -1),
      waited_ns_(static_cast<size_t>(world)) {
  cpu_set_t cores;
  const int64_t n_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  // Spinning pays while the peer runs on another core; with more ranks than cores it keeps the peer from running.
  // Then it gives way to the peer for a while before it sleeps: four ranks on two cores need 130 us for 64 KB without,
  // 50 us with it. Where every rank has a core there is no peer to give way to, only threads of the user's.
  // Of ranks elsewhere nobody knows here which share cores.
  const bool crowded = n_cores < static_cast<int64_t>(home_.size());
  spin_ns_ = crowded ? 2000 : 50000;
  yield_ns_ = crowded ? 200000 : 0;
  RankControl& me = row(rank);
  me.pid.store(owner_pid_);
  me.start_time.store(process_start_time(owner_pid_));
  me.life.store(kPresent, std::memory_order_release);
  if (linked_) {
    holder_bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    thread_bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (holder_bell_ < 0 || thread_bell_ < 0) throw std::runtime_error("cannot make an eventfd: too many open files?");
  }
}

void Group::start(const char* operations, const char* dtypes, const char* reductions) {
  board_.set_names(operations, dtypes, reductions);
  thread_ = std::thread([this] {
    // Where the system allows it, this thread comes before the user's busy ones: all ranks wait for the last of its
    // kind.
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kThreadNice);
    linked_ ? work_linked() : work();
  });
}

Group::~Group() {
  close();
  if (holder_bell_ >= 0) ::close(holder_bell_);
  if (thread_bell_ >= 0) ::close(thread_bell_);
  if (getpid() != owner_pid_) return;  // a forked child has closed the others
  if (bell_ >= 0) close_file(bell_);
  for (const int file : bells_)
    if (file >= 0) close_file(file);
}

// ---- the queue ----

int64_t Group::note(const cgx_call& call) {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return board_.note(call);
}

int64_t Group::submit(const cgx_call& call, cgx_submission* what) {
  if (closed_.load()) return CGX_ERROR_CLOSED;
  if (status_.load() != CGX_OK) return status_.load();
  const cgx_plan* plan = what->plan;
  if (plan && plan->world != world_) return CGX_ERROR_ARGUMENT;
  // MPI may read and write a payload after the group has failed, when its tensor may be gone.
  const bool runs_here = linked_ ? !plan || plan->in_memory || (!mpi_ && !shares())
                                 : plan && plan->in_slice_order && plan->ring == 2 && plan->in_memory &&
                                       plan->n_flags <= layout_.flags_per_rank;
  if (!runs_here) return CGX_ERROR_ARGUMENT;
  Operation op;
  op.what = *what;
  op.call = call;
  op.submitted_ns = now_ns();
  what->completed = completed();
  std::lock_guard<std::mutex> lock(queue_mutex_);
  op.sequence = board_.note(call);
  op.fingerprint = fingerprint_of(call, op.sequence);
  op.what.rounding.op = static_cast<uint64_t>(op.sequence);
  op.number = ++submitted_;
  queue_.push_back(op);
  what->sequence = op.sequence;
  if (what->wake && !thread_wanted_) wake_thread();
  return op.number;
}

void Group::kick() {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  wake_thread();
}

void Group::wake_thread() {
  thread_wanted_ = true;
  if (linked_)
    eventfd_write(thread_bell_, 1);
  else
    work_arrived_.notify_one();
}

void Group::work() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(queue_mutex_);
      work_arrived_.wait(lock, [this] { return stopping_ || thread_wanted_; });
      if (stopping_) return;
      thread_wanted_ = false;
    }
    {
      std::lock_guard<std::mutex> role(role_);
      run_queue(INT64_MAX, INT64_MAX);
    }
    // A caller that came while the role was taken sleeps, and relies on this thread for what it has queued.
    std::lock_guard<std::mutex> lock(queue_mutex_);
    thread_wanted_ = thread_wanted_ || !queue_.empty();
  }
}

int Group::wait(int64_t number, int64_t slice_ms) {
  const int64_t until_ns = now_ns() + slice_ms * 1000000;
  for (;;) {
    if (completed() >= number) return CGX_OK;
    if (slice_ms == 0 && status_.load() == CGX_OK && !closed_.load()) {  // only a look: others do the work
      kick();
      return CGX_PENDING;
    }
    const int status = status_.load(std::memory_order_acquire);
    if (status != CGX_OK) {
      // The holder of the role may be in the middle of this operation. Once it has let go, nobody touches tensors or
      // plans again, and the caller may free them.
      std::lock_guard<std::mutex> role(role_);
      return status;
    }
    if (closed_.load()) return CGX_ERROR_CLOSED;
    if (role_.try_lock()) {
      run_queue(number, until_ns);
      role_.unlock();
      std::lock_guard<std::mutex> lock(queue_mutex_);
      if (!queue_.empty()) wake_thread();  // what this caller leaves behind is the thread's
    } else {
      std::unique_lock<std::mutex> lock(queue_mutex_);
      const auto slice = std::chrono::nanoseconds(std::max<int64_t>(0, until_ns - now_ns()));
      work_done_.wait_for(lock, slice,
                          [&] { return completed() >= number || status_.load() != CGX_OK || closed_.load(); });
    }
    if (completed() < number && status_.load() == CGX_OK && now_ns() >= until_ns) return CGX_PENDING;
  }
}

int Group::run_queue(int64_t target, int64_t until_ns) {
  while (completed() < target) {
    if (closed_.load()) return CGX_ERROR_CLOSED;
    Operation* op;
    {
      std::lock_guard<std::mutex> lock(queue_mutex_);
      if (queue_.empty()) return CGX_OK;
      op = &queue_.front();  // stays valid: only the holder of the role pops, and a deque's ends do not move it
    }
    const int status = status_.load() == CGX_OK ? advance(*op, until_ns) : status_.load();
    if (status == CGX_PENDING) return status;
    if (status == CGX_OK) finish(*op);
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (status == CGX_OK) {
      completed_.store(op->number, std::memory_order_release);
      queue_.pop_front();
    } else {
      for (const Operation& each : queue_) keep(record_of(each, CGX_RECORD_FAILED));
      queue_.clear();
    }
    current_ = nullptr;
    work_done_.notify_all();
    if (status != CGX_OK) return status;
  }
  return CGX_OK;
}

void Group::finish(const Operation& op) {
  finished_sequence_ = static_cast<uint64_t>(op.sequence);
  if (linked_ && op.what.plan) base_ += static_cast<uint64_t>(op.what.plan->n_slices);
  if (op.what.plan && op.what.plan->dtype != CGX_BYTES) {  // statistics are of what could be compressed
    count(kOperations, 1);
    count(kCompressed, op.what.compressed);
    count(kBefore, op.what.bytes_before);
    count(kAfter, op.what.bytes_after);
  }
  cgx_record record = record_of(op, CGX_RECORD_DONE);
  record.finished_ns = now_ns();
  if (mpi_) MpiProgress::seen();
  keep(record);
}

// ---- running one operation ----

int Group::advance(Operation& op, int64_t until_ns) {
  if (op.started_ns == 0) {
    op.started_ns = now_ns();
    std::fill(waited_ns_.begin(), waited_ns_.end(), 0);
    if (linked_) begin_linked(op);
  }
  current_ = &op;
  if (!op.what.plan) return agree(op, until_ns);
  const cgx_plan& plan = *op.what.plan;
  if (!linked_ || !mapped_) {
    const int ready = ensure_segment(op, until_ns);
    if (ready != CGX_OK) return ready;
    mapped_ = true;
  }
  for (; op.step < plan.steps.size(); ++op.step) {
    const cgx_step& step = plan.steps[op.step];
    const int64_t slice = plan.slice_of(step);
    int status = begin_slices(op, slice + 1, until_ns);
    if (status == CGX_OK) status = execute(op, step, until_ns);
    if (status != CGX_OK) return status;
    if (--progress_[static_cast<size_t>(slice)].steps_left == 0) finish_slice();
  }
  int status = begin_slices(op, plan.n_slices, until_ns);  // those in which this rank has nothing to do
  if (status == CGX_OK && linked_) status = hear_calls(op, until_ns);
  if (status == CGX_OK && linked_) status = flush(op, until_ns);
  // A rank of this node that made another call may have written over what was read here. Where sums are made in shared
  // memory alone, every rank has read something of every other, and found out.
  const bool reads_all = !linked_ && plan.dtype != CGX_BYTES;
  return status == CGX_OK && shares() && !reads_all ? check(op.sequence) : status;
}

int Group::begin_slices(Operation& op, int64_t end, int64_t until_ns) {
  const cgx_plan& plan = *op.what.plan;
  while (op.begun < end) {
    const int status = wait_for_room(op, op.begun, until_ns);
    if (status != CGX_OK) return status;
    if (op.begun == 0) progress_.resize(static_cast<size_t>(plan.n_slices));
    const int64_t steps = plan.slice_steps[static_cast<size_t>(op.begun)];
    progress_[static_cast<size_t>(op.begun)] = {steps, 0};
    ++op.begun;
    ++slice_number_;
    if (steps == 0) finish_slice();
  }
  return CGX_OK;
}

// The part of the memory that this slice will use must have been left by the slice before it there.
int Group::wait_for_room(Operation& op, int64_t slice, int64_t until_ns) {
  if (linked_) {
    const auto earlier = static_cast<uint64_t>(std::max<int64_t>(0, slice - op.what.plan->ring + 1));
    int status = earlier ? wait_for(op, freed_, earlier, peer_with_queue(), until_ns) : CGX_OK;
    for (const int64_t peer : home_)
      if (peer != rank_ && status == CGX_OK) status = wait_for(op, row(peer).done, base_ + earlier, peer, until_ns);
    return status;
  }
  const uint64_t next = slice_number_ + 1;
  if (next <= 2) return CGX_OK;
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    const int status = wait_for(op, row(peer).done, next - 2, peer, until_ns);
    if (status != CGX_OK) return status;
  }
  return CGX_OK;
}

void Group::finish_slice() {
  if (linked_) return free_slices();
  row(rank_).done.store(slice_number_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all(false);
}

uint8_t* Group::slot_data(const Operation& op, int64_t slot) const {
  const cgx_slot& at = op.what.plan->slots[static_cast<size_t>(slot)];
  if (at.home == CGX_HOME_VALUES) return static_cast<uint8_t*>(op.what.values) + at.offset;
  if (at.home == CGX_HOME_RESULT) return result_of(op) + at.offset;
  const int64_t part = linked_ ? marks_nbytes_ + at.slice % op.what.plan->ring * op.what.plan->part_nbytes
                               : (slice_number_ & 1) * (data_.nbytes() / 2);
  return data_.data() + part + at.offset;
}

std::vector<const uint8_t*> Group::input_data(const Operation& op, const cgx_step& step) const {
  std::vector<const uint8_t*> payloads(static_cast<size_t>(step.n_inputs));
  for (size_t i = 0; i < payloads.size(); ++i)
    payloads[i] = slot_data(op, op.what.plan->inputs[static_cast<size_t>(step.first_input) + i]);
  return payloads;
}

int Group::execute(Operation& op, const cgx_step& step, int64_t until_ns) {
  const cgx_plan& plan = *op.what.plan;
  const cgx_slot& slot = plan.slots[static_cast<size_t>(step.slot)];
  const cgx_piece* pieces = plan.pieces.data() + step.first_piece;
  cgx_rounding rounding = op.what.rounding;
  rounding.rank = static_cast<uint32_t>(rank_);
  const int64_t begin_ns = now_ns();
  const auto timed = [&](Counter counter) {
    const int64_t elapsed_ns = now_ns() - begin_ns;
    count(counter, elapsed_ns);
    op.phase_ns[counter - kEncodeNs] += elapsed_ns;
  };
  int status = CGX_OK;
  // Where the payload is in the tensor already, or the tensor gets it as it comes, nothing is encoded or decoded, and
  // nothing is lost.
  const bool at_home = slot.home != CGX_HOME_MEMORY;
  const auto lose_nothing = [&] {
    if (op.what.residual) std::fill_n(op.what.residual + pieces->offset, pieces->numel, 0.0f);
  };
  switch (step.kind) {
    case CGX_STEP_ENCODE:
      if (at_home) {
        lose_nothing();
        return CGX_OK;
      }
      rounding.stage = 0;
      status = cgx_encode(&means_, plan.dtype, pieces, step.n_pieces, op.what.values, slot_data(op, step.slot),
                          &rounding, op.what.residual);
      timed(kEncodeNs);
      break;
    case CGX_STEP_SEND:
      if (plan.dtype != CGX_BYTES) count(kSent, slot.nbytes);
      op.sent_nbytes += slot.nbytes;
      if (linked_) {
        if (link_to(step.peer)) {
          send_payload(op, step, slot);
        } else {
          if (slot.writer == rank_) set_mark(op, slot);
          ring(step.peer);
        }
        return CGX_OK;
      }
      if (slot.writer == rank_) {  // what is only passed on is there already, for all to read
        flag(rank_, slot.flag).fingerprint[slice_number_ & 1].store(op.fingerprint, std::memory_order_relaxed);
        flag(rank_, slot.flag).slice.store(slice_number_, std::memory_order_release);
      }
      std::atomic_thread_fence(std::memory_order_seq_cst);
      // Whoever waits for this payload waits on its writer, though another may have to pass it on.
      for (int64_t peer = 0; peer < world_; ++peer)
        if (peer != rank_ && (slot.writer == rank_ || peer == step.peer)) ring(peer);
      return CGX_OK;
    case CGX_STEP_RECEIVE: {
      if (linked_) {
        const int waited = link_to(step.peer)
                               ? wait_for(op, arrived_[static_cast<size_t>(step.slot)], 1, step.peer, until_ns)
                               : wait_for_mark(op, slot, until_ns);
        count(kWaitNs, now_ns() - begin_ns);
        return waited;
      }
      const Flag& theirs = flag(slot.writer, slot.flag);
      const int waited = wait_for(op, theirs.slice, slice_number_, slot.writer, until_ns);
      count(kWaitNs, now_ns() - begin_ns);
      // The payload of another call must not be read. The writer cannot be two slices ahead, so its mark is still
      // there.
      if (waited == CGX_OK && theirs.fingerprint[slice_number_ & 1].load(std::memory_order_relaxed) != op.fingerprint)
        return fail_mismatch(slot.writer, op.sequence);
      return waited;
    }
    case CGX_STEP_REDUCE: {
      const std::vector<const uint8_t*> payloads = input_data(op, step);
      const double scale = step.partial ? 1.0 : op.what.scale;
      rounding.stage = 1;
      if (at_home) {
        lose_nothing();
        status =
            cgx_sum(&means_, plan.dtype, pieces, step.n_pieces, op.what.values, payloads.data(), step.n_inputs, scale);
      } else {
        status = cgx_reduce(&means_, plan.dtype, pieces, step.n_pieces, op.what.values, payloads.data(), step.n_inputs,
                            scale, slot_data(op, step.slot), &rounding, op.what.residual);
      }
      timed(kReduceNs);
      break;
    }
    case CGX_STEP_SUM: {
      const std::vector<const uint8_t*> payloads = input_data(op, step);
      status = op.what.share ? cgx_sum(&means_, plan.dtype, pieces, step.n_pieces, op.what.share, payloads.data(),
                                       step.n_inputs, op.what.scale)
                             : CGX_ERROR_ARGUMENT;
      timed(kReduceNs);
      break;
    }
    default:
      if (at_home && slot_data(op, step.slot) == result_of(op) + slot.offset) return CGX_OK;
      status = cgx_decode(&means_, plan.dtype, pieces, step.n_pieces, slot_data(op, step.slot), result_of(op),
                          step.kind == CGX_STEP_ADD);
      timed(kDecodeNs);
      break;
  }
  if (status != CGX_OK) fail(status, name(rank_) + ": the kernels refused " + operation_name(op));
  return status;
}

// ---- the data segment ----

// Every rank of a node comes here with the same need, because their plans have the same places for payloads. The first
// one makes a larger segment; the others map it; once all have, its name is removed.
int Group::ensure_segment(Operation& op, int64_t until_ns) {
  const cgx_plan& plan = *op.what.plan;
  const int64_t slots_nbytes = plan.ring * plan.part_nbytes;
  if (!shares()) return ensure_private(slots_nbytes);
  const auto mark_nbytes = static_cast<int64_t>(sizeof(Mark));
  const int64_t marks_nbytes = linked_ ? aligned(plan.ring * plan.n_flags * mark_nbytes) : 0;
  const bool fits = marks_nbytes <= marks_nbytes_ && slots_nbytes <= data_.nbytes() - marks_nbytes_;
  if (fits && !created_generation_) return CGX_OK;
  return rank_ == home_[0] ? create_segment(op, marks_nbytes, slots_nbytes, until_ns)
                           : map_segment(op, marks_nbytes, slots_nbytes, until_ns);
}

int Group::create_segment(Operation& op, int64_t marks_nbytes, int64_t slots_nbytes, int64_t until_ns) {
  if (!created_generation_) {
    const int64_t needed = marks_nbytes + slots_nbytes;
    if (needed > segment_limit_nbytes_) {
      fail(CGX_ERROR_SHARED_MEMORY, "an operation needs more shared memory than the group may take");
      return CGX_ERROR_SHARED_MEMORY;
    }
    // Grow at least twofold, so that slowly rising sizes do not allocate each time.
    const int64_t nbytes = std::min(std::max(needed, 2 * data_.nbytes()), segment_limit_nbytes_) / 128 * 128;
    std::string segment_name;
    std::string error = Segment::create(std::max(nbytes, needed), &data_, &segment_name);
    if (!error.empty() && nbytes > needed) error = Segment::create(needed, &data_, &segment_name);
    if (!error.empty()) {
      fail(CGX_ERROR_SHARED_MEMORY, name(rank_) + ": " + error);
      return CGX_ERROR_SHARED_MEMORY;
    }
    std::memcpy(control_->data_name, segment_name.c_str(), segment_name.size() + 1);
    marks_nbytes_ = marks_nbytes;
    control_->marks_nbytes.store(marks_nbytes);
    control_->data_nbytes.store(data_.nbytes());
    control_->generation.store(++generation_, std::memory_order_release);
    created_generation_ = true;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ring_all(false);
  }
  for (const int64_t peer : home_) {
    if (peer == rank_) continue;
    const int status = wait_for(op, row(peer).mapped_generation, generation_, peer, until_ns);
    if (status == CGX_PENDING) return status;
    if (status != CGX_OK) {
      Segment::unlink(control_->data_name);
      return status;
    }
  }
  Segment::unlink(control_->data_name);
  created_generation_ = false;
  return CGX_OK;
}

int Group::map_segment(Operation& op, int64_t marks_nbytes, int64_t slots_nbytes, int64_t until_ns) {
  const int64_t creator = home_[0];
  const int status = wait_for(op, control_->generation, generation_ + 1, creator, until_ns);
  if (status != CGX_OK) return status;
  if (board_.differs(creator, op.sequence)) return fail_mismatch(creator, op.sequence);
  const std::string segment_name(control_->data_name, strnlen(control_->data_name, kNameNbytes));
  const int64_t nbytes = control_->data_nbytes.load(), marked_nbytes = control_->marks_nbytes.load();
  std::string error =
      marked_nbytes != marks_nbytes || nbytes < marks_nbytes + slots_nbytes || nbytes > segment_limit_nbytes_
          ? name(creator) + " made a shared segment of a size that this operation cannot use"
          : Segment::open(segment_name, nbytes, &data_);
  if (!error.empty()) {
    // A creator that fails or leaves removes the name: then that is what has happened.
    if (poison_arrived()) return status_.load();
    if (row(creator).life.load(std::memory_order_acquire) == kLeft) return fail_lost(creator, operation_name(op));
    fail(CGX_ERROR_SHARED_MEMORY, name(rank_) + ": " + error);
    return CGX_ERROR_SHARED_MEMORY;
  }
  marks_nbytes_ = marks_nbytes;
  row(rank_).mapped_generation.store(++generation_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring(creator);
  return CGX_OK;
}

// ---- the rest ----

cgx_stats Group::stats() const {
  const auto value = [this](Counter counter) { return counters_[counter].load(std::memory_order_relaxed); };
  return {value(kOperations), value(kCompressed), value(kBefore),   value(kAfter),   value(kSent),
          value(kEncodeNs),   value(kWaitNs),     value(kReduceNs), value(kDecodeNs)};
}

void Group::reset_stats() {
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
}

void Group::close() {
  if (closed_.exchange(true)) return;
  if (getpid() != owner_pid_) {  // a forked child has neither the thread nor a place among the ranks
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    stopping_ = true;
    wake_thread();
    work_done_.notify_all();
  }
  row(rank_).bell.fetch_add(1);
  futex_wake(&row(rank_).bell);
  if (linked_) ring_holder();
  if (thread_.joinable()) thread_.join();
  // Whoever waited may have been running an operation: tensors may go only when nobody does any more.
  std::lock_guard<std::mutex> role(role_);
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    for (const Operation& each : queue_) keep(record_of(each, CGX_RECORD_FAILED));
    queue_.clear();
  }
  row(rank_).life.store(kLeft, std::memory_order_release);
  if (linked_) leave_links();
  if (created_generation_) Segment::unlink(control_->data_name);
  ring_all(true);
}

}  // namespace cgx
