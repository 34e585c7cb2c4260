"""headrace: the tokenizer manager of an LLM server, with every state machine declared and every byte specified.

The face is lazy (PEP 562): importing `headrace` loads neither numpy nor tokenizers, so tools that only look at the
package (a pytest plugin, a version check) stay cheap.
"""

from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .codec import HeadraceError, SamplingParams
    from .runtime import RuntimeConfig, TokenizerManager

__all__ = ["HeadraceError", "RuntimeConfig", "SamplingParams", "TokenizerManager", "__version__"]

_HOME = {
    "HeadraceError": "codec",
    "SamplingParams": "codec",
    "RuntimeConfig": "runtime",
    "TokenizerManager": "runtime",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
