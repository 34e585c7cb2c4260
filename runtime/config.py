"""`RuntimeConfig`: everything a manager is told at construction, in one immutable value.

Owns: the names and defaults of the settings. Every number that is a limit takes its default from `codec/limits.py`; nothing
here repeats one. A config that contradicts itself is refused by `checked()` before any thread exists.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from ..codec.admission import AdmissionRules
from ..codec.checks import DEFAULT_LIMITS, RequestLimits
from ..codec.errors import ValidationError, show
from ..codec.limits import default
from ..codec.schema import WireSchema, load_schema

if TYPE_CHECKING:
    from .server_args import ServerArgs


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one `TokenizerManager`.

    Lengths are in tokens, sizes in bytes, times in seconds. `vocab_size` is the size of the model's embedding table (ids lie
    in ``[0, vocab_size)``); where it is None the tokenizer's highest id + 1 is used. `wire` is "v1", "v2", a path to a schema
    file, or a loaded `WireSchema`. `fused` puts the egress dispatcher and all detokenizer shards on one thread: under the GIL
    a hop between threads costs more than it gives, so that is the default. `cores` pins the threads (Linux only).
    `fast_tokenizer` uses the back end of the extra `fast` where its ids are proven equal. `encoder` (see `Encoder`) makes the ids of
    prompts with media; without one media is refused.
    With two or more `tokenizer_workers` long texts go to the first one only, so that nobody else waits for them.
    `incremental_streaming_output` False makes handles give the cumulative view. `log_level` sets the level of the logger
    "headrace"; None leaves logging alone. The limits are those of `docs/limits.md`; the sizes of one request's own fields are in
    `request_limits`.
    """

    tokenizer: Any = None
    encoder: Any = None
    fast_tokenizer: bool = False
    skip_tokenizer_init: bool = False
    context_len: int = 8192
    vocab_size: int | None = None
    num_reserved_tokens: int = 0
    allow_auto_truncate: bool = False
    enable_return_hidden_states: bool = False
    wire: str | WireSchema = "v1"
    incremental_streaming_output: bool = True
    log_level: str | None = None
    served_model_name: str | None = None
    revision: str | None = None

    tokenizer_workers: int = 2
    detokenizer_shards: int = 1
    fused: bool = True
    shard_seed: int = 0
    cores: tuple[int, ...] | None = None
    trace: bool = False

    ingress_ring_capacity: int = default("ingress_ring_capacity")
    egress_ring_capacity: int = default("egress_ring_capacity")
    egress_ring_bytes: int = default("egress_ring_bytes")
    channel_capacity: int = default("channel_capacity")
    sink_capacity: int = default("sink_capacity")
    admitted_bytes: int = default("admitted_bytes")
    max_live_requests: int = default("max_live_requests")
    max_batch_items: int = default("max_batch_items")
    max_broadcast_bytes: int = default("max_broadcast_bytes")
    max_prompt_bytes: int = default("max_prompt_bytes")
    request_limits: RequestLimits = DEFAULT_LIMITS
    trace_capacity: int = default("trace_capacity")
    drain_timeout_s: float = default("drain_timeout_s")
    join_timeout_s: float = default("join_timeout_s")
    control_timeout_s: float = default("control_timeout_s")

    def checked(self) -> RuntimeConfig:
        """This config, or ValidationError naming the first setting that is wrong."""
        positive = (
            "context_len",
            "tokenizer_workers",
            "detokenizer_shards",
            "ingress_ring_capacity",
            "egress_ring_capacity",
            "egress_ring_bytes",
            "channel_capacity",
            "sink_capacity",
            "admitted_bytes",
            "max_live_requests",
            "max_batch_items",
            "max_broadcast_bytes",
            "max_prompt_bytes",
            "trace_capacity",
        )
        for name in positive:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValidationError(f"{name} must be an integer of at least 1, not {show(value)}", field=name)
        if type(self.num_reserved_tokens) is not int or self.num_reserved_tokens < 0:
            raise ValidationError(
                f"num_reserved_tokens must be an integer of at least 0, not {show(self.num_reserved_tokens)}",
                field="num_reserved_tokens",
            )
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise ValidationError(
                f"vocab_size must be an integer of at least 1, not {show(self.vocab_size)}", field="vocab_size"
            )
        for name in (
            "skip_tokenizer_init",
            "allow_auto_truncate",
            "enable_return_hidden_states",
            "incremental_streaming_output",
            "fused",
            "trace",
        ):
            value = getattr(self, name)
            if type(value) is not bool:  # "no" and "false" would switch it on
                raise ValidationError(f"{name} must be True or False, not {show(value)}", field=name)
        if type(self.shard_seed) is not int:
            raise ValidationError(f"shard_seed must be an integer, not {show(self.shard_seed)}", field="shard_seed")
        if self.cores is not None and not (
            isinstance(self.cores, (tuple, list)) and all(type(core) is int for core in self.cores)
        ):
            raise ValidationError(f"cores must be a list of integers, not {show(self.cores)}", field="cores")
        if not isinstance(self.wire, (str, os.PathLike, WireSchema)):
            raise ValidationError(f"wire must be a name, a path or a WireSchema, not {show(self.wire)}", field="wire")
        if self.join_timeout_s == 0:
            raise ValidationError(
                "join_timeout_s must be more than 0: no thread ends in no time", field="join_timeout_s"
            )
        for name in ("drain_timeout_s", "join_timeout_s", "control_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValidationError(f"{name} must be a finite number of at least 0, not {show(value)}", field=name)
        levels = logging.getLevelNamesMapping()
        if self.log_level is not None and str(self.log_level).upper() not in levels:
            raise ValidationError(
                f"log_level must be one of {', '.join(name.lower() for name in levels)}, not {show(self.log_level)}",
                field="log_level",
            )
        if self.tokenizer is None and not self.skip_tokenizer_init:
            raise ValidationError(
                "no tokenizer is given: pass tokenizer=PATH, or skip_tokenizer_init=True to work on token ids only",
                field="tokenizer",
            )
        if self.skip_tokenizer_init and self.vocab_size is None:
            raise ValidationError("vocab_size is required with skip_tokenizer_init=True", field="vocab_size")
        return self

    def schema(self) -> WireSchema:
        """The wire schema named by `wire`."""
        return self.wire if isinstance(self.wire, WireSchema) else load_schema(self.wire)

    def rules(self, vocab_size: int, *, max_token_bytes: int | None = None) -> AdmissionRules:
        """The admission rules of this config.

        `max_token_bytes` is the sound bound on the text that one token can stand for, where the tokenizer has one: text longer
        than that many bytes for every token of the context cannot fit and is refused before it is tokenised. With
        `allow_auto_truncate` a long prompt is cut instead, so the bound does not apply.
        """
        longest = self.max_prompt_bytes
        if max_token_bytes is not None and not self.allow_auto_truncate:
            longest = min(longest, max_token_bytes * self.context_len)
        return AdmissionRules(
            context_len=self.context_len,
            vocab_size=vocab_size,
            num_reserved_tokens=self.num_reserved_tokens,
            skip_tokenizer_init=self.skip_tokenizer_init,
            allow_auto_truncate=self.allow_auto_truncate,
            enable_return_hidden_states=self.enable_return_hidden_states,
            max_prompt_bytes=longest,
            has_encoder=self.encoder is not None,
            limits=self.request_limits,
        )

    @classmethod
    def from_server_args(cls, args: ServerArgs, **overrides: Any) -> RuntimeConfig:
        """The config that a server's arguments ask for; `overrides` are RuntimeConfig fields and win."""
        from .server_args import config_fields

        return cls(**{**config_fields(args), **overrides})
