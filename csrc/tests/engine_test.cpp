// Ranks of one group as threads of one process: results, hand-overs, growth, and everything that ends a group.
//
//   engine_test [--quick]
//
// Over the C ABI alone but for the fields of the control segment that a hostile peer would write. Linked with
// one_mapping.cpp instead of segment/segment.cpp all ranks see a segment at one address, without which ThreadSanitizer,
// which goes by addresses, would not know that they share it.
#include <atomic>

#include "quick.h"
#include "ranks.h"
#include "segment/control.h"
#include "segment/segment.h"

namespace {

void mixed_2() { mixed_operations(groups_of(2), quick ? 60 : 300, quick ? 400 : 2000); }
void mixed_3() { mixed_operations(groups_of(3), quick ? 60 : 300, quick ? 400 : 2000); }
void mixed_5() { mixed_operations(groups_of(5), quick ? 40 : 200, quick ? 300 : 1000); }

Pending scattering(const std::vector<int64_t>& slices, int64_t rank, int64_t world, int64_t bits, int64_t round) {
  Pending op;
  op.bits = bits;
  op.plan = reduce_scatter(slices, rank, world, bits);
  op.scale = 0.5;
  int64_t numel = 0;
  for (int64_t n : slices) numel += n;
  for (int64_t i = 0; i < numel * world; ++i) op.values.push_back(value_of(rank, i, round));
  op.share.assign(op.values.begin() + rank * numel, op.values.begin() + (rank + 1) * numel);
  return op;
}

// Of every rank the sum of one share, in memory of its own, in turn with allreduces; values are only read.
void shares_of_sums(int64_t world) {
  with_ranks(world, [&](cgx_group* group, int64_t rank) {
    std::mt19937_64 agreed(7);
    for (int64_t round = 0; round < (quick ? 30 : 150); ++round) {
      std::vector<int64_t> slices;
      for (uint64_t n = 1 + agreed() % 4; n > 0; --n) slices.push_back(8 * (1 + int64_t(agreed() % 100)));
      Pending op = scattering(slices, rank, world, agreed() % 2 ? 4 : 32, round);
      const std::vector<float> before = op.values;
      submit(group, call_of(int64_t(op.values.size()), op.bits, 1), op, round % 3 == 0);
      Pending other = simple(rank, world);
      submit(group, call_of(int64_t(other.values.size()), 4), other, round % 2);
      must_be(group, rank, wait(group, other.number, 100), {CGX_OK}, "");
      if (op.values != before) fail("rank %d: round %d has changed the values", int(rank), int(round));
      for (float value : other.values)
        if (value != float(world)) fail("the operation behind it has %f", value);
      // Each of world - 1 contributions loses half a unit of 2/15, one's own and the sum nothing.
      const float allowed = op.bits == 32 ? 0 : float(world - 1) / 15 * 0.5f * 1.001f;
      const int64_t numel = int64_t(op.share.size());
      for (int64_t i = 0; i < numel; ++i) {
        float sum = 0;
        for (int64_t peer = 0; peer < world; ++peer) sum += value_of(peer, rank * numel + i, round);
        if (!(std::fabs(op.share[size_t(i)] - sum / 2) <= allowed))
          fail("rank %d, round %d, value %d: %f instead of %f", int(rank), int(round), int(i), op.share[size_t(i)],
               sum / 2);
      }
    }
  });
}

void shares_2() { shares_of_sums(2); }
void shares_3() { shares_of_sums(3); }

void a_sum_without_a_place_for_it_fails_the_group() {
  with_ranks(2, [](cgx_group* group, int64_t rank) {
    Pending op = scattering({64}, rank, 2, 4, 0);
    if (rank == 1) op.share.clear();
    const int status = wait(group, submit(group, call_of(128, 4, 1), op, false), 100);
    if (rank == 1) return must_be(group, rank, status, {CGX_ERROR_ARGUMENT}, "the kernels refused");
    Pending next = simple(rank, 2);  // its own part may well be done
    must_be(group, rank, wait(group, submit(group, call_of(128, 4), next, false), 100), {CGX_ERROR_POISONED},
            "rank 1 failed");
  });
}

void a_plan_whose_sum_reads_outside_of_its_slots_is_refused() {
  const cgx_piece piece = {0, 64, 0, 0, 64, 4, CGX_MAXMIN};
  const int64_t nbytes = cgx_piece_payload_nbytes(&piece, CGX_FLOAT32);
  const auto is_taken = [&](int64_t slot_nbytes, int64_t input, int64_t n_inputs, int64_t first_piece) {
    const cgx_slot slots[] = {{0, nbytes, 1, 0, 0, CGX_HOME_MEMORY}, {64, slot_nbytes, 1, 1, 0, CGX_HOME_MEMORY}};
    int status;
    const cgx_step step = {CGX_STEP_SUM, 0, 0, first_piece, 1, 0, n_inputs, 0};
    return Plan(cgx_plan_new(2, CGX_FLOAT32, &piece, 1, slots, 2, &input, 1, &step, 1, 1, 2, 128, 2, &status)) !=
           nullptr;
  };
  if (!is_taken(nbytes, 1, 1, 0)) fail("a right plan was refused");
  if (is_taken(nbytes - 1, 1, 1, 0)) fail("an input that is too short was taken");
  if (is_taken(nbytes, 2, 1, 0) || is_taken(nbytes, -1, 1, 0)) fail("an input that is no slot was taken");
  if (is_taken(nbytes, 1, 0, 0) || is_taken(nbytes, 1, 2, 0)) fail("inputs that are not there were taken");
  if (is_taken(nbytes, 1, 1, 1) || is_taken(nbytes, 1, 1, -1)) fail("a piece that is not there was taken");
}

// One exact payload that this rank sends from its values, and one that it receives into them, each different in one
// way.
void a_plan_that_leaves_payloads_in_the_tensor_is_checked() {
  struct Change {
    const char* what;
    std::function<void(cgx_slot&, cgx_piece&, cgx_step&)> make;
    int64_t kind = CGX_STEP_ENCODE;
  };
  const auto is_taken = [](const Change& change) {
    cgx_piece pieces[] = {{8, 13, 0, 0, 1, 32, CGX_RAW}, {21, 8, 56, 0, 1, 32, CGX_RAW}};
    cgx_slot slots[] = {{32, 52, 0, 0, 0, change.kind == CGX_STEP_DECODE ? CGX_HOME_RESULT : CGX_HOME_VALUES},
                        {0, 64, 1, 1, 0, CGX_HOME_MEMORY}};
    cgx_step step = {change.kind, 0, 0, 0, 1, 0, change.kind == CGX_STEP_REDUCE, 0};
    int64_t input = 1;
    if (change.make) change.make(slots[0], pieces[0], step);
    if (step.kind == CGX_STEP_SUM) input = 0;
    int status;
    return Plan(cgx_plan_new(2, CGX_FLOAT32, pieces, 2, slots, 2, &input, 1, &step, 1, 1, 2, 64, 2, &status)) !=
           nullptr;
  };
  for (const int64_t kind : {CGX_STEP_ENCODE, CGX_STEP_REDUCE, CGX_STEP_DECODE})
    if (!is_taken({"", nullptr, kind})) fail("a right plan was refused");
  const Change changes[] = {
      {"longer than its values", [](cgx_slot& slot, cgx_piece&, cgx_step&) { slot.nbytes += 4; }},
      {"elsewhere than its values", [](cgx_slot& slot, cgx_piece&, cgx_step&) { slot.offset += 4; }},
      {"before the tensor", [](cgx_slot& slot, cgx_piece&, cgx_step&) { slot.offset = -32; }},
      {"at a home that is none", [](cgx_slot& slot, cgx_piece&, cgx_step&) { slot.home = 3; }},
      {"encoded into the result", [](cgx_slot& slot, cgx_piece&, cgx_step&) { slot.home = CGX_HOME_RESULT; }},
      {"quantized", [](cgx_slot&, cgx_piece& piece, cgx_step&) { piece.kind = CGX_MAXMIN, piece.bits = 8; }},
      {"not at the start of its payload", [](cgx_slot&, cgx_piece& piece, cgx_step&) { piece.payload = 8; }},
      {"of two pieces", [](cgx_slot&, cgx_piece&, cgx_step& step) { step.n_pieces = 2; }},
      {"of a piece that is not there", [](cgx_slot&, cgx_piece&, cgx_step& step) { step.first_piece = 2; }},
      {"added to the values", [](cgx_slot&, cgx_piece&, cgx_step& step) { step.kind = CGX_STEP_ADD; }},
      {"an input of a sum",
       [](cgx_slot&, cgx_piece&, cgx_step& step) {
         step.kind = CGX_STEP_SUM;
         step.n_inputs = 1;
       }},
  };
  for (const Change& change : changes)
    if (is_taken(change)) fail("a payload in the tensor was taken, though it is %s", change.what);
}

void only_ranks_that_share_no_memory_leave_payloads_in_the_tensor() {
  const Joint before = joint;
  joint = {1, 1, 0};
  const Plan plan = sra({{8, 8, 8, 8}}, 0, 4, 32);
  joint = before;
  std::vector<float> values(32);
  with_ranks(4, [&](cgx_group* group, int64_t rank) {
    if (rank != 0) return;
    cgx_submission what = {};
    what.plan = plan.get();
    what.values = values.data();
    const cgx_call call = call_of(32, 32);
    const bool taken = cgx_group_submit(group, &call, &what) != CGX_ERROR_ARGUMENT;
    if (taken != (joint.streams && joint.node_ranks == 1)) fail("taken: %d", int(taken));
  });
}

void a_failure_is_told_to_all() {
  with_ranks(3, [](cgx_group* group, int64_t rank) {
    if (rank == 1) {
      cgx_group_fail(group, CGX_ERROR_POISONED, "the hook raised");
      return;
    }
    Pending op = simple(rank, 3);
    const int status = wait(group, submit(group, call_of(192, 4), op, rank == 0), 100);
    must_be(group, rank, status, {CGX_ERROR_POISONED}, "rank 1 failed");
  });
}

void ranks_that_lose_step_are_told() {
  with_ranks(3, [](cgx_group* group, int64_t rank) {
    Pending op = simple(rank, 3);
    const int status = wait(group, submit(group, call_of(192, 4, rank == 2), op, rank == 0), 100);
    must_be(group, rank, status, {CGX_ERROR_MISMATCH}, "ranks have lost step at operation 1");
  });
}

void a_peer_that_never_calls_is_a_timeout() {
  std::atomic<int> raised{0};
  with_ranks(2, [&](cgx_group* group, int64_t rank) {
    if (rank == 1) {
      while (raised.load() == 0) std::this_thread::yield();
      return;
    }
    Pending op = simple(rank, 2);
    const int status = wait(group, submit(group, call_of(128, 4), op, false, 30), 100);
    must_be(group, rank, status, {CGX_ERROR_TIMEOUT}, "rank 1 has called nothing yet");
    raised = 1;
  });
}

// Closed by another thread while this one waits, and the group's thread runs an operation; then once more.
void closing_ends_waits_and_is_told_to_peers() {
  for (int turn = 0; turn < (quick ? 10 : 40); ++turn)
    with_ranks(2, [turn](cgx_group* group, int64_t rank) {
      if (rank == 1) {  // the first operation is met, the second may be, the third is not
        for (int status = CGX_OK; status == CGX_OK;) {
          Pending op = simple(rank, 2);
          status = wait(group, submit(group, call_of(128, 4), op, turn % 2), 100);
          if (status != CGX_OK) must_be(group, rank, status, {CGX_ERROR_PEER_LOST}, "has left the group");
        }
        return;
      }
      Pending op = simple(rank, 2);
      must_be(group, rank, wait(group, submit(group, call_of(128, 4), op, true), 100), {CGX_OK}, "");
      std::thread closer([group, turn] {
        for (int i = 0; i < turn * 10; ++i) std::this_thread::yield();
        cgx_group_close(group);
      });
      Pending unmet = simple(rank, 2);
      const int64_t number = submit(group, call_of(128, 4, 0), unmet, turn % 3 == 0);
      const int status = wait(group, number, 100);
      closer.join();  // from here on nobody touches the tensors
      if (status != CGX_OK && status != CGX_ERROR_CLOSED && status != CGX_ERROR_PEER_LOST)
        fail("status %d of a wait on a closed group", status);
      cgx_group_close(group);
    });
}

void leaving_while_the_segment_is_made_is_told_to_peers() {
  std::atomic<int> closed{0};
  with_ranks(2, [&](cgx_group* group, int64_t rank) {
    Pending op = simple(rank, 2);
    if (rank == 0) {
      const int64_t number = submit(group, call_of(128, 4), op, true);
      cgx_group_wait(group, number, 50);
      cgx_group_close(group);
      closed = 1;
      return;
    }
    while (closed.load() == 0) std::this_thread::yield();
    const int status = wait(group, submit(group, call_of(128, 4), op, false), 100);
    must_be(group, rank, status, {CGX_ERROR_PEER_LOST}, "has left the group");
  });
}

void the_board_is_read_while_it_is_written() {
  with_ranks(3, [](cgx_group* group, int64_t rank) {
    char text[2048];
    for (int64_t i = 1; i <= (quick ? 2000 : 20000); ++i) {
      const cgx_call call = call_of(i, 32);
      if (cgx_group_note(group, &call) != i) fail("operation %d has another number", int(i));
      if (cgx_group_check(group, i, 0) != CGX_OK) must_be(group, rank, -1, {CGX_OK}, "");
      if (i % 64 == 0) cgx_group_laggards(group, i, text, sizeof text);
    }
  });
}

void what_a_hostile_peer_writes_stays_inside() {
  char name[64], error[512], text[2048];
  if (cgx_control_create(2, name, sizeof name, error, sizeof error) != CGX_OK) fail("%s", error);
  Group group = open_group(name, 0, 2);
  cgx::Segment segment;
  const cgx::ControlLayout layout(2);
  const std::string problem = cgx::Segment::open(name, layout.nbytes, &segment);
  if (!problem.empty()) fail("%s", problem.c_str());
  cgx_control_unlink(name);
  auto* control = reinterpret_cast<cgx::Control*>(segment.data());
  auto* ranks = reinterpret_cast<cgx::RankControl*>(segment.data() + layout.ranks_at);
  for (int64_t number : {int64_t(-1), int64_t(-127), INT64_MIN}) {
    ranks[1].noted = number;
    ranks[1].noted_at_ns = INT64_MIN;
    cgx_group_laggards(group.get(), 1, text, sizeof text);
    if (strcmp(text, "rank 1 has called nothing yet") != 0) fail("of number %lld: %s", (long long)(number), text);
  }
  ranks[1].noted = INT64_MAX;
  cgx_group_laggards(group.get(), INT64_MAX, text, sizeof text);
  // A data segment larger than the group may take, and one with a name that leaves the folder.
  memset(control->data_name, 'x', sizeof control->data_name);
  memset(control->poison_text, 'x', sizeof control->poison_text);
  control->poison_rank = 77;
  control->poisoned = 1;
  if (cgx_group_check(group.get(), 0, 0) != CGX_OK) fail("poison of a rank that does not exist was taken");
  control->poison_rank = 1;
  control->poison_status = 12345;
  if (cgx_group_check(group.get(), 0, 0) != CGX_ERROR_POISONED) fail("poison was not taken");
}

void a_data_segment_out_of_bounds_is_refused() {
  struct Lie {
    const char* name;
    int64_t nbytes;
    const char* text;
  };
  const Lie lies[] = {{"cgx-0123456789abcdef0123456789abcdef", kLimitNbytes * 2, "of a size that this operation"},
                      {"cgx-0123456789abcdef0123456789abcdef", -1, "of a size that this operation"},
                      {"../etc/passwd", 1 << 20, "none of ours"},
                      {"cgx-/../../../../../../../../etc/passw", 1 << 20, "none of ours"}};
  for (const Lie& lie : lies) {
    char name[64], error[512];
    if (cgx_control_create(2, name, sizeof name, error, sizeof error) != CGX_OK) fail("%s", error);
    Group group = open_group(name, 1, 2);
    cgx::Segment segment;
    const std::string problem = cgx::Segment::open(name, cgx::ControlLayout(2).nbytes, &segment);
    if (!problem.empty()) fail("%s", problem.c_str());
    cgx_control_unlink(name);
    auto* control = reinterpret_cast<cgx::Control*>(segment.data());
    memcpy(control->data_name, lie.name, strlen(lie.name) + 1);
    control->data_nbytes = lie.nbytes;
    control->generation = 1;
    Pending op = simple(1, 2);
    const int status = wait(group.get(), submit(group.get(), call_of(128, 4), op, false), 100);
    must_be(group.get(), 1, status, {CGX_ERROR_SHARED_MEMORY}, lie.text);
  }
}

// Which groups a check is about: those that share memory, those of two ranks, or of nodes of two ranks as well.
enum class On { kMemory, kPairs, kAny };
struct Check {
  const char* name;
  void (*run)();
  On on = On::kMemory;
};
constexpr Check kChecks[] = {
    {"mixed operations of 2 ranks", mixed_2, On::kPairs},
    {"mixed operations of 3 ranks", mixed_3, On::kAny},
    {"mixed operations of 5 ranks", mixed_5, On::kAny},
    {"shares of sums of 2 ranks", shares_2, On::kPairs},
    {"shares of sums of 3 ranks", shares_3, On::kAny},
    {"a sum without a place for it fails the group", a_sum_without_a_place_for_it_fails_the_group, On::kPairs},
    {"a plan whose sum reads outside of its slots is refused", a_plan_whose_sum_reads_outside_of_its_slots_is_refused},
    {"a plan that leaves payloads in the tensor is checked", a_plan_that_leaves_payloads_in_the_tensor_is_checked},
    {"only ranks that share no memory leave payloads in the tensor",
     only_ranks_that_share_no_memory_leave_payloads_in_the_tensor, On::kAny},
    {"a failure is told to all", a_failure_is_told_to_all, On::kAny},
    {"ranks that lose step are told", ranks_that_lose_step_are_told, On::kAny},
    {"a peer that never calls is a time-out", a_peer_that_never_calls_is_a_timeout, On::kPairs},
    {"closing ends waits and is told to peers", closing_ends_waits_and_is_told_to_peers, On::kPairs},
    {"leaving while the segment is made is told to peers", leaving_while_the_segment_is_made_is_told_to_peers},
    {"the board is read while it is written", the_board_is_read_while_it_is_written},
    {"what a hostile peer writes stays inside", what_a_hostile_peer_writes_stays_inside},
    {"a data segment out of bounds is refused", a_data_segment_out_of_bounds_is_refused},
};

}  // namespace

int main(int argc, char** argv) {
  read_arguments(argc, argv);
  // The smallest buffer that the system gives makes every frame come in parts.
  const Joint joints[] = {{}, {1, 1, 0}, {1, 2, 1}, {3, 1, 1}, {1, 1, 0, 2}, {2, 2, 1, 2}};
  for (const Joint& each : joints) {
    joint = each;
    for (const Check& check : kChecks) {
      if (joint.streams && check.on == On::kMemory) continue;
      if (joint.node_ranks > 1 && check.on == On::kPairs) continue;
      check.run();
      printf("ok: %s", check.name);
      if (joint.streams)
        printf(" (%d streams, lag %d, buffer %d, nodes of %d)", int(joint.streams), int(joint.lag), joint.buffer_nbytes,
               int(joint.node_ranks));
      printf("\n");
      fflush(stdout);
    }
  }
  return 0;
}
