"""JSON lines: any program as a target, and any Python target as a program.

Owns: the two ends of the pipe. One request, one answer, one line each; the first is a hello::

    {"op": "hello", "protocol": 1, "wires": ["v1", "v2"], …}         →   {"ok": true, "result": {"protocol": 1, …}}
    {"op": "submit", "key": "a", "body": "{\\"text\\": \\"hi\\"}"}   →   {"ok": true, "result": null}
                                                                  or  {"ok": false, "fault": "what went wrong"}

Rules it keeps: a target always runs in a process of its own, so that a crash or silence fails one case and no more; every answer
has a time limit; a late answer cannot be taken for the next one's, because the process is ended first. What the target prints is
kept apart from the protocol: standard output belongs to the lines, and `serve` moves everything else to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any, Final, Protocol

from .protocol import (
    CAPABILITIES,
    OPS,
    PROTOCOL,
    KitError,
    TargetFault,
    pack_args,
    pack_result,
    unpack_args,
    unpack_result,
)

OUR_HELLO: Final = {"protocol": PROTOCOL, "wires": ["v1", "v2"], "capabilities": sorted(CAPABILITIES)}
HELLO_LIMIT_S: Final = 30.0  # a target may have to load a model's tokenizer before it can speak
_KEPT = 12  # last lines of standard error, for the message of a crash


class Caller(Protocol):
    """How the kit calls a target, wherever it runs."""

    def call(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        """One operation. TargetFault when it raises, dies or is silent for `limit_s` seconds."""

    def restart(self) -> None:
        """After a fault: a target that knows nothing of what was."""

    def end(self) -> None:
        """No more calls."""


class Direct:
    """A Python target in this process: quick, but its silence is ours. For tests, and for targets known to answer."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._target: Any = None

    def call(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        if self._target is None:
            self._target = self._factory()
        method = getattr(self._target, op, None)
        if method is None:
            raise TargetFault(f"the target has no {op}")
        try:
            return method(**args)
        except Exception as fault:
            raise TargetFault(f"{op} raised {type(fault).__name__}: {fault}") from fault

    def restart(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            with contextlib.suppress(Exception):
                target.stop()

    def end(self) -> None:
        self.restart()


class Process:
    """A program that answers JSON lines; started when first called, and again after `restart`."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._noise: deque[str] = deque(maxlen=_KEPT)
        self._listener: threading.Thread | None = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._answers, self._noise = queue.SimpleQueue(), deque(maxlen=_KEPT)
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    errors="backslashreplace",
                )
            except OSError as fault:
                raise KitError(f"the target cannot be started: {fault}") from None
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            answers, noise = self._answers, self._noise
            threading.Thread(target=_pump, args=(self._process.stdout, answers.put), daemon=True).start()
            self._listener = threading.Thread(target=_pump, args=(self._process.stderr, noise.append), daemon=True)
            self._listener.start()
        return self._process

    def call(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        if self._process is None and op != "hello":  # the first line each way is a hello, also after a restart
            self._exchange("hello", OUR_HELLO, max(limit_s, HELLO_LIMIT_S))
        return self._exchange(op, OUR_HELLO if op == "hello" else args, limit_s)

    def _exchange(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        process = self._start()
        line = json.dumps({"op": op, **pack_args(op, args)})
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except OSError:
            raise TargetFault(self._death(process, op)) from None
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise TargetFault(f"{op}: no answer within {limit_s:g} s") from None
        if answer is None:
            raise TargetFault(self._death(process, op))
        try:
            told = json.loads(answer)
            if told["ok"] is True:
                return unpack_result(op, told.get("result"))
            raise TargetFault(f"{op}: {told.get('fault', 'failed without saying why')}")
        except (ValueError, KeyError, TypeError):
            raise TargetFault(f"{op}: the answer is not a line of the protocol: {answer[:120]!a}") from None

    def _death(self, process: subprocess.Popen[str], op: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if self._listener is not None:
            self._listener.join(1)  # its last words may still be on their way
        said = " | ".join(line.strip() for line in self._noise if line and line.strip())
        return f"{op}: the target ended (status {process.poll()}){': ' + said[-600:] if said else ''}"

    def restart(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin,):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def end(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # end of input is the end of the program
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        self.restart()


def _pump(source: IO[str], put: Callable[[str | None], object]) -> None:
    try:
        for line in source:
            put(line)
    except ValueError:
        pass  # the pipe was closed under us
    put(None)
    source.close()


def python_target(spec: str) -> Process:
    """A MODULE:FACTORY target in a process of its own."""
    module, _, factory = spec.partition(":")
    if not module or not factory:
        raise KitError(f"a target is MODULE:FACTORY, not {spec!r}")
    return Process([sys.executable, "-m", __name__, spec])


def load(spec: str) -> Any:
    """The target that MODULE:FACTORY makes."""
    module, _, factory = spec.partition(":")
    if not module or not factory:
        raise KitError(f"a target is MODULE:FACTORY, not {spec!r}")
    try:
        made = getattr(importlib.import_module(module), factory)
    except ImportError as fault:
        raise KitError(f"{module} cannot be imported: {fault}") from None
    except AttributeError:
        raise KitError(f"{module} has no {factory}") from None
    return made()


def serve(target: Any, source: IO[str], sink: IO[str]) -> None:
    """Answer JSON lines from `source` on `sink` until the end of input."""
    for line in source:
        try:
            asked = json.loads(line)
            op = asked["op"]
            if op not in OPS:
                raise KeyError(f"unknown operation {op}")
            method = getattr(target, op, None)
            if method is None:
                raise AttributeError(f"the target has no {op}")
            answer: Any = {"ok": True, "result": pack_result(op, method(**unpack_args(op, asked)))}
        except Exception as fault:
            answer = {"ok": False, "fault": f"{type(fault).__name__}: {fault}"}
        sink.write(json.dumps(answer) + "\n")
        sink.flush()


def main(spec: str) -> int:
    """`python -m headrace.specs.conformance.lines MODULE:FACTORY`: that target as a program."""
    # The protocol gets a descriptor of its own: libraries, also compiled ones, print on standard output.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    try:
        target = load(spec)
    except KitError as fault:
        print(fault, file=sys.stderr)
        return 1
    try:
        serve(target, sys.stdin, lines)
    finally:
        with contextlib.suppress(Exception):
            target.stop()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a target's leftover threads must not keep the process
