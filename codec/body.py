"""`/generate`-shaped bodies: one request or a batch, as JSON or as an object, turned into `GenerateRequest`s.

Owns: the shape of a body. Rules it keeps:

* A prompt that is a list of prompts makes a batch, also a list of one. Scalars are for every item; lists are per item and
  must have one entry each. The client's rid ``r`` on a batch becomes ``r_0``, ``r_1``, ...; a list of rids must be distinct.
* An unknown key is refused by name: a misspelt one that is ignored gives a wrong answer without an error. Media without an
  encoder is refused, never ignored.
* A scalar copied to every item is an amplifier, so the copies' bytes are bounded, not only the items.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from .admission import MEDIA_KEYS, GenerateRequest
from .clientjson import parse_json
from .errors import ValidationError, show
from .limits import default
from .rid import check_client_rid
from .schema import load_schema, schema_names

_PER_ITEM: Final = (
    "sampling_params", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs",
    "return_hidden_states", "add_special_tokens",
)  # fmt: skip
_KEYS: Final = frozenset({"text", "input_ids", "rid", "token_ids_logprob", "wire_fields", *_PER_ITEM})


@lru_cache(maxsize=1)
def _wire_names() -> frozenset[str]:
    """Header fields that a body may set at its top level: what any shipped schema leaves to the client."""
    return frozenset(f.name for s in schema_names() for f in load_schema(s).ingress_fields if not f.owned)


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body whose shape is right; the values are judged by `admit`. Made by `from_json`.

    `is_batch` tells whether the prompt was a list of prompts (the answer is then a list, also for one item).
    """

    fields: dict[str, Any]
    wire_fields: dict[str, Any]
    media: dict[str, Any]
    items: int
    is_batch: bool

    @classmethod
    def from_json(
        cls,
        body: bytes | bytearray | str | Mapping[str, Any],
        *,
        max_batch_items: int = default("max_batch_items"),
        max_broadcast_bytes: int = default("max_broadcast_bytes"),
        max_rid_bytes: int = default("max_rid_bytes"),
    ) -> GenerateBody:
        """A body from JSON text or an object. ValidationError for anything that has not the shape of a request or batch."""
        source = body if isinstance(body, Mapping) else parse_json(body, "the body")
        if not isinstance(source, Mapping):
            raise ValidationError(f"the body must be an object, not {show(source)}")
        fields: dict[str, Any] = {}
        wire: dict[str, Any] = {}
        media: dict[str, Any] = {}
        for key, value in source.items():
            if key in _KEYS:
                if value is not None:  # null is absent
                    fields[key] = value
            elif key in _wire_names():
                wire[key] = value
            elif key in MEDIA_KEYS:
                if value is not None:  # whether there is an encoder for it is for `admit` to say
                    media[key] = value
            else:
                raise ValidationError(
                    f"{show(key)} is not a known key; known are {', '.join(sorted(_KEYS | _wire_names()))}",
                    field=key if isinstance(key, str) else None,
                )
        more = fields.pop("wire_fields", {})
        if not isinstance(more, Mapping):
            raise ValidationError(f"wire_fields must be an object, not {show(more)}", field="wire_fields")
        for key in more:
            if key in wire:
                raise ValidationError(f"{show(key)} stands both at the top level and in wire_fields", field=str(key))
        wire.update(more)
        prompts, name = _prompts(fields)
        if prompts is None:
            if isinstance(fields.get("rid"), (list, tuple)):
                raise ValidationError(f"rid is a list, but there is one prompt; got {show(fields['rid'])}", field="rid")
            return cls(fields=fields, wire_fields=wire, media=media, items=1, is_batch=False)
        n = len(prompts)
        if not 1 <= n <= max_batch_items:
            raise ValidationError(f"a batch must have 1 to {max_batch_items} items; {name} has {n}", field=name)
        fields["rid"] = batch_rids(fields.get("rid"), n, max_rid_bytes)
        size = sum(_size(value) for key, value in fields.items() if not _is_per_item(key, value)) + _size(wire)
        if size * (n - 1) > max_broadcast_bytes:
            raise ValidationError(
                f"values for every item of the batch have {size} bytes; {n} copies exceed {max_broadcast_bytes} bytes",
                field="sampling_params",
            )
        for key, value in fields.items():
            if _is_per_item(key, value) and len(value) != n:
                raise ValidationError(f"{key} has {len(value)} entries, but {name} has {n} prompts", field=key)
        for key, value in media.items():
            if not isinstance(value, (list, tuple)) or len(value) != n:
                raise ValidationError(f"{key} must be a list with one entry for each of the {n} prompts", field=key)
        return cls(fields=fields, wire_fields=wire, media=media, items=n, is_batch=True)

    def requests(self) -> list[GenerateRequest]:
        """One `GenerateRequest` per item, in order, not yet checked."""
        wire = self.wire_fields or None
        if not self.is_batch:
            return [GenerateRequest(**self.fields, wire_fields=wire, media=self.media or None)]
        shared = {key: value for key, value in self.fields.items() if not _is_per_item(key, value)}
        lists = {key: value for key, value in self.fields.items() if _is_per_item(key, value)}
        return [
            GenerateRequest(
                **shared,
                **{key: value[at] for key, value in lists.items()},
                wire_fields=wire,
                media={key: value[at] for key, value in self.media.items() if value[at] is not None} or None,
            )
            for at in range(self.items)
        ]


def batch_rids(rid: object, n: int, max_bytes: int = default("max_rid_bytes")) -> list[str | None]:
    """The client-facing rids of a batch of `n`: from none, one (``r_0``, ``r_1``, ...), or a list of distinct ones."""
    if rid is None:
        return [None] * n
    if isinstance(rid, str):
        check_client_rid(rid, max_bytes)
        return [check_client_rid(f"{rid}_{at}", max_bytes) for at in range(n)]
    if not isinstance(rid, (list, tuple)):
        raise ValidationError(f"rid must be a string or a list of strings, not {show(rid)}", field="rid")
    if len(rid) != n:
        raise ValidationError(f"rid has {len(rid)} entries, but there are {n} prompts", field="rid")
    rids = [None if entry is None else check_client_rid(entry, max_bytes) for entry in rid]
    seen: set[str] = set()
    for entry in rids:
        if entry is not None and entry in seen:
            raise ValidationError(f"rid {show(entry)} stands twice in one batch", field="rid")
        seen.update(() if entry is None else (entry,))
    return rids


def _prompts(fields: Mapping[str, Any]) -> tuple[list[Any] | tuple[Any, ...] | None, str]:
    """The list of prompts of a batch and its key; (None, key) where the body is one request."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (ids is None):
        got = "neither" if text is None else "both"
        raise ValidationError(f"exactly one of text and input_ids must be given, not {got}", field="text")
    if text is not None:
        return (text if isinstance(text, (list, tuple)) else None), "text"
    if isinstance(ids, (list, tuple)) and any(isinstance(entry, (list, tuple)) for entry in ids):
        for at, entry in enumerate(ids):
            if not isinstance(entry, (list, tuple)):
                raise ValidationError(
                    f"input_ids mixes ids and lists of ids: [{at}] is {show(entry)}", field="input_ids"
                )
        return ids, "input_ids"
    return None, "input_ids"


def _is_per_item(key: str, value: Any) -> bool:
    """Whether `value` in a batch is a list with one entry per item, rather than one value for all."""
    if not isinstance(value, (list, tuple)):
        return False
    if key == "token_ids_logprob":  # for all: a list of ids
        return any(isinstance(entry, (list, tuple)) or entry is None for entry in value)
    return True


def _size(value: Any) -> int:
    """Bytes that a copy of a JSON value costs, roughly: strings by length, everything else 8."""
    total, stack = 0, [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        total += 8
    return total
