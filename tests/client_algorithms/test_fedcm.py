"""FedCM: scale, add, clip, step, whatever the names; m by each client's own number of steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import AFL, FedAvg, FedDynServer, Krum
from lightning_fed.client_algorithms import SCAFFOLD, ClientAlgorithm, FedCM, FedDyn, FedProx, MimeLite
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Quadratic
from tests.parts import Classifier, federated_data, federated_trainer

ROUNDS: dict[str, Any] = {"max_rounds": 3, "local_epochs": 2}
NAMES = ["Aprox", "Zprox"]


def named(name: str) -> Any:
    """FedProx under a name before FedCM's or after it."""
    return type(name, (FedProx,), {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_beside_fedprox_it_is_scale_add_clip_step_whatever_the_names(name: str, clip: Any) -> None:
    """α g + (1 - α) m + μ (w_i - w), and only then the clipping."""
    problem = Quadratic()
    tape = fit(problem, FedAvg(), FedCM(0.3), named(name)(0.7), gradient_clip_val=clip, **ROUNDS)
    loop = hand.FedCMByHand(problem, alpha=0.3, mu=0.7, clip=clip)
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, loop.run(batches), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_names_change_no_bit(engine: Any, tmp_path: Path) -> None:
    def weights(name: str) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, FedCM(0.3), named(name)(0.7), max_rounds=3, engine=engine)
        trainer.fit(Classifier(), federated_data(6, 24, 10))
        return trainer.weights

    assert torch.equal(weights("Aprox"), weights("Zprox"))


def test_a_mistake_of_others_takes_the_number_of_steps_from_one_client() -> None:
    """FLS divides all updates by the first client's K; with unequal clients m is then another."""

    class Mistaken(hand.FedCMByHand):
        def server(self, steps: dict[int, int]) -> np.ndarray:
            return super().server(dict.fromkeys(steps, steps[min(steps)]))

    problem = Quadratic()
    tape = fit(problem, FedAvg(), FedCM(0.3), **ROUNDS, batch_size=2)
    right, wrong = (make(problem, alpha=0.3) for make in (hand.FedCMByHand, Mistaken))
    assert len({len(rows) for rows in tape.batches[0].values() if rows}) > 1
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, right.run(batches), rtol=1e-10, atol=1e-12)
        mistaken = wrong.run(batches)
    assert np.abs(mistaken - found).max() > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_at_1_it_is_fedavg_to_the_bit_and_engines_agree_else(engine: Any, tmp_path: Path) -> None:
    def weights(*algorithms: Any, **options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, *algorithms, max_rounds=3, **{"engine": engine, **options})
        trainer.fit(Classifier(), federated_data(6, 24, 10))
        return trainer.weights

    assert torch.equal(weights(FedCM(1.0)), weights())
    found = weights(FedCM(0.3))
    torch.testing.assert_close(found, weights(FedCM(0.3), engine="sequential"), rtol=1e-5, atol=1e-6)
    assert (found - weights()).abs().max() > 1e-3


@pytest.mark.parametrize("make", [lambda: FedCM(0.3), lambda: MimeLite(0.6)])
def test_the_momentum_is_saved_and_a_resumed_run_goes_on_with_it(make: Any, tmp_path: Path) -> None:
    def run(name: str, rounds: int) -> Any:
        torch.manual_seed(0)
        made = make()
        trainer = federated_trainer(tmp_path / name, made, max_rounds=rounds, enable_checkpointing=True)
        trainer.fit(Classifier(), federated_data(6, 24, 10), ckpt_path="last")
        return trainer, made

    whole, wanted = run("whole", 4)
    run("parts", 2)
    parts, found = run("parts", 4)
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(found.momentum, wanted.momentum)
    assert found.momentum.any()


class IdleInTheSecond(Classifier):
    """Client 1 takes no step in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer: Any = self.trainer
        idle = (trainer.round, trainer.client.id) == (2, 1)
        return None if idle else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [lambda: FedCM(0.3), lambda: MimeLite(0.6)])
def test_the_momentum_rests_in_a_round_that_leaves_the_model_as_it_is(make: Any, tmp_path: Path) -> None:
    """Four clients are too few for Krum: no step of the server, so no direction of it either."""

    class MomentumNotes(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append((trainer.weights.clone(), made.momentum.clone()))

    torch.manual_seed(0)
    kept, made = list[tuple[torch.Tensor, torch.Tensor]](), make()
    trainer = federated_trainer(tmp_path, made, Krum(1), MomentumNotes(), max_rounds=3)
    with pytest.warns(UserWarning, match="^Round 2 leaves the model as it is: 4 clients"):
        trainer.fit(IdleInTheSecond(), federated_data(8, 8, 8, 8, 8))
    (first, m), (second, same), (third, other) = kept
    assert torch.equal(second, first)
    assert torch.equal(same, m)
    assert not torch.equal(third, second)
    assert not torch.equal(other, m)


class SpoilsTheFirst(FederatedCallback):
    """Client 0 is left out."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.id == 0:
            update.delta.fill_(torch.nan)


def test_the_momentum_is_over_the_weights_that_the_round_had(tmp_path: Path) -> None:
    """AFL moves its weights in its step; those of the first round are uniform."""
    found = []
    for rule in (AFL(0.5), FedAvg(weighting="uniform")):
        torch.manual_seed(0)
        made = FedCM(0.3)
        trainer = federated_trainer(tmp_path, made, rule, SpoilsTheFirst(), max_diverged=0.5)
        trainer.fit(Classifier(), federated_data(8, 20, 12))
        assert made.momentum is not None
        found.append(made.momentum)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


class Scales(ClientAlgorithm):
    """Another that scales."""

    scales_gradient = True


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([Scales()], r"one client algorithm that scales the gradient, .* got FedCM and Scales"),
        ([SCAFFOLD()], r"FedCM without SCAFFOLD, whose terms"),
        ([FedDyn()], r"FedCM without FedDyn, whose terms"),
    ],
)
def test_what_cannot_go_with_it_is_refused(others: list[Any], message: str) -> None:
    server = FedDynServer(weighting="uniform") if isinstance(others[0], FedDyn) else FedAvg()
    with pytest.raises(FederatedError, match=message):
        fit(Quadratic(), server, FedCM(), *others)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_an_optimizer_without_a_distance_is_refused(optimizer: str) -> None:
    with pytest.raises(FederatedError, match=r"Expected SGD as the clients' optimizer, .*`--client`"):
        fit(Quadratic(), FedAvg(), FedCM(), optimizer=optimizer)


@pytest.mark.parametrize("alpha", [0.0, 1.1, float("nan")])
def test_bad_arguments_name_the_option(alpha: float) -> None:
    with pytest.raises(FederatedError, match=r"`--client\.alpha` of FedCM"):
        FedCM(alpha)


def test_a_validation_leaves_m_as_it_is(tmp_path: Path) -> None:
    module, data, algorithm = Classifier(), federated_data(6, 10), FedCM()
    trainer = federated_trainer(tmp_path, algorithm, max_rounds=2)
    trainer.fit(module, data)
    before = algorithm.state_dict()
    trainer.validate(module, data)
    assert torch.equal(algorithm.state_dict()["momentum"], before["momentum"])
