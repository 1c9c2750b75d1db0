"""Who can be reached: pure functions of seed and round with the stated shares, and files that are checked."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import (
    Availability,
    BernoulliAvailability,
    Participation,
    PeriodicAvailability,
    TraceAvailability,
)
from tests.parts import Classifier, federated_data, federated_trainer


def table(rule: Availability, rounds: int, clients: int, seed: int = 0) -> np.ndarray:
    return np.stack([rule.available(round, clients, seed) for round in range(1, rounds + 1)])


@pytest.mark.parametrize("rule", [BernoulliAvailability(0.5), PeriodicAvailability(5, 0.5)])
def test_it_is_a_function_of_seed_round_and_client_alone(rule: Availability) -> None:
    first = table(rule, 6, 50)
    assert first.dtype == np.bool_
    np.random.seed(3)
    assert np.array_equal(table(rule, 6, 50), first)
    assert np.array_equal(table(rule, 6, 80)[:, :50], first), "a client is the same among more"
    assert not np.array_equal(table(rule, 6, 50, seed=1), first)
    assert len(np.unique(first, axis=0)) > 1


def test_bernoulli_clients_are_there_with_their_probability() -> None:
    """4,000 draws each: 5 standard deviations are at most 5 sqrt(0.25 / 4000) = 0.04."""
    p = [0.0, 0.1, 0.5, 0.9, 1.0]
    shares = table(BernoulliAvailability(p), 4000, 5).mean(axis=0)
    assert np.allclose(shares, p, atol=0.04)
    assert shares[[0, 4]].tolist() == [0, 1]
    assert table(BernoulliAvailability(0.3), 400, 10).mean() == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(("period", "share"), [(4, 0.5), (24, 1 / 3), (5, 1.0), (1, 0.2), (7, 0.1)])
def test_periodic_clients_are_there_for_one_window_of_each_period(period: int, share: float) -> None:
    there = table(PeriodicAvailability(period, share), 3 * period, 200)
    assert np.array_equal(there[:period], there[period : 2 * period])
    counts, comes = there[:period].sum(axis=0), (there & ~np.roll(there, 1, axis=0))[period : 2 * period].sum(axis=0)
    assert ((counts - share * period) > -1).all()
    assert ((counts - share * period) < 1).all()
    assert (comes <= 1).all(), "one window, not several"
    assert counts.mean() == pytest.approx(share * period, rel=0.25, abs=0.1)


def test_periodic_phases_are_spread_as_said() -> None:
    alone = table(PeriodicAvailability(10, 0.3, spread=0.0), 20, 30)
    assert np.array_equal(alone.all(axis=1), alone.any(axis=1))
    assert alone[:, 0].tolist() == [True] * 3 + [False] * 7 + [True] * 3 + [False] * 7
    assert table(PeriodicAvailability(10, 0.3), 10, 3000).mean(axis=1) == pytest.approx(np.full(10, 0.3), abs=0.05)


def test_a_trace_says_who_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("from_round,client,to_round\n1,0,2\n4,0,4\n2,2,3\n3,2,9\n")
    there = table(TraceAvailability(str(path)), 5, 4)
    assert there.T.astype(int).tolist() == [[1, 1, 0, 1, 0], [0] * 5, [0, 1, 1, 1, 1], [0] * 5]


HEAD = "client,from_round,to_round\n"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (None, "No such file"), ("client,from\n0,1\n", "KeyError 'from_round'"), (HEAD + "0,1\n", "TypeError"),
        (HEAD + "0,1,x\n", "invalid literal"), (HEAD + "0,3,2\n", r"\[0, 3, 2\] in line 2"),
        (HEAD + "0,1,2\n-1,1,2\n", "in line 3"), (HEAD + "0,0,2\n", "in line 2"), (b"\xff\xfe\x00", "codec"),
        (HEAD + "0,1,99999999999999999999\n", "OverflowError"), (HEAD, "no client in it"), ("", "no client in it"),
    ],
)  # fmt: skip
def test_a_trace_that_is_none_is_refused_in_a_sentence(tmp_path: Path, text: Any, got: str) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FederatedError, match=rf"^Expected .*`--trainer.*\.availability\.path`.*{got}") as caught:
        TraceAvailability(str(path))
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_a_pipe_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(FederatedError, match=r"availability\.path`.* got no regular file"):
        TraceAvailability(str(tmp_path / "trace.csv"))


class Nobody(Availability):
    """A user's rule that knows nobody."""

    def available(self, round: int, num_clients: int, seed: int) -> Any:
        return np.zeros(num_clients, dtype=bool)


@pytest.mark.parametrize(
    ("rows", "trains"),
    [("0,4,9\n", False), ("2,1,9\n", False), (None, False), ("0,3,9\n", True)],
    ids=["later rounds", "a client without samples", "a rule of one's own", "the last round"],
)
def test_a_rule_by_which_nobody_ever_trains_is_refused_before_round_0(tmp_path: Path, rows: Any, trains: bool) -> None:
    (tmp_path / "trace.csv").write_text(HEAD + (rows or ""))
    rule = Nobody() if rows is None else TraceAvailability(str(tmp_path / "trace.csv"))
    trainer = federated_trainer(tmp_path, max_rounds=3, participation=Participation(availability=rule))
    data = federated_data(4, 4, 0)
    if trains:
        trainer.fit(Classifier(), data)
        assert trainer.global_step == 1
        return
    with pytest.raises(FederatedError, match=r"availability` .* in any of the 3 rounds, got none") as caught:
        trainer.fit(Classifier(), data)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_the_clients_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(HEAD + "4,1,1\n")
    with pytest.raises(FederatedError, match=r"availability\.path`, to be in \[0, 4\), got 4"):
        TraceAvailability(str(tmp_path / "trace.csv")).available(1, 4, 0)
    with pytest.raises(FederatedError, match=r"availability\.p`.* each of 3 clients, got 2"):
        BernoulliAvailability([0.5, 0.5]).available(1, 3, 0)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *((lambda p=p: BernoulliAvailability(p), "p") for p in (-0.1, 1.1, float("nan"), "x", True, [0.5, 2])),
        *((lambda n=n: PeriodicAvailability(n), "period") for n in (0, 1.5, "x")),
        *((lambda s=s: PeriodicAvailability(3, s), "share") for s in (0, 1.1, "x")),
        *((lambda s=s: PeriodicAvailability(3, 0.5, s), "spread") for s in (-1, 1.1)),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected `--trainer\.participation\.availability\.{option}` "):
        make()
