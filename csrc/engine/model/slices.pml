/* The protocol between ranks, as csrc/engine runs it: halves, flags, done, bells, growth, poison, leaving. README.md tells
 * what stands for what. Rank's steps are those of Group::advance, wait_for, ring, ensure_segment, fail and close.
 *
 *   -DW=2        ranks
 *   -DT=5        slices
 *   -DGATHER     each rank hands its chunk to all (an exchange), instead of scatter-reduce-allgather
 *   -DEMPTY      any chunks may be empty, but for one
 *   -DBUFFERS    stores stay in a buffer until they are flushed
 *   -DHANDOVER   each rank once leaves a wait to another holder of its role
 *   -DGROW       larger data segments are made
 *   -DPOISON     some rank fails somewhere
 *   -DLEAVE      some rank leaves early
 *   -DCLOSE      rank 0 is closed by another thread, at any time
 *   -DSPINNING   nobody sleeps, so that more ranks can be checked for what concerns payloads
 *
 * What begins with WITHOUT_ or WITH_ below is a mistake put in on purpose: tools/model expects spin to find each.
 */
#ifndef W
#define W 2
#endif
#ifndef T
#define T 5
#endif
#define PLACES (W * W) /* of a half: [writer * W + owner]: a part; [owner * W + owner]: a sum */
#define LAST_GENERATION 2

#ifdef WITH_ONE_HALF
#define HALVES 1
#else
#define HALVES 2
#endif
#define HALF(t) ((t) % HALVES)

#if defined(POISON) || defined(LEAVE) || defined(CLOSE)
#define TROUBLE
#endif

/* Shared memory. */
byte flag[PLACES], done_by[W], waits_on[W];
byte payload[2 * PLACES]; /* the slice that the payload here belongs to */
bit rung[W];              /* the bell has been rung since its owner looked at it */
bit asleep[W];            /* in futex_wait */
bit left_group[W], poisoned, closed;
byte generation, name, mapped[W];

/* What only the checker knows. */
byte mask[T + 1]; /* of slice t: which chunks are not empty; 0: nobody has begun it */
byte finished[W]; /* the slice that a rank reads nothing of any more */
byte linked;      /* the generation whose segment has a name */
bit trouble;      /* something went wrong that may be reported */
byte failures;    /* how many may still happen */

/* Places of stores. */
#define kWaits 0
#define kDone 1
#define kName 2
#define kGeneration 3
#define kMapped 4
#define kFlag 5
#define kPayload (kFlag + PLACES)

inline write(r, place, v) {
  if
  :: place == kWaits -> waits_on[r] = v
  :: place == kDone -> done_by[r] = v
  :: place == kName -> name = v
  :: place == kGeneration -> generation = v
  :: place == kMapped -> mapped[r] = v
  :: place >= kFlag && place < kPayload -> flag[place - kFlag] = v
  :: place >= kPayload -> payload[HALF(v) * PLACES + place - kPayload] = v
  fi
}

/* A rank's stores that are under way, in its order, as release * 4096 + place * 16 + value. A plain one may overtake all
 * but those to its own place; one with release overtakes none. (Loads are never early: all that matter are acquire.)
 */
#ifdef BUFFERS
#define DEPTH 4
short buffer[W * DEPTH];
byte pending[W];
#define STORE(place, v, release)                                                  \
  atomic {                                                                        \
    pending[me] < DEPTH;                                                          \
    buffer[me * DEPTH + pending[me]] = (release) * 4096 + (place) * 16 + (v);     \
    pending[me]++                                                                 \
  }
#define FENCE pending[me] == 0

#define PLACE_OF(k) ((buffer[r * DEPTH + k] & 4095) / 16)
#define MAY_PASS(k, earlier) (k <= earlier || PLACE_OF(k) != PLACE_OF(earlier))
#define MAY_FLUSH(k)                                                                                       \
  (k < pending[r] && (k == 0 || buffer[r * DEPTH + k] < 4096) && MAY_PASS(k, 0) && MAY_PASS(k, 1) &&       \
   MAY_PASS(k, 2))

inline flush(k) {
  write(r, PLACE_OF(k), buffer[r * DEPTH + k] & 15);
  pending[r]--;
  i = k;
  do
  :: i < pending[r] -> buffer[r * DEPTH + i] = buffer[r * DEPTH + i + 1]; i++
  :: else -> break
  od;
  buffer[r * DEPTH + i] = 0;
  i = 0
}

proctype Memory(byte r) {
  byte i;
end:
  do
  :: atomic { MAY_FLUSH(0) -> flush(0) }
  :: atomic { MAY_FLUSH(1) -> flush(1) }
  :: atomic { MAY_FLUSH(2) -> flush(2) }
  :: atomic { MAY_FLUSH(3) -> flush(3) }
  od
}
#else
#define STORE(place, v, release) atomic { write(me, (place), (v)) }
#define FENCE skip
#endif

#ifdef WITHOUT_FENCE_OF_WAITER
#define FENCE_OF_WAITER skip
#else
#define FENCE_OF_WAITER FENCE
#endif
#ifdef WITHOUT_FENCE_OF_RINGER
#define FENCE_OF_RINGER skip
#else
#define FENCE_OF_RINGER FENCE
#endif
#ifdef WITHOUT_RELEASE_OF_FLAG
#define FLAG_RELEASE 0
#else
#define FLAG_RELEASE 1
#endif
#ifdef HANDOVER
#define MAY_GIVE_UP (handovers > 0)
#else
#define MAY_GIVE_UP false
#endif

/* bell.fetch_add, then futex_wake. */
inline ring_always(p) {
#ifndef WITHOUT_COUNT_OF_BELL
  atomic { FENCE; rung[p] = 1 }
#endif
  asleep[p] = 0
}

inline ring(p) {
  if
  :: waits_on[p] == me + 1 -> ring_always(p)
  :: else
  fi
}

inline ring_all_always() {
  ring_always((me + 1) % W);
#if W == 3
  ring_always((me + 2) % W)
#endif
}

#ifdef SPINNING
inline wait_for(word, v, p) { word >= v }
inline ring_all() { skip }
#else
/* Waits until word >= v, on peer p; or leaves for `failing` or `leaving`. */
inline wait_for(word, v, p) {
  do
  :: word >= v -> break
  :: atomic {
      word < v ->
#ifndef WITH_BELL_READ_LATE
      rung[me] = 0
#endif
    }
    STORE(kWaits, p + 1, 0);
    FENCE_OF_WAITER;
#ifndef WITHOUT_SECOND_LOOK
    if
    :: word >= v -> STORE(kWaits, 0, 0); break
    :: word < v
    fi;
#endif
#ifdef WITH_BELL_READ_LATE
    rung[me] = 0;
#endif
#ifdef TROUBLE
    if
    :: poisoned -> STORE(kWaits, 0, 0); goto stopped
    :: !poisoned
    fi;
    if
    :: left_group[p] ->
      STORE(kWaits, 0, 0);
      if
      :: word >= v -> break
      :: word < v -> assert(trouble); goto failing
      fi
    :: !left_group[p]
    fi;
#endif
#if defined(CLOSE) && !defined(WITHOUT_LOOK_AT_CLOSED)
    if
    :: me == 0 && closed -> STORE(kWaits, 0, 0); goto leaving
    :: me != 0 || !closed
    fi;
#endif
    if
    :: atomic { rung[me] == 0 -> asleep[me] = 1 }
      asleep[me] == 0
    :: rung[me] == 1
    :: MAY_GIVE_UP -> handovers-- /* the time of this holder is up: it unlocks the role */
    fi;
    STORE(kWaits, 0, 0);
#ifdef CLOSE
    if
    :: me == 0 && closed -> goto leaving
    :: me != 0 || !closed
    fi
#endif
  od
}

inline ring_all() {
  ring((me + 1) % W);
#if W == 3
  ring((me + 2) % W)
#endif
}
#endif

inline begin_slice() {
  atomic {
    if
    :: mask[t] == 0 ->
#ifdef EMPTY
      skip
#else
      mask[t] = (1 << W) - 1
#endif
    :: else
    fi
  }
  if
  :: atomic { mask[t] == 0 -> mask[t] = 1 }
  :: atomic { mask[t] == 0 -> mask[t] = 2 }
  :: atomic { mask[t] == 0 -> mask[t] = 3 }
#if W == 3
  :: atomic { mask[t] == 0 -> mask[t] = 4 }
  :: atomic { mask[t] == 0 -> mask[t] = 5 }
  :: atomic { mask[t] == 0 -> mask[t] = 6 }
  :: atomic { mask[t] == 0 -> mask[t] = 7 }
#endif
  :: mask[t] != 0
  fi;
  if
#ifndef WITHOUT_DONE_CHECK
  :: t > 2 ->
    wait_for(done_by[(me + 1) % W], t - 2, (me + 1) % W);
#if W == 3
    wait_for(done_by[(me + 2) % W], t - 2, (me + 2) % W)
#endif
#endif
  :: else
  fi
}

/* Whatever is written lies somewhere in the half of slice t, where its user before that may have had anything. */
#if W == 3
#define ALL_FINISHED(t) (finished[0] >= t && finished[1] >= t && finished[2] >= t)
#else
#define ALL_FINISHED(t) (finished[0] >= t && finished[1] >= t)
#endif
inline fill(place) {
  atomic {
    assert(t <= HALVES || ALL_FINISHED(t - HALVES));
    STORE(kPayload + place, t, 0)
  }
}

#define READ(place) assert(payload[HALF(t) * PLACES + place] == t)

inline send(place) {
#ifdef WITH_BELL_BEFORE_STORE
  ring_all();
  STORE(kFlag + place, t, FLAG_RELEASE);
  FENCE
#else
  STORE(kFlag + place, t, FLAG_RELEASE);
  FENCE_OF_RINGER;
  ring_all()
#endif
}

#define FULL(chunk) (mask[t] & (1 << (chunk)))

inline scatter(owner) {
  if
  :: FULL(owner) -> fill(me * W + owner); send(me * W + owner)
  :: else
  fi
}

inline gather(owner) {
  if
  :: FULL(owner) ->
    wait_for(flag[owner * W + owner], t, owner);
    READ(owner * W + owner)
  :: else
  fi
}

#ifdef GATHER
inline run_steps() {
  if
  :: FULL(me) -> fill(me * W + me); send(me * W + me)
  :: else
  fi;
  gather((me + 1) % W);
#if W == 3
  gather((me + 2) % W)
#endif
}
#else
inline run_steps() {
  scatter((me + 1) % W);
#if W == 3
  scatter((me + 2) % W);
#endif
  if
  :: FULL(me) ->
#if W == 3
    wait_for(flag[(me + 2) % W * W + me], t, (me + 2) % W);
#endif
    wait_for(flag[(me + 1) % W * W + me], t, (me + 1) % W);
    READ((me + 1) % W * W + me);
#if W == 3
    READ((me + 2) % W * W + me);
#endif
    fill(me * W + me);
    send(me * W + me)
  :: else
  fi;
  gather((me + 1) % W);
#if W == 3
  gather((me + 2) % W)
#endif
}
#endif

/* Makes states alike that differ only in what can matter to nobody any more. */
inline forget() {
  if
  :: ALL_FINISHED(t) ->
    mask[t] = 255;
    i = 0;
    do
    :: i < PLACES ->
      if
      :: flag[i] <= t -> flag[i] = 0
      :: else
      fi;
      if
      :: payload[HALF(t) * PLACES + i] <= t -> payload[HALF(t) * PLACES + i] = 0
      :: else
      fi;
      i++
    :: else -> i = 0; break
    od
  :: else
  fi
}

inline finish_slice() {
  atomic {
    finished[me] = t;
    forget()
  }
  STORE(kDone, t, 1);
  FENCE_OF_RINGER;
  ring_all()
}

/* Slices 1 and 4 begin operations that need a larger segment. */
#define NEEDS_GENERATION(t) (t == 1 || t == 4)

inline ensure_segment() {
  if
  :: NEEDS_GENERATION(t) ->
    made++;
    if
    :: me == 0 ->
      linked = made;
      STORE(kName, made, 0);
      STORE(kGeneration, made, 1);
      FENCE_OF_RINGER;
      ring_all();
#ifndef WITHOUT_WAIT_FOR_MAPPED
      wait_for(mapped[1], made, 1);
#if W == 3
      wait_for(mapped[2], made, 2);
#endif
#endif
      linked = 0
    :: else ->
      wait_for(generation, made, 0);
      assert(name == made && linked == made);
      STORE(kMapped, made, 1);
      FENCE_OF_RINGER;
      ring(0)
    fi
  :: else
  fi
}

proctype Rank(byte me) {
  byte t = 1, i, handovers = 1, made;
  do
  :: t <= T ->
#ifdef CLOSE
    if
    :: me == 0 && closed -> goto leaving
    :: me != 0 -> left_group[0] /* a peer that makes no more calls until rank 0 is gone */
    :: true
    fi;
#endif
#ifdef POISON
    if
    :: atomic { failures > 0 -> failures--; trouble = 1 } goto failing
    :: true
    fi;
#endif
#ifdef LEAVE
    if
    :: atomic { failures > 0 -> failures--; trouble = 1 } goto leaving
    :: true
    fi;
#endif
#ifdef GROW
    ensure_segment();
#endif
    begin_slice();
    run_steps();
    finish_slice();
    t++
  :: else -> goto leaving
  od;
failing: /* whoever claims the poison writes it, and rings all */
#ifdef TROUBLE
  FENCE;
  if
  :: atomic { !poisoned -> poisoned = 1 }
#ifndef WITHOUT_BELL_OF_POISON
    ring_all_always()
#endif
  :: poisoned
  fi;
  goto stopped; /* with an error; it need not leave */
#endif
leaving: /* close */
#ifdef TROUBLE
  FENCE;
  left_group[me] = 1;
#ifndef WITHOUT_BELL_OF_LEAVING
  ring_all_always();
#endif
#endif
stopped:
  assert(t == T + 1 || trouble) /* nobody gives up without a reason */
}

#ifdef CLOSE
proctype Closer() {
  trouble = 1;
  closed = 1;
  rung[0] = 1;
  asleep[0] = 0
}
#endif

init {
  atomic {
    failures = 1;
    run Rank(0);
    run Rank(1);
#if W == 3
    run Rank(2);
#endif
#ifdef BUFFERS
    run Memory(0);
    run Memory(1);
#if W == 3
    run Memory(2);
#endif
#endif
#ifdef CLOSE
    run Closer();
#endif
  }
}
