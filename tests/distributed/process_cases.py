"""What a run does, for one process and for two: each case returns what must not depend on their number."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset, random_split
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed import callbacks as package
from lightning_fed.aggregators import FedAdam, FedAvg, FedDGGA, FedGMA, FedNova
from lightning_fed.callbacks import QSGD, CentralDP, ClipUpdates, LocalDP
from lightning_fed.callbacks.diagnostics import (
    ClientEvaluation,
    FinalPictures,
    GradientDissimilarity,
    UpdateAgreement,
    UpdateGeometry,
)
from lightning_fed.client_algorithms import (
    APFL,
    DPSGD,
    SCAFFOLD,
    ClientAlgorithm,
    Ditto,
    FedBN,
    FedCM,
    FedGA,
    FedPer,
    FedRep,
    LocalOnly,
    PFedMe,
    Stale,
)
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.holdout import DivisionOptions
from lightning_fed.engines.vectorized import engine as vectorized
from lightning_fed.sampling import Arrivals, BernoulliAvailability, PoissonSampler, Stragglers, UnequalWork
from tests.callbacks.diagnostics.parts import KeepsTrained
from tests.callbacks.payloads import Noise, Poisson, RandomK, TopK
from tests.composition.client_parts import CLIENT_LIMITS, CLIENTS
from tests.composition.composition_parts import (
    BATCH,
    MASKED,
    MASKS,
    RULES,
    SIZES,
    Draws,
    Net,
    make_data,
)
from tests.engines.package_models import PACKAGE, SMALL
from tests.parts import BySizes, cover

Result = dict[str, Any]


class Shifted(Net):
    """Without the bias before BatchNorm, whose gradient is rounding alone, of which the sign would vote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Linear(5, 6, bias=False)


class NoNorms(Net):
    """Without BatchNorm, and without what it keeps of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        del self.center

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(x))
        return scores


def start(kind: type[Net] = Shifted, seed: int = 7) -> Net:
    torch.manual_seed(seed)
    return kind()


def fit(devices: int, *callbacks: Any, net: Net | None = None, data: Any = None, **options: Any) -> Result:
    """Trains three rounds in double precision; returns the model and what was logged last."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"max_rounds": 3, "seed": 3, "precision": "64-true", "default_root_dir": "not-written", **quiet, **options}
    calls = {name: given.pop(name) for name in ("ckpt_path",) if name in given}
    trainer = FederatedTrainer(accelerator="cpu", devices=devices, callbacks=list(callbacks), **given)
    net = start() if net is None else net
    trainer.fit(net, make_data("unequal") if data is None else data, **calls)
    logged = {name: value for name, value in trainer.metrics.callback.items() if not name.startswith("time/")}
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return {"weights": trainer.weights.clone(), "buffers": buffers, "logged": logged, "rounds": trainer.round}


def compose(devices: int, folder: Path, client: str, rule: str, mask: str = "none", **options: Any) -> Result:
    make_mask, local = MASKS[mask], {**CLIENTS, **CLIENT_LIMITS}[client]
    weighting = "uniform" if local.uniform else RULES[rule].weightings[0]
    options = local.options(**options)
    of_rule = {"weighting": weighting, **({"buffers": options.pop("buffers")} if "buffers" in options else {})}
    aggregator = RULES[rule].make(mask=None if make_mask is None else make_mask(), **of_rule)
    batch = sum(SIZES["unequal"]) if local.full_batch else BATCH
    return fit(devices, aggregator, *local.make(), data=make_data("unequal", batch), **options)


class Logging(Shifted):
    """Logs in every way, some of it for one client alone."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean, self.auroc = MulticlassAccuracy(3), MeanMetric(), MulticlassAUROC(3)
        self.parts = nn.ModuleDict({"cat": CatMetric()})

    def on_train_epoch_start(self) -> None:
        self.log("start/sum", 1.0, reduce_fx="sum")
        self.log("train/both", 100.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        self.log("train/both", loss.detach() * 2, on_step=True, on_epoch=True)
        for name in ("sum", "min", "max"):
            self.log(f"train/{name}", loss.detach(), reduce_fx=name)
        self.log("train/count", 1, reduce_fx="sum", batch_size=3)
        self.accuracy(self.layers(x)[:, :3], y)
        self.log("train/accuracy", self.accuracy)
        if self.trainer.client.id == 5:
            self.log("train/rare", loss.detach())
            self.mean.update(loss.detach())
            self.log("train/rare_mean", self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        scores = self.head(self.layers(x) - self.center)
        self.log("val/loss", cross_entropy(scores, y), prog_bar=True, on_step=True, on_epoch=True)
        self.log("val/max", scores.max(), reduce_fx="max")
        self.log("val/batches", 1, reduce_fx="sum")
        self.accuracy(scores, y)
        self.log("val/accuracy", self.accuracy)
        self.auroc.update(scores.softmax(1), y)
        self.parts["cat"].update(scores[:, 0])

    def on_validation_epoch_end(self) -> None:
        self.log("val/auroc", self.auroc.compute())
        self.log("val/spread", self.parts["cat"].compute().std())
        self.auroc.reset()
        self.parts["cat"].reset()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("test/loss", cross_entropy(self.head(self.layers(x) - self.center), y))

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[int, Tensor]:
        return batch_idx, self.head(self.layers(batch[0]))


def evaluated(batches: int = 5) -> FederatedDataModule:
    """Six clients and sets of a few batches, the last one short."""
    counts, rng = SIZES["unequal"], torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (sum(counts),), generator=rng)
    inputs = torch.randn(len(labels), 5, generator=rng) + labels[:, None]
    held = TensorDataset(inputs[: 8 * batches - 3], labels[: 8 * batches - 3])
    return FederatedDataModule(
        TensorDataset(inputs, labels), BySizes(*counts), num_clients=6, batch_size=BATCH, eval_batch_size=8,
        val_dataset=held, test_dataset={"all": held, "few": TensorDataset(inputs[:5], labels[:5])},
    )  # fmt: skip


class Files(LightningDataModule):
    """A data module that knows nothing of clients: one process writes the file that all read and divide at random."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        self.folder.mkdir()  # by one process, once
        inputs = torch.randn(70, 5, generator=torch.Generator().manual_seed(0))
        torch.save((inputs, torch.arange(70) % 3), self.folder / "samples.pt")

    def setup(self, stage: str) -> None:
        samples = TensorDataset(*torch.load(self.folder / "samples.pt"))
        self.train, self.held = random_split(samples, [60, 10])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.held, batch_size=4)


def foreign(devices: int, folder: Path, bare: bool) -> Result:
    """Data of a user's own, split here or where it is given."""
    source = Files(folder / f"foreign-{devices}-{bare}")
    data = source if bare else FederatedDataModule(source=source, num_clients=6)
    return fit(devices, SCAFFOLD(), net=start(Logging), data=data)


class Filling(Shifted):
    """A spectral norm, a table that each client fills as far as its batches are long, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)
        self.places = nn.Module()
        self.places.register_buffer("filled", torch.tensor(0))
        self.places.register_buffer("table", torch.zeros(BATCH))
        self.places.register_buffer("cache", torch.zeros(3), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = len(batch[0])
        if length > self.places.filled:
            self.places.filled.fill_(length)
            self.places.table[:length] = torch.arange(length)
        self.places.cache.fill_(2.0)
        return super().training_step(batch, batch_idx) * self.places.cache.mean()


class Tuned(Shifted):
    """Its first layers are a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def call(devices: int, folder: Path, what: str) -> Result:
    """validate, test or predict."""
    trainer = FederatedTrainer(
        accelerator="cpu", devices=devices, precision="64-true", logger=False, enable_progress_bar=False,
        default_root_dir="not-written",
    )  # fmt: skip
    torch.manual_seed(7 + trainer.global_rank)  # the first process's model counts
    return {"results": getattr(trainer, what)(Logging().double(), evaluated())}


class Noisy(TensorDataset):
    """Adds noise to a sample as it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, number = super().__getitem__(index)
        return x + torch.randn(5), number


class Lazy(Sampler[int]):
    """Draws each sample as it is asked for."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(37))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))

    def __len__(self) -> int:
        return 37


class Shuffling(FederatedDataModule):
    """Data loaders that draw from the global random stream, when they begin and for each sample."""

    def val_dataloader(self) -> list[DataLoader[Any]]:
        samples = Noisy(torch.randn(37, 5, generator=torch.Generator().manual_seed(2)), torch.arange(37))
        return [
            DataLoader(samples, batch_size=8, shuffle=True),
            DataLoader(samples, batch_size=4, sampler=Lazy()),
            DataLoader(samples, batch_size=5, shuffle=True),
        ]

    predict_dataloader = val_dataloader


class Guessing(Shifted):
    """Draws random numbers as it evaluates, and remembers the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, list[int]]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((self.trainer.round, dataloader_idx, batch[1].tolist()))
        self.log("guess", self.predict_step(batch, batch_idx, dataloader_idx)[1].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("end", torch.rand(()))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        x, numbers = batch
        return numbers, self.layers(x.to(self.center) + np.random.rand()) * torch.rand(())


def shuffled(devices: int, folder: Path) -> Result:
    data = make_data("unequal")
    data.__class__ = Shuffling
    net = start(Guessing)
    result = fit(devices, net=net, data=data, max_rounds=2)
    trainer = FederatedTrainer(
        accelerator="cpu", devices=devices, precision="64-true", logger=False, enable_progress_bar=False, seed=3,
        default_root_dir="not-written",
    )  # fmt: skip
    seen = list(net.seen)
    return {**result, "predicted": trainer.predict(net, data), "again": trainer.validate(net, data), "own": seen}


class Tape(FederatedCallback):
    """Records the cohorts, and the batches of each client by round."""

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.batches: dict[tuple[int, int], list[Tensor]] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.cohorts.append([client.id for client in cohort.clients])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.setdefault((trainer.round, trainer.client.id), []).append(batch[0].clone())


def held_out(devices: int, folder: Path) -> Result:
    """Each process evaluates those that it has trained, which keep their buffers, on what is held out of them."""
    data = make_data("unequal")
    data.held_out = DivisionOptions(0.25, "per_client")
    rule = FedDGGA(0.3, buffers="local")
    result = fit(devices, rule, data=data, clients_per_round=4)
    return {**result, "adjusted": rule.adjusted}


def taped(devices: int, folder: Path) -> Result:
    tape = Tape()
    result = fit(devices, tape, clients_per_round=4, local_epochs=2)
    return {**result, "cohorts": tape.cohorts, "own": tape.batches}


def uneven(devices: int, folder: Path) -> Result:
    """Many clients at once, of which one process gets nearly all, as they are small."""
    made, capacities = vectorized.Lanes.__init__, []

    def noting(lanes: vectorized.Lanes, trainer: Any, capacity: int) -> None:
        made(lanes, trainer, capacity)
        capacities.append(capacity)

    data, counts = make_data("unequal"), (66, 4, 4, 4, 4, 4)
    data.partitioner = BySizes(*counts)
    vectorized.Lanes.__init__ = noting
    try:
        result = fit(devices, SCAFFOLD(), FedNova(), data=data, engine="vectorized", chunk_size=6)
    finally:
        vectorized.Lanes.__init__ = made
    return {**result, "own": capacities}


class Diverging(Shifted):
    """Two clients end with NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.client.id in (1, 4) else loss


class CountsThose(FedAvg):
    """The clients that ``Diverging`` spoils are all that weigh anything."""

    def client_weight(self, client: Any) -> float:
        return float(client.id in (1, 4))


class Failing(Shifted):
    """Two clients raise in their second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.client.id in (1, 4) and self.trainer.local_step:
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


class Dropping(Shifted):
    """Draws random numbers in forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((nn.functional.dropout(x, 0.3), y), batch_idx)


class Rows(FederatedCallback):
    """Reads the gradients of all clients once a round."""

    def start_gradients(self, round: int) -> Any:
        return "cohort"

    def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        start = trainer.start_gradients
        places = torch.arange(1.0, len(start.clients) + 1).to(start.rows)
        pl_module.log("rows/norm", (places @ start.rows).norm())
        pl_module.log("rows/losses", places @ start.losses)


class Acts(FederatedCallback):
    """Does something in a hook, on some processes."""

    def __init__(self, hook: str, act: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1)) -> None:
        def called(trainer: Any, *args: Any) -> None:
            if trainer.global_rank in ranks and trainer.round == 2:
                act(trainer)

        setattr(self, hook, called)


def fail(trainer: Any) -> None:
    raise FederatedError("Expected nothing, got a failure.")


def scheduled(devices: int, folder: Path) -> Result:
    """Schedules that go on over rounds follow the client that took most steps."""

    class Scheduled(Shifted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return fit(devices, net=start(Scheduled), local_schedule="continue")


def plateau(devices: int, folder: Path) -> Result:
    """A schedule that follows what was logged lowers the learning rate in every process alike."""

    class Watched(Shifted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train/loss"}

        def on_train_epoch_end(self) -> None:
            self.log("rate", float(self.optimizers().param_groups[0]["lr"]))

    return fit(devices, net=start(Watched), max_rounds=4)


def of_the_package(devices: int, folder: Path, name: str, **options: Any) -> Result:
    """A model of the package, with an aggregator and a client algorithm that keep something."""
    make, make_data = PACKAGE[name]
    torch.manual_seed(7)
    return fit(devices, FedAdam(lr=0.1), SCAFFOLD(), net=make(), data=make_data(), **options)


def private(devices: int, _: Path, secret: bool = False) -> Result:
    """Noise once whatever the number of processes, with a bound that follows what clients of both count."""
    payload = CentralDP(0.05, 1e-5, 0.5, quantile=0.5, count_noise=1.0, secret=secret)
    result = fit(devices, evenly(), payload, sampler=PoissonSampler(), clients_per_round=3, max_rounds=6)
    return {**result, "bound": payload.bound}


def kept(
    devices: int, folder: Path, where: str, rounds: int, resume: bool = False, at: str = "", personal: bool = False
) -> Result:
    """Clients that keep control variates, parameters and buffers, drawn now here, now there."""
    more = [FedBN()] if personal else []
    result = fit(
        devices, SCAFFOLD(), *more, FedAvg(buffers="local"), data=make_data("unequal"), clients_per_round=3,
        max_rounds=rounds, client_states=where, logger=[], enable_checkpointing=True,
        default_root_dir=str(folder / (at or f"{devices}")),
        name=f"kept-{where}-{rounds}" if not at else "kept", ckpt_path="last" if resume else None,
    )  # fmt: skip
    (run,) = (folder / (at or f"{devices}")).glob(f"kept{f'-{where}-{rounds}' if not at else ''}/version_*")
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["federated"]
    records = {
        file.split("-")[0]: torch.from_numpy(np.load(run / "client_states" / file)) for file in state["client_states"]
    }
    own = {f"{i} {name}": value for i, kept in state["buffers"]["of_client"].items() for name, value in kept.items()}
    return {**result, "records": records, "of_client": own}


class ShiftedValidated(Shifted):
    """Validates by its loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", cross_entropy(self.head(self.layers(batch[0]) - self.center), batch[1]))


def client_models(devices: int, folder: Path, buffers: Any, **options: Any) -> Result:
    """Evaluates every model of clients, not all of which have trained."""
    evaluation = ClientEvaluation(1, participation=True, models=("global", "trained", "tuned", "own"), tune_steps=2)
    net = start(ShiftedValidated if options else Logging)
    return fit(
        devices, evaluation, KeepsTrained(), FedAvg(buffers=buffers), net=net, data=evaluated(), clients_per_round=2,
        **options,
    )  # fmt: skip


class Shown(FederatedCallback):
    """Looks at the own models of the clients whose records a process holds, after each round."""

    def __init__(self, algorithm: ClientAlgorithm) -> None:
        self.algorithm = algorithm
        self.sums: list[Tensor] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        state, live = trainer.train_state, trainer.vector.all_data
        shown = torch.zeros(len(trainer.client_sizes), len(live)).double()
        for client, row in enumerate(shown):
            state.load_global_model()
            start = live.clone()
            if not trainer.client_states.elsewhere(client):
                self.algorithm.load_own(trainer, client)
                row.copy_(live if not torch.equal(live, start) else torch.zeros_like(live))
        state.load_global_model()
        self.sums.append(trainer.reduce_sum(shown))


def owned(devices: int, folder: Path, algorithm: Callable[[], ClientAlgorithm], engine: Any = "sequential") -> Result:
    """Clients with models, or parts of them, of their own, drawn now here, now there."""
    made = algorithm()
    shown = Shown(made)
    result = fit(
        devices, made, shown, FedAvg(buffers="local"), data=make_data("unequal"), clients_per_round=3, max_rounds=6,
        engine=engine, local_epochs=2,
    )  # fmt: skip
    return {**result, "own": torch.stack(shown.sums)}


class Scoring(Logging):
    """A classifier."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x) - self.center)


def pictured(devices: int, folder: Path) -> Result:
    """A run whose folder gets tables and pictures at its end."""
    callbacks, place = (FinalPictures(), ClientEvaluation(), UpdateAgreement()), str(folder / f"{devices}")
    result = fit(
        devices, *callbacks, net=start(Scoring), data=evaluated(), logger=[], default_root_dir=place, name="ends"
    )
    (run,) = Path(place).glob("ends/version_*")
    tables = {file.name: file.read_text() for file in run.glob("*.csv") if file.name.startswith(("conf", "class"))}
    return {**result, **tables, "pictures": sorted(file.name for file in run.glob("[ac]*.png"))}


class Drifts(FederatedCallback):
    """On the second process, has what methods keep differ in its last bits after each round, as other processors do."""

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if trainer.global_rank:
            for method in (trainer.aggregator, *(cb for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm))):
                if kept := method.state_dict():
                    method.load_state_dict(apply_to_collection(kept, Tensor, _next))


def _next(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


def _step_elsewhere(step: Callable[[Any], Tensor], update: Any) -> Tensor:
    others = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
    return _next(step(update)) if others else step(update)


def unlike(devices: int, folder: Path, rule: str, *client: ClientAlgorithm, stops: tuple[int, ...] = (4,)) -> Result:
    """The second process rounds the server's step otherwise, and keeps something else in its last bits."""
    name, make = f"unlike-{devices}-{rule}-{len(client)}-{len(stops)}", RULES[rule].make
    for rounds in stops:
        aggregator = make()
        aggregator.server_step = partial(_step_elsewhere, aggregator.server_step)
        result = fit(
            devices, aggregator, *client, Drifts(), max_rounds=rounds, clients_per_round=3, logger=[], name=name,
            enable_checkpointing=True, default_root_dir=str(folder / name), ckpt_path="last",
        )  # fmt: skip
    return {**result, "kept": [method.state_dict() for method in (aggregator, *client)]}


EVERYTHING = [
    (name, rule, mask)
    for name, local in {"none": CLIENT_LIMITS["none"], **CLIENTS}.items()
    for rule in ([local.rule] if local.rule else RULES)
    for mask in (MASKS if rule in MASKED else ["none"])
    if not local.few or (rule in ("FedAvg", "FedNova") and mask in ("none", "soft"))
]
# Each aggregator, mask and client algorithm once; each pair of them is slow.
PARITY = [("none", "FedAvg", "none"), ("none", "FedAvg", "soft"), *cover(EVERYTHING, 1)]
Case = Callable[[int, Path], Result]
# Clients away, late and unequal, and rounds that few or none take part in.
FAULTY: dict[str, Any] = {
    "client": "SCAFFOLD", "rule": "FedNova", "max_rounds": 6, "availability": BernoulliAvailability(0.4),
    "stragglers": Stragglers(3.0, "partial", over_selection=1.5), "clients_per_round": 3,
    "work": UnequalWork(steps=[1, 5], lr=[0.5, 1.5]),
}  # fmt: skip


def grid(cases: list[tuple[str, str, str]]) -> dict[str, Case]:
    return {" | ".join(case): partial(compose, client=case[0], rule=case[1], mask=case[2]) for case in cases}


def evenly() -> FedAvg:
    """What noise goes with."""
    return FedAvg(weighting="uniform", buffers="keep")


def late(devices: int, folder: Path, engine: str) -> Result:
    """Two arrivals make a round, of four clients that train at once."""
    options = {"sampler": Arrivals(4, 1.0), "clients_per_round": 2, "max_rounds": 6}
    return fit(devices, FedAvg(buffers="local"), Stale(), engine=engine, **options)


class Sends(FederatedCallback):
    """Every client sends one thing besides, one client alone another; the model gets both."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.send("squares", update.delta.square(), update.weight)
        if update.client.id == 3:
            update.send("three", update.delta.norm())

    def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        trainer.weights.add_(update.sums["squares"] * 0.01 + update.sums.get("three", 0.0) * 0.01)
        pl_module.log("sent", float(len(update.sums)))


CASES: dict[str, Case] = {
    **grid(PARITY),
    "held out": held_out,
    **{
        f"vectorized | {client} | {rule}": partial(compose, client=client, rule=rule, engine="vectorized", chunk_size=2)
        for client, rule in (
            ("none", "FedAvg"),
            ("all three", "CGW"),
            ("SCAFFOLD I", "FedNova"),
            ("none", "QFedAvg"),
            ("MimeLite", "FedDGGA"),
            ("FedDyn", "FedDynServer"),
            ("FedRep", "FedNova"),
            ("FedGA on FedBN", "FedAvg"),
        )
    },
    **{f"model | {name}": partial(of_the_package, name=name) for name in SMALL},
    **{f"vectorized model | {name}": partial(of_the_package, name=name, engine="vectorized") for name in SMALL},
    "float32": partial(compose, client="SCAFFOLD", rule="FedAdam", mask="soft", precision="32-true"),
    "unlike | FedYogi": partial(unlike, rule="FedYogi"),
    "unlike | FedYogi, resumed": partial(unlike, rule="FedYogi", stops=(2, 4)),
    "unlike | ServerOptimizer": partial(unlike, rule="ServerOptimizer"),
    "unlike | ServerOptimizer, resumed": partial(unlike, rule="ServerOptimizer", stops=(2, 4)),
    "unlike | SCAFFOLD": lambda devices, folder: unlike(devices, folder, "FedAvgM", SCAFFOLD()),
    "dropout": lambda devices, _: fit(devices, net=start(Dropping)),
    "local steps": lambda devices, _: fit(devices, local_steps=3),
    **{f"faults | {engine}": partial(compose, engine=engine, **FAULTY) for engine in ("sequential", "vectorized")},
    "schedule": scheduled,
    "plateau": plateau,
    "one client": lambda devices, _: fit(
        devices,
        FedGMA(p_means="prose", mask=MASKS["sand"]()),
        SCAFFOLD(),
        FedGA(0.5),
        sampler=Draws(),
        clients_per_round=1,
    ),
    "prose": lambda devices, _: fit(devices, FedGMA(p=0.6, p_means="prose", weighting="inverse")),
    "clipped": lambda devices, _: fit(devices, ClipUpdates(0.01)),
    "clipped evenly": lambda devices, _: fit(devices, evenly(), ClipUpdates(0.01)),
    "payloads at their limits": lambda devices, _: fit(devices, evenly(), TopK(None), ClipUpdates(0.01), Noise(0.0)),
    "payloads": lambda devices, _: fit(devices, evenly(), TopK(3), ClipUpdates(0.01), Noise(0.5)),
    "packed": lambda devices, _: fit(devices, RandomK(7)),
    "top-k": lambda devices, _: fit(devices, package.TopK(0.1), clients_per_round=4, max_rounds=5),
    **{f"late | {engine}": partial(late, engine=engine) for engine in ("sequential", "vectorized")},
    "qsgd": lambda devices, _: fit(devices, QSGD(4)),
    "nobody comes": lambda devices, _: fit(devices, evenly(), Noise(0.5), sampler=Poisson(), clients_per_round=1),
    "central privacy": private,
    "central privacy, secret": partial(private, secret=True),
    "local privacy": lambda devices, _: fit(devices, evenly(), LocalDP(0.05, 1e-5, 0.5), clients_per_round=4),
    **{
        f"private samples | {engine}": lambda devices, _, engine=engine: fit(
            devices, DPSGD(0.05, 0.2), SCAFFOLD(), net=start(NoNorms), engine=engine, clients_per_round=4
        )
        for engine in ("sequential", "vectorized")
    },
    "sums": lambda devices, _: fit(devices, Sends()),
    "updates": lambda devices, _: fit(devices, UpdateAgreement(by_layer=True), UpdateGeometry()),
    "rows": lambda devices, _: fit(devices, Rows(), GradientDissimilarity(weighting="samples", client=3)),
    "diverged": lambda devices, _: fit(devices, FedGA(0.5), net=start(Diverging), max_diverged=0.5),
    "without weight": lambda devices, _: fit(
        devices, CountsThose(), FedCM(0.3), net=start(Diverging), max_diverged=0.5
    ),
    "skipped": lambda devices, _: fit(devices, net=start(Failing), on_client_error="skip", max_diverged=0.5),
    "too many failed": lambda devices, _: fit(devices, net=start(Failing), on_client_error="skip", max_diverged=0.3),
    "too many diverged": lambda devices, _: fit(devices, net=start(Diverging), max_diverged=0.3),
    "one diverged": lambda devices, _: fit(devices, net=start(Diverging)),
    "early stopping": lambda devices, _: fit(
        devices, EarlyStopping("val/max", patience=1), net=start(Logging), data=evaluated(), max_rounds=9
    ),
    "logged": lambda devices, _: fit(devices, net=start(Logging), data=evaluated(), check_test_every_n_rounds=1),
    "each client": lambda devices, _: fit(
        devices,
        ClientEvaluation(1, num_clients=5, participation=True),
        net=start(Logging),
        data=evaluated(),
        clients_per_round=3,
    ),
    **{
        f"each client's models | buffers {policy}": partial(client_models, buffers=policy)
        for policy in ("average", "local")
    },
    "each client's models | vectorized": partial(client_models, buffers="local", engine="vectorized", chunk_size=2),
    "pictured": pictured,
    "logged, one batch": lambda devices, _: fit(devices, net=start(Logging), data=evaluated(1)),
    "logged, one client": lambda devices, _: fit(devices, net=start(Logging), data=evaluated(2), clients_per_round=1),
    "validate": partial(call, what="validate"),
    "test": partial(call, what="test"),
    "predict": partial(call, what="predict"),
    "foreign data": partial(foreign, bare=False),
    "foreign data, bare": partial(foreign, bare=True),
    "unfrozen later": lambda devices, _: fit(devices, BackboneFinetuning(1), net=start(Tuned)),
    "filling": lambda devices, _: fit(devices, net=start(Filling)),
    "shuffled": shuffled,
    "taped": taped,
    "uneven": uneven,
    **{f"kept {where}": partial(kept, where=where, rounds=6) for where in ("device", "host", "disk")},
    "kept personal": partial(kept, where="disk", rounds=5, personal=True),
    "begun": partial(kept, where="device", rounds=3, at="begun"),
    "own | APFL": partial(owned, algorithm=lambda: APFL(0.5, adaptive=True)),
    "own | Ditto, vectorized": partial(owned, algorithm=lambda: Ditto(0.5), engine="vectorized"),
    "own | LocalOnly": partial(owned, algorithm=LocalOnly),
    "own | PFedMe": partial(owned, algorithm=lambda: PFedMe(3.0, 3, 0.1)),
    "own | FedPer": partial(owned, algorithm=FedPer),
    "own | FedRep, vectorized": partial(owned, algorithm=FedRep, engine="vectorized"),
}


def different(devices: int, folder: Path) -> Result:
    """Each process makes clients of its own."""
    data = make_data("unequal")
    if FederatedTrainer(accelerator="cpu", devices=devices, default_root_dir="not-written").global_rank:
        data.partitioner = BySizes(*reversed(SIZES["unequal"]))
    return fit(devices, data=data)


def own_model(trainer: Any) -> None:
    trainer.weights[0] += trainer.global_rank


def own_rate(trainer: Any) -> None:
    trainer.local_optimizer.optimizer.param_groups[0]["lr"] = 0.05


# For two processes alone: how each ends.
MISTAKES: dict[str, Case] = {
    "fails on one": lambda devices, _: fit(devices, Acts("on_client_start", fail, ranks=(1,))),
    "fails between clients": lambda devices, _: fit(devices, Acts("on_train_epoch_end", fail, ranks=(1,))),
    "fails on the first": lambda devices, _: fit(devices, Acts("on_round_start", fail, ranks=(0,))),
    "defect on one": lambda devices, _: fit(devices, Acts("on_client_start", lambda trainer: 1 / 0, ranks=(1,))),
    "sums in a client's hook": lambda devices, _: fit(
        devices, Acts("on_client_end", lambda trainer: trainer.reduce_sum(trainer.weights))
    ),
    "sums on one": lambda devices, _: fit(
        devices, Acts("on_round_end", lambda trainer: trainer.reduce_sum(trainer.weights), ranks=(1,))
    ),
    "another model": lambda devices, _: fit(devices, Acts("on_train_epoch_end", own_model)),
    "another rate": lambda devices, _: fit(devices, Acts("on_round_start", own_rate, ranks=(1,))),
    "another split": different,
    "rows in a client's hook": lambda devices, _: fit(
        devices, Rows(), Acts("on_client_start", lambda trainer: trainer.start_gradients.rows)
    ),
    "resumed": lambda devices, folder: [
        kept(devices, folder, where="host", rounds=rounds, at="twice", resume=rounds == 6) for rounds in (3, 6)
    ][-1],
    "continued": partial(kept, where="host", rounds=6, at="begun by one", resume=True),
}
