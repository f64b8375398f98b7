// Data over MPI, by addresses of an MPI library's functions: nothing of MPI is needed to build this.
//
// MPI has neither descriptors to sleep on nor connections that end, so whether a peer is there is told by the control
// connection, as ever. Payloads are sent synchronously (MPI_Issend): one that is done has met its receive. So MPI never
// piles up messages that nobody takes, and a rank that has flushed its queue owes its peers nothing but the word that
// it has received.
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
  // `synchronous`: it is done when it has met its receive.
  bool send(const void* data, size_t nbytes, int peer, int tag, bool synchronous, MpiRequest* request) const;
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
  bool close(int64_t until_ns) override;

 private:
  bool start(const Outgoing& out, Receiver& receiver);
  bool hear(Receiver& receiver);  // the next header; false: there is none now
  bool take_payload(Receiver& receiver);
  void fail(Receiver& receiver);
  // False, and the stream has ended, where MPI has an error.
  bool are_done(std::vector<MpiRequest>& requests, Receiver& receiver);

  const Mpi mpi_;
  const int tag_;
  std::deque<std::vector<MpiRequest>> leaving_;  // of the first frames in the queue
  uint8_t head_[kHeadNbytes] = {};               // the one that is received
  std::vector<MpiRequest> heads_;                // its request
  bool has_payload_ = false;                     // header_ announces one that has not come
  std::vector<MpiRequest> arriving_;             // its parts
};

// A thread of the process that lets MPI work while nobody calls it: MPI moves bytes only inside its calls, and a rank
// that is through with its messages, or with its group, may still owe its peers the word that one has arrived.
class MpiProgress {
 public:
  // Starts it, once. No message comes from this rank to itself with this tag.
  static void start(const Mpi& mpi, int rank, int tag);
  static void stop();
  static void seen();  // somebody has just called MPI
};

}  // namespace cgx
