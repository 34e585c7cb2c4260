"""What the tests with SGLang's real server share: the extension, or the reason why it is not here."""

from __future__ import annotations

import functools

import pytest
from headrace.specs.conformance import sglang_target


@functools.cache
def _reason() -> str:
    if sglang_target.wrong_platform():
        return sglang_target.wrong_platform()
    try:
        sglang_target.fetch()
    except OSError as fault:
        return str(fault)
    return ""


def need_server() -> None:
    """Skips, with the reason, where the extension cannot be had (fetched once into the user's cache; HEADRACE_OFFLINE=1 skips)."""
    reason = _reason()
    if reason:
        pytest.skip(f"SGLang's server: {reason}")
