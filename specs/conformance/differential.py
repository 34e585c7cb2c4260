"""Two targets, one random scheduler script, and what the clients of each got.

Owns: the scripts, what is compared, and which disagreements are explained. Rules it keeps:

* A script is made from its seed alone and is a list of the kit's own steps, so a disagreement can be read, replayed and made a case.
* Compared per client: text, ids, the end (finish reason, or the error's status); and which requests were aborted at the scheduler.
  Not compared: how output is cut into chunks, an error's words, and whether it came inside a stream (D26).
* A disagreement is explained only by a numbered difference whose *feature* stands in that client's part of the script, and only in
  the fields that this difference can touch. Everything else is a finding.

    python -m headrace.specs.conformance.differential A B --seed 1 --scripts 200 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .cases import Case, tokenizer_folder
from .lines import Caller, python_target
from .protocol import KitError, TargetFault, check_hello
from .steps import Mismatch, Session

EXPLAINED: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "unknown-columns": ("D01", frozenset({"text", "ids", "end", "aborted"})),
    "unreadable-frame": ("D02", frozenset({"text", "ids", "end", "aborted"})),
    "stop-string": ("D03", frozenset({"text"})),
    "held": ("D04", frozenset({"text"})),
    "error-frame": ("D06", frozenset({"end"})),
    "extra-keys": ("D07", frozenset({"end"})),
    "matched-elsewhere": ("D08", frozenset({"text"})),
    "matched-list": ("D09", frozenset({"text"})),
    "kept-stop-token": ("D10", frozenset({"text"})),
    "bad-id": ("D11", frozenset({"text", "ids", "end", "aborted"})),
    "abort-by-rid": ("D27", frozenset({"end"})),
    "fffd": ("D29", frozenset({"text"})),
}
"""Feature of a client's part of a script: the difference it can show, and the fields in which."""

_TEXTS: Final = (
    "plain words, and more. ",
    "Grüße aus Köln — ",
    "日本語の文章です。",
    "한국어 문장 ",
    "العربية ",
    "हिन्दी पाठ ",
    "👋🏽👩‍👩‍👧 ",
    "\ufffd\x00\r\n\t",
    "<|end|>",
    "END. ",
)
_STOPS: Final = ("END", "<|end|>", "\n\n", "文", "more. ", "x")
_BROKEN: Final = (b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", b"\x80", b"\xe6\x97")
_PATIENCE_S: Final = (
    0.3  # for what may rightly never come: an abort of a request that has ended, a client that is left waiting
)


@dataclass(frozen=True)
class Vocabulary:
    """How the texts of a script become ids: the kit's byte-level tokenizer, or one that is given."""

    folder: str
    encode: Callable[[str], list[int]]
    size: int
    special: tuple[int, ...]

    @classmethod
    def of(cls, folder: str | None = None) -> Vocabulary:
        """The byte-level toy, or the tokenizer.json in `folder`."""
        if folder is None:
            return cls(str(tokenizer_folder("byte-level")), lambda text: list(text.encode()), 256, (256, 257, 258))
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        special = tuple(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return cls(
            folder, lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), size, special or (0,)
        )


@dataclass
class Script:
    """A random script: `steps` of the kit, the clients, and which features stand in each client's part."""

    seed: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    features: dict[str, set[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)


def make(seed: int, vocabulary: Vocabulary | None = None) -> Script:
    """The script of `seed` (and of the vocabulary)."""
    words = vocabulary or Vocabulary.of()
    rng = random.Random(seed)
    script = Script(seed)
    script.config = {"tokenizer": words.folder, "context_len": 4096, "vocab_size": max(words.size, 260)}
    pending: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    # some kinds of trouble are switched off in each script: uniform trouble everywhere has blind spots
    trouble = {
        name
        for name in ("lies", "aborts", "late", "bad-id", "frames", "broken-text")
        if rng.random() < (0.25 if name in ("lies", "bad-id", "frames") else 0.5)
    }
    for at in range(rng.randint(1, 4)):
        key = f"c{at}"
        script.keys.append(key)
        script.features[key] = set()
        script.steps.append(_open(rng, key, at))
        pending[key] = _actions(rng, script.steps[-1]["body"], script.features[key], trouble, words)
    while any(pending.values()):
        rows: list[dict[str, Any]] = []
        for key in rng.sample(script.keys, len(script.keys)):
            if not pending[key] or rng.random() < 0.2:
                continue
            verb, what = pending[key].pop(0)
            if verb == "row":
                rows.append({"to": key, **what})
                continue
            if verb in ("abort", "close"):  # what was pushed has arrived, and the abort has, before anything goes on
                script.steps.append({"sync": None})
            script.steps.append({verb: f"{key}-rid" if verb == "abort" else key, **what})
            if verb == "close":
                script.left.add(key)
            if verb in ("abort", "close"):
                script.steps.append({"sync": key})
        if rows:
            script.steps.append({"push": rows})
            if "lies" in trouble and rng.random() < 0.15:
                _lie(rng, script, rows)
    return script


def _open(rng: random.Random, key: str, at: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": 64}
    if rng.random() < 0.5:
        params["stop"] = rng.sample(_STOPS, rng.randint(1, 3))
    for flag, chance in (("skip_special_tokens", 0.3), ("no_stop_trim", 0.25)):
        if rng.random() < chance:
            params[flag] = flag == "no_stop_trim"
    body: dict[str, Any] = {"stream": rng.random() < 0.7, "rid": f"{key}-rid", "sampling_params": params}
    if rng.random() < 0.5:
        body["text"] = f"{at} {rng.choice(_TEXTS)}"
    else:
        body["input_ids"] = [at, *rng.choices(range(256), k=rng.randint(1, 5))]
    return {"open": key, "body": body}


def _actions(
    rng: random.Random, body: dict[str, Any], features: set[str], trouble: set[str], words: Vocabulary
) -> list[tuple[str, dict[str, Any]]]:
    """What happens to one request: chunks, and an end of some kind."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 6)):
        ids += words.encode(rng.choice(_TEXTS))
        if "broken-text" in trouble and rng.random() < 0.3:
            ids += rng.choice(_BROKEN) if words.size == 256 else rng.choices(range(words.size), k=2)
        if rng.random() < 0.15:
            ids.append(rng.choice(words.special))
    finish = _finish(rng, body["sampling_params"], ids, features, words)
    cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randint(0, 6)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    actions: list[tuple[str, dict[str, Any]]] = [("row", {"ids": chunk}) for chunk in chunks]
    actions[-1][1]["finish"] = finish
    if "bad-id" in trouble and rng.random() < 0.5:
        rng.choice(actions)[1]["ids"].append(rng.choice((-1, 2**31 - 1, 2**40)))
        features.add("bad-id")
    if "frames" in trouble and rng.random() < 0.4:
        actions[rng.randrange(len(actions)) :] = [("error", {"message": "unreadable"})]
        features.add("error-frame")
    elif "frames" in trouble and rng.random() < 0.3:
        actions[rng.randrange(len(actions)) :] = [("result", {"payload": "x"})]
    if "aborts" in trouble and rng.random() < 0.4:
        verb = rng.choice(("abort", "close"))
        actions.insert(rng.randrange(len(actions)), (verb, {}))
        if verb == "abort":
            features.add("abort-by-rid")
    if "late" in trouble and rng.random() < 0.5:
        actions += [("row", {"ids": [90, 91], "finish": rng.choice((None, {"type": "stop", "matched": None}))})]
    return actions


def _finish(
    rng: random.Random, params: dict[str, Any], ids: list[int], features: set[str], words: Vocabulary
) -> dict[str, Any]:
    kind = rng.choice(
        (
            "stop",
            "string",
            "string",
            "string",
            "token",
            "elsewhere",
            "list",
            "length",
            "abort",
            "status",
            "unknown",
            "extra",
        )
    )
    if kind == "string" and "stop" in params:
        matched = rng.choice(params["stop"])
        if rng.random() < 0.8:
            ids += words.encode(matched + rng.choice(("", "", "tail")))
        features.add("stop-string")
        return {"type": "stop", "matched": matched}
    if kind in ("token", "elsewhere"):
        token = rng.choice((0, 10, 65, words.special[-1]))
        ids += [token] if kind == "token" else rng.choice(([token, 66], [67]))
        features.add("matched-elsewhere" if kind == "elsewhere" else "stop-token")
        if params.get("no_stop_trim"):
            features.add("kept-stop-token")
        return {"type": "stop", "matched": token}
    if kind == "list":
        ids += [66, 67]
        features.add("matched-list")
        return {"type": "stop", "matched": [66, 67]}
    if kind == "extra":
        features.add("extra-keys")
        return {"type": "length", "length": len(ids), "more": [1, None]}
    others: dict[str, dict[str, Any]] = {
        "length": {"type": "length", "length": len(ids)},
        "abort": {"type": "abort", "message": "m", "status_code": None, "err_type": None},
        "status": {"type": "abort", "message": "m", "status_code": rng.choice((400, 429, 503)), "err_type": None},
        "unknown": {"type": "tool_calls", "name": "s", "deep": {"a": [1, None]}},
    }
    return others.get(kind, {"type": "stop", "matched": None})


def _lie(rng: random.Random, script: Script, rows: Sequence[dict[str, Any]]) -> None:
    lie, feature, everybody = rng.choice(
        (
            ({"data_append_hex": "00" * 8}, "", False),
            ({"data_append_hex": "00"}, "", False),
            ({"data_cut": 1}, "", False),
            ({"columns": {"prompt_tokens": [1] * (len(rows) + 1)}}, "", False),
            ({"columns": {"finish_reasons": [5] * len(rows)}}, "", False),
            ({"append": [[]]}, "unknown-columns", False),
            ({"header_hex": "c1c1"}, "unreadable-frame", True),
            ({"columns": {"rids": [5]}}, "unreadable-frame", True),
        )
    )
    if lie == {"data_cut": 1} and not any(row["ids"] for row in rows):
        return
    script.steps[-1]["lie"] = lie
    for key in script.keys if everybody else [row["to"] for row in rows]:
        if feature:
            script.features[key].add(feature)


class Observer(Session):
    """Runs a script and says what became of each client, instead of judging it."""

    def observe(self, script: Script) -> dict[str, dict[str, Any]]:
        self.run()
        return self._seen

    def _step(self, step: Any) -> None:
        if "sync" in step:
            self._sync(step["sync"])
            return
        if "observe" not in step:
            super()._step(step)
            return
        script: Script = step["observe"]
        self._fence()
        self._seen = {}
        for key in script.keys:
            client = self._client(key)
            deadline = time.monotonic() + _PATIENCE_S
            while client.end is None and key not in script.left and time.monotonic() < deadline:
                self._poll(key, client, 0.1)
            self._seen[key] = self._told(client) if key not in script.left else {}
        self._fence()
        for key in script.keys:
            self._seen[key]["aborted"] = self._rids[key] in self._aborts

    def _sync(self, key: str | None) -> None:
        """Everything that was pushed has been worked on; with a key, its abort has come, or will not come."""
        self._fence(1)
        deadline = time.monotonic() + _PATIENCE_S
        while key is not None and self._rids[key] not in self._aborts and time.monotonic() < deadline:
            self._take(0.02)

    def _fence(self, times: int = 2) -> None:
        # A frame that may have been anybody's also ends the kit's own request, where that was already there.
        for _ in range(3):
            try:
                super()._fence(times)
                return
            except Mismatch as fault:
                if "ended with the error" not in str(fault):
                    raise
        raise Mismatch("no request gets through any more")

    def _told(self, client: Any) -> dict[str, Any]:
        end = client.end or {}
        if "error" in end:
            return {"text": client.text, "ids": client.ids, "end": end["error"]["status"]}
        return {"text": client.text, "ids": client.ids, "end": end.get("finish_reason", "open")}


@dataclass(frozen=True)
class Disagreement:
    """One client on which two targets disagree; `number` is the difference that explains it, or empty."""

    seed: int
    key: str
    fields: tuple[str, ...]
    number: str
    first: dict[str, Any]
    second: dict[str, Any]


def observe(caller: Caller, script: Script, limit_s: float = 5.0) -> dict[str, dict[str, Any]]:
    """What the clients of `script` got on the target behind `caller` (wire v2). Mismatch where a rule of every case broke."""
    case = Case(
        id=f"differential.{script.seed}",
        suite="text",
        clause="",
        level="MUST",
        about="",
        needs=(),
        wires=("v2",),
        config=script.config,
        steps=(*script.steps, {"observe": script}),
    )
    return Observer(caller, case, "v2", limit_s).observe(script)


def compare(script: Script, first: dict[str, Any], second: dict[str, Any]) -> list[Disagreement]:
    """Where two observations of `script` disagree."""
    found = []
    for key in script.keys:
        fields = tuple(name for name in first[key] if first[key][name] != second[key].get(name))
        if fields:
            number = _numbers(script.features[key] | _held(first[key], second[key]), fields)
            found.append(Disagreement(script.seed, key, fields, number, first[key], second[key]))
    return found


def _held(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """What one side still held back when an error ended the request: a U+FFFD that it was not sure of, or the start of a stop."""
    short, long = sorted((first.get("text", ""), second.get("text", "")), key=len)
    if not isinstance(first.get("end"), int) or not long.startswith(short):
        return set()
    return {"fffd"} if long[len(short) :].startswith("\ufffd") else {"held"}


def _numbers(features: set[str], fields: Sequence[str]) -> str:
    """The differences that explain all `fields` of a client with these features; empty where one field is left over."""
    known = [EXPLAINED[feature] for feature in sorted(features & EXPLAINED.keys())]
    for number, touched in known:
        if touched.issuperset(fields):
            return number
    parts = [next((number for number, touched in known if name in touched), "") for name in fields]
    return "+".join(sorted(set(parts))) if all(parts) else ""


def run(
    first: Caller, second: Caller, *, seed: int, scripts: int, seconds: float, vocabulary: Vocabulary | None = None
) -> tuple[int, list[Disagreement], Counter[str]]:
    """`scripts` scripts from `seed` on, or as many as fit into `seconds`: how many ran, what disagreed, and features seen."""
    found: list[Disagreement] = []
    features: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    ran = 0
    for at in range(seed, seed + scripts):
        if time.monotonic() > deadline:
            break
        script = make(at, vocabulary)
        seen: list[dict[str, Any]] = []
        try:
            for caller in (first, second):
                seen.append(observe(caller, script))
            found += compare(script, *seen)
        except (Mismatch, TargetFault) as fault:
            which = ("first", "second")[len(seen)]
            found.append(Disagreement(at, "", ("fault",), "", {which: str(fault)}, {}))
            for caller in (first, second):
                caller.restart()
        features.update(name for names in script.features.values() for name in names)
        ran += 1
    return ran, found, features


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 where a disagreement is not explained."""
    parser = argparse.ArgumentParser(prog="python -m headrace.specs.conformance.differential")
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--scripts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a folder with a tokenizer.json; default: the kit's own")
    options = parser.parse_args(argv)
    callers = [python_target(spec) for spec in (options.first, options.second)]
    try:
        for caller in callers:
            if "v2" not in check_hello(caller.call("hello", {}, 30.0))["wires"]:
                raise KitError("both targets must speak wire v2")
        vocabulary = Vocabulary.of(options.tokenizer)
        ran, found, features = run(
            *callers, seed=options.seed, scripts=options.scripts, seconds=options.seconds, vocabulary=vocabulary
        )
    except (KitError, TargetFault) as fault:
        print(fault, file=sys.stderr)
        return 2
    finally:
        for caller in callers:
            caller.end()
    numbers = Counter(one.number or "unexplained" for one in found)
    print(
        f"seed={options.seed} scripts={ran} complete={ran == options.scripts} disagreements={dict(sorted(numbers.items()))}"
    )
    print(f"features={dict(sorted(features.items()))}")
    for one in found:
        if not one.number:
            print(
                f"\nseed {one.seed}, client {one.key}: {', '.join(one.fields)}\n  {one.first}\n  {one.second}".encode(
                    "ascii", "backslashreplace"
                ).decode()
            )
            print(
                f"  replay: python -m headrace.specs.conformance.differential {options.first} {options.second} --seed {one.seed} --scripts 1\n  script: {json.dumps(make(one.seed, vocabulary).steps)}"
            )
    return 1 if numbers["unexplained"] else 0


if __name__ == "__main__":
    sys.exit(main())
