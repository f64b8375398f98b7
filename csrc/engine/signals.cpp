// A signal that is heard even while every thread of Python's is stuck: its handler writes to an eventfd, no more.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "cgx.h"

namespace {

std::atomic<int> listener{-1};
std::atomic<int> owner{0};

void tell(int) {
  const int saved = errno;
  const uint64_t one = 1;
  // The eventfd of a forked child is its parent's.
  if (getpid() == owner.load() && write(listener.load(), &one, sizeof one) < 0) {
    // Full: it will be read soon.
  }
  errno = saved;
}

}  // namespace

int cgx_signal_to_eventfd(int signal_number, int fd) {
  struct sigaction present = {};
  if (sigaction(signal_number, nullptr, &present) != 0) return CGX_ERROR_ARGUMENT;
  const bool ours = !(present.sa_flags & SA_SIGINFO) && present.sa_handler == tell;
  const bool unused = !(present.sa_flags & SA_SIGINFO) && present.sa_handler == SIG_DFL;
  if (!ours && !unused) return CGX_PENDING;
  listener.store(fd);
  owner.store(getpid());
  if (ours) return CGX_OK;
  struct sigaction action = {};
  action.sa_handler = tell;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(signal_number, &action, nullptr) == 0 ? CGX_OK : CGX_ERROR_ARGUMENT;
}
