"""`ScriptedScheduler`: a scheduler that does what a test tells it to, step by step.

Owns: the actions a script is made of. Rules it keeps:

* One step gives each live request its next action, in the order of arrival; all `Emit`s of a step travel in one BATCH frame.
  So a script says exactly what stands in which frame, and nothing depends on time.
* It records what it saw (`received`, `aborted`) before it acts on it.
* A script may go on after its request's end: late and duplicate chunks are cases to be tested. One that ends without giving
  its request an end leaves it hanging, like a scheduler that falls silent; a request without a script is never answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..codec.chunk import ChunkEvent
from ..codec.encode import encode_batch
from ..codec.finish import FinishReason
from ..codec.ingress import AbortMessage, ControlMessage, GenerateMessage
from ..codec.rid import Rid
from .scheduler_base import Scheduler

if TYPE_CHECKING:
    from .port import SchedulerPort


@dataclass(frozen=True)
class Emit:
    """A chunk: `ids`, `finish` (a FinishReason or its map; None: more to come), `extras` and scalar columns as in ChunkEvent."""

    ids: Sequence[int] = ()
    finish: FinishReason | Mapping[str, Any] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Nothing from this request for so many steps."""

    steps: int = 1


@dataclass(frozen=True)
class Raw:
    """A whole frame as it is, good or bad; a callable gets the request's internal rid and returns the frame."""

    frame: bytes | Callable[[str], bytes]


@dataclass(frozen=True)
class Error:
    """An ERROR frame for the request."""

    message: str


@dataclass(frozen=True)
class Result:
    """A RESULT frame for the request (which asked for none: a scheduler's fault)."""

    payload: bytes


@dataclass(frozen=True)
class Close:
    """The scheduler's side of the port closes, as if it had died."""


@dataclass(frozen=True)
class Die:
    """The scheduler raises in its step."""


Action = Emit | Wait | Raw | Error | Result | Close | Die | Sequence[int]
Script = Sequence[Action]


class ScriptFault(Exception):
    """What `Die` raises."""


class _Player:
    __slots__ = ("actions", "at", "ended", "prompt_tokens", "rid", "wait")

    def __init__(self, rid: str, prompt_tokens: int, actions: Script) -> None:
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.actions = actions
        self.at = 0
        self.wait = 0
        self.ended = False

    def next(self) -> Action | None:
        if self.at == len(self.actions):
            return None
        self.at += 1
        return self.actions[self.at - 1]

    @property
    def done(self) -> bool:
        return self.ended and self.at == len(self.actions)


class ScriptedScheduler(Scheduler):
    """Plays a script per request, and before that `frames`, one raw frame per step.

    `scripts`: a mapping from client-facing rid to script (``"*"`` for all others), one script for every request, or a callable
    that gets the GenerateMessage. A plain list of ints in a script is an `Emit` of these ids. `answer` gets a ControlMessage
    and returns the payload of its RESULT, or None for no answer. With `heeds_aborts=False` a script goes on after its request
    was aborted, as a scheduler does that has not seen the abort yet.
    """

    def __init__(
        self,
        port: SchedulerPort,
        scripts: Mapping[str, Script] | Script | Callable[[GenerateMessage], Script] = (),
        *,
        frames: Iterable[bytes] = (),
        answer: Callable[[ControlMessage], bytes | None] | None = None,
        heeds_aborts: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self.received: list[GenerateMessage | ControlMessage] = []
        self.aborted: list[str] = []
        self._scripts = scripts
        self._frames = iter(frames)
        self._control = answer
        self._heeds = heeds_aborts
        self._players: dict[str, _Player] = {}

    @property
    def running(self) -> int:
        return len(self._players)

    def _script(self, message: GenerateMessage) -> Script:
        if callable(self._scripts):
            return self._scripts(message)
        if isinstance(self._scripts, Mapping):
            facing = Rid.from_wire(str(message.rid)).client_facing
            return self._scripts.get(facing, self._scripts.get("*", ()))
        return self._scripts

    def _accept(self, message: GenerateMessage) -> None:
        self.received.append(message)
        super()._accept(message)

    def _abort(self, message: AbortMessage) -> None:
        self.aborted.append("*" if message.abort_all else str(message.rid))
        if self._heeds:
            super()._abort(message)

    def _control_answer(self, message: ControlMessage) -> bytes | None:
        self.received.append(message)
        return super()._control_answer(message) if self._control is None else self._control(message)

    def _join(self, rid: str, message: GenerateMessage) -> None:
        self._players[rid] = _Player(rid, len(message.input_ids), self._script(message))

    def _drop(self, rid: str | None) -> bool:
        if rid is None:
            self._players.clear()
            return True
        return self._players.pop(rid, None) is not None

    def _produce(self) -> bool:
        frame = next(self._frames, None)
        if frame is not None:
            self.port.push_frame(frame)
            return True
        if not self._players:
            return False
        self.counters["steps"] += 1
        chunks: list[ChunkEvent] = []
        moved = False
        for player in list(self._players.values()):
            if player.wait:
                player.wait -= 1
                moved = True
                continue
            action = player.next()
            if action is None:
                continue
            moved = True
            chunk = self._play(player, action)
            if chunk is not None:
                chunks.append(chunk)
            if player.done:
                self._players.pop(player.rid, None)
        if chunks:
            self.port.push_frame(encode_batch(chunks, self._schema))
            self.counters["tokens"] += sum(len(chunk.token_ids) for chunk in chunks)
        return moved

    def _play(self, player: _Player, action: Action) -> ChunkEvent | None:
        match action:
            case Wait():
                player.wait = max(0, action.steps - 1)
            case Raw():
                self.port.push_frame(action.frame(player.rid) if callable(action.frame) else action.frame)
            case Error():
                self.port.push_error(player.rid, action.message)
                player.ended = True
            case Result():
                self.port.push_control_result(player.rid, action.payload)
            case Close():
                self.port.close()
            case Die():
                raise ScriptFault("the script says so")
            case Emit():
                player.ended = player.ended or action.finish is not None
                return ChunkEvent(
                    rid=player.rid,
                    token_ids=list(action.ids),
                    finish_reason=action.finish,
                    prompt_tokens=player.prompt_tokens,
                    extras=action.extras,
                    **action.scalars,
                )
            case _:
                return self._play(player, Emit(action))
        return None
