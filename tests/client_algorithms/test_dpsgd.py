"""DP-SGD: against a loop over samples, its noise, its clip, its batches, its ε, and what it refuses."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.aggregators import AFL, FedAvg, FedDGGA, FedGMA, QFedAvg
from lightning_fed.callbacks import LocalDP
from lightning_fed.callbacks.diagnostics import GradientDissimilarity
from lightning_fed.cli import FederatedCLI
from lightning_fed.client_algorithms import (
    DPSGD,
    SCAFFOLD,
    Ditto,
    FedCM,
    FedGA,
    FedLC,
    FedPer,
    FedProx,
    FedSAM,
    LocalOnly,
    MimeLite,
)
from lightning_fed.client_algorithms.dpsgd import PoissonBatches
from lightning_fed.core.updates import Client
from lightning_fed.functional.privacy import gaussian_epsilon, samples_epsilon
from lightning_fed.sampling import UnequalWork
from tests.end_to_end.command import REPOSITORY, fit_words, run_folders
from tests.parts import CLASSES, FEATURES, SEED, Classifier, built, federated_data, federated_trainer, points

pytest.importorskip("dp_accounting", reason="pip install 'lightning_fed[privacy]'")

DRAWS, SIZES = 10_000, (30, 12, 19, 8, 5)  # batches of 8
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])
QUICK = 0.2  # below which ε takes no time


def fit(folder: Path, *callbacks: Any, net: Any = Classifier, data: Any = None, **options: Any) -> FederatedTrainer:
    callbacks = callbacks if any(isinstance(cb, DPSGD) for cb in callbacks) else (DPSGD(0.3, QUICK), *callbacks)
    trainer = federated_trainer(folder, *callbacks, **{"engine": "sequential", "max_rounds": 2, **options})
    trainer.fit(built(net), federated_data(*SIZES) if data is None else data)
    return trainer


class Deep(Classifier):
    """A network with some layer between two others; dropout by default."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        images = (nn.Unflatten(1, (1, 1, FEATURES)), nn.Conv2d(1, 4, 1), layer or nn.Dropout(0.5), nn.Flatten())
        super().__init__(nn.Sequential(*images, nn.Linear(4 * FEATURES, CLASSES)))


class Taped(FederatedCallback):
    """Keeps each client's batches, with how many of their samples count, and its update."""

    def __init__(self, algorithm: DPSGD) -> None:
        self.algorithm = algorithm
        self.taken: dict[tuple[int, int], list[Any]] = {}
        self.updates: dict[tuple[int, int], Tensor] = {}
        self.starts: list[Tensor] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.starts.append(trainer.weights.clone())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        count = self.algorithm.source.counts[trainer.client.id][batch_idx]
        at = (trainer.round, trainer.client.id)
        self.taken.setdefault(at, []).append((batch[0][:count].clone(), batch[1][:count].clone()))

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.updates[trainer.round, update.client.id] = update.delta.clone()


def normal_of(round: int, client: int, step: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The noise of a client's step, from the stream that the page documents: purpose 18."""
    low, high = np.random.SeedSequence((SEED, 18, round, client, step)).generate_state(2).tolist()
    drawn = torch.empty(count, dtype=dtype)
    return drawn.normal_(generator=torch.Generator().manual_seed((high << 32 | low) >> 1))


def test_every_step_is_that_of_a_loop_over_samples(tmp_path: Path) -> None:
    clip, z, lr = 0.3, QUICK, 0.1
    tape = Taped(algorithm := DPSGD(clip, z))
    fit(tmp_path, algorithm, tape, local_epochs=2, precision="64-true")
    assert len(tape.updates) == 10
    for (round, client), update in tape.updates.items():
        w, n = tape.starts[round - 1].clone(), SIZES[client]
        steps = tape.taken[round, client]
        assert len(steps) == 2 * math.ceil(n / 8)
        for step, (inputs, labels) in enumerate(steps):
            total = torch.zeros_like(w)
            for x, y in zip(inputs, labels, strict=True):
                at = w.clone().requires_grad_()
                weight, bias = at[: CLASSES * FEATURES].view(CLASSES, FEATURES), at[CLASSES * FEATURES :]
                (gradient,) = torch.autograd.grad(cross_entropy((weight @ x + bias)[None], y[None]), at)
                total += gradient * min(1.0, clip / gradient.norm().item())
            total += z * clip * normal_of(round, client, step, len(w))
            w -= lr * total / min(8, n)
        torch.testing.assert_close(update, w - tape.starts[round - 1], rtol=0, atol=1e-12)
    counts = [len(labels) for (_, client), steps in tape.taken.items() for _, labels in steps if SIZES[client] > 8]
    assert min(counts) < 8 < max(counts)


@ENGINES
def test_without_noise_and_clip_on_all_data_it_is_plain_training(tmp_path: Path, engine: str) -> None:
    data = {"data": federated_data(*SIZES, batch_size=64), "precision": "64-true", "engine": engine, "max_rounds": 3}
    private = fit(tmp_path, DPSGD(1e6, 1e-30), local_epochs=2, **data)
    plain = federated_trainer(tmp_path, max_rounds=3, local_epochs=2, precision="64-true", engine="sequential")
    plain.fit(built(Classifier), data["data"])
    torch.testing.assert_close(private.weights, plain.weights, rtol=0, atol=1e-12)
    clipped = fit(tmp_path, DPSGD(0.1, 1e-30), local_epochs=2, **data)
    assert not torch.allclose(clipped.weights, plain.weights, atol=1e-3)


class LastAlone(Deep):
    """Its optimizer steps the last layer alone; the first may be frozen too."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(nn.Identity())
        self.net[1].requires_grad_(not frozen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[-1].parameters(), lr=0.1)


@ENGINES
def test_what_no_optimizer_steps_does_not_count_for_the_clip(tmp_path: Path, engine: str) -> None:
    found = []
    for frozen in (False, True):
        options: dict[str, Any] = {"precision": "64-true", "engine": engine}
        trainer = fit(tmp_path, DPSGD(0.05, 1e-30), net=lambda frozen=frozen: LastAlone(frozen), **options)
        found.append(trainer.lightning_module.net[-1].weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def combined(payload: DPSGD, gradients: Tensor, client: int = 0, round: int = 1, n: int = 100) -> Tensor:
    """What a step makes of these gradients, in batches of 4 samples on average."""
    payload.source = SimpleNamespace(counts={client: [len(gradients)]})  # type: ignore[assignment]  # stands in
    trainer: Any = SimpleNamespace(seed=SEED, batch_size=4)
    payload.combine(trainer, Client(client, n, round), 0, gradients, out := torch.empty(gradients.shape[1]))
    return out


@pytest.mark.parametrize("secret", [False, True])
def test_noise_is_normal_with_the_stated_variance_and_another_in_each_step_client_and_round(secret: bool) -> None:
    payload = DPSGD(0.5, 1.5, secret=secret)
    payload.z, nothing, drawn = 1.5, torch.zeros(0, DRAWS), []
    for client, round in ((0, 1), (1, 1), (0, 2)):
        payload.on_round_start(Any, Any, Any)
        drawn += [combined(payload, nothing, client, round) for _ in range(2)]
    sigma = 1.5 * 0.5 / 4
    for one in drawn:
        assert one.std().item() == pytest.approx(sigma, rel=0.05)  # 7 standard errors
        assert kstest(one.double() / sigma, "norm").pvalue > 1e-8
    assert (torch.corrcoef(torch.stack(drawn)) - torch.eye(6)).abs().max() < 0.07
    payload.on_round_start(Any, Any, Any)
    assert torch.equal(combined(payload, nothing, 1, 1), drawn[2]) != secret
    if secret:
        return
    payload.on_round_start(Any, Any, Any)
    few = combined(payload, nothing, 1, 1, n=3)
    torch.testing.assert_close(few, drawn[2] * 4 / 3)  # of all 3 samples, not of 4 on average


def test_gradients_are_clipped_over_many_draws() -> None:
    payload, generator = DPSGD(0.5, 1.0), torch.Generator().manual_seed(1)
    payload.z, clipped = 1e-30, 0
    for _ in range(500):
        rows = torch.randn(20, 5, generator=generator) * torch.rand(20, 1, generator=generator)
        payload.on_round_start(Any, Any, Any)
        lengths = rows.norm(dim=1)
        clipped += int((lengths > 0.5).sum())
        expected = sum(row * min(1.0, 0.5 / row.norm().item()) for row in rows) / 4
        torch.testing.assert_close(combined(payload, rows), expected, rtol=1e-5, atol=1e-6)
    assert 0.2 < clipped / DRAWS < 0.9
    assert combined(payload, torch.zeros(3, 5)).abs().max() < 1e-29  # whose length is 0


class Known:
    """A source of clients whose samples are their own numbers."""

    reads_are_seeded, batch_size, sizes = False, 10, np.array([72, 6])

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Any:
        yield from order.split(batch_size or self.batch_size)


@pytest.mark.parametrize(("most", "shape"), [(25, 25), (12, 12), (100, 72)])
def test_batches_are_poisson_cut_to_one_size(most: int, shape: int) -> None:
    source, seen, counts = PoissonBatches(Known(), most), np.zeros(72), []  # type: ignore[arg-type]  # stands in
    for seed in range(400):
        batches = list(source.batches(0, torch.arange(72), seed))
        assert [len(batch) for batch in batches] == [shape] * 8
        for batch, count in zip(batches, source.counts[0], strict=True):
            assert len(set(batch[:count].tolist())) == count <= most
            seen[batch[:count]] += 1
            counts.append(count)
    drawn = np.random.default_rng(0).binomial(72, 10 / 72, 100_000)  # what sizes would be, uncut
    error = drawn.std() / math.sqrt(len(counts))
    assert abs(np.mean(counts) - np.minimum(drawn, most).mean()) < 5 * error
    share = np.mean(counts) / 72
    assert abs(seen / len(counts) - share).max() < 5 * math.sqrt(share / len(counts))
    assert max(counts) == min(most, max(counts))
    again = list(source.batches(0, torch.arange(72), 399))
    assert all(torch.equal(*pair) for pair in zip(again, batches, strict=True))


def test_batches_hold_all_samples_of_small_clients_and_other_passes_go_as_before() -> None:
    source = PoissonBatches(Known(), 25)  # type: ignore[arg-type]  # stands in
    (batch,) = source.batches(1, torch.arange(6), 0)
    assert sorted(batch.tolist()) == [0, 1, 2, 3, 4, 5]
    assert [batch.tolist() for batch in source.batches(1, torch.arange(6), 0, batch_size=4)] == [[0, 1, 2, 3], [4, 5]]

    class Fixed:
        reads_are_seeded, batch_size, sizes = False, 10, np.array([72])

        def batches(self, client: int, order: Tensor, seed: int) -> Any:
            yield from ()

    with pytest.raises(FederatedError, match="Expected `batches` of Fixed to take `batch_size` for DPSGD"):
        PoissonBatches(Fixed(), 25)  # type: ignore[arg-type]  # what it is about


@pytest.mark.parametrize(
    ("net", "more", "options"),
    [
        (Classifier, (), {"local_epochs": 2}),
        (Deep, (), {"local_steps": 3, "gradient_clip_val": 0.05}),
        (lambda: Deep(nn.GroupNorm(2, 4)), (SCAFFOLD(), FedProx(0.1)), {"work": UnequalWork(epochs=[1, 3])}),
        (Deep, (FedCM(0.5),), {"chunk_size": 2}),
        (Deep, (FedPer(1),), {}),
        (lambda: Deep(nn.GroupNorm(2, 4)), (), {"precision": "bf16-mixed"}),
        (Classifier, (LocalOnly(),), {}),
    ],
)
def test_both_engines_agree_to_the_bit(tmp_path: Path, net: Any, more: Any, options: Any) -> None:
    runs = [fit(tmp_path, *more, net=net, engine=engine, **options) for engine in ("sequential", "vectorized")]
    for key in ("privacy/sample_epsilon", "val/loss", "samples"):
        assert runs[0].metrics.logged[key] == runs[1].metrics.logged[key]
    assert torch.equal(runs[0].weights, runs[1].weights)


def test_both_engines_agree_where_samples_are_read_one_by_one(tmp_path: Path) -> None:
    class Read(Dataset[Any]):
        def __init__(self) -> None:
            self.held = points(sum(SIZES))

        def __len__(self) -> int:
            return len(self.held)

        def __getitem__(self, at: int) -> Any:
            x, y = self.held[at]
            return x + 0.1 * torch.randn(FEATURES), y

    data = [federated_data(*SIZES, dataset=Read(), drop_last=True) for _ in range(2)]
    runs = [
        fit(tmp_path, data=each, engine=engine) for each, engine in zip(data, ("sequential", "vectorized"), strict=True)
    ]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].metrics.logged["clients/trained"] == 4  # of 5 samples there is no batch of 8


def test_the_engine_that_is_chosen_trains_one_client_after_another(tmp_path: Path) -> None:
    chosen = fit(tmp_path, engine="auto")
    assert chosen.engine_choice["engine"] == "sequential"
    assert torch.equal(chosen.weights, fit(tmp_path).weights)


@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize("more", [{"noise": QUICK}, {"epsilon": 20.0}])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, engine: str, more: Any) -> None:
    class Stops(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.round == 2

    options = {"max_rounds": 4, "clients_per_round": 3, "engine": engine, "net": Deep}
    keeps = {"logger": [], "enable_checkpointing": True, "name": "kept"}
    whole = fit(tmp_path, DPSGD(0.3, **more), SCAFFOLD(), **options)
    fit(tmp_path, DPSGD(0.3, **more), SCAFFOLD(), Stops(), **options, **keeps)
    (path,) = tmp_path.glob("kept/version_*/checkpoints/last.ckpt")
    rest = federated_trainer(tmp_path, DPSGD(0.3, **more), SCAFFOLD(), max_rounds=4, clients_per_round=3, engine=engine)
    rest.fit(built(Deep), federated_data(*SIZES), ckpt_path=str(path))
    assert rest.round == 4
    assert torch.equal(rest.weights, whole.weights)
    assert rest.metrics.logged["privacy/sample_epsilon"] == whole.metrics.logged["privacy/sample_epsilon"]
    other = federated_trainer(tmp_path, DPSGD(0.3, **more, max_batch=9), SCAFFOLD(), max_rounds=4, clients_per_round=3)
    with pytest.raises(FederatedError, match=r"go on with the noise and the sampling of .*, \[8, 23\]\].*, 9\]"):
        other.fit(built(Deep), federated_data(*SIZES), ckpt_path=str(path))


@ENGINES
def test_who_is_in_the_cohort_never_changes_a_client(tmp_path: Path, engine: str) -> None:
    found: dict[int, Tensor] = {}

    class Notes(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            assert torch.equal(found.setdefault(update.client.id, update.delta.clone()), update.delta)
            seen.append(update.client.id)

    counts = []
    for count in (1, 2, 5):
        seen: list[int] = []
        fit(tmp_path, DPSGD(0.3, 2.0), Notes(), net=Deep, clients_per_round=count, max_rounds=1, engine=engine)
        counts.append(len(seen))
    assert counts == [1, 2, 5]


@pytest.mark.slow
def test_epsilon_is_that_of_the_worst_client_by_its_samples_and_steps(tmp_path: Path) -> None:
    steps: dict[int, int] = {}

    class Counts(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            steps[update.client.id] = steps.get(update.client.id, 0) + update.num_steps

    trainer = fit(
        tmp_path, algorithm := DPSGD(0.3, 3.0), Counts(), max_rounds=3, clients_per_round=2, local_epochs=2, logger=[]
    )
    each = [samples_epsilon({(SIZES[i], count)}, 3.0, 8, 23, 1e-5) for i, count in steps.items()]
    assert trainer.metrics.logged["privacy/sample_epsilon"] == max(each) > min(each)
    assert algorithm.taken.tolist() == [steps.get(i, 0) for i in range(5)]
    lines = [line.split(",") for line in trainer.books.run.metrics.read_text().splitlines()]
    at = lines[0].index("privacy/sample_epsilon")
    assert lines[1][at] == ""  # before any training
    assert float(lines[2][at]) < float(lines[4][at]) == max(each)
    assert "train/loss" not in lines[0]  # it has no noise
    assert "val/loss" in lines[0]


@pytest.mark.slow
def test_noise_is_found_for_an_epsilon(tmp_path: Path) -> None:
    trainer = fit(tmp_path, algorithm := DPSGD(0.3, epsilon=20.0), max_rounds=3)
    assert 19.5 < trainer.metrics.logged["privacy/sample_epsilon"] <= 20.0
    assert algorithm.about.startswith(f"noise {algorithm.z:.6g} from the seed of the run, 8 samples in a batch on")
    spent = trainer.metrics.logged["privacy/sample_epsilon"]
    assert algorithm.about.endswith(f"epsilon up to {spent:.4g} after 3 rounds at delta 1e-05, by the accountant pld")


@ENGINES
def test_noise_from_the_system_is_another_each_time(tmp_path: Path, engine: str) -> None:
    runs = [fit(tmp_path, DPSGD(0.3, QUICK, secret=True), net=Deep, engine=engine, max_rounds=1) for _ in range(2)]
    assert not torch.allclose(runs[0].weights, runs[1].weights, atol=1e-4)
    assert torch.isfinite(runs[0].weights).all()
    for key in ("privacy/sample_epsilon", "samples"):
        assert runs[0].metrics.logged[key] == runs[1].metrics.logged[key]


@pytest.mark.parametrize(("secret", "source"), [("false", "the seed of the run"), ("true", "the operating system")])
def test_the_config_of_a_run_names_noise_and_accountant(tmp_path: Path, secret: str, source: str) -> None:
    file = REPOSITORY / "configs" / "privacy" / "dp_sgd.yaml"
    FederatedCLI(fit_words(tmp_path, 1, f"--config={file}", "--client.noise=0.2", f"--client.secret={secret}"))
    (run,) = run_folders(tmp_path)
    (line,) = [each for each in (run / "config.yaml").read_text().splitlines() if each.startswith("# DPSGD")]
    assert line.startswith(f"# DPSGD: noise 0.2 from {source}, 10 samples in a batch on average, 26 at most")
    assert line.endswith("after 1 rounds at delta 1e-05, by the accountant rdp")  # of so little noise


def test_it_goes_with_noise_on_updates_too(tmp_path: Path) -> None:
    trainer = fit(tmp_path, LocalDP(0.05, 1e-5, 1.0), FedAvg(weighting="uniform"))
    assert trainer.metrics.logged["privacy/local_epsilon"] == gaussian_epsilon(0.5, 1.0, 2, 1e-5)
    assert trainer.metrics.logged["privacy/sample_epsilon"] > 0


class Mixing(Classifier):
    def loss(self, batch: Any) -> Tensor:
        scores = self(batch[0])
        return cross_entropy(scores - scores.mean(0), batch[1])


class Summed(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        self.seen += 1
        return super().loss(batch)


class Branching(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1.0 if batch[1].sum() > 0 else 2.0)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(Classifier):
    def on_after_backward(self) -> None:
        pass


APART, BUFFERS = "the gradient of a batch is not the mean of those of its samples", "its training changes buffers"


@ENGINES
@pytest.mark.parametrize(
    ("net", "why"),
    [
        (lambda: Deep(nn.BatchNorm2d(4)), BUFFERS),
        (lambda: Deep(nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.5))), BUFFERS),
        (lambda: Deep(nn.BatchNorm2d(4, track_running_stats=False)), APART),
        (lambda: Deep(nn.InstanceNorm2d(4, track_running_stats=True)), BUFFERS),
        (Mixing, APART),
        (Summed, APART),
        (Counting, BUFFERS),
    ],
)
def test_what_mixes_samples_is_refused_with_what_to_use(tmp_path: Path, engine: str, net: Any, why: str) -> None:
    with pytest.raises(FederatedError, match=f"a loss of each sample for DPSGD, but {why}: use GroupNorm in place"):
        fit(tmp_path, net=net, engine=engine)


def test_a_step_that_vmap_cannot_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="Expected Branching to have a loss of each sample for DPSGD, but vmap"):
        fit(tmp_path, net=Branching)


LATER = {"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}


@pytest.mark.parametrize(
    ("parts", "options", "said"),
    [
        ([FedLC()], {}, "no FedLC with DPSGD, as what it reads of a client's samples gets no noise"),
        ([Ditto()], {}, "no Ditto with DPSGD"),
        ([FedGA()], {}, "no FedGA with DPSGD"),
        ([MimeLite()], {}, "no MimeLite with DPSGD"),
        ([SCAFFOLD("I")], {}, "no SCAFFOLD with DPSGD"),
        ([FedGMA()], {}, "no FedGMA with DPSGD"),
        ([QFedAvg()], {}, "no QFedAvg with DPSGD"),
        ([AFL()], {}, "no AFL with DPSGD"),
        ([FedDGGA()], {}, "no FedDGGA with DPSGD"),
        ([GradientDissimilarity()], {}, "no GradientDissimilarity with DPSGD"),
        ([FedSAM()], {}, "one client algorithm that replaces the gradient"),
        ([], {"net": Manual}, "automatic optimization with DPSGD"),
        ([], {"net": Backward}, "no `on_after_backward` with DPSGD, as each sample has a gradient of its own"),
        ([], {"net": lambda: Classifier(**LATER)}, "another `--model.optimizer` than LBFGS with DPSGD"),
        ([], {"accumulate_grad_batches": 2}, "`--trainer.accumulate_grad_batches 1` with DPSGD"),
        ([], {"compile": True}, "`--trainer.compile false` with DPSGD"),
        ([DPSGD(1.0, epsilon=20.0)], {"work": UnequalWork(epochs=[1, 2])}, "no `--trainer.participation.work` with"),
        ([DPSGD(1.0, QUICK, max_batch=7)], {}, "`max_batch` of DPSGD to be at least `--data.batch_size` 8, got 7"),
    ],
)
@pytest.mark.quick(5)
def test_what_it_does_not_cover_is_refused(tmp_path: Path, parts: Any, options: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=f"^Expected {said}"):
        fit(tmp_path, *parts, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "Expected `noise` or `epsilon` of DPSGD, got None and None"),
        ({"noise": 0.0}, "Expected `noise` of DPSGD to be a finite number above 0"),
        ({"noise": 1.0, "clip": 0.0}, "Expected `clip` of DPSGD to be a finite number above 0"),
        ({"noise": 1.0, "delta": 1.0}, "Expected `delta` of DPSGD to be above 0 and below 1"),
        ({"noise": 1.0, "max_batch": 0}, "Expected `max_batch` of DPSGD to be an integer of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        DPSGD(**{"clip": 1.0, **options})
