#include "mpi.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/waiting.h"

namespace cgx {
namespace {

constexpr size_t kPartNbytes = size_t{1} << 30;  // counts of MPI are 32 bits wide
constexpr size_t kMostUnderWay = 64;             // frames
constexpr int kBurst = 8;                        // MPICH does one small thing a call
constexpr int64_t kOftenNs = 1000000, kSeldomNs = 50000000;

// Handles are pointers (Open MPI) or ints (MPICH): either is passed in a register of 64 bits. No status is asked for,
// but the place that MPI writes one to has room for any.
using SendFunction = int (*)(const void*, int, uint64_t, int, int, uint64_t, MpiRequest*);
using ReceiveFunction = int (*)(void*, int, uint64_t, int, int, uint64_t, MpiRequest*);
using TestFunction = int (*)(MpiRequest*, int*, void*);
using CancelFunction = int (*)(MpiRequest*);
using FinalizedFunction = int (*)(int*);

struct alignas(16) AnyStatus {
  uint8_t bytes[256];
};

template <class Function>
Function function_at(void* address) {
  return reinterpret_cast<Function>(address);
}

}  // namespace

bool Mpi::send(const void* data, size_t nbytes, int peer, int tag, bool synchronous, MpiRequest* request) const {
  *request = 0;
  const auto send = function_at<SendFunction>(synchronous ? library_.issend : library_.isend);
  return send(data, static_cast<int>(nbytes), library_.byte, peer, tag, library_.communicator, request) == 0;
}

bool Mpi::receive(void* data, size_t nbytes, int peer, int tag, MpiRequest* request) const {
  *request = 0;
  return function_at<ReceiveFunction>(library_.irecv)(data, static_cast<int>(nbytes), library_.byte, peer, tag,
                                                      library_.communicator, request) == 0;
}

bool Mpi::test(MpiRequest* request) const {
  if (*request == 0) return true;
  int done = 0;
  AnyStatus status;
  const int error = function_at<TestFunction>(library_.test)(request, &done, &status);
  if (error != 0 || done) *request = 0;
  return error == 0;
}

void Mpi::cancel(MpiRequest* request) const {
  if (*request) function_at<CancelFunction>(library_.cancel)(request);
}

bool Mpi::is_finalized() const {
  int finalized = 0;
  return function_at<FinalizedFunction>(library_.finalized)(&finalized) != 0 || finalized;
}

MpiStream::MpiStream(int64_t peer, uint8_t number, const Mpi& mpi, int tag)
    : Stream(peer, number), mpi_(mpi), tag_(tag), heads_(1) {
  if (!mpi_.receive(head_, sizeof head_, static_cast<int>(peer_), tag_, &heads_[0])) end(EIO);
}

void MpiStream::fail(Receiver& receiver) {
  if (ended_) return;
  end(EIO);
  receiver.carrier_failed(peer_);
}

bool MpiStream::are_done(std::vector<MpiRequest>& requests, Receiver& receiver) {
  while (!requests.empty()) {
    if (!mpi_.test(&requests.back())) {
      fail(receiver);
      return false;
    }
    if (requests.back()) return false;
    requests.pop_back();
  }
  return true;
}

bool MpiStream::start(const Outgoing& out, Receiver& receiver) {
  std::vector<MpiRequest> requests(1);
  // A payload meets its receive only after its head has, so that one of the two has to wait for it.
  const bool alone = out.data_nbytes == 0;
  bool started = mpi_.send(out.head, sizeof out.head, static_cast<int>(peer_), tag_, alone, &requests[0]);
  for (size_t at = 0; started && at < out.data_nbytes; at += kPartNbytes) {
    const size_t nbytes = std::min(kPartNbytes, out.data_nbytes - at);
    requests.push_back(0);
    started = mpi_.send(out.data + at, nbytes, static_cast<int>(peer_), tag_ + 1, true, &requests.back());
  }
  leaving_.push_back(std::move(requests));
  if (!started) fail(receiver);
  return started;
}

void MpiStream::send(Receiver& receiver) {
  // After an error MPI may still read what is queued. Nothing leaves the queue any more, and the peer is given up.
  while (!ended_) {
    while (leaving_.size() < std::min(out_.size(), kMostUnderWay))
      if (!start(out_[leaving_.size()], receiver)) return;
    if (leaving_.empty() || !are_done(leaving_.front(), receiver)) return;
    leaving_.pop_front();
    const int64_t slice = out_.front().slice;
    out_.pop_front();
    receiver.frame_left(slice);
  }
}

void MpiStream::receive(Receiver& receiver) {
  while (!ended_ && (has_payload_ ? take_payload(receiver) : hear(receiver))) {
  }
}

bool MpiStream::hear(Receiver& receiver) {
  if (!are_done(heads_, receiver)) return false;
  uint8_t head[kHeadNbytes];
  std::memcpy(head, head_, sizeof head);
  heads_.push_back(0);
  if (!mpi_.receive(head_, sizeof head_, static_cast<int>(peer_), tag_, &heads_[0])) {
    fail(receiver);
    return false;
  }
  const uint8_t* at = head;
  std::memcpy(&header_, at, sizeof header_);
  if (!is_whole(receiver)) return false;
  if (header_.kind == FrameKind::kCall) {
    std::memcpy(&call_, at + sizeof header_, sizeof call_);
    at += sizeof header_ + sizeof call_;
    const uint64_t sequence = header_.sequence;
    FrameHeader next;
    std::memcpy(&next, at, sizeof next);
    const FrameHeader none = {};
    const bool alone = std::memcmp(&next, &none, sizeof next) == 0;
    if (!alone) {
      header_ = next;
      if (!is_whole(receiver)) return false;
    }
    has_payload_ = !alone;
    receiver.call_arrived(peer_, sequence, call_);
    return true;
  }
  has_payload_ = true;
  return true;
}

bool MpiStream::take_payload(Receiver& receiver) {
  if (!body_) {
    if (!find_place(receiver)) return false;
    for (size_t at = 0; at < body_nbytes_; at += kPartNbytes) {
      const size_t nbytes = std::min(kPartNbytes, body_nbytes_ - at);
      arriving_.push_back(0);
      if (!mpi_.receive(body_ + at, nbytes, static_cast<int>(peer_), tag_ + 1, &arriving_.back())) {
        fail(receiver);
        return false;
      }
    }
  }
  if (!are_done(arriving_, receiver)) return false;
  body_ = nullptr;
  has_payload_ = false;
  receiver.payload_arrived(peer_, header_);
  return true;
}

bool MpiStream::close(int64_t until_ns) {
  if (mpi_.is_finalized()) return true;
  for (std::vector<MpiRequest>* requests : {&heads_, &arriving_})
    for (MpiRequest& request : *requests) mpi_.cancel(&request);
  std::vector<std::vector<MpiRequest>*> all = {&heads_, &arriving_};
  for (std::vector<MpiRequest>& requests : leaving_) all.push_back(&requests);
  for (;;) {
    bool done = true;
    for (std::vector<MpiRequest>* requests : all)
      for (MpiRequest& request : *requests) {
        mpi_.test(&request);  // one that fails is over
        done = done && request == 0;
      }
    if (done || now_ns() > until_ns) return done;
    sched_yield();
  }
}

// ---- progress ----

namespace {

struct Progress {
  Progress(const Mpi& mpi, int rank, int tag) : mpi(mpi), rank(rank), tag(tag), pid(getpid()) {
    thread = std::thread([this] { run(); });
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
      // Whoever waits for a late rank waits hardly longer for the word of it.
      const int64_t idle_ns = now_ns() - seen_ns.load(std::memory_order_relaxed);
      const int64_t pause_ns = idle_ns < kSeldomNs ? kOftenNs : std::min(idle_ns / 10, kSeldomNs);
      wake.wait_for(lock, std::chrono::nanoseconds(pause_ns));
      for (int i = 0; i < kBurst && !stopping && !mpi.is_finalized(); ++i) {
        if (never == 0) mpi.receive(&nothing, sizeof nothing, rank, tag, &never);
        mpi.test(&never);
      }
    }
    if (mpi.is_finalized()) return;
    mpi.cancel(&never);
    for (int i = 0; i < 1000 && never; ++i) mpi.test(&never);
  }

  const Mpi mpi;
  const int rank, tag;
  const pid_t pid;
  uint8_t nothing = 0;
  MpiRequest never = 0;  // a message from this rank to itself, which nobody sends
  std::atomic<int64_t> seen_ns{0};
  bool stopping = false;
  std::mutex mutex;
  std::condition_variable wake;
  std::thread thread;
};

std::mutex progress_mutex;
std::atomic<Progress*> progress{nullptr};  // never freed: somebody may just call seen()

}  // namespace

void MpiProgress::start(const Mpi& mpi, int rank, int tag) {
  std::lock_guard<std::mutex> lock(progress_mutex);
  if (!progress.load() || progress.load()->pid != getpid()) progress = new Progress(mpi, rank, tag);
}

void MpiProgress::seen() {
  Progress* found = progress.load(std::memory_order_acquire);
  if (!found) return;
  const int64_t now = now_ns();
  if (now - found->seen_ns.exchange(now, std::memory_order_relaxed) > kSeldomNs) found->wake.notify_one();
}

void MpiProgress::stop() {
  std::lock_guard<std::mutex> lock(progress_mutex);
  Progress* found = progress.exchange(nullptr);
  if (!found || found->pid != getpid()) return;
  {
    std::lock_guard<std::mutex> ending(found->mutex);
    found->stopping = true;
  }
  found->wake.notify_all();
  found->thread.join();
}

}  // namespace cgx
