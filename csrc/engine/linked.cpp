// Groups of several nodes, whose ranks are linked by connections: who moves bytes, when, and what is heard meanwhile.
//
// A payload for a rank of this node stays where it was encoded or received, in the memory that the node shares; a mark
// says that it is there. So a rank hands on what it got from elsewhere without a copy.
//
// The holder of the role sends and reads payloads, between steps and while it waits; nobody does while no operation
// runs, since then nobody owes a payload. The group's thread alone reads control connections, at all times: poison,
// good byes and questions are heard while the user computes for minutes.
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "group.h"
#include "waiting.h"

namespace cgx {
namespace {

constexpr int64_t kNapNs = 20000000;        // between two looks at whether something is wrong
constexpr int64_t kDrainNs = 1000000000;    // for the data of a peer whose control connection has ended to come
constexpr int64_t kPingNs = 1000000000;     // between two questions to a peer that is waited for
constexpr int64_t kPatienceNs = 500000000;  // for an answer
constexpr int64_t kCloseNs = 200000000;     // for messages of MPI to end when the group is closed
constexpr size_t kPoisonTextNbytes = 1500;
// Over MPI nothing wakes a rank that waits, and bytes move only while it looks.
constexpr int64_t kShortNapNs = 20000, kLongestShortNapNs = 50000;
constexpr int kLooks = 4;  // between two naps: MPI does little in one call

}  // namespace

// A new link, or one that gets another stream; NULL: to a rank that needs none.
Link* Group::open_link(int64_t peer) {
  if (!linked_ || peer < 0 || peer >= world_ || std::count(home_.begin(), home_.end(), peer)) return nullptr;
  std::unique_ptr<Link>& link = links_[static_cast<size_t>(peer)];
  if (!link) link = std::make_unique<Link>(peer);
  return link.get();
}

int Group::link_by_mpi(int64_t peer, cgx_mpi* library, int tag) {
  Link* link = open_link(peer);
  if (!link || link->control() >= 0) return CGX_ERROR_ARGUMENT;
  const Mpi mpi(*library);
  link->add_stream(mpi, tag);
  if (link->streams().back()->has_ended()) return CGX_ERROR_CONNECTION;
  if (!mpi_) MpiProgress::start(mpi, static_cast<int>(rank_), tag);
  mpi_ = library;
  return CGX_OK;
}

int Group::link(int64_t peer, int64_t stream, int file) {
  Link* link = open_link(peer);
  if (!link || file < 0) return CGX_ERROR_ARGUMENT;
  if (stream >= 0) {
    link->add_stream(file);
    return CGX_OK;
  }
  if (link->streams().empty()) return CGX_ERROR_ARGUMENT;
  link->set_control(file);
  row(peer).life.store(kPresent, std::memory_order_release);
  std::lock_guard<std::mutex> lock(queue_mutex_);
  linked_peers_.push_back(peer);  // from now on the thread listens to it
  eventfd_write(thread_bell_, 1);
  return CGX_OK;
}

int Group::set_bell(int64_t peer, int file) {
  if (!linked_ || file < 0 || !std::count(home_.begin(), home_.end(), peer)) return CGX_ERROR_ARGUMENT;
  int& bell = peer == rank_ ? bell_ : bells_[static_cast<size_t>(peer)];
  if (bell >= 0) return CGX_ERROR_ARGUMENT;
  close_in_children(file);
  bell = file;
  return CGX_OK;
}

// ---- one operation ----

void Group::begin_linked(Operation& op) {
  const size_t slots = op.what.plan ? op.what.plan->slots.size() : 0;
  if (arrived_.size() < slots) arrived_ = std::vector<std::atomic<uint64_t>>(slots);
  for (size_t i = 0; i < slots; ++i) arrived_[i].store(0, std::memory_order_relaxed);
  freed_.store(0, std::memory_order_relaxed);
  left_.store(0, std::memory_order_relaxed);
  queued_ = 0;
  mapped_ = false;
  progress_.clear();
  placed_.assign(slots, false);
  if (!op.what.plan) return;
  // A rank that first waits for its own node tells others at once what it has called, so that nobody takes it for late.
  // Otherwise the first payload carries the call. Peers that get no payload from this rank are told here: they wait for
  // it in hear_calls.
  for (const int64_t peer : shares() ? op.what.plan->peers : op.what.plan->sources)
    if (Link* link = link_to(peer)) tell_call(op, *link);
}

void Group::tell_call(const Operation& op, Link& link) {
  Stream& stream = link.stream(0);
  const auto sequence = static_cast<uint64_t>(op.sequence);
  if (stream.has_ended() || !link.tell(0, sequence)) return;
  ++queued_;
  stream.queue(sequence, op.fingerprint, &op.call, 0, -1, nullptr, 0);
}

// All peers have made this call once each has told of it.
int Group::agree(Operation& op, int64_t until_ns) {
  if (op.step == 0) {
    op.step = 1;
    for (const auto& link : links_)
      if (link) tell_call(op, *link);
    row(rank_).agreed.store(static_cast<uint64_t>(op.sequence), std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ring_all(false);
    pump();
  }
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    const std::atomic<uint64_t>& called = link_to(peer) ? link_to(peer)->called : row(peer).agreed;
    const int status = wait_for(op, called, static_cast<uint64_t>(op.sequence), peer, until_ns);
    if (status != CGX_OK) return status;
    if (board_.differs(peer, op.sequence, op.call)) return fail_mismatch(peer, op.sequence);
  }
  const int status = check(op.sequence);
  return status == CGX_OK ? flush(op, until_ns) : status;
}

// A root is not done before its peers have made the call. Until then it may not leave, and reads what they send.
// Over MPI what is told must be taken: who tells its call before it has payloads (begin_linked) would wait for that.
int Group::hear_calls(Operation& op, int64_t until_ns) {
  const cgx_plan& plan = *op.what.plan;
  for (const int64_t peer : plan.peers) {
    Link* link = link_to(peer);
    if (!link) continue;
    const bool told_early = link->is_by_mpi() && shares_memory_[static_cast<size_t>(peer)];
    if (!told_early && !std::count(plan.sinks.begin(), plan.sinks.end(), peer)) continue;
    const int status = wait_for(op, link->called, static_cast<uint64_t>(op.sequence), peer, until_ns);
    if (status != CGX_OK) return status;
    if (board_.differs(peer, op.sequence, op.call)) return fail_mismatch(peer, op.sequence);
  }
  return CGX_OK;
}

int Group::flush(Operation& op, int64_t until_ns) { return wait_for(op, left_, queued_, peer_with_queue(), until_ns); }

int Group::ensure_private(int64_t needed) {
  needed = std::max<int64_t>(needed, 1);  // an empty payload has a place, too
  if (needed <= data_.nbytes()) return CGX_OK;
  std::string problem;
  if (needed > segment_limit_nbytes_)
    problem = "an operation needs more memory than the group may take";
  else
    problem = Segment::make_private(std::min(std::max(needed, 2 * data_.nbytes()), segment_limit_nbytes_), &data_);
  if (problem.empty()) return CGX_OK;
  fail(CGX_ERROR_SHARED_MEMORY, name(rank_) + ": " + problem);
  return status_.load();
}

void Group::send_payload(Operation& op, const cgx_step& step, const cgx_slot& slot) {
  Link& link = *links_[static_cast<size_t>(step.peer)];
  Stream& stream = link.stream(slot.slice);
  const auto sequence = static_cast<uint64_t>(op.sequence);
  const cgx_call* call = link.tell(slot.slice, sequence) ? &op.call : nullptr;
  if (!stream.has_ended()) {
    ++queued_;
    ++progress_[static_cast<size_t>(slot.slice)].unsent;
    stream.queue(sequence, op.fingerprint, call, op.what.plan->messages[op.step], slot.slice, slot_data(op, step.slot),
                 static_cast<uint64_t>(slot.nbytes));
  }
  stream.send(*this);
}

void Group::free_slices() {
  const uint64_t before = freed_.load(std::memory_order_relaxed);
  uint64_t freed = before;
  const auto begun = static_cast<uint64_t>(current_->begun);
  while (freed < begun && progress_[freed].steps_left == 0 && progress_[freed].unsent == 0) ++freed;
  freed_.store(freed, std::memory_order_release);
  if (freed == before || !shares()) return;
  row(rank_).done.store(base_ + freed, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all(false);
}

// Whether the part of the memory that a slice uses has been left by the slice before it, here and by ranks of this
// node.
bool Group::has_room(int64_t slice) const {
  const auto earlier = static_cast<uint64_t>(std::max<int64_t>(0, slice - current_->what.plan->ring + 1));
  if (!mapped_ || freed_.load(std::memory_order_relaxed) < earlier) return false;
  return std::all_of(home_.begin(), home_.end(), [&](int64_t peer) {
    return peer == rank_ || row(peer).done.load(std::memory_order_acquire) >= base_ + earlier;
  });
}

int64_t Group::peer_with_queue() const {
  for (int64_t peer = 0; peer < world_; ++peer)
    if (link_to(peer) && link_to(peer)->has_queued()) return peer;
  return rank_;
}

// ---- payloads for ranks of this node ----

Mark& Group::mark(const Operation& op, const cgx_slot& slot) const {
  const cgx_plan& plan = *op.what.plan;
  return reinterpret_cast<Mark*>(data_.data())[slot.slice % plan.ring * plan.n_flags + slot.flag];
}

void Group::set_mark(const Operation& op, const cgx_slot& slot) {
  Mark& here = mark(op, slot);
  here.fingerprint.store(op.fingerprint, std::memory_order_relaxed);
  here.slice.store(base_ + static_cast<uint64_t>(slot.slice) + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

int Group::wait_for_mark(Operation& op, const cgx_slot& slot, int64_t until_ns) {
  const Mark& there = mark(op, slot);
  const uint64_t number = base_ + static_cast<uint64_t>(slot.slice) + 1;
  const int status = wait_for(op, there.slice, number, slot.writer, until_ns);
  if (status == CGX_OK && there.fingerprint.load(std::memory_order_relaxed) != op.fingerprint)
    return fail_mismatch(slot.writer, op.sequence);
  return status;
}

// ---- what streams ask ----

Receiver::Answer Group::place(int64_t peer, const FrameHeader& header, uint8_t** destination) {
  if (!current_) return Answer::kLater;
  const Operation& op = *current_;
  const auto sequence = static_cast<uint64_t>(op.sequence);
  if (header.sequence > sequence) return Answer::kLater;
  const cgx_plan* plan = op.what.plan;
  if (header.sequence < sequence || header.fingerprint != op.fingerprint || !plan) {
    fail_mismatch(peer, op.sequence);
    return Answer::kRefuse;
  }
  const std::vector<int64_t>& expected = plan->incoming[static_cast<size_t>(peer)];
  const size_t slot = header.message < expected.size() ? static_cast<size_t>(expected[header.message]) : SIZE_MAX;
  if (slot == SIZE_MAX || placed_[slot] || header.nbytes != static_cast<uint64_t>(plan->slots[slot].nbytes)) {
    fail(CGX_ERROR_MISMATCH, name(peer) + " sent " + name(rank_) + " a payload that " + operation_name(op) +
                                 " does not have. All ranks need the same version of torch_cgx. Restart all ranks.");
    return Answer::kRefuse;
  }
  if (!has_room(plan->slots[slot].slice)) return Answer::kLater;
  placed_[slot] = true;
  *destination = slot_data(op, static_cast<int64_t>(slot));
  return Answer::kTake;
}

void Group::payload_arrived(int64_t peer, const FrameHeader& header) {
  if (!current_) return;  // the group has failed since it was placed
  const int64_t slot = current_->what.plan->incoming[static_cast<size_t>(peer)][header.message];
  arrived_[static_cast<size_t>(slot)].store(1, std::memory_order_release);
}

void Group::frame_left(int64_t slice) {
  left_.fetch_add(1, std::memory_order_relaxed);
  if (slice >= 0 && --progress_[static_cast<size_t>(slice)].unsent == 0) free_slices();
}

void Group::call_arrived(int64_t peer, uint64_t sequence, const cgx_call& call) {
  Link& link = *links_[static_cast<size_t>(peer)];
  if (sequence <= link.called.load(std::memory_order_relaxed)) return;  // by another stream
  board_.note_for(peer, static_cast<int64_t>(sequence), call);
  link.called.store(sequence, std::memory_order_release);
  // Earlier calls, too: who needed nothing of this peer in its broadcast was done before the call arrived.
  const auto number = static_cast<int64_t>(sequence);
  if (current_ && number <= current_->sequence && board_.differs(peer, number)) fail_mismatch(peer, number);
}

void Group::noise_arrived(int64_t peer) {
  fail(CGX_ERROR_CONNECTION,
       name(rank_) + " got bytes from " + name(peer) +
           " that are no message of torch_cgx. All ranks need the same version. Restart all ranks.");
}

void Group::carrier_failed(int64_t peer) {
  fail(CGX_ERROR_CONNECTION, name(rank_) + ": MPI reports an error in a message to or from " + name(peer) +
                                 ". Look at what MPI wrote, then restart all ranks.");
}

// ---- waiting ----

void Group::pump() {
  uint64_t freed;
  do {
    freed = freed_.load(std::memory_order_relaxed);
    for (const auto& link : links_) {
      if (!link) continue;
      for (const auto& stream : link->streams()) {
        if (stream->has_queued()) stream->send(*this);
        if (!stream->has_ended()) stream->receive(*this);
      }
    }
    // What has left made room, perhaps for a payload that waits in a stream before it. Nobody would wake us for that.
  } while (freed_.load(std::memory_order_relaxed) != freed);
}

int Group::wait_on_links(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer,
                         int64_t begin_ns, int64_t until_ns) {
  // A caller has nothing else to do. The group's thread works beside one that computes, and must not take its core.
  const int64_t spin_until_ns = thread_holds_ ? begin_ns : begin_ns + spin_ns_;
  bool told = false;
  int64_t nap_ns = mpi_ ? kShortNapNs : kNapNs;
  for (;;) {
    for (int looks = mpi_ ? kLooks : 1; looks > 0 && word.load(std::memory_order_acquire) < value; --looks) pump();
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
    if (status_.load() != CGX_OK) return status_.load();
    const int64_t now = now_ns();
    if (now < std::min(spin_until_ns, until_ns)) {
      sched_yield();  // to a peer, where there are more ranks than cores
      continue;
    }
    if (!told) {
      std::lock_guard<std::mutex> lock(records_mutex_);
      running_ = record_of(op, CGX_RECORD_RUNNING);
      told = true;
    }
    const int trouble = look_for_link_trouble(op, word, value, peer);
    if (trouble != CGX_OK) return trouble;
    if (closed_.load()) return CGX_ERROR_CLOSED;
    if (now >= until_ns) return CGX_PENDING;
    const int64_t rest_ns = std::min(nap_ns, until_ns - now);
    if (mpi_) nap_ns = std::min(2 * nap_ns, kLongestShortNapNs);
    if (!shares()) {
      sleep_on_links(rest_ns);
      continue;
    }
    // What a rank of this node stores after this is followed by a byte, and what it stored before is seen here.
    row(rank_).waits_on.store(static_cast<uint32_t>(peer) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    pump();
    if (word.load(std::memory_order_acquire) < value) sleep_on_links(rest_ns);
    row(rank_).waits_on.store(0, std::memory_order_relaxed);
  }
}

void Group::sleep_on_links(int64_t nap_ns) {
  pollfds_.clear();
  pollfds_.push_back({holder_bell_, POLLIN, 0});
  pollfds_.push_back({bell_, POLLIN, 0});  // -1: not looked at
  for (const auto& link : links_) {
    if (!link) continue;
    for (const auto& stream : link->streams()) {
      const bool reads = !stream->has_ended() && !stream->is_held();
      const int events = (reads ? POLLIN : 0) | (stream->has_queued() ? POLLOUT : 0);
      if (events && stream->file() >= 0) pollfds_.push_back({stream->file(), static_cast<short>(events), 0});
    }
  }
  const size_t controls = pollfds_.size();
  if (thread_holds_)
    for (const int64_t peer : thread_peers_)
      pollfds_.push_back({links_[static_cast<size_t>(peer)]->control(), POLLIN, 0});  // -1: not looked at
  timespec nap = {nap_ns / 1000000000, nap_ns % 1000000000};
  if (ppoll(pollfds_.data(), pollfds_.size(), &nap, nullptr) <= 0) return;
  eventfd_t rings;
  if (pollfds_[0].revents) eventfd_read(holder_bell_, &rings);
  char bytes[64];
  while (pollfds_[1].revents && read(bell_, bytes, sizeof bytes) == sizeof bytes) {
  }
  for (size_t i = controls; i < pollfds_.size(); ++i)
    if (pollfds_[i].revents) links_[static_cast<size_t>(thread_peers_[i - controls])]->listen(*this);
}

// Whether nothing can come from a peer any more that this operation needs. `slice`: of the payload that is waited for;
// -1: of none. `waiting_since_ns`: how long this rank has looked for it.
bool Group::is_lost(int64_t peer, int64_t sequence, int64_t slice, int64_t waiting_since_ns) const {
  Link& link = *links_[static_cast<size_t>(peer)];
  const auto number = static_cast<uint64_t>(sequence);
  if (link.has_left() && link.last_sequence() < number) return true;
  // Data connections end together with the control connection, in any order. One that stays behind was cut.
  if (!link.is_down() && !link.has_left()) return link.cut_ns() != 0 && now_ns() - link.cut_ns() > kDrainNs;
  // What it sent before it ended is still to be read, unless its host does not answer any more. One that has left after
  // its part has sent all of it, however long that waits here behind other payloads.
  if (link.down_error() == ETIMEDOUT || link.down_error() == EPROTO) return true;
  if (slice < 0 ? link.is_past(number) : link.stream(slice).is_past(number)) return true;
  // Nothing ends over MPI. Who has left in the middle sends no more, and what it did send gets a moment to come.
  if (link.is_by_mpi() && link.has_left() && link.finished_sequence() < number)
    return now_ns() - waiting_since_ns > kDrainNs;
  return !link.has_left() && now_ns() - link.down_ns() > kDrainNs;
}

int Group::look_for_link_trouble(Operation& op, const std::atomic<uint64_t>& word, uint64_t value, int64_t peer) {
  if (poison_arrived()) return status_.load();
  for (int64_t other = 0; other < world_; ++other)
    if (other != rank_ && board_.differs(other, op.sequence, op.call)) return fail_mismatch(other, op.sequence);
  // Who is waited for to read may have done so and left, and now it is another.
  if (&word == &left_ || &word == &freed_) peer = peer_with_queue();
  for (const int64_t other : home_) {
    // A dead rank that has not even called takes part in nothing any more, whoever is waited for first.
    if (other != rank_ && row(other).noted.load(std::memory_order_acquire) < op.sequence && is_gone(other))
      return fail_lost(other, operation_name(op));
  }
  if (peer == rank_) return look_at_clock(op, peer);
  if (!link_to(peer)) {
    if (row(peer).life.load(std::memory_order_acquire) != kLeft && !is_gone(peer)) return look_at_clock(op, peer);
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;  // it did its part before it left
    return poison_arrived() ? status_.load() : fail_lost(peer, operation_name(op));
  }
  const cgx_plan* plan = op.what.plan;
  const cgx_step* step = plan && op.step < plan->steps.size() ? &plan->steps[op.step] : nullptr;
  const bool receives = step && step->kind == CGX_STEP_RECEIVE && &word == &arrived_[static_cast<size_t>(step->slot)];
  if (is_lost(peer, op.sequence, receives ? plan->slice_of(*step) : -1, op.waiting_since_ns)) {
    pump();
    if (word.load(std::memory_order_acquire) >= value) return CGX_OK;
    return poison_arrived() ? status_.load() : fail_lost(peer, operation_name(op));
  }
  const int64_t now = now_ns();
  if (now - op.waiting_since_ns > kPingNs && now - op.pinged_ns > kPingNs) {
    op.pinged_ns = now;
    links_[static_cast<size_t>(peer)]->send_control(FrameKind::kPing, latest_sequence(), "", 0);
  }
  return look_at_clock(op, peer);
}

std::string Group::link_state(int64_t peer) const {
  if (peer == rank_) return "is this rank itself";
  if (!link_to(peer)) return "";
  const Link& link = *link_to(peer);
  if (link.is_down()) {
    const int error = link.down_error();
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
      return std::string("cannot be reached: its host is down or cut off (") + std::strerror(error) + ")";
    if (error == EPROTO) return "sent bytes that are no message of torch_cgx";
    return "closed its connections: its process is gone (killed, crashed or out of memory)";
  }
  if (link.cut_ns() != 0) return "has a data connection that was closed, though not the others: is there a firewall?";
  if (link.asked_ns() == 0) return "";
  if (link.answered_ns() >= link.asked_ns()) return "answers, so its process lives";
  return now_ns() - link.asked_ns() < kPatienceNs ? ""
                                                  : "does not answer: its process is stopped, or its host is cut off";
}

// ---- the group's thread ----

void Group::work_linked() {
  std::vector<pollfd> files;
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(queue_mutex_);
      thread_peers_ = linked_peers_;
    }
    files.assign(1, {thread_bell_, POLLIN, 0});
    for (const int64_t peer : thread_peers_)
      files.push_back({links_[static_cast<size_t>(peer)]->control(), POLLIN, 0});  // -1: not looked at
    if (poll(files.data(), files.size(), -1) < 0 && errno != EINTR) return;
    eventfd_t rings;
    if (files[0].revents) eventfd_read(thread_bell_, &rings);
    bool heard = false;
    for (size_t i = 1; i < files.size(); ++i)
      if (files[i].revents) {
        links_[static_cast<size_t>(thread_peers_[i - 1])]->listen(*this);
        heard = true;
      }
    if (heard) ring_holder();
    bool wanted;
    {
      std::lock_guard<std::mutex> lock(queue_mutex_);
      if (stopping_) return;
      thread_peers_ = linked_peers_;  // those that were linked since, which an operation listens to as well
      wanted = thread_wanted_;
      thread_wanted_ = false;
    }
    // A caller that holds the role now wakes this thread when it leaves something behind.
    if (!wanted || !role_.try_lock()) continue;
    thread_holds_ = true;
    run_queue(INT64_MAX, INT64_MAX);
    thread_holds_ = false;
    role_.unlock();
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (!queue_.empty() && !stopping_) wake_thread();
  }
}

void Group::ring_holder() { eventfd_write(holder_bell_, 1); }

void Group::poison_arrived_from(int64_t peer, int status, const std::string& text) {
  write_poison(peer, status, text);  // a rank of this node may have heard of it before
  poison_arrived();
  std::lock_guard<std::mutex> lock(queue_mutex_);
  work_done_.notify_all();
}

void Group::peer_left(int64_t peer, uint64_t last_sequence) {
  const auto last = static_cast<int64_t>(std::min<uint64_t>(last_sequence, INT64_MAX));
  if (row(peer).noted.load(std::memory_order_acquire) < last) row(peer).noted.store(last);
  row(peer).life.store(kLeft, std::memory_order_release);
}

uint64_t Group::latest_sequence() const { return static_cast<uint64_t>(row(rank_).noted.load()); }

void Group::poison_links(int status, const std::string& text) {
  uint8_t body[sizeof(int32_t) + kPoisonTextNbytes];
  const int32_t code = status;
  const size_t length = std::min(text.size(), kPoisonTextNbytes);
  std::memcpy(body, &code, sizeof code);
  std::memcpy(body + sizeof code, text.data(), length);
  for (const auto& link : links_)
    if (link) link->send_control(FrameKind::kPoison, latest_sequence(), body, sizeof code + length);
}

// With the role held, and without the group's thread.
void Group::leave_links() {
  for (const auto& link : links_)
    if (link) link->send_control(FrameKind::kLeave, latest_sequence(), &finished_sequence_, sizeof finished_sequence_);
  const int64_t until_ns = now_ns() + kCloseNs;
  for (const auto& link : links_) {
    if (!link || link->close(until_ns)) continue;
    data_.leak();  // MPI may still use it
    mpi_->stranded = 1;
  }
}

}  // namespace cgx
