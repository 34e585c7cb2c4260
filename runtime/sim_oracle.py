"""What each client of a simulation must see: a model of its own that shares no code with the stages.

Owns: the expected output and end of every request, and the properties of `docs/machines.md` as checks. How it knows:

* It is told what the scheduler handed over (`pushed`), what a shard is about to be given (`given`), what a client read (`got`), and
  what left on the ingress ring (`on_ring`).
* `given` must be `pushed`, in order, whole, and nothing of a rejected frame (6, 8). What a client got must be a prefix of what its
  shard was given, and all of it at a natural end (2). Whoever ends must have a reason of his own (1, 7), and whoever has a reason
  must end. Abort messages on the ring are counted against the ends (5, 11).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..codec import FinishReason
from ..codec.errors import HeadraceError
from ..fsm import RequestState
from .sink import EgressItem, Sink, Taken
from .stages.dispatch import Batch, Failure, Result
from .stages.life import Fail, Forward, Kind, Life, Register

LOST = "lost"


class Broken(AssertionError):
    """A property does not hold. `number` is its number in the list of properties."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"property {number}: {message}")
        self.number = number


class Client:
    """One request and all that is known about it."""

    __slots__ = (
        "aborts",
        "asked",
        "boom",
        "expected",
        "fed_at",
        "final_given",
        "fits",
        "given",
        "got_ids",
        "got_text",
        "index",
        "kind",
        "left",
        "life",
        "mates",
        "messages",
        "natural",
        "over",
        "read_end",
        "registered",
        "rid",
        "room",
        "sent",
        "shown",
        "sink",
        "stepping",
        "stream",
        "terminal",
    )

    def __init__(self, index: int, life: Life, *, fits: bool = True, boom: bool = False, expected: Any = None) -> None:
        self.index = index
        self.life = life
        self.rid = life.rid
        self.shown = life.shown_rid
        self.kind = life.kind
        self.stream = life.stream
        self.sink: Sink | None = life.sink
        self.stepping = life.sink is None
        self.fits = fits  # False: the length checks must refuse it
        self.boom = boom  # True: the tokenizer raises on it
        self.expected = expected  # the answer to a decode
        self.mates: list[Client] = [self]
        self.asked = False
        self.left = False
        self.registered = False
        self.sent: deque[Any] = deque()
        self.given: list[int] = []
        self.natural: tuple[str, Any] | None = None
        self.final_given = False
        self.fed_at = -1
        self.got_ids: list[int] = []
        self.got_text = ""
        self.terminal: tuple[str, Any] | None = None
        self.read_end = False
        self.over = False
        self.room: tuple[int, int] | None = None  # free places of ring and pool when it ended
        self.messages = 0
        self.aborts = 0

    def __repr__(self) -> str:
        return f"client {self.index} ({self.kind.name.lower()} {self.shown!r})"


class Oracle:
    """The model. `decode` gives the text of ids; `limit` is one more than the largest valid id, or None for no vocabulary."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        limit: int | None,
        output_limit: int,
        sink_capacity: int,
        shards: int,
    ) -> None:
        self._decode = decode
        self._limit = limit
        self._output_limit = output_limit
        self._sink_capacity = sink_capacity
        self.clients: list[Client] = []
        self.by_rid: dict[str, Client] = {}
        self.open: dict[str, Client] = {}
        self.states: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self.tick = 0
        self._broken = 0  # number of the last malformed frame
        self._hidden: list[deque[int]] = [deque() for _ in range(shards)]  # those on their way that hide their rids
        self.gone = False  # the scheduler's end was noticed
        self.died = False  # a stage died
        self.stopped = False  # what was left was ended directly
        self.room: tuple[int, int] = (0, 0)  # free places of ring and pool behind the last move of ingress

    # -- what happens ------------------------------------------------------------------------------------------------------

    def submitted(self, clients: Sequence[Client]) -> None:
        for client in clients:
            client.mates = list(clients)
            self.clients.append(client)
            self.by_rid[client.rid] = self.open[client.rid] = client

    def pushed(self, rows: Iterable[tuple[str, list[int], FinishReason | None]]) -> None:
        """The egress ring accepted a good frame with these rows."""
        for rid, ids, finish in rows:
            if client := self.by_rid.get(rid):
                client.sent.append((ids, finish))

    def pushed_answer(self, rid: str, what: str, payload: Any) -> None:
        """The egress ring accepted a RESULT or ERROR frame."""
        if client := self.by_rid.get(rid):
            client.sent.append((what, payload))

    def pushed_broken(self, rids: Sequence[str], complete: bool) -> None:
        """The egress ring accepted a malformed BATCH frame that names `rids`."""
        self._broken += 1
        if not complete:
            for hidden in self._hidden:
                hidden.append(self._broken)
        for rid in dict.fromkeys(rids) if complete else list(self.open):
            if client := self.by_rid.get(rid):
                client.sent.append((LOST, self._broken))

    def given(self, shard: int, message: Any) -> None:
        """A shard is about to be given `message`."""
        if isinstance(message, Batch):
            frame = message.frame
            for ids in [frame.token_ids] if message.run is None else message.run:
                for row in range(len(frame.rids)) if message.rows is None else message.rows:
                    low, high = int(frame.offsets[row]), int(frame.offsets[row + 1])
                    self._chunk(frame.rids[row], ids[low:high].tolist(), frame.finish_reasons[row])
        elif isinstance(message, Register):
            self._register(self.by_rid[message.life.rid])
        elif isinstance(message, Result):
            self._answer(self._next(message.rid, ("result", message.payload)), ("control", message.payload))
        elif isinstance(message, Failure):
            self._answer(self._next(message.rid, ("failure", message.message)), ("error", "encode"))
        elif isinstance(message, Forward):
            self._forwarded(message.rid)
        elif isinstance(message, Fail) and message.error.code == "internal":
            self._rejected(shard, message.rids)

    def _register(self, client: Client) -> None:
        client.registered = True
        if client.life.state != RequestState.QUEUED:
            raise Broken(3, f"{client} is registered in {RequestState(client.life.state).name}")
        if not client.fits or client.boom:
            raise Broken(3, f"{client} is registered, and the checks before the ring had to refuse it")
        if client.kind is Kind.DETOKENIZE:
            self._end(client, ("data", client.expected), final=False)

    def _forwarded(self, rid: str) -> None:
        """An abort reached the shard: the request is there and ends, or it has ended."""
        client = self.by_rid.get(rid)
        if client is None or client.over:
            self.seen["a late abort"] += 1
        elif not client.registered:
            raise Broken(5, f"the abort of {client} reached the shard before its registration")
        else:
            self._end(client, ("error", "client_closed"), final=False)

    def _answer(self, client: Client | None, natural: tuple[str, Any]) -> None:
        if client is None:
            return
        if natural[0] == "control" and client.kind is not Kind.CONTROL:
            self.seen["a result for a generate request"] += client.natural is None
            natural = ("error", "internal")
        self._end(client, natural, final=False)

    def _rejected(self, shard: int, rids: list[str] | None) -> None:
        """A malformed frame reached the shard: `rids` are named, or all that it holds."""
        if rids is None and not self._hidden[shard]:
            raise Broken(7, "everybody is failed for a frame that named whom it concerned")
        hidden = (LOST, self._hidden[shard].popleft()) if rids is None else None
        for rid in list(self.open) if rids is None else dict.fromkeys(rids):
            client = self.by_rid.get(rid)
            if client is None or client.life.shard != shard:
                continue
            # whoever came after the frame was pushed may be held by the shard all the same, and is failed too
            if hidden is None or hidden in client.sent:
                due = client.sent.popleft() if client.sent else None
                if not is_lost(due) or hidden not in (None, due):
                    raise Broken(6, f"{client} was told of a broken frame out of order")
            if client.registered:
                self.seen["a broken frame ends a request"] += not client.over
                self._end(client, ("error", "internal"), final=False)

    def _next(self, rid: str, found: Any) -> Client | None:
        """`found` reached the shard; it must be the next thing that the scheduler pushed for `rid`."""
        client = self.by_rid.get(rid)
        if client is None:
            return None
        due = client.sent.popleft() if client.sent else None
        while client.over and is_lost(due) and client.sent:  # nobody is told of what an ended request lost
            due = client.sent.popleft()
        if due != found:
            raise Broken(6 if is_lost(due) else 8, f"{client} was given {found!r:.80} where {due!r:.80} was due")
        if client.over:
            self.seen["late output"] += 1
            return None
        return client

    def _chunk(self, rid: str, ids: list[int], finish: FinishReason | None) -> None:
        client = self._next(rid, (ids, finish))
        if client is None or client.natural is not None:
            self.seen["a duplicate behind an end"] += client is not None
            return
        if not client.registered:
            raise Broken(8, f"{client} got output before it was registered")
        client.fed_at = self.tick
        if client.kind is not Kind.GENERATE:
            self.seen["a chunk for a control request"] += 1
            self._end(client, ("error", "internal"), final=False)
            return
        final = finish is not None
        if len(client.given) + len(ids) > self._output_limit:
            self.seen["more output than the limit"] += 1
            self._end(client, ("error", "internal"), final=final)
            return
        status = getattr(finish, "abort_status", None)
        bad = self._limit is not None and any(not 0 <= value < self._limit for value in ids)
        if status is not None:
            self._end(client, ("error", "aborted_by_scheduler"), final=True)
        elif bad:
            self.seen["an id outside the vocabulary"] += 1
            self._end(client, ("error", "detokenize"), final=final)
        else:
            client.given.extend(ids)
            if final:
                self._end(client, ("done", finish), final=True)

    def _end(self, client: Client, natural: tuple[str, Any], *, final: bool) -> None:
        if client.natural is None and not client.over:
            client.natural = natural
            client.final_given = final

    def got(self, client: Client, taken: Taken) -> None:
        """A client read `taken`."""
        if client.read_end and not taken.empty:
            raise Broken(1, f"{client} got something after its end")
        self._delta(client, taken.token_ids.tolist(), taken.text)
        if taken.terminal is not None:
            client.read_end = True
            if client.terminal is None:
                client.terminal = end_of(taken.terminal)
            self._whole(client)

    def got_row(
        self,
        client: Client,
        text: str,
        ids: list[int],
        finish: FinishReason | None,
        error: HeadraceError | None,
    ) -> None:
        """The step sink gave this for `client`."""
        if client.terminal is not None:
            raise Broken(1, f"{client} got a row after its end")
        self._delta(client, ids, text)
        if error is not None:
            client.terminal = ("error", error)
        elif finish is not None:
            client.terminal = ("done", finish)
        if client.terminal is not None:
            client.read_end = True
            self._judge(client)
            self._whole(client)

    def _delta(self, client: Client, ids: list[int], text: str) -> None:
        client.got_ids.extend(ids)
        client.got_text += text
        if client.got_ids != client.given[: len(client.got_ids)]:
            raise Broken(2, f"{client} got {client.got_ids} of {client.given}")

    def _whole(self, client: Client) -> None:
        """`client` has read its end: is everything there?"""
        assert client.terminal is not None
        kind, value = client.terminal
        if kind == "done":
            whole = self._decode(client.given)
            if client.got_ids != client.given or client.got_text != whole:
                raise Broken(
                    2, f"{client} ended with {client.got_ids}, {client.got_text!r}; due: {client.given}, {whole!r}"
                )
            return
        if not client.stream and (client.got_ids or client.got_text):
            raise Broken(2, f"{client} is not streamed and got output beside an error")
        if not self._decode(client.got_ids).startswith(client.got_text):
            raise Broken(2, f"{client} got {client.got_text!r} for {client.got_ids}")
        if kind == "error" and client.stream and client.kind is Kind.GENERATE:
            lossless = client.natural == ("error", value.code) or value.code in ("scheduler_gone", "client_closed")
            if lossless and client.got_ids != client.given:
                raise Broken(2, f"{client} lost output before its error: {client.got_ids} of {client.given}")

    # -- after every step -----------------------------------------------------------------------------------------------------

    def look(self, lives: Any) -> None:
        """Who has ended in this step, and had he reason to?"""
        for client in [client for rid, client in self.open.items() if rid not in lives]:
            del self.open[client.rid]
            client.over = True
            client.room = self.room
            if client.sink is not None and not client.left:
                if client.sink._terminal is None:
                    raise Broken(1, f"{client} is gone from the table and has no terminal item")
                if client.terminal is None:
                    client.terminal = end_of(client.sink._terminal)
                self._judge(client)
        for client in self.open.values():
            if client.natural is not None:
                raise Broken(9, f"{client} should have ended with {client.natural!r} and is still live")
            if client.sink is None:
                continue
            if client.sink.pending > self._sink_capacity:
                raise Broken(4, f"the sink of {client} holds {client.sink.pending} chunks")
            if client.sink._terminal is not None and not client.life.withdrawn:
                raise Broken(4, f"{client} has its terminal item and is still in the table")

    def _judge(self, client: Client) -> None:
        assert client.terminal is not None
        kind, value = client.terminal
        code = value.code if kind == "error" else None
        if kind == "error" and value.rid != client.shown:
            raise Broken(7, f"{client} was told an error of {value.rid!r}")
        self.seen[f"end: {code or kind}"] += 1
        natural = client.natural
        if natural is not None:
            if (kind, code or value) == natural:
                return
            if code == "slow_client" and self._overflown(client):
                self.seen["the final chunk did not fit"] += client.final_given
                return
            if not self.died and not self.stopped:
                raise Broken(1, f"{client} ended with {kind} {value!r} where {natural!r} was due")
        mates = client.mates
        room = client.room or self.room
        needs = sum(mate.kind is not Kind.DETOKENIZE and not mate.life.withdrawn for mate in mates)
        reasons = {
            "client_closed": client.asked,
            "slow_client": self._overflown(client),
            "queue_full": not client.registered and (needs > room[0] or len(mates) > room[1]),
            "validation": not client.registered and not all(mate.fits for mate in mates),
            "tokenize": not client.registered and any(mate.boom for mate in mates),
            "scheduler_gone": self.gone,
            "shutting_down": self.stopped,
            "internal": self.died,
        }
        if not reasons.get(str(code)):
            raise Broken(1 if kind != "error" else 7, f"{client} ended with {kind} {value!r} for no reason of its own")

    def _overflown(self, client: Client) -> bool:
        sink = client.sink
        return sink is not None and client.fed_at == self.tick and sink.pending >= self._sink_capacity

    # -- the ingress ring ----------------------------------------------------------------------------------------------------

    def on_ring(self, rid: str, is_abort: bool) -> None:
        """One message left the ring on the scheduler's side."""
        client = self.by_rid.get(rid)
        if client is None:
            raise Broken(8, f"the ring holds {rid!r}, which nobody submitted")
        if is_abort:
            client.aborts += 1
            if not client.messages:
                raise Broken(5, f"the abort of {client} stands before its request")
            if client.aborts > 1:
                raise Broken(5, f"{client} is aborted twice")
        else:
            client.messages += 1
            if client.messages > 1 or client.kind is Kind.DETOKENIZE:
                raise Broken(8, f"{client} stands on the ring for time {client.messages}")

    def quiet(self) -> None:
        """Nobody can move: what was pushed has been given."""
        for client in self.clients:
            if not all(map(is_lost, client.sent)) or (client.sent and not client.over):
                raise Broken(8, f"{client} was never given {client.sent[0]!r:.80}")

    def finish(self, undeliverable: int) -> None:
        """Everything has stopped: whoever was submitted has one end, and the aborts on the ring are those that were owed."""
        missing = 0
        for client in self.clients:
            if not client.over:
                raise Broken(9, f"{client} never ended")
            if client.terminal is None and not client.left:
                raise Broken(1, f"{client} has no terminal item")
            if self.died:
                continue
            state = self.states.get(client.rid, RequestState.RECEIVED)
            owed = (
                client.messages > 0 and state in (RequestState.ABORTED, RequestState.FAILED) and not client.final_given
            )
            if client.aborts > owed:
                raise Broken(5, f"{client} ended {RequestState(state).name} and was aborted all the same")
            missing += owed - client.aborts
        if missing > undeliverable:
            raise Broken(5, f"{missing} abort messages are missing, and {undeliverable} are counted as undeliverable")


def room_of(pipeline: Any) -> tuple[int, int]:
    """Free places of the ingress ring, beyond owed aborts, and of the tokenizer pool. Taken behind a move of ingress: it may serve
    several requests, and what the first ones took is not there for the next. Looking changes nothing, as `Pipeline.facts` would."""
    ring = pipeline.ring_in.facts()
    queued = sum(map(len, pipeline.jobs))
    return ring.capacity - ring.fill - len(pipeline.ingress.owed), pipeline.config.channel_capacity - queued


def is_lost(item: Any) -> bool:
    """Whether `item` of `Client.sent` stands for a frame that was rejected."""
    return item is not None and item[0] == LOST


def end_of(terminal: Any) -> tuple[str, Any]:
    """(kind, value) of a terminal item."""
    if isinstance(terminal, EgressItem.Done):
        return "done", terminal.finish_reason
    if isinstance(terminal, EgressItem.Control):
        return "control", terminal.payload
    if isinstance(terminal, EgressItem.Data):
        return "data", terminal.text
    error: HeadraceError = terminal.error
    return "error", error
