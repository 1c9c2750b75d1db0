"""What happens to updates on their way: codecs of ten lines, the bytes they say, their streams and their order."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed import callbacks as package
from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks import QSGD, ClipUpdates, Payload
from lightning_fed.client_algorithms import SCAFFOLD
from tests.callbacks.payloads import Noise, RandomK, TopK
from tests.parts import Classifier, built, federated_data, federated_trainer

EVENLY = FedAvg(weighting="uniform")
SIZE = sum(parameter.numel() for parameter in built(Classifier).parameters())


def fit(folder: Path, *callbacks: Any, engine: str = "sequential", **options: Any) -> FederatedTrainer:
    trainer = federated_trainer(folder, *callbacks, engine=engine, max_rounds=3, logger=[], **options)
    trainer.fit(built(Classifier), federated_data(12, 9, 5))
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([TopK(None)], []),
        ([RandomK(10**6)], []),
        ([package.TopK(1.0)], []),
        ([package.RandomK(1.0)], []),
        ([EVENLY, ClipUpdates(0.01), Noise(0.0)], [EVENLY, ClipUpdates(0.01)]),
    ],
    ids=[
        "top-k at k = d is FedAvg",
        "random-k at k = d is FedAvg",
        "all of TopK is FedAvg",
        "all of RandomK is FedAvg",
        "noise of 0 is clipping",
    ],
)
def test_limits_to_the_bit(tmp_path: Path, one: Any, other: Any, engine: str) -> None:
    first, second = (fit(tmp_path, *payloads, engine=engine) for payloads in (one, other))
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.weights, fit(tmp_path, ClipUpdates(1e-3), engine=engine).weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_an_update_says_its_bytes(tmp_path: Path, engine: str) -> None:
    whole, few = (fit(tmp_path, SCAFFOLD(), *payloads, engine=engine) for payloads in ([], [TopK(2)]))
    entered = 3 * 3  # clients and rounds; SCAFFOLD sends a vector besides
    assert whole.totals["comm/bytes_up"] == entered * 2 * 4 * SIZE
    assert few.totals["comm/bytes_up"] == entered * (4 * SIZE + 16)
    assert few.totals["comm/bytes_down"] == whole.totals["comm/bytes_down"]


def test_halves_work_in_order_and_back(tmp_path: Path) -> None:
    seen: list[str] = []

    class Notes(Payload):
        def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            seen.append(f"{type(self).__name__} {update.client.id}")

        def decode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            seen.append(f"{type(self).__name__} mean")

    class More(Notes):
        pass

    trainer = federated_trainer(tmp_path, Notes(), More(), max_rounds=1)
    trainer.fit(built(Classifier), federated_data(12, 9))
    assert seen == ["Notes 0", "More 0", "Notes 1", "More 1", "More mean", "Notes mean"]


class Packs(Payload):
    """Sends what it is given."""

    def __init__(self, **packed: Any) -> None:
        self.packed = packed

    def encode(self, trainer: Any, pl_module: Any, update: Any) -> Any:
        return {"delta": update.delta.clone(), **self.packed}

    def unpack(self, trainer: Any, pl_module: Any, client: Any, packed: Any) -> Any:
        assert all(isinstance(part, torch.Tensor) for part in packed.values())
        return packed["delta"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("packed", "more"),
    [
        ({}, 0),
        ({"halves": torch.zeros(5, dtype=torch.float16)}, 10),
        ({"places": (torch.tensor([0, 4809]), 13)}, 4),
        ({"signs": (torch.ones(9, dtype=torch.bool), 1)}, 2),
        ({"bytes": torch.zeros(3, dtype=torch.uint8), "nothing": (torch.zeros(0, dtype=torch.int64), 5)}, 3),
    ],
)
def test_what_is_packed_is_counted(tmp_path: Path, packed: Any, more: int, engine: str) -> None:
    plain, trainer = fit(tmp_path, engine=engine), fit(tmp_path, Packs(**packed), engine=engine)
    assert trainer.totals["comm/bytes_up"] == 3 * 3 * (4 * SIZE + more)
    assert torch.equal(trainer.weights, plain.weights)


@pytest.mark.parametrize("values", [torch.tensor([8]), torch.tensor([-1]), torch.tensor([0.5])])
def test_bits_that_do_not_hold_the_values_are_refused(tmp_path: Path, values: Any) -> None:
    with pytest.raises(FederatedError, match="Expected 'level' of Packs to be integers of 3 bits"):
        fit(tmp_path, Packs(level=(values, 3)))


def test_what_is_packed_has_a_servers_half(tmp_path: Path) -> None:
    class Half(Packs):
        unpack = Payload.unpack  # type: ignore[assignment]  # as if it were not there

    with pytest.raises(FederatedError, match="Expected Half, whose `encode` returns tensors, to have an `unpack`"):
        fit(tmp_path, Half())


@pytest.mark.parametrize(
    "others",
    [
        [TopK(2), RandomK(2)],
        [RandomK(2), TopK(2)],
        [ClipUpdates(1.0), Packs(), TopK(2)],
        [package.TopK(), QSGD()],
        [QSGD(), ClipUpdates(1.0), package.RandomK()],
    ],
)
def test_a_codec_after_another_is_refused(tmp_path: Path, others: Any) -> None:
    with pytest.raises(FederatedError, match="Expected one payload that codes updates, got"):
        fit(tmp_path, *others)


@pytest.mark.parametrize("callbacks", [[RandomK(4)], [EVENLY, package.TopK(0.2), ClipUpdates(0.1), Noise(1.0)]])
def test_streams_are_the_same_in_both_engines_and_after_resume(tmp_path: Path, callbacks: Any) -> None:
    one, other = (fit(tmp_path, *callbacks, engine=engine) for engine in ("sequential", "vectorized"))
    assert torch.allclose(one.weights, other.weights, rtol=0, atol=1e-6)
    keeps = {"enable_checkpointing": True, "name": "kept"}
    for rounds in (1, 3):
        trainer = federated_trainer(tmp_path, *callbacks, engine="sequential", max_rounds=rounds, logger=[], **keeps)
        trainer.fit(built(Classifier), federated_data(12, 9, 5), ckpt_path="last" if rounds > 1 else None)
    assert torch.equal(trainer.weights, one.weights)


def test_a_stream_depends_on_round_client_class_and_seed_alone(tmp_path: Path) -> None:
    found: dict[tuple[Any, ...], list[float]] = {}

    class Draws(Payload):
        def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            for client in (update.client, None):
                drawn = [torch.rand(2, generator=self.stream(trainer, client)).tolist() for _ in range(2)]
                assert drawn[0] == drawn[1]
                key = (trainer.seed, type(self).__name__, trainer.round, client and client.id)
                assert found.setdefault(key, drawn[0]) == drawn[0]

    class Others(Draws):
        pass

    for seed in (0, 1):
        fit(tmp_path, Draws(), Others(), seed=seed)
    fit(tmp_path, Others(), engine="vectorized", clients_per_round=2)
    assert len(found) == 2 * 2 * 3 * 4 == len(set(map(tuple, found.values())))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("half", ["encode", "decode"])
@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()])  # noqa: NPY002
def test_draws_from_global_streams_are_refused(tmp_path: Path, draw: Any, half: str, engine: str) -> None:
    class Draws(Payload):
        def encode(self, *args: Any) -> None:
            draw() if half == "encode" else None

        def decode(self, *args: Any) -> None:
            draw() if half == "decode" else None

    with pytest.raises(FederatedError, match=r"Expected Draws to draw from `self.stream\(trainer, client\)`"):
        fit(tmp_path, Draws(), engine=engine)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_scratch_is_each_clients_own(tmp_path: Path, engine: str) -> None:
    class Keeps(Payload):
        stacks = True

        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            self.scratch("id", trainer.weights).fill_(client.id)

        def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            assert (self.scratch("id", update.delta) == update.client.id).all()

    keeps = Keeps()
    fit(tmp_path, keeps, engine=engine)
    assert "_vectors" not in vars(keeps)


def test_each_payload_once(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="Expected each callback once, got TopK twice"):
        federated_trainer(tmp_path, TopK(1), TopK(2))
