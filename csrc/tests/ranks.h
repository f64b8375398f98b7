// What the tests of groups are made of: plans, ranks as threads, submitting and waiting, over the C ABI.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cgx.h"

namespace {

constexpr int64_t kLimitNbytes = 8 << 20;
constexpr int64_t kTimeoutMs = 60000;
constexpr cgx_means kMeans = {CGX_SCALAR, 1};

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

// Scatter-reduce-allgather, as src/torch_cgx/algorithms has it.
Plan sra(const Slices& slices, int64_t rank, int64_t world, int64_t bits) {
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs, slice_steps = {0};
  std::vector<cgx_step> steps;
  int64_t value = 0, half_nbytes = 0;
  for (const std::vector<int64_t>& chunks : slices) {
    const int64_t first_piece = static_cast<int64_t>(pieces.size()), first_slot = static_cast<int64_t>(slots.size());
    int64_t offset = 0;
    for (int64_t chunk = 0; chunk < world; ++chunk) {
      pieces.push_back({value, chunks[chunk], 0, 0, 64, bits});
      value += chunks[chunk];
      const int64_t nbytes = chunks[chunk] ? cgx_piece_payload_nbytes(&pieces.back(), CGX_FLOAT32) : 0;
      for (int64_t writer = 0; writer < world; ++writer) {  // the owner's slot is the sum's
        slots.push_back({offset, nbytes, writer, chunk});
        offset += (nbytes + 63) / 64 * 64;
      }
    }
    half_nbytes = std::max(half_nbytes, offset);
    const auto slot = [&](int64_t writer, int64_t chunk) { return first_slot + chunk * world + writer; };
    const auto add = [&](int64_t kind, int64_t slot, int64_t peer, int64_t chunk) {
      steps.push_back({kind, slot, peer, first_piece + chunk, 1, 0, 0, 0});
    };
    for (int64_t d = 1; d < world; ++d)
      if (const int64_t owner = (rank + d) % world; chunks[owner]) {
        add(CGX_STEP_ENCODE, slot(rank, owner), 0, owner);
        add(CGX_STEP_SEND, slot(rank, owner), owner, owner);
      }
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
    for (int64_t d = 1; d < world; ++d)
      if (const int64_t owner = (rank + d) % world; chunks[owner]) {
        add(CGX_STEP_RECEIVE, slot(owner, owner), owner, owner);
        add(CGX_STEP_DECODE, slot(owner, owner), 0, owner);
      }
    slice_steps.push_back(static_cast<int64_t>(steps.size()));
  }
  Plan plan(cgx_plan_new(world, CGX_FLOAT32, pieces.data(), int64_t(pieces.size()), slots.data(), int64_t(slots.size()),
                         inputs.data(), int64_t(inputs.size()), steps.data(), int64_t(steps.size()), slice_steps.data(),
                         int64_t(slices.size()), half_nbytes));
  if (!plan) fail("an inconsistent plan");
  return plan;
}

// Reduce-scatter, as src/torch_cgx/algorithms has it, of slices of so many values of every share.
Plan reduce_scatter(const std::vector<int64_t>& slices, int64_t rank, int64_t world, int64_t bits) {
  std::vector<cgx_piece> pieces;
  std::vector<cgx_slot> slots;
  std::vector<int64_t> inputs, slice_steps = {0};
  std::vector<cgx_step> steps;
  int64_t start = 0, half_nbytes = 0, share_numel = 0;
  for (int64_t numel : slices) share_numel += numel;
  for (int64_t numel : slices) {
    const int64_t first_slot = static_cast<int64_t>(slots.size());
    int64_t offset = 0;
    for (int64_t owner = 0; owner < world; ++owner)
      for (int64_t writer = 0; writer < world; ++writer) {  // the owner's is not used
        const cgx_piece piece = {0, numel, 0, 0, 64, bits};
        const int64_t nbytes = writer == owner ? 0 : cgx_piece_payload_nbytes(&piece, CGX_FLOAT32);
        slots.push_back({offset, nbytes, writer, owner});
        offset += (nbytes + 63) / 64 * 64;
      }
    half_nbytes = std::max(half_nbytes, offset);
    const auto slot = [&](int64_t writer, int64_t owner) { return first_slot + owner * world + writer; };
    const auto add = [&](int64_t kind, int64_t slot, int64_t peer, int64_t at) {
      steps.push_back({kind, slot, peer, static_cast<int64_t>(pieces.size()), 1, 0, 0, 0});
      pieces.push_back({at + start, numel, 0, 0, 64, bits});
    };
    for (int64_t d = 1; d < world; ++d) {
      const int64_t owner = (rank + d) % world;
      add(CGX_STEP_ENCODE, slot(rank, owner), 0, owner * share_numel);
      add(CGX_STEP_SEND, slot(rank, owner), owner, 0);
    }
    for (int64_t d = world - 1; d > 0; --d)
      add(CGX_STEP_RECEIVE, slot((rank + d) % world, rank), (rank + d) % world, 0);
    add(CGX_STEP_SUM, slot(rank == 0 ? 1 : 0, rank), 0, 0);
    steps.back().first_input = static_cast<int64_t>(inputs.size());
    steps.back().n_inputs = world - 1;
    for (int64_t peer = 0; peer < world; ++peer)
      if (peer != rank) inputs.push_back(slot(peer, rank));
    slice_steps.push_back(static_cast<int64_t>(steps.size()));
    start += numel;
  }
  Plan plan(cgx_plan_new(world, CGX_FLOAT32, pieces.data(), int64_t(pieces.size()), slots.data(), int64_t(slots.size()),
                         inputs.data(), int64_t(inputs.size()), steps.data(), int64_t(steps.size()), slice_steps.data(),
                         int64_t(slices.size()), half_nbytes));
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

Group open_group(const std::string& name, int64_t rank, int64_t world) {
  std::vector<int32_t> global_ranks;
  for (int32_t r = 0; r < world; ++r) global_ranks.push_back(r);
  char error[512] = "";
  Group group(cgx_group_open(name.c_str(), rank, world, global_ranks.data(), "all_reduce\nbroadcast", "float32", "SUM",
                             &kMeans, kLimitNbytes, error, sizeof error));
  if (!group) fail("rank %d cannot open the group: %s", int(rank), error);
  return group;
}

// One thread a rank, each with a group of its own over one control segment.
void with_ranks(int64_t world, const std::function<void(cgx_group*, int64_t)>& body) {
  char name[64], error[512];
  if (cgx_control_create(world, name, sizeof name, error, sizeof error) != CGX_OK) fail("%s", error);
  std::vector<Group> groups;
  for (int64_t rank = 0; rank < world; ++rank) groups.push_back(open_group(name, rank, world));
  cgx_control_unlink(name);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      body(groups[static_cast<size_t>(rank)].get(), rank);
      cgx_group_close(groups[static_cast<size_t>(rank)].get());
    });
  for (std::thread& thread : threads) thread.join();
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

}  // namespace
