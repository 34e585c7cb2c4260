"""The compiled peer: SGLang's Rust server, fed the same frames over its scheduler port, read per thread from /proc.

Owns: starting the extension's `Server` on loopback, a client process that opens the streams and throws their bytes away, and the
counting. Only the two threads that turn frames into text are counted (`from-scheduler-*`, `detokenizer-*`); HTTP, JSON and the client
are not, because they are not in our number either. CPython 3.11, Linux x86-64; everything here is absent without the extension.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...codec import load_schema
from .egress import Workload, frames

_THREADS = ("from-scheduler", "detokenizer")
_TEXT_IN = ("tokenizer-", "to-scheduler")
_START_S = 30.0


class RustPeer:
    """A running server; `egress` measures a workload on it, `text_in` a list of prompts."""

    def __init__(self, server: Any, port: int) -> None:
        self.server = server
        self.port = port

    def egress(self, work: Workload) -> float:
        """CPU µs per token of the two threads."""
        body: dict[str, Any] = {
            "input_ids": [1, 2, 3, 4],
            "stream": work.stream,
            "sampling_params": {"max_new_tokens": None, "ignore_eos": True, "stop": list(work.stops) or None},
        }
        if work.top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": work.top_logprobs}
        with self._clients([body] * work.requests) as client:
            rids = self._receive(work.requests)
            began = _cpu(_THREADS)
            for header, columns in frames(work, load_schema("v2"), rids):
                self.server.push_decode_result_batch(header, [bytes(column) for column in columns])
            client.wait(timeout=120)
            return (_cpu(_THREADS) - began) / work.tokens

    def text_in(self, texts: list[str]) -> float:
        """CPU µs per request of its tokenizer and to-scheduler threads; the requests are then aborted by leaving."""
        bodies = [{"text": text, "stream": False, "sampling_params": {"max_new_tokens": 1}} for text in texts]
        began = _cpu(_TEXT_IN)
        with self._clients(bodies) as client:
            self._receive(len(texts))
            spent = _cpu(_TEXT_IN) - began
            client.kill()
        self._settle()
        return spent / len(texts)

    def _settle(self) -> None:
        while self.server.wait_request(200):
            self.server.recv_requests(4096)

    def _receive(self, count: int) -> list[str]:
        rids: list[str] = []
        deadline = time.monotonic() + _START_S
        while len(rids) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the Rust server handed over {len(rids)} of {count} requests in {_START_S} s")
            self.server.wait_request(500)
            for item in self.server.recv_requests(4096):
                header = msgspec.msgpack.decode(item.header)
                if header[0] == "TokenizedGenerateReqInput":
                    rids.append(header[1])
        return rids

    @contextmanager
    def _clients(self, bodies: list[dict[str, Any]]) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen([sys.executable, "-m", __name__, str(self.port)], stdin=subprocess.PIPE)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(bodies).encode())
            process.stdin.close()
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def rust_peer(extension: Path, tokenizer_folder: Path, *, vocab_size: int) -> Iterator[RustPeer]:
    """The server of the extension file, on a free loopback port, until the block ends."""
    spec = importlib.util.spec_from_file_location("_server", extension)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{extension} is not an extension module")
    ext = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ext)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # its logger writes on descriptor 1, where the table belongs
    server = ext.Server(ext.ServerArgs(**_arguments(ext, port, str(tokenizer_folder), vocab_size)))
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the Rust server does not listen after {_START_S} s")
            threading.Event().wait(0.05)
        yield RustPeer(server, port)
    finally:
        server.shutdown()
        os.dup2(stdout, 1)
        os.close(stdout)


def _arguments(ext: Any, port: int, tokenizer: str, vocab_size: int) -> dict[str, Any]:
    """Every field of its ServerArgs (all are required keywords)."""
    model = ext.ModelConfig(
        context_len=1 << 20,
        vocab_size=vocab_size,
        is_multimodal=False,
        default_sampling_params=ext.DefaultSamplingParams(),
        model_type="x",
    )
    none = (
        "revision hicache_storage_backend hicache_storage_backend_extra_config grpc_port chat_template tool_call_parser "
        "reasoning_parser default_priority_value preferred_sampling_params load_snapshot_path accelerator metrics"
    )
    false = "stream_response_default_include_usage skip_tokenizer_init enable_request_header_overrides enable_strict_thinking allow_auto_truncate"
    return {
        **dict.fromkeys(none.split()),
        **dict.fromkeys(false.split(), False),
        "model_path": tokenizer,
        "served_model_name": "m",
        "tokenizer_path": tokenizer,
        "load_format": "auto",
        "weight_version": "default",
        "hicache_storage_prefetch_policy": "best_effort",
        "hicache_write_policy": "write_through",
        "host": "127.0.0.1",
        "port": port,
        "log_level": "warning",
        "log_level_http": "warning",
        "default_chat_template_kwargs": "{}",
        "tokenizer_worker_num": 1,
        "detokenizer_worker_num": 1,
        "skip_server_warmup": True,
        "health_generate_headers": {},
        "incremental_streaming_output": True,
        "disaggregation_mode": ext.DisaggregationMode.Null,
        "model_config": model,
        "default_max_new_tokens": 128,
        "lora_ids": {},
        "limit_mm_data_per_request": [],
        "enable_return_hidden_states": True,
        "num_reserved_tokens": 0,
        "tokenizer_model_max_length": 1 << 20,
        "version": "x",
        "max_total_num_tokens": 1_000_000,
        "deployment_info": "{}",
        "launch_server_info": "{}",
        "load_snapshot_dp_size": 0,
        "load_snapshot_dp_rank": 0,
        "num_accelerators": 0,
    }


def _cpu(names: tuple[str, ...]) -> float:
    """CPU µs of this process's threads whose names begin with one of `names`, so far."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        try:
            if Path(f"/proc/self/task/{task}/comm").read_text().startswith(names):
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])
        except FileNotFoundError:  # a thread that has ended between the two looks
            continue
    return total / 1e3


def _read_everything(port: int, bodies: list[dict[str, Any]]) -> None:
    """The client process: one connection for each body, all bytes read and thrown away until the server closes each."""
    selector = selectors.DefaultSelector()
    for body in bodies:
        data = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select(timeout=60):
            connection = key.fileobj  # type: ignore[assignment]
            try:
                if connection.recv(1 << 16):
                    continue
            except ConnectionError:
                pass
            selector.unregister(connection)
            connection.close()


if __name__ == "__main__":
    _read_everything(int(sys.argv[1]), json.load(sys.stdin))
