// The groups' part of the C ABI: no exception passes it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "group.h"

struct cgx_group {
  cgx::Group inner;
  const cgx::ControlLayout layout;
};

namespace {

void put(const std::string& text, char* out, int64_t nbytes) {
  if (nbytes <= 0) return;
  const size_t length = std::min(text.size(), static_cast<size_t>(nbytes) - 1);
  std::memcpy(out, text.data(), length);
  out[length] = 0;
}

}  // namespace

int cgx_control_create(int64_t world, char* name, int64_t name_nbytes, char* error, int64_t error_nbytes) try {
  if (world < 2) return CGX_ERROR_ARGUMENT;
  const cgx::ControlLayout layout(world);
  cgx::Segment segment;
  std::string segment_name;
  const std::string problem = cgx::Segment::create(layout.nbytes, &segment, &segment_name);
  put(problem, error, error_nbytes);
  if (!problem.empty()) return CGX_ERROR_SHARED_MEMORY;
  // A new file is all zeros, which is the state that everything else starts from.
  auto* control = reinterpret_cast<cgx::Control*>(segment.data());
  control->world = world;
  control->flags_per_rank = layout.flags_per_rank;
  control->magic = cgx::kMagic;
  put(segment_name, name, name_nbytes);
  return CGX_OK;
} catch (const std::exception& e) {
  put(e.what(), error, error_nbytes);
  return CGX_ERROR_SHARED_MEMORY;
}

void cgx_control_unlink(const char* name) { cgx::Segment::unlink(name); }

cgx_group* cgx_group_open(const char* name, int64_t rank, int64_t world, const int32_t* nodes,
                          const int32_t* global_ranks, const char* operation_names, const char* dtype_names,
                          const char* reduction_names, const cgx_means* means, int64_t segment_limit_nbytes,
                          char* error, int64_t error_nbytes) try {
  const cgx::ControlLayout layout(world);
  cgx::Segment segment, elsewhere;
  std::vector<int64_t> home;
  std::string problem;
  if (rank < 0 || rank >= world)
    problem = "rank " + std::to_string(rank) + " is none of " + std::to_string(world);
  else if (name)
    problem = cgx::Segment::open(name, layout.nbytes, &segment);
  else
    problem = cgx::Segment::make_private(layout.nbytes, &segment);
  if (problem.empty() && name) {
    const auto* control = reinterpret_cast<const cgx::Control*>(segment.data());
    if (control->magic != cgx::kMagic || control->world != world)
      problem = "the control segment is of another version or group";
  }
  if (problem.empty())
    for (int64_t peer = 0; peer < world; ++peer)
      if (peer == rank || (name && nodes[peer] == nodes[rank])) home.push_back(peer);
  if (problem.empty() && static_cast<int64_t>(home.size()) < world)
    problem = cgx::Segment::make_private(layout.nbytes, &elsewhere);
  put(problem, error, error_nbytes);
  if (!problem.empty()) return nullptr;
  std::vector<bool> shares_memory;
  for (int64_t peer = 0; peer < world; ++peer)
    shares_memory.push_back(std::count(nodes, nodes + world, nodes[peer]) > 1);
  std::unique_ptr<cgx_group> group(
      new cgx_group{{std::move(segment), std::move(elsewhere), std::move(home), std::move(shares_memory), rank, world,
                     global_ranks, *means, segment_limit_nbytes},
                    layout});
  group->inner.start(operation_names, dtype_names, reduction_names);
  return group.release();
} catch (const std::exception& e) {
  put(e.what(), error, error_nbytes);
  return nullptr;
}

int cgx_group_link(cgx_group* group, int64_t peer, int64_t stream, int fd) try {
  return group->inner.link(peer, stream, fd);
} catch (const std::exception&) {
  return CGX_ERROR_ARGUMENT;
}

int cgx_group_link_mpi(cgx_group* group, int64_t peer, cgx_mpi* mpi, int tag) try {
  return group->inner.link_by_mpi(peer, mpi, tag);
} catch (const std::exception&) {
  return CGX_ERROR_ARGUMENT;
}

void cgx_mpi_stop() { cgx::MpiProgress::stop(); }

int cgx_group_bell(cgx_group* group, int64_t peer, int fd) try {
  return group->inner.set_bell(peer, fd);
} catch (const std::exception&) {
  return CGX_ERROR_ARGUMENT;
}

int64_t cgx_group_note(cgx_group* group, const cgx_call* call) { return group->inner.note(*call); }

int64_t cgx_group_submit(cgx_group* group, const cgx_call* call, cgx_submission* submission) try {
  return group->inner.submit(*call, submission);
} catch (const std::bad_alloc&) {
  return CGX_ERROR_ARGUMENT;
}

int cgx_group_wait(cgx_group* group, int64_t operation, int64_t slice_ms) {
  return group->inner.wait(operation, slice_ms);
}
void cgx_group_kick(cgx_group* group) { group->inner.kick(); }

int cgx_group_check(cgx_group* group, int64_t sequence, int look_at_peers) {
  return look_at_peers ? group->inner.check_peers(sequence, look_at_peers > 1) : group->inner.check(sequence);
}

void cgx_group_laggards(cgx_group* group, int64_t sequence, char* text, int64_t text_nbytes) {
  put(group->inner.laggards(sequence), text, text_nbytes);
}

void cgx_group_fail(cgx_group* group, int status, const char* text) { group->inner.fail(status, text); }

int cgx_group_error(cgx_group* group, char* text, int64_t text_nbytes) {
  std::string message;
  const int status = group->inner.error(&message);
  put(message, text, text_nbytes);
  return status;
}

int cgx_group_record(const cgx_group* group, int64_t operation, cgx_record* record) {
  return group->inner.record(operation, record);
}

void cgx_group_peer(cgx_group* group, int64_t rank, cgx_peer* peer, char* text, int64_t text_nbytes) try {
  *peer = {};
  if (rank >= 0 && rank < group->layout.world) put(group->inner.peer(rank, peer), text, text_nbytes);
} catch (const std::bad_alloc&) {
  put("", text, text_nbytes);
}

void cgx_group_stats(const cgx_group* group, cgx_stats* stats) { *stats = group->inner.stats(); }
void cgx_group_reset_stats(cgx_group* group) { group->inner.reset_stats(); }
void cgx_group_close(cgx_group* group) { group->inner.close(); }
void cgx_group_free(cgx_group* group) { delete group; }
