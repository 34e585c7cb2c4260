"""ServerArgs: what is read, what is refused with which field, and what of it reaches RuntimeConfig."""

import json

import msgspec
import pytest
from headrace.codec.errors import ValidationError
from headrace.runtime.server_args import ServerArgs, config_fields

FULL = {
    "served_model_name": "m",
    "disaggregation_mode": "null",
    "model_config": {"context_len": 4096, "vocab_size": 32000, "hidden_size": 64},
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.88,
}


def without(*path: str) -> dict:
    copy = json.loads(json.dumps(FULL))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def test_unknown_keys_are_ignored_at_both_levels():
    args = ServerArgs.from_json(json.dumps(FULL))
    assert args.served_model_name == "m"
    assert args.model_config.context_len == 4096


@pytest.mark.parametrize("kind", [bytes, str, dict])
def test_text_bytes_and_a_decoded_object_are_read_alike(kind):
    text = json.dumps(FULL)
    blob = {bytes: text.encode(), str: text, dict: FULL}[kind]
    assert ServerArgs.from_json(blob) == ServerArgs.from_json(text)


WRONG = [
    ("served_model_name", 3),
    ("tokenizer_path", ["x"]),
    ("model_path", False),
    ("revision", 1),
    ("skip_tokenizer_init", "yes"),
    ("skip_tokenizer_init", 1),
    ("skip_tokenizer_init", None),
    ("tokenizer_worker_num", "2"),
    ("tokenizer_worker_num", True),
    ("detokenizer_worker_num", 1.5),
    ("allow_auto_truncate", 0),
    ("num_reserved_tokens", {}),
    ("num_reserved_tokens", 2**64),
    ("enable_return_hidden_states", []),
    ("incremental_streaming_output", "no"),
    ("log_level", 10),
    ("disaggregation_mode", 0),
    ("model_config", "llama"),
    ("model_config.context_len", "4096"),
    ("model_config.context_len", 4096.5),
    ("model_config.vocab_size", True),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_type_is_an_error_that_names_the_field(field, value):
    blob = json.loads(json.dumps(FULL))
    inner = blob
    *parents, last = field.split(".")
    for key in parents:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(ValidationError) as caught:
        config_fields(ServerArgs.from_json(json.dumps(blob)))
    assert caught.value.field == field
    assert field in caught.value.message
    assert "\n" not in caught.value.message


def test_every_field_is_tried_with_a_wrong_type():
    tried = {field.split(".")[0] for field, _ in WRONG}
    assert tried == set(ServerArgs.__struct_fields__)


@pytest.mark.parametrize(
    "blob", ["", "{", "[]", "3", "null", '{"a": NaN}', b"\xff", "\ud800", '{"log_level": "\udc00"}', "[" * 100_000]
)
def test_what_is_not_a_json_object_is_one_clear_error(blob):
    with pytest.raises(ValidationError) as caught:
        ServerArgs.from_json(blob)
    assert "server arguments" in caught.value.message
    caught.value.message.encode()


MANDATORY = [
    ("served_model_name",),
    ("disaggregation_mode",),
    ("model_config", "context_len"),
    ("model_config", "vocab_size"),
]


@pytest.mark.parametrize("path", MANDATORY)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_each_missing_mandatory_field_has_its_own_message(path, how):
    blob = without(*path)
    if how == "null":
        inner = blob
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = None
    with pytest.raises(ValidationError) as caught:
        ServerArgs.from_json(json.dumps(blob)).validate_mandatory()
    name = ".".join(path)
    assert caught.value.field == name
    assert f"{name} is missing" in caught.value.message
    assert caught.value.message.count("is missing") == 1


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(ValidationError) as caught:
        ServerArgs.from_json("{}").validate_mandatory()
    for path in MANDATORY:
        assert f"{'.'.join(path)} is missing" in caught.value.message


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_the_three_disaggregation_modes_pass(mode):
    ServerArgs.from_json({**FULL, "disaggregation_mode": mode}).validate_mandatory()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"disaggregation_mode": "both"}, "disaggregation_mode"),
        ({"disaggregation_mode": ""}, "disaggregation_mode"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"model_config": {"context_len": 0, "vocab_size": 1}}, "model_config.context_len"),
        ({"model_config": {"context_len": 1, "vocab_size": -1}}, "model_config.vocab_size"),
        ({"tokenizer_worker_num": 0}, "tokenizer_worker_num"),
        ({"detokenizer_worker_num": 0}, "detokenizer_worker_num"),
        ({"num_reserved_tokens": -1}, "num_reserved_tokens"),
        ({"num_reserved_tokens": 2**31}, "num_reserved_tokens"),
        ({"model_config": {"context_len": 2**31, "vocab_size": 1}}, "model_config.context_len"),
        ({"log_level": "loud"}, "log_level"),
        ({"skip_tokenizer_init": False}, "tokenizer_path"),
    ],
)
def test_a_senseless_value_is_refused_by_name(change, field):
    with pytest.raises(ValidationError) as caught:
        config_fields(ServerArgs.from_json({**FULL, **change}))
    assert caught.value.field == field
    assert field in caught.value.message


def test_every_argument_reaches_the_config_field_it_is_for(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    args = ServerArgs.from_json(
        {
            "served_model_name": "m",
            "tokenizer_path": str(tmp_path),
            "revision": "r",
            "tokenizer_worker_num": 2,
            "detokenizer_worker_num": 3,
            "allow_auto_truncate": True,
            "num_reserved_tokens": 4,
            "enable_return_hidden_states": True,
            "incremental_streaming_output": False,
            "log_level": "DEBUG",
            "disaggregation_mode": "decode",
            "model_config": {"context_len": 5, "vocab_size": 6},
        }
    )
    assert config_fields(args) == {
        "served_model_name": "m",
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "revision": "r",
        "skip_tokenizer_init": False,
        "context_len": 5,
        "vocab_size": 6,
        "tokenizer_workers": 2,
        "detokenizer_shards": 3,
        "allow_auto_truncate": True,
        "num_reserved_tokens": 4,
        "enable_return_hidden_states": True,
        "incremental_streaming_output": False,
        "log_level": "debug",
    }


def test_the_mapped_names_are_fields_of_the_config():
    from headrace.runtime.config import RuntimeConfig

    fields = config_fields(ServerArgs.from_json(FULL))
    assert set(fields) <= {field.name for field in msgspec.structs.fields(RuntimeConfig)}
    assert RuntimeConfig.from_server_args(ServerArgs.from_json(FULL)).vocab_size == 32000
    assert fields["tokenizer"] is None


def test_the_model_path_stands_in_for_a_missing_tokenizer_path(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    blob = {**FULL, "skip_tokenizer_init": False, "model_path": str(tmp_path)}
    assert config_fields(ServerArgs.from_json(blob))["tokenizer"] == str(tmp_path / "tokenizer.json")
    with pytest.raises(ValidationError) as caught:
        config_fields(ServerArgs.from_json({**blob, "model_path": str(tmp_path / "gone")}))
    assert caught.value.field == "model_path"
