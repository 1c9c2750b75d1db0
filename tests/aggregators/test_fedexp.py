"""FedExP: how far it steps, and which model its numbers belong to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_fed.aggregators import FedAvg, FedExP
from lightning_fed.masks import SignAgreement
from tests.aggregators.quadratic import step_by_hand, train_by_hand, weights_after
from tests.parts import Classifier, federated_data, federated_trainer, points

SIZES = [7, 1, 30, 12]


def problem() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=9), rng.normal(size=(4, 9))


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_three_quadratic_clients_over_rounds(epsilon: float, tmp_path: Path) -> None:
    w, factors = np.ones(2), []
    for _ in range(4):
        deltas = train_by_hand(w, 3) - w
        mean = deltas.sum(axis=0) / 3
        factors.append(max(1.0, (deltas**2).sum() / (2 * 3 * ((mean**2).sum() + epsilon))))
        w = w + factors[-1] * mean
    assert max(factors) > 1.2 or epsilon
    np.testing.assert_allclose(weights_after(tmp_path, FedExP(epsilon), 4, 3), w, rtol=0, atol=1e-12)


def test_clients_weigh_alike_by_default_and_by_samples_in_both_sums_if_asked() -> None:
    start, deltas = problem()
    squares = (deltas**2).sum(axis=1)
    for weighting, shares in (("uniform", np.full(4, 0.25)), ("samples", np.array(SIZES) / 50)):
        after, logged = step_by_hand(FedExP(weighting=weighting), start, deltas, SIZES)
        mean = shares @ deltas
        factor = max(1.0, shares @ squares / (2 * mean @ mean))
        np.testing.assert_allclose(after, start + factor * mean, rtol=0, atol=1e-12)
        assert logged == pytest.approx({"fedexp/factor": factor})
    default, _ = step_by_hand(FedExP(), start, deltas, SIZES)
    assert np.array_equal(default, step_by_hand(FedExP(weighting="uniform"), start, deltas, SIZES)[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_where_the_maximum_is_one_it_is_uniform_fedavg_to_the_bit(dtype: Any) -> None:
    start, deltas = (part.astype(dtype) for part in problem())
    alike = deltas[:1] + dtype(0.1) * deltas
    for rows in (alike, deltas[:1], np.zeros_like(deltas)):
        sizes = SIZES[: len(rows)]
        after, logged = step_by_hand(FedExP(), start, rows, sizes)
        assert logged == {"fedexp/factor": 1.0}
        assert np.array_equal(after, step_by_hand(FedAvg(weighting="uniform"), start, rows, sizes)[0])
    assert step_by_hand(FedExP(), start, deltas, SIZES)[1]["fedexp/factor"] > 1


def test_a_mask_goes_over_the_longer_step_and_before_the_rule_it_lengthens_it() -> None:
    start, deltas = problem()
    agreed = np.abs(np.sign(deltas).mean(axis=0)) >= 0.5
    mean, square = deltas.mean(axis=0), (deltas**2).sum() / 4
    mask = SignAgreement(0.5, binary=True)
    after, _ = step_by_hand(FedExP(mask=mask), start, deltas, SIZES)
    np.testing.assert_allclose(after, start + agreed * mean * square / (2 * mean @ mean), rtol=0, atol=1e-12)
    before, _ = step_by_hand(FedExP(mask=mask, apply="before"), start, deltas, SIZES)
    left = agreed * mean
    np.testing.assert_allclose(before, start + left * square / (2 * left @ left), rtol=0, atol=1e-12)


class Noting(Classifier):
    """Keeps the weights that it is validated and tested with, by round."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.shown: dict[str, list[Tensor]] = {"val": [], "test": []}

    def now(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters()]).clone()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.shown["val"].append(self.now())
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.shown["test"].append(self.now())


def data() -> Any:
    return federated_data(6, 20, 11, test_dataset=points(12, seed=2))


def iterates(folder: Path, rounds: int) -> list[Tensor]:
    """w after each round, of runs that end there."""
    found = [Noting().now()]
    for last in range(1, rounds + 1):
        trainer = federated_trainer(folder, FedExP(evaluate="last"), max_rounds=last)
        trainer.fit(Noting(), data())
        found.append(trainer.weights.clone())
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_model_that_is_evaluated_is_the_mean_of_the_last_two_iterates(engine: Any, tmp_path: Path) -> None:
    """A mistake of others: no averaging, so that the figures are those of an iterate that swings."""
    w, module = iterates(tmp_path, 3), Noting()
    trainer = federated_trainer(tmp_path, FedExP(), max_rounds=3, engine=engine, check_test_every_n_rounds=1)
    trainer.fit(module, data())
    torch.testing.assert_close(trainer.weights, w[3], rtol=0, atol=1e-6)  # clients start from the iterates
    means = [w[0], *((one + other) / 2 for one, other in zip(w, w[1:], strict=False))]
    for shown in module.shown.values():
        assert len(shown) == 4
        for found, mean in zip(shown, means, strict=True):
            torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(module.now(), means[-1], rtol=0, atol=1e-6)
    assert (means[-1] - w[3]).abs().max() > 1e-4
    trainer.validate(module, data())
    assert torch.equal(module.shown["val"][-1], module.now())


def test_the_mean_is_saved_as_the_model_and_a_resumed_run_goes_on_from_the_iterate(tmp_path: Path) -> None:
    def run(name: str, rounds: int) -> tuple[Any, Noting]:
        module = Noting()
        trainer = federated_trainer(tmp_path / name, FedExP(), max_rounds=rounds, enable_checkpointing=True)
        trainer.logger_choice = []
        trainer.fit(module, data(), ckpt_path="last")
        return trainer, module

    whole, wanted = run("whole", 4)
    first, module = run("parts", 2)
    saved = torch.load(first.run.checkpoints / "last.ckpt", weights_only=True)
    names = [name for name, _ in module.named_parameters()]
    for state, vector in (("state_dict", module.now()), ("current_model_state", first.weights)):
        assert torch.equal(torch.cat([saved[state][name].flatten() for name in names]), vector), state
    parts, resumed = run("parts", 4)
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(resumed.now(), wanted.now())
    assert not torch.equal(resumed.now(), parts.weights)


def test_who_saves_while_the_mean_is_shown_saves_the_iterate_beside_it(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    module = Noting()
    trainer = federated_trainer(tmp_path, FedExP(), Saves(), max_rounds=2, enable_checkpointing=True)
    trainer.fit(module, data())
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    vectors = [
        torch.cat([saved[state][name].flatten() for name, _ in module.named_parameters()])
        for state in ("state_dict", "current_model_state")
    ]
    assert torch.equal(vectors[1], trainer.weights)
    assert torch.equal(vectors[0], module.now())
    assert not torch.equal(*vectors)


def test_the_last_iterate_can_be_shown_instead(tmp_path: Path) -> None:
    module = Noting()
    trainer = federated_trainer(tmp_path, FedExP(evaluate="last"), max_rounds=2)
    trainer.fit(module, data())
    assert torch.equal(module.now(), trainer.weights)
    assert torch.equal(module.shown["val"][-1], trainer.weights)
