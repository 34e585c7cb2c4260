"""Request ids: their three forms, uniqueness, what the client sees, and the shard they belong to."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading

import pytest
from headrace.codec import Rid, strategies_ingress
from headrace.codec.rid import _suffixes, shard_of
from hypothesis import given
from ingress_helpers import refusal


def test_minted_rids_are_32_lowercase_hex_digits_and_health_probes_say_so() -> None:
    minted, probe = Rid.mint(), Rid.health_check()
    assert re.fullmatch(r"[0-9a-f]{32}", minted)
    assert re.fullmatch(r"HEALTH_CHECK_[0-9a-f]{32}", probe)
    assert (minted.client_facing, probe.client_facing) == (minted, probe)
    assert Rid.mint() != minted
    assert Rid.health_check() != probe


def test_b01_two_live_requests_with_one_client_rid_are_two_rids_that_show_the_same_to_the_client() -> None:
    first, second = Rid.from_client("x"), Rid.from_client("x")
    assert first != second
    assert first.client_facing == second.client_facing == "x"
    assert re.fullmatch(r"x#[0-9a-f]{16}", first)


def test_the_suffix_is_eight_digits_of_the_process_and_a_counter() -> None:
    first, second = (Rid.from_client("x") for _ in range(2))
    assert first[2:10] == second[2:10]
    assert int(second[10:], 16) == int(first[10:], 16) + 1


def test_when_the_counter_wraps_the_random_half_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Rid.from_client("x")
    monkeypatch.setattr(_suffixes, "_count", 1 << 32)
    after = Rid.from_client("x")
    assert after.endswith("0" * 8)
    assert after[2:10] != before[2:10]


@given(strategies_ingress.client_rids())
def test_a_client_sees_exactly_its_own_form_whatever_it_contains(client: str) -> None:
    rid = Rid.from_client(client)
    assert type(str(rid)) is str
    assert rid.client_facing == client
    assert Rid.from_wire(str(rid)) == rid
    assert Rid.from_wire(str(rid)).client_facing == client


def test_a_client_rid_that_already_looks_suffixed_keeps_its_look() -> None:
    form = "x#0123456789abcdef"
    rid = Rid.from_client(form)
    assert rid.startswith(form + "#")
    assert Rid.from_wire(rid).client_facing == form


@pytest.mark.parametrize(
    "rid", ["", "a" * 129, "字" * 43, "\ud800", "HEALTH_CHECK", "HEALTH_CHECK_x", 5, b"x", ["a"], True], ids=ascii
)
def test_a_rid_no_client_may_use_is_refused_with_the_field_named(rid: object) -> None:
    assert refusal(Rid.from_client, rid).field == "rid"


@pytest.mark.parametrize("rid", ["a" * 128, "字" * 42, "\x00", "health_check"])
def test_rids_at_the_limit_are_accepted(rid: str) -> None:
    assert Rid.from_client(rid).client_facing == rid


def test_matching_is_exact_and_finds_itself_in_a_table_of_plain_strings() -> None:
    rid = Rid.from_client("abc")
    assert {str(rid): 1}[rid] == 1
    assert rid != "abc"
    assert Rid.from_client("ab") not in {str(rid)}


def test_rids_survive_pickle_and_copy_with_their_client_form() -> None:
    rid = Rid.from_client("abc")
    for twin in (pickle.loads(pickle.dumps(rid)), copy.deepcopy(rid)):
        assert twin == rid
        assert twin.client_facing == "abc"


def test_suffixes_are_unique_across_threads() -> None:
    barrier = threading.Barrier(4)
    taken: list[list[str]] = []

    def take() -> None:
        barrier.wait()
        taken.append([Rid.from_client("x") for _ in range(2000)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({rid for rids in taken for rid in rids}) == 8000


def test_a_shard_is_the_same_in_another_process_with_another_hash_seed() -> None:
    rids = ["mine#bfdfec2e00000000", "03d3a373a8c54512a38c09d17553e654", "字#0000000000000000"]
    here = [[shard_of(rid, n, seed) for n in (1, 2, 3, 16)] for rid in rids for seed in (0, 7)]
    code = f"from headrace.codec.rid import shard_of; print([[shard_of(r, n, s) for n in (1, 2, 3, 16)] for r in {rids!a} for s in (0, 7)])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "123"}
    )
    assert out.stdout.strip() == str(here)


def test_shards_of_known_rids_are_pinned() -> None:
    """Another implementation must agree; a change here moves live requests between processes of different versions."""
    assert [Rid.from_wire(rid).shard(16) for rid in ("a", "b", "mine#bfdfec2e00000000", "0" * 32)] == PINNED


PINNED = [10, 8, 0, 14]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_shards_are_even_for_minted_and_for_counted_rids(n: int, seed: int) -> None:
    total = 8000
    for rids in (
        [f"{at * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128):032x}" for at in range(total)],
        [f"r_{at}#0f0f0f0f{at:08x}" for at in range(total)],
        [f"mine#0f0f0f0f{at:08x}" for at in range(total)],
    ):
        counts = [0] * n
        for rid in rids:
            counts[shard_of(rid, n, seed)] += 1
        assert all(abs(count - total / n) < 6 * (total / n) ** 0.5 + 1 for count in counts), counts


def test_another_seed_is_another_partition() -> None:
    rids = [f"mine#0f0f0f0f{at:08x}" for at in range(4000)]
    together = sum(shard_of(rid, 8, 1) == shard_of(rid, 8, 2) for rid in rids)
    assert together < 4000 / 8 * 1.5


@given(strategies_ingress.rids())
def test_every_rid_has_a_shard_in_range_and_a_client_form(rid: Rid) -> None:
    assert {rid.shard(n) for n in (1,)} == {0}
    assert 0 <= rid.shard(3, seed=2**64 + 1) < 3
    assert rid.startswith(rid.client_facing)
