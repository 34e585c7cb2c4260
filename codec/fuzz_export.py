"""`headrace fuzz --export DIR`: what other fuzzers and other languages need, as files.

Owns: the layout of that folder: ``corpus/`` (inputs to start from), ``lies/`` (one-lie frames, each named in `lies.json` with the
rule, the verdict and the rids a decoder must name), ``frames.dict`` (a libFuzzer and AFL dictionary), README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from .errors import ValidationError, show
from .fuzz_targets import TARGETS, Target
from .schema import WireSchema
from .vectors import meaning, one_lie

_README: Final = """# Fuzzing a decoder of wire/{name} frames

- `corpus/`: valid frames and frames with one lie; start your fuzzer from it: `your_fuzzer -dict=frames.dict corpus/`.
- `lies/`: frames that break exactly one rule. `lies.json` says which (`rule`), that a decoder must reject it, the `rids` it must
  still name, and whether they are all (`rids_complete`).
- `frames.dict`: tokens for libFuzzer and AFL.

With headrace installed, a program that reads a frame from standard input and exits with 0 (accept) or 1 (reject) is fuzzed by
`headrace fuzz --target-cmd './decoder' --wire {name} --oracle`.
"""


def dictionary(schema: WireSchema) -> list[tuple[str, bytes]]:
    """(name, token): tags, msgpack heads at their edges, nil and maps, finish reason words, u32 edges in both byte orders."""
    tokens = [(f"tag_{name}", bytes((tag,))) for name, tag in (("result", 1), ("batch", 2), ("error", 3))]
    tokens += [(f"fixarray_{n}", bytes((0x90 | n,))) for n in range(16)]
    tokens += [(f"array16_{n}", b"\xdc" + n.to_bytes(2, "big")) for n in (0, 16, len(schema.egress.columns), 65535)]
    tokens += [(f"array32_{n}", b"\xdd" + n.to_bytes(4, "big")) for n in (0, 1, 2**31 - 1, 2**32 - 1)]
    tokens += [
        ("nil", b"\xc0"),
        ("false", b"\xc2"),
        ("true", b"\xc3"),
        ("reserved", b"\xc1"),
        ("map0", b"\x80"),
        ("map1", b"\x81"),
    ]
    tokens += [
        ("u8", b"\xcc\xff"),
        ("u16", b"\xcd\xff\xff"),
        ("u32", b"\xce\xff\xff\xff\xff"),
        ("u64", b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00"),
    ]
    tokens += [
        ("f32_nan", b"\xca\x7f\xc0\x00\x00"),
        ("f64", b"\xcb" + bytes(8)),
        ("bin0", b"\xc4\x00"),
        ("ext", b"\xd4\x05\x01"),
        ("timestamp", b"\xd6\xff\x00\x00\x00\x01"),
    ]
    tokens += [
        (word, bytes((0xA0 | len(word),)) + word.encode())
        for word in ("type", "stop", "matched", "length", "abort", "message", "status_code", "err_type")
    ]
    tokens += [(f"le_{n}", n.to_bytes(4, "little")) for n in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)]
    return tokens


def _quoted(token: bytes) -> str:
    return "".join(f"\\x{b:02x}" for b in token)


def export_kit(folder: Path, schema: WireSchema, target: Target) -> int:
    """Write the kit for `schema` into `folder`; the number of files written. ValidationError when it cannot be written."""
    files: dict[str, bytes] = {f"corpus/{name}": data for name, data in target.seeds().items()}
    listed: list[dict[str, Any]] = []
    for name, rule, frame in one_lie(schema):
        file = f"lies/{name.replace(' ', '-')}.bin"
        files[file] = frame
        told = meaning(frame, schema)
        listed.append({"file": file, "rule": rule, **{k: told[k] for k in ("verdict", "rids", "rids_complete")}})
    files["lies.json"] = ("[\n" + ",\n".join(json.dumps(entry) for entry in listed) + "\n]\n").encode()
    files["frames.dict"] = "".join(f'{name}="{_quoted(token)}"\n' for name, token in dictionary(schema)).encode()
    files["README.md"] = _README.format(name=schema.name).encode()
    try:
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise ValidationError(f"{show(str(folder))} cannot be written: {error.strerror}", field="export") from None
    return len(files)


def corpus_files() -> dict[str, bytes]:
    """Path in the repository -> content of the shipped corpus's seeds. Further files there are inputs that once were findings."""
    return {
        f"specs/corpus/{target.name}/{name}.bin": data
        for target in TARGETS.values()
        for name, data in target.seeds().items()
    }


def main(root: Path) -> None:
    for name, data in corpus_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent)
