"""Differential privacy of clients: its noise, its bound, its ε, and that each is the same wherever it is computed."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.aggregators import Aggregator, FedAdam, FedAvg, FedAvgM, FedYogi
from lightning_fed.callbacks import CentralDP, ClipUpdates, LocalDP
from lightning_fed.callbacks.privacy import system_normal
from lightning_fed.cli import FederatedCLI
from lightning_fed.core.seeding import seed_everywhere
from lightning_fed.core.updates import Client, ReducedUpdate, Update
from lightning_fed.functional.privacy import gaussian_epsilon
from lightning_fed.masks import MaskControl, NoiseFloorMask
from lightning_fed.sampling import PoissonSampler, UniformSampler
from tests.callbacks.payloads import TopK
from tests.end_to_end.command import REPOSITORY, fit_words, run_folders
from tests.parts import FEATURES, Classifier, built, federated_data, federated_trainer

pytest.importorskip("dp_accounting", reason="pip install 'lightning_fed[privacy]'")

DRAWS, CLIENTS = 10_000, (12, 10, 6, 9)
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


class Logged:
    """Stands in for a module."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log_dict(self, values: dict[str, float]) -> None:
        self.values.update(values)


def alone(payload: Any, size: int = DRAWS, clients: int = 20) -> Any:
    """Sets up a payload for rounds of a trainer that does nothing else."""
    trainer = SimpleNamespace(
        seed=0, round=1, weights=torch.zeros(size), cohort_size=clients, client_sizes=np.ones(clients),
        is_global_zero=True, reduce_sum=lambda tensor: tensor, options=SimpleNamespace(max_rounds=9),
    )  # fmt: skip
    payload.setup(trainer, Logged(), "fit")
    return trainer


def one_round(payload: Any, trainer: Any, deltas: list[Tensor]) -> tuple[ReducedUpdate, dict[str, float]]:
    """Encodes the updates, adds them up and decodes; returns what the rule gets, and what was logged."""
    clients = tuple(Client(i, 1, trainer.round) for i in range(len(deltas)))
    sent = [Update(client, delta.clone(), 1) for client, delta in zip(clients, deltas, strict=True)]
    for update in sent:
        payload.encode(trainer, Logged(), update)
    total = torch.stack([update.delta for update in sent]).mean(0) if sent else torch.zeros_like(trainer.weights)
    names = {name for update in sent for name in update.sums}
    sums = {name: torch.stack([update.sums[name] for update in sent]).sum(0) for name in names}
    reduced, logged = ReducedUpdate(trainer.round, clients, mean=total, sums=sums), Logged()
    payload.decode(trainer, logged, reduced)
    trainer.round += 1
    return reduced, logged.values


def fit(folder: Path, *callbacks: Any, net: Any = None, **options: Any) -> FederatedTrainer:
    given = (
        callbacks if any(isinstance(cb, Aggregator) for cb in callbacks) else (FedAvg(weighting="uniform"), *callbacks)
    )
    central = any(isinstance(cb, CentralDP) for cb in callbacks)
    sampler = PoissonSampler() if central else UniformSampler()
    options = {"engine": "sequential", "max_rounds": 3, "clients_per_round": 2, "sampler": sampler, **options}
    trainer = federated_trainer(folder, *given, **options)
    trainer.fit(built(Classifier) if net is None else net, federated_data(*CLIENTS))
    return trainer


class Keeps(FederatedCallback):
    """Keeps what the rule gets."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.counts: list[float] = []

    def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.means.append(update.mean.clone())
        self.counts += [float(value) for value in update.sums.values()]


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_the_noise_of_the_server_is_normal_with_the_stated_variance(secret: bool, quantile: float | None) -> None:
    payload = CentralDP(clip=0.5, delta=1e-5, noise=1.5, quantile=quantile, count_noise=1.0, secret=secret)
    trainer = alone(payload)
    (first, _), (second, _) = (one_round(payload, trainer, []) for _ in range(2))
    z = 1.5 if quantile is None else (1.5**-2 - 2.0**-2) ** -0.5
    sigma = z * 0.5 / 20  # of the first round, whose C is `clip`
    assert first.noise == pytest.approx(sigma)
    assert first.mean.std().item() == pytest.approx(sigma, rel=0.05)  # 7 standard errors
    assert abs(first.mean.mean().item()) < 7 * sigma / math.sqrt(DRAWS)
    assert kstest(first.mean.double() / sigma, "norm").pvalue > 1e-8
    assert abs(torch.corrcoef(torch.stack([first.mean, second.mean]))[0, 1].item()) < 0.07


def test_the_noise_of_a_client_is_normal_with_the_stated_variance() -> None:
    payload = LocalDP(clip=0.5, delta=1e-5, noise=1.5)
    trainer, sent = alone(payload), []
    for client in (0, 1):
        update = Update(Client(client, 1, 1), torch.zeros(DRAWS), 1)
        payload.encode(trainer, Logged(), update)
        sent.append(update.delta)
        assert kstest(update.delta.double() / 0.75, "norm").pvalue > 1e-8
        assert update.delta.std().item() == pytest.approx(0.75, rel=0.05)
    assert abs(torch.corrcoef(torch.stack(sent))[0, 1].item()) < 0.07


@pytest.mark.parametrize("payload", [CentralDP(0.5, 1e-5, 1.0), LocalDP(0.5, 1e-5, 1e-20)], ids=["central", "local"])
def test_updates_are_clipped_over_many_draws(payload: Any) -> None:
    trainer, generator = alone(payload, size=5), torch.Generator().manual_seed(1)
    deltas = torch.randn(DRAWS, 5, generator=generator) * torch.rand(DRAWS, 1, generator=generator)
    clipped = 0
    for delta in deltas:
        update = Update(Client(0, 1, 1), delta.clone(), 1)
        payload.encode(trainer, Logged(), update)
        clipped += (long := delta.norm().item() > 0.5)
        assert update.delta.norm().item() <= 0.5 * (1 + 1e-6)
        if long:
            torch.testing.assert_close(update.delta, delta * 0.5 / delta.norm())
        else:
            assert torch.equal(update.delta, delta)
    assert 0.2 < clipped / DRAWS < 0.9


def test_the_denominator_is_fixed_whoever_takes_part() -> None:
    deltas = [torch.full((4,), 0.1), torch.full((4,), -0.3), torch.full((4,), 9.0)]
    payload = CentralDP(clip=1.0, delta=1e-5, noise=1e-6)
    for count in range(4):
        reduced, _ = one_round(payload, alone(payload, size=4), deltas[:count])
        expected = sum([0.1, -0.3, 0.5][:count]) / 20
        torch.testing.assert_close(reduced.mean, torch.full((4,), expected), rtol=0, atol=1e-6)


@ENGINES
@pytest.mark.parametrize(
    "payload",
    [lambda: CentralDP(0.01, 1e-5, 1e-12), lambda: LocalDP(0.01, 1e-5, 1e-12)],
    ids=["central", "local"],
)
def test_without_noise_and_sampling_it_is_clipping_to_the_bit(tmp_path: Path, payload: Any, engine: str) -> None:
    options = {"clients_per_round": len(CLIENTS), "engine": engine}
    one, other = fit(tmp_path, payload(), **options), fit(tmp_path, ClipUpdates(0.01), **options)
    assert torch.equal(one.weights, other.weights)
    assert not torch.equal(one.weights, fit(tmp_path, **options).weights)


@pytest.mark.parametrize("start", [0.05, 20.0])
def test_the_bound_finds_the_quantile_from_both_sides(start: float) -> None:
    """Of lengths that do not depend on C: the step is then that of Andrew et al., section 2.1."""
    payload = CentralDP(start, 1e-5, 0.02, quantile=0.3, count_noise=1.0, max_clip=100.0)
    trainer, generator, bounds = alone(payload, size=1, clients=50), np.random.default_rng(0), []
    for _ in range(200):
        lengths = generator.lognormal(0.0, 1.0, 50)
        _, logged = one_round(payload, trainer, [torch.tensor([length]) for length in lengths])
        bounds.append(logged["privacy/clip"])
    assert bounds[0] == start
    assert np.mean(bounds[100:]) == pytest.approx(math.exp(-0.5244), rel=0.1)  # that quantile of the lengths


@pytest.mark.parametrize(("option", "most"), [({}, 10.0), ({"max_clip": 3.0}, 3.0)])
def test_the_bound_stays_below_its_largest_value(option: Any, most: float) -> None:
    payload = CentralDP(1.0, 1e-5, 1.0, quantile=0.9, **option)
    trainer = alone(payload, size=1)
    for _ in range(40):
        one_round(payload, trainer, [torch.tensor([1e9])] * 20)
    assert payload.bound == most


def test_a_client_moves_the_count_by_a_half_and_nobody_sees_it_without_noise() -> None:
    payload = CentralDP(1.0, 1e-5, 1.0, quantile=0.5, count_noise=2.0)
    trainer, sent = alone(payload, size=1), []
    for length in (0.5, 1.0, 1.5):
        payload.encode(trainer, Logged(), update := Update(Client(0, 1, 1), torch.tensor([length]), 1))
        sent.append(update.sums["unclipped"].item())
    assert sent == [0.5, 0.5, -0.5]
    reduced, logged = one_round(payload, trainer, [torch.tensor([0.5])] * 3)
    assert reduced.sums["unclipped"].item() % 0.5 != 0.0
    assert logged["privacy/unclipped"] == pytest.approx(0.5 + reduced.sums["unclipped"].item() / 20)
    counts = [one_round(payload, trainer, [])[0].sums["unclipped"] for _ in range(2000)]
    assert torch.stack(counts).std().item() == pytest.approx(payload.of_count, rel=0.11)  # 7 standard errors
    # What both mechanisms cost together is what z does.
    assert payload.of_mean**-2 + (2 * payload.of_count) ** -2 == pytest.approx(1.0)


def test_the_noise_is_that_of_the_bound_of_its_round() -> None:
    payload = CentralDP(1.0, 1e-5, 0.5, quantile=0.5, clip_rate=2.0)
    trainer = alone(payload)
    for _ in range(3):
        reduced, logged = one_round(payload, trainer, [])
        assert reduced.noise == pytest.approx(payload.of_mean * logged["privacy/clip"] / 20)
        assert reduced.mean.std().item() == pytest.approx(reduced.noise, rel=0.05)
        assert payload.bound != logged["privacy/clip"]


ADAPTIVE = {"clip": 0.05, "delta": 1e-5, "noise": 0.5, "quantile": 0.5, "count_noise": 1.0}


class Draws(CentralDP):
    """Keeps the noise."""

    def _normal(self, *args: Any) -> Tensor:
        drawn = super()._normal(*args)
        self.__dict__.setdefault("drawn", []).append(drawn.clone())
        return drawn


def test_noise_is_the_same_to_the_bit_in_both_engines(tmp_path: Path) -> None:
    found = [Draws(**ADAPTIVE) for _ in range(2)]
    runs = [
        fit(tmp_path, payload, engine=engine)
        for payload, engine in zip(found, ("sequential", "vectorized"), strict=True)
    ]
    assert len(found[0].drawn) == 6
    assert all(torch.equal(one, other) for one, other in zip(*(payload.drawn for payload in found), strict=True))
    assert torch.allclose(runs[0].weights, runs[1].weights, rtol=0, atol=1e-6)
    assert found[0].bound == found[1].bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "payload",
    [lambda: CentralDP(**ADAPTIVE), lambda: CentralDP(0.05, 1e-5, epsilon=30.0), lambda: LocalDP(0.05, 1e-5, 0.5)],
    ids=["adaptive", "for an epsilon", "local"],
)
@pytest.mark.parametrize("rule", [FedAvg, FedYogi])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, payload: Any, rule: Any) -> None:
    class Stops(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.round == 2

    keeps = {"logger": [], "enable_checkpointing": True, "name": "kept"}
    whole = fit(tmp_path, rule(weighting="uniform"), payload(), max_rounds=4)
    fit(tmp_path, rule(weighting="uniform"), payload(), Stops(), max_rounds=4, **keeps)
    (path,) = tmp_path.glob("kept/version_*/checkpoints/last.ckpt")
    options = {"sampler": PoissonSampler() if isinstance(payload(), CentralDP) else UniformSampler()}
    rest = federated_trainer(
        tmp_path,
        rule(weighting="uniform"),
        payload(),
        max_rounds=4,
        clients_per_round=2,
        engine="sequential",
        **options,
    )
    rest.fit(built(Classifier), federated_data(*CLIENTS), ckpt_path=str(path))
    assert rest.round == 4
    assert torch.equal(rest.weights, whole.weights)
    names = [name for name in whole.metrics.logged if name.startswith("privacy/")]
    assert names
    assert {name: rest.metrics.logged[name] for name in names} == {name: whole.metrics.logged[name] for name in names}


def test_a_resumed_run_keeps_its_noise(tmp_path: Path) -> None:
    fit(tmp_path, CentralDP(0.05, 1e-5, 0.5), logger=[], enable_checkpointing=True, name="kept")
    (path,) = tmp_path.glob("kept/version_*/checkpoints/last.ckpt")
    for other, options, said in (
        (CentralDP(0.05, 1e-5, 0.6), {}, r"go on with the noise .*\[0.5, 0.5\].* got \[0.6, 0.5\]"),
        (CentralDP(0.05, 1e-5, 0.5), {"clients_per_round": 3}, r"got \[0.5, 0.75\]"),
    ):
        trainer = federated_trainer(
            tmp_path, FedAvg(weighting="uniform"), other, sampler=PoissonSampler(), max_rounds=5,
            **{"clients_per_round": 2, **options},
        )  # fmt: skip
        with pytest.raises(FederatedError, match=said):
            trainer.fit(built(Classifier), federated_data(*CLIENTS), ckpt_path=str(path))


@ENGINES
def test_who_is_in_the_cohort_never_changes_the_noise_of_a_client(tmp_path: Path, engine: str) -> None:
    found: dict[tuple[int, int], Tensor] = {}

    class Notes(LocalDP):
        def encode(self, trainer: Any, pl_module: Any, update: Update) -> None:
            clipped = update.delta.clone()
            super().encode(trainer, pl_module, update)
            ClipUpdates(self.clip).encode(trainer, pl_module, Update(update.client, clipped, 1))
            noise, key = update.delta - clipped, (trainer.round, update.client.id)
            assert torch.allclose(found.setdefault(key, noise), noise, rtol=0, atol=1e-6)
            seen.append(key)

    counts = []
    for count in (1, 2, 4):
        seen: list[tuple[int, int]] = []
        fit(tmp_path, Notes(0.05, 1e-5, 1.0), clients_per_round=count, max_rounds=2, engine=engine)
        counts.append(len(seen))
    assert counts == [2, 4, 8]
    assert len(found) == 8
    assert all(not torch.allclose(found[1, 0], other) for key, other in found.items() if key != (1, 0))


@pytest.mark.parametrize("rule", [FedAvg, FedAvgM, FedAdam, FedYogi])
@pytest.mark.quick(2)
def test_every_rule_that_reads_the_mean_gets_the_noisy_one(tmp_path: Path, rule: Any) -> None:
    keeps, more = Keeps(), {"lr": 0.1} if rule in (FedAdam, FedYogi) else {}
    noisy = fit(tmp_path, rule(weighting="uniform", **more), CentralDP(0.05, 1e-5, 1.0), keeps, max_rounds=8)
    plain = fit(tmp_path, rule(weighting="uniform", **more), ClipUpdates(0.05), sampler=PoissonSampler(), max_rounds=8)
    assert not torch.allclose(noisy.weights, plain.weights, atol=1e-3)
    assert len(keeps.means) == 8
    assert all(mean.abs().min() > 0 for mean in keeps.means)


def test_epsilon_is_a_column_of_every_round(tmp_path: Path) -> None:
    trainer = fit(tmp_path, CentralDP(0.05, 1e-5, 0.8), logger=[], max_rounds=4)
    lines = [line.split(",") for line in trainer.books.run.metrics.read_text().splitlines()]
    at = lines[0].index("privacy/epsilon")
    assert lines[1][at] == ""  # before any training
    expected = [gaussian_epsilon(0.8, 0.5, rounds, 1e-5) for rounds in range(1, 5)]
    assert [float(line[at]) for line in lines[2:]] == pytest.approx(expected)


@pytest.mark.slow
def test_noise_is_found_for_an_epsilon(tmp_path: Path) -> None:
    trainer = fit(tmp_path, payload := CentralDP(0.05, 1e-5, epsilon=5.0), max_rounds=4)
    assert 5.0 - 1e-3 < trainer.metrics.logged["privacy/epsilon"] <= 5.0
    assert "accountant rdp" in payload.about
    assert "from the seed of the run" in payload.about
    local = fit(tmp_path, LocalDP(0.05, 1e-5, epsilon=5.0), max_rounds=4, clients_per_round=4)
    assert 5.0 - 1e-3 < local.metrics.logged["privacy/local_epsilon"] <= 5.0


def test_local_epsilon_is_that_of_who_took_part_most_often(tmp_path: Path) -> None:
    drawn: list[int] = []

    class Counts(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            drawn.extend(client.id for client in cohort.clients)

    trainer = fit(tmp_path, LocalDP(0.05, 1e-5, 3.0), Counts(), max_rounds=5)
    most = max(map(drawn.count, drawn))
    assert most < 5
    assert trainer.metrics.logged["privacy/local_epsilon"] == pytest.approx(gaussian_epsilon(1.5, 1.0, most, 1e-5))


def test_noise_from_the_system_is_another_each_time(tmp_path: Path) -> None:
    payload = CentralDP(0.05, 1e-5, 1.0, secret=True)
    runs = [fit(tmp_path, payload) for _ in range(2)]
    assert not torch.allclose(runs[0].weights, runs[1].weights, atol=1e-4)
    assert "from the operating system" in payload.about


@pytest.mark.parametrize(("secret", "source"), [("false", "the seed of the run"), ("true", "the operating system")])
def test_the_config_of_a_run_names_noise_and_accountant(tmp_path: Path, secret: str, source: str) -> None:
    file = REPOSITORY / "configs" / "privacy" / "central_dp.yaml"
    FederatedCLI(fit_words(tmp_path, 1, f"--config={file}", f"--trainer.callbacks.secret={secret}"))
    (run,) = run_folders(tmp_path)
    (line,) = [each for each in (run / "config.yaml").read_text().splitlines() if each.startswith("# CentralDP")]
    assert line.startswith(
        f"# CentralDP: noise 0.9114 from {source}, each client drawn with probability 0.5; epsilon up"
    )
    assert line.endswith("after 1 rounds at delta 1e-05, by the accountant rdp")


def test_a_mask_may_read_what_has_noise(tmp_path: Path) -> None:
    moved: list[float] = []
    for threshold in (0.0, 1.0, 50.0):
        mask = NoiseFloorMask(threshold)
        trainer = fit(tmp_path, FedAvg(weighting="uniform", mask=mask), CentralDP(0.05, 1e-5, 1.0), max_rounds=1)
        moved.append(trainer.metrics.logged["mask/mean"])
        controlled = FedAvg(weighting="uniform", mask=MaskControl(mask, "length"))
        fit(tmp_path, controlled, CentralDP(0.05, 1e-5, 1.0), max_rounds=1)
    assert moved[0] == 1.0
    assert 0 < moved[1] < 1
    assert moved[2] == 0.0


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


def test_what_it_does_not_cover_is_refused(tmp_path: Path) -> None:
    for payload in (CentralDP(0.05, 1e-5, 1.0), LocalDP(0.05, 1e-5, 1.0)):
        with pytest.raises(FederatedError, match="to stay as it is after the bound"):
            fit(tmp_path, payload, TopK(2), clients_per_round=4)
        with pytest.raises(FederatedError, match="Expected `--aggregator.buffers local` or keep"):
            fit(tmp_path, payload, net=built(Normed))
        with pytest.raises(FederatedError, match="Expected ClipUpdates before the payload that adds noise"):
            fit(tmp_path, payload, ClipUpdates(0.01))
    with pytest.raises(FederatedError, match="sampler PoissonSampler`, which CentralDP assumes.* got UniformSampler"):
        fit(tmp_path, CentralDP(0.05, 1e-5, 1.0), sampler=UniformSampler())
    with pytest.raises(FederatedError, match="`count_noise` of CentralDP above half of the noise 1, .* got 0.1"):
        fit(tmp_path, CentralDP(0.05, 1e-5, 1.0, quantile=0.5))  # q N / 20


def test_a_delta_that_says_nothing_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`delta` of CentralDP is 0.25 for 4 clients: publishing the data of one"):
        fit(tmp_path, CentralDP(0.05, 0.25, 1.0), max_rounds=1)


@pytest.mark.parametrize("kind", [CentralDP, LocalDP])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "Expected `noise` or `epsilon` of .*, got None and None"),
        ({"noise": 1.0, "epsilon": 1.0}, "got 1.0 and 1.0: give one of them"),
        ({"noise": 0.0}, "Expected `noise` of .* above 0"),
        ({"epsilon": -1.0}, "Expected `epsilon` of .* above 0"),
        ({"noise": 1.0, "clip": 0.0}, "Expected `clip` of .* above 0"),
        ({"noise": 1.0, "delta": 1.0}, "Expected `delta` of .* above 0 and below 1"),
    ],
)
def test_options_out_of_range_are_refused(kind: Any, options: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        kind(**{"clip": 1.0, "delta": 1e-5, **options})


@pytest.mark.parametrize("option", [{"quantile": 1.0}, {"clip_rate": 0.0}, {"count_noise": 0.0}, {"max_clip": 0.9}])
def test_options_of_the_quantile_out_of_range_are_refused(option: Any) -> None:
    with pytest.raises(FederatedError, match=f"Expected `{next(iter(option))}` of CentralDP"):
        CentralDP(1.0, 1e-5, 1.0, **option)


def test_numbers_of_the_system_are_normal_and_nobodys_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everywhere(0)
    first = system_normal(20_000)
    seed_everywhere(0)
    assert not torch.equal(first, system_normal(20_000))
    assert kstest(first, "norm").pvalue > 1e-8
    for byte in (b"\x00", b"\xff"):  # the ends of what the system may give
        monkeypatch.setattr(os, "urandom", lambda count, byte=byte: byte * count)
        assert 8 < system_normal(1).abs().item() < 9
