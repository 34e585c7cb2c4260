"""What a target is: the operations the kit asks for, the first line each way, and how both travel as JSON lines.

Owns: the protocol, its version, and the names of the capabilities. Rules it keeps:

* A target says what it can do in its hello. A case that needs a capability which is not there is "not applicable", never passed.
* Every operation answers within the time limit that the kit gives it; one that waits is told how long it may (`timeout_s`).
* Bytes travel as base64 in JSON, and only in the places named in `BYTES`; everything else is plain JSON. A request's body is a
  *string* of JSON text, because bodies that are not valid JSON or that no parser would write again are cases too.
* This module needs nothing outside the standard library, so that a target can be written against it alone.
"""

from __future__ import annotations

import base64
from typing import Any, Final, Protocol

PROTOCOL: Final = 1
"""The version of this protocol, in both hellos. A target that answers another one is refused."""

CAPABILITIES: Final[dict[str, str]] = {
    "abort_by_rid": "`abort(rid)` ends every live request of that client-facing rid",
    "batch": "a body may hold a list of prompts; the answers are read as KEY.0, KEY.1, …",
    "byte_fallback": "tokenizers of the SentencePiece kind with byte fallback",
    "codec": "`decode_frame` judges one egress frame without any request",
    "control": "`control` and `push` of RESULT frames",
    "detokenize": "`detokenize(key, ids)`: a text for ids, answered without the scheduler",
    "drain": "`shutdown(drain_s)` lets live requests finish until the deadline",
    "error_codes": "errors carry headrace's stable `code` beside the status",
    "health": "`health(key)`: a probe that the scheduler's output answers",
    "hidden_states": "return_hidden_states",
    "logprobs": "logprob columns reach the client",
    "logprobs_ragged": "top-k and asked-id logprob columns reach the client position by position",
    "machines": "`machine(name)` gives the table that runs",
    "multimodal": "media in a body",
    "n": "n > 1 fans out",
    "ring_capacity": "the config's `ingress_ring_capacity` is heeded",
    "scheduler_close": "`scheduler_close()`: the scheduler's side goes away",
    "sink_capacity": "the config's `sink_capacity` is heeded",
    "skip_tokenizer": "the config's `skip_tokenizer_init` is heeded",
    "truncation": "the config's `allow_auto_truncate` is heeded",
    "whole_frames": "`push` takes a frame as bytes, also one that is no frame at all",
}

OPS: Final[dict[str, tuple[str, ...]]] = {
    "hello": (),
    "start": ("wire", "config"),
    "submit": ("key", "body"),
    "drain": ("max", "timeout_s"),
    "push": ("frame",),
    "read": ("key", "timeout_s"),
    "abort": ("rid",),
    "close": ("key",),
    "shutdown": ("drain_s",),
    "joined": ("timeout_s",),
    "stop": (),
    "control": ("key", "tag", "fields"),
    "detokenize": ("key", "ids"),
    "health": ("key", "timeout_s"),
    "scheduler_close": (),
    "decode_frame": ("wire", "frame"),
    "machine": ("name",),
}
"""Operations and their arguments, in order."""

Json = dict[str, Any]


class Target(Protocol):
    """An implementation under test, wrapped. One instance serves many cases, one after the other: `start` … `stop`.

    A Python class with these methods is a target; so is a program that answers the same operations as JSON lines. Whatever
    raises, dies, or does not answer in time fails the case, and the target is started anew.
    """

    def hello(self) -> Json:
        """``{"protocol": 1, "name", "version", "wires": ["v1", …], "machines": {"request": 1, …}, "capabilities": […]}``."""

    def start(self, wire: str, config: Json) -> None:
        """A fresh instance. `config`: tokenizer (a folder with a tokenizer.json, or null), context_len, vocab_size, and where the
        case needs them the settings that `CAPABILITIES` names."""

    def submit(self, key: str, body: str) -> None:
        """A client sends `body` (JSON text, `/generate`-shaped) and is known as `key` from now on. Refusals are read."""

    def drain(self, max: int, timeout_s: float) -> list[Json]:
        """What the scheduler receives: waits for at least one message or `timeout_s`; each ``{"header": bytes, "cells": {name:
        int64 little-endian bytes}}``, oldest first. Empty where nothing came."""

    def push(self, frame: bytes) -> bool:
        """The scheduler pushes a whole egress frame, tag included. False: nobody is there to take it."""

    def read(self, key: str, timeout_s: float) -> Json:
        """What client `key` got since the last read; waits for something new or `timeout_s`.

        ``{"chunks": [{"text", "token_ids", "prompt_tokens", "extras": {name: [numbers or null]}}, …], "end": null | E}``, E being
        ``{"finish_reason": map}``, ``{"payload": text}`` (control), ``{"text": …}`` (detokenize), ``{"healthy": bool}``, or
        ``{"error": {"status", "code", "message", "in_band"}}``; `in_band` tells that the error came inside a stream that had begun.
        """

    def abort(self, rid: str) -> None:
        """Abort by client-facing rid."""

    def close(self, key: str) -> None:
        """The client leaves."""

    def shutdown(self, drain_s: float) -> None:
        """Begin to shut down; returns at once."""

    def joined(self, timeout_s: float) -> bool:
        """Wait for the end of the shutdown; whether it has come."""

    def stop(self) -> None:
        """The case is over: give everything back, whatever state it is in."""


class KitError(Exception):
    """A mistake in how the kit is used (a case file, an option, a hello that cannot be understood)."""


class TargetFault(Exception):
    """The target raised, died, or did not answer."""


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise TargetFault(f"bytes must travel as a base64 string, not {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise TargetFault("bytes must travel as base64") from None


BYTES: Final = ("push.frame", "decode_frame.frame", "drain result: header and each cell")
"""Where base64 stands."""


def pack_args(op: str, args: dict[str, Any]) -> Json:
    """Arguments of `op` as they travel."""
    return {name: _b64(value) if isinstance(value, bytes) else value for name, value in args.items()}


def unpack_args(op: str, args: Json) -> Json:
    """Arguments of `op` as a Python target takes them."""
    names = OPS[op]
    return {name: _bytes(args.get(name)) if name == "frame" else args.get(name) for name in names}


def pack_result(op: str, value: Any) -> Any:
    """A result of `op` as it travels."""
    if op == "drain":
        return [
            {"header": _b64(message["header"]), "cells": {name: _b64(cell) for name, cell in message["cells"].items()}}
            for message in value
        ]
    return value


def unpack_result(op: str, value: Any) -> Any:
    """A result of `op` as the kit takes it. TargetFault for one of another shape."""
    try:
        if op == "drain":
            return [
                {
                    "header": _bytes(message["header"]),
                    "cells": {name: _bytes(cell) for name, cell in message.get("cells", {}).items()},
                }
                for message in value
            ]
        if op == "read":
            return {"chunks": list(value["chunks"]), "end": value["end"]}
    except (TypeError, KeyError, AttributeError) as fault:
        raise TargetFault(f"{op}: the answer has not the shape of one ({type(fault).__name__}: {fault})") from None
    return value


def check_hello(hello: Any) -> Json:
    """A hello that can be used, or KitError saying what is wrong with it."""
    if not isinstance(hello, dict):
        raise KitError("hello: the answer must be an object")
    if hello.get("protocol") != PROTOCOL:
        raise KitError(f"hello: protocol is {hello.get('protocol')!r}; this kit speaks {PROTOCOL}")
    wires, capabilities = hello.get("wires"), hello.get("capabilities")
    if not isinstance(wires, list) or not wires or not all(isinstance(wire, str) for wire in wires):
        raise KitError("hello: wires must be a list of wire revisions, for example ['v1']")
    if not isinstance(capabilities, list):
        raise KitError("hello: capabilities must be a list")
    unknown = sorted(set(map(str, capabilities)) - set(CAPABILITIES))
    if unknown:
        raise KitError(f"hello: unknown capabilities {', '.join(unknown)}; known: {', '.join(sorted(CAPABILITIES))}")
    machines = hello.get("machines", {})
    if not isinstance(machines, dict):
        raise KitError("hello: machines must map a machine's name to its revision")
    return {
        "protocol": PROTOCOL,
        "name": str(hello.get("name", "?")),
        "version": str(hello.get("version", "?")),
        "wires": wires,
        "machines": machines,
        "capabilities": capabilities,
    }
