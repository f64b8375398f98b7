// Data over MPI, by addresses of an MPI library's functions: nothing of MPI is needed to build this.
//
// MPI has neither descriptors to sleep on nor connections that end, so whether a peer is there is told by the control
// connection, as ever. Sends are synchronous (MPI_Issend): one that is done has met its receive. So MPI never piles up
// messages that nobody takes, and a rank that has flushed its queue owes its peers nothing.
#pragma once

#include <vector>

#include "stream.h"

namespace cgx {

// A message under way: the library's own handle, of 4 or 8 bytes. 0: none.
using MpiRequest = uint64_t;

// The functions that are used, by name. Messages are bytes.
class Mpi {
 public:
  explicit Mpi(const cgx_mpi& library) : library_(library) {}

  // All return whether MPI had no error. A request that is done, or has failed, becomes 0.
  bool send(const void* data, size_t nbytes, int peer, int tag, MpiRequest* request) const;
  bool receive(void* data, size_t nbytes, int peer, int tag, MpiRequest* request) const;
  bool test(MpiRequest* request) const;
  void cancel(MpiRequest* request) const;  // it still has to be tested
  bool is_finalized() const;

 private:
  const cgx_mpi library_;
};

class MpiStream final : public Stream {
 public:
  // Uses two tags, from `tag` on, in messages between these two ranks.
  MpiStream(int64_t peer, uint8_t number, const Mpi& mpi, int tag);

  void send(Receiver& receiver) override;
  void receive(Receiver& receiver) override;
  bool close() override;

 private:
  bool start(const Outgoing& out);
  bool hear(Receiver& receiver);  // the next header; false: there is none now
  bool take_payload(Receiver& receiver);
  bool are_done(std::vector<MpiRequest>& requests);  // false, and ended, where MPI has an error

  const Mpi mpi_;
  const int tag_;
  std::deque<std::vector<MpiRequest>> leaving_;  // of the first frames in the queue
  uint8_t head_[kHeadNbytes] = {};               // the one that is received
  std::vector<MpiRequest> heads_;                // its request
  bool has_payload_ = false;                     // header_ announces one that has not come
  std::vector<MpiRequest> arriving_;             // its parts
};

// Lets MPI work while no operation runs: it moves bytes only inside its calls, and a rank that is through with its
// messages may still owe its peers the word that one has arrived.
class MpiProgress {
 public:
  MpiProgress(const Mpi& mpi, int rank, int tag);
  ~MpiProgress();
  void make() const;                          // a little of it
  static int64_t pause_ns(int64_t since_ns);  // until the next, so long after the last operation

 private:
  const Mpi mpi_;
  uint8_t nothing_ = 0;
  mutable MpiRequest never_ = 0;  // a message from this rank to itself, which nobody sends
};

}  // namespace cgx
