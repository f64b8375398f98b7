/* Ranks of one node in a group of several: marks, bells, and frames from elsewhere that need room. README.md tells what stands
 * for what.
 *
 * In every slice each rank writes a payload for all others of its node, and rank 0 receives one from elsewhere and hands it on.
 * Slice t lives in part t % K of the memory that the node shares.
 *
 *   -DW=2        ranks of the node, 2 or 3
 *   -DS=4        slices
 *   -DK=2        parts
 *   -DAHEAD=0    rank 0 needs the frames of so many slices more before it goes on: on a connection, frames of later slices
 *                go ahead of later levels of this one
 *   -DONE_WAY    only rank 0 writes payloads: nobody hears from the others but by what they are done with
 *
 * What begins with WITHOUT_ or WITH_ below is a mistake put in on purpose: tools/model expects spin to find each.
 */
#ifndef W
#define W 2
#endif
#ifndef S
#define S 4
#endif
#ifndef K
#define K 2
#endif

#ifndef AHEAD
#define AHEAD 0
#endif
#define NEEDED(t) ((t) + AHEAD < S -> (t) + AHEAD : S - 1)
#ifdef ONE_WAY
#define WRITES(r) ((r) == 0)
#else
#define WRITES(r) true
#endif

#define PART(t) ((t) % K)

/* What all see of each other. A rank's stores wait in its buffer, in order; a fence waits until it is empty. */
#define DONE(r) (r)
#define WAITS(r) (W + (r)) /* for which rank, plus 1; 0: it is awake */
#define MARK(slot, t) (2 * W + (slot) * K + PART(t))
#define ELSEWHERE W /* the slot of the payload from there */
byte memory[2 * W + (W + 1) * K];
chan buffer[W] = [5] of { byte, byte };
#define FENCE empty(buffer[me])

/* Payloads: the slice that was last written to a place, plus 1. A mark is stored with release, so these need no buffer. */
byte place[(W + 1) * K];
#define PLACE(slot, t) place[(slot) * K + PART(t)]

bit bell[W]; /* a byte is in the pipe */
byte sent;   /* frames from elsewhere that are in the connection, or were */
byte taken;  /* by rank 0 */
bit held;    /* the next one had no room when rank 0 looked last: its connection does not wake it */

#if W == 2
#define OTHERS_DONE(n) (memory[DONE(1 - me)] >= (n))
#else
#define OTHERS_DONE(n) (memory[DONE((me + 1) % W)] >= (n) && memory[DONE((me + 2) % W)] >= (n))
#endif
#define HAS_LEFT(t) ((t) < K || OTHERS_DONE((t) - K + 1))
#ifdef WITHOUT_WAIT_FOR_ROOM
#define MAY_BEGIN(t) true
#else
#define MAY_BEGIN(t) HAS_LEFT(t)
#endif
#ifdef WITH_FRAME_TOO_EARLY
#define HAS_ROOM(t) ((t) < K || finished > (t) - K)
#else
#define HAS_ROOM(t) (HAS_LEFT(t) && ((t) < K || finished > (t) - K))
#endif

inline pump() {
  do
  :: me == 0 && taken < sent && HAS_ROOM(taken) ->
    d_step {
      PLACE(ELSEWHERE, taken) = taken + 1;
      taken++;
      held = 0
    }
  :: me == 0 && taken < sent && !HAS_ROOM(taken) -> held = 1; break
  :: else -> break
  od
}

inline ring(for_done) {
#ifndef WITHOUT_FENCE_OF_RINGER
  FENCE;
#endif
#ifdef WITHOUT_BELL_OF_DONE
  if
  :: for_done -> skip
  :: else ->
#endif
    peer = 0;
    do
    :: peer < W ->
      if
#ifdef WITH_BELL_FOR_THE_AWAITED_ONLY
      :: peer != me && memory[WAITS(peer)] == me + 1 -> bell[peer] = 1
#else
      :: peer != me && memory[WAITS(peer)] != 0 -> bell[peer] = 1
#endif
      :: else
      fi;
      peer++
    :: else -> break
    od;
    peer = 0
#ifdef WITHOUT_BELL_OF_DONE
  fi
#endif
}

/* Naps have no end here, so a lost wake-up is a state in which nobody moves. */
#define wait_for(condition, whom)                                                                                        \
  do                                                                                                                     \
  :: (condition) -> break                                                                                                \
  :: else ->                                                                                                             \
    pump();                                                                                                              \
    buffer[me]!WAITS(me), (whom) + 1;                                                                                    \
    FENCE_OF_WAITER                                                                                                      \
    LOOK_AGAIN(condition)                                                                                                \
    buffer[me]!WAITS(me), 0                                                                                              \
  od
#ifdef WITHOUT_FENCE_OF_WAITER
#define FENCE_OF_WAITER
#else
#define FENCE_OF_WAITER FENCE;
#endif
#define SLEEP (bell[me] == 1 || (me == 0 && taken < sent && held == 0)) -> bell[me] = 0
#ifdef WITHOUT_SECOND_LOOK
#define LOOK_AGAIN(condition) SLEEP;
#else
#define LOOK_AGAIN(condition)                                                                                            \
    pump();                                                                                                              \
    if                                                                                                                   \
    :: (condition) -> skip                                                                                               \
    :: else -> SLEEP                                                                                                     \
    fi;
#endif

proctype Rank(byte me) {
  byte t = 0, finished = 0, peer = 0, other = 0;
  do
  :: t == S -> break
  :: else ->
    other = 1;
    do
    :: other < W -> wait_for(MAY_BEGIN(t), (me + other) % W); other++
    :: else -> break
    od;
    if
    :: WRITES(me) ->
      PLACE(me, t) = t + 1;
      buffer[me]!MARK(me, t), t + 1;
      ring(false)
    :: else
    fi;
    if
    :: me == 0 ->
      wait_for(taken > NEEDED(t), 0);
      buffer[me]!MARK(ELSEWHERE, t), t + 1;
      ring(false)
    :: else ->
      wait_for(memory[MARK(ELSEWHERE, t)] >= t + 1, 0);
      assert(PLACE(ELSEWHERE, t) == t + 1)
    fi;
    other = 1;
    do
    :: other < W && WRITES((me + other) % W) ->
      wait_for(memory[MARK((me + other) % W, t)] >= t + 1, (me + other) % W);
      assert(PLACE((me + other) % W, t) == t + 1);
      other++
    :: other < W && !WRITES((me + other) % W) -> other++
    :: else -> break
    od;
    other = 0;
    t++;
    finished = t;
    buffer[me]!DONE(me), t;
    ring(true)
  od
}

/* Stores reach the others one by one, whenever they like. */
proctype Memory(byte rank) {
  byte at, value;
end:
  do
  :: atomic { buffer[rank]?at, value -> memory[at] = value; at = 0; value = 0 }
  od
}

/* Frames come whenever they like. */
proctype Elsewhere() {
  do
  :: sent < S -> sent++
  :: else -> break
  od
}

init {
  byte r = 0;
  atomic {
    do
    :: r < W -> run Rank(r); run Memory(r); r++
    :: else -> break
    od;
    run Elsewhere()
  }
}
