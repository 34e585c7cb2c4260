"""A config of wrong types was found late: `cores="01"` ended every stage, `allow_auto_truncate="no"` switched truncation on."""

import pytest
from headrace import RuntimeConfig, TokenizerManager, specs
from headrace.codec import ValidationError

PATH = specs.path("data", "tokenizer.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores", "01"),
        ("cores", ("0",)),
        ("cores", (True,)),
        ("cores", 0),
        ("shard_seed", "x"),
        ("shard_seed", 1.5),
        ("fused", 5),
        ("fused", None),
        ("trace", "x"),
        ("allow_auto_truncate", "no"),
        ("enable_return_hidden_states", "false"),
        ("incremental_streaming_output", 0),
        ("skip_tokenizer_init", "yes"),
        ("wire", 5),
        ("wire", None),
        ("tokenizer", 5),
        ("tokenizer", b"\xff"),
        ("tokenizer", ["tokenizer.json"]),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_at_construction_by_its_name(field, value):
    with pytest.raises(ValidationError) as refusal:
        TokenizerManager(RuntimeConfig(**{"tokenizer": PATH, "context_len": 64, "vocab_size": 300, field: value}))
    assert refusal.value.field == field
    assert field in refusal.value.message
