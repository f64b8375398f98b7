// Whether peers are alive, by pidfd where the kernel has it, else by pid and start time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace cgx {

// Clock ticks since boot; 0: no such process; kUnknownTime: it cannot be found out.
constexpr uint64_t kUnknownTime = UINT64_MAX;
uint64_t process_start_time(int pid);

class PeerWatch {
 public:
  explicit PeerWatch(int64_t world) : files_(static_cast<size_t>(world), -1) {}
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  bool is_dead(int64_t peer, int pid, uint64_t start_time);  // from any thread

 private:
  std::mutex mutex_;
  std::vector<int> files_;  // pidfds, opened at the first look; -1: none
};

}  // namespace cgx
