/* One boundary ring at monitor granularity: a lock, two conditions, a stash, two closes.
 *
 * PRODUCERS processes push ITEMS items each (blocking or trying); one consumer waits and drains; a closer closes the
 * producers' end at any time, or with LATE only when all producers are through (an early close hides lost wake-ups, so
 * both are run). With POLL the consumer's wait may time out, and it polls. With QUIT the consumer may close its own
 * end at any time and empty the ring afterwards; with LEAVE it leaves what is there, so that only the close can wake.
 *
 * Checked: every operation, with its event resolved after counting, is legal in the ring machine (generated table), and
 * the table's state is always the counted one; first in, first out across all producers; a drain gives at most its max;
 * what was accepted is drained; nobody stays parked (invalid end state; as LTL where the consumer polls).
 */
#include "machines.pml"
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef CAPACITY
#define CAPACITY 2
#endif
#define CONSUMER PRODUCERS
#define ROOM 1    /* parked until there is room */
#define SOMETHING 2 /* parked until there is something */

chan q = [CAPACITY] of { byte };
bool stashed, producer_gone, consumer_gone;
byte stash, rs, accepted, given, through;
byte parked[PRODUCERS + 1];
bool locked;
hidden byte oc, was, i;

#ifdef MUTANT_STASH_UNCOUNTED
#define FILL len(q)
#else
#define FILL (len(q) + stashed)
#endif
#define CLOSED (producer_gone || consumer_gone)

inline counted() {
  assert(rs == 5 * (producer_gone + 2 * consumer_gone)
    + (len(q) + stashed == 0 -> 0 : (len(q) + stashed >= CAPACITY -> 2 : 1) + (stashed -> 2 : 0)));
  assert(len(q) + stashed <= CAPACITY)
}
inline R(event) {
  was = rs;
  RING_step(rs, event, oc);
  printf("@ring 0 %d %d %d\n", was, event, rs);
  assert(oc != 2);
  counted()
}
inline lock() { atomic { !locked -> locked = true } }
inline park(me, reason) {
  atomic { parked[me] = reason; locked = false; printf("%d parks (%d: 1 no room, 2 nothing there)\n", me, reason) };
  atomic { parked[me] == 0 && !locked -> locked = true }
}
/* notify: any one of those who are parked for this reason */
inline wake_one(reason) {
  if
  :: parked[0] == reason -> parked[0] = 0
  :: PRODUCERS > 1 && parked[1] == reason -> parked[1] = 0
  :: PRODUCERS > 2 && parked[PRODUCERS - 1] == reason -> parked[PRODUCERS - 1] = 0
  :: parked[CONSUMER] == reason -> parked[CONSUMER] = 0
  :: else
  fi
}
inline wake_all(reason) {
  i = 0;
  do
  :: i > PRODUCERS -> i = 0; break
  :: else -> if :: parked[i] == reason -> parked[i] = 0 :: else fi; i++
  od
}

/* notify_all on both conditions */
inline close_wakes() {
#ifndef MUTANT_CLOSE_WAKES_NOBODY
#ifdef MUTANT_CLOSE_WAKES_ONE
  wake_one(ROOM);
  wake_one(SOMETHING)
#else
  wake_all(ROOM);
  wake_all(SOMETHING)
#endif
#else
  skip
#endif
}

proctype producer(byte me) {
  byte n;
  bool tries, again;
  do
  :: n == ITEMS -> break
  :: else ->
    n++;
    if :: tries = true :: tries = false fi;
    again = true;
    lock();
    do
    :: !again -> break
    :: else ->
      if
#ifdef MUTANT_ACCEPT_AFTER_CLOSE
      :: CLOSED && FILL == CAPACITY -> atomic { R(RING_E_REFUSED_CLOSED); again = false }
#else
      :: CLOSED -> atomic { R(RING_E_REFUSED_CLOSED); again = false; printf("%d: push refused, closed\n", me) }
#endif
      :: else ->
        if
        :: FILL < CAPACITY -> atomic {
            printf("%d: push of item %d\n", me, accepted);
            q!accepted;
            accepted++;
            if
            :: len(q) + stashed == CAPACITY -> R(RING_E_PUSH_FILLS)
            :: else -> R(RING_E_PUSH)
            fi;
#ifndef MUTANT_PUSH_WAKES_NOBODY
            wake_one(SOMETHING);
#endif
            again = false
          }
        :: else ->
          if
          :: tries -> atomic { R(RING_E_REFUSED_FULL); again = false }
          :: else ->
            park(me, ROOM);
#ifdef MUTANT_NO_SECOND_LOOK
            atomic {
              printf("%d: push of item %d without a second look\n", me, accepted);
              if
              :: len(q) < CAPACITY -> q!accepted; accepted++
              :: else
              fi;
              if :: len(q) + stashed >= CAPACITY -> R(RING_E_PUSH_FILLS) :: else -> R(RING_E_PUSH) fi;
              again = false
            }
#endif
          fi
        fi
      fi
    od;
    locked = false
  od;
  through++
}

proctype consumer() {
  byte max, taken, item;
  bool hit, finished;
  do
  :: finished -> break
  :: else ->
    /* wait */
    hit = false;
    lock();
    do
    :: stashed -> atomic { R(RING_E_WAIT_HIT); hit = true }; break
    :: !stashed && len(q) > 0 -> atomic {
        q?stash;
#ifndef MUTANT_STASH_DROPPED
        stashed = true;
        R(RING_E_WAIT_HIT);
#endif
        hit = true;
        printf("wait: item %d is stashed\n", stash)
      }; break
    :: !stashed && len(q) == 0 && CLOSED -> printf("wait: closed and empty\n"); break
    :: !stashed && len(q) == 0 && !CLOSED ->
#ifdef POLL
      if
      :: park(CONSUMER, SOMETHING)
      :: break /* the timeout */
      fi
#else
      park(CONSUMER, SOMETHING)
#endif
    od;
    if :: !hit && CLOSED -> finished = true :: else fi;
    locked = false;
#ifdef QUIT
    /* Refuse more, keep what is there. */
    if
    :: !consumer_gone ->
      lock();
      atomic {
        consumer_gone = true;
        R(RING_E_CLOSE_CONSUMER);
        close_wakes();
        printf("the consumer closes its end\n");
        locked = false
      }
#ifdef LEAVE
      ; break
#endif
    :: true
    fi;
#endif
    /* drain */
    if :: max = 1 :: max = 2 fi;
    lock();
    atomic {
      taken = 0;
      do
      :: taken == max -> break
      :: taken < max && len(q) + stashed == 0 -> break
      :: taken < max && len(q) + stashed > 0 ->
#ifdef MUTANT_STASH_LAST
        if :: len(q) > 0 -> q?item :: else -> item = stash; stashed = false fi;
#else
        if :: stashed -> item = stash; stashed = false :: else -> q?item fi;
#endif
        printf("drain: item %d\n", item);
        assert(item == given);
        given++;
        taken++
      od;
      assert(taken <= max);
      if
      :: taken == 0
      :: taken > 0 && len(q) + stashed == 0 -> R(RING_E_DRAIN_EMPTIES)
      :: taken > 0 && len(q) + stashed > 0 -> R(RING_E_DRAIN)
      fi;
#ifndef MUTANT_DRAIN_WAKES_NOBODY
      if :: taken > 0 -> wake_all(ROOM) :: else fi;
#endif
      taken = 0; max = 0; item = 0;
      locked = false
    }
  od
}

proctype closer() {
#ifdef LATE
  through == PRODUCERS;
#endif
  lock();
  atomic {
    producer_gone = true;
    R(RING_E_CLOSE_PRODUCER);
    printf("the producers' end closes\n");
    close_wakes();
#ifdef MUTANT_CLOSE_FORGETS
    stashed = false;
    do :: len(q) > 0 -> q?was :: len(q) == 0 -> break od;
#endif
    locked = false
  }
}

init {
  atomic {
    RING_tables();
    i = 0;
    do :: i == PRODUCERS -> i = 0; break :: else -> run producer(i); i++ od;
    run consumer();
    run closer()
  };
  _nr_pr == 1;
  assert(given + len(q) + stashed == accepted);
#ifndef LEAVE
  assert(given == accepted);
#endif
end: true
}

#ifdef LTL_unparked
/* A parked push does not stay parked. */
ltl unparked { [] ((parked[0] == ROOM) -> <> (parked[0] != ROOM)) }
#endif
#ifdef LTL_through
/* Every producer comes to its end. */
ltl all_through { <> (through == PRODUCERS) }
#endif
