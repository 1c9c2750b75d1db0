"""What a round asks of a device: no wait for a client or a step, a copy for a client at most, weights as on the CPU."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.aggregators import FedAdam, FedAvg, FedGMA
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, FedProx, GradAlign, PersonalParameters
from lightning_fed.core import seeding
from lightning_fed.core.devices import to_device
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import ClientRotation, CropFlip, FederatedDataModule
from lightning_fed.engines import choice as rule
from lightning_fed.engines import client_batches, trial
from lightning_fed.masks import SignAgreement
from lightning_fed.models import ImageClassifier, LeNet, LogisticRegression
from tests.engines.pretended_device import DEVICE, PretendedDevice
from tests.parts import BySizes

SIZES = (12, 7, 15, 9, 11)
ENGINES = ("sequential", "vectorized")
METHODS: dict[str, Callable[[], list[Any]]] = {
    "FedAvg": lambda: [FedAvg()],
    "FedProx, SCAFFOLD, FedAdam": lambda: [FedProx(mu=0.1), SCAFFOLD(), FedAdam()],
    "FedGA, a mask": lambda: [FedGA(), FedAvg(mask=SignAgreement())],
    "FedGMA": lambda: [FedGMA(gradient_at="end")],
    "personal, SCAFFOLD": lambda: [PersonalParameters(["*bias"]), SCAFFOLD()],
}


class Rounds(FederatedCallback):
    """Notes what was counted when each round began, and when the last one had ended."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts, self.marks = counts, list[Counter[str]]()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.marks.append(self.counts.copy())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.marks.append(self.counts.copy())


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 10))


def on_cpu(trainer: FederatedTrainer) -> None:
    """Leaves a trainer as it is."""


def on_device(trainer: FederatedTrainer) -> None:
    """Lets a trainer train on the pretended device."""
    strategy: Any = trainer.fabric.strategy
    strategy._root_device = DEVICE
    strategy.accelerator.setup_device = lambda device: None  # that of the CPU refuses others


def fit(
    folder: Path,
    net: Callable[[], nn.Module],
    engine: str,
    callbacks: list[Any],
    place: Callable[[FederatedTrainer], None] = on_device,
    clients: int = 2,
    epochs: int | None = 1,
    side: int = 8,
    module: ImageClassifier | None = None,
    of_data: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = SIZES,
    **options: Any,
) -> FederatedTrainer:
    """Trains two rounds of clients with batches of 5 samples and less."""
    torch.manual_seed(0)
    sizes, make = sizes[:clients], partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    module = module or ImageClassifier(net(), optimizer=make)
    data = TensorDataset(torch.rand(sum(sizes), 1, side, side), torch.randint(10, (sum(sizes),)))
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "local_epochs": epochs,
        "memory_format": "preserve",
        **options,
    }
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=2, engine=engine, callbacks=callbacks, default_root_dir=str(folder), seed=1,
        enable_progress_bar=False, **options,
    )  # fmt: skip
    place(trainer)
    trainer.fit(module, FederatedDataModule(data, BySizes(*sizes), clients, batch_size=5, **(of_data or {})))
    return trainer


def a_round(folder: Path, *args: Any, kernels: bool = False, **options: Any) -> tuple[Counter[str], Tensor]:
    """Returns what the second round asked of the device, or its kernels, and the weights that the run ends with."""
    with PretendedDevice() as device:
        rounds = Rounds(device.kernels if kernels else device.counts)
        *first, callbacks = args
        trainer = fit(folder, *first, [rounds, *callbacks], **options)
        _, before, after = rounds.marks
        return after - before, trainer.weights.cpu()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("net", "side", "method"),
    [
        (LeNet, 28, "FedAvg"),
        (normed, 8, "FedAvg"),
        *((partial(LogisticRegression, 64), 8, method) for method in METHODS),
    ],
    ids=["LeNet", "BatchNorm", *METHODS],
)
@pytest.mark.quick(4)
def test_no_client_and_no_step_waits_or_copies_more_than_an_order(
    tmp_path: Path, net: Callable[[], nn.Module], side: int, method: str, engine: str
) -> None:
    few, weights = a_round(tmp_path, net, engine, METHODS[method](), side=side)
    assert few["wait"] <= 4  # the last to see that `Rounds` wrote nothing to the module
    # A pass over all data of many clients sends its own rows, and who is in which lane.
    passes = {"FedGA, a mask": 2, "FedGMA": 3} if engine == "vectorized" else {}
    orders = (2, 6) if engine == "sequential" else (1, 1)  # one for each client and epoch, or one list of all
    assert few.pop("to") == orders[0] + passes.get(method, 0)
    many, _ = a_round(tmp_path, net, engine, METHODS[method](), side=side, clients=3, epochs=2)
    assert many.pop("to") == orders[1] + passes.get(method, 0)
    assert many == few
    expected = fit(tmp_path, net, engine, METHODS[method](), on_cpu, side=side).weights
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "CropFlip": ({"augmentation": CropFlip(1)}, {}),
    "rotation": ({"skew": ClientRotation()}, {}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "CropFlip, bf16-true": ({"augmentation": CropFlip(1)}, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.quick(2)
def test_a_step_of_more_clients_takes_no_more_kernels_and_copies(tmp_path: Path, case: str) -> None:
    of_data, options = STEPS[case]
    options = {"of_data": of_data, "sizes": (10,) * 6, **options}

    def count(clients: int, epochs: int, kernels: bool) -> int:
        given = {"clients": clients, "epochs": epochs, "kernels": kernels, **options}
        found, _ = a_round(tmp_path, partial(LogisticRegression, 64), "vectorized", [FedAvg()], **given)
        return sum(found.values()) if kernels else found["to"]

    two, six = (count(clients, 2, True) - count(clients, 1, True) for clients in (2, 6))
    assert two == six
    assert two <= 2 * 62, "of a local epoch of two steps"
    assert count(6, 2, False) == count(2, 1, False) <= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_ten_norms_takes_few_kernels(tmp_path: Path, engine: str) -> None:
    """Those of its steps apart: of the buffers they are five."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), *(nn.BatchNorm1d(64) for _ in range(10)), nn.Linear(64, 10))

    def count(clients: int, epochs: int) -> int:
        given = {"clients": clients, "epochs": epochs, "sizes": (10,) * clients}
        found, _ = a_round(tmp_path, net, engine, [FedAvg()], kernels=True, **given)
        return sum(found.values())

    # A round less its steps, which are those that a second epoch adds.
    two, four = (2 * count(clients, 1) - count(clients, 2) for clients in (2, 4))
    assert four - two <= 2 * {"sequential": 15, "vectorized": 7}[engine]


def test_what_is_not_on_the_device_is_refused() -> None:
    with PretendedDevice() as device:
        here = torch.ones(3, device=DEVICE)
        assert (here * 2.0).sum().item() == 6
        assert here[1:].cpu().tolist() == [1, 1]
        assert device.counts == {"wait": 2}
        with pytest.raises(RuntimeError, match="all tensors on one device"):
            here + torch.ones(3)
        here.add_(torch.ones(3).to(DEVICE))
        assert device.counts["to"] == 1
        with pytest.raises(RuntimeError, match="copied"):
            here[[0, 2]].sum().item()


class Spoils(FederatedCallback):
    """Makes NaN of what some clients send in the second round, and may raise an exception for another one."""

    stacks = True

    def __init__(self, *clients: int, fails_for: int | None = None) -> None:
        self.clients, self.fails_for, self.ended = clients, fails_for, 0
        self.round_ends: list[int] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if trainer.round == 2:
            self.ended += 1
            if update.client.id in self.clients:
                update.delta[3] = torch.nan
            if update.client.id == self.fails_for:
                raise KeyError("of the user's own")

    def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.round_ends.append(trainer.round)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("spoils", "ended"), [(Spoils(1, 2), 4), (Spoils(1, fails_for=2), 3)], ids=["two diverge", "another one fails"]
)
def test_who_diverged_is_said_at_the_rounds_end(tmp_path: Path, engine: str, spoils: Spoils, ended: int) -> None:
    spoils = Spoils(*spoils.clients, fails_for=spoils.fails_for)
    with PretendedDevice(), pytest.raises(FederatedError, match="client 1 diverged in round 2"):
        fit(tmp_path, partial(LogisticRegression, 64), engine, [spoils, FedAvg()], clients=4, logger=[])
    assert spoils.ended == ended
    assert spoils.round_ends == [1]
    (rows,) = tmp_path.rglob("metrics.csv")
    assert len(rows.read_text().splitlines()) == 3  # a header, and the rounds before


class Faults(Spoils):
    """Raises what a device says of a fault, after which nothing of it can be read."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        try:
            super().on_client_end(trainer, pl_module, update)
        except KeyError as error:
            raise RuntimeError("CUDA error: unspecified launch failure") from error


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_of_the_device_is_what_the_user_sees(tmp_path: Path, engine: str) -> None:
    with PretendedDevice(), pytest.raises(RuntimeError, match="unspecified launch failure"):
        fit(tmp_path, partial(LogisticRegression, 64), engine, [Faults(1, fails_for=2), FedAvg()], clients=4)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_that_may_diverge_is_left_out_at_once(tmp_path: Path, engine: str) -> None:
    spoils = Spoils(1)
    net = partial(LogisticRegression, 64)
    with PretendedDevice():
        with pytest.warns(UserWarning, match="Client 1 diverged in round 2"):
            trainer = fit(tmp_path, net, engine, [spoils, FedAvg()], clients=4, max_diverged=0.25)
        assert trainer.weights.isfinite().all().item()
    assert spoils.round_ends == [1, 2]


class OneGradientIsNone(ImageClassifier):
    """Has a loss that is not a number where the third client's gradient over its data is taken."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        client: Any = self.trainer.client  # type: ignore[attr-defined]  # of our trainer
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if client.id == 2 and client.round == 2 else loss


def test_a_gradient_that_is_not_finite_is_named_before_what_it_spoils(tmp_path: Path) -> None:
    module = OneGradientIsNone(LogisticRegression(64), optimizer=partial(torch.optim.SGD, lr=0.1))
    net = partial(LogisticRegression, 64)
    with PretendedDevice(), pytest.raises(FederatedError, match="client 2 diverged in round 2"):
        fit(tmp_path, net, "sequential", [FedGA(), FedAvg()], clients=3, module=module)


def test_rows_of_a_first_batch_are_sent_as_those_of_training_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(rows: Tensor, device: torch.device) -> Tensor:
        sent.append(len(rows))
        return to_device(rows, device)

    monkeypatch.setattr(client_batches, "to_device", send)
    with PretendedDevice():
        fit(
            tmp_path,
            partial(LogisticRegression, 64),
            "sequential",
            [GradAlign(over="batch"), FedAvg()],
            local_steps=1,
            epochs=None,
        )
    assert sorted(sent) == sorted(2 * [5, 5, *SIZES[:2]])


STREAM = SimpleNamespace(of_device=torch.Generator())


class DrawsOnDevice(ImageClassifier):
    """Draws from the stream of the device from the second round on; a generator stands for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.round > 1:
            loss = loss * (1 + torch.rand((), generator=STREAM.of_device).to(DEVICE))
        return loss


@pytest.mark.usefixtures("few_lanes_pay")
def test_draws_from_the_stream_of_a_device_are_noticed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rule._MOST_WEIGHTS, DEVICE.type, 10_000)
    monkeypatch.setattr(seeding, "seed_devices", STREAM.of_device.manual_seed)
    monkeypatch.setattr(trial, "device_streams", lambda: [STREAM.of_device.get_state()])
    found = []
    for engine in ("sequential", "auto"):
        torch.manual_seed(0)
        module = DrawsOnDevice(LogisticRegression(64), optimizer=partial(torch.optim.SGD, lr=0.1))
        with PretendedDevice():
            trainer = fit(tmp_path, partial(LogisticRegression, 64), engine, [FedAvg()], clients=5, module=module)
            found.append((trainer.engine_choice, trainer.weights.cpu()))
    assert "draws random" in found[1][0]["reason"]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("few_lanes_pay")
@pytest.mark.parametrize(
    ("net", "reason"), [(normed, "Conv2d is not known to be quicker"), (partial(LogisticRegression, 64), "small")]
)
def test_auto_takes_the_same_layers_on_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: Callable[[], nn.Module], reason: str
) -> None:
    monkeypatch.setitem(rule._MOST_WEIGHTS, DEVICE.type, rule._MOST_WEIGHTS["cuda"])
    with PretendedDevice():
        choice = fit(tmp_path, net, "auto", [FedAvg()], clients=5).engine_choice
    assert choice is not None
    assert reason in choice["reason"]


@pytest.mark.usefixtures("few_lanes_pay")
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_auto_takes_half_precision_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setitem(rule._MOST_WEIGHTS, DEVICE.type, rule._MOST_WEIGHTS["cuda"])
    with PretendedDevice():
        found = fit(tmp_path, partial(LogisticRegression, 64), "auto", [FedAvg()], clients=5, precision=precision)
    assert found.engine_choice is not None
    assert "small" in found.engine_choice["reason"]


class SinglePrecision(PretendedDevice):
    """The device without float64, as MPS: it neither holds it nor makes it of what the CPU gets."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given, made = ([x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in ((args, kwargs), result))
        if any(x.dtype == torch.double for x in made) and any(x.device == DEVICE for x in (*given, *made)):
            raise TypeError(f"{func} makes float64 of a tensor of the device")
        return result


class LogsHits(ImageClassifier):
    """Logs an integer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/hits", (self(batch[0]).argmax(1) == batch[1]).sum(), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.quick(3)
def test_a_device_without_float64_trains_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, engine: str
) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_fed.") and hasattr(module, "wide_dtype"):
            monkeypatch.setattr(module, "wide_dtype", lambda of: torch.float32)
    with SinglePrecision():
        torch.manual_seed(0)
        logs = LogsHits(normed(), optimizer=partial(torch.optim.SGD, lr=0.1))
        trainer = fit(tmp_path, normed, engine, METHODS[method](), module=logs)
        assert trainer.weights.isfinite().all().item()
