#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// One call's work. Threads draw numbers until there are none left.
struct Job {
  void (*work)(void*, int64_t);
  void* context;
  int64_t n;
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(context, i);
  }
};

class Helpers {
 public:
  // False where they are taken.
  bool run(Job& job, int wanted) {
    const std::unique_lock<std::mutex> mine(taken_, std::try_to_lock);
    if (!mine) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < wanted && start_one()) {
      }
      job_ = &job;
      places_ = std::min(wanted, started_);
    }
    work_there_.notify_all();
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    all_left_.wait(lock, [&] { return inside_ == 0; });
    return true;
  }

 private:
  bool start_one() {
    sigset_t all, before;  // the helpers shall not take the signals that Python waits for
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { help(); }).detach();
      ++started_;
    } catch (const std::system_error&) {  // no more threads to be had: fewer do
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      return false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return true;
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_there_.wait(lock, [&] { return job_ && places_ > 0; });
      Job* job = job_;
      --places_;
      ++inside_;
      lock.unlock();
      job->run();
      lock.lock();
      if (--inside_ == 0) all_left_.notify_one();
    }
  }

  std::mutex taken_;
  std::mutex mutex_;
  std::condition_variable work_there_, all_left_;
  Job* job_ = nullptr;
  int places_ = 0, inside_ = 0, started_ = 0;
};

// Never destroyed: threads wait on it until the process ends. A forked child has none of the threads, so it begins
// anew.
std::atomic<Helpers*> current{nullptr};

Helpers& helpers() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  static_cast<void>(registered);
  Helpers* found = current.load();
  if (found) return *found;
  Helpers* made = new Helpers;
  if (current.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace

void cgx_parallel(int threads, int64_t n, void (*work)(void*, int64_t), void* context) {
  Job job{work, context, n};
  if (threads < 2 || n < 2 || !helpers().run(job, static_cast<int>(std::min<int64_t>(threads, n)) - 1)) job.run();
}
