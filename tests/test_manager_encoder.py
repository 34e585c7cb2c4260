"""Prompts with media reach ENCODING through the encoder of the config, and are refused where there is none."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from headrace.codec import ClientClosedError, TokenizeError, ValidationError
from headrace.fsm import RequestState
from manager_helpers import BOUND, STOP, every_config, rig, until


class FakeEncoder:
    """Every image is three tokens before the prompt's own; what it is told to do instead is in the image."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, Any]] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def encode(self, text: str | None, ids: Any, media: Any) -> Any:
        self.seen.append((text, None if ids is None else ids.tolist(), dict(media)))
        match media["image_data"]:
            case "raise":
                raise OSError("no such picture")
            case "bad":
                return [1, -1]
            case "empty":
                return []
            case "wait":
                self.entered.set()
                assert self.go_on.wait(BOUND)
        own = list(text.encode()) if text is not None else ids.tolist()
        return np.array([7, 7, 7, *own])


@every_config
def test_media_goes_through_the_encoder_and_its_ids_reach_the_scheduler(config):
    encoder = FakeEncoder()
    with rig(encoder=encoder, **config) as r:
        handles = [
            r.tm.generate("hi", media={"image_data": "a"}, rid="t"),
            r.tm.generate([5, 6], media={"image_data": "b"}, rid="i"),
            *r.tm.submit({"text": "ho", "image_data": "c", "rid": "s"}),
            *r.tm.submit({"text": ["x", "y"], "image_data": ["d", None], "rid": "b"}),
        ]
        got = {message.rid.split("#")[0]: message for message in r.receive(5)}
        assert got["t"].input_ids.tolist() == [7, 7, 7, *b"hi"]
        assert got["i"].input_ids.tolist() == [7, 7, 7, 5, 6]
        assert got["s"].input_ids.tolist() == [7, 7, 7, *b"ho"]
        assert got["b_0"].input_ids.tolist() == [7, 7, 7, *b"x"]
        assert got["b_1"].input_ids.tolist() == [*b"y"]
        assert ("hi", None, {"image_data": "a"}) in encoder.seen
        for message in got.values():
            r.chunk(message.rid, [65], STOP)
        assert [h.result(BOUND).text for h in handles] == ["A"] * 5
        visited = {event.after for event in r.tm.trace if getattr(event, "machine", "") == "request"}
        assert {"ENCODING", "TOKENIZING"} <= visited


@pytest.mark.parametrize("image", ["raise", "bad", "empty"])
def test_an_encoder_that_fails_ends_that_request_and_no_other(image):
    with rig(encoder=FakeEncoder()) as r:
        bad = r.tm.generate("hi", media={"image_data": image})
        good = r.tm.generate("hi", media={"image_data": "a"})
        with pytest.raises(TokenizeError, match="encoder"):
            bad.result(BOUND)
        r.chunk(r.request(), [65], STOP)
        assert good.result(BOUND).text == "A"
        r.no_more()


def test_a_request_that_is_aborted_while_it_is_being_encoded_never_reaches_the_scheduler():
    encoder = FakeEncoder()
    with rig(encoder=encoder) as r:
        handle = r.tm.generate("hi", media={"image_data": "wait"})
        assert encoder.entered.wait(BOUND)
        assert r.tm.stats().live == {RequestState.ENCODING.name: 1}
        handle.abort()
        with pytest.raises(ClientClosedError):
            handle.result(BOUND)
        encoder.go_on.set()
        until(lambda: r.tm.stats().counters.get("late_tokenised") == 1, "the encoder's answer was dropped")
        r.no_more()


def test_without_an_encoder_media_is_refused_at_once_and_never_ignored():
    with rig() as r:
        for submit in (
            lambda: r.tm.generate("hi", media={"image_data": "a"}),
            lambda: r.tm.submit({"text": "hi", "image_data": "a"}),
        ):
            with pytest.raises(ValidationError, match="image_data: this server has no encoder"):
                submit()
        r.no_more()


def test_media_of_the_wrong_shape_is_a_400_that_names_it():
    with rig(encoder=FakeEncoder()) as r:
        for body, words in (
            ({"text": ["a", "b"], "image_data": "x"}, "image_data must be a list"),
            ({"text": ["a", "b"], "image_data": ["x"]}, "image_data must be a list"),
        ):
            with pytest.raises(ValidationError, match=words):
                r.tm.submit(body)
        for media, words in (({"smell": 1}, "smell"), ({"image_data": object()}, "encoded"), ([1], "object")):
            with pytest.raises(ValidationError, match=words):
                r.tm.generate("hi", media=media)
        r.no_more()
