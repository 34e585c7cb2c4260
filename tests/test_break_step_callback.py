"""What a callback raises is not always an Exception; it ended the stage it ran on, and everything live with it."""

import asyncio
import threading

import pytest
from headrace import RuntimeConfig, TokenizerManager, specs
from headrace.runtime import EchoScheduler


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_step_callback_raises_the_stage_lives_on(raised, fused):
    called = threading.Event()

    def callback(batch):
        called.set()
        raise raised

    config = RuntimeConfig(tokenizer=specs.path("data", "tokenizer.json"), context_len=256, fused=fused)
    with TokenizerManager(config) as manager, EchoScheduler(manager.scheduler):
        manager.on_step(callback)
        manager.generate("one two three", sink="step")
        assert called.wait(10)
        assert manager.generate("four five").result(timeout=10).text == "four five"
        assert manager.state.name == "RUNNING"
