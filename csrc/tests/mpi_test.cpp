// Groups whose data goes over MPI: an MPI that is late, fails, or is never done.
//
//   mpi_test [--quick]
//
// Ranks are real groups, as threads of one process. The MPI library is a stand-in, in memory: messages meet in order,
// and are done some calls later. What the real libraries do is tested from Python.
#include "links/mpi.h"

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>

#include "engine/waiting.h"
#include "quick.h"
#include "ranks.h"

namespace {

struct Message {
  bool receives;
  int64_t from, to;
  int tag;
  void* data;
  int count;
  bool met = false, cancelled = false;
  uint64_t tests_left = 0;
};

// The stand-in. A communicator's handle is the rank that uses it, plus 1.
struct Fabric {
  std::mutex mutex;
  std::map<uint64_t, Message> messages;
  uint64_t last = 0;
  uint64_t most_tests = 0;  // a message that has met its other half needs up to so many more tests
  bool touches = true;      // false: no bytes are copied
  bool meets = true;        // false: nothing ever does
  int64_t broken = -1;      // a rank all of whose calls fail from now on
  std::vector<int> counts;  // of all sends
  std::mt19937_64 random{7};

  static Fabric& the() {
    static Fabric fabric;
    return fabric;
  }

  void reset() {
    cgx_mpi_stop();
    messages.clear();
    counts.clear();
    most_tests = 0;
    touches = meets = true;
    broken = -1;
  }

  int start(bool receives, const void* data, int count, int peer, int tag, uint64_t communicator, uint64_t* request) {
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t me = int64_t(communicator) - 1;
    if (me == broken) return 15;
    if (count < 0) fail("a negative count");
    if (!receives) counts.push_back(count);
    *request = ++last;
    messages[last] = {receives, receives ? peer : me, receives ? me : peer, tag, const_cast<void*>(data), count};
    return 0;
  }

  void meet(uint64_t number, Message& message) {
    if (message.met || !meets) return;
    // In order: the first of each kind that has not met.
    const auto first = [&](bool receives) {
      for (auto& [other, each] : messages)
        if (each.receives == receives && each.from == message.from && each.to == message.to &&
            each.tag == message.tag && !each.met && !each.cancelled)
          return &each;
      return static_cast<Message*>(nullptr);
    };
    for (Message *one = first(false), *two = first(true); one && two; one = first(false), two = first(true)) {
      if (one->count != two->count) fail("message %d has %d bytes, not %d", int(number), one->count, two->count);
      if (touches) std::memcpy(two->data, one->data, size_t(one->count));
      one->met = two->met = true;
      one->tests_left = most_tests ? random() % (most_tests + 1) : 0;
      two->tests_left = most_tests ? random() % (most_tests + 1) : 0;
    }
  }

  int test(uint64_t* request, int* done) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = messages.find(*request);
    if (found == messages.end()) fail("a test of request %d, which does not exist", int(*request));
    Message& message = found->second;
    const int64_t me = message.receives ? message.to : message.from;
    if (me == broken) return 15;
    meet(*request, message);
    *done = message.cancelled || (message.met && message.tests_left-- == 0);
    if (*done) messages.erase(found);
    return 0;
  }
};

int fake_issend(const void* data, int count, uint64_t, int peer, int tag, uint64_t communicator, uint64_t* request) {
  return Fabric::the().start(false, data, count, peer, tag, communicator, request);
}

int fake_irecv(void* data, int count, uint64_t, int peer, int tag, uint64_t communicator, uint64_t* request) {
  return Fabric::the().start(true, data, count, peer, tag, communicator, request);
}

int fake_test(uint64_t* request, int* done, void*) { return Fabric::the().test(request, done); }

int fake_cancel(uint64_t* request) {
  std::lock_guard<std::mutex> lock(Fabric::the().mutex);
  Message& message = Fabric::the().messages.at(*request);
  if (!message.receives) fail("a send is cancelled, which MPI need not allow");
  message.cancelled = !message.met;
  return 0;
}

int fake_finalized(int* finalized) {
  *finalized = 0;
  return 0;
}

cgx_mpi library_of(int64_t rank) {
  cgx_mpi library = {};
  library.isend = library.issend = reinterpret_cast<void*>(fake_issend);
  library.irecv = reinterpret_cast<void*>(fake_irecv);
  library.test = reinterpret_cast<void*>(fake_test);
  library.cancel = reinterpret_cast<void*>(fake_cancel);
  library.finalized = reinterpret_cast<void*>(fake_finalized);
  library.communicator = uint64_t(rank) + 1;
  return library;
}

std::vector<cgx_mpi> libraries;

std::vector<Group> groups_over_mpi(int64_t world) {
  libraries.clear();
  for (int64_t rank = 0; rank < world; ++rank) libraries.push_back(library_of(rank));
  return linked_groups(
      world, [](int64_t, int64_t, int64_t) { return connected(); },
      [](const std::vector<Group>& groups, int64_t a, int64_t b, int64_t stream) {
        const int tag = int(10 + 2 * stream);
        if (cgx_group_link_mpi(groups[size_t(a)].get(), b, &libraries[size_t(a)], tag) != CGX_OK ||
            cgx_group_link_mpi(groups[size_t(b)].get(), a, &libraries[size_t(b)], tag) != CGX_OK)
          fail("a link was refused");
      });
}

void nothing_is_left(int64_t world) {
  for (int64_t rank = 0; rank < world; ++rank)
    if (libraries[size_t(rank)].stranded) fail("rank %d left messages behind", int(rank));
  cgx_mpi_stop();  // whose own message never comes
  if (!Fabric::the().messages.empty()) fail("%d messages are left", int(Fabric::the().messages.size()));
}

void sums_are_right_however_late_messages_are() {
  for (uint64_t most_tests : {0, 3, 40})
    for (int64_t world : {2, 3})
      for (int64_t streams : {1, 2}) {
        if (quick && most_tests == 40 && world + streams > 3) continue;
        Fabric::the().reset();
        Fabric::the().most_tests = most_tests;
        joint = {streams, streams, 0, 1, false};
        mixed_operations(groups_over_mpi(world), quick ? 20 : 300, quick ? 40 : 200);
        nothing_is_left(world);
      }
}

void sums_are_right_where_nodes_share_memory() {
  Fabric::the().reset();
  Fabric::the().most_tests = 3;
  joint = {1, 1, 0, 2, false};
  mixed_operations(groups_over_mpi(4), quick ? 30 : 200, quick ? 40 : 200);
  nothing_is_left(4);
}

class Nobody : public cgx::Receiver {
 public:
  Answer place(int64_t, const cgx::FrameHeader&, uint8_t**) override { return Answer::kLater; }
  void payload_arrived(int64_t, const cgx::FrameHeader&) override {}
  void frame_left(int64_t) override { ++left; }
  void call_arrived(int64_t, uint64_t, const cgx_call&) override {}
  void noise_arrived(int64_t) override { ++noise; }
  void carrier_failed(int64_t) override {}
  int left = 0, noise = 0;
};

void a_payload_of_gigabytes_goes_in_parts() {
  for (uint64_t nbytes : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 30, (uint64_t{1} << 31) + 5, uint64_t{5000000000}}) {
    Fabric::the().reset();
    Fabric::the().touches = false;
    Nobody nobody;
    cgx::MpiStream stream(1, 0, cgx::Mpi(library_of(0)), 20);
    const uint8_t start = 0;
    stream.queue(1, 2, nullptr, 3, 4, &start, nbytes);
    stream.send(nobody);
    uint64_t total = 0;
    const std::vector<int>& counts = Fabric::the().counts;
    for (size_t i = 1; i < counts.size(); ++i) total += uint64_t(counts[i]);  // the first is the head
    if (total != nbytes) fail("%d bytes were sent", int(total));
    if (stream.close(cgx::now_ns() + 10000000)) fail("a stream is closed though nobody takes its message");
    if (nobody.left) fail("a frame has left that nobody took");
  }
}

void noise_is_refused() {
  Fabric::the().reset();
  Nobody nobody;
  cgx::MpiStream stream(1, 0, cgx::Mpi(library_of(0)), 20);
  const cgx::Mpi other(library_of(1));
  std::vector<uint8_t> noise(2 * sizeof(cgx::FrameHeader) + sizeof(cgx_call), 0xAB);
  cgx::MpiRequest request;
  other.send(noise.data(), noise.size(), 0, 20, true, &request);
  stream.receive(nobody);
  if (nobody.noise != 1 || !stream.has_ended()) fail("noise was not noticed");
  if (!stream.close(cgx::now_ns() + 10000000)) fail("the stream cannot be closed");
}

// Whoever fails says so on the control connections.
void an_error_of_mpi_ends_the_group() {
  for (int64_t victim : {0, 1}) {
    Fabric::the().reset();
    joint = {1, 1, 0, 1, false};
    std::atomic<int> ready{0};
    with_groups(groups_over_mpi(2), [&](cgx_group* group, int64_t rank) {
      Pending first = simple(rank, 2), second = simple(rank, 2);
      must_be(group, rank, wait(group, submit(group, call_of(128, 4), first, false), 100), {CGX_OK}, "");
      ++ready;
      while (ready.load() < 2) std::this_thread::yield();
      if (rank == 0) {
        std::lock_guard<std::mutex> lock(Fabric::the().mutex);
        Fabric::the().broken = victim;
      }
      ++ready;
      while (ready.load() < 4) std::this_thread::yield();
      const int status = wait(group, submit(group, call_of(128, 4), second, false), 100);
      must_be(group, rank, status, {CGX_ERROR_CONNECTION, CGX_ERROR_POISONED}, "MPI reports an error");
    });
  }
}

// Nothing tells that no more will come, but that it has left.
void a_rank_that_leaves_in_the_middle_is_noticed() {
  for (bool takes_part : {false, true}) {
    Fabric::the().reset();
    joint = {1, 1, 0, 1, false};
    std::atomic<bool> left{false};
    with_groups(groups_over_mpi(2), [&](cgx_group* group, int64_t rank) {
      Pending first = simple(rank, 2), second = simple(rank, 2);
      must_be(group, rank, wait(group, submit(group, call_of(128, 4), first, false), 100), {CGX_OK}, "");
      if (rank == 1) {
        if (takes_part) submit(group, call_of(128, 4), second, true);
        cgx_group_close(group);
        left = true;
        return;
      }
      while (!left.load()) std::this_thread::yield();
      const auto begin = std::chrono::steady_clock::now();
      const int status = wait(group, submit(group, call_of(128, 4), second, false), 100);
      must_be(group, rank, status, {CGX_ERROR_PEER_LOST}, "lost rank 1");
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(5)) fail("it took too long to notice");
    });
  }
}

void memory_that_mpi_may_still_use_is_left_to_it() {
  Fabric::the().reset();
  joint = {1, 1, 0, 1, false};
  {
    std::atomic<int> ready{0};
    const std::vector<Group> groups = groups_over_mpi(2);
    with_groups(groups, [&](cgx_group* group, int64_t rank) {
      Pending first = simple(rank, 2), second = simple(rank, 2, 4096);
      must_be(group, rank, wait(group, submit(group, call_of(128, 4), first, false), 100), {CGX_OK}, "");
      ++ready;
      while (ready.load() < 2) std::this_thread::yield();
      if (rank != 0) return;
      submit(group, call_of(8192, 4), second, false, 200);
      const int status = wait(group, second.number, 100);
      must_be(group, rank, status, {CGX_ERROR_TIMEOUT, CGX_ERROR_PEER_LOST}, "rank 1");
    });
  }
  if (!libraries[0].stranded || libraries[1].stranded) fail("who has messages under way is not known");
  // The groups are gone. What MPI was given must still be there: this reads it.
  std::lock_guard<std::mutex> lock(Fabric::the().mutex);
  int sends = 0;
  for (auto& [number, message] : Fabric::the().messages) {
    if (message.receives) continue;
    ++sends;
    volatile uint8_t sum = 0;
    for (int i = 0; i < message.count; ++i) sum = uint8_t(sum + static_cast<uint8_t*>(message.data)[i]);
  }
  if (!sends) fail("nothing was under way");
}

struct Check {
  const char* name;
  void (*run)();
};
constexpr Check kChecks[] = {
    {"sums are right however late messages are", sums_are_right_however_late_messages_are},
    {"sums are right where nodes share memory", sums_are_right_where_nodes_share_memory},
    {"a payload of gigabytes goes in parts", a_payload_of_gigabytes_goes_in_parts},
    {"noise is refused", noise_is_refused},
    {"an error of MPI ends the group", an_error_of_mpi_ends_the_group},
    {"a rank that leaves in the middle is noticed", a_rank_that_leaves_in_the_middle_is_noticed},
    {"memory that MPI may still use is left to it", memory_that_mpi_may_still_use_is_left_to_it},
};

}  // namespace

int main(int argc, char** argv) {
  read_arguments(argc, argv);
  for (const Check& check : kChecks) {
    const auto begin = std::chrono::steady_clock::now();
    check.run();
    const auto elapsed = std::chrono::steady_clock::now() - begin;
    printf("ok: %s (%d ms)\n", check.name, int(std::chrono::duration_cast<std::chrono::milliseconds>(elapsed).count()));
    fflush(stdout);
  }
  return 0;
}
