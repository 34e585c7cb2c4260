"""The search itself, on worlds whose states can be counted by hand."""

import io
from dataclasses import dataclass, field
from functools import partial

import pytest
from headrace.runtime.explorer import Copier, Unsound, explore, replay


@dataclass
class Counters:
    """Two counters that go up to `to`; `bad` is a pair that must not be reached; `blind` leaves the second out of the key."""

    to: int = 3
    bad: tuple[int, int] | None = None
    blind: bool = False
    at: list[int] = field(default_factory=lambda: [0, 0])

    def moves(self) -> list[str]:
        return [f"add {which}" for which in (0, 1) if self.at[which] < self.to]

    def do(self, name: str) -> None:
        self.at[int(name.split()[1])] += 1
        if tuple(self.at) == self.bad:
            raise AssertionError(f"reached {self.at}")

    def key(self) -> object:
        return self.at[0] if self.blind else tuple(self.at)


def test_every_interleaving_of_two_counters_is_a_state_once() -> None:
    result = explore("grid", partial(Counters, 3))
    assert (result.states, result.transitions, result.depth, result.ends) == (16, 24, 6, 1)
    assert result.complete
    assert result.failure is None


def test_the_first_counterexample_is_a_shortest_one_and_replays() -> None:
    result = explore("grid", partial(Counters, 5, (2, 1)))
    assert result.failure == "reached [2, 1]"
    assert len(result.script) == 3
    assert sorted(result.script) == ["add 0", "add 0", "add 1"]
    with pytest.raises(AssertionError, match="reached"):
        replay(partial(Counters, 5, (2, 1)), result.script)
    replay(partial(Counters, 5, (2, 1)), result.script[:-1])


@pytest.mark.parametrize("most", [1, 10, 35])
def test_a_search_that_was_cut_does_not_say_that_it_is_complete(most: int) -> None:
    result = explore("grid", partial(Counters, 5), most=most)
    assert not result.complete
    assert result.failure is None
    assert result.states >= most
    assert "complete=false" in result.lines()[0]


def test_a_bound_that_holds_every_state_does_not_cut() -> None:
    assert explore("grid", partial(Counters, 5), most=36).complete


def test_a_search_that_ran_out_of_time_does_not_say_that_it_is_complete() -> None:
    assert not explore("grid", partial(Counters, 5), seconds=-1.0).complete


def test_a_key_that_leaves_something_out_is_found_by_the_audit() -> None:
    with pytest.raises(Unsound):
        explore("blind", partial(Counters, 1, None, True), audit=True)
    assert explore("seeing", partial(Counters, 3), audit=True).complete


def test_an_error_that_is_no_assertion_is_named_by_its_type() -> None:
    class Fragile(Counters):
        def do(self, name: str) -> None:
            raise ZeroDivisionError("oh")

    result = explore("fragile", Fragile)
    assert result.failure == "ZeroDivisionError: oh"
    assert result.script == ("add 0",)
    assert any("1. add 0" in line for line in result.lines())


def test_copies_are_apart_and_share_only_what_never_changes() -> None:
    stream = io.BytesIO  # a class: shared
    copier = Copier()
    world = {"list": [1], "kind": stream, "function": explore}
    copy = copier.load(copier.dump(world))
    copy["list"].append(2)
    assert world["list"] == [1]
    assert copy["kind"] is stream
    assert copy["function"] is explore
    copier.close()
