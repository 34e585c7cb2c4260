"""JSON renderings of chunks and completions: B38 (text of candidates), B47 (folds), B48 (NaN and infinities)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from headrace.runtime import cumulative
from headrace.runtime.render import render_logprobs
from manager_helpers import BOUND, STOP, V, every_config, rig


def _extras(ids, values, top=()):
    extras = {"out_lp_val": np.array(values, np.float32), "out_lp_idx": np.array(ids, np.int32)}
    if top:
        extras["out_top_lens"] = np.array([len(row) for row in top])
        extras["out_top_val"] = np.array([value for row in top for value, _ in row], np.float32)
        extras["out_top_idx"] = np.array([token for row in top for _, token in row], np.int32)
    return extras


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B48_nan_and_infinities_are_null_and_no_column_shifts(config, stream):
    with rig(**config) as r:
        handle = r.tm.generate([1], stream=stream, return_logprob=True)
        rid = r.request()
        values = [-np.inf, np.nan, -0.5]
        first = {"in_lp_val": np.array([np.nan, -2.0], np.float32), "in_lp_idx": np.array([1, 2], np.int32)}
        r.chunk(rid, [65, 66, 67], STOP, extras={**_extras([65, 66, 67], values), **first})
        done = handle.result(BOUND)
        assert done.extras["out_lp_val"].tobytes() == np.array(values, np.float32).tobytes()  # bit-exact on the wire
        answer = json.loads(json.dumps(handle.to_dict(done), allow_nan=False))
        assert answer["meta_info"]["output_token_logprobs"] == [[None, 65, None], [None, 66, None], [-0.5, 67, None]]
        assert answer["meta_info"]["input_token_logprobs"] == [[None, 1, None], [-2.0, 2, None]]
        assert (answer["text"], answer["output_ids"]) == ("ABC", [65, 66, 67])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


@every_config
def test_B38_a_candidate_that_is_no_token_has_an_empty_text_and_fails_nobody(config):
    with rig(**config) as r:
        handle = r.tm.generate([1], return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
        rid = r.request()
        top = [[(-0.5, 65), (-1.5, V + 3)], [], [(-2.5, -1)]]
        r.chunk(rid, [65, 66, 67], STOP, extras=_extras([65, 66, 67], [-0.5] * 3, top))
        info = handle.to_dict(handle.result(BOUND))["meta_info"]
        assert info["output_token_logprobs"] == [[-0.5, 65, "A"], [-0.5, 66, "B"], [-0.5, 67, "C"]]
        assert info["output_top_logprobs"] == [[[-0.5, 65, "A"], [-1.5, V + 3, ""]], None, [[-2.5, -1, ""]]]


@pytest.mark.parametrize("many", [1, 40])  # the general way and the columnar one
@every_config
def test_B47_deltas_are_disjoint_and_their_fold_is_the_whole(config, many):
    with rig(**config) as r:
        handles = [r.tm.generate([1], return_logprob=True, rid=f"r{i}") for i in range(many)]
        rids = r.requests(many)
        chunks = [(65, -0.25), (66, -0.5), (67, -0.75)]
        from manager_helpers import chunk

        iterators = {handle.rid: iter(handle) for handle in handles}
        deltas: dict[str, list] = {name: [] for name in rids}
        for at, (token, value) in enumerate(chunks):
            finish = STOP if at == 2 else None
            r.push(*[chunk(rid, [token], finish, extras=_extras([token], [value])) for rid in rids.values()])
            for name, iterator in iterators.items():
                deltas[name].append(next(iterator))
        for name, parts in deltas.items():
            handle = next(h for h in handles if h.rid == name)
            rendered = [handle.to_dict(part) for part in parts]
            assert [p["output_ids"] for p in rendered] == [[65], [66], [67]]
            assert [p["meta_info"]["output_token_logprobs"] for p in rendered] == [
                [[value, token, None]] for token, value in chunks
            ]
            last = list(cumulative(parts))[-1]
            assert (last.text, last.token_ids.tolist()) == ("ABC", [65, 66, 67])
            assert last.extras["out_lp_val"].tolist() == [-0.25, -0.5, -0.75]
            assert list(iterators[name]) == []


def test_rows_of_length_zero_are_null_and_hidden_states_are_rows():
    extras = {"hidden_lens": np.array([2, 0, 1]), "hidden_val": np.array([1.0, np.inf, 3.0], np.float32)}
    assert render_logprobs(extras) == {"hidden_states": [[1.0, None], None, [3.0]]}
    assert render_logprobs({"out_top_lens": np.array([0, 0])}) == {"output_top_logprobs": [None, None]}
    assert render_logprobs({}) == {}
