// Linked groups under attack: bytes that come one by one, late or not at all, peers that lie, die, lag, fork and leave.
//
//   [CGX_TEST_ONLY="part of a check's name"] links_test [--quick]
//
// Ranks are real groups, as threads of one process. Between them is a relay, or the test itself plays the peer and owns
// the other ends of the connections. Linked with one_mapping.cpp, payloads lie on the heap, where AddressSanitizer sees
// a byte that leaves its place.
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

#include <set>

#include "quick.h"
#include "relay.h"

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

namespace {

using cgx::FrameHeader;
using cgx::FrameKind;
using cgx::make_header;

constexpr int64_t kNoticeMs = 5000;  // the longest time that anything may go unnoticed

class Stopwatch {
 public:
  int64_t ms() const {
    const auto elapsed = std::chrono::steady_clock::now() - begin_;
    return std::chrono::duration_cast<std::chrono::milliseconds>(elapsed).count();
  }
  void must_be_early(const char* what) const {
    if (ms() > kNoticeMs) fail("%s took %d ms", what, int(ms()));
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

Pending filled(const Slices& slices, int64_t rank, int64_t world, int64_t bits, int64_t round) {
  Pending op;
  op.slices = slices;
  op.bits = bits;
  op.plan = sra(slices, rank, world, bits);
  for (int64_t i = 0; i < numel_of(slices); ++i) op.values.push_back(value_of(rank, i, round));
  return op;
}

int64_t submit_sra(cgx_group* group, Pending& op, bool wake) {
  return submit(group, call_of(int64_t(op.values.size()), op.bits), op, wake);
}

// Rank 0 sends the values to all others and needs nothing from them.
Pending one_way(int64_t rank, int64_t slices, int64_t numel, int64_t world = 2) {
  const cgx_piece shape = {0, numel, 0, 0, 64, 32, CGX_RAW};
  const int64_t nbytes = cgx_piece_payload_nbytes(&shape, CGX_FLOAT32);
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<cgx_step> steps;
  for (int64_t slice = 0; slice < slices; ++slice) {
    pieces.push_back({slice * numel, numel, 0, 0, 64, 32, CGX_RAW});
    slots.push_back({0, nbytes, 0, 0, slice, CGX_HOME_MEMORY});
    const auto add = [&](int64_t kind, int64_t peer) { steps.push_back({kind, slice, peer, slice, 1, 0, 0, 0}); };
    add(rank == 0 ? CGX_STEP_ENCODE : CGX_STEP_RECEIVE, 0);
    for (int64_t peer = 1; rank == 0 && peer < world; ++peer) add(CGX_STEP_SEND, peer);
    if (rank != 0) add(CGX_STEP_DECODE, 0);
  }
  Pending op;
  int status;
  op.plan.reset(cgx_plan_new(world, CGX_FLOAT32, pieces.data(), slices, slots.data(), slices, nullptr, 0, steps.data(),
                             int64_t(steps.size()), slices, 2, (nbytes + 63) / 64 * 64, 1, &status));
  if (!op.plan) fail("an inconsistent plan");
  op.bits = 32;
  for (int64_t i = 0; i < slices * numel; ++i) op.values.push_back(rank == 0 ? value_of(0, i, 0) : 0);
  return op;
}

void check_one_way(const Pending& op) {
  for (size_t i = 0; i < op.values.size(); ++i)
    if (op.values[i] != value_of(0, int64_t(i), 0)) fail("value %d: %f", int(i), op.values[i]);
}

// ---- 1: bytes come in small pieces ----

void through_a_relay(const RelayOptions& options, int64_t rounds, int64_t largest) {
  for (int64_t world : {2, 3})
    for (int64_t streams : {1, 2}) {
      joint = {streams, streams, 0};
      Relay relay(options);
      mixed_operations(relay.groups(world), rounds, largest);
    }
}

void every_byte_comes_alone() {
  RelayOptions options;
  options.most_nbytes = 1;
  options.alone = true;
  through_a_relay(options, quick ? 2 : 20, quick ? 2 : 10);
}

void one_byte_at_a_time() {
  RelayOptions options;
  options.most_nbytes = 1;
  through_a_relay(options, quick ? 4 : 40, quick ? 6 : 40);
}

void one_to_seven_bytes_at_a_time() {
  for (uint64_t seed = 1; seed <= (quick ? 1 : 5); ++seed) {
    RelayOptions options;
    options.seed = seed;
    options.most_nbytes = 7;
    through_a_relay(options, quick ? 10 : 40, quick ? 20 : 60);
  }
}

// ---- 2 and 3: connections end ----

void a_rank_is_cut_off_anywhere() {
  for (uint64_t seed = 1; seed <= (quick ? 60 : 1000); ++seed) {
    std::mt19937_64 random(seed);
    const int64_t world = 2 + int64_t(random() % 2);
    joint = {1 + int64_t(random() % 2), 1, random() % 2 ? 1 : 0};
    RelayOptions options;
    options.seed = seed;
    options.most_nbytes = random() % 2 ? 4096 : 100;
    options.victim = int64_t(random() % uint64_t(world));
    options.cut_after = int64_t(random() % 30000);
    options.leave = random() % 2;
    const bool wake = random() % 2;
    const std::string victim_name = "rank " + std::to_string(options.victim);
    Relay relay(options);
    with_groups(relay.groups(world), [&](cgx_group* group, int64_t rank) {
      int status = CGX_OK;
      Stopwatch since;
      for (int64_t round = 0; status == CGX_OK; ++round) {
        since = Stopwatch();
        std::vector<Pending> ops;  // so that some are queued when it happens
        for (int64_t i = 0; i < 1 + round % 3; ++i)
          ops.push_back(filled(Slices(size_t(1 + round % 4), std::vector<int64_t>(size_t(world), 8 + 64 * (round % 5))),
                               rank, world, round % 2 ? 4 : 32, round));
        for (Pending& op : ops) submit_sra(group, op, wake);
        for (Pending& op : ops) status = wait(group, op.number, 100);  // all that were taken: then they may be freed
        for (const Pending& op : ops)
          if (status == CGX_OK) check_result(op, world, round);
      }
      since.must_be_early("to notice that a rank is gone");
      if (!relay.has_cut()) fail("seed %d: rank %d failed before the cut", int(seed), int(rank));
      must_be(group, rank, status, {CGX_ERROR_PEER_LOST, CGX_ERROR_POISONED, CGX_ERROR_MISMATCH},
              rank == options.victim ? "lost rank" : victim_name.c_str());
    });
  }
}

// One of the data connections ends at both ranks, and nothing else.
void a_data_connection_is_shut_while_the_control_connection_lives() {
  for (int64_t streams : {1, 2})
    for (int how : {SHUT_RDWR, SHUT_WR}) {
      if (quick && (streams == 1 || how == SHUT_WR)) continue;
      joint = {streams, 1, 0};
      int shut = -1;
      const std::vector<Group> groups = linked_groups(2, [&](int64_t, int64_t, int64_t stream) {
        const auto ends = connected();
        if (stream == streams - 1) shut = dup(ends.first);
        return ends;
      });
      std::atomic<int> ready{0};
      with_groups(groups, [&](cgx_group* group, int64_t rank) {
        const Slices slices(4, {64, 64});
        Pending first = filled(slices, rank, 2, 4, 0), second = filled(slices, rank, 2, 4, 1);
        must_be(group, rank, wait(group, submit_sra(group, first, true), 100), {CGX_OK}, "");
        ++ready;
        while (ready.load() < 2) std::this_thread::yield();
        if (rank == 0) {
          shutdown(shut, how);
          close(shut);
        }
        const Stopwatch since;
        const int status = wait(group, submit_sra(group, second, rank == 0), 100);
        since.must_be_early("to notice that a data connection is gone");
        must_be(group, rank, status, {CGX_ERROR_PEER_LOST}, "a data connection");
        ++ready;  // both wait with their connections open
        while (ready.load() < 4) std::this_thread::yield();
      });
    }
}

// ---- 4: lies ----

using Bytes = std::string;

Bytes operator+(const Bytes& bytes, const FrameHeader& header) {
  return bytes + Bytes(reinterpret_cast<const char*>(&header), sizeof header);
}

// A group of rank 0, whose peer, rank 1, is the test.
class Attacked {
 public:
  Attacked() : group_(open_group(nullptr, 0, 2)) {
    for (int64_t stream = 0; stream < 3; ++stream) {
      const auto [theirs, ours] = connected();
      files_[stream] = ours;
      if (cgx_group_link(group_.get(), 1, stream < 2 ? stream : -1, theirs) != CGX_OK) fail("a link was refused");
    }
  }
  ~Attacked() {
    for (int file : files_)
      if (file >= 0) close(file);
  }

  cgx_group* group() const { return group_.get(); }
  int data() const { return files_[0]; }
  int control() const { return files_[2]; }
  void hang_up(size_t first = 0, size_t end = 3) {  // the data connections, then the control connection
    for (size_t i = first; i < end; ++i) {
      close(files_[i]);
      files_[i] = -1;
    }
  }

  void say(int file, const Bytes& bytes) const {
    const Stopwatch since;
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n = send(file, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) sent += size_t(n);
      if (n < 0 && errno != EAGAIN) return;  // it hung up, as it may
      if (since.ms() > 2000) return;         // it does not read on, as it may
    }
  }

  Bytes hear(int file, size_t nbytes) const {
    Bytes bytes;
    while (bytes.size() < nbytes) {
      pollfd readable = {file, POLLIN, 0};
      if (poll(&readable, 1, kNoticeMs) <= 0) fail("the group under attack is silent");
      char some[4096];
      const ssize_t n = recv(file, some, std::min(sizeof some, nbytes - bytes.size()), MSG_DONTWAIT);
      if (n <= 0) fail("the group under attack hung up");
      bytes.append(some, size_t(n));
    }
    return bytes;
  }
  FrameHeader hear_header(int file, FrameKind kind) const {
    FrameHeader header;
    std::memcpy(&header, hear(file, sizeof header).data(), sizeof header);
    if (header.check != cgx::check_of(header)) fail("the group under attack talks noise");
    if (header.kind != kind) fail("a frame of kind %d", int(header.kind));
    return header;
  }

  // Starts an operation of the group, and hears its call and its first payload.
  void begin() {
    op_ = simple(0, 2);
    number_ = submit(group_.get(), call_of(128, 4), op_, true);
    const FrameHeader header = hear_header(data(), FrameKind::kCall);
    std::memcpy(&call_, hear(data(), sizeof call_).data(), sizeof call_);
    sequence_ = header.sequence;
    fingerprint_ = header.fingerprint;
    nbytes_ = hear_header(data(), FrameKind::kPayload).nbytes;
    hear(data(), nbytes_);
  }
  int end() { return wait(group_.get(), number_, 100); }

  FrameHeader header(FrameKind kind, uint32_t message, uint64_t nbytes) const {
    return make_header(kind, sequence_, fingerprint_, message, nbytes);
  }
  // What rank 1 would say. Its messages are 0, its contribution, and 1, its sum.
  Bytes call(const cgx_call& call) const {
    return Bytes() + header(FrameKind::kCall, 0, sizeof call) +
           Bytes(reinterpret_cast<const char*>(&call), sizeof call);
  }
  Bytes payload(uint32_t message) const {
    return Bytes() + header(FrameKind::kPayload, message, nbytes_) + Bytes(nbytes_, 0);
  }
  void answer() {
    say(data(), call(call_) + payload(0) + payload(1));
    if (const int status = end(); status != CGX_OK) must_be(group_.get(), 0, status, {CGX_OK}, "");
    if (hear_header(data(), FrameKind::kPayload).message != 0) fail("another message than the sum");
    hear(data(), nbytes_);
  }

  void must_fail(const char* lie, std::initializer_list<int> expected, const char* text) {
    const Stopwatch since;
    const int status = end();
    since.must_be_early(lie);
    char error[2048];
    cgx_group_error(group_.get(), error, sizeof error);
    bool is_known = strstr(error, text) != nullptr && strlen(error) > 40;
    bool is_expected = false;
    for (int each : expected) is_expected = is_expected || each == status;
    if (!is_known || !is_expected) fail("%s: status %d, \"%s\"; expected \"%s\"", lie, status, error, text);
  }
  void must_be_told() const {  // unless a question came first
    const FrameHeader header = hear_header(control(), FrameKind::kPoison);
    if (header.nbytes <= sizeof(int32_t)) fail("poison without a text");
    hear(control(), header.nbytes);
  }

  cgx_call call_ = {};
  uint64_t sequence_ = 0, fingerprint_ = 0, nbytes_ = 0;

 private:
  int files_[3];
  Pending op_;
  int64_t number_ = 0;
  Group group_;
};

struct Lie {
  const char* name;
  std::function<Bytes(const Attacked&)> bytes;
  int status;
  const char* text;
};

void expect_refusal(const Lie& lie) {
  for (bool second : {false, true}) {
    if (second && quick) continue;
    Attacked attacked;
    if (second) {
      attacked.begin();
      attacked.answer();
    }
    attacked.begin();
    attacked.say(attacked.data(), lie.bytes(attacked));
    attacked.must_fail(lie.name, {lie.status}, lie.text);
    attacked.must_be_told();
  }
}

void an_honest_peer_is_understood() {
  Attacked attacked;
  for (int i = 0; i < 3; ++i) {
    attacked.begin();
    attacked.answer();
  }
}

void lies_on_a_data_connection_are_refused() {
  constexpr const char* kNotOurs = "a payload that operation";
  constexpr const char* kStep = "ranks have lost step";
  constexpr const char* kNoise = "that are no message of torch_cgx";
  const auto payload_of = [](uint32_t message, int64_t more, uint64_t nbytes = 0) {
    return [=](const Attacked& to) {
      const uint64_t announced = nbytes ? nbytes : to.nbytes_ + uint64_t(more);
      return to.call(to.call_) + to.header(FrameKind::kPayload, message, announced) + Bytes(4096, 'x');
    };
  };
  const auto kind_of = [](int kind) {
    return [=](const Attacked& to) { return Bytes() + to.header(FrameKind(kind), 1, to.nbytes_) + Bytes(4096, 'x'); };
  };
  const auto call_with = [](uint64_t nbytes) {
    return [=](const Attacked& to) { return Bytes() + to.header(FrameKind::kCall, 0, nbytes) + Bytes(4096, 'x'); };
  };
  const Lie lies[] = {
      {"the first message that there is not", payload_of(2, 0), CGX_ERROR_MISMATCH, kNotOurs},
      {"the last number of a message", payload_of(UINT32_MAX, 0), CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload that is too short by a byte", payload_of(0, -1), CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload that is too long by a byte", payload_of(0, 1), CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload of a terabyte", payload_of(0, 0, 1ull << 40), CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload of all that there can be", payload_of(0, 0, UINT64_MAX), CGX_ERROR_MISMATCH, kNotOurs},
      {"an empty payload", [](const Attacked& to) { return Bytes() + to.header(FrameKind::kPayload, 0, 0); },
       CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload that comes twice", [](const Attacked& to) { return to.payload(0) + to.payload(0); },
       CGX_ERROR_MISMATCH, kNotOurs},
      {"a payload of an earlier operation",
       [](const Attacked& to) {
         return Bytes() + make_header(FrameKind::kPayload, to.sequence_ - 1, to.fingerprint_, 0, to.nbytes_);
       },
       CGX_ERROR_MISMATCH, kStep},
      {"a payload of another call",
       [](const Attacked& to) {
         return Bytes() + make_header(FrameKind::kPayload, to.sequence_, to.fingerprint_ ^ 1, 0, to.nbytes_);
       },
       CGX_ERROR_MISMATCH, kStep},
      {"another call",
       [](const Attacked& to) {
         cgx_call other = to.call_;
         other.numel ^= 1;
         return to.call(other);
       },
       CGX_ERROR_MISMATCH, kStep},
      {"a call full of nonsense",
       [](const Attacked& to) {
         cgx_call other;
         std::memset(&other, 0x7F, sizeof other);
         return to.call(other);
       },
       CGX_ERROR_MISMATCH, kStep},
      {"kind 0", kind_of(0), CGX_ERROR_CONNECTION, kNoise},
      {"a question on a data connection", kind_of(int(FrameKind::kPing)), CGX_ERROR_CONNECTION, kNoise},
      {"poison on a data connection", kind_of(int(FrameKind::kPoison)), CGX_ERROR_CONNECTION, kNoise},
      {"kind 7", kind_of(7), CGX_ERROR_CONNECTION, kNoise},
      {"kind 255", kind_of(255), CGX_ERROR_CONNECTION, kNoise},
      {"an empty call", call_with(0), CGX_ERROR_CONNECTION, kNoise},
      {"a call that is too short by a byte", call_with(sizeof(cgx_call) - 1), CGX_ERROR_CONNECTION, kNoise},
      {"a call that is too long by a byte", call_with(sizeof(cgx_call) + 1), CGX_ERROR_CONNECTION, kNoise},
      {"a call of all that there can be", call_with(UINT64_MAX), CGX_ERROR_CONNECTION, kNoise},
  };
  for (const Lie& lie : lies) expect_refusal(lie);
}

void noise_on_a_data_connection_is_refused() {
  const auto refused = [](const char* name, const std::function<Bytes(const Attacked&)>& bytes) {
    expect_refusal({name, bytes, CGX_ERROR_CONNECTION, "that are no message of torch_cgx"});
  };
  for (uint64_t seed = 1; seed <= (quick ? 20 : 300); ++seed) {
    std::mt19937_64 random(seed);
    refused("random bytes", [&](const Attacked& to) {
      Bytes noise = random() % 2 ? to.call(to.call_) + to.payload(0) : Bytes();
      for (uint64_t n = sizeof(FrameHeader) + random() % 5000; n > 0; --n) noise.push_back(char(random()));
      return noise;
    });
  }
  for (size_t bit = 0; bit < 8 * sizeof(FrameHeader); bit += quick ? 13 : 1)
    refused("a header with a wrong bit", [bit](const Attacked& to) {
      Bytes frame = to.payload(0);
      frame[bit / 8] = char(frame[bit / 8] ^ (1 << bit % 8));
      return frame;
    });
}

// Payloads for an operation that has none; then a peer that ends in the middle of a frame.
void a_payload_for_an_agreement_is_refused() {
  Attacked attacked;
  Pending none;
  const int64_t number = submit(attacked.group(), call_of(1, 32), none, true);
  const FrameHeader header = attacked.hear_header(attacked.data(), FrameKind::kCall);
  attacked.say(attacked.data(),
               Bytes() + make_header(FrameKind::kPayload, header.sequence, header.fingerprint, 0, 64) + Bytes(64, 'x'));
  must_be(attacked.group(), 0, wait(attacked.group(), number, 100), {CGX_ERROR_MISMATCH}, "lost step");
}

void a_frame_without_an_end_is_noticed() {
  std::vector<Attacked> all(quick ? 10 : 50);  // at once: each needs a second
  std::mt19937_64 random(1);
  for (Attacked& attacked : all) {
    attacked.begin();
    const Bytes whole = attacked.call(attacked.call_) + attacked.payload(0) + attacked.payload(1);
    attacked.say(attacked.data(), whole.substr(0, random() % whole.size()));
    attacked.hang_up(0, 2);
  }
  for (Attacked& attacked : all) attacked.must_fail("a frame without an end", {CGX_ERROR_PEER_LOST}, "lost rank 1");
}

void lies_on_a_control_connection_are_refused() {
  const auto frame = [](FrameKind kind, uint64_t announced, const Bytes& body, uint64_t sequence = 1) {
    return Bytes() + make_header(kind, sequence, 0, 0, announced) + body;
  };
  const auto poison = [&](int32_t status, const Bytes& text) {
    const Bytes body = Bytes(reinterpret_cast<const char*>(&status), sizeof status) + text;
    return frame(FrameKind::kPoison, body.size(), body);
  };
  const struct {
    const char* name;
    Bytes bytes;
    int status;
    const char* text;
  } lies[] = {
      {"empty poison", frame(FrameKind::kPoison, 0, ""), CGX_ERROR_PEER_LOST, "no message of torch_cgx"},
      {"poison of 3 bytes", frame(FrameKind::kPoison, 3, "abc"), CGX_ERROR_PEER_LOST, "no message of torch_cgx"},
      {"poison that is too long", frame(FrameKind::kPoison, 2049, Bytes(99, 'x')), CGX_ERROR_PEER_LOST,
       "no message of torch_cgx"},
      {"poison of all that there can be", frame(FrameKind::kPoison, UINT64_MAX, Bytes(99, 'x')), CGX_ERROR_PEER_LOST,
       "no message of torch_cgx"},
      {"poison without a text", poison(CGX_ERROR_TIMEOUT, ""), CGX_ERROR_POISONED, "rank 1 failed"},
      {"text without an end", poison(CGX_ERROR_TIMEOUT, "." + Bytes(2043, 'x')), CGX_ERROR_POISONED, "xxxx"},
      {"text with an end inside", poison(CGX_ERROR_TIMEOUT, Bytes("why.\0abc", 8)), CGX_ERROR_POISONED, "why."},
      {"text of all bytes", poison(12345, Bytes(2044, '\xFF')), CGX_ERROR_POISONED, "rank 1 failed"},
      {"poison that says that all is well", poison(CGX_OK, "."), CGX_ERROR_POISONED, "rank 1 failed"},
      {"poison that says that it is pending", poison(CGX_PENDING, "."), CGX_ERROR_POISONED, "rank 1 failed"},
      {"a call on the control connection", frame(FrameKind::kCall, sizeof(cgx_call), Bytes(sizeof(cgx_call), 0)),
       CGX_ERROR_PEER_LOST, "no message of torch_cgx"},
      {"kind 77", frame(FrameKind(77), 0, ""), CGX_ERROR_PEER_LOST, "no message of torch_cgx"},
      {"a good-bye from before the operation", frame(FrameKind::kLeave, 0, "", 0), CGX_ERROR_PEER_LOST, "has left"},
  };
  for (const auto& lie : lies)
    for (size_t at_once : {size_t(1), lie.bytes.size()}) {
      Attacked attacked;
      attacked.begin();
      for (size_t i = 0; i < lie.bytes.size(); i += at_once)
        attacked.say(attacked.control(), lie.bytes.substr(i, at_once));
      attacked.must_fail(lie.name, {lie.status}, lie.text);
    }
  for (uint64_t seed = 1; seed <= (quick ? 10 : 200); ++seed) {
    std::mt19937_64 random(seed);
    Bytes noise;
    for (uint64_t n = sizeof(FrameHeader) + random() % 9000; n > 0; --n) noise.push_back(char(random()));
    Attacked attacked;
    attacked.begin();
    attacked.say(attacked.control(), noise);
    attacked.must_fail("noise", {CGX_ERROR_PEER_LOST}, "no message of torch_cgx");
  }
}

// Questions whose answers nobody reads, a good-bye with the highest number: the operation is done all the same.
void odd_but_harmless_control_frames_change_nothing() {
  Attacked attacked;
  attacked.begin();
  Bytes questions;
  const Bytes question = Bytes() + make_header(FrameKind::kPing, UINT64_MAX, 0, 0, 0);
  for (int i = 0; i < 20000; ++i) questions += question;
  attacked.say(attacked.control(), questions);
  attacked.say(attacked.control(), Bytes() + make_header(FrameKind::kLeave, UINT64_MAX, 0, 0, 0));
  attacked.answer();
}

// An answer that cannot be sent must not close the reader's ears: the cause is still to be read.
void the_cause_is_heard_though_the_peer_has_hung_up() {
  for (int i = 0; i < (quick ? 20 : 200); ++i) {
    Attacked attacked;
    attacked.begin();
    Bytes said;
    for (int ping = 0; ping < 300; ++ping) said = said + make_header(FrameKind::kPing, 1, 0, 0, 0);
    const int32_t status = CGX_ERROR_TIMEOUT;
    const Bytes body = Bytes(reinterpret_cast<const char*>(&status), sizeof status) + "the hook raised.";
    attacked.say(attacked.control(), said + make_header(FrameKind::kPoison, 1, 0, 0, body.size()) + body);
    attacked.hang_up();
    attacked.must_fail("a cause", {CGX_ERROR_POISONED}, "the hook raised");
  }
  for (int i = 0; i < (quick ? 20 : 200); ++i) {
    joint = {1, 1, 0};
    with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
      if (rank == 1) return cgx_group_fail(group, CGX_ERROR_POISONED, "the hook raised");
      Pending op = simple(rank, 2);
      must_be(group, rank, wait(group, submit_sra(group, op, i % 2), 100), {CGX_ERROR_POISONED}, "the hook raised");
    });
  }
}

// ---- 5 and 6: ranks of different speed ----

// All operations are queued at once, by ranks that start at different times.
void queued_by_ranks_of_different_speed(int64_t world, int64_t n, const Slices& slices, int64_t late_ms) {
  with_groups(linked_groups(world), [&](cgx_group* group, int64_t rank) {
    if (rank == world - 1) sleep_ms(late_ms);
    std::vector<Pending> ops;
    Pending agreement;
    for (int64_t i = 0; i < n; ++i) ops.push_back(filled(slices, rank, world, i % 2 ? 4 : 32, i));
    for (int64_t i = 0; i < n; ++i) {
      submit_sra(group, ops[size_t(i)], true);
      if (i % 5 == 2) submit(group, call_of(i, 32, 1), agreement, true);
    }
    if (rank == 0) sleep_ms(late_ms / 4);  // the group's thread does it all, or a caller the rest
    for (int64_t i = 0; i < n; ++i) {
      must_be(group, rank, wait(group, ops[size_t(i)].number, 100), {CGX_OK}, "");
      check_result(ops[size_t(i)], world, i);
    }
  });
}

void a_peer_far_ahead_and_a_late_rank() {
  for (int64_t world : {2, 3})
    for (int64_t streams : {1, 3})
      for (int buffer : {0, 1}) {
        joint = {streams, 1, buffer};
        queued_by_ranks_of_different_speed(world, 20, Slices(5, std::vector<int64_t>(size_t(world), 128)),
                                           quick ? 10 : 100);
      }
}

// Nothing that only one side needs keeps a sender from being operations ahead of its receiver.
void frames_of_later_operations_wait_in_the_socket() {
  for (int64_t streams : {1, 2})
    for (int buffer : {0, 1}) {
      joint = {streams, 1, buffer};
      with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
        if (rank == 1) sleep_ms(20);
        std::vector<Pending> ops;
        for (int64_t i = 0; i < 30; ++i) ops.push_back(one_way(rank, 1 + i % 4, 8 + 100 * (i % 3)));
        for (Pending& op : ops) submit_sra(group, op, true);
        for (Pending& op : ops) {
          must_be(group, rank, wait(group, op.number, 100), {CGX_OK}, "");
          check_one_way(op);
        }
      });
    }
}

void a_slow_reader_of_megabytes() {
  joint = {2, 1, 0};
  const Slices slices(8, {32768, 32768});  // 2 MB
  queued_by_ranks_of_different_speed(2, 3, slices, quick ? 200 : 1500);
}

void empty_payloads_are_received() {
  joint = {2, 1, 0};
  with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
    for (int64_t numel : {0, 8, 0}) {
      Pending op = one_way(rank, 3, numel);
      must_be(group, rank, wait(group, submit_sra(group, op, rank == 0), 100), {CGX_OK}, "");
      check_one_way(op);
    }
  });
}

// ---- 7: agreements ----

void an_agreement_is_done_when_all_have_called() {
  for (int64_t world : {2, 3}) {
    joint = {2, 1, 0};
    std::atomic<int64_t> called{0};
    with_groups(linked_groups(world), [&](cgx_group* group, int64_t rank) {
      for (int64_t round = 1; round <= (quick ? 30 : 200); ++round) {
        if (rank == round % world) sleep_ms(1);
        ++called;
        Pending none;
        const int64_t number = submit(group, call_of(round, 32), none, round % 2);
        must_be(group, rank, wait(group, number, round % 3 ? 100 : 0), {CGX_OK}, "");
        if (called.load() < round * world) fail("rank %d is done with %d too early", int(rank), int(round));
        Pending op = filled({std::vector<int64_t>(size_t(world), 64)}, rank, world, 4, round);
        must_be(group, rank, wait(group, submit_sra(group, op, false), 100), {CGX_OK}, "");
        check_result(op, world, round);
      }
    });
  }
}

void an_agreement_on_different_calls_is_a_mismatch() {
  for (int64_t odd = 0; odd < 3; ++odd) {
    joint = {1, 1, 0};
    with_groups(linked_groups(3), [&](cgx_group* group, int64_t rank) {
      Pending none;
      submit(group, call_of(1, 32), none, rank == 0);
      const int status = wait(group, submit(group, call_of(2, 32, rank == odd), none, rank == 1), 100);
      must_be(group, rank, status, {CGX_ERROR_MISMATCH}, "ranks have lost step at operation 2");
    });
  }
}

void an_agreement_with_a_collective_is_a_mismatch() {
  joint = {1, 1, 0};
  with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
    Pending op;
    if (rank == 1) op = simple(rank, 2);
    const int status = wait(group, submit(group, call_of(128, 4, int(rank)), op, true), 100);
    must_be(group, rank, status, {CGX_ERROR_MISMATCH}, "ranks have lost step at operation 1");
  });
}

// More than the board has entries.
void hundreds_of_agreements_are_queued() {
  for (bool mismatch : {false, true}) {
    joint = {1, 1, 0};
    with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
      if (rank == 1) sleep_ms(20);
      Pending none;
      int64_t last = 0;
      for (int i = 0; i < 300; ++i) {
        const bool odd = mismatch && rank == 1 && i == 100;
        last = submit(group, call_of(i, 32, odd), none, i == 299);
      }
      const int status = wait(group, last, 100);
      if (!mismatch) return must_be(group, rank, status, {CGX_OK}, "");
      must_be(group, rank, status, {CGX_ERROR_MISMATCH}, "ranks have lost step at operation 101");
    });
  }
}

// ---- 8: forked children ----

std::set<int> open_files() {
  std::set<int> files;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder))
    if (const int file = atoi(entry->d_name); entry->d_name[0] != '.' && file != dirfd(folder)) files.insert(file);
  closedir(folder);
  return files;
}

std::string target_of(int file) {
  char target[256] = "";
  const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), target, sizeof target - 1);
  return std::string(target, n < 0 ? 0 : size_t(n));
}

void must_end_well(pid_t child) {
  int status = -1;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    fail("a child ended with %d", status);
}

void a_child_holds_no_connection_and_closes_no_file_of_others() {
  joint = {2, 1, 0};
  const std::set<int> before = open_files();
  with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {
    Pending op = simple(rank, 2);
    must_be(group, rank, wait(group, submit_sra(group, op, true), 100), {CGX_OK}, "");
    if (rank == 1) {
      const pid_t child = fork();
      if (child == 0) {
        alarm(20);
        for (int file : open_files())
          if (!before.count(file) && target_of(file).rfind("socket:", 0) == 0)
            fail("the child holds %d, %s", file, target_of(file).c_str());
        // The numbers are free: what the child opens under them is its own, and the group must not close it.
        std::set<int> own;
        for (int i = 0; i < 20; ++i) own.insert(open("/dev/null", O_RDONLY));
        cgx_group_free(group);
        for (int file : own)
          if (fcntl(file, F_GETFD) < 0) fail("the group has closed %d in the child", file);
        _exit(0);
      }
      must_end_well(child);
    }
    Pending next = simple(rank, 2);  // the parent's connections are as before
    must_be(group, rank, wait(group, submit_sra(group, next, false), 100), {CGX_OK}, "");
  });
}

// Rank 1 is a process of its own, with a child that outlives it.
void a_killed_rank_is_noticed_though_its_child_lives() {
  joint = {2, 1, 0};
  std::vector<std::pair<int, int>> connections;
  for (int i = 0; i < 3; ++i) connections.push_back(connected());
  const auto [report, reported] = connected();
  const auto link = [&](cgx_group* group, int64_t peer, int side) {
    for (int64_t i = 0; i < 3; ++i) {
      const auto [one, other] = connections[size_t(i)];
      close(side == 0 ? other : one);
      if (cgx_group_link(group, peer, i < 2 ? i : -1, side == 0 ? one : other) != CGX_OK) fail("a link was refused");
    }
  };
  const pid_t rank_1 = fork();
  if (rank_1 == 0) {
    alarm(20);
    Group group = open_group(nullptr, 1, 2);
    link(group.get(), 0, 1);
    Pending op = simple(1, 2);
    must_be(group.get(), 1, wait(group.get(), submit_sra(group.get(), op, true), 100), {CGX_OK}, "");
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      for (;;) pause();
    }
    if (write(reported, &child, sizeof child) != sizeof child) fail("nobody listens");
    for (;;) pause();
  }
  Group group = open_group(nullptr, 0, 2);
  link(group.get(), 1, 0);
  Pending op = simple(0, 2), next = simple(0, 2);
  must_be(group.get(), 0, wait(group.get(), submit_sra(group.get(), op, true), 100), {CGX_OK}, "");
  pollfd readable = {report, POLLIN, 0};
  pid_t child = -1;
  if (poll(&readable, 1, kNoticeMs) <= 0 || read(report, &child, sizeof child) != sizeof child) fail("no child");
  const int64_t number = submit_sra(group.get(), next, true);
  sleep_ms(20);
  kill(rank_1, SIGKILL);
  const Stopwatch since;
  const int status = wait(group.get(), number, 100);
  since.must_be_early("to notice that a rank was killed");
  if (kill(child, 0) != 0) fail("the child did not outlive its parent");
  kill(child, SIGKILL);
  waitpid(rank_1, nullptr, 0);
  must_be(group.get(), 0, status, {CGX_ERROR_PEER_LOST}, "lost rank 1");
  close(report);
  close(reported);
}

// ---- 9: leaving ----

void a_rank_that_leaves_after_its_part_harms_nobody() {
  for (int turn = 0; turn < 200; ++turn) {
    const int64_t world = 2 + turn % 2;
    joint = {1 + turn % 3, 1, turn % 5 == 0};
    with_groups(linked_groups(world), [&](cgx_group* group, int64_t rank) {
      std::mt19937_64 own(uint64_t(turn * 3 + rank));
      for (uint64_t i = own() % 50; i > 0; --i) std::this_thread::yield();
      const bool wake = own() % 2;
      Pending op = filled(Slices(size_t(1 + turn % 4), std::vector<int64_t>(size_t(world), 64)), rank, world, 32, turn);
      Pending none;
      int64_t last = submit_sra(group, op, wake);
      if (turn % 4 == 1) last = submit(group, call_of(1, 32, 1), none, wake);
      must_be(group, rank, wait(group, last, own() % 3 ? 100 : 0), {CGX_OK}, "");
      check_result(op, world, turn);
    });
    if (turn % 4) continue;
    with_groups(linked_groups(2), [&](cgx_group* group, int64_t rank) {  // rank 0 never waits for rank 1
      Pending op = one_way(rank, 3, 64);
      if (rank == 1 && turn % 8) sleep_ms(1);
      must_be(group, rank, wait(group, submit_sra(group, op, turn % 3), 100), {CGX_OK}, "");
      check_one_way(op);
    });
  }
}

// Rank 1 has all that it needs and leaves, while rank 0 still has bytes for rank 2.
void a_sender_waits_for_a_slow_reader_though_a_fast_one_has_left() {
  for (int64_t slices : {1, 4}) {
    joint = {1, 1, 0};
    with_groups(linked_groups(3), [&](cgx_group* group, int64_t rank) {
      Pending op = one_way(rank, slices, 250000, 3);
      sleep_ms(rank == 0 ? 0 : rank == 1 ? 30 : 100);
      must_be(group, rank, wait(group, submit_sra(group, op, slices == 1), 100), {CGX_OK}, "");
      check_one_way(op);
    });
  }
}

// The good-bye comes at once, the last payloads need seconds.
void payloads_that_come_long_after_the_good_bye_are_waited_for() {
  joint = {2, 1, 0};
  RelayOptions options;
  options.most_nbytes = 4096;
  options.data_tick_ms = 25;
  Relay relay(options);
  with_groups(relay.groups(2), [&](cgx_group* group, int64_t rank) {
    Pending op = one_way(rank, 8, quick ? 6000 : 20000);
    const Stopwatch since;
    must_be(group, rank, wait(group, submit_sra(group, op, rank == 0), 100), {CGX_OK}, "");
    check_one_way(op);
    if (rank == 1 && since.ms() < 1000) fail("the relay was too fast: %d ms", int(since.ms()));
  });
}

struct Check {
  const char* name;
  void (*run)();
  bool forks = false;
};
constexpr Check kChecks[] = {
    {"every byte comes alone", every_byte_comes_alone},
    {"bytes are sent one at a time", one_byte_at_a_time},
    {"bytes are sent one to seven at a time", one_to_seven_bytes_at_a_time},
    {"a rank is cut off anywhere", a_rank_is_cut_off_anywhere},
    {"a data connection is shut while the control connection lives",
     a_data_connection_is_shut_while_the_control_connection_lives},
    {"an honest peer is understood", an_honest_peer_is_understood},
    {"lies on a data connection are refused", lies_on_a_data_connection_are_refused},
    {"noise on a data connection is refused", noise_on_a_data_connection_is_refused},
    {"a payload for an agreement is refused", a_payload_for_an_agreement_is_refused},
    {"a frame without an end is noticed", a_frame_without_an_end_is_noticed},
    {"lies on a control connection are refused", lies_on_a_control_connection_are_refused},
    {"odd but harmless control frames change nothing", odd_but_harmless_control_frames_change_nothing},
    {"the cause is heard though the peer has hung up", the_cause_is_heard_though_the_peer_has_hung_up},
    {"a peer far ahead and a late rank", a_peer_far_ahead_and_a_late_rank},
    {"frames of later operations wait in the socket", frames_of_later_operations_wait_in_the_socket},
    {"a slow reader of megabytes", a_slow_reader_of_megabytes},
    {"empty payloads are received", empty_payloads_are_received},
    {"an agreement is done when all have called", an_agreement_is_done_when_all_have_called},
    {"an agreement on different calls is a mismatch", an_agreement_on_different_calls_is_a_mismatch},
    {"an agreement with a collective is a mismatch", an_agreement_with_a_collective_is_a_mismatch},
    {"hundreds of agreements are queued", hundreds_of_agreements_are_queued},
    {"a child holds no connection and closes no file of others",
     a_child_holds_no_connection_and_closes_no_file_of_others, true},
    {"a killed rank is noticed though its child lives", a_killed_rank_is_noticed_though_its_child_lives, true},
    {"a rank that leaves after its part harms nobody", a_rank_that_leaves_after_its_part_harms_nobody},
    {"a sender waits for a slow reader though a fast one has left",
     a_sender_waits_for_a_slow_reader_though_a_fast_one_has_left},
    {"payloads that come long after the good-bye are waited for",
     payloads_that_come_long_after_the_good_bye_are_waited_for},
};

}  // namespace

int main(int argc, char** argv) {
  const char* only = getenv("CGX_TEST_ONLY");
  read_arguments(argc, argv);
  for (const Check& check : kChecks) {
    if (only && !strstr(check.name, only)) continue;
    if (check.forks && kThreadSanitizer) {
      printf("skipped, forks: %s\n", check.name);
      continue;
    }
    const Stopwatch since;
    check.run();
    printf("ok: %s (%d ms)\n", check.name, int(since.ms()));
    fflush(stdout);
  }
  return 0;
}
