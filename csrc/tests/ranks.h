// What the tests of groups are made of: plans, ranks as threads, submitting and waiting, over the C ABI.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cgx.h"

namespace {

constexpr int64_t kLimitNbytes = 8 << 20;
constexpr int64_t kTimeoutMs = 60000;
constexpr cgx_means kMeans = {CGX_SCALAR, 1};

// Tests say 32 bits where values are raw.
int64_t kind_of(int64_t bits) { return bits == 32 ? CGX_RAW : CGX_MAXMIN; }

// How ranks are joined: 0 streams share memory; else each pair has so many connections for data. `lag`: how many slices
// later the next level of a slice is run.
struct Joint {
  int64_t streams = 0;
  int64_t lag = 1;
  int buffer_nbytes = 0;   // of a socket; 0: the system's
  int64_t node_ranks = 1;  // with streams: so many ranks, one after the other, share memory
  bool by_sockets = true;
  // Whether what is exact is sent from the tensor, and received there.
  bool in_place(int64_t bits) const { return bits == 32 && streams && by_sockets && node_ranks == 1; }
  bool is_home(int64_t a, int64_t b) const { return a == b || !streams || a / node_ranks == b / node_ranks; }
};
Joint joint;

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  abort();
}

using Slices = std::vector<std::vector<int64_t>>;  // by slice and chunk: how many values; 0: an empty chunk

struct PlanDeleter {
  void operator()(cgx_plan* plan) const { cgx_plan_free(plan); }
};
using Plan = std::unique_ptr<cgx_plan, PlanDeleter>;

// Steps with their level: linked ranks run those of several slices in turns.
class Steps {
 public:
  void push_back(const cgx_step& step, int64_t slice, int64_t level) {
    steps_.push_back(step);
    ticks_.push_back(joint.streams ? slice + joint.lag * level : 0);
    depth_ = std::max(depth_, level);
  }
  cgx_step& back() { return steps_.back(); }
  std::vector<cgx_step> in_order() const {
    std::vector<size_t> order(steps_.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) { return ticks_[a] < ticks_[b]; });
    std::vector<cgx_step> sorted;
    for (size_t i : order) sorted.push_back(steps_[i]);
    return sorted;
  }
  int64_t ring() const { return joint.streams ? std::max<int64_t>(2, depth_ * joint.lag + 1) : 2; }

 private:
  std::vector<cgx_step> steps_;
  std::vector<int64_t> ticks_;
  int64_t depth_ = 0;
};

// Scatter-reduce-allgather, as src/torch_cgx/algorithms has it.
Plan sra(const Slices& slices, int64_t rank, int64_t world, int64_t bits) {
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs;
  Steps steps;
  int64_t value = 0, part_nbytes = 0, slice = 0;
  for (const std::vector<int64_t>& chunks : slices) {
    const int64_t first_piece = static_cast<int64_t>(pieces.size()), first_slot = static_cast<int64_t>(slots.size());
    int64_t offset = 0;
    for (int64_t chunk = 0; chunk < world; ++chunk) {
      pieces.push_back({value, chunks[chunk], 0, 0, 64, bits, kind_of(bits)});
      value += chunks[chunk];
      const bool in_place = joint.in_place(bits);
      const int64_t nbytes = in_place        ? 4 * chunks[chunk]
                             : chunks[chunk] ? cgx_piece_payload_nbytes(&pieces.back(), CGX_FLOAT32)
                                             : 0;
      for (int64_t writer = 0; writer < world; ++writer) {  // the owner's slot is the sum's
        const int64_t room = (nbytes + 63) / 64 * 64;
        if (in_place && (writer == rank || writer == chunk)) {  // what this rank sends, and sums
          const int64_t home = writer == rank ? CGX_HOME_VALUES : CGX_HOME_RESULT;
          slots.push_back({4 * pieces.back().offset, nbytes, writer, chunk, slice, home});
          continue;
        }
        if (joint.node_ranks == 1) {
          slots.push_back({offset, nbytes, writer, chunk, slice, CGX_HOME_MEMORY});
          offset += room;
          continue;
        }
        // A sum from elsewhere comes to each rank of a node, and has a place for each.
        const bool comes = !joint.is_home(writer, rank);
        const int64_t here = !comes ? writer : writer == chunk ? rank : joint.is_home(chunk, rank) ? chunk : writer;
        const int64_t place = comes && writer == chunk ? rank % joint.node_ranks : 0;
        slots.push_back({offset + place * room, nbytes, here, chunk * world + writer, slice, CGX_HOME_MEMORY});
        offset += joint.node_ranks * room;
      }
    }
    part_nbytes = std::max(part_nbytes, offset);
    const auto slot = [&](int64_t writer, int64_t chunk) { return first_slot + chunk * world + writer; };
    int64_t level = 0;
    const auto add = [&](int64_t kind, int64_t slot, int64_t peer, int64_t chunk) {
      steps.push_back({kind, slot, peer, first_piece + chunk, 1, 0, 0, 0}, slice, level);
    };
    for (int64_t d = 1; d < world; ++d)
      if (const int64_t owner = (rank + d) % world; chunks[owner]) {
        add(CGX_STEP_ENCODE, slot(rank, owner), 0, owner);
        add(CGX_STEP_SEND, slot(rank, owner), owner, owner);
      }
    level = 1;
    if (chunks[rank]) {
      for (int64_t d = world - 1; d > 0; --d)
        add(CGX_STEP_RECEIVE, slot((rank + d) % world, rank), (rank + d) % world, rank);
      add(CGX_STEP_REDUCE, slot(rank, rank), 0, rank);
      steps.back().first_input = static_cast<int64_t>(inputs.size());
      steps.back().n_inputs = world - 1;
      for (int64_t peer = 0; peer < world; ++peer)
        if (peer != rank) inputs.push_back(slot(peer, rank));
      for (int64_t d = 1; d < world; ++d) add(CGX_STEP_SEND, slot(rank, rank), (rank + d) % world, rank);
    }
    level = 2;
    for (int64_t d = 1; d < world; ++d)
      if (const int64_t owner = (rank + d) % world; chunks[owner]) {
        add(CGX_STEP_RECEIVE, slot(owner, owner), owner, owner);
        add(CGX_STEP_DECODE, slot(owner, owner), 0, owner);
      }
    ++slice;
  }
  const std::vector<cgx_step> ordered = steps.in_order();
  int status;
  Plan plan(cgx_plan_new(world, CGX_FLOAT32, pieces.data(), int64_t(pieces.size()), slots.data(), int64_t(slots.size()),
                         inputs.data(), int64_t(inputs.size()), ordered.data(), int64_t(ordered.size()), slice,
                         steps.ring(), part_nbytes, joint.node_ranks == 1 ? world : world * world, &status));
  if (!plan) fail("an inconsistent plan");
  return plan;
}

// Reduce-scatter, as src/torch_cgx/algorithms has it, of slices of so many values of every share.
[[maybe_unused]] Plan reduce_scatter(const std::vector<int64_t>& slices, int64_t rank, int64_t world, int64_t bits) {
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs;
  Steps steps;
  int64_t start = 0, part_nbytes = 0, share_numel = 0, slice = 0;
  for (int64_t numel : slices) share_numel += numel;
  for (int64_t numel : slices) {
    const int64_t first_slot = static_cast<int64_t>(slots.size());
    int64_t offset = 0;
    for (int64_t owner = 0; owner < world; ++owner)
      for (int64_t writer = 0; writer < world; ++writer) {  // the owner's is not used
        const cgx_piece piece = {0, numel, 0, 0, 64, bits, kind_of(bits)};
        const int64_t nbytes = writer == owner ? 0 : cgx_piece_payload_nbytes(&piece, CGX_FLOAT32);
        const bool comes = joint.is_home(owner, rank) && !joint.is_home(writer, rank);
        const int64_t flag = joint.node_ranks == 1 ? owner : owner * world + writer;
        slots.push_back({offset, nbytes, comes && joint.node_ranks > 1 ? owner : writer, flag, slice, CGX_HOME_MEMORY});
        offset += (nbytes + 63) / 64 * 64;
      }
    part_nbytes = std::max(part_nbytes, offset);
    const auto slot = [&](int64_t writer, int64_t owner) { return first_slot + owner * world + writer; };
    int64_t level = 0;
    const auto add = [&](int64_t kind, int64_t slot, int64_t peer, int64_t at) {
      steps.push_back({kind, slot, peer, static_cast<int64_t>(pieces.size()), 1, 0, 0, 0}, slice, level);
      pieces.push_back({at + start, numel, 0, 0, 64, bits, kind_of(bits)});
    };
    for (int64_t d = 1; d < world; ++d) {
      const int64_t owner = (rank + d) % world;
      add(CGX_STEP_ENCODE, slot(rank, owner), 0, owner * share_numel);
      add(CGX_STEP_SEND, slot(rank, owner), owner, 0);
    }
    level = 1;
    for (int64_t d = world - 1; d > 0; --d)
      add(CGX_STEP_RECEIVE, slot((rank + d) % world, rank), (rank + d) % world, 0);
    add(CGX_STEP_SUM, slot(rank == 0 ? 1 : 0, rank), 0, 0);
    steps.back().first_input = static_cast<int64_t>(inputs.size());
    steps.back().n_inputs = world - 1;
    for (int64_t peer = 0; peer < world; ++peer)
      if (peer != rank) inputs.push_back(slot(peer, rank));
    ++slice;
    start += numel;
  }
  const std::vector<cgx_step> ordered = steps.in_order();
  int status;
  Plan plan(cgx_plan_new(world, CGX_FLOAT32, pieces.data(), int64_t(pieces.size()), slots.data(), int64_t(slots.size()),
                         inputs.data(), int64_t(inputs.size()), ordered.data(), int64_t(ordered.size()), slice,
                         steps.ring(), part_nbytes, joint.node_ranks == 1 ? world : world * world, &status));
  if (!plan) fail("an inconsistent plan");
  return plan;
}

int64_t numel_of(const Slices& slices) {
  int64_t numel = 0;
  for (const auto& chunks : slices)
    for (int64_t n : chunks) numel += n;
  return numel;
}

cgx_call call_of(int64_t numel, int64_t bits, int operation = 0) {
  cgx_call call = {};
  call.operation = operation;
  call.root = -1;
  call.bits = static_cast<int32_t>(bits);
  call.block = 64;
  call.ndim = 1;
  call.numel = call.dims[0] = numel;
  return call;
}

struct GroupDeleter {
  void operator()(cgx_group* group) const { cgx_group_free(group); }
};
using Group = std::unique_ptr<cgx_group, GroupDeleter>;

// name NULL: without shared memory.
Group open_group(const char* name, int64_t rank, int64_t world) {
  std::vector<int32_t> global_ranks, nodes;
  for (int32_t r = 0; r < world; ++r) {
    global_ranks.push_back(r);
    nodes.push_back(joint.streams ? static_cast<int32_t>(r / joint.node_ranks) : 0);
  }
  char error[512] = "";
  Group group(cgx_group_open(name, rank, world, nodes.data(), global_ranks.data(), "all_reduce\nbroadcast", "float32",
                             "SUM", &kMeans, kLimitNbytes, error, sizeof error));
  if (!group) fail("rank %d cannot open the group: %s", int(rank), error);
  return group;
}

std::pair<int, int> connected() {
  int files[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, files) != 0) fail("no pair of sockets");
  for (int file : files)
    if (joint.buffer_nbytes) setsockopt(file, SOL_SOCKET, SO_SNDBUF, &joint.buffer_nbytes, sizeof joint.buffer_nbytes);
  return {files[0], files[1]};
}

// A pipe per rank, by which the others of its node wake it.
void hang_bells(const std::vector<Group>& groups) {
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    int files[2];
    if (pipe2(files, O_CLOEXEC | O_NONBLOCK) != 0) fail("no pipe");
    for (size_t peer = 0; peer < groups.size(); ++peer) {
      if (!joint.is_home(int64_t(rank), int64_t(peer))) continue;
      const int file = peer == rank ? files[0] : dup(files[1]);
      if (cgx_group_bell(groups[peer].get(), int64_t(rank), file) != CGX_OK) fail("a bell was refused");
    }
    close(files[1]);
  }
}

// Makes the connection of two ranks: the end of each. stream -1: the control connection.
using Connect = std::function<std::pair<int, int>(int64_t a, int64_t b, int64_t stream)>;

// Links two ranks by something else than a connection.
using LinkData = std::function<void(const std::vector<Group>& groups, int64_t a, int64_t b, int64_t stream)>;

std::vector<Group> linked_groups(
    int64_t world, const Connect& connect = [](int64_t, int64_t, int64_t) { return connected(); },
    const LinkData& link_data = nullptr) {
  std::vector<Group> groups;
  char name[64], error[512];
  for (int64_t rank = 0; rank < world; ++rank) {
    const bool shares = joint.node_ranks > 1;
    const bool is_first = rank % joint.node_ranks == 0;
    if (shares && is_first && cgx_control_create(world, name, sizeof name, error, sizeof error) != CGX_OK)
      fail("%s", error);
    groups.push_back(open_group(shares ? name : nullptr, rank, world));
    if (shares && (rank + 1 == world || (rank + 1) % joint.node_ranks == 0)) cgx_control_unlink(name);
  }
  if (joint.node_ranks > 1) hang_bells(groups);
  for (int64_t a = 0; a < world; ++a)
    for (int64_t b = a + 1; b < world; ++b)
      for (int64_t stream = 0; stream <= joint.streams && !joint.is_home(a, b); ++stream) {
        const int64_t kind = stream == joint.streams ? -1 : stream;
        if (link_data && kind >= 0) {
          link_data(groups, a, b, kind);
          continue;
        }
        const auto [one, other] = connect(a, b, kind);
        if (cgx_group_link(groups[static_cast<size_t>(a)].get(), b, kind, one) != CGX_OK ||
            cgx_group_link(groups[static_cast<size_t>(b)].get(), a, kind, other) != CGX_OK)
          fail("a link was refused");
      }
  return groups;
}

std::vector<Group> sharing_groups(int64_t world) {
  char name[64], error[512];
  if (cgx_control_create(world, name, sizeof name, error, sizeof error) != CGX_OK) fail("%s", error);
  std::vector<Group> groups;
  for (int64_t rank = 0; rank < world; ++rank) groups.push_back(open_group(name, rank, world));
  cgx_control_unlink(name);
  return groups;
}

std::vector<Group> groups_of(int64_t world) { return joint.streams ? linked_groups(world) : sharing_groups(world); }

// One thread per rank, each with a group of its own.
void with_groups(const std::vector<Group>& groups, const std::function<void(cgx_group*, int64_t)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < groups.size(); ++rank)
    threads.emplace_back([&, rank] {
      body(groups[rank].get(), static_cast<int64_t>(rank));
      cgx_group_close(groups[rank].get());
    });
  for (std::thread& thread : threads) thread.join();
}

[[maybe_unused]] void with_ranks(int64_t world, const std::function<void(cgx_group*, int64_t)>& body) {
  with_groups(groups_of(world), body);
}

struct Pending {
  Plan plan;
  std::vector<float> values, share;
  Slices slices;
  int64_t bits, number;
  double scale = 1;
};

int64_t submit(cgx_group* group, const cgx_call& call, Pending& op, bool wake, int64_t timeout_ms = kTimeoutMs) {
  cgx_submission what = {};
  what.plan = op.plan.get();
  what.values = op.values.data();
  what.share = op.share.empty() ? nullptr : op.share.data();
  what.scale = op.scale;
  what.timeout_ms = timeout_ms;
  what.wake = wake;
  return op.number = cgx_group_submit(group, &call, &what);
}

int wait(cgx_group* group, int64_t number, int64_t slice_ms) {
  if (number < 0) return static_cast<int>(number);
  for (;;) {
    const int status = cgx_group_wait(group, number, slice_ms);
    if (status != CGX_PENDING) return status;
    if (slice_ms == 0) std::this_thread::yield();
  }
}

void must_be(cgx_group* group, int64_t rank, int status, std::initializer_list<int> expected, const char* text) {
  char error[2048];
  cgx_group_error(group, error, sizeof error);
  bool fits = strstr(error, text) != nullptr;
  bool known = false;
  for (int e : expected) known = known || status == e;
  if (!known || !fits) fail("rank %d: status %d, \"%s\"; expected \"%s\"", int(rank), status, error, text);
}

float value_of(int64_t rank, int64_t i, int64_t round) { return float((i * 7 + rank * 3 + round) % 17 - 8) / 8; }

void check_result(const Pending& op, int64_t world, int64_t round) {
  // Each of world - 1 contributions loses half a unit of 2/15, the sum half of one of 2 world/15 and a little.
  const float allowed = op.bits == 32 ? 0 : float(world - 1) / 15 + float(world) / 15 * 1.2f;
  for (size_t i = 0; i < op.values.size(); ++i) {
    float sum = 0;
    for (int64_t rank = 0; rank < world; ++rank) sum += value_of(rank, int64_t(i), round);
    if (!(std::fabs(op.values[i] - sum) <= allowed))
      fail("round %d, value %d: %f instead of %f", int(round), int(i), op.values[i], sum);
  }
}

Pending simple(int64_t rank, int64_t world, int64_t numel = 64) {
  Pending op;
  op.slices = {std::vector<int64_t>(static_cast<size_t>(world), numel)};
  op.bits = 4;
  op.plan = sra(op.slices, rank, world, op.bits);
  op.values.assign(static_cast<size_t>(numel * world), 1.0f);
  return op;
}

// Results are right and have the same bits on all ranks. Sizes rise, so that the segment grows; chunks are empty now
// and then; some calls wait at once, some are left to the group's thread, some are left in the middle.
void mixed_operations(const std::vector<Group>& groups, int64_t rounds, int64_t largest) {
  const auto world = static_cast<int64_t>(groups.size());
  std::vector<std::vector<std::vector<float>>> seen(static_cast<size_t>(world));
  with_groups(groups, [&](cgx_group* group, int64_t rank) {
    std::mt19937_64 agreed(42), own(static_cast<uint64_t>(rank) + 1);
    std::vector<Pending> pending;
    std::vector<int64_t> rounds_of;
    for (int64_t round = 0; round < rounds; ++round) {
      Pending op;
      const int64_t most = 1 + round * largest / rounds;
      op.bits = agreed() % 2 ? 4 : 32;
      const int64_t unit = op.bits == 32 ? 7 : 8;  // what is exact may be cut anywhere, and is padded
      for (uint64_t n = 1 + agreed() % 4; n > 0; --n) {
        std::vector<int64_t> chunks;
        for (int64_t c = 0; c < world; ++c)
          chunks.push_back(agreed() % 3 ? unit * (1 + int64_t(agreed() % uint64_t(most))) : 0);
        chunks[agreed() % uint64_t(world)] = 8;
        op.slices.push_back(chunks);
      }
      const bool left = agreed() % 3 == 0;
      const int64_t numel = numel_of(op.slices);
      op.plan = sra(op.slices, rank, world, op.bits);
      for (int64_t i = 0; i < numel; ++i) op.values.push_back(value_of(rank, i, round));
      pending.push_back(std::move(op));
      rounds_of.push_back(round);
      const bool wake = left || own() % 4 == 0;
      submit(group, call_of(numel, pending.back().bits), pending.back(), wake);
      if (left && pending.size() < 5) continue;
      const int64_t slices_ms[] = {0, 1, 100};
      const int64_t slice_ms = slices_ms[own() % 3];
      std::thread other;  // a second caller, which competes for the role
      if (pending.size() > 1)
        other = std::thread([&] {
          if (wait(group, pending[0].number, 100) != CGX_OK) fail("the second caller's wait failed");
        });
      const int status = wait(group, pending.back().number, slice_ms);
      if (other.joinable()) other.join();
      must_be(group, rank, status, {CGX_OK}, "");
      for (size_t i = 0; i < pending.size(); ++i) {
        check_result(pending[i], world, rounds_of[i]);
        seen[static_cast<size_t>(rank)].push_back(pending[i].values);
      }
      pending.clear();
      rounds_of.clear();
    }
    // What was left to the thread last.
    for (size_t i = 0; i < pending.size(); ++i) {
      must_be(group, rank, wait(group, pending[i].number, 100), {CGX_OK}, "");
      check_result(pending[i], world, rounds_of[i]);
      seen[static_cast<size_t>(rank)].push_back(pending[i].values);
    }
    cgx_stats stats;
    cgx_group_stats(group, &stats);
    if (stats.operations != rounds) fail("rank %d counts %d operations", int(rank), int(stats.operations));
  });
  for (int64_t rank = 1; rank < world; ++rank)
    if (seen[static_cast<size_t>(rank)] != seen[0]) fail("rank %d has other bits than rank 0", int(rank));
}

}  // namespace
