"""SGLang's real server as a target: its compiled extension, driven over loopback HTTP and by its scheduler-side methods.

Owns: how the extension is found, and the adapter. Rules it keeps:

* Nothing of SGLang is installed or shipped. The one file that is needed comes out of its wheel (extra `interop`: see
  docs/differences.md), for CPython 3.11 on Linux x86-64; `fetch` takes it with the ordinary pip client into the user's cache, never
  with ``HEADRACE_OFFLINE=1``, and its hash is checked before it is loaded.
* Requests go to 127.0.0.1 only, each on a connection of its own with a time limit.
* The adapter translates and never mends: an HTTP status is the error's status, an error inside a stream that had begun is told as
  such, and what the server does not send is not filled in.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import json
import os
import platform
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

VERSION: Final = "0.5.23"
SO_NAME: Final = "_server.cpython-311-x86_64-linux-gnu.so"
SO_SHA256: Final = "5ee923be3e6273ff3f8c59c802820afc8071ee7ba0606a5b104a64c5dc59f96f"
_PIP: Final = (
    "download",
    "-q",
    "--retries",
    "1",
    "--timeout",
    "15",
    "--no-deps",
    "--only-binary",
    ":all:",
    "--python-version",
    "3.11",
    "--platform",
)
_PLATFORM: Final = "manylinux_2_34_x86_64"
_HTTP_LIMIT_S: Final = 30.0


def wrong_platform() -> str:
    """Why the extension cannot run here; empty where it can."""
    if sys.version_info[:2] != (3, 11) or sys.implementation.name != "cpython":
        return "SGLang's extension is built for CPython 3.11"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "SGLang's extension is built for Linux x86-64"
    return ""


def cache_folder() -> Path:
    """Where the extension is kept: `HEADRACE_CACHE`, or the user's cache folder."""
    root = os.environ.get("HEADRACE_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "headrace" / f"sglang-{VERSION}"


def find() -> Path | None:
    """The extension, if it is here: `HEADRACE_SGLANG_SO`, or the cache."""
    given = os.environ.get("HEADRACE_SGLANG_SO")
    path = Path(given) if given else cache_folder() / SO_NAME
    return path if path.is_file() else None


def fetch() -> Path:
    """The extension, from the cache or out of the wheel that pip downloads. OSError says why it cannot be had."""
    reason = wrong_platform()
    if reason:
        raise OSError(reason)
    path = find()
    if path is None:
        if os.environ.get("HEADRACE_OFFLINE") == "1":
            raise OSError(f"SGLang {VERSION}'s extension is not in the cache, and HEADRACE_OFFLINE=1 is set")
        path = _download()
    if hashlib.sha256(path.read_bytes()).hexdigest() != SO_SHA256:
        raise OSError(f"{path.name} is not the file of SGLang {VERSION} that this kit knows")
    return path


def _download() -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", *_PIP, _PLATFORM, "-d", scratch, f"sglang=={VERSION}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=90)
        except (OSError, subprocess.SubprocessError) as fault:
            raise OSError(f"pip cannot download sglang=={VERSION}: {type(fault).__name__}") from None
        wheel = next(Path(scratch).glob("sglang-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{SO_NAME}"))
            fresh = folder / f"{SO_NAME}.{os.getpid()}"
            fresh.write_bytes(archive.read(member))
    fresh.replace(folder / SO_NAME)
    return folder / SO_NAME


_loaded: list[Any] = []


def load() -> Any:
    """The extension module. OSError where it cannot be had."""
    if not _loaded:
        spec = importlib.util.spec_from_file_location("_server", fetch())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded.append(module)
    return _loaded[0]


def start_server(
    port: int,
    tokenizer: str | None,
    *,
    context_len: int = 8192,
    vocab_size: int = 260,
    skip_tokenizer: bool = False,
    **overrides: Any,
) -> Any:
    """A live server on 127.0.0.1:`port`; `tokenizer` is a folder with a tokenizer.json. `overrides` replace ServerArgs fields."""
    ext = load()
    model = ext.ModelConfig(
        context_len=context_len,
        vocab_size=vocab_size,
        is_multimodal=False,
        default_sampling_params=ext.DefaultSamplingParams(),
        model_type="x",
    )
    args = {
        "model_path": tokenizer or "none",
        "served_model_name": "m",
        "tokenizer_path": tokenizer or "none",
        "revision": None,
        "load_format": "auto",
        "weight_version": "default",
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": "best_effort",
        "hicache_write_policy": "write_through",
        "host": "127.0.0.1",
        "port": port,
        "grpc_port": None,
        "log_level": "error",
        "log_level_http": "error",
        "chat_template": None,
        "default_chat_template_kwargs": "{}",
        "tool_call_parser": None,
        "reasoning_parser": None,
        "stream_response_default_include_usage": False,
        "tokenizer_worker_num": 1,
        "detokenizer_worker_num": 1,
        "skip_tokenizer_init": skip_tokenizer,
        "skip_server_warmup": True,
        "health_generate_headers": {},
        "default_priority_value": None,
        "enable_request_header_overrides": False,
        "incremental_streaming_output": True,
        "disaggregation_mode": ext.DisaggregationMode.Null,
        "model_config": model,
        "preferred_sampling_params": None,
        "default_max_new_tokens": 128,
        "lora_ids": {},
        "enable_strict_thinking": False,
        "limit_mm_data_per_request": [],
        "allow_auto_truncate": False,
        "enable_return_hidden_states": False,
        "num_reserved_tokens": 0,
        "tokenizer_model_max_length": context_len,
        "version": "x",
        "max_total_num_tokens": 1_000_000,
        "deployment_info": "{}",
        "launch_server_info": "{}",
        "load_snapshot_path": None,
        "load_snapshot_dp_size": 0,
        "load_snapshot_dp_rank": 0,
        "accelerator": None,
        "num_accelerators": 0,
        "metrics": None,
    }
    args.update(overrides)
    return ext.Server(ext.ServerArgs(**args))


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SGLangTarget:
    """The adapter. Every method is one of the kit's operations."""

    def __init__(self) -> None:
        self._server: Any = None
        self._port = 0
        self._clients: dict[str, _Client] = {}
        self._closed = True
        self._ending: threading.Thread | None = None

    def hello(self) -> dict[str, Any]:
        load()
        return {
            "protocol": 1,
            "name": "SGLang's Rust server",
            "version": VERSION,
            "wires": ["v2"],
            "machines": {},
            "capabilities": [
                "abort_by_rid",
                "batch",
                "byte_fallback",
                "detokenize",
                "health",
                "hidden_states",
                "logprobs",
                "logprobs_ragged",
                "skip_tokenizer",
                "truncation",
            ],
        }

    def start(self, wire: str, config: Mapping[str, Any]) -> None:
        self._port = free_port()
        self._server = start_server(
            self._port,
            config.get("tokenizer"),
            context_len=config["context_len"],
            vocab_size=config["vocab_size"],
            skip_tokenizer=bool(config.get("skip_tokenizer_init")),
            allow_auto_truncate=bool(config.get("allow_auto_truncate")),
            enable_return_hidden_states=bool(config.get("enable_return_hidden_states")),
            num_reserved_tokens=config.get("num_reserved_tokens", 0),
        )
        self._closed = False

    def submit(self, key: str, body: str) -> None:
        parsed: Any = None
        with contextlib.suppress(ValueError):
            parsed = json.loads(body)
        client = self._clients[key] = _Client(self._port, "/generate", body.encode("utf-8"))
        prompts = parsed.get("text", parsed.get("input_ids")) if isinstance(parsed, dict) else None
        if isinstance(prompts, list) and prompts and (isinstance(prompts[0], (list, str)) or parsed.get("text")):
            client.items = [_Client(self._port, "", b"") for _ in prompts]
            for at, item in enumerate(client.items):
                self._clients[f"{key}.{at}"] = item
        client.start()

    def drain(self, max: int, timeout_s: float) -> list[dict[str, Any]]:
        if timeout_s:
            self._server.wait_request(int(timeout_s * 1000))
        return [
            {
                "header": bytes(item.header),
                "cells": {name: np.asarray(cell).astype("<i8").tobytes() for name, cell in item.buffers},
            }
            for item in self._server.recv_requests(max)
        ]

    def push(self, frame: bytes) -> bool:
        if frame[:1] == b"\x02":
            size = int.from_bytes(frame[1:5], "little")
            if len(frame) < 5 + size:
                raise ValueError("the extension takes header and columns apart; there is no such frame to push")
            took = self._server.push_decode_result_batch(frame[5 : 5 + size], [frame[5 + size :]])
        else:
            rid, what = msgspec.msgpack.decode(frame[1:])
            took = (self._server.push_control_result if frame[0] == 1 else self._server.push_error)(rid, what)
        return bool(took)

    def read(self, key: str, timeout_s: float) -> dict[str, Any]:
        return self._clients[key].read(timeout_s)

    def abort(self, rid: str) -> None:
        _Client(self._port, "/abort_request", json.dumps({"rid": rid}).encode()).run()

    def close(self, key: str) -> None:
        self._clients[key].close()

    def detokenize(self, key: str, ids: Sequence[int]) -> None:
        client = self._clients[key] = _Client(self._port, "/detokenize", json.dumps({"tokens": list(ids)}).encode())
        client.start()

    def health(self, key: str, timeout_s: float) -> None:
        client = self._clients[key] = _Client(self._port, "/health_generate", b"")
        client.start()

    def shutdown(self, drain_s: float) -> None:
        self._closed = True
        self._ending = threading.Thread(target=self._server.shutdown, daemon=True)
        self._ending.start()

    def joined(self, timeout_s: float) -> bool:
        assert self._ending is not None
        self._ending.join(timeout_s)
        return not self._ending.is_alive()

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        server, self._server = self._server, None
        if server is not None and not self._closed:
            server.shutdown()


class _Client:
    """One HTTP request on a connection and a thread of its own."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HTTP_LIMIT_S)
        self._path, self._body = path, body
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._left = False
        self.items: list[_Client] = []

    def start(self) -> None:
        # On the wire before this returns: requests then arrive in the order in which the kit sends them.
        try:
            self._send()
        except OSError as fault:
            self._fail(503, f"no connection: {type(fault).__name__}", False)
            return
        threading.Thread(target=self._receive, daemon=True).start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            self._send()
            self._receive()

    def _send(self) -> None:
        method = "POST" if self._body else "GET"
        self._connection.request(method, self._path, self._body or None, {"Content-Type": "application/json"})

    def _fail(self, status: int, message: str, in_band: bool) -> None:
        end = {"error": {"status": status, "code": None, "message": message, "in_band": in_band}}
        for client in (self, *self.items):
            client._news.put(end)

    def _receive(self) -> None:
        begun = False
        try:
            response = self._connection.getresponse()
            if self._path == "/health_generate":
                response.read()
                self._news.put({"healthy": response.status == 200})
                return
            if response.status != 200:
                self._fail(response.status, _message(response.read()), False)
                return
            if (response.getheader("content-type") or "").startswith("text/event-stream"):
                begun = True
                self._stream(response)
                return
            answer = json.loads(response.read())
            if self._path == "/detokenize":
                self._news.put({"text": answer["text"]})
            elif self.items:
                for client, one in zip(self.items, answer, strict=True):
                    if "error" in one:
                        client._fail(int(one["error"].get("code") or 0), str(one["error"].get("message")), False)
                    else:
                        client._chunk(one)
            elif self._path == "/generate":
                self._chunk(answer)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as fault:
            if not self._left:
                self._fail(599, f"the connection broke: {type(fault).__name__}", begun)
        finally:
            self._connection.close()

    def _stream(self, response: http.client.HTTPResponse) -> None:
        ended = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                self._fail(int(event["error"].get("code") or 0), str(event["error"].get("message")), True)
                ended = True
            elif self.items:
                ended = self.items[event["index"]]._chunk(event) or ended
            else:
                ended = self._chunk(event)
        if not ended and not self._left and not self.items:
            self._fail(599, "the stream ended without an end", True)

    def _chunk(self, event: Mapping[str, Any]) -> bool:
        """One answer or event; whether it was the last."""
        meta = event["meta_info"]
        chunk = {
            "text": event.get("text") or "",
            "token_ids": event.get("output_ids") or [],
            "prompt_tokens": meta.get("prompt_tokens"),
            "extras": _extras(meta),
        }
        self._news.put({"chunk": chunk})
        if meta.get("finish_reason") is None:
            return False
        self._news.put({"finish_reason": meta["finish_reason"]})
        return True

    def read(self, timeout_s: float) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = []
        try:
            news = self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait()
            while "chunk" in news:
                chunks.append(news["chunk"])
                news = self._news.get_nowait()
            return {"chunks": chunks, "end": news}
        except queue.Empty:
            return {"chunks": chunks, "end": None}

    def close(self) -> None:
        self._left = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            self._connection.close()


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


_FLAT: Final = {"output_token_logprobs": "out_lp", "input_token_logprobs": "in_lp"}
_RAGGED: Final = {
    "output_top_logprobs": "out_top",
    "input_top_logprobs": "in_top",
    "output_token_ids_logprobs": "out_tid",
    "input_token_ids_logprobs": "in_tid",
}


def _extras(meta: Mapping[str, Any]) -> dict[str, list[Any]]:
    extras: dict[str, list[Any]] = {}
    for name, family in _FLAT.items():
        rows = meta.get(name)
        if rows:
            extras[f"{family}_val"] = [row[0] for row in rows]
            extras[f"{family}_idx"] = [row[1] for row in rows]
    for name, family in _RAGGED.items():
        rows = meta.get(name)
        if rows:
            extras[f"{family}_lens"] = [len(row or ()) for row in rows]
            extras[f"{family}_val"] = [one[0] for row in rows for one in row or ()]
            extras[f"{family}_idx"] = [one[1] for row in rows for one in row or ()]
    return extras


def server() -> SGLangTarget:
    """`headrace conform headrace.specs.conformance.sglang_target:server`."""
    return SGLangTarget()
