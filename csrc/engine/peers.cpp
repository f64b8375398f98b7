#include "peers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace cgx {

uint64_t process_start_time(int pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT || errno == ESRCH ? 0 : kUnknownTime;
  char text[1024];
  const ssize_t length = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (length <= 0) return errno == ESRCH ? 0 : kUnknownTime;
  text[length] = 0;
  const char* p = std::strrchr(text, ')');  // the command's name may hold anything, but nothing after it does
  if (!p || p + 2 >= text + length || p[2] == 'Z' || p[2] == 'X') return 0;
  for (int field = 2; field < 22 && p; ++field) p = std::strchr(p + 1, ' ');
  return p ? std::strtoull(p, nullptr, 10) : 0;
}

PeerWatch::~PeerWatch() {
  for (int file : files_)
    if (file >= 0) ::close(file);
}

bool PeerWatch::is_dead(int64_t peer, int pid, uint64_t start_time) {
  std::lock_guard<std::mutex> lock(mutex_);
  int& file = files_[static_cast<size_t>(peer)];
  if (file < 0) {
    file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (file < 0 && errno == ESRCH) return true;
    // The pid may have been reused before the pidfd was opened.
    const uint64_t found = process_start_time(pid);
    if (found != start_time && found != kUnknownTime && start_time != kUnknownTime) return true;
    if (file < 0) return false;
  }
  pollfd ready = {file, POLLIN, 0};
  return poll(&ready, 1, 0) == 1;
}

}  // namespace cgx
