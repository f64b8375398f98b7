/* The protocol between ranks that share no memory: frames over TCP, a ring of parts, leaving and death. README.md tells what
 * stands for what.
 *
 * An operation has S slices of three levels (scatter-reduce-allgather). Level 0 encodes a contribution to each peer's chunk and
 * sends it. Level 1 reduces the peers' contributions and sends the sum. Level 2 decodes the peers' sums. Tick T runs level l of
 * slice T - l * LAG, for each l in turn. Slice t lives in part t % K of a ring.
 *
 *   -DN=2        ranks, 2 or 3
 *   -DS=4        slices per operation
 *   -DOPS=2      operations
 *   -DLAG=1      ticks between the levels of a slice
 *   -DK=3        parts of the ring
 *   -DC=1        frames that a data connection holds each way; 0: a frame leaves when its reader takes it
 *   -DDEATH      the last rank may die at any moment (the ranks are alike, so it stands for any of them)
 *   -DUNEVEN     the last rank leaves one operation early
 *
 * What begins with WITHOUT_ or WITH_ below is a mistake put in on purpose: tools/model expects spin to find each.
 */
#ifndef N
#define N 2
#endif
#ifndef S
#define S 4
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef LAG
#define LAG 1
#endif
#ifndef K
#define K 3
#endif
#ifndef C
#define C 1
#endif

#define LAST (N - 1)
#ifdef UNEVEN
#define OPERATIONS_OF(r) ((r) == LAST -> OPS - 1 : OPS)
#else
#define OPERATIONS_OF(r) OPS
#endif

/* Data connections, by [writer * N + reader]. The first in_pipe frames are in the connection, the rest in the writer's queue. */
#define LENGTH (2 * K + C)
#define LINK(from, to) ((from) * N + (to))
byte frames[N * N * LENGTH];
byte count[N * N], in_pipe[N * N];
bit closed[N * N]; /* by the writer */
byte unsent[N * K]; /* frames in queues, by [rank * K + part] */

/* Control connections: how many operations the writer has run (LEAVE), or 0 (EOF). */
chan control[N * N] = [2] of { byte };
#define CONTROL(from, to) control[(from) * N + (to)]
byte left_after[N * N]; /* by [rank * N + peer], what the rank's thread has heard: LEAVE and its number, */
bit ended[N * N];       /* EOF */

/* A frame's header: sequence, slice and level (0: a contribution; 1: a sum). 0: no frame. */
#define STAMP(op, t) ((op) * S + (t) + 1)
#define FRAME(op, t, level) (STAMP(op, t) * 2 + (level))
#define STAMP_OF(f) ((f) / 2)
#define SEQUENCE_OF(f) (((f) / 2 - 1) / S)
#define SLICE_OF(f) (((f) / 2 - 1) % S)
#define LEVEL_OF(f) ((f) % 2)
#define PART(t) ((t) % K)
#define ARRIVED(level, p) (1 << ((level) * N + (p))) /* in a rank's byte of a part: the frame of this peer is here */

#define SLICE (tick - level * LAG) /* of the step that is next */
#define NEXT(d) ((me + (d)) % N)

/* What only the checker knows. A part counts as one place. */
byte owner[N * K]; /* by [rank * K + part]: the stamp of the slice that was last written into it */
byte due[N * K];   /* how many times that slice has still to be read: by two levels and by every frame */
#define READS (2 + 2 * (N - 1))
byte fate[N];
#define kRuns 0
#define kLeft 1
#define kDied 2
#define kFailed 3
#define OVER(r) (fate[r] != kRuns)

inline write_part(op, t) {
  i = me * K + PART(t);
  if
  :: owner[i] != STAMP(op, t) ->
    assert(due[i] == 0); /* nothing is overwritten before it is read */
    owner[i] = STAMP(op, t);
    due[i] = READS
  :: else
  fi;
  i = 0
}

inline read_part(r, stamp) {
  i = (r) * K + PART(((stamp) - 1) % S);
  assert(owner[i] == (stamp) && due[i] > 0);
  due[i]--;
  if
  :: due[i] == 0 -> owner[i] = 0
  :: else
  fi;
  i = 0
}

/* A send never waits. */
inline send(p, level_of_frame) {
  i = LINK(me, p);
  assert(count[i] < LENGTH);
  frames[i * LENGTH + count[i]] = FRAME(op, SLICE, level_of_frame);
  count[i]++;
  unsent[me * K + PART(SLICE)]++;
  i = 0
}

#define HAS_QUEUED(p) (count[LINK(me, p)] > in_pipe[LINK(me, p)])

/* The pump puts a queued frame into the connection... */
#define MAY_PUT(p) (HAS_QUEUED(p) && in_pipe[LINK(me, p)] < C)
inline put(p) {
  f = frames[LINK(me, p) * LENGTH + in_pipe[LINK(me, p)]];
  read_part(me, STAMP_OF(f));
  unsent[me * K + PART(SLICE_OF(f))]--;
  in_pipe[LINK(me, p)]++;
  f = 0
}

/* ...and takes the frame at the head of a connection, if it has room for it. */
#if C == 0
#define READABLE(p) (count[LINK(p, me)] > 0 && !closed[LINK(p, me)])
#else
#define READABLE(p) (in_pipe[LINK(p, me)] > 0)
#endif
#define HEAD(p) frames[LINK(p, me) * LENGTH]

#define IS_FREE(t, early) ((t) < K || finished + early > (t) - K)
#define HAS_SENT(t) (unsent[me * K + PART(t)] == 0)
#ifdef WITHOUT_WAIT_FOR_SENDS
#define MAY_BEGIN(t) IS_FREE(t, 0)
#else
#define MAY_BEGIN(t) (IS_FREE(t, 0) && HAS_SENT(t))
#endif
#if defined(WITH_FRAME_TOO_EARLY)
#define HAS_ROOM(t) (IS_FREE(t, 1) && HAS_SENT(t))
#elif defined(WITH_FRAME_OVER_SENDS)
#define HAS_ROOM(t) IS_FREE(t, 0)
#else
#define HAS_ROOM(t) (IS_FREE(t, 0) && HAS_SENT(t))
#endif
#define MAY_TAKE(p)                                                                                                      \
  (READABLE(p) && SEQUENCE_OF(HEAD(p)) == op && (SLICE_OF(HEAD(p)) < begun || HAS_ROOM(SLICE_OF(HEAD(p)))))

inline take(p) {
  f = HEAD(p);
  count[LINK(p, me)]--;
#if C == 0
  read_part(p, STAMP_OF(f));
  unsent[(p) * K + PART(SLICE_OF(f))]--;
#else
  in_pipe[LINK(p, me)]--;
#endif
  i = LINK(p, me) * LENGTH;
  do
  :: i < LINK(p, me) * LENGTH + count[LINK(p, me)] -> frames[i] = frames[i + 1]; i++
  :: else -> break
  od;
  frames[i] = 0;
  write_part(op, SLICE_OF(f));
  arrived[PART(SLICE_OF(f))] = arrived[PART(SLICE_OF(f))] | ARRIVED(LEVEL_OF(f), p);
  f = 0
}

/* Steps, in the order of ticks. */
#define TICKS (S + 2 * LAG)
#define ALL_RUN (tick == TICKS)
#define HAS_FROM(kind, p) (arrived[PART(SLICE)] & ARRIVED(kind, p))
#if N == 3
#define HAS_ALL(kind) (HAS_FROM(kind, NEXT(1)) && HAS_FROM(kind, NEXT(2)))
#else
#define HAS_ALL(kind) HAS_FROM(kind, NEXT(1))
#endif
#if N == 3
#define HAS_SENT_ALL (!HAS_QUEUED(NEXT(1)) && !HAS_QUEUED(NEXT(2)))
#else
#define HAS_SENT_ALL !HAS_QUEUED(NEXT(1))
#endif
#define READY (!ALL_RUN && (level == 0 -> MAY_BEGIN(SLICE) : HAS_ALL(level - 1)))

inline run_step() {
  if
  :: level == 0 ->
    write_part(op, SLICE);
    send(NEXT(1), 0);
#if N == 3
    send(NEXT(2), 0);
#endif
    begun++
  :: level == 1 ->
    read_part(me, STAMP(op, SLICE));
    send(NEXT(1), 1);
#if N == 3
    send(NEXT(2), 1)
#endif
  :: level == 2 ->
    read_part(me, STAMP(op, SLICE));
    arrived[PART(SLICE)] = 0;
    finished++
  fi;
  do
  :: level < 2 -> level++; if :: tick >= level * LAG && SLICE < S -> break :: else fi
  :: level == 2 -> level = 0; tick++; if :: tick < S || ALL_RUN -> break :: else fi
  od
}

/* Losses. A rank looks for them where it waits for a frame: on the first peer whose frame is missing. */
#define MISSES(p) (!ALL_RUN && level > 0 && !HAS_FROM(level - 1, p))
#define HAS_LEFT_BEFORE(p) (left_after[me * N + (p)] != 0 && left_after[me * N + (p)] <= op)
#if defined(WITH_LOSS_AT_END_OF_CONTROL)
#define IS_LOST(p) (ended[me * N + (p)] || HAS_LEFT_BEFORE(p))
#elif defined(WITH_LOSS_AT_LEAVE)
#define IS_LOST(p) (left_after[me * N + (p)] != 0 || HAS_ENDED(p))
#elif defined(WITHOUT_END)
#define IS_LOST(p) HAS_LEFT_BEFORE(p)
#elif defined(WITHOUT_LEAVE)
#define IS_LOST(p) HAS_ENDED(p)
#else
#define IS_LOST(p) (HAS_ENDED(p) || HAS_LEFT_BEFORE(p))
#endif
#define HAS_ENDED(p) (ended[me * N + (p)] && closed[LINK(p, me)] && !READABLE(p))
/* A peer that is gone takes no more frames: the connection reports an error (EPIPE, ECONNRESET) to whoever has some for it. */
#ifdef WITHOUT_ERROR_OF_SEND
#define CANNOT_SEND(p) false
#else
#define CANNOT_SEND(p) (HAS_QUEUED(p) && closed[LINK(p, me)])
#endif

inline lose(p) {
  assert(fate[p] == kDied || fate[p] == kFailed || OPERATIONS_OF(p) <= op) /* nobody is lost without a reason */
}

/* Ends both connections with a peer. Frames in the rank's queue are gone. Those in the pipe can still be read, unless a reset
 * overtakes them, which a rank that leaves must not cause: closing with unread bytes would.
 */
inline close_with(p) {
  atomic {
    if
    :: !OVER(p) ->
      if
      :: fate[me] == kLeft -> CONTROL(me, p)!OPERATIONS_OF(me)
      :: else
      fi;
      CONTROL(me, p)!0
    :: else
    fi
  }
  atomic {
    if
    :: fate[me] == kLeft ->
      assert(!HAS_QUEUED(p));
      assert(!READABLE(p) || OPERATIONS_OF(p) > OPERATIONS_OF(me))
    :: fate[me] != kLeft
    :: fate[me] == kDied -> in_pipe[LINK(me, p)] = 0 /* by a reset */
    fi;
    do
    :: HAS_QUEUED(p) -> count[LINK(me, p)]--; frames[LINK(me, p) * LENGTH + count[LINK(me, p)]] = 0
    :: else -> break
    od;
    closed[LINK(me, p)] = 1
  }
}

proctype Rank(byte me) {
  byte op, tick, level, begun, finished, arrived[K], i, f;
  do
  :: atomic { READY -> run_step() }
  :: atomic { MAY_PUT(NEXT(1)) -> put(NEXT(1)) }
  :: atomic { MAY_TAKE(NEXT(1)) -> take(NEXT(1)) }
  :: atomic { MISSES(NEXT(1)) && IS_LOST(NEXT(1)) -> lose(NEXT(1)); fate[me] = kFailed; break }
  :: atomic { CANNOT_SEND(NEXT(1)) -> lose(NEXT(1)); fate[me] = kFailed; break }
#if N == 3
  :: atomic { MAY_PUT(NEXT(2)) -> put(NEXT(2)) }
  :: atomic { MAY_TAKE(NEXT(2)) -> take(NEXT(2)) }
  :: atomic { !MISSES(NEXT(1)) && MISSES(NEXT(2)) && IS_LOST(NEXT(2)) -> lose(NEXT(2)); fate[me] = kFailed; break }
  :: atomic { CANNOT_SEND(NEXT(2)) -> lose(NEXT(2)); fate[me] = kFailed; break }
#endif
#ifdef DEATH
  :: atomic { me == LAST -> fate[me] = kDied; break }
#endif
  :: atomic {
      ALL_RUN && HAS_SENT_ALL ->
      assert(begun == S && finished == S);
      op++;
      tick = 0;
      begun = 0;
      finished = 0;
      if
      :: op == OPERATIONS_OF(me) -> fate[me] = kLeft; break
      :: else
      fi
    }
  od;
  close_with(NEXT(1));
#if N == 3
  close_with(NEXT(2));
#endif
  atomic { /* makes states alike that differ only in what can matter to nobody any more */
    op = 0;
    tick = 0;
    level = 0;
    begun = 0;
    finished = 0;
    do
    :: i < K -> arrived[i] = 0; i++
    :: else -> i = 0; break
    od
  }
}

inline hear(p) {
  if
  :: OVER(me)
  :: else ->
    if
    :: word == 0 -> ended[me * N + (p)] = 1
    :: else -> left_after[me * N + (p)] = word
    fi
  fi;
  word = 0
}

/* A rank's thread, which drains its control connections whatever the rank does. */
proctype Thread(byte me) {
  byte word;
end:
  do
  :: atomic { CONTROL(NEXT(1), me)?word -> hear(NEXT(1)) }
#if N == 3
  :: atomic { CONTROL(NEXT(2), me)?word -> hear(NEXT(2)) }
#endif
  od
}

init {
  atomic {
    run Rank(0);
    run Rank(1);
    run Thread(0);
    run Thread(1);
#if N == 3
    run Rank(2);
    run Thread(2);
#endif
  }
}
