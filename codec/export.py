"""A wire schema as a text table with its byte layout: `headrace spec export wire/NAME`, and the heart of `docs/wire.md`."""

from __future__ import annotations

from .limits import LIMITS
from .schema import Column, WireSchema

_WORDS = {
    "rids": "who",
    "finish_reasons": "why it ended, or nil while running",
    "prompt_tokens": "prompt tokens",
    "tok_lens": "ids of this request in this frame",
    "lens": "values of {family} per request",
    "reqlens": "positions of {family} per request; they sum to the length of the next column",
    "poslens": "values of {family} per position; 0 is no value",
    "scalar": "",
}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _need(column: Column, required: int) -> str:
    return "always, one per rid" if column.position < required else "may be absent or empty"


def export_wire(schema: WireSchema) -> str:
    """The schema as Markdown: frame layout, header positions, data columns, ingress header, sampling slots."""
    egress = schema.egress
    size = {"i32": 4, "i64": 8}[egress.id_type]
    lines = [
        f"# wire/{schema.name}: {schema.title}",
        "",
        "All integers and floats are little-endian, except inside msgpack. Headers are msgpack arrays; positions are the fields.",
        "",
        "## Egress frame (scheduler to manager)",
        "",
        "| bytes | what |",
        "|---|---|",
        "| 0 | tag: 1 RESULT, 2 BATCH, 3 ERROR |",
        "| 1 … (RESULT) | msgpack [rid: str, payload: bin or str, …] |",
        "| 1 … (ERROR) | msgpack [rid: str, message: str, …] |",
        "| 1 … 4 (BATCH) | header length H, u32 |",
        "| 5 … 4 + H | header, msgpack array |",
        "| 5 + H … end | data columns back to back, no padding, exactly as long as the header says |",
        "",
        f"A frame has at most {LIMITS['max_frame_bytes'].default} bytes, a header at most {schema.max_header_bytes}.",
        "",
        "### Header positions",
        "",
    ]
    rows = [
        [
            str(c.position),
            c.name,
            c.type.replace("?", " or nil"),
            c.per,
            _need(c, egress.required),
            _WORDS[c.role].format(family=c.family),
        ]
        for c in egress.columns
    ]
    lines += _table(["position", "name", "type", "one per", "present", "meaning"], rows)
    lines += ["", "### Data columns", ""]
    total = "sum of tok_lens"
    rows = [["1", "token_ids", egress.id_type, str(size), total, "token ids of all requests, in order"]]
    for family in egress.families:
        counts = family.lens.name if family.poslens is None else family.poslens.name
        rows.append([str(len(rows) + 1), f"{family.name}_val", family.values, "4", f"sum of {counts}", family.meaning])
        if family.indices is not None:
            rows.append(
                [str(len(rows) + 1), f"{family.name}_idx", family.indices, "4", f"sum of {counts}", "their token ids"]
            )
    lines += _table(["order", "name", "type", "bytes each", "entries", "meaning"], rows)
    once = ", ".join(f.name for f in egress.families if f.once)
    lines += [
        "",
        f"Families that come once, on the first chunk: {once}.",
        "",
        "## Ingress header (manager to scheduler)",
        "",
    ]
    fields = [
        [
            str(f.position),
            f.name,
            f.type.replace("?", " or nil"),
            _default(f.default),
            "headrace" if f.owned else "wire_fields",
        ]
        for f in schema.ingress_fields
    ]
    lines += _table(["position", "name", "type", "default", "set by"], fields)
    lines += ["", f"Cells beside the header: {', '.join(schema.cells)} (raw i64).", "", "### Sampling slots", ""]
    lines += _table(["slot", "name"], [[str(i), name] for i, name in enumerate(schema.sampling_slots)])
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    return "nil" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
