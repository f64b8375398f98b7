#include "stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "engine/waiting.h"
#include "link.h"

namespace cgx {
namespace {

constexpr int kVectors = 16;  // of one sendmsg

}  // namespace

void Stream::queue(uint64_t sequence, uint64_t fingerprint, const cgx_call* call, uint32_t message, int64_t slice,
                   const uint8_t* data, uint64_t nbytes) {
  if (ended_) return;
  out_.emplace_back();  // all zeros: MPI sends heads whole
  Outgoing& out = out_.back();
  const auto put = [&](const void* bytes, size_t count) {
    std::memcpy(out.head + out.head_nbytes, bytes, count);
    out.head_nbytes += count;
  };
  if (call) {
    const FrameHeader header = make_header(FrameKind::kCall, sequence, fingerprint, 0, sizeof *call, number_);
    put(&header, sizeof header);
    put(call, sizeof *call);
  }
  if (data) {
    const FrameHeader header = make_header(FrameKind::kPayload, sequence, fingerprint, message, nbytes, number_);
    put(&header, sizeof header);
  }
  out.data = data;
  out.data_nbytes = data ? nbytes : 0;
  out.slice = slice;
}

void Stream::end(int error) {
  if (!ended_) ended_ns_ = now_ns();
  ended_ = true;
  held_ = false;
  error_ = error;
}

void Stream::drop_queued(Receiver& receiver) {
  while (!out_.empty()) {
    const int64_t slice = out_.front().slice;
    out_.pop_front();
    receiver.frame_left(slice);
  }
}

bool Stream::is_whole(Receiver& receiver) {
  const bool known =
      header_.kind == FrameKind::kPayload || (header_.kind == FrameKind::kCall && header_.nbytes == sizeof call_);
  if (known && header_.check == check_of(header_)) return true;
  end(EPROTO);
  receiver.noise_arrived(peer_);
  return false;
}

bool Stream::find_place(Receiver& receiver) {
  const Receiver::Answer answer = receiver.place(peer_, header_, &body_);
  held_ = answer == Receiver::Answer::kLater;
  if (answer == Receiver::Answer::kTake) {
    body_nbytes_ = header_.nbytes;
    return true;
  }
  body_ = nullptr;
  if (answer == Receiver::Answer::kRefuse) end(EPROTO);
  return false;
}

// ---- sockets ----

bool SocketStream::close(int64_t) {
  close_file(file_);
  return true;
}

void SocketStream::send(Receiver& receiver) {
  while (!out_.empty()) {
    iovec vectors[kVectors];
    int n = 0;
    size_t offered = 0;
    for (const Outgoing& out : out_) {
      if (n + 2 > kVectors) break;
      if (out.sent < out.head_nbytes)
        vectors[n++] = {const_cast<uint8_t*>(out.head) + out.sent, out.head_nbytes - out.sent};
      const size_t data_sent = out.sent > out.head_nbytes ? out.sent - out.head_nbytes : 0;
      if (data_sent < out.data_nbytes)
        vectors[n++] = {const_cast<uint8_t*>(out.data) + data_sent, out.data_nbytes - data_sent};
      offered += out.head_nbytes + out.data_nbytes - out.sent;
    }
    msghdr message = {};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<size_t>(n);
    const ssize_t sent = sendmsg(file_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) {
        end(errno);
        drop_queued(receiver);
      }
      return;
    }
    consume(static_cast<size_t>(sent), receiver);
    if (static_cast<size_t>(sent) < offered) return;
  }
}

void SocketStream::consume(size_t nbytes, Receiver& receiver) {
  while (nbytes > 0) {
    Outgoing& out = out_.front();
    const size_t left = out.head_nbytes + out.data_nbytes - out.sent;
    if (nbytes < left) {
      out.sent += nbytes;
      return;
    }
    nbytes -= left;
    const int64_t slice = out.slice;
    out_.pop_front();
    receiver.frame_left(slice);
  }
}

bool SocketStream::take_frame(Receiver& receiver) {
  if (!is_whole(receiver)) return false;
  if (header_.kind == FrameKind::kCall) {
    body_ = reinterpret_cast<uint8_t*>(&call_);
    body_nbytes_ = sizeof call_;
  } else if (!find_place(receiver)) {
    return false;
  }
  body_read_ = 0;
  return true;
}

void SocketStream::deliver(const FrameHeader* next, size_t nbytes, Receiver& receiver) {
  const FrameHeader header = header_;
  body_ = nullptr;
  if (nbytes > 0) std::memcpy(&header_, next, nbytes);
  header_nbytes_ = nbytes;
  if (header.kind == FrameKind::kCall)
    receiver.call_arrived(peer_, header.sequence, call_);
  else
    receiver.payload_arrived(peer_, header);
}

void SocketStream::receive(Receiver& receiver) {
  while (!ended_) {
    if (header_nbytes_ == sizeof header_ && !body_ && !take_frame(receiver)) return;
    if (body_ && body_nbytes_ == 0) {
      deliver(nullptr, 0, receiver);
      continue;
    }
    // The rest of this body and the next header in one call.
    FrameHeader next;
    iovec vectors[2];
    size_t n = 0, wanted = 0;
    if (body_) {
      vectors[n++] = {body_ + body_read_, body_nbytes_ - body_read_};
      vectors[n++] = {&next, sizeof next};
      wanted = body_nbytes_ - body_read_ + sizeof next;
    } else {
      wanted = sizeof header_ - header_nbytes_;
      vectors[n++] = {reinterpret_cast<uint8_t*>(&header_) + header_nbytes_, wanted};
    }
    msghdr message = {};
    message.msg_iov = vectors;
    message.msg_iovlen = n;
    const ssize_t read = recvmsg(file_, &message, MSG_DONTWAIT);
    if (read == 0) return end(0);
    if (read < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) end(errno);
      return;
    }
    if (!body_) {
      header_nbytes_ += static_cast<size_t>(read);
    } else {
      const size_t of_body = std::min(static_cast<size_t>(read), body_nbytes_ - body_read_);
      body_read_ += of_body;
      if (body_read_ == body_nbytes_) deliver(&next, static_cast<size_t>(read) - of_body, receiver);
    }
    if (static_cast<size_t>(read) < wanted) return;  // the kernel has no more now
  }
}

}  // namespace cgx
