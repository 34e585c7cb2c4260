"""`FrameDecoder` gives what `decode_frame` gives, whatever stood before in the stream."""

import weakref

import numpy as np
from headrace.codec import BatchFrame, ChunkEvent, FrameError, decode_frame, encode_batch, load_schema, strategies
from headrace.codec.batch import RowExtras
from headrace.codec.stream import FrameDecoder
from hypothesis import assume, given
from hypothesis import strategies as st

SCHEMAS = {name: load_schema(name) for name in ("v1", "v2")}


def _seen(decode, frame):
    """Everything that a reader can see of a frame, or of its refusal."""
    try:
        decoded = decode(frame)
    except FrameError as error:
        return ("refused", error.reason, error.rids, error.rids_complete)
    if not isinstance(decoded, BatchFrame):
        return decoded
    chunks = [(c.rid, c.token_ids.tolist(), c.finish_reason, c.prompt_tokens, sorted(c.extras)) for c in decoded]
    return (decoded.rids, decoded.offsets.tolist(), decoded.finished, decoded.lengths.tolist(), decoded.scalars, chunks)


@given(st.data(), st.sampled_from(sorted(SCHEMAS)))
def test_a_stream_decodes_as_its_frames_one_by_one(data, name):
    schema = SCHEMAS[name]
    pool = data.draw(
        st.lists(st.one_of(strategies.frames(schema), strategies.hostile_frames(schema)), min_size=1, max_size=4)
    )
    stream = FrameDecoder(schema)
    for frame in data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=12)):
        frame = bytes(frame)
        assert _seen(stream.decode, frame) == _seen(lambda f: decode_frame(f, schema), frame)


@given(st.data(), st.sampled_from(sorted(SCHEMAS)))
def test_frames_that_differ_in_one_byte_are_told_apart(data, name):
    schema = SCHEMAS[name]
    first = bytes(data.draw(strategies.frames(schema)))
    at = data.draw(st.integers(0, len(first) - 1))
    second = first[:at] + bytes([first[at] ^ data.draw(st.integers(1, 255))]) + first[at + 1 :]
    stream = FrameDecoder(schema)
    _seen(stream.decode, first)
    assert _seen(stream.decode, second) == _seen(lambda f: decode_frame(f, schema), second)


def test_an_equal_header_shares_its_columns_and_not_its_ids():
    from headrace.codec import encode_batch_cols, frame_egress_batch_cols

    schema = SCHEMAS["v1"]
    frames = [
        frame_egress_batch_cols(
            *encode_batch_cols(
                schema,
                rids=["a", "b"],
                finish_reasons=[None] * 2,
                prompt_tokens=[1, 1],
                tok_lens=[1, 1],
                token_ids=np.array(ids),
            )
        )
        for ids in ([5, 6], [7, 8])
    ]
    stream = FrameDecoder(schema)
    first, second = (stream.decode(frame) for frame in frames)
    assert first.layout is second.layout
    assert first.rids is second.rids
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 6], [7, 8])


@given(st.data(), st.sampled_from(sorted(SCHEMAS)))
def test_owned_extras_are_the_extras_of_each_row_as_copies(data, name):
    frame = decode_frame(data.draw(strategies.frames(SCHEMAS[name])), SCHEMAS[name])
    assume(isinstance(frame, BatchFrame) and len(frame))
    rows = data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=6))
    for row, owned in zip(rows, frame.owned_extras(rows), strict=True):
        views = frame.extras(row)
        assert sorted(owned) == sorted(views)
        for key, values in owned.items():
            assert values.dtype == views[key].dtype
            assert values.tobytes() == views[key].tobytes()
            assert values.flags.owndata


def test_extras_that_were_read_keep_nothing_of_the_other_rows():
    """A handle keeps what it has read for its completion, and must not keep the frames of its whole batch with it."""
    chunks = [ChunkEvent(rid=rid, token_ids=[65], extras={"out_lp_val": [0.5], "out_lp_idx": [65]}) for rid in "abc"]
    frame = decode_frame(encode_batch(chunks, SCHEMAS["v1"]), SCHEMAS["v1"])
    shared = frame.keep_extras()
    columns = weakref.ref(shared.parts["out_lp"].values)
    rows = [RowExtras(shared, row) for row in range(3)]
    del shared
    assert [row["out_lp_val"].tolist() for row in rows[:2]] == [[0.5], [0.5]]
    assert columns() is not None
    assert dict(rows[2]).keys() == {"out_lp_val", "out_lp_idx"}
    assert columns() is None
    assert [row["out_lp_idx"].tolist() for row in rows] == [[65]] * 3
