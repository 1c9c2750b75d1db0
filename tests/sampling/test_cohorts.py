"""Cohorts of any size: who is there, who is waited for, what the row says, and that the run goes on."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_fed.aggregators import FedAvg, Krum
from lightning_fed.callbacks.diagnostics import GradientDissimilarity
from lightning_fed.client_algorithms import SCAFFOLD, FedGA
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.updates import Client
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import (
    Availability,
    BernoulliAvailability,
    ClientSampler,
    ClientWork,
    CohortDraw,
    Stragglers,
    UnequalWork,
    UniformSampler,
    WeightedSampler,
)
from tests.engines.parts import both
from tests.parts import Classifier, built, federated_data, federated_trainer

SIZES = np.array([8, 0, 16, 24, 8])


def draw(**parts: Any) -> CohortDraw:
    """Five clients in batches of 8, two local epochs; one has no samples."""
    given = {"sampler": UniformSampler(), "fewest": 1, "seed": 0, **parts}
    return CohortDraw(sizes=SIZES, steps=SIZES // 8 * 2, steps_per_epoch=SIZES // 8, **given)


class Table(Availability, ClientSampler, ClientWork):
    """Says in each round what it was given for it."""

    def __init__(self, *rounds: Any) -> None:
        self.rounds = rounds

    def available(self, round: int, num_clients: int, seed: int) -> Any:
        return self.rounds[(round - 1) % len(self.rounds)]

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> Any:
        return np.array(self.available(round, count, seed), dtype=np.int64)

    def assign(self, round: int, steps: Any, steps_per_epoch: Any, seed: int) -> Any:
        return self.available(round, len(steps), seed)


def there(*ids: int) -> Table:
    return Table(np.isin(np.arange(5), ids))


def test_of_those_that_are_there_as_many_train_as_are_wanted() -> None:
    for round in range(1, 30):
        parts = draw(availability=there(0, 2, 4))
        drawn = parts.draw(round, 2)
        assert {client.id for client in drawn.clients} < {0, 2, 4}
        assert len(drawn.clients) == 2
        assert parts.facts == {"clients/available": 3.0}
        assert [client.id for client in draw(availability=there(0, 2, 4)).draw(round, 4).clients] == [0, 2, 4]


def test_if_all_are_there_the_cohort_is_the_one_without_availability() -> None:
    for sampler in (UniformSampler(), WeightedSampler(), WeightedSampler([1.0, 2.0, 3.0, 4.0, 0.0])):
        for round in range(1, 20):
            plain = draw(sampler=sampler).draw(round, 3)
            assert draw(sampler=sampler, availability=there(0, 1, 2, 3, 4)).draw(round, 3) == plain


def test_weights_are_those_of_the_clients_that_are_there() -> None:
    sampler = WeightedSampler([1.0, 1.0, 0.0, 5.0, 1.0])
    drawn = [draw(sampler=sampler, availability=there(0, 2, 3)).draw(r, 1).clients[0].id for r in range(1, 400)]
    assert set(drawn) == {0, 3}
    assert drawn.count(3) / len(drawn) == pytest.approx(5 / 6, abs=0.1)
    few = draw(sampler=sampler, availability=there(0, 2, 3)).draw(1, 4)
    assert [client.id for client in few.clients] == [0, 3], "of weight 0 is never drawn"
    assert draw(sampler=sampler, availability=there(2)).draw(1, 4).clients == ()


def test_a_sampler_of_the_users_own_gets_the_sizes_of_those_that_are_there() -> None:
    class Largest(ClientSampler):
        def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
            return np.argsort(-sizes, kind="stable")[:count]

    assert [c.id for c in draw(sampler=Largest(), availability=there(0, 2, 4)).draw(1, 2).clients] == [0, 2]
    with pytest.raises(FederatedError, match=r"Table to draw distinct client ids in \[0, 3\), got \[0, 3\]"):
        draw(sampler=Table([0, 3]), availability=there(0, 2, 4)).draw(1, 2)


def test_work_and_deadline_make_the_steps() -> None:
    """Client 3 takes 6 steps of 2 s by itself; its work of 9 steps does not fit into 10 s."""
    work = Table((np.array([2, 0, 3, 9, 2]), np.array([1.0, 1.0, 0.5, 2.0, 1.0])))
    slow = Stragglers(deadline=10.0, late="partial", step_time=[1.0, 1.0, 2.0, 2.0, 11.0])
    parts = draw(work=work, stragglers=slow)
    cohort = parts.draw(7, 5)
    assert cohort.clients == (Client(0, 8, 7), Client(2, 16, 7, 3, 0.5), Client(3, 24, 7, 5, 2.0))
    assert cohort.skipped == (1, 4)
    assert (parts.facts, parts.seconds) == ({"clients/late": 2.0}, 10.0)
    assert draw(work=work).draw(7, 5).clients[2] == Client(3, 24, 7, 9, 2.0)
    assert [c.steps for c in draw(stragglers=slow).draw(7, 5).clients] == [None, None, 5]


def test_the_quickest_of_more_are_kept() -> None:
    rule = Stragglers(step_time=[4.0, 1.0, 1.0, 1.0, 1.0], over_selection=1.6)
    parts = draw(stragglers=rule)
    cohort = parts.draw(1, 2)  # 4 of 5 are drawn
    times = {0: 8.0, 2: 4.0, 3: 6.0, 4: 2.0}
    drawn = {client.id for client in cohort.clients} | set(cohort.skipped)
    assert len(drawn) == 4
    quickest = sorted((i for i in drawn if SIZES[i]), key=lambda i: times[i])[:2]
    assert [client.id for client in cohort.clients] == sorted(quickest)
    assert parts.seconds == times[quickest[-1]]
    assert parts.facts == {"clients/late": 0.0}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"availability": Table([1, 1, 1, 1, 1])}, "availability` Table to return true or false .* array of int64"),
        ({"availability": Table(np.ones(4, dtype=bool))}, r"each of 5 clients, got an array of bool of shape \(4,\)"),
        ({"work": Table(([1, 1], [1.0, 1.0]))}, "work` Table to give each of 5 clients"),
        ({"work": Table(([1.5] * 5, [1.0] * 5))}, "an integer number of local steps"),
        ({"work": Table(([0] * 5, [1.0] * 5))}, "of at least 1"),
        ({"work": Table(([1] * 5, [0.0] * 5))}, "factor above 0"),
        ({"work": Table(([1] * 5, [float("inf")] * 5))}, "finite factor"),
    ],
)
def test_what_a_class_of_the_users_own_says_is_checked(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        draw(**parts).draw(1, 5)


class Seen(FederatedCallback):
    """Notes the model and the clients after each round."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.trained: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights.append(trainer.weights.clone())
        self.trained.append(int(trainer.round_metrics["clients/trained"]))


VARYING = Table([0, 3], [0, 1, 2, 3, 4, 5], [], [5], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_cohorts_grow_and_shrink_under_both_engines(tmp_path: Path, options: dict[str, Any]) -> None:
    """The matrices of updates and of start gradients too."""
    for makers in ((lambda: Krum(num_corrupted=0), lambda: FedGA(0.3)), (SCAFFOLD, GradientDissimilarity)):
        given = {"sampler": VARYING, "clients_per_round": 3, "max_rounds": 6, **options}
        sizes = (6, 24, 3, 15, 10, 31)
        made = both(tmp_path, Classifier, *makers, make_data=lambda s=sizes: federated_data(*s, dataset=None), **given)
        trained = [sum(r == round for r, _, _ in made.entered) for round in range(1, 7)]
        assert trained == ([0, 6, 0, 0, 5, 0] if makers[0] is not SCAFFOLD else [2, 6, 0, 1, 5, 2])


def test_a_thin_round_passes_and_the_run_goes_on(tmp_path: Path) -> None:
    seen, rounds = Seen(), Table([0, 1], [0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4])
    trainer = federated_trainer(
        tmp_path, Krum(num_corrupted=1), seen, sampler=rounds, clients_per_round=5, max_rounds=4, logger=[]
    )
    with pytest.warns(UserWarning, match=r"^Round 1 leaves the model as it is: 2 clients .* needs at least 5;"):
        trainer.fit(built(Classifier), federated_data(8, 8, 8, 8, 8))
    assert seen.trained == [0, 5, 0, 5]
    start, first, second, third = torch.cat([p.flatten() for p in built(Classifier).parameters()]), *seen.weights[:3]
    assert torch.equal(first, start)
    assert not torch.equal(second, first)
    assert torch.equal(third, second)
    assert trainer.totals["comm/rounds"] == 2
    skipped = [row["clients/skipped"] for row in rows(tmp_path)[1:]]
    assert list(map(float, skipped)) == [2, 0, 0, 0]


def test_so_does_one_that_is_thin_for_what_becomes_of_its_clients(tmp_path: Path) -> None:
    """Client 1 takes no step in odd rounds; what the others keep stays in step with what the server keeps of it."""

    class Idle(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            idle = self.trainer.client.id == 1 and self.trainer.round % 2
            return None if idle else super().training_step(batch, batch_idx)

    class Kept(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            own = torch.zeros(5, trainer.weights.numel())
            for client, row in enumerate(own):
                trainer.client_states.recall("SCAFFOLD", client, row)
            assert own[0].any()
            torch.testing.assert_close(scaffold.control, own.mean(dim=0))

    seen, scaffold = Seen(), SCAFFOLD()
    rule = Krum(num_corrupted=1, weighting="uniform")
    trainer = federated_trainer(tmp_path, scaffold, rule, seen, Kept(), max_rounds=3)
    with pytest.warns(UserWarning, match=r"^Round 1 leaves the model as it is: 4 clients .* needs at least 5;"):
        trainer.fit(built(Idle), federated_data(8, 8, 8, 8, 8))
    assert seen.trained == [4, 5, 4]
    start = torch.cat([p.flatten() for p in built(Classifier).parameters()])
    changed = [not torch.equal(a, b) for a, b in zip([start, *seen.weights], seen.weights, strict=False)]
    assert changed == [False, True, False]


def test_what_monitors_clients_waits_for_a_round_in_which_some_train(tmp_path: Path) -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                self.parameters(), lr=1e-9
            )  # the loss of a client that never moves stands still
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e-3, eps=0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train/loss"}

    stopping = EarlyStopping("train/loss", patience=2, min_delta=1e-3, check_on_train_epoch_end=True)
    options = {"sampler": Table([], [0], [], [0], [], [0], [0], [0]), "max_rounds": 8, "clients_per_round": 1}
    trainer = federated_trainer(tmp_path, FedAvg(), stopping, **options)
    with pytest.warns(UserWarning, match=r"^Round 1 leaves the model as it is"):
        trainer.fit(built(Plateau), federated_data(8, 8))
    assert trainer.round == 6  # rounds 2, 4 and 6 were seen: the best, and two that are no better
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-11)


def rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("*/version_*/metrics.csv")
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


EVERYTHING: dict[str, Any] = {
    "availability": BernoulliAvailability(0.6),
    "stragglers": Stragglers(deadline=4.0, late="partial", over_selection=1.5, exchange_time=0.5),
    "work": UnequalWork(steps=[1, 6], lr=[0.5, 1.5]),
    "clients_per_round": 3,
}


def run(folder: Path, rounds: int, **options: Any) -> Any:
    given = {"max_rounds": rounds, "logger": [], "enable_checkpointing": True, "name": "run", **EVERYTHING, **options}
    trainer = federated_trainer(folder, SCAFFOLD(), FedAvg(), **given)
    trainer.fit(built(Classifier), federated_data(12, 9, 20, 8, 16, 5), ckpt_path="last")
    return trainer


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 8)
    for rounds in (2, 5, 8):
        parts = run(tmp_path / "parts", rounds)
    assert torch.equal(whole.weights, parts.weights)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    last = rows(tmp_path / "whole")[-1]
    assert {"clients/available", "clients/late", "simulated/time"} <= set(last)
    passed = [float(row["simulated/time"]) for row in rows(tmp_path / "whole")[1:]]
    assert np.diff([0.0, *passed]).max() <= 4.0
    assert passed == sorted(passed)
    assert whole.totals["simulated/time"] == passed[-1] > 0


def test_what_is_off_leaves_no_trace(tmp_path: Path) -> None:
    off = dict.fromkeys(("availability", "stragglers", "work"))
    plain = run(tmp_path / "plain", 3, **off)
    assert set(rows(tmp_path / "plain")[-1]).isdisjoint({"clients/available", "clients/late", "simulated/time"})
    same = run(
        tmp_path / "same", 3, availability=BernoulliAvailability(1.0), stragglers=Stragglers(),
        work=UnequalWork(steps=[1, 9], lr=[0.5, 2.0], share=0.0),
    )  # fmt: skip
    assert torch.equal(plain.weights, same.weights)


def test_a_trial_is_one_step_of_everybody(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, fast_dev_run=True, **EVERYTHING)
    trainer.fit(built(Classifier), federated_data(8, 8, 8))
    assert trainer.totals["samples"] == 16
