"""headrace itself as a target of the conformance kit: `headrace conform headrace.runtime.conformance_target:threads` (or
`:simulation`, the same stages under a seeded single thread).

Owns: the adapters, nothing else. One manager per case; a client's output is taken by a thread that starts at its first `read`, so
that a client that has not read yet is a slow one.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .._version import __version__
from ..codec import encode_control, load_schema
from ..codec.errors import HeadraceError, ShuttingDownError
from ..codec.vectors import meaning
from ..fsm import MACHINES, export
from .closing import Closing, Until, Wait
from .config import RuntimeConfig
from .handle import Chunk, RequestHandle
from .manager import TokenizerManager
from .threads import DriverThread

_SETTINGS = (
    "context_len",
    "vocab_size",
    "num_reserved_tokens",
    "allow_auto_truncate",
    "enable_return_hidden_states",
    "skip_tokenizer_init",
    "ingress_ring_capacity",
    "sink_capacity",
    "detokenizer_shards",
)


class ThreadsTarget:
    """The production driver. Every method is one of the kit's operations."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._manager: TokenizerManager | None = None
        self._clients: dict[str, _Client] = {}
        self._ending: threading.Thread | None = None

    def hello(self) -> dict[str, Any]:
        return {
            "protocol": 1,
            "name": "headrace (threads)",
            "version": __version__,
            "wires": ["v1", "v2"],
            "machines": {name: machine.revision for name, machine in MACHINES.items()},
            "capabilities": [
                "abort_by_rid",
                "batch",
                "byte_fallback",
                "codec",
                "control",
                "detokenize",
                "drain",
                "error_codes",
                "health",
                "hidden_states",
                "logprobs",
                "logprobs_ragged",
                "machines",
                "ring_capacity",
                "scheduler_close",
                "sink_capacity",
                "skip_tokenizer",
                "truncation",
                "whole_frames",
            ],
        }

    def start(self, wire: str, config: Mapping[str, Any]) -> None:
        self._manager = TokenizerManager(self._config(wire, config))
        self._manager.start()

    def _config(self, wire: str, config: Mapping[str, Any]) -> RuntimeConfig:
        chosen = {name: config[name] for name in _SETTINGS if name in config}
        return RuntimeConfig(tokenizer=config.get("tokenizer"), wire=wire, **{**chosen, **self._settings})

    @property
    def _tm(self) -> TokenizerManager:
        if self._manager is None:
            raise RuntimeError("start comes first")
        return self._manager

    def submit(self, key: str, body: str) -> None:
        client = self._clients[key] = _Client()
        try:
            handles = self._tm.submit(body)
        except HeadraceError as error:
            client.end = _error(error, in_band=False)
            return
        if len(handles) == 1:
            client.handle = handles[0]
        for at, handle in enumerate(handles):
            self._clients[f"{key}.{at}"] = _Client(handle)

    def drain(self, max: int, timeout_s: float) -> list[dict[str, Any]]:
        port = self._tm.scheduler
        if timeout_s:
            port.wait_request(timeout_s)
        columns = port.recv_requests(max)
        messages: list[dict[str, Any]] = [
            {"header": header, "cells": {"input_ids": ids.tobytes()}}
            for header, ids in zip(columns.headers, _parts(columns.ids, columns.lengths), strict=True)
        ]
        for name, (values, lengths) in columns.cells.items():
            for message, part in zip(messages, _parts(values, lengths), strict=True):
                if len(part):
                    message["cells"][name] = part.tobytes()
        return messages

    def push(self, frame: bytes) -> bool:
        return self._tm.scheduler.push_frame(frame, 5.0)

    def read(self, key: str, timeout_s: float) -> dict[str, Any]:
        return self._clients[key].read(timeout_s)

    def abort(self, rid: str) -> None:
        self._tm.abort(rid)

    def close(self, key: str) -> None:
        handle = self._clients[key].handle
        if handle is not None:
            handle.close()

    def shutdown(self, drain_s: float) -> None:
        self._ending = threading.Thread(target=self._tm.shutdown, args=(drain_s,), name="kit-shutdown", daemon=True)
        self._ending.start()

    def joined(self, timeout_s: float) -> bool:
        assert self._ending is not None
        self._ending.join(timeout_s)
        return not self._ending.is_alive()

    def control(self, key: str, tag: str, fields: Sequence[Any]) -> None:
        encode_control(self._tm._schema, tag, "", *fields)  # what is wrong with it must show here
        self._later(key, lambda: {"payload": self._tm.control(tag, *fields, timeout=20).decode("utf-8", "replace")})

    def detokenize(self, key: str, ids: Sequence[int]) -> None:
        self._later(key, lambda: {"text": self._tm.decode(ids, timeout=20)})

    def health(self, key: str, timeout_s: float) -> None:
        self._later(key, lambda: {"healthy": self._tm.health(timeout_s)})

    def _later(self, key: str, call: Callable[[], dict[str, Any]]) -> None:
        client = self._clients[key] = _Client()

        def run() -> None:
            try:
                client.put(call())
            except HeadraceError as error:
                client.put(_error(error, in_band=False))
            except TimeoutError as error:
                client.put({"error": {"status": 504, "code": "timeout", "message": str(error), "in_band": False}})

        client.started = True
        threading.Thread(target=run, name=f"kit-{key}", daemon=True).start()

    def scheduler_close(self) -> None:
        self._tm.scheduler.close()

    def decode_frame(self, wire: str, frame: bytes) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(json.dumps(meaning(frame, load_schema(wire))))
        return told

    def machine(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(export(MACHINES[name], "json"))
        return told

    def stop(self) -> None:
        manager, self._manager = self._manager, None
        for client in self._clients.values():
            if client.handle is not None:
                client.handle.close()
        self._clients.clear()
        self._ending = None
        if manager is not None:
            manager.scheduler.close()
            manager.shutdown(0)


def _parts(values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _error(error: HeadraceError, *, in_band: bool) -> dict[str, Any]:
    return {
        "error": {"status": error.http_status, "code": error.code, "message": error.message, "in_band": in_band},
    }


class _Client:
    """One client: what came in, waiting to be read by the kit."""

    def __init__(self, handle: RequestHandle | None = None) -> None:
        self.handle = handle
        self.end: dict[str, Any] | None = None
        self.started = False
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def put(self, news: dict[str, Any]) -> None:
        self._news.put(news)

    def read(self, timeout_s: float) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = []
        if self.end is not None:
            end, self.end = self.end, None
            return {"chunks": [], "end": end}
        if self.handle is not None and not self.started:
            self.started = True
            threading.Thread(target=self._pump, args=(self.handle,), name="kit-reader", daemon=True).start()
        try:
            news = self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait()
            while "chunk" in news:
                chunks.append(news["chunk"])
                news = self._news.get_nowait()
            return {"chunks": chunks, "end": news}
        except queue.Empty:
            return {"chunks": chunks, "end": None}

    def _pump(self, handle: RequestHandle) -> None:
        finish: Any = None
        some = False
        try:
            for chunk in handle:
                some = True
                finish = chunk.finish_reason
                self.put({"chunk": _chunk(chunk)})
            self.put({"finish_reason": None if finish is None else finish.to_json()})
        except HeadraceError as error:
            self.put(_error(error, in_band=some))


def _chunk(chunk: Chunk) -> dict[str, Any]:
    extras = {
        name: [value if value == value and abs(value) != float("inf") else None for value in array.tolist()]
        for name, array in chunk.extras.items()
    }
    return {
        "text": chunk.text,
        "token_ids": chunk.token_ids.tolist(),
        "prompt_tokens": chunk.prompt_tokens,
        "extras": extras,
    }


class _Unthreaded(TokenizerManager):
    """A manager without driver threads: whoever holds it makes the moves."""

    def _build_threads(self) -> list[DriverThread]:
        return []


class SimulationTarget(ThreadsTarget):
    """The same stages and clients, moved by one thread in an order that a seed draws; no stage runs while an operation does not.

    The shutdown is the shipped script (`Closing`). Its drain deadline is virtual: it passes when `joined` asks for the end.
    """

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self._rng = random.Random(seed)
        self._closing: Closing | None = None
        self._until: Wait | None = None

    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "name": "headrace (simulation)"}

    def start(self, wire: str, config: Mapping[str, Any]) -> None:
        self._closing, self._until = None, None
        self._manager = _Unthreaded(self._config(wire, config))
        self._manager.start()
        pipeline = self._manager._pipeline
        self._moves: list[Callable[[], bool]] = [pipeline.move_ingress, pipeline.move_dispatch]
        self._moves += [partial(pipeline.move_worker, index) for index in range(len(pipeline.workers))]
        self._moves += [partial(pipeline.move_shard, index) for index in range(len(pipeline.shards))]

    def _pump(self) -> None:
        """Moves in a random order until none is enabled."""
        while any(move() for move in self._rng.sample(self._moves, len(self._moves))):
            pass

    def _end(self, deadline_passed: bool) -> None:
        """Go on with the shutdown as far as it goes without waiting."""
        while self._until is not None:
            self._pump()
            empty = not self._tm._pipeline.live.lives()
            if self._until.until is Until.EMPTY and not empty and self._until.timeout and not deadline_passed:
                return
            self._until = next(self._closing, None) if self._closing is not None else None

    def _patiently(self, done: Callable[[], Any], timeout_s: float) -> Any:
        """`done()` once it is something, with moves in between: clients and callers have threads of their own."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._pump()
            result = done()
            if result or time.monotonic() >= deadline:
                return result
            self._tm._pipeline.ingress_bell.wait(0.002)

    def submit(self, key: str, body: str) -> None:
        super().submit(key, body)
        self._pump()

    def drain(self, max: int, timeout_s: float) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self._patiently(lambda: super(SimulationTarget, self).drain(max, 0), timeout_s)
        self._pump()  # there is room in the ring again
        return messages

    def push(self, frame: bytes) -> bool:
        took = super().push(frame)
        self._pump()
        self._end(False)
        return took

    def read(self, key: str, timeout_s: float) -> dict[str, Any]:
        told: dict[str, Any] = {"chunks": [], "end": None}

        def look() -> bool:
            told.update(super(SimulationTarget, self).read(key, 0.001 if timeout_s else 0))
            return bool(told["chunks"] or told["end"])

        self._patiently(look, timeout_s)
        return told

    def abort(self, rid: str) -> None:
        super().abort(rid)
        self._pump()

    def close(self, key: str) -> None:
        super().close(key)
        self._pump()

    def scheduler_close(self) -> None:
        super().scheduler_close()
        self._pump()

    def shutdown(self, drain_s: float) -> None:
        if self._closing is None:
            refusal = ShuttingDownError("the manager is shutting down")
            self._closing = Closing(self._tm._pipeline, refusal, drain=drain_s, settle=0, join=0)
            self._until = next(self._closing)
        self._end(False)

    def joined(self, timeout_s: float) -> bool:
        self._end(True)
        return self._until is None

    def stop(self) -> None:
        if self._manager is not None:
            for client in self._clients.values():
                if client.handle is not None:
                    client.handle.close()
            self._manager.scheduler.close()
            self._pump()
            self.shutdown(0)
            self._end(True)
        super().stop()


def threads() -> ThreadsTarget:
    """One detokenizer shard, dispatcher and shard fused: the default."""
    return ThreadsTarget()


def simulation() -> SimulationTarget:
    """One thread, two shards, an order of moves drawn from a seed."""
    return SimulationTarget(detokenizer_shards=2)


def threads_apart() -> ThreadsTarget:
    """Three shards, each stage on a thread of its own."""
    return ThreadsTarget(detokenizer_shards=3, fused=False)
