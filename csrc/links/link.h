// Everything between this rank and one peer: data connections, and a control connection that is always listened to.
//
// The control connection has its own thread of life: frames on it never queue behind payloads that nobody reads, and it
// alone tells whether the peer is there. The group's thread reads it, any thread may write to it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mpi.h"
#include "stream.h"

namespace cgx {

// What a control connection brings.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  virtual void poison_arrived_from(int64_t peer, int status, const std::string& text) = 0;
  virtual void peer_left(int64_t peer, uint64_t last_sequence) = 0;
  virtual uint64_t latest_sequence() const = 0;  // for the answer to a PING
};

class Link {
 public:
  explicit Link(int64_t peer);
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void add_stream(int file);
  void add_stream(const Mpi& mpi, int tag);
  void set_control(int file);
  // False: payloads may still be read or written after this.
  bool close(int64_t until_ns = 0);

  // ---- by the holder of the role ----
  Stream& stream(int64_t slice) { return *streams_[static_cast<size_t>(slice) % streams_.size()]; }
  const std::vector<std::unique_ptr<Stream>>& streams() const { return streams_; }
  bool has_queued() const;
  bool is_by_mpi() const { return streams_[0]->file() < 0; }
  bool is_past(uint64_t sequence) const;  // no data of that operation can come any more
  int64_t cut_ns() const;                 // when the first of the data connections ended; 0: none has
  // Whether the stream of this slice has not yet been given the call of that operation.
  bool tell(int64_t slice, uint64_t sequence);

  // ---- by any thread ----
  void send_control(FrameKind kind, uint64_t sequence, const void* body, size_t nbytes);
  bool is_down() const { return down_ns_.load(std::memory_order_acquire) != 0; }
  int64_t down_ns() const { return down_ns_.load(std::memory_order_acquire); }
  int down_error() const { return down_error_.load(std::memory_order_relaxed); }
  // When the first PING after the latest answer was sent; 0: none ever was.
  int64_t asked_ns() const { return asked_ns_.load(std::memory_order_relaxed); }
  int64_t answered_ns() const { return answered_ns_.load(std::memory_order_relaxed); }
  // Of a peer that has left: its latest call, and the latest operation that it finished.
  uint64_t last_sequence() const { return last_sequence_.load(std::memory_order_acquire); }
  uint64_t finished_sequence() const { return finished_sequence_.load(std::memory_order_acquire); }
  bool has_left() const { return left_.load(std::memory_order_acquire); }

  // ---- by the group's thread ----
  int control() const { return is_down() ? -1 : control_; }
  void listen(ControlListener& listener);  // reads all that is there

  std::atomic<uint64_t> called{0};  // sequence of the latest call that is known of the peer

 private:
  void keep_error(int error);  // the first one
  void go_down(int error);
  bool take_control_frame(ControlListener& listener);

  const int64_t peer_;
  const int owner_pid_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<uint64_t> told_;  // by stream: the last operation whose call was sent
  int control_ = -1;
  std::mutex control_mutex_;    // of writers
  bool mute_ = false;           // nothing more can be said; with control_mutex_ held
  std::vector<uint8_t> inbox_;  // bytes of control frames that are not whole
  std::atomic<int64_t> down_ns_{0}, asked_ns_{0}, answered_ns_{0};
  std::atomic<int> down_error_{0};
  std::atomic<uint64_t> last_sequence_{0}, finished_sequence_{0};
  std::atomic<bool> left_{false};
};

// Closes these descriptors in every forked child, so that killing the parent ends its connections.
void close_in_children(int file);
void close_file(int file);  // here

}  // namespace cgx
