"""A text prompt whose tokens the model has no row for reached the scheduler: only a client's own ids were judged (B04)."""

import pytest
from headrace import RuntimeConfig, TokenizerManager, specs
from headrace.codec import ValidationError, decode_ingress
from headrace.runtime import EchoScheduler

PATH = specs.path("data", "tokenizer.json")
TEXT = "hello world"


def _highest():
    with TokenizerManager(RuntimeConfig(tokenizer=PATH, context_len=64)) as manager:
        handle = manager.generate(TEXT, {"max_new_tokens": 1})  # dropped, it would be aborted
        assert manager.scheduler.wait_request(10)
        [message] = decode_ingress(manager.scheduler.recv_requests(), manager.scheduler.schema)
        manager.scheduler.close()
        assert message.rid == handle.rid
        return int(message.input_ids.max())


@pytest.mark.parametrize("fused", [True, False])
def test_a_text_prompt_is_held_to_the_models_ids_like_ids_are(fused):
    highest = _highest()
    for vocab_size, fits in [(highest + 1, True), (highest, False), (1, False)]:
        config = RuntimeConfig(tokenizer=PATH, context_len=64, vocab_size=vocab_size, fused=fused)
        with TokenizerManager(config) as manager, EchoScheduler(manager.scheduler):
            handle = manager.generate(TEXT, {"max_new_tokens": 1})
            if fits:
                handle.result(timeout=10)
                continue
            with pytest.raises(ValidationError, match=f"{highest}.*0, {vocab_size}") as refusal:
                handle.result(timeout=10)
            assert refusal.value.field == "text"
            assert manager.stats().live == {}
            assert manager.stats().ingress_ring.fill == 0
