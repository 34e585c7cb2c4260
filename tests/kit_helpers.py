"""A deliberately small and slow tokenizer manager, as a target of the conformance kit, and broken variants of it.

It shares the codec with headrace (frames, admission) and nothing else: no stages, no threads, no rings. What it does with text is the
plainest thing that is right for the byte-level tokenizer. Each variant in `BROKEN` has one fault from the field and names the case
that must catch it.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from headrace.codec import (
    Abort,
    BatchFrame,
    FrameError,
    GenerateBody,
    Rid,
    admit,
    decode_frame,
    encode_abort,
    encode_control,
    encode_generate,
    load_schema,
)
from headrace.codec.admission import AdmissionRules, fit_length
from headrace.codec.decode import ControlResult, RequestFailure
from headrace.codec.errors import EncodeError, HeadraceError
from tokenizers import Tokenizer

SPECIAL = {256: b"<T>", 257: b"<s>", 258: b"</s>"}


class Request:
    def __init__(self, rid: str, shown: str, normal: Any) -> None:
        self.rid, self.shown, self.normal = rid, shown, normal
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.news: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.told = False
        self.pushed = False
        self.aborted = False
        self.some = False


def _error(status: int, code: str, message: str, in_band: bool = False) -> dict[str, Any]:
    return {"error": {"status": status, "code": code, "message": message, "in_band": in_band}}


class Naive:
    """Every operation does its whole work before it returns."""

    def hello(self) -> dict[str, Any]:
        return {
            "protocol": 1,
            "name": "naive",
            "version": "0",
            "wires": ["v1", "v2"],
            "machines": {},
            "capabilities": [
                "abort_by_rid", "control", "drain", "error_codes", "logprobs", "logprobs_ragged", "scheduler_close",
                "truncation", "whole_frames",
            ],
        }  # fmt: skip

    def start(self, wire: str, config: Mapping[str, Any]) -> None:
        self.schema = load_schema(wire)
        self.rules = AdmissionRules(
            context_len=config["context_len"],
            vocab_size=config["vocab_size"],
            allow_auto_truncate=config.get("allow_auto_truncate", False),
        )
        self.tokenizer = Tokenizer.from_file(f"{config['tokenizer']}/tokenizer.json")
        self.queue: deque[Any] = deque()
        self.live: dict[str, Request] = {}
        self.clients: dict[str, Request] = {}
        self.controls: dict[str, Request] = {}
        self.open = True
        self.gone = False
        self.draining = False

    def stop(self) -> None:
        pass

    # -- client

    def submit(self, key: str, body: str) -> None:
        try:
            if not self.open or self.draining:
                raise_shut()
            parsed = GenerateBody.from_json(body)
            requests = [admit(request, self.rules, self.schema) for request in parsed.requests()]
            messages = []
            for normal in requests:
                ids = normal.input_ids if normal.input_ids is not None else self.tokenize(normal.text or "")
                fit = self.fit(len(ids), normal)
                messages.append(self.encode(normal, ids[: fit.n_input], fit.max_new_tokens))
        except HeadraceError as error:
            self.clients[key] = client = Request("", "", None)
            client.end = _error(error.http_status, error.code, error.message)
            return
        for at, (normal, message) in enumerate(zip(requests, messages, strict=True)):
            request = Request(self.key_of(normal.rid), normal.rid.client_facing, normal)
            self.clients[f"{key}.{at}" if parsed.is_batch else key] = self.live[request.rid] = request
            self.queue.append(message)
            request.pushed = True

    def key_of(self, rid: Rid) -> str:
        return str(rid)

    def fit(self, count: int, normal: Any) -> Any:
        return fit_length(count, normal, self.rules)

    def encode(self, normal: Any, ids: Any, max_new_tokens: int | None) -> Any:
        return encode_generate(self.schema, normal, ids, max_new_tokens=max_new_tokens)

    def tokenize(self, text: str) -> Any:
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64)

    def read(self, key: str, timeout_s: float) -> dict[str, Any]:
        request = self.clients[key]
        news, request.news = request.news, []
        end = None if request.told else request.end
        request.told = request.end is not None
        return {"chunks": news, "end": end}

    def close(self, key: str) -> None:
        request = self.clients[key]
        if request.rid in self.live:
            self.want_abort(request)
            self.finish(request, _error(499, "client_closed", "the client left", request.some))

    def abort(self, rid: str) -> None:
        for request in [one for one in self.live.values() if one.shown == rid]:
            self.want_abort(request)
            self.finish(request, _error(499, "client_closed", "aborted", request.some))

    def want_abort(self, request: Request) -> None:
        if request.pushed and not request.aborted:
            request.aborted = True
            self.queue.append(encode_abort(self.schema, request.rid))

    def finish(self, request: Request, end: dict[str, Any]) -> None:
        self.live.pop(request.rid, None)
        if request.end is None:
            request.end = end
            if "error" in end and request.normal is not None and not request.normal.stream:
                request.news = []  # a whole answer that failed is only its error

    # -- scheduler

    def drain(self, max: int, timeout_s: float) -> list[dict[str, Any]]:
        taken = [self.queue.popleft() for _ in range(min(max, len(self.queue)))]
        return [
            {
                "header": message.header,
                "cells": {"input_ids": message.ids.tobytes()}
                | {name: cell.tobytes() for name, cell in message.cells.items()},
            }
            for message in taken
        ]

    def push(self, frame: bytes) -> bool:
        if not self.open:
            return False
        try:
            decoded = decode_frame(frame, self.schema)
        except FrameError as error:
            self.bad_frame(error)
            return True
        if isinstance(decoded, BatchFrame):
            for chunk in decoded:
                request = self.live.get(chunk.rid)
                control = self.controls.pop(chunk.rid, None)
                if control is not None:
                    control.end = _error(500, "internal", "a chunk for a control request")
                if request is not None:
                    self.chunk(request, chunk)
        elif isinstance(decoded, ControlResult):
            self.result(decoded)
        elif isinstance(decoded, RequestFailure) and decoded.rid in self.live:
            request = self.live[decoded.rid]
            self.want_abort(request)
            self.finish(request, _error(400, EncodeError.code, decoded.message, request.some))
        return True

    def bad_frame(self, error: FrameError) -> None:
        if error.names_nobody:
            return
        for rid in error.rids if error.rids_complete else list(self.live):
            request = self.live.get(rid)
            if request is not None:
                self.want_abort(request)
                self.finish(request, _error(500, "internal", "a malformed frame", request.some))

    def result(self, decoded: ControlResult) -> None:
        control = self.controls.pop(decoded.rid, None)
        if control is not None:
            control.end = {"payload": decoded.payload.decode()}
        elif decoded.rid in self.live:
            request = self.live[decoded.rid]
            self.want_abort(request)
            self.finish(request, _error(500, "internal", "a result for a generate request", request.some))

    def chunk(self, request: Request, chunk: Any) -> None:
        ids = chunk.token_ids.tolist()
        reason = chunk.finish_reason
        if isinstance(reason, Abort) and reason.abort_status is not None:
            self.finish(request, self.scheduler_abort(request, reason))
            return
        bad = next((token for token in ids if not 0 <= token <= 258), None)
        if bad is not None:
            if reason is None:
                self.want_abort(request)
            self.finish(request, _error(500, "detokenize", f"id {bad} is outside the vocabulary", request.some))
            return
        shown = ids
        if reason is not None and not isinstance(reason.matched, str) and reason.matched is not None:
            shown = self.without(ids, self.pattern(reason.matched))
        new = request.held + self.decode(request, shown, reason is not None)
        request.held = ""
        if reason is None:
            keep = self.held(new, request.normal.sampling.stop_strs)
            request.held = new[len(new) - keep :] if keep else ""
            new = new[: len(new) - keep]
        elif isinstance(reason.matched, str):
            new = self.cut(request, new, reason.matched)
        extras = {name: self.rows(array.tolist()) for name, array in chunk.extras.items()}
        request.some = request.some or request.normal.stream
        self.deliver(request, {"text": new, "token_ids": ids, "prompt_tokens": chunk.prompt_tokens, "extras": extras})
        if reason is not None:
            self.ended(request, chunk)

    def without(self, ids: list[int], pattern: list[int]) -> list[int]:
        size = len(pattern)
        if not size:
            return ids
        tail = min(size, len(ids))
        if tail and ids[-tail:] == pattern[-tail:]:
            return ids[:-tail]
        starts = [at for at in range(len(ids) - size + 1) if ids[at : at + size] == pattern]
        return ids[: starts[0]] if starts else ids

    def ended(self, request: Request, chunk: Any) -> None:
        self.finish(request, {"finish_reason": chunk.finish_reason.to_json()})

    def deliver(self, request: Request, news: dict[str, Any]) -> None:
        request.news.append(news)

    def scheduler_abort(self, request: Request, reason: Abort) -> dict[str, Any]:
        return _error(reason.abort_status or 0, "aborted_by_scheduler", reason.message or "", request.some)

    def pattern(self, matched: Any) -> list[int]:
        return [matched] if isinstance(matched, int) else list(matched)

    def rows(self, values: list[Any]) -> list[Any]:
        return [value if value == value and abs(value) != float("inf") else None for value in values]

    def skips(self, request: Request) -> bool:
        return bool(request.normal.sampling.skip_special_tokens)

    def decode(self, request: Request, ids: list[int], final: bool) -> str:
        data = b"".join(
            bytes([token]) if token < 256 else b"" if self.skips(request) else SPECIAL[token] for token in ids
        )
        return request.decoder.decode(data, final)

    def held(self, text: str, stops: Any) -> int:
        sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return max(sizes, default=0)

    def cut(self, request: Request, text: str, matched: str) -> str:
        sampling = request.normal.sampling
        if not matched or (matched in sampling.stop_regex_strs and matched not in sampling.stop_strs):
            return text
        at = self.find(text, matched)
        return text if at < 0 else text[: at + len(matched)] if sampling.no_stop_trim else text[:at]

    def find(self, text: str, matched: str) -> int:
        return text.find(matched)

    # -- life

    def control(self, key: str, tag: str, fields: Any) -> None:
        rid = Rid.mint()
        self.clients[key] = self.controls[str(rid)] = Request(str(rid), "", None)
        self.queue.append(encode_control(self.schema, tag, rid, *fields))

    def shutdown(self, drain_s: float) -> None:
        self.draining = True
        self.until = drain_s
        if not drain_s or not self.live:
            self.end_all()

    def end_all(self) -> None:
        for request in list(self.live.values()):
            self.finish(request, _error(499, "client_closed", "shut down", request.some))
        self.open = False

    def joined(self, timeout_s: float) -> bool:
        if not self.live:
            self.open = False
        return not self.open

    def scheduler_close(self) -> None:
        for request in list(self.live.values()):
            self.finish(request, _error(503, "scheduler_gone", "the scheduler has gone", request.some))


def raise_shut() -> None:
    from headrace.codec.errors import ShuttingDownError

    raise ShuttingDownError("shutting down")


# ---- broken variants: one fault each


class FramesAreNotChecked(Naive):
    def bad_frame(self, error: FrameError) -> None:
        """Logged, and everybody waits for ever."""


class HalfAFrame(Naive):
    """The rows before the broken one are delivered."""

    def push(self, frame: bytes) -> bool:
        longer = frame[:-1]
        try:
            decode_frame(frame, self.schema)
        except FrameError as error:
            if error.reason == "data_length":
                return super().push(longer)
        return super().push(frame)


class OneTokenAtATime(Naive):
    def decode(self, request: Request, ids: list[int], final: bool) -> str:
        return "".join(
            bytes([token]).decode("utf-8", "replace")
            if token < 256
            else ""
            if self.skips(request)
            else SPECIAL[token].decode()
            for token in ids
        )


class NoFlush(Naive):
    def decode(self, request: Request, ids: list[int], final: bool) -> str:
        return super().decode(request, ids, False)


class NoHoldBack(Naive):
    def held(self, text: str, stops: Any) -> int:
        return 0


class HoldsTooMuch(Naive):
    def held(self, text: str, stops: Any) -> int:
        return min(len(text), max((len(stop) - 1 for stop in stops), default=0))


class CutsAtTheLast(Naive):
    def find(self, text: str, matched: str) -> int:
        return text.rfind(matched)


class ZeroIsNoMatch(Naive):
    def pattern(self, matched: Any) -> list[int]:
        return super().pattern(matched) if matched else []


class EmptyEndIsSkipped(Naive):
    def chunk(self, request: Request, chunk: Any) -> None:
        if len(chunk.token_ids):
            super().chunk(request, chunk)


class OptionsOfTheFirst(Naive):
    def skips(self, request: Request) -> bool:
        return bool(next(iter(self.live.values())).normal.sampling.skip_special_tokens)


class AbortIsASuccess(Naive):
    def scheduler_abort(self, request: Request, reason: Abort) -> dict[str, Any]:
        return {"finish_reason": reason.to_json()}


class NoAbort(Naive):
    def want_abort(self, request: Request) -> None:
        pass


class AbortsTwice(Naive):
    def want_abort(self, request: Request) -> None:
        self.queue.append(encode_abort(self.schema, request.rid))
        self.queue.append(encode_abort(self.schema, request.rid))


class AbortFirst(Naive):
    def want_abort(self, request: Request) -> None:
        self.queue.appendleft(encode_abort(self.schema, request.rid))


class AbortsTheFinished(Naive):
    def ended(self, request: Request, chunk: Any) -> None:
        self.want_abort(request)
        super().ended(request, chunk)


class RidsAsTheyCome(Naive):
    def encode(self, normal: Any, ids: Any, max_new_tokens: int | None) -> Any:
        from msgspec.structs import replace

        return super().encode(replace(normal, rid=Rid.from_wire(normal.rid.client_facing)), ids, max_new_tokens)

    def key_of(self, rid: Rid) -> str:
        return rid.client_facing


class ZeroIsAbsent(Naive):
    def encode(self, normal: Any, ids: Any, max_new_tokens: int | None) -> Any:
        return super().encode(normal, ids, max_new_tokens or 128)


class ClipsInSilence(Naive):
    def fit(self, count: int, normal: Any) -> Any:
        from headrace.codec.admission import Fit

        room = max(1, min(count, self.rules.context_len - 1))
        return Fit(room, min(normal.sampling.max_new_tokens or 0, self.rules.context_len - room))


class NaNIsDropped(Naive):
    def rows(self, values: list[Any]) -> list[Any]:
        return [value for value in super().rows(values) if value is not None]


class SpeaksAfterTheEnd(Naive):
    def finish(self, request: Request, end: dict[str, Any]) -> None:
        request.end = end  # the entry stays, so a second end is told too
        request.told = False


class ForgetsTheLiveAtShutdown(Naive):
    def end_all(self) -> None:
        self.open = False


class DiesOnABadId(Naive):
    def chunk(self, request: Request, chunk: Any) -> None:
        if min(chunk.token_ids.tolist(), default=0) < 0:
            raise OverflowError("can't convert negative int to unsigned")
        super().chunk(request, chunk)


class EchoesThePrompt(Naive):
    def chunk(self, request: Request, chunk: Any) -> None:
        if not request.some and request.normal.text:
            self.deliver(request, {"text": request.normal.text, "token_ids": [], "prompt_tokens": 0, "extras": {}})
        super().chunk(request, chunk)


class UnknownEndIsAnError(Naive):
    def ended(self, request: Request, chunk: Any) -> None:
        if type(chunk.finish_reason).__name__ == "Unknown":
            self.finish(request, _error(500, "internal", "unknown finish reason", request.some))
        else:
            super().ended(request, chunk)


class WindowInCharacters(Naive):
    def encode(self, normal: Any, ids: Any, max_new_tokens: int | None) -> Any:
        from msgspec.structs import replace

        longest = max(map(len, normal.sampling.stop_strs), default=0)
        return super().encode(
            replace(normal, sampling=replace(normal.sampling, stop_str_max_len=longest)), ids, max_new_tokens
        )


BROKEN: dict[type[Naive], str] = {
    FramesAreNotChecked: "wire.rejected.data/data-longer",
    HalfAFrame: "wire.rejected.data/data-longer-by-one-byte",
    OneTokenAtATime: "text.split-character.four-chunks",
    NoFlush: "text.flush/length",
    NoHoldBack: "text.stop-spread",
    HoldsTooMuch: "text.holdback-exact",
    CutsAtTheLast: "text.stop-leftmost",
    ZeroIsNoMatch: "text.stop-token-0",
    EmptyEndIsSkipped: "machines.only-an-empty-terminal/stream",
    OptionsOfTheFirst: "text.special-tokens/skip-and-keep",
    AbortIsASuccess: "errors.scheduler-status/503",
    NoAbort: "abort.client-leaves/stream",
    AbortsTwice: "abort.client-leaves-before-output",
    AbortFirst: "abort.order",
    AbortsTheFinished: "abort.after-the-end",
    RidsAsTheyCome: "admission.rid-twice",
    ZeroIsAbsent: "sampling.max-new-tokens/zero",
    ClipsInSilence: "admission.window/sum-too-large",
    NaNIsDropped: "wire.logprobs-null",
    SpeaksAfterTheEnd: "machines.second-terminal-later",
    ForgetsTheLiveAtShutdown: "shutdown.with-live",
    DiesOnABadId: "text.bad-id/negative",
    EchoesThePrompt: "text.no-prompt",
    UnknownEndIsAnError: "wire.finish-unknown/unknown-type",
    WindowInCharacters: "sampling.stop-window/utf-8",
}


# ---- targets that misbehave as programs do


class Crashes(Naive):
    """The process dies in the middle of a case."""

    def push(self, frame: bytes) -> bool:
        import os

        os._exit(3)


class FallsSilent(Naive):
    def push(self, frame: bytes) -> bool:
        import threading

        threading.Event().wait()
        return True


class Talks(Naive):
    """Prints on standard output, which belongs to the protocol."""

    def push(self, frame: bytes) -> bool:
        print("a library says hello", json.dumps({"ok": False}), flush=True)
        return super().push(frame)
