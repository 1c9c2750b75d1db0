"""FedDG-GA: weights follow what averaging costs each client, on clients whose training can be written down."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedAvg, FedDGGA
from lightning_fed.client_algorithms import FedGA
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.aggregators.quadratic import STRENGTHS, TARGETS, train_by_hand, weights_after
from tests.client_algorithms.client_runs import Given
from tests.parts import BySizes, Classifier, federated_trainer, points

ROUNDS, STEPS = 4, 3
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
ON_TRAIN: dict[str, Any] = {"losses_over": "train", "weighting": "uniform"}


def own_losses(points: np.ndarray) -> np.ndarray:
    """f_i at a point of its own for each of the three clients, or at one for all."""
    return np.array(0.5 * STRENGTHS * ((points - TARGETS) ** 2).sum(axis=1))


def by_hand(d: float, centred: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Returns w and a after all rounds; without Ḡ if not ``centred``."""
    w, a = np.ones(2), np.full(3, 1 / 3)
    for r in range(ROUNDS):
        ends = train_by_hand(w, STEPS)
        w = w + a @ (ends - w)
        gaps = own_losses(w) - own_losses(ends)
        away = gaps - gaps.mean() * centred
        a = np.maximum(a + d * (1 - r / ROUNDS) * away / np.abs(away).max(), 0)
        a = a / a.sum()
    return w, a


@pytest.mark.parametrize("d", [0.1, 0.5])
def test_three_quadratic_clients(d: float, tmp_path: Path) -> None:
    """With 0.5 a weight falls to 0 and comes back."""
    rule, (w, a) = FedDGGA(d, **ON_TRAIN), by_hand(d)
    np.testing.assert_allclose(weights_after(tmp_path, rule, ROUNDS, STEPS), w, **EXACT)
    assert rule.adjusted is not None
    np.testing.assert_allclose(rule.adjusted / 3, a, **EXACT)
    assert abs(a - 1 / 3).max() > 0.1


def test_a_mistake_of_others_leaves_the_mean_of_the_gaps_out(tmp_path: Path) -> None:
    """The authors' code: gaps that are all positive then raise every weight."""
    found = weights_after(tmp_path, FedDGGA(0.5, **ON_TRAIN), ROUNDS, STEPS)
    assert abs(found - by_hand(0.5, centred=False)[0]).max() > 1e-3
    np.testing.assert_allclose(found, by_hand(0.5)[0], **EXACT)


def data(sizes: tuple[int, ...] = (10, 20, 0, 12), **options: Any) -> FederatedDataModule:
    held: dict[str, Any] = {"val_split": "per_client", "val_fraction": 0.3, **options}
    return FederatedDataModule(points(sum(sizes)), BySizes(*sizes), num_clients=len(sizes), batch_size=4, **held)


def train(folder: Path, rule: Any, *client: Any, rounds: int = 3, given: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    trainer = federated_trainer(folder, rule, *client, max_rounds=rounds, **options)
    trainer.fit(Classifier(), data() if given is None else given, ckpt_path="last")
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_gap_is_over_held_out_samples_at_the_new_model_and_at_the_clients_own(engine: Any, tmp_path: Path) -> None:
    class Keeps(FedDGGA):
        def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
            ends[update.client.id] = trainer.vector.data.clone()

    rule, given, ends = Keeps(0.2), data(), dict[int, torch.Tensor]()
    trainer = train(tmp_path, rule, rounds=1, given=given, engine=engine, precision="64-true")
    held, samples, gaps = given._client_data().held_out_split("val"), points(42), []
    for client in (0, 1, 3):
        rows = held.index[held.offsets[client] : held.offsets[client + 1]]
        x, y = (tensor[rows] for tensor in samples.tensors)
        at = []
        for weights in (trainer.weights, ends[client]):
            net = Classifier().double()
            torch.nn.utils.vector_to_parameters(weights, net.parameters())
            at.append(float(net.training_step((x.double(), y), 0).detach()))
        gaps.append(at[0] - at[1])
    away = np.array(gaps) - np.mean(gaps)
    shares = given.split.sizes[[0, 1, 3]] / given.split.sizes.sum()
    moved = np.maximum(shares + 0.2 * away / abs(away).max(), 0)
    assert rule.adjusted is not None
    np.testing.assert_allclose(
        rule.adjusted[[0, 1, 3]] / given.split.sizes.sum(), moved / moved.sum(), rtol=0, atol=1e-12
    )
    assert rule.adjusted[2] == 0
    assert trainer.totals["gradients"] == trainer.totals["samples"] + 2 * held.sizes.sum()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_at_0_it_is_fedavg_to_the_bit_and_engines_and_chunks_agree_else(engine: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": engine, "enable_checkpointing": False}
    for weighting in ("samples", "uniform"):
        plain = train(tmp_path, FedAvg(weighting=weighting), **options).weights
        assert torch.equal(train(tmp_path, FedDGGA(0.0, weighting=weighting), **options).weights, plain)
    found = train(tmp_path, FedDGGA(), **options).weights
    size = {"chunk_size": 2} if engine == "vectorized" else {}
    alone = train(tmp_path, FedDGGA(), **options | size).weights
    torch.testing.assert_close(alone, found, rtol=1e-5, atol=1e-6)
    there = train(tmp_path, FedDGGA(), **options | {"engine": "sequential"}).weights
    torch.testing.assert_close(found, there, rtol=1e-5, atol=1e-6)
    assert (found - plain).abs().max() > 1e-3


def test_clients_that_were_not_drawn_keep_their_weight(tmp_path: Path) -> None:
    rule, before = FedDGGA(0.2, **ON_TRAIN), []

    class Looks(FedGA):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            before.append(None if rule.adjusted is None else rule.adjusted.clone())

    sampler = Given((0, 1), (1, 3))
    trainer = train(tmp_path, rule, Looks(0.0), rounds=2, sampler=sampler, clients_per_round=2)
    first, last = before[1], rule.adjusted
    assert last is not None
    assert (first[3], last[0], last[2]) == (1, first[0], 0)
    assert first[0] + first[1] == pytest.approx(2)
    assert last.sum() == pytest.approx(3)
    assert abs(last[3] - 1) > 0.01
    # w⁺ goes to the two of each round apart from the model that they train.
    assert trainer.totals["comm/bytes_down"] > trainer.totals["comm/bytes_up"]


def test_a_cohort_without_any_weight_gets_its_first_back(tmp_path: Path) -> None:
    """One client of a round keeps its weight; here a hand has set it to 0."""
    rule = FedDGGA(0.2, **ON_TRAIN)

    class Empties(FedGA):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            assert rule.adjusted is not None
            rule.adjusted[3] *= trainer.round > 1

    train(tmp_path, rule, Empties(0.0), rounds=2, sampler=Given((0,), (3,)), clients_per_round=1)
    assert rule.adjusted is not None
    assert rule.adjusted[3] == 1


class FailsInRound(FederatedCallback):
    """Ends a run in its third round, once."""

    armed = True

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        if trainer.round == 3 and self.armed:
            type(self).armed = False
            raise FederatedError("Expected nothing.")


def test_the_weights_are_saved_and_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "rounds": 4}
    wanted, found = FedDGGA(), FedDGGA()
    whole = train(tmp_path / "whole", wanted, **options)
    with pytest.raises(FederatedError, match="nothing"):
        train(tmp_path / "parts", FedDGGA(), FailsInRound(), **options)
    parts = train(tmp_path / "parts", found, FailsInRound(), **options)
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert wanted.adjusted is not None
    assert found.adjusted is not None
    assert torch.equal(found.adjusted, wanted.adjusted)
    assert (found.adjusted - torch.tensor([7.0, 14.0, 0.0, 9.0])).abs().max() > 1e-3


def test_a_displaced_start_is_no_part_of_what_a_client_ends_with(tmp_path: Path) -> None:
    """FedGA at β = 0 displaces by 0: to the bit as without it."""
    plain, displaced = FedDGGA(), FedDGGA()
    train(tmp_path / "plain", plain)
    train(tmp_path / "displaced", displaced, FedGA(0.0))
    assert plain.adjusted is not None
    assert displaced.adjusted is not None
    assert torch.equal(plain.adjusted, displaced.adjusted)


def central() -> FederatedDataModule:
    return FederatedDataModule(points(40), IID(), num_clients=3, batch_size=4, val_fraction=0.3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: data(val_fraction=0.0), r"val samples of each client, got none: .*`--data\.val_split per_client"),
        (central, r"val samples of each client, got none: .*`--data\.val_split per_client"),
        (
            lambda: data((3, 20, 0, 12)),
            r"held-out samples of every client for FedDGGA, got none of client 0 .*`--data\.val_fraction`",
        ),
    ],
)
def test_data_without_held_out_samples_are_refused(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=message):
        train(tmp_path, FedDGGA(), given=given())


@pytest.mark.parametrize(
    ("make", "option"),
    [(lambda: FedDGGA(-0.1), "step_size"), (lambda: FedDGGA(losses_over="test"), "losses_over")],  # type: ignore[arg-type]  # on purpose
)
def test_bad_arguments_name_the_option(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--aggregator\.{option}`"):
        make()


def test_a_run_of_more_rounds_is_a_new_one_as_the_step_depends_on_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "name": "run"}
    whole = train(tmp_path / "whole", FedDGGA(), rounds=6, **options)
    short = train(tmp_path / "parts", FedDGGA(), rounds=3, **options)
    found = train(tmp_path / "parts", FedDGGA(), rounds=6, **options)
    assert not found.resumed
    assert torch.equal(found.weights, whole.weights)
    again = train(tmp_path / "parts", FedDGGA(), rounds=3, **options)
    assert (again.resumed, again.run.path) == (True, short.run.path)
    last = str(short.run.checkpoints / "last.ckpt")
    trainer = federated_trainer(tmp_path, FedDGGA(), max_rounds=6, **options)
    with pytest.raises(FederatedError, match=r"Expected `--trainer.max_rounds 3`, as in the run of .*, got 6"):
        trainer.fit(Classifier(), data(), ckpt_path=last)
