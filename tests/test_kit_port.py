"""The drop-in side: one scheduler loop, written for SGLang's `Server`, on that server and on ours."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from headrace import RuntimeConfig, TokenizerManager
from headrace.codec.errors import ValidationError
from headrace.runtime.conformance_target import threads
from headrace.runtime.server_args import ServerArgs
from headrace.runtime.sglang_port import IngressRequest, Server
from headrace.specs.conformance.cases import tokenizer_folder
from headrace.specs.conformance.sglang_target import SGLangTarget
from kit_sglang import need_server

CONFIG = {"tokenizer": str(tokenizer_folder("byte-level")), "context_len": 512, "vocab_size": 260}

BODIES: list[dict[str, Any]] = [
    {"text": "hello", "stream": True},
    {"text": "hello", "stream": False},
    {"text": "日本語 👋🏽 text", "stream": True},
    {"input_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_new_tokens": 2}},
    {"input_ids": [65, 66, 67, 68], "stream": False, "sampling_params": {"stop": "C"}},
    {"input_ids": [65, 66, 67, 68], "stream": True, "sampling_params": {"stop_token_ids": [67]}},
    {"text": "a <T> b", "stream": True, "sampling_params": {"skip_special_tokens": False}},
    {"text": "a <T> b", "stream": False},
    {"input_ids": [70, 71], "stream": False, "return_logprob": True},
    {"input_ids": [255, 65, 240, 159], "stream": False},
    {"text": "busy", "stream": False},
]


def loop(server: Any, stop: threading.Event) -> None:
    """Echoes prompts, two ids a step; written against the methods that both servers have."""
    running: dict[str, dict[str, Any]] = {}
    while not stop.is_set():
        if not running:
            server.wait_request(50)
        for request in server.recv_requests():
            header = msgspec.msgpack.decode(request.header)
            if header[0] == "AbortReq":
                running.pop(header[1], None)
            elif header[0] == "TokenizedGenerateReqInput":
                ids = dict(request.buffers)["input_ids"].tolist()
                most = header[8][0]
                running[header[1]] = {
                    "prompt": len(ids),
                    "ids": ids if most is None else ids[:most],
                    "stop": header[8][2] or [],
                    "stops": header[8][27],
                    "logprob": header[9],
                    "busy": header[3] == "busy",
                }
        if running:
            step(server, running)


def step(server: Any, running: dict[str, dict[str, Any]]) -> None:
    rids, reasons, prompts, lens, flat, lps = list(running), [], [], [], [], []
    for rid in rids:
        one = running[rid]
        ids, one["ids"] = one["ids"][:2], one["ids"][2:]
        reason: Any = None if one["ids"] else {"type": "length", "length": 0}
        for at, token in enumerate(ids):
            if token in one["stop"]:
                ids, reason = ids[: at + 1], {"type": "stop", "matched": token}
            elif one["stops"] and chr(token) in one["stops"]:
                ids, reason = ids[: at + 1], {"type": "stop", "matched": chr(token)}
        if one["busy"]:
            ids, reason = [], {"type": "abort", "message": "busy", "status_code": 503, "err_type": None}
        reasons.append(reason)
        prompts.append(one["prompt"])
        lens.append(len(ids))
        flat += ids
        lps.append(len(ids) if one["logprob"] else 0)
        if reason is not None:
            del running[rid]
    zeros = [0] * len(rids)
    header = msgspec.msgpack.encode([rids, reasons, prompts, lens, zeros, zeros, lps])
    count = sum(lps)
    values = np.arange(1, count + 1, dtype="<f4") / -8
    cols = [np.array(flat, dtype="<i8").tobytes(), values.tobytes(), np.arange(count, dtype="<i4").tobytes()]
    assert server.push_decode_result_batch(header, cols)


def outcome(target: Any, key: str) -> dict[str, Any]:
    """What a client got, as far as both must agree: chunks are joined."""
    text, ids, extras, prompt, end = "", [], {}, 0, None
    while end is None:
        told = target.read(key, 10.0)
        assert told["chunks"] or told["end"], f"{key} waits for ever"
        for chunk in told["chunks"]:
            text += chunk["text"]
            ids += chunk["token_ids"]
            prompt = chunk["prompt_tokens"] or prompt
            for name, values in chunk["extras"].items():
                extras.setdefault(name, []).extend(values)
        end = told["end"]
    if "error" in end:
        return {"error": end["error"]["status"]}
    return {"text": text, "ids": ids, "extras": extras, "prompt": prompt, "end": end}


def served(target: Any, server: Any) -> list[dict[str, Any]]:
    stop = threading.Event()
    scheduler = threading.Thread(target=loop, args=(server, stop))
    scheduler.start()
    try:
        for at, body in enumerate(BODIES):
            target.submit(str(at), json.dumps(body))
        return [outcome(target, str(at)) for at in range(len(BODIES))]
    finally:
        stop.set()
        scheduler.join()


def ours() -> list[dict[str, Any]]:
    target = threads()
    target.start("v2", CONFIG)
    try:
        return served(target, Server(target._tm))
    finally:
        target.stop()


def test_a_scheduler_loop_written_for_sglangs_server_serves_headraces_clients() -> None:
    got = ours()
    assert got[0]["text"] == got[1]["text"] == "hello"
    assert got[2]["text"] == "日本語 👋🏽 text"
    assert got[3]["ids"] == [1, 2]
    assert got[4] == {
        "text": "AB",
        "ids": [65, 66, 67],
        "extras": {},
        "prompt": 4,
        "end": {"finish_reason": {"type": "stop", "matched": "C"}},
    }
    assert (got[5]["text"], got[5]["ids"]) == ("AB", [65, 66, 67])
    assert (got[6]["text"], got[7]["text"]) == ("a <T> b", "a  b")
    assert len(got[8]["extras"]["out_lp_val"]) == 2
    assert got[9]["text"] == "\ufffdA\ufffd"
    assert got[10] == {"error": 503}


def test_the_same_loop_gives_clients_the_same_on_sglangs_server_and_on_headrace() -> None:
    need_server()
    target = SGLangTarget()
    target.start("v2", CONFIG)
    try:
        theirs = served(target, target._server)
    finally:
        target.stop()
    mine = ours()
    for at, body in enumerate(
        BODIES
    ):  # logprob values depend on who stands in a step, so only their places are compared
        for one in (theirs[at], mine[at]):
            if one.get("extras"):
                one["extras"] = {name: len(values) for name, values in one["extras"].items()}
        assert theirs[at] == mine[at], body


def test_buffers_hold_each_requests_own_ids_and_control_requests_have_none() -> None:
    server = Server(RuntimeConfig(tokenizer=CONFIG["tokenizer"], vocab_size=260, context_len=512, wire="v2"))
    try:
        one = server.manager.generate([1, 2, 3], token_ids_logprob=[9, 8], return_logprob=True)
        two = server.manager.generate([4])
        got: list[IngressRequest] = []
        while len(got) < 2:
            server.wait_request(1000)
            got += server.recv_requests(1)
        assert [[(name, cell.tolist()) for name, cell in request.buffers] for request in got] == [
            [("input_ids", [1, 2, 3]), ("token_ids_logprob", [9, 8])],
            [("input_ids", [4])],
        ]
        rid = msgspec.msgpack.decode(got[0].header)[1]
        assert server.push_error(rid, "no")
        with pytest.raises(Exception, match="no"):
            one.result(timeout=10)
        two.abort()
        asked = threading.Thread(
            target=lambda: answers.append(server.manager.control("FlushCacheReqInput", timeout=10))
        )
        answers: list[bytes] = []
        asked.start()
        control: list[IngressRequest] = []
        while not control:
            server.wait_request(1000)
            control = [one for one in server.recv_requests() if msgspec.msgpack.decode(one.header)[0] != "AbortReq"]
        assert control[0].buffers == []
        assert server.push_control_result(msgspec.msgpack.decode(control[0].header)[1], "{}")
        asked.join()
        assert answers == [b"{}"]
    finally:
        server.shutdown()
    assert server.closed
    while server.recv_requests():  # what was on its way before the end can still be received
        pass
    assert not server.wait_request(1000)
    assert not server.push_decode_result_batch(b"\x90", [])


def test_a_health_ack_counts_as_activity() -> None:
    server = Server(RuntimeConfig(tokenizer=CONFIG["tokenizer"], vocab_size=260, wire="v2"))
    try:
        alive: list[bool] = []
        probe = threading.Thread(target=lambda: alive.append(server.manager.health(20)))
        probe.start()
        assert server.wait_request(10_000)
        server.recv_requests()
        assert server.push_health_ack()
        probe.join()
        assert alive == [True]
    finally:
        server.shutdown()


def test_the_port_speaks_wire_v2_only_and_takes_server_args() -> None:
    with (
        TokenizerManager(RuntimeConfig(tokenizer=CONFIG["tokenizer"], vocab_size=260)) as manager,
        pytest.raises(ValidationError, match="v2"),
    ):
        Server(manager)
    fields = {
        "served_model_name": "m",
        "tokenizer_path": CONFIG["tokenizer"],
        "model_config": {"context_len": 64, "vocab_size": 260},
        "disaggregation_mode": "null",
    }
    server = Server(ServerArgs.from_json(json.dumps(fields)))
    assert server.manager.scheduler.schema.name == "v2"
    server.shutdown()
