"""A tokenizer file that would take the process down: found by running the command line on odd files."""

import json

import pytest
from headrace import RuntimeConfig, TokenizerManager
from headrace.__main__ import main
from headrace.codec import ValidationError
from headrace.runtime.text.vocabulary import MAX_IDS


def _file(tmp_path, highest):
    path = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"a": 0, "b": highest}, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    return path


@pytest.mark.parametrize("highest", [MAX_IDS, 2**31, 2**32 - 6])
def test_one_stray_id_is_refused_before_a_table_of_that_length_is_made(tmp_path, highest):
    with pytest.raises(ValidationError, match=f"an id of {highest}") as refusal:
        TokenizerManager(RuntimeConfig(tokenizer=_file(tmp_path, highest)))
    assert refusal.value.field == "tokenizer"


def test_the_command_line_says_so_in_one_line(tmp_path, capsys):
    assert main(["demo", "--tokenizer", str(_file(tmp_path, 2**32 - 6))]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "an id of 4294967290" in told
