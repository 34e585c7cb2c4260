/* Delivery of the abort of one request, in a ring that other traffic keeps full.
 *
 * Four sources ask once each, in any order. Ingress owns the ring; the scheduler drains it, one item at a time, and with
 * CLOSE may close it for good. FINISH lets the request end by itself at any time. The other traffic is endless, so that
 * an abort which is not served before it starves: that shows as a cycle, not as a deadlock.
 *
 * Checked: no illegal step of the abort machine; the first source is kept; in the ring the abort stands behind its
 * request and alone; once owed it is delivered or the ring has closed (LTL, weak fairness).
 */
#include "machines.pml"
#ifndef CAPACITY
#define CAPACITY 2
#endif

mtype = { m_request, m_abort, m_other };
chan ring = [CAPACITY] of { mtype };
chan asks = [4] of { byte };
byte ab, first = 255;
bool pushed, pending, closed, finished, seen, told, asked;
hidden byte oc, was;

inline AB(event) {
  was = ab;
  ABORT_step(ab, event, oc);
  printf("@abort 0 %d %d %d\n", was, event, ab);
  assert(oc != 2)
}

proctype sources() {
  bool guard, detok, api, shutdown;
  do
  :: atomic { !guard -> guard = true; asks!ABORT_E_ABORT_GUARD }
  :: atomic { !detok -> detok = true; asks!ABORT_E_ABORT_DETOK }
  :: atomic { !api -> api = true; asks!ABORT_E_ABORT_API }
  :: atomic { !shutdown -> shutdown = true; asks!ABORT_E_ABORT_SHUTDOWN }
  :: true -> break
  od
}

#ifdef MUTANT_TRAFFIC_BESIDE
#define OWED_TURN (pending && len(asks) == 0)
#define TRAFFIC_TURN (!closed && len(asks) == 0 && len(ring) < CAPACITY)
#else
#define OWED_TURN (pending && len(asks) == 0)
#define TRAFFIC_TURN (!closed && len(asks) == 0 && (pending -> 0 : len(ring) < CAPACITY))
#endif

proctype ingress() {
  byte event;
end_idle:
  do
  :: atomic { len(asks) > 0 ->
      asks?event;
      was = ab;
#ifdef MUTANT_SECOND_SOURCE_SENDS
      if :: ab == ABORT_S_REQUESTED || ab == ABORT_S_NOTIFIED -> pending = true :: else fi;
#endif
      if :: ab == ABORT_S_NOT_PUSHED || ab == ABORT_S_PUSHED -> assert(first == 255); first = event :: else fi;
      AB(event);
      if
      :: oc == 0 && ab == ABORT_S_REQUESTED ->
        pending = true;
        if
        :: len(ring) == CAPACITY && !closed -> AB(ABORT_E_RING_FULL);
#ifdef MUTANT_DROPPED_WHEN_FULL
          pending = false;
#endif
          printf("ingress: the ring is full, the abort waits\n")
        :: else
        fi
      :: else
      fi;
#ifdef MUTANT_OVERTAKES
      if :: ab == ABORT_S_CANCELLED_LOCALLY && !closed && len(ring) < CAPACITY -> ring!m_abort :: else fi;
#endif
      event = 0
    }
  :: atomic { OWED_TURN && closed -> pending = false; AB(ABORT_E_RING_CLOSED) }
  :: atomic { OWED_TURN && !closed && len(ring) < CAPACITY ->
      pending = false;
#ifndef MUTANT_TAKEN_AND_LOST
      ring!m_abort;
#endif
      printf("ingress: the abort is in the ring\n");
      AB(ABORT_E_RING_TOOK_ABORT)
    }
  :: atomic { !pushed && ab == ABORT_S_NOT_PUSHED && TRAFFIC_TURN && !finished ->
      pushed = true;
      ring!m_request;
      printf("ingress: the request is in the ring\n");
      AB(ABORT_E_RING_TOOK_REQUEST)
    }
  :: atomic { TRAFFIC_TURN -> ring!m_other; printf("ingress: other traffic\n") }
#ifdef FINISH
  :: atomic { !finished && len(asks) == 0 && !pending -> finished = true; AB(ABORT_E_FINISHED) }
#endif
  od
}

proctype scheduler() {
  mtype kind;
end_idle:
  do
  :: atomic { len(ring) > 0 ->
      ring?kind;
      if
      :: kind == m_request -> assert(!seen && !told); seen = true
      :: kind == m_abort -> assert(seen && !told); told = true
      :: else
      fi;
      kind = 0
    }
#ifdef CLOSE
  :: atomic { !closed -> closed = true; printf("scheduler: closes the ring\n") }; break
#endif
  od
}

init {
  atomic { ABORT_tables(); run sources(); run ingress(); run scheduler() }
}

#ifdef LTL_delivered
ltl delivered { [] ((ab == ABORT_S_REQUESTED) -> <> (ab != ABORT_S_REQUESTED)) }
#endif
#ifdef LTL_heard
/* What the ring took, a scheduler that lives hears of. */
ltl heard { [] ((ab == ABORT_S_NOTIFIED) -> <> (told || closed)) }
#endif
