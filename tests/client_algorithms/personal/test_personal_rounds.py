"""Personal parameters in both engines, beside every client algorithm, against loops by hand and one another."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import CGW, FedAvg, FedDynServer, FedGMA, FedNova, QFedAvg
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.callbacks.diagnostics import GradientDissimilarity, UpdateAgreement
from lightning_fed.client_algorithms import (
    SCAFFOLD,
    ClientAlgorithm,
    FedBN,
    FedCM,
    FedDyn,
    FedGA,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    MimeLite,
    PersonalParameters,
    StatelessSCAFFOLD,
)
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import Tolerance
from lightning_fed.masks import SignAgreement
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms.client_runs import fit as taped
from tests.client_algorithms.client_runs import make_data, make_trainer
from tests.client_algorithms.known_clients import SIZES
from tests.client_algorithms.personal.personal_runs import (
    BIAS,
    COHORTS,
    LAST,
    NORM,
    PROBLEM,
    ROUNDS,
    Own,
    assert_same,
    run,
)
from tests.client_algorithms.personal_loops import personal

KINDS = {
    "FedBN": (FedBN, NORM),
    "FedPer": (FedPer, LAST),
    "LGFedAvg": (LGFedAvg, NORM),
    "PersonalParameters": (partial(PersonalParameters, ["layer.bias"]), BIAS),
}
BESIDE: dict[str, tuple[Any, Any, Any]] = {
    "FedProx": (partial(FedProx, 0.7), partial(hand.FedProxByHand, mu=0.7), FedAvg),
    "SCAFFOLD": (SCAFFOLD, partial(hand.ScaffoldByHand, option="II"), FedAvg),
    "SCAFFOLD I": (partial(SCAFFOLD, "I"), partial(hand.ScaffoldByHand, option="I"), FedAvg),
    "StatelessSCAFFOLD": (StatelessSCAFFOLD, hand.StatelessByHand, FedAvg),
    "FedCM": (partial(FedCM, 0.3), partial(hand.FedCMByHand, alpha=0.3), FedAvg),
    "MimeLite": (partial(MimeLite, 0.6), partial(hand.MimeLiteByHand, beta=0.6), FedAvg),
    "FedGA": (partial(FedGA, 0.3), partial(hand.FedGAByHand, beta=0.3), FedAvg),
    "FedGA step": (partial(FedGA, 0.3, "step"), partial(hand.FedGAByHand, beta=0.3, form="step"), FedAvg),
    "FedDyn": (
        FedDyn,
        partial(hand.FedDynByHand, alpha=0.4),
        partial(FedDynServer, alpha=0.4),
    ),
    "FedNova": (partial(FedProx, 0.7), partial(hand.FedNovaByHand, mu=0.7), FedNova),
}


@pytest.mark.parametrize(("optimizer", "clip"), [("momentum", 0.2), ("adam", None)])
@pytest.mark.parametrize("kind", [*KINDS, "FedRep"])
@pytest.mark.quick(2)
def test_both_engines_train_what_a_loop_by_hand_trains(kind: str, optimizer: str, clip: Any) -> None:
    """A client's part is in the norm that its gradient is clipped by: both are stepped."""
    make, mask = {**KINDS, "FedRep": (partial(FedRep, head_epochs=2), LAST)}[kind]
    head = {"head": 2, "epochs": True} if kind == "FedRep" else {}
    loop = personal(hand.FedAvgByHand, PROBLEM, mask, optimizer, clip=clip, **head)
    options: Any = {"local_epochs": 3, "gradient_clip_val": clip}
    tape = taped(PROBLEM, FedAvg(), make(), optimizer=optimizer, max_rounds=ROUNDS, cohorts=COHORTS, **options)
    alone, many = (run(make(), optimizer=optimizer, engine=e, **options) for e in ("sequential", "vectorized"))
    for batches, weights, own in zip(tape.batches, alone.weights, alone.values, strict=True):
        np.testing.assert_allclose(weights, loop.run(batches), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, [loop.problem.value(i) for i in range(len(SIZES))], rtol=1e-9, atol=1e-11)
    assert np.abs(alone.values[-1][3] - PROBLEM.start[mask]).max() > 0.01
    assert_same(alone, many)


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.quick(3)
def test_other_algorithms_see_the_shared_part_alone(beside: str) -> None:
    make, by_hand, server = BESIDE[beside]
    rule = partial(server, weighting="uniform")
    loop = personal(by_hand.func if isinstance(by_hand, partial) else by_hand, PROBLEM, BIAS, weighting="uniform",
                    **(by_hand.keywords if isinstance(by_hand, partial) else {}))  # fmt: skip
    parts = (lambda: PersonalParameters(["layer.bias"])), make
    options: Any = {"local_epochs": 2, "max_rounds": ROUNDS}
    tape = taped(PROBLEM, rule(), *(part() for part in parts), cohorts=COHORTS, **options)
    alone, many = (run(rule(), *(part() for part in parts), engine=e, **options) for e in ("sequential", "vectorized"))
    for batches, weights, own in zip(tape.batches, alone.weights, alone.values, strict=True):
        np.testing.assert_allclose(weights, loop.run(batches), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, [loop.problem.value(i) for i in range(len(SIZES))], rtol=1e-9, atol=1e-11)
    assert_same(alone, many)


@pytest.mark.parametrize(
    "make", [CGW, partial(FedGMA, gradient_at="end"), partial(FedGMA, gradient_at="last_step"), QFedAvg]
)
def test_rules_that_ask_for_gradients_agree_in_both_engines(make: Any) -> None:
    """They are those of the shared part where the client's own is."""
    alone, many = (run(make(), FedPer(), engine=engine) for engine in ("sequential", "vectorized"))
    assert_same(alone, many)


def test_gradients_over_all_data_are_taken_at_each_clients_own() -> None:
    """g_i = ∇_u f_i(u, v_i), shape (d,), for those drawn; those of a diagnostic that looks at all too."""
    found = []

    class Reads(FederatedCallback):
        def start_gradients(self, round: int) -> Any:
            return "cohort"

        def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            found.append({c.id: row.numpy().copy() for c, row in zip(
                trainer.start_gradients.clients, trainer.start_gradients.rows, strict=True)})  # fmt: skip

    tape = taped(PROBLEM, FedPer(), Reads(), GradientDissimilarity(over="all"), max_rounds=3, cohorts=COHORTS)
    loop = personal(hand.FedAvgByHand, PROBLEM, LAST)
    for batches, rows in zip(tape.batches, found, strict=True):
        for client, row in rows.items():
            np.testing.assert_allclose(row, loop.problem.full(loop.w, client), rtol=1e-9, atol=1e-12)
        loop.run(batches)
    assert run(FedPer(), engine="vectorized").weights


def test_votes_of_a_mask_are_of_the_shared_part() -> None:
    """GMA over FedPer: a coordinate of w moves by its share of agreeing clients, and there are d of them."""
    tau, clients = 0.6, [i for i, size in enumerate(SIZES) if size]
    tape = taped(PROBLEM, FedAvg(mask=SignAgreement(tau)), LGFedAvg(), max_rounds=3, local_epochs=2)
    loop = personal(hand.FedAvgByHand, PROBLEM, NORM)
    sizes = np.array([SIZES[i] for i in clients], dtype=float)
    w = loop.w
    for batches, weights in zip(tape.batches, tape.weights, strict=True):
        loop.run(batches)
        deltas = np.array([loop.updates[i] for i in clients])
        assert deltas.shape == (len(clients), (~NORM).sum())
        agreement = np.abs(np.sign(deltas).mean(axis=0))
        w = w + np.where(agreement >= tau, 1.0, agreement) * (sizes / sizes.sum() @ deltas)
        np.testing.assert_allclose(weights, w, rtol=1e-9, atol=1e-12)
        loop.w = w


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_without_a_personal_part_it_is_fedavg_to_the_bit(engine: Any, optimizer: str) -> None:
    plain, other = (run(*parts, engine=engine, optimizer=optimizer) for parts in ((), (FedPer(last=0),)))
    assert all(np.array_equal(a, b) for a, b in zip(plain.weights, other.weights, strict=True))
    assert other.values[-1].shape == (len(SIZES), 0)


def test_clipping_and_diagnostics_see_the_shared_part_alone() -> None:
    """The bound of ClipUpdates is one of ‖δ_i‖, shape (d,), and no layer of a client's own is named."""
    bound = 0.01
    tape = taped(PROBLEM, FedAvg(), FedPer(), ClipUpdates(bound), UpdateAgreement(by_layer=True), max_rounds=1)
    loop = personal(hand.FedAvgByHand, PROBLEM, LAST)
    loop.run(tape.batches[0])
    sizes = {i: SIZES[i] for i in loop.updates}
    moved = sum(sizes[i] * delta * min(1, bound / np.linalg.norm(delta)) for i, delta in loop.updates.items()) / sum(
        sizes.values()
    )
    np.testing.assert_allclose(tape.weights[0], loop.problem.start + moved, rtol=1e-6)
    trainer = make_trainer(FedPer(), UpdateAgreement(by_layer=True), max_rounds=1, precision="64-true")
    trainer.fit(PROBLEM.module(PROBLEM.start), make_data(PROBLEM))
    named = {name for name in trainer.logged_metrics if "agreement" in name}
    assert any("scale" in name for name in named)
    assert not any("layer.weight" in name or "layer.bias" in name for name in named)


def test_without_a_personal_part_the_vectors_are_the_same_objects() -> None:
    seen = []

    class Looks(FederatedCallback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            vector = trainer.vector
            seen.append(vector.data is vector.all_data and vector.grad is vector.all_grad)
            assert vector.parameters == vector.all_parameters

    taped(PROBLEM, Looks())
    assert seen
    assert all(seen)


def test_what_diverges_in_the_personal_part_alone_is_left_out() -> None:
    class Spoils(FederatedCallback):
        stacks = True

        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            if client.id == 1 and client.round == 2:
                trainer.vector.personal.fill_(float("nan"))

    class Breaks(PROBLEM.module):  # type: ignore[misc, name-defined]  # the same with an output that NaN does not reach
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.scale(batch[1])
            return (hidden**2).mean() + 0.0 * torch.nan_to_num(self.layer(hidden.detach())).mean()

    for engine in ("sequential", "vectorized"):
        own = Own()
        trainer = make_trainer(
            FedPer(), Spoils(), own, max_rounds=2, precision="64-true", engine=engine,
            tolerance=Tolerance(max_diverged=0.5),
        )  # fmt: skip
        module = Breaks(PROBLEM.start)
        with pytest.warns(UserWarning, match="Client 1 diverged in round 2"):
            trainer.fit(module, make_data(PROBLEM))
        assert trainer.logged_metrics["clients/diverged"] == 1
        assert np.isfinite(own.weights[-1]).all()
        assert np.isfinite(own.values[-1]).all()


def test_the_server_evaluates_with_the_initial_values() -> None:
    own = run(FedPer())
    for weights, shown in zip(own.weights, own.shown, strict=True):
        assert np.array_equal(np.concatenate([shown["scale.weight"], shown["scale.bias"]]), weights)
        last = np.concatenate([shown["layer.weight"].ravel(), shown["layer.bias"]])
        assert np.array_equal(last, PROBLEM.start[LAST])


def test_a_client_begins_where_it_ended(tmp_path: Path) -> None:
    """It starts from the server's part and its own, and `load_own` puts the same in."""
    starts: dict[tuple[int, int], np.ndarray] = {}

    class Starts(FederatedCallback):
        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            starts[client.round, client.id] = trainer.vector.personal.numpy().copy()
            assert torch.equal(trainer.vector.data, trainer.weights)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            (method,) = [part for part in trainer.callbacks if isinstance(part, FedPer)]
            assert method.has_own_model
            method.load_own(trainer, 3)
            starts[-trainer.round, 3] = trainer.vector.personal.numpy().copy()
            trainer.train_state.load_global_model()

    own = run(FedPer(), Starts())
    for round, cohort in enumerate(COHORTS, start=1):
        for client in set(cohort) - {2}:
            former = own.values[round - 2][client] if round > 1 else PROBLEM.start[LAST]
            assert np.array_equal(starts[round, client], former)
        assert np.array_equal(starts[-round, 3], own.values[round - 1][3])


class ReadsPersonal(ClientAlgorithm):
    """Adds up the personal weights that each step finds."""

    stacks = True

    def __init__(self) -> None:
        self.total = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.total += float(trainer.vector.personal.sum())


def test_a_step_of_many_clients_shows_what_each_keeps() -> None:
    totals = []
    for engine in ("sequential", "vectorized"):
        reads = ReadsPersonal()
        run(FedPer(), reads, engine=engine)
        totals.append(reads.total)
    assert abs(totals[0]) > 1e-3
    np.testing.assert_allclose(*totals, rtol=1e-9)
