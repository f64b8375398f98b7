// A thread between the ranks of a linked group that passes on their bytes: in small pieces, slowly, or up to a point at
// which it cuts a rank off as if its process had died.
#pragma once

#include <linux/sockios.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "links/frame.h"
#include "ranks.h"

namespace {

struct RelayOptions {
  uint64_t seed = 1;
  size_t most_nbytes = 4096;  // passed on at once; how many is random
  bool alone = false;         // nothing is passed on before the receiver has read what came before
  int data_tick_ms = 0;       // payloads are stored here, and passed on only that often
  int64_t victim = -1;        // the rank that is cut off
  int64_t cut_after = 0;      // so many bytes from and to it
  bool leave = false;         // the others hear a LEAVE of it first, with the highest sequence
};

class Relay {
 public:
  explicit Relay(const RelayOptions& options)
      : options_(options), random_(options.seed), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay() {
    stopping_ = true;
    eventfd_write(bell_, 1);
    if (thread_.joinable()) thread_.join();
    for (Connection& connection : connections_) hang_up(connection);
    close(bell_);
  }

  std::vector<Group> groups(int64_t world) {
    std::vector<Group> linked = linked_groups(world, [this](int64_t a, int64_t b, int64_t stream) {
      const auto [one, near] = connected();
      const auto [other, far] = connected();
      connections_.push_back({a, b, stream, {near, far}, {}});
      return std::make_pair(one, other);
    });
    thread_ = std::thread([this] { work(); });
    return linked;
  }

  bool has_cut() const { return has_cut_; }
  int64_t passed_nbytes() const { return passed_nbytes_; }

 private:
  struct Way {  // from one end of a connection to the other
    std::string pending;
    bool ended = false;  // nothing more can be read
    bool shut = false;   // and the receiver was told
  };
  struct Connection {
    int64_t a, b, stream;
    int files[2];  // towards a, towards b
    Way ways[2];   // from a, from b
    bool concerns(int64_t rank) const { return a == rank || b == rank; }
  };

  void hang_up(Connection& connection) {
    for (int& file : connection.files) {
      if (file >= 0) close(file);
      file = -1;
    }
  }

  void work() {
    auto next_tick = std::chrono::steady_clock::now();
    std::vector<pollfd> files;
    while (!stopping_) {
      const bool tick = std::chrono::steady_clock::now() >= next_tick;
      if (tick) next_tick += std::chrono::milliseconds(std::max(options_.data_tick_ms, 1));
      bool waits = false;  // for a receiver to read
      files.assign(1, {bell_, POLLIN, 0});
      for (Connection& connection : connections_)
        for (int from = 0; from < 2; ++from) {
          if (connection.files[0] < 0) continue;
          const bool stored = options_.data_tick_ms && connection.stream >= 0;
          if (!stored || tick) pass(connection, from);
          if (connection.files[0] < 0) continue;
          const Way& way = connection.ways[from];
          if (!way.pending.empty()) waits = true;
          if (!way.ended && (way.pending.empty() || stored)) files.push_back({connection.files[from], POLLIN, 0});
        }
      poll(files.data(), files.size(), waits ? (options_.alone ? 0 : 1) : 20);
      for (Connection& connection : connections_)
        for (int from = 0; from < 2; ++from)
          if (connection.files[0] >= 0) fetch(connection, from);
    }
  }

  void fetch(Connection& connection, int from) {
    Way& way = connection.ways[from];
    const bool stored = options_.data_tick_ms && connection.stream >= 0;
    if (way.ended || (!way.pending.empty() && !stored)) return;
    char bytes[65536];
    const ssize_t n = recv(connection.files[from], bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0) way.pending.append(bytes, static_cast<size_t>(n));
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) way.ended = true;
  }

  void pass(Connection& connection, int from) {
    Way& way = connection.ways[from];
    const int to = connection.files[1 - from];
    // Several pieces in a row, each with a call of its own, unless each has to be read first.
    for (int pieces = options_.alone || options_.data_tick_ms ? 1 : 64; pieces > 0 && !way.pending.empty(); --pieces) {
      int unread = 0;
      if (options_.alone && ioctl(to, SIOCOUTQ, &unread) == 0 && unread > 0) return;
      size_t n = std::min(way.pending.size(), 1 + static_cast<size_t>(random_() % options_.most_nbytes));
      const bool counted = connection.concerns(options_.victim);
      if (counted) n = std::min(n, static_cast<size_t>(options_.cut_after - passed_nbytes_));
      const ssize_t sent = n ? send(to, way.pending.data(), n, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
      if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
      way.pending.erase(0, sent < 0 ? way.pending.size() : static_cast<size_t>(sent));  // nobody reads it any more
      if (!counted || sent < 0) continue;
      passed_nbytes_ += sent;
      if (passed_nbytes_ >= options_.cut_after) return cut();
    }
    if (way.ended && way.pending.empty() && !way.shut) {
      way.shut = true;
      shutdown(to, SHUT_WR);
    }
  }

  void cut() {
    has_cut_ = true;
    for (Connection& connection : connections_) {
      if (!connection.concerns(options_.victim)) continue;
      const int to_survivor = connection.files[connection.a == options_.victim ? 1 : 0];
      if (options_.leave && connection.stream < 0) {
        const cgx::FrameHeader leave = cgx::make_header(cgx::FrameKind::kLeave, INT64_MAX, 0, 0, 0);
        send(to_survivor, &leave, sizeof leave, MSG_DONTWAIT | MSG_NOSIGNAL);
      }
    }
    for (Connection& connection : connections_)
      if (connection.concerns(options_.victim)) hang_up(connection);
  }

  const RelayOptions options_;
  std::mt19937_64 random_;
  std::vector<Connection> connections_;
  std::atomic<bool> stopping_{false}, has_cut_{false};
  std::atomic<int64_t> passed_nbytes_{0};  // from and to the victim
  int bell_;
  std::thread thread_;
};

}  // namespace
