"""What the steps of a case do, and when an outcome is as expected.

Owns: the equivalence that the kit judges by. Rules it keeps:

* Order is fixed within one request and free across requests. How output is cut into chunks is free, except that concatenated text
  and ids must be right whenever a case looks, and that nothing may follow the end.
* Nothing waits for time. "It came" waits for the thing, up to the step's limit; "nothing came" uses a *fence*: a further request
  goes through the target, and what has not come before it will not come.
* At every drain, whatever the case is about: no message twice, at most one abort for a request, and none before its request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...codec import Rid, WireSchema, frame_egress_error, frame_egress_result, load_schema
from ...codec.ingress import GenerateMessage
from .cases import Case, tokenizer_folder
from .frames import Received, agrees, batch_frame, seen, with_lie
from .lines import Caller
from .protocol import KitError, TargetFault

GENERATE = "TokenizedGenerateReqInput"
ABORT = "AbortReq"
_FENCE = "kit-fence"


class Mismatch(Exception):
    """The target answered, and the answer is not the expected one."""


class _Client:
    """What one client got so far."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.extras: dict[str, list[Any]] = {}
        self.prompt_tokens = 0
        self.chunks = 0
        self.end: Any = None


class Session:
    """One case on one target: the steps, and what they leave to be judged."""

    def __init__(
        self, caller: Caller, case: Case, wire: str, limit_s: float, clock: Callable[[str], float] | None = None
    ) -> None:
        self._caller = caller
        self._clock = clock or (lambda op: time.monotonic())
        self._case = case
        self._limit = limit_s
        self.wire = wire
        self.schema: WireSchema = load_schema(wire)
        self.frames: list[bytes] = []
        self.at = 0
        self._rids: dict[str, str] = {}
        self._keys: dict[str, str] = {}  # rid -> key
        self._prompts: dict[str, Any] = {}  # submitted and not yet received: key -> its prompt
        self._clients: dict[str, _Client] = {}
        self._received: dict[str, Received] = {}
        self._aborts: list[str] = []
        self._notes: list[Received] = []  # control messages
        self._over = False
        self._fences = 0

    # -- running ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps, then what holds for every case. Mismatch, TargetFault or KitError says why not."""
        config = dict(self._case.config)
        if config.get("tokenizer") is not None and "/" not in config["tokenizer"]:  # the name of one of the kit's own
            config["tokenizer"] = str(tokenizer_folder(config["tokenizer"]))
        if any("vector" in step for step in self._case.steps):
            for step in self._case.steps:
                self._vector(step["vector"])
            return
        self._call("start", wire=self.wire, config=config)
        try:
            for at, step in enumerate(self._case.steps):
                self.at = at
                self._step(step)
            if not self._over and not self._machine_only():
                self._fence()
        except BaseException:
            try:
                self._call("stop")
            except TargetFault:
                self._caller.restart()
            raise
        self._call("stop")

    def _machine_only(self) -> bool:
        return all("machine" in step for step in self._case.steps)

    def _step(self, step: Mapping[str, Any]) -> None:
        verb = next((name for name in step if name in _VERBS), None)
        if verb is None:
            raise KitError(f"step {self.at}: none of its keys is a verb: {', '.join(step)}")
        _VERBS[verb](self, step[verb], step)

    def _call(self, op: str, **args: Any) -> Any:
        waits = args.get("timeout_s", 0.0)
        return self._caller.call(op, args, self._limit + waits)

    # -- the client's side -------------------------------------------------------------------------------------------------

    def _submit(self, key: str, step: Mapping[str, Any]) -> None:
        body, text = step.get("body"), step.get("body_json")
        if text is None:
            if not isinstance(body, dict):
                raise KitError(f"step {self.at}: a submit needs body or body_json")
            text = json.dumps(body)
        items: int = step.get("items", 0)
        prompt: Any = body.get("text", body.get("input_ids")) if isinstance(body, dict) else None
        for at in range(items):
            self._prompts[f"{key}.{at}"] = prompt[at]
        if not items and prompt is not None:
            self._prompts[key] = prompt
        self._call("submit", key=key, body=text)

    def _open(self, key: str, step: Mapping[str, Any]) -> None:
        self._submit(key, step)
        self._drain([f"{key}.{at}" for at in range(step["items"])] if "items" in step else [key], step)

    def _refuse(self, key: str, step: Mapping[str, Any]) -> None:
        """Submit what must be refused; the error is `expect`, status 400 by default, and nothing reaches the scheduler."""
        self._submit(key, step)
        self._prompts.pop(key, None)
        self._read(key, {"expect": {"error": step.get("expect", {"status": 400})}, "watch": True})

    def _client(self, key: str) -> _Client:
        return self._clients.setdefault(key, _Client())

    def _read(self, key: str, step: Mapping[str, Any]) -> None:
        """Read `key` to its end, or (`until_ids`) until so many ids are there; then judge `expect`."""
        client = self._client(key)
        until = step.get("until_ids")
        deadline = self._clock("read") + self._limit
        while client.end is None and (until is None or len(client.ids) < until):
            left = deadline - self._clock("read")
            if left <= 0:
                if step.get("watch"):
                    self._take(0.0)
                    if self._unexpected():
                        raise Mismatch(f"{key} was admitted: the scheduler received it")
                raise Mismatch(
                    f"{key} has neither ended nor brought more within {self._limit:g} s; so far {len(client.ids)} ids, "
                    f"text {client.text!a}"
                )
            self._poll(key, client, min(left, 0.2 if step.get("watch") else left))
            if step.get("watch") and client.end is None:
                self._take(0.0)
                if self._unexpected():
                    raise Mismatch(f"{key} was admitted: the scheduler received it")
        self._judge(key, client, step.get("expect", {}))

    def _poll(self, key: str, client: _Client, timeout: float) -> None:
        told = self._call("read", key=key, timeout_s=timeout)
        if (told["chunks"] or told["end"] is not None) and client.end is not None:
            raise Mismatch(f"{key} got something after its end")
        for chunk in told["chunks"]:
            client.chunks += 1
            client.text += chunk.get("text") or ""
            client.ids += chunk.get("token_ids") or []
            client.prompt_tokens = chunk.get("prompt_tokens") or client.prompt_tokens
            for name, values in (chunk.get("extras") or {}).items():
                client.extras.setdefault(name, []).extend(values)
        if told["end"] is not None:
            client.end = told["end"]

    def _judge(self, key: str, client: _Client, expect: Mapping[str, Any]) -> None:
        end = client.end or {}
        got: dict[str, Any] = {
            "text": client.text,
            "token_ids": client.ids,
            "prompt_tokens": client.prompt_tokens,
            "extras": client.extras,
            "chunks": client.chunks,
            **{name: end.get(name) for name in ("finish_reason", "error", "payload", "healthy")},
        }
        if "text" in end:
            got["text"] = end["text"]
        for name, want in expect.items():
            value = got.get(name, ...)
            if name == "max_chunks":
                right = client.chunks <= want
            elif name == "text_in":
                right, value = client.text in want, client.text
            elif name == "ended":
                right, value = (client.end is not None) == want, client.end
            elif name == "message_has":
                value = str((end.get("error") or {}).get("message"))
                right = all(part in value for part in want)
            elif name == "message_lacks":
                value = str((end.get("error") or {}).get("message"))
                right = not any(part in value for part in want)
            elif value is ...:
                raise KitError(f"step {self.at}: nothing known about {name!r}")
            elif name == "finish_reason" and want is not None:
                right = agrees(want, value) and isinstance(value, dict) and set(value) == set(want)
            else:
                right = agrees(want, value)
            if not right:
                raise Mismatch(f"{key}: {name} should be {_short(want)}, is {_short(value)}")
        if client.end is not None and not expect.keys() & {"error", "message_has"} and "error" in end:
            raise Mismatch(f"{key} ended with the error {_short(end['error'])}")

    def _still(self, key: str, step: Mapping[str, Any]) -> None:
        """`key` has not ended, and has exactly what `expect` says, after a fence."""
        self._fence()
        client = self._client(key)
        self._poll(key, client, 0.0)
        if client.end is not None:
            raise Mismatch(f"{key} has ended: {_short(client.end)}")
        self._judge(key, client, step.get("expect", {}))

    # -- the scheduler's side ----------------------------------------------------------------------------------------------

    def _take(self, timeout: float, most: int = 256) -> int:
        raw = self._call("drain", max=most, timeout_s=timeout)
        if len(raw) > most:
            raise Mismatch(f"drain({most}) gave {len(raw)} messages")
        for one in raw:
            self._note(Received(one, self.schema))
        return len(raw)

    def _note(self, received: Received) -> None:
        if received.tag == ABORT:
            if received.rid not in self._received:
                raise Mismatch(f"an abort for {received.rid!a} came before its own request, or without one")
            if received.rid in self._aborts:
                raise Mismatch(f"a second abort came for {received.rid!a}")
            self._aborts.append(received.rid)
        elif received.tag == GENERATE:
            if received.rid in self._received:
                raise Mismatch(f"the request {received.rid!a} came twice")
            if not isinstance(received.message, GenerateMessage):
                raise Mismatch(f"a generate message that does not decode: {received.message}")
            self._received[received.rid] = received
            self._bind(received)
        else:
            self._received[received.rid] = received
            self._notes.append(received)

    def _bind(self, received: Received) -> None:
        """Which client's request this is: the oldest submitted one with this prompt."""
        message = received.message
        ids = message.input_ids.tolist()
        for key, prompt in self._prompts.items():
            if (prompt == message.text if isinstance(prompt, str) else prompt == ids) or (
                isinstance(prompt, list) and message.text is None and prompt[: len(ids)] == ids and ids
            ):
                del self._prompts[key]
                self._rids[key], self._keys[received.rid] = received.rid, key
                return

    def _unexpected(self) -> list[str]:
        return [rid for rid, one in self._received.items() if one.tag == GENERATE and rid not in self._keys]

    def _drain(self, keys: list[str], step: Mapping[str, Any]) -> None:
        most = step.get("max", 256)
        self._until(lambda: all(key in self._rids for key in keys), f"the scheduler has not received {keys}", most)

    def _until(self, done: Callable[[], bool], otherwise: str, most: int = 256) -> None:
        deadline = self._clock("drain") + self._limit
        while not done():
            left = deadline - self._clock("drain")
            if left <= 0:
                raise Mismatch(f"{otherwise} within {self._limit:g} s")
            self._take(min(left, 0.5), most)

    def _fence(self, times: int = 2) -> None:
        """A request of the kit's own goes through; everything that was on its way before it has come by then."""
        for _ in range(times):
            self._take(0.0)  # a full ring must not refuse the fence
            self._fences += 1
            key = f"{_FENCE}-{self._fences}"
            body = {
                "input_ids": [1, 2, 3, self._fences % 64],
                "stream": False,
                "sampling_params": {"max_new_tokens": 1},
            }
            self._submit(key, {"body": body})
            self._drain([key], {})
            self._push([{"to": key, "ids": [65], "finish": {"type": "length", "length": 1}}], {})
            self._read(key, {})
        if self._unexpected():
            raise Mismatch("the scheduler received a request that should have been refused")

    def _message(self, key: str, step: Mapping[str, Any]) -> None:
        """What the scheduler received for `key`: `expect` (read), `positions` (raw header cells), `length` (of the header)."""
        received = self._received[self._rids[key]]
        told = seen(received.message)
        for name, want in step.get("expect", {}).items():
            if name not in told:
                raise KitError(f"step {self.at}: nothing known about {name!r}")
            if not agrees(want, told[name]):
                raise Mismatch(f"{key}: {name} of its message should be {_short(want)}, is {_short(told[name])}")
        for name, want in step.get("positions", {}).items():
            if not agrees(want, received.values[int(name)]):
                raise Mismatch(
                    f"{key}: position {name} should be {_short(want)}, is {_short(received.values[int(name)])}"
                )
        if "length" in step and len(received.values) != step["length"][self.wire]:
            raise Mismatch(f"{key}: its header has {len(received.values)} positions")
        if "cells" in step and sorted(received.cells) != sorted(step["cells"][self.wire]):
            raise Mismatch(f"{key}: its cells are {sorted(received.cells)}")

    def _push(self, rows: list[Mapping[str, Any]], step: Mapping[str, Any]) -> None:
        frame = batch_frame(rows, self._rids, self.schema)
        if "lie" in step:
            frame = with_lie(frame, step["lie"], self.schema)
        self._frame(frame, step.get("accepted"))

    def _push_hex(self, text: str, step: Mapping[str, Any]) -> None:
        self._frame(bytes.fromhex(text), step.get("accepted"))

    def _frame(self, frame: bytes, accepted: bool | None) -> None:
        self.frames.append(frame)
        took = self._call("push", frame=frame)
        if accepted is not None and took is not accepted:
            raise Mismatch(f"the push should be {'accepted' if accepted else 'refused'} and was not")

    def _error(self, key: str, step: Mapping[str, Any]) -> None:
        self._frame(frame_egress_error(self._rids.get(key, key), step.get("message", "m")), None)

    def _result(self, key: str, step: Mapping[str, Any]) -> None:
        self._frame(frame_egress_result(self._rids.get(key, key), step.get("payload", "").encode()), None)

    def _control(self, key: str, step: Mapping[str, Any]) -> None:
        self._call("control", key=key, tag=step["tag"], fields=step.get("fields", []))
        before = len(self._notes)
        self._until(lambda: len(self._notes) > before, f"the control request {key} has not come")
        note = self._notes[-1]
        self._rids[key] = note.rid
        if note.tag != step["tag"] or not agrees(step.get("fields", []), note.values[3:]):
            raise Mismatch(f"the control request came as {_short(note.values)}")

    def _probe(self, key: str, step: Mapping[str, Any]) -> None:
        """A health probe: its message is received, and answered with `answer` (a finish reason) or not at all."""
        self._call("health", key=key, timeout_s=step.get("timeout_s", self._limit))
        if step.get("answer"):
            self._until(lambda: bool(self._unexpected()), "the health probe has not come")
            rid = self._unexpected()[0]
            self._keys[rid], self._rids[key] = key, rid
            self._push([{"rid": rid, "ids": [65], "finish": {"type": "length", "length": 1}}], {})

    def _aborts_are(self, keys: list[str], step: Mapping[str, Any]) -> None:
        """Exactly these requests were aborted at the scheduler since the case began, each once."""
        self._until(
            lambda: all(self._rids[key] in self._aborts for key in keys),
            f"no abort has come for one of {keys}",
        )
        if not self._over:
            self._fence()
        extra = [self._keys.get(rid, rid) for rid in self._aborts if rid not in {self._rids[key] for key in keys}]
        if extra:
            raise Mismatch(f"an abort came for {extra}, which nobody should have aborted")

    # -- life ----------------------------------------------------------------------------------------------------------------

    def _abort(self, rid: str, step: Mapping[str, Any]) -> None:
        self._call("abort", rid=rid)

    def _close(self, key: str, step: Mapping[str, Any]) -> None:
        self._call("close", key=key)

    def _burst(self, count: int, step: Mapping[str, Any]) -> None:
        """`count` requests whose clients leave at once: for each that reached the scheduler, one abort, and behind it."""
        for at in range(count):
            key = f"burst-{at}"
            self._submit(key, {"body": {"input_ids": [7, at % 250, at // 250], "stream": True}})
            self._call("close", key=key)
        self._fence()
        self._until(
            lambda: all(rid in self._aborts for rid, key in self._keys.items() if key.startswith("burst-")),
            "an abort is missing for a request whose client has left",
        )

    def _shutdown(self, drain_s: float, step: Mapping[str, Any]) -> None:
        self._over = True
        self._call("shutdown", drain_s=drain_s)

    def _joined(self, timeout_s: float, step: Mapping[str, Any]) -> None:
        if self._call("joined", timeout_s=timeout_s) is not True:
            raise Mismatch(f"the shutdown has not ended within {timeout_s:g} s")

    def _scheduler_close(self, _: Any, step: Mapping[str, Any]) -> None:
        self._over = True
        self._call("scheduler_close")

    def _detokenize(self, key: str, step: Mapping[str, Any]) -> None:
        self._call("detokenize", key=key, ids=step["ids"])

    # -- without a request ---------------------------------------------------------------------------------------------------

    def _machine(self, name: str, step: Mapping[str, Any]) -> None:
        from ...specs import path

        want = json.loads(path("machines", f"{name}.json").read_text("utf-8"))
        got = self._call("machine", name=name)
        for part in step.get("parts", ["states", "events", "initial", "terminal", "table", "outcomes"]):
            if part not in want:
                raise KitError(f"the export of {name} has no {part!r}")
            if want[part] != (got or {}).get(part):
                raise Mismatch(f"machine {name}: {part} is not that of revision {want.get('revision')}")

    def _vector(self, vector: Mapping[str, Any]) -> None:
        frame = bytes.fromhex(vector["frame_hex"])
        self.frames.append(frame)
        got = self._call("decode_frame", wire=self.wire, frame=frame)
        judged = (
            "verdict",
            "kind",
            "unknown_columns",
            "requests",
            "rids",
            "rids_complete",
            "rid",
            "payload_hex",
            "message",
        )
        for name in judged:
            if name in vector and vector[name] != (got or {}).get(name):
                raise Mismatch(f"{name} should be {_short(vector[name])}, is {_short((got or {}).get(name))}")


_VERBS: dict[str, Callable[[Session, Any, Mapping[str, Any]], None]] = {
    "submit": Session._submit,
    "open": Session._open,
    "refuse": Session._refuse,
    "read": Session._read,
    "still": Session._still,
    "drain": Session._drain,
    "message": Session._message,
    "push": Session._push,
    "push_hex": Session._push_hex,
    "error": Session._error,
    "result": Session._result,
    "control": Session._control,
    "probe": Session._probe,
    "aborts": Session._aborts_are,
    "abort": Session._abort,
    "close": Session._close,
    "burst": Session._burst,
    "shutdown": Session._shutdown,
    "joined": Session._joined,
    "scheduler_close": Session._scheduler_close,
    "detokenize": Session._detokenize,
    "machine": Session._machine,
}
VERBS = tuple(_VERBS)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 200 else text[:197] + "..."


def client_facing(rid: str) -> str:
    """The client's form of an internal rid."""
    return Rid.from_wire(rid).client_facing
