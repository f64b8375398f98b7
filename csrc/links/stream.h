// One way for data to a peer: a queue of frames that leave in order, and a reader that never reads ahead.
//
// Only the holder of the group's role touches it. Nothing here blocks. A payload that the group cannot take yet (of a
// later operation, or of a slice that has no room) stays with its sender, or in the kernel: TCP and MPI hold the sender
// back.
#pragma once

#include <deque>

#include "frame.h"

namespace cgx {

// What a stream asks of the group.
class Receiver {
 public:
  enum class Answer { kTake, kLater, kRefuse };

  virtual ~Receiver() = default;
  // Where the payload of this header goes. kRefuse: the group has failed because of it.
  virtual Answer place(int64_t peer, const FrameHeader& header, uint8_t** destination) = 0;
  virtual void payload_arrived(int64_t peer, const FrameHeader& header) = 0;
  virtual void frame_left(int64_t slice) = 0;  // the slice that it was queued with; -1: of none
  virtual void call_arrived(int64_t peer, uint64_t sequence, const cgx_call& call) = 0;
  // What came is no frame of ours.
  virtual void noise_arrived(int64_t peer) = 0;
  // The library that carries messages to and from this peer reports an error.
  virtual void carrier_failed(int64_t peer) = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The call, if not NULL, goes ahead of the payload, or alone where data is NULL.
  void queue(uint64_t sequence, uint64_t fingerprint, const cgx_call* call, uint32_t message, int64_t slice,
             const uint8_t* data, uint64_t nbytes);
  virtual void send(Receiver& receiver) = 0;     // as much as can leave now
  virtual void receive(Receiver& receiver) = 0;  // all that is there and may be taken
  // Gives what is under way until then to end. False: payloads of this rank may still be read or written.
  virtual bool close(int64_t until_ns) = 0;

  virtual int file() const { return -1; }  // to sleep on; -1: there is none, look often
  bool has_queued() const { return !out_.empty(); }
  bool is_held() const { return held_; }  // by a payload that the group could not take
  bool has_ended() const { return ended_; }
  // Whether it has ended, or is held by a payload of a later operation.
  bool is_past(uint64_t sequence) const { return ended_ || (held_ && header_.sequence > sequence); }
  int64_t ended_ns() const { return ended_ns_; }
  int error() const { return error_; }  // errno of what ended it; 0: the peer closed it

 protected:
  static constexpr size_t kHeadNbytes = 2 * sizeof(FrameHeader) + sizeof(cgx_call);

  struct Outgoing {
    uint8_t head[kHeadNbytes];
    size_t head_nbytes;
    const uint8_t* data;
    size_t data_nbytes;
    size_t sent;  // of both
    int64_t slice;
  };

  Stream(int64_t peer, uint8_t number) : peer_(peer), number_(number) {}

  void end(int error);
  void drop_queued(Receiver& receiver);  // nobody will read it: what waits for it to leave shall not wait for ever
  bool is_whole(Receiver& receiver);     // the header; false: what came is noise, and the stream has ended
  // Asks where the payload of the header goes, into body_; false: nowhere now.
  bool find_place(Receiver& receiver);

  const int64_t peer_;
  const uint8_t number_;
  std::deque<Outgoing> out_;
  FrameHeader header_ = {};
  cgx_call call_ = {};
  uint8_t* body_ = nullptr;  // of the frame whose header is whole; NULL: not placed yet
  size_t body_nbytes_ = 0;
  bool held_ = false, ended_ = false;

 private:
  int error_ = 0;
  int64_t ended_ns_ = 0;
};

// Over a connected, non-blocking socket.
class SocketStream final : public Stream {
 public:
  SocketStream(int64_t peer, uint8_t number, int file) : Stream(peer, number), file_(file) {}

  void send(Receiver& receiver) override;
  void receive(Receiver& receiver) override;
  bool close(int64_t until_ns) override;
  int file() const override { return file_; }

 private:
  void consume(size_t nbytes, Receiver& receiver);
  // The frame is whole; `nbytes` of the next header have come with it.
  void deliver(const FrameHeader* next, size_t nbytes, Receiver& receiver);
  bool take_frame(Receiver& receiver);  // once a header is whole; false: nothing more can be read now

  const int file_;
  size_t header_nbytes_ = 0;  // read so far
  size_t body_read_ = 0;
};

}  // namespace cgx
