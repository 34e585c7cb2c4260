"""A server's arguments as JSON, and where a tokenizer named in them lies on this machine.

Owns: the names of the arguments that headrace reads out of a server's own list (which is far longer: keys that are not ours
are ignored), their mapping to `RuntimeConfig`, and the offline look-up of a tokenizer. Rules it keeps:

* A value of the wrong type is an error that names the field, also a nested one (``model_config.context_len``): a default used
  in its place would run the server with a limit nobody asked for.
* Mandatory fields are checked apart from reading, because a launcher reads, completes and only then validates.
* Nothing is fetched. A tokenizer is a file, a directory, or a model name found in the local hub cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from ..codec.errors import ValidationError, show

DISAGGREGATION_MODES: Final = ("null", "prefill", "decode")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_MOST: Final = 2**31 - 1  # ids and lengths are 32 bits wide in places of the wire
_TOKENIZER_FILE: Final = "tokenizer.json"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the server knows of its model: `context_len` in tokens, `vocab_size` = rows of the embedding table."""

    context_len: int | None = None
    vocab_size: int | None = None


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments that headrace reads. `tokenizer_path` falls back to `model_path`; `disaggregation_mode` is a string, "null" too."""

    served_model_name: str | None = None
    model_path: str | None = None
    tokenizer_path: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    tokenizer_worker_num: int = 1
    detokenizer_worker_num: int = 1
    allow_auto_truncate: bool = False
    num_reserved_tokens: int = 0
    enable_return_hidden_states: bool = False
    incremental_streaming_output: bool = True
    log_level: str = "info"
    disaggregation_mode: str | None = None
    model_config: ModelConfig = ModelConfig()

    @classmethod
    def from_json(cls, blob: bytes | str | Mapping[str, Any]) -> ServerArgs:
        """The arguments in `blob`, a JSON object (or one already decoded). Unknown keys are ignored.

        Raises ValidationError: not JSON, not an object, or a value of the wrong type (`field` names it).
        """
        try:
            if isinstance(blob, str):
                blob = blob.encode()  # here, so that a lone surrogate is a clear error and not a foreign one
            # Decoding in two steps costs nothing here and tells "this is no JSON" from "this field has the wrong type".
            raw = msgspec.json.decode(blob) if isinstance(blob, (bytes, bytearray, memoryview)) else dict(blob)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ValidationError(f"the server arguments are not valid JSON: {_words(error)}") from None
        if not isinstance(raw, dict):
            raise ValidationError(f"the server arguments must be a JSON object, not {show(raw)}")
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            what, field = _split(str(error))
            value = _dig(raw, field)
            raise ValidationError(
                f"server argument {field}: {what[:1].lower()}{what[1:]} ({show(value)})", field=field
            ) from None

    def validate_mandatory(self) -> None:
        """Raises one ValidationError that names every mandatory field that is missing, or the first that makes no sense.

        Mandatory: served_model_name, model_config.context_len, model_config.vocab_size, disaggregation_mode.
        """
        mandatory = {
            "served_model_name": self.served_model_name,
            "model_config.context_len": self.model_config.context_len,
            "model_config.vocab_size": self.model_config.vocab_size,
            "disaggregation_mode": self.disaggregation_mode,
        }
        missing = [name for name, value in mandatory.items() if value is None]
        if missing:
            lines = [f"server argument {name} is missing{_HINTS[name]}" for name in missing]
            raise ValidationError("; ".join(lines), field=missing[0])
        if not self.served_model_name:
            raise ValidationError("server argument served_model_name is empty", field="served_model_name")
        if self.disaggregation_mode not in DISAGGREGATION_MODES:
            _refuse(
                "disaggregation_mode", f"must be one of {', '.join(DISAGGREGATION_MODES)}", self.disaggregation_mode
            )
        for name, value in (
            ("model_config.context_len", self.model_config.context_len),
            ("model_config.vocab_size", self.model_config.vocab_size),
        ):
            if value is not None and not 1 <= value <= _MOST:
                _refuse(name, f"must be in 1..{_MOST}", value)


_HINTS: Final = {
    "served_model_name": " (the name under which clients ask for the model)",
    "model_config.context_len": " (the model's context length in tokens)",
    "model_config.vocab_size": " (the size of the model's embedding table)",
    "disaggregation_mode": f" (one of {', '.join(DISAGGREGATION_MODES)}, as a string)",
}


def config_fields(args: ServerArgs) -> dict[str, Any]:
    """The `RuntimeConfig` fields that `args` set, by name; mandatory fields are validated first.

    Raises ValidationError for a missing or senseless argument and for a tokenizer that is not on this machine.
    """
    args.validate_mandatory()
    for name, low in (("tokenizer_worker_num", 1), ("detokenizer_worker_num", 1), ("num_reserved_tokens", 0)):
        value = getattr(args, name)
        if not low <= value <= _MOST:
            _refuse(name, f"must be in {low}..{_MOST}", value)
    if args.log_level.lower() not in LOG_LEVELS:
        _refuse("log_level", f"must be one of {', '.join(LOG_LEVELS)}", args.log_level)
    tokenizer: str | None = None
    if not args.skip_tokenizer_init:
        name = "tokenizer_path" if args.tokenizer_path is not None else "model_path"
        where = getattr(args, name)
        if where is None:
            raise ValidationError(
                "server argument tokenizer_path is missing: name a tokenizer, or set skip_tokenizer_init to work on token ids only",
                field="tokenizer_path",
            )
        tokenizer = str(resolve_tokenizer(where, args.revision, field=name))
    return {
        "served_model_name": args.served_model_name,
        "tokenizer": tokenizer,
        "revision": args.revision,
        "skip_tokenizer_init": args.skip_tokenizer_init,
        "context_len": args.model_config.context_len,
        "vocab_size": args.model_config.vocab_size,
        "tokenizer_workers": args.tokenizer_worker_num,
        "detokenizer_shards": args.detokenizer_worker_num,
        "allow_auto_truncate": args.allow_auto_truncate,
        "num_reserved_tokens": args.num_reserved_tokens,
        "enable_return_hidden_states": args.enable_return_hidden_states,
        "incremental_streaming_output": args.incremental_streaming_output,
        "log_level": args.log_level.lower(),
    }


def hub_cache() -> Path:
    """The folder of the local hub cache: HF_HUB_CACHE, else HF_HOME/hub, else the user's cache folder."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    root = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return root.expanduser() / "hub"


def resolve_tokenizer(
    path: str | os.PathLike[str], revision: str | None = None, *, field: str = "tokenizer_path"
) -> Path:
    """The tokenizer.json that `path` names on this machine: the file itself, a directory that holds one, or a model name
    ("org/name" or "name") in the hub cache, there at `revision` (a branch, tag or commit; "main" where None).

    `revision` says nothing about a file or directory and is ignored for them. Raises ValidationError with `field`.
    """
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValidationError(f"{field} {show(text)} names no file", field=field)
    local = Path(text).expanduser()
    try:
        if local.is_file():
            return local
        if local.is_dir():
            if (local / _TOKENIZER_FILE).is_file():
                return local / _TOKENIZER_FILE
            raise ValidationError(f"{field} {show(text)}: the directory holds no {_TOKENIZER_FILE}", field=field)
    except OSError as error:
        raise ValidationError(f"{field} {show(text)}: {error.strerror}", field=field) from None
    parts = text.split("/")
    if len(parts) > 2 or not all(parts) or any(part.startswith((".", "~")) for part in parts):
        raise ValidationError(f"{field} {show(text)}: no such file or directory", field=field)
    repo = hub_cache() / ("models--" + "--".join(parts))
    if not repo.is_dir():
        raise ValidationError(
            f"{field} {show(text)}: no such file or directory, and the local hub cache has no model of that name (nothing is downloaded)",
            field=field,
        )
    return _snapshot(repo, text, revision if revision is not None else "main", field)


def _snapshot(repo: Path, name: str, revision: str, field: str) -> Path:
    # A revision is a path below refs/ ("refs/pr/1" is a real one), so it must not be able to climb out of the cache.
    parts = revision.split("/")
    if not all(parts) or "\0" in revision or any(part in (".", "..") for part in parts):
        raise ValidationError(f"revision {show(revision)} is not the name of a revision", field="revision")
    ref = repo.joinpath("refs", *parts)
    commit = revision
    try:
        if ref.is_file():
            commit = ref.read_text(encoding="ascii").strip()
        found = repo / "snapshots" / commit
        if "/" in commit or commit in ("", ".", "..") or not found.is_dir():
            have = sorted(p.name for p in (repo / "snapshots").glob("*"))
            hint = f"; it has {', '.join(have[:4])}" if have else ""
            raise ValidationError(
                f"{field} {show(name)}: the local hub cache has no revision {show(revision)} of it{hint}",
                field="revision",
            )
        if not (found / _TOKENIZER_FILE).is_file():
            raise ValidationError(
                f"{field} {show(name)}: revision {show(revision)} in the local hub cache has no {_TOKENIZER_FILE}",
                field=field,
            )
    except (OSError, UnicodeError) as error:
        raise ValidationError(
            f"{field} {show(name)}: the local hub cache cannot be read: {_words(error)}", field=field
        ) from None
    return found / _TOKENIZER_FILE


def _refuse(field: str, rule: str, value: object) -> NoReturn:
    raise ValidationError(f"server argument {field} {rule}, not {show(value)}", field=field)


def _words(error: BaseException) -> str:
    if isinstance(error, UnicodeError):
        return "it is not text in UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(getattr(error, "strerror", None) or error)


def _split(message: str) -> tuple[str, str]:
    """msgspec says ``Expected `int`, got `str` - at `$.model_config.context_len` ``; taken apart into words and field."""
    what, _, at = message.partition(" - at `")
    field = at.rstrip("`").removeprefix("$").removeprefix(".")
    return what.replace("`", ""), field or "(the whole)"


def _dig(raw: object, field: str) -> object:
    for key in field.split("."):
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
