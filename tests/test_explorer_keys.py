"""What the explorer hashes: a stage's key changes with every attribute that steers its future, and every attribute is accounted for.

An attribute that is neither in the key nor in the list of those that need not be, with the reason, fails here: a state that the key
leaves out is a branch that the search never takes.
"""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from headrace.codec import (
    AdmissionRules,
    ChunkEvent,
    GenerateRequest,
    Rid,
    admit,
    decode_frame,
    encode_batch,
    load_schema,
)
from headrace.codec.errors import InternalError, QueueFullError
from headrace.fsm import AbortSource, AbortState, RequestState
from headrace.runtime import EgressItem
from headrace.runtime.channel import Bell, Inbox
from headrace.runtime.sink import Hub, Sink
from headrace.runtime.stages import dispatch, life, shard, tokenize
from headrace.runtime.stages.ingress import Ingress
from headrace.runtime.stages.life import Group, Kind, Life
from headrace.runtime.text.engine import TextEngine, TextOptions

SCHEMA = load_schema("v1")
RULES = AdmissionRules(context_len=16, vocab_size=100, skip_tokenizer_init=True)


def a_life(name: str = "r", **fields: Any) -> Life:
    rid = Rid.from_wire(f"{name}#0000000000000001")
    request = admit(GenerateRequest(rid=rid, input_ids=[1, 2], stream=True), RULES, SCHEMA)
    made = Life(
        str(rid), Kind.GENERATE, Sink(Hub(), 4), shown_rid=name, request=request, ids=request.input_ids, nbytes=9
    )
    for field, value in fields.items():
        setattr(made, field, value)
    return made


LIFE_CHANGES: dict[str, Any] = {
    "rid": "other",
    "shown_rid": "other",
    "kind": Kind.CONTROL,
    "shard": 1,
    "stream": False,
    "nbytes": 1,
    "state": RequestState.QUEUED,
    "abort": AbortState.PUSHED,
    "abort_source": AbortSource.API,
    "taken": True,
    "withdrawn": True,
    "ids": np.array([7], dtype=np.int64),
    "highest": 7,
    "group": Group([]),
}
LIFE_EXCUSED = {
    "request": "never changes, and the rid names it",
    "message": "never changes, and the rid names it",
    "sink": "has its own place in a world's key; no stage reads it",
    "token": "what the step sink calls the request by; never changes",
}


@pytest.mark.parametrize("name", LIFE_CHANGES)
def test_the_key_of_a_life_changes_with(name: str) -> None:
    assert a_life().key() != a_life(**{name: LIFE_CHANGES[name]}).key()


def test_every_attribute_of_a_life_is_accounted_for() -> None:
    assert set(Life.__slots__) == set(LIFE_CHANGES) | set(LIFE_EXCUSED)


def test_the_key_of_a_life_changes_with_what_its_group_waits_for() -> None:
    one, two = a_life(), a_life()
    Group([one])
    Group([two]).waiting = 1
    assert one.key() != two.key()


# -- ingress ------------------------------------------------------------------------------------------------------------------


def test_the_key_of_ingress_is_its_entries_and_what_it_owes() -> None:
    def ingress() -> Ingress:
        return Ingress(SCHEMA, RULES)

    empty, owning, owing = ingress(), ingress(), ingress()
    owning.entries["r"] = a_life()
    owing.owed["r"] = a_life()
    assert len({empty.key(), owning.key(), owing.key()}) == 3
    configured = {"_record", "_rules", "_schema", "_seed", "_shards"}
    assert set(Ingress.__slots__) == {"entries", "owed"} | configured


# -- the shard -----------------------------------------------------------------------------------------------------------------


def a_shard(change: Callable[[Any, int], None] | None = None) -> shard.Shard:
    made = shard.Shard(TextEngine(None), capacity=2, output_limit=16)
    mine = a_life(state=RequestState.QUEUED, abort=AbortState.PUSHED)
    made.step(life.Register(mine))
    if change is not None:
        change(made, made._rows[mine.rid])
    return made


def set_at(name: str, value: Any) -> Callable[[Any, int], None]:
    def change(made: Any, row: int) -> None:
        getattr(made, name)[row] = value

    return change


SHARD_CHANGES: dict[str, Callable[[Any, int], None]] = {
    "_rows": lambda made, row: made._rows.update({"other": row}),
    "_states": set_at("_states", RequestState.STREAMING),
    "_lanes": set_at("_lanes", 1),
    "_produced": set_at("_produced", 3),
    "_lives": set_at("_lives", a_life(abort=AbortState.REQUESTED)),
    "_texts": set_at("_texts", None),
    "_options": set_at("_options", TextOptions(stops=("x",))),
    "_ids": set_at("_ids", array("q", [1])),
    "_extras": set_at("_extras", [{"out_lp_val": np.array([1.0])}]),
}
SHARD_EXCUSED = {
    "_engine": "configured",
    "_capacity": "configured",
    "_output_limit": "configured",
    "_index": "configured",
    "_stage": "configured",
    "_record": "configured",
    "_free": "which row a request has steers nothing",
    "_state_column": "the memory of _states",
    "_waiting": "the sink's own list",
    "_planned_rows": "says what the plan says",
    "_known": "made of what it stands beside",
    "_changes": "tells whether the cache is still good",
    "_plan": "a cache; a world that drops it behaves the same (the simulation runs with and without)",
}


@pytest.mark.parametrize("name", SHARD_CHANGES)
def test_the_key_of_a_shard_changes_with(name: str) -> None:
    assert a_shard().key() == a_shard().key()
    assert a_shard().key() != a_shard(SHARD_CHANGES[name]).key()


def test_every_attribute_of_a_shard_is_accounted_for() -> None:
    assert set(vars(a_shard())) == set(SHARD_CHANGES) | set(SHARD_EXCUSED)


def test_the_dispatcher_and_the_worker_have_no_state() -> None:
    assert dispatch.Dispatcher(SCHEMA).key() == ()
    stateless = {"_seed", "_shards", "activity", "counts", "faults"}  # configured, or counted for people and logs
    assert set(dispatch.Dispatcher.__slots__) - stateless <= {"_decoder", "_schema", "_seen"}  # caches of the decoding
    assert tokenize.TokenizerWorker.__slots__ == ("_backend", "_encoder", "_vocab_size")  # configured


# -- messages ------------------------------------------------------------------------------------------------------------------


def frame(**fields: Any) -> Any:
    event = {"rid": "r", "token_ids": [1], "prompt_tokens": 2, **fields}
    return decode_frame(encode_batch([ChunkEvent(**event)], SCHEMA), SCHEMA)


MESSAGES: dict[type, tuple[tuple[Any, ...], dict[str, Any]]] = {
    life.Job: (
        ("r", "text", True),
        {
            "rid": "q",
            "text": "u",
            "add_special_tokens": False,
            "ids": np.array([1]),
            "media": {"image_data": ["x"]},
        },
    ),
    life.Tokenised: (
        ("r", np.array([1]), None, 1),
        {"rid": "q", "ids": np.array([2]), "error": InternalError("x"), "highest": 2},
    ),
    life.WantAbort: (("r", AbortSource.API), {"rid": "q", "source": AbortSource.GUARD}),
    life.Ended: ((a_life(),), {"life": a_life("q")}),
    life.Register: ((a_life(),), {"life": a_life("q")}),
    life.Forward: (("r", AbortSource.API), {"rid": "q", "source": AbortSource.GUARD}),
    life.StepTerminal: (
        (1, EgressItem.Error(InternalError("x"))),
        {"token": 2, "item": EgressItem.Error(QueueFullError("y"))},
    ),
    dispatch.Result: (("r", b"a"), {"rid": "q", "payload": b"b"}),
    dispatch.Failure: (("r", "a"), {"rid": "q", "message": "b"}),
    dispatch.Batch: (
        (frame(), None),
        {"frame": frame(token_ids=[2]), "rows": [0], "run": np.array([[1], [2]])},
    ),
}


def made_of(kind: type, values: tuple[Any, ...]) -> Any:
    return kind(*values)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_key_of_a_message_changes_with_each_of_its_fields(kind: type) -> None:
    values, changes = MESSAGES[kind]
    assert made_of(kind, values).key() == made_of(kind, values).key()
    assert set(kind.__slots__) == set(changes)  # type: ignore[attr-defined]
    for name, value in changes.items():
        other = made_of(kind, values)
        setattr(other, name, value)
        assert other.key() != made_of(kind, values).key(), name


def test_the_key_of_a_failure_message_changes_with_each_of_its_fields() -> None:
    def key(rids: list[str] | None = None, text: str = "x", owed: bool = True) -> Any:
        return life.Fail(rids, InternalError(text), owed=owed).key()

    assert len({key(), key(["r"]), key(["q"]), key(text="y"), key(owed=False)}) == 5


def test_the_key_of_a_batch_changes_with_every_part_of_its_frame() -> None:
    changed = [
        {"rid": "q"},
        {"token_ids": [1, 1]},
        {"finish_reason": {"type": "stop", "matched": 1}},
        {"prompt_tokens": 3},
        {"extras": {"out_lp_val": [0.5], "out_lp_idx": [1]}},
    ]
    keys = {dispatch.Batch(frame(**fields), None).key() for fields in ({}, *changed)}
    assert len(keys) == len(changed) + 1


def test_keys_of_equal_errors_are_equal_although_the_errors_are_two_objects() -> None:
    one, two = (life.StepTerminal(1, EgressItem.Error(InternalError("x"))).key() for _ in range(2))
    assert one == two


def test_a_life_that_was_taken_has_another_key_than_one_that_waits() -> None:
    inbox = Inbox(4, Bell())
    mine = a_life()
    inbox.put(Group([mine]))
    before = mine.key()
    inbox.take()
    assert mine.key() != before
