"""The benchmark's workloads do what they say, at a size that measures nothing: every token and every request arrives."""

from __future__ import annotations

import pytest
from headrace import specs
from headrace.runtime.bench.egress import headrace, workload
from headrace.runtime.bench.textin import front, into_columns
from headrace.runtime.text.tokenize import TokenizersBackend
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(specs.path("data", "tokenizer.json")))
TEXT = specs.path("data", "text.txt").read_text("utf-8")[:20_000]


@pytest.mark.parametrize(
    "options", [{}, {"stream": False, "per_step": 5}, {"stops": ("ever",)}, {"top_logprobs": 2}, {"step_sink": True}]
)
@pytest.mark.parametrize("wire", ["v1", "v2"])
def test_every_token_of_a_workload_arrives(wire, options):
    assert headrace(TOKENIZER, workload(TOKENIZER, TEXT, "small", 20, 20, **options), wire=wire) > 0


@pytest.mark.parametrize("batch", [False, True])
def test_every_prompt_reaches_the_scheduler(batch):
    manager = front(TOKENIZER, TokenizersBackend(TOKENIZER))
    prompts = [f"prompt number {at}" for at in range(40)]
    for _ in range(2):
        assert into_columns(manager, prompts, batch=batch) > 0
