/* The life of N requests across clients, ingress, tokenizer pool, ring, scheduler and shard.
 *
 * Stages are modelled as they are built: one message per step, a step is atomic, outputs go to lanes. Ingress takes its
 * lanes in order: aborts, tokenised, owed aborts that the ring has room for, fresh. Its last step is two steps here,
 * Register and push, because the scheduler may die between them. Lanes that are "reserved" in the architecture are
 * asserted never to be full. All states are changed through the generated tables only.
 *
 * DEATH: the scheduler may die at any point: its end of the ingress ring closes first, then the egress ring, or with
 * EGRESS_FIRST the other way round.
 * HALF: it may close its end of the ingress ring only, and serve what it has.
 * STOP: somebody calls shutdown at any point. HANG: the scheduler may stop serving and only notices closed rings.
 *
 * Checked: no illegal step of any machine; reserved lanes are never full; an abort in the ring stands behind its own
 * request and is the only one; at rest every submitted request is over, its sink has ended, nobody holds it, and the
 * scheduler heard of exactly those aborts that ended NOTIFIED; with STOP every process ends (invalid end state).
 */
#include "machines.pml"
#ifndef N
#define N 2
#endif
#ifndef RING_CAPACITY
#define RING_CAPACITY 1
#endif
#ifndef EGRESS_CAPACITY
#define EGRESS_CAPACITY 1
#endif
/* Register, Fail, and one abort from the client and one from shutdown: four slots are booked per request. */
#ifdef MUTANT_LANE_TOO_SHORT
#define LANE (3 * N)
#else
#define LANE (4 * N)
#endif
#ifndef CHUNKS
#define CHUNKS 1
#endif

mtype = { m_register, m_fail, m_abort, m_request, m_chunk, m_final, m_error };

/* where ingress believes a request to be */
#define NOWHERE 0
#define INGRESS 1
#define SHARD 2
#define GONE 3
#define CANCELLED 4

chan fresh = [N] of { byte };
chan work = [1] of { byte };
chan tokenized = [N] of { byte, bool };
chan aborts = [2 * N] of { byte, byte };
chan owed = [N] of { byte };
chan lane = [LANE] of { mtype, byte, byte };
chan ring = [RING_CAPACITY] of { mtype, byte };
chan egress = [EGRESS_CAPACITY] of { mtype, byte };

byte rq[N], ab[N], sk[N], lc, place[N], chunks[N];
bool submitted[N], over[N], held[N], seen[N], told[N], runs[N];
bool scheduler_gone, egress_gone, stopping, rings_closed, joined, ingress_done, shard_done, pool_done;
hidden byte oc, was, j;
#ifdef MUTANT_REGISTER_AFTER_PUSH
bool late_register;
#endif

#define RING_CLOSED_NOW (scheduler_gone || rings_closed)

inline RQ(r, event) {
  was = rq[r];
  REQUEST_step(rq[r], event, oc);
  printf("@request %d %d %d %d\n", r, was, event, rq[r]);
  assert(oc != 2)
}
inline AB(r, event) {
  was = ab[r];
  ABORT_step(ab[r], event, oc);
  printf("@abort %d %d %d %d\n", r, was, event, ab[r]);
  assert(oc != 2)
}
inline SK(r, event) {
  was = sk[r];
  SINK_step(sk[r], event, oc);
  printf("@sink %d %d %d %d\n", r, was, event, sk[r]);
  assert(oc != 2)
}
inline LC(event) {
  was = lc;
  LIFECYCLE_step(lc, event, oc);
  printf("@lifecycle 0 %d %d %d\n", was, event, lc);
  assert(oc != 2)
}
/* The terminal item of a request that failed. A client that has left is not told; nobody is told twice. */
inline fail_sink(r) { SK(r, SINK_E_PUT_ERROR) }

#ifdef STOP
#define IDLE
#else
#define IDLE end_idle:
#endif

proctype client(byte r) {
  atomic {
    if
    :: stopping -> goto refused
    :: !stopping && len(fresh) == N -> goto refused
    :: !stopping && len(fresh) < N -> fresh!r; submitted[r] = true; printf("client %d: submits\n", r)
    fi
  };
  if
  :: atomic {
      printf("client %d: leaves\n", r);
      SK(r, SINK_E_CLOSE);
      assert(len(aborts) < 2 * N);
      aborts!r, ABORT_E_ABORT_GUARD
    }
  :: true
  fi;
refused:
  skip
}

proctype pool() {
  byte r;
IDLE
  do
  :: work?r ->
    assert(len(tokenized) < N);
    if
    :: tokenized!r, true
#ifdef MUTANT_WORKER_SWALLOWS
    :: printf("pool: raises on %d and says nothing\n", r)
#else
    :: tokenized!r, false
#endif
    fi;
    r = 0
#ifndef MUTANT_POOL_NOT_TOLD
  :: rings_closed && len(work) == 0 -> break
#endif
  od;
  pool_done = true
}

inline finish_local(r) {
  fail_sink(r);
  RQ(r, REQUEST_E_ERROR);
  AB(r, ABORT_E_FINISHED);
  place[r] = GONE;
  over[r] = true
}
/* The indivisible last step, up to the push itself. */
inline last_step(r) {
  if
  :: RQ(r, REQUEST_E_ERROR); printf("ingress: %d is too long\n", r); fail_sink(r); AB(r, ABORT_E_FINISHED);
     place[r] = GONE; over[r] = true
#ifdef MUTANT_NO_ROOM_CHECK
  :: true ->
#else
  :: RING_CLOSED_NOW -> AB(r, ABORT_E_RING_CLOSED); finish_local(r)
  :: !RING_CLOSED_NOW && len(ring) + len(owed) >= RING_CAPACITY ->
#ifdef REACH_FULL_RING
     assert(false);
#endif
     printf("ingress: no room for %d, 503\n", r); AB(r, ABORT_E_RING_FULL); finish_local(r)
  :: !RING_CLOSED_NOW && len(ring) + len(owed) < RING_CAPACITY ->
#endif
     RQ(r, REQUEST_E_PRE_SEND_VALIDATED);
#ifndef MUTANT_PUSH_TOLD_LATE
     AB(r, ABORT_E_RING_TOOK_REQUEST); /* while the request is still ours: after Register it has another owner */
#endif
     place[r] = SHARD;
#ifndef MUTANT_REGISTER_AFTER_PUSH
     assert(len(lane) < LANE);
     lane!m_register, r, 0;
#endif
     pushing = true
  fi
}

#define ABOVE_TOKENIZED (!pushing && len(aborts) == 0)
#define ABOVE_OWED (ABOVE_TOKENIZED && len(tokenized) == 0)
#define OWED_READY (len(owed) > 0 && (RING_CLOSED_NOW || len(ring) < RING_CAPACITY))

proctype ingress() {
  byte r, event;
  bool good, pushing;
IDLE
  do
  :: atomic { pushing ->
      pushing = false;
      if
      :: RING_CLOSED_NOW ->
        printf("ingress: the ring closed before the push of %d\n", r);
#ifndef MUTANT_REFUSED_PUSH_FORGOTTEN
        assert(len(lane) < LANE);
        lane!m_fail, r, 0
#endif
      :: else ->
        assert(len(ring) < RING_CAPACITY);
        ring!m_request, r;
#ifdef MUTANT_PUSH_TOLD_LATE
        AB(r, ABORT_E_RING_TOOK_REQUEST);
#endif
#ifdef MUTANT_REGISTER_AFTER_PUSH
        late_register = true;
#endif
        printf("ingress: request %d is in the ring\n", r)
      fi
    }
#ifdef MUTANT_REGISTER_AFTER_PUSH
  :: atomic { late_register -> late_register = false; lane!m_register, r, 0 }
#endif
  :: atomic { !pushing && len(aborts) > 0 ->
      aborts?r, event;
      printf("ingress: abort of %d\n", r);
      if
      :: place[r] == NOWHERE -> place[r] = CANCELLED
      :: place[r] == INGRESS ->
        AB(r, event);
        RQ(r, REQUEST_E_DISCONNECT);
        if :: sk[r] == SINK_S_OPEN -> fail_sink(r) :: else fi;
#ifdef MUTANT_ABORT_OF_UNPUSHED
        owed!r;
#endif
        place[r] = GONE;
        over[r] = true
      :: place[r] == SHARD -> assert(len(lane) < LANE); lane!m_abort, r, event
      :: else
      fi;
      r = 0; event = 0
    }
  :: atomic { ABOVE_TOKENIZED && len(tokenized) > 0 ->
      tokenized?r, good;
      if
      :: place[r] == INGRESS && good -> RQ(r, REQUEST_E_TOKENIZE_DONE); last_step(r)
      :: place[r] == INGRESS && !good -> printf("ingress: tokenizing %d failed\n", r); finish_local(r)
      :: else ->
#ifdef REACH_LATE_TOKENS
        assert(false);
#endif
        RQ(r, REQUEST_E_TOKENIZE_DONE);
        assert(oc == 1)
      fi;
      good = false;
      if :: !pushing -> r = 0 :: else fi
    }
  :: atomic { ABOVE_OWED && OWED_READY ->
      owed?r;
      if
      :: RING_CLOSED_NOW ->
#ifdef REACH_UNDELIVERABLE
        assert(false);
#endif
        AB(r, ABORT_E_RING_CLOSED)
      :: else -> AB(r, ABORT_E_RING_TOOK_ABORT); ring!m_abort, r; printf("ingress: abort of %d is in the ring\n", r)
      fi;
      r = 0
    }
  :: atomic { ABOVE_OWED && !OWED_READY && len(fresh) > 0 ->
      fresh?r;
      if
      :: place[r] == CANCELLED ->
        if :: sk[r] == SINK_S_OPEN -> fail_sink(r) :: else fi;
        place[r] = GONE;
        over[r] = true
      :: else ->
        place[r] = INGRESS;
        RQ(r, REQUEST_E_VALIDATED);
        RQ(r, REQUEST_E_NEEDS_NORMALIZE);
        if
        :: RQ(r, REQUEST_E_NEEDS_TOKENIZE);
          if
          :: len(work) < 1 -> work!r
          :: else -> printf("ingress: the pool's queue is full, 503 for %d\n", r); finish_local(r)
          fi
#ifdef MUTANT_IDS_SKIP_CHECKS
        :: last_step(r)
#else
        :: RQ(r, REQUEST_E_ALREADY_TOKENIZED); last_step(r)
#endif
        fi
      fi;
      if :: !pushing -> r = 0 :: else fi
    }
  :: rings_closed && ABOVE_OWED && len(owed) == 0 && len(fresh) == 0 && shard_done -> break
  od;
  ingress_done = true
}

inline owe(r) {
  if
  :: ab[r] == ABORT_S_REQUESTED ->
#ifdef MUTANT_DROPPED_WHEN_FULL
    if :: len(ring) == RING_CAPACITY -> printf("shard: the ring is full, the abort of %d is dropped\n", r) :: else -> owed!r fi
#else
    assert(len(owed) < N); owed!r
#endif
  :: else
  fi
}
inline drop(r) { held[r] = false; over[r] = true }

proctype shard() {
  mtype kind;
  byte r, event;
IDLE
  do
  :: atomic { len(lane) > 0 ->
      lane?kind, r, event;
      if
      :: kind == m_register -> held[r] = true
      :: kind == m_fail && held[r] -> fail_sink(r); RQ(r, REQUEST_E_ERROR); AB(r, ABORT_E_FINISHED); drop(r)
#ifdef MUTANT_ABORT_AFTER_THE_END
      :: kind == m_abort ->
#else
      :: kind == m_abort && held[r] ->
#endif
        AB(r, event);
        RQ(r, REQUEST_E_DISCONNECT);
        if :: sk[r] == SINK_S_OPEN -> fail_sink(r) :: else fi;
#ifdef MUTANT_ABORT_AFTER_THE_END
        owed!r;
#else
        owe(r);
#endif
        drop(r)
      :: else
      fi;
      r = 0; event = 0; kind = 0
    }
#ifdef MUTANT_FRAMES_BEFORE_REGISTRATION
  :: atomic { len(egress) > 0 ->
#else
  :: atomic { len(lane) == 0 && len(egress) > 0 ->
#endif
      egress?kind, r;
      if
      :: !held[r] ->
        if :: kind == m_final -> RQ(r, REQUEST_E_FINAL_CHUNK) :: kind == m_chunk -> RQ(r, REQUEST_E_CHUNK)
           :: kind == m_error -> RQ(r, REQUEST_E_ERROR) fi;
        assert(oc == 1)
      :: held[r] ->
        if
        :: kind == m_error -> AB(r, ABORT_E_ABORT_DETOK); fail_sink(r); RQ(r, REQUEST_E_ERROR); owe(r); drop(r)
        :: else ->
          if :: rq[r] == REQUEST_S_QUEUED -> RQ(r, REQUEST_E_SCHEDULER_PICKED) :: else fi;
          if
          :: kind == m_final ->
            RQ(r, REQUEST_E_FINAL_CHUNK);
            SK(r, SINK_E_PUT_FINAL);
#ifdef MUTANT_TERMINAL_TWICE
            SK(r, SINK_E_PUT_FINAL);
#endif
            RQ(r, REQUEST_E_FINAL_FRAME_SENT);
            AB(r, ABORT_E_FINISHED);
            drop(r)
          :: kind == m_chunk && sk[r] == SINK_S_CLOSED ->
            AB(r, ABORT_E_ABORT_DETOK); RQ(r, REQUEST_E_DISCONNECT); owe(r); drop(r)
          :: kind == m_chunk && sk[r] != SINK_S_CLOSED ->
            RQ(r, REQUEST_E_CHUNK);
            if
            :: SK(r, SINK_E_PUT)
            :: printf("shard: the sink of %d is full\n", r);
              SK(r, SINK_E_OVERFLOW);
              AB(r, ABORT_E_ABORT_DETOK); RQ(r, REQUEST_E_ERROR); owe(r); drop(r)
            fi
          fi
        fi
      fi;
      r = 0; kind = 0
    }
#ifndef MUTANT_DEATH_UNNOTICED
  :: atomic { len(lane) == 0 && len(egress) == 0 && egress_gone && (held[0] || held[N - 1]) ->
      printf("shard: the scheduler is gone\n");
      j = 0;
      do
      :: j == N -> j = 0; break
      :: else ->
        if
        :: held[j] -> AB(j, ABORT_E_ABORT_DETOK); fail_sink(j); RQ(j, REQUEST_E_ERROR); owe(j); drop(j)
        :: else
        fi;
        j++
      od
    }
#endif
  :: rings_closed && len(lane) == 0 && len(egress) == 0 -> break
  od;
  shard_done = true
}

#define SERVE(i) \
  :: atomic { runs[i] && len(egress) < EGRESS_CAPACITY && chunks[i] < CHUNKS -> chunks[i]++; egress!m_chunk, i; \
       printf("scheduler: a chunk for %d\n", i) } \
  :: atomic { runs[i] && len(egress) < EGRESS_CAPACITY -> runs[i] = false; egress!m_final, i; printf("scheduler: %d is done\n", i) } \
  :: atomic { runs[i] && len(egress) < EGRESS_CAPACITY -> runs[i] = false; egress!m_error, i; printf("scheduler: cannot read %d\n", i) }

proctype scheduler() {
  mtype kind;
  byte r;
IDLE
  do
  :: atomic { len(ring) > 0 ->
      ring?kind, r;
      if
      :: kind == m_request -> assert(!seen[r] && !told[r]); seen[r] = true; runs[r] = true
      :: kind == m_abort -> assert(seen[r] && !told[r]); told[r] = true; runs[r] = false
      fi;
      kind = 0; r = 0
    }
  SERVE(0)
#if N > 1
  SERVE(1)
#endif
#if N > 2
  SERVE(2)
#endif
#ifdef DEATH
#ifdef EGRESS_FIRST
  :: atomic { egress_gone = true; printf("scheduler: dies\n") };
    scheduler_gone = true;
    break
#else
  :: atomic { scheduler_gone = true; printf("scheduler: dies\n") };
    egress_gone = true;
    break
#endif
#endif
#ifdef HALF
  :: atomic { !scheduler_gone -> scheduler_gone = true; printf("scheduler: takes no more requests\n") }
#endif
#ifdef HANG
  :: rings_closed -> break
  :: printf("scheduler: hangs\n"); rings_closed; break
#else
  :: rings_closed -> break
#endif
  od
}

#if N > 2
#define ALL_OVER ((!submitted[0] || over[0]) && (!submitted[1] || over[1]) && (!submitted[2] || over[2]))
#elif N > 1
#define ALL_OVER ((!submitted[0] || over[0]) && (!submitted[1] || over[1]))
#else
#define ALL_OVER (!submitted[0] || over[0])
#endif

proctype manager() {
  byte r;
  atomic { LC(LIFECYCLE_E_START); LC(LIFECYCLE_E_STARTED) };
#ifdef STOP
  atomic { stopping = true; LC(LIFECYCLE_E_DRAIN); printf("manager: shutdown\n") };
  if
  :: ALL_OVER
  :: atomic { !ALL_OVER ->
#ifdef REACH_DEADLINE
      assert(false);
#endif
      printf("manager: the drain deadline passed\n");
#ifndef MUTANT_DEADLINE_FORGETS
      r = 0;
      do
      :: r == N -> r = 0; break
      :: else ->
        if :: submitted[r] && !over[r] -> assert(len(aborts) < 2 * N); aborts!r, ABORT_E_ABORT_SHUTDOWN :: else fi;
        r++
      od
#endif
    }
  fi;
  ALL_OVER;
  atomic { LC(LIFECYCLE_E_DRAINED) };
  if
  :: len(owed) == 0
  :: true /* the bound passed */
  fi;
  rings_closed = true;
  ingress_done && shard_done && pool_done;
  atomic { LC(LIFECYCLE_E_JOINED); joined = true; assert(LIFECYCLE_TERMINAL(lc)) }
#endif
}

/* When nothing else can move. */
proctype watch() {
  byte r;
  timeout;
  atomic {
    printf("at rest\n");
    do
    :: r == N -> break
    :: else ->
      if
      :: submitted[r] ->
        assert(over[r]);
        assert(sk[r] != SINK_S_OPEN);
        assert(!held[r]);
        assert(REQUEST_TERMINAL(rq[r]) || (rq[r] == REQUEST_S_RECEIVED && ab[r] == ABORT_S_NOT_PUSHED));
        assert(ABORT_TERMINAL(ab[r]) || ab[r] == ABORT_S_NOT_PUSHED);
        assert(scheduler_gone || rings_closed || told[r] == (ab[r] == ABORT_S_NOTIFIED));
        assert(!told[r] || rq[r] != REQUEST_S_COMPLETED)
      :: else -> assert(!over[r] && !seen[r])
      fi;
      r++
    od;
    assert(len(owed) == 0);
    assert(rings_closed || (len(lane) == 0 && len(aborts) == 0)) /* a handle may close after the last stage has ended */
  }
}

init {
  atomic {
    REQUEST_tables();
    ABORT_tables();
    SINK_tables();
    LIFECYCLE_tables();
    j = 0;
    do :: j == N -> j = 0; break :: else -> run client(j); j++ od;
    run pool();
    run ingress();
    run shard();
    run scheduler();
    run manager();
    run watch()
  }
}

#ifdef LTL_over
/* Whatever fails, a submitted request comes to its end. */
ltl every_request_ends { [] (submitted[0] -> <> over[0]) }
#endif
#ifdef LTL_stops
/* Shutdown terminates. */
ltl shutdown_ends { <> joined }
#endif
