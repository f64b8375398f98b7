#include "link.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "engine/waiting.h"

namespace cgx {
namespace {

constexpr int kFullMs = 200;  // a control connection is always read, so its buffer is full only while its peer is not

std::mutex files_mutex;
std::set<int>* files = nullptr;  // never freed: a child may fork when the process is ending

void lock_files() { files_mutex.lock(); }
void unlock_files() { files_mutex.unlock(); }
void close_files() {
  for (const int file : *files) ::close(file);
  files->clear();
  files_mutex.unlock();
}

}  // namespace

void close_in_children(int file) {
  static std::once_flag once;
  std::call_once(once, [] {
    files = new std::set<int>;
    pthread_atfork(lock_files, unlock_files, close_files);
  });
  std::lock_guard<std::mutex> lock(files_mutex);
  files->insert(file);
}

void close_file(int file) {
  std::lock_guard<std::mutex> lock(files_mutex);  // a child has it closed, or is forked when it is closed
  files->erase(file);
  ::close(file);
}

Link::Link(int64_t peer) : peer_(peer), owner_pid_(getpid()) {}

void Link::add_stream(int file) {
  close_in_children(file);
  streams_.push_back(std::make_unique<SocketStream>(peer_, static_cast<uint8_t>(streams_.size()), file));
  told_.push_back(0);
}

void Link::add_stream(const Mpi& mpi, int tag) {
  streams_.push_back(std::make_unique<MpiStream>(peer_, static_cast<uint8_t>(streams_.size()), mpi, tag));
  told_.push_back(0);
}

void Link::set_control(int file) {
  close_in_children(file);
  control_ = file;
}

bool Link::close(int64_t until_ns) {
  // In a forked child they were closed at once: their numbers may be those of other files by now. MPI does not survive
  // fork either.
  if (getpid() != owner_pid_) return true;
  bool closed = true;
  for (std::unique_ptr<Stream>& stream : streams_) {
    if (stream->close(until_ns)) continue;
    (void)stream.release();  // its memory may still be used
    closed = false;
  }
  streams_.clear();
  if (control_ < 0) return closed;
  std::lock_guard<std::mutex> lock(control_mutex_);
  // Unread bytes would make the kernel reset the connection, and the peer might lose what was said last.
  shutdown(control_, SHUT_WR);
  uint8_t rest[256];
  while (recv(control_, rest, sizeof rest, MSG_DONTWAIT) > 0) {
  }
  close_file(control_);
  control_ = -1;
  return closed;
}

bool Link::has_queued() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& each) { return each->has_queued(); });
}

bool Link::is_past(uint64_t sequence) const {
  return std::all_of(streams_.begin(), streams_.end(), [=](const auto& each) { return each->is_past(sequence); });
}

int64_t Link::cut_ns() const {
  int64_t first_ns = 0;
  for (const auto& stream : streams_)
    if (stream->has_ended() && (first_ns == 0 || stream->ended_ns() < first_ns)) first_ns = stream->ended_ns();
  return first_ns;
}

bool Link::tell(int64_t slice, uint64_t sequence) {
  uint64_t& told = told_[static_cast<size_t>(slice) % told_.size()];
  if (told == sequence) return false;
  told = sequence;
  return true;
}

void Link::send_control(FrameKind kind, uint64_t sequence, const void* body, size_t nbytes) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (control_ < 0 || mute_ || is_down()) return;
  if (kind == FrameKind::kPing && answered_ns() >= asked_ns()) asked_ns_.store(now_ns(), std::memory_order_relaxed);
  const FrameHeader header = make_header(kind, sequence, 0, 0, nbytes);
  const auto* first = reinterpret_cast<const char*>(&header);
  std::string frame(first, sizeof header);
  frame.append(static_cast<const char*>(body), nbytes);
  for (size_t sent = 0; sent < frame.size();) {
    const ssize_t n = ::send(control_, frame.data() + sent, frame.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd full = {control_, POLLOUT, 0};
      const int ready = poll(&full, 1, kFullMs);
      if (ready > 0 || (ready < 0 && errno == EINTR)) continue;
    } else {
      keep_error(errno);
    }
    // Half a frame would make noise of all that follows, so nothing more is said. What the peer said last is still to
    // be read: whether the connection is down is for the reader to find out.
    mute_ = true;
    shutdown(control_, SHUT_WR);
    return;
  }
}

void Link::keep_error(int error) {
  int none = 0;
  down_error_.compare_exchange_strong(none, error);
}

void Link::go_down(int error) {
  int64_t up = 0;
  keep_error(error);
  down_ns_.compare_exchange_strong(up, now_ns());
}

void Link::listen(ControlListener& listener) {
  for (;;) {
    uint8_t bytes[4096];
    const ssize_t n = recv(control_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) return go_down(n < 0 ? errno : 0);
    inbox_.insert(inbox_.end(), bytes, bytes + n);
    while (take_control_frame(listener)) {
    }
    if (is_down()) return;
  }
}

bool Link::take_control_frame(ControlListener& listener) {
  FrameHeader header;
  if (inbox_.size() < sizeof header) return false;
  std::memcpy(&header, inbox_.data(), sizeof header);
  if (header.check != check_of(header) || header.nbytes > kLongestControlNbytes) {
    go_down(EPROTO);
    return false;
  }
  if (inbox_.size() < sizeof header + header.nbytes) return false;
  const uint8_t* body = inbox_.data() + sizeof header;
  answered_ns_.store(now_ns(), std::memory_order_relaxed);
  switch (header.kind) {
    case FrameKind::kPoison: {
      int32_t status;
      if (header.nbytes < sizeof status) {
        go_down(EPROTO);
        return false;
      }
      std::memcpy(&status, body, sizeof status);
      const std::string text(reinterpret_cast<const char*>(body) + sizeof status, header.nbytes - sizeof status);
      listener.poison_arrived_from(peer_, status, text);
      break;
    }
    case FrameKind::kLeave:
      last_sequence_.store(header.sequence, std::memory_order_release);
      if (uint64_t finished; header.nbytes == sizeof finished) {
        std::memcpy(&finished, body, sizeof finished);
        finished_sequence_.store(finished, std::memory_order_release);
      }
      left_.store(true, std::memory_order_release);
      listener.peer_left(peer_, header.sequence);
      break;
    case FrameKind::kPing:
      send_control(FrameKind::kPong, listener.latest_sequence(), "", 0);
      break;
    case FrameKind::kPong:  // has said all by coming
      break;
    default:
      go_down(EPROTO);
      return false;
  }
  inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<ptrdiff_t>(sizeof header + header.nbytes));
  return true;
}

}  // namespace cgx
