"""Methods whose clients have models of their own: limits, the mistakes of other libraries, engines, what is kept."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from lightning_fed.aggregators import FedAvg, FedAvgM, FedNova
from lightning_fed.client_algorithms import APFL, Ditto, FedGA, FedProx, LocalOnly, PFedMe
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import Tolerance
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from lightning_fed.sampling import Participation, UnequalWork
from tests.client_algorithms import second_loops as second
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.known_clients import LR, Linear, Quadratic
from tests.parts import Classifier, federated_data, federated_trainer

SIZES = (12, 6, 24, 13)
ROUNDS: dict[str, Any] = {"max_rounds": 3, "local_epochs": 2}
BESIDE: dict[str, Any] = {"Ditto": lambda: Ditto(0.5), "APFL": lambda: APFL(0.3), "adaptive": lambda: APFL(0.3, True)}
ALL: dict[str, Any] = {**BESIDE, "LocalOnly": LocalOnly, "PFedMe": lambda: PFedMe(3.0, 3, 0.1)}


class Shows(FederatedCallback):
    """Looks at every client's own model after each round.

    Attributes:
        own: Shape (clients, d), one for each round; the global model for those that have none yet.
    """

    def __init__(self, algorithm: Any) -> None:
        self.algorithm, self.own = algorithm, []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        rows, live = [], trainer.vector.data
        for client in range(len(trainer.client_sizes)):
            live.copy_(trainer.weights)
            self.algorithm.load_own(trainer, client)
            rows.append(live.clone())
        live.copy_(trainer.weights)
        self.own.append(torch.stack(rows))


class Stirred(Classifier):
    """Dropout and BatchNorm."""

    def __init__(self, optimizer: Any = None) -> None:
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
        super().__init__(net, optimizer)


def run(folder: Path, algorithm: Any, *others: Any, net: Any = Stirred, rule: Any = None, **options: Any) -> Any:
    """Trains three rounds; returns the trainer and what clients have of their own, shape (clients, d)."""
    torch.manual_seed(0)
    shows = Shows(algorithm)
    made = [rule or FedAvg(buffers="local"), *([algorithm, shows] if algorithm else []), *others]
    trainer = federated_trainer(folder, *made, **{"max_rounds": 3, **options})
    trainer.fit(net(), federated_data(*SIZES))
    return trainer, shows.own[-1] if algorithm else None


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.quick(2)
def test_the_global_model_is_that_of_fedavg_to_the_bit(name: str, engine: Any, tmp_path: Path) -> None:
    for rule in (FedAvg, lambda: FedAvg(mask=SignAgreement(0.8)), FedAvgM):
        plain, _ = run(tmp_path, None, rule=rule(), engine=engine)
        beside, own = run(tmp_path, BESIDE[name](), rule=rule(), engine=engine)
        assert torch.equal(plain.weights, beside.weights)
        assert all(torch.equal(a, b) for a, b in zip(plain.model.buffers(), beside.model.buffers(), strict=True))
        assert ((own - beside.weights).abs().amax(dim=1) > 1e-3).all()
        assert beside.totals == {**plain.totals, "gradients": 2 * plain.totals["gradients"]}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("make", [lambda: Ditto(0.0), lambda: APFL(1.0)], ids=["Ditto at 0", "APFL at 1"])
def test_without_the_server_it_is_local_only_to_the_bit(make: Any, engine: Any, tmp_path: Path) -> None:
    own, alone = (run(tmp_path, made, engine=engine)[1] for made in (make(), LocalOnly()))
    assert torch.equal(own, alone)


def test_own_optimizers_begin_each_round_anew_as_the_clients_do(tmp_path: Path) -> None:
    """Adagrad begins with a state, and momentum has one to forget."""
    for make in (lambda m: Adagrad(m.parameters(), 0.1), lambda m: SGD(m.parameters(), 0.1, momentum=0.9)):
        net = partial(Stirred, make)
        own, alone = (run(tmp_path, made, net=net)[1] for made in (Ditto(0.0), LocalOnly()))
        assert torch.equal(own, alone)


class Misses(Stirred):
    """A parameter that no batch reaches, and one that only the first batch of an epoch does."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.never, self.at_times = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss if batch_idx else loss + (self.at_times * batch[0][:, :3]).square().mean()


@pytest.mark.parametrize("kind", ["decay", "adamw"])
def test_own_steps_leave_what_the_batch_does_not_reach(kind: str, tmp_path: Path) -> None:
    """As plain training does: neither decay nor momentum moves it, and its moments wait."""
    makes: dict[str, Any] = {
        "decay": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
        "adamw": lambda m: AdamW(m.parameters(), 0.1, weight_decay=0.1),
    }
    options: dict[str, Any] = {"net": partial(Misses, makes[kind]), "engine": "sequential", "local_epochs": 2}
    alone = run(tmp_path, LocalOnly(), **options)[1]
    assert torch.equal(alone[:, :3], torch.ones(4, 3))
    for make in (lambda: Ditto(0.0), lambda: APFL(1.0)):
        assert torch.equal(run(tmp_path, make(), **options)[1], alone)
    mixed = run(tmp_path, Ditto(0.5), **options)[1]
    assert torch.equal(mixed[:, :3], torch.ones(4, 3))
    assert (mixed[:, 3:6] - 1).abs().min() > 1e-3


def test_ditto_at_lambda_of_one_over_the_rate_is_one_step_away_from_the_global_model(tmp_path: Path) -> None:
    """v = w - η ∇f(v), whatever v was; the smaller η, and the larger λ = 1 / η, the nearer."""
    for rate in (1e-2, 1e-4, 1e-6):
        net = lambda rate=rate: Classifier(optimizer=lambda m: SGD(m.parameters(), rate))  # noqa: E731  # no argument
        trainer, own = run(tmp_path, Ditto(1 / rate), net=net, precision="64-true", max_rounds=1)
        assert (own - trainer.weights).abs().max() < 5 * rate


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_at_0_apfl_shows_the_global_model(engine: Any, tmp_path: Path) -> None:
    trainer, own = run(tmp_path, APFL(0.0), engine=engine)
    assert torch.equal(own, trainer.weights.expand_as(own))


def test_local_only_leaves_the_global_model_alone_and_sends_nothing(tmp_path: Path) -> None:
    trainer, own = run(tmp_path, LocalOnly())
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in Stirred().parameters()])
    assert torch.equal(trainer.weights, start)
    assert ((own - start).abs().amax(dim=1) > 1e-2).all()
    names = ("comm/rounds", "comm/bytes_up", "comm/bytes_down")
    assert [trainer.totals[name] for name in names] == [0, 0, 0]
    assert all(type(trainer.totals[name]) is int for name in names)


def test_pfedme_with_one_inner_step_is_fedavg_at_another_rate_and_takes_no_second_gradient() -> None:
    """λ (w - θ) = λ η_θ ∇f(w)."""
    problem = Quadratic()
    plain, made = fit(problem, FedAvg(), **ROUNDS), fit(problem, FedAvg(), PFedMe(4.0, 1, 0.25), **ROUNDS)
    np.testing.assert_allclose(made.weights, plain.weights, rtol=1e-12)
    assert not PFedMe(inner_steps=1).takes_second_gradient


def test_pfedme_finds_the_minimum_of_its_envelope() -> None:
    """For a linear loss θ = w - g / λ, and w moves by -η g for each step, whatever λ is."""
    problem = Linear([2.0, -1.0], (3, 3))
    for lam in (1.0, 5.0):
        tape = fit(problem, FedAvg(lr=0.5), PFedMe(lam, 200, 0.5 / lam))
        np.testing.assert_allclose([tape.updates[0][i].item() for i in (0, 1)], [-2 * LR, LR], rtol=1e-10)
        np.testing.assert_allclose(tape.weights[0], 7 - 0.5 * LR * 0.5, rtol=1e-10)  # (1 - β) w + β mean


class Overwritten(second.APFLByHand):
    """The personal model becomes the mixture after each step."""

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w = start
        for rows in batches:
            end = super().train(i, w, [rows])
            self.own[i] = self.start * self.own[i] + (1 - self.start) * end
            w = end
        return w


class Untrained(second.APFLByHand):
    """The mixture is cut off the graph, and the personal model never gets a gradient."""

    def own_gradient(self, i: int, v: np.ndarray, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.zeros_like(v)


class SteppedTwice(second.APFLByHand):
    """The gradient of the mixture steps the global model a second time."""

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w = start
        for rows in batches:
            mixture = self.start * self.own.get(i, self.w) + (1 - self.start) * w
            w = super().train(i, w, [rows]) - LR * (1 - self.start) * self.problem.gradient(mixture, rows)
        return w


@pytest.mark.parametrize("mistake", [Overwritten, Untrained, SteppedTwice])
def test_apfl_makes_none_of_the_mistakes_of_other_libraries(mistake: Any) -> None:
    problem, algorithm = Quadratic(), APFL(0.4)
    shows = Shows(algorithm)
    tape = fit(problem, FedAvg(), algorithm, shows, **ROUNDS)
    right, wrong = (make(problem, alpha=0.4) for make in (second.APFLByHand, mistake))
    for batches, found, own in zip(tape.batches, tape.weights, shows.own, strict=True):
        np.testing.assert_allclose(found, right.run(batches), rtol=1e-10, atol=1e-12)
        mistaken = wrong.run(batches)
        for i in right.own:
            np.testing.assert_allclose(own[i].numpy(), right.shown(i), rtol=1e-10, atol=1e-12)
    apart = [np.abs(wrong.shown(i) - own[i].numpy()).max() for i in right.own]
    assert min(apart) > 1e-3
    assert (np.abs(mistaken - found).max() > 1e-3) == (mistake is SteppedTwice)


def test_an_alpha_that_adapts_follows_its_gradient_and_stays_in_its_range() -> None:
    problem, algorithm = Quadratic(), APFL(0.4, adaptive=True)
    shows, cohorts = Shows(algorithm), ((0, 1, 3), (3, 4, 1), (0, 4, 3))
    tape = fit(problem, FedAvg(), algorithm, shows, cohorts=cohorts, **ROUNDS)
    loop, seen = second.APFLByHand(problem, alpha=0.4, rate=LR), []
    for batches, own in zip(tape.batches, shows.own, strict=True):
        loop.run(batches)
        for i in range(len(problem.sizes)):
            np.testing.assert_allclose(own[i].numpy(), loop.shown(i), rtol=1e-9, atol=1e-11)
        seen += loop.alphas.values()
    assert {0.0, 1.0} & set(seen), "some reach the end of the range"
    assert any(0 < alpha < 1 and abs(alpha - 0.4) > 1e-2 for alpha in seen)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.quick(2)
def test_engines_and_chunks_agree(name: str, tmp_path: Path) -> None:
    """Clients that go on after others have taken their last step among them."""

    class Still(Stirred):
        def __init__(self) -> None:
            super().__init__(lambda m: SGD(m.parameters(), 0.1, momentum=0.5))
            self.net[3] = nn.Identity()

    def own(**options: Any) -> Tensor:
        return run(tmp_path, ALL[name](), net=Still, precision="64-true", **options)[1]

    alone = own(engine="sequential")
    for options in ({"chunk_size": 4}, {"chunk_size": 3}, {"chunk_size": 1}):
        torch.testing.assert_close(own(engine="vectorized", **options), alone, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["Ditto", "adaptive"])
def test_own_steps_take_the_clients_own_rate(name: str, tmp_path: Path) -> None:
    problem, algorithm = Quadratic(), BESIDE[name]()
    shows, factors = Shows(algorithm), {}
    work = Participation(work=UnequalWork(lr=[0.5, 1.0]))

    class Looks(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            factors[update.client.id] = update.client.lr_factor

    tape = fit(problem, FedAvg(), algorithm, shows, Looks(), optimizer="momentum", participation=work)
    loop: Any = second.DittoByHand(problem, "momentum", lam=0.5)
    if name == "adaptive":
        loop = second.APFLByHand(problem, "momentum", alpha=0.3, rate=LR)
    loop.factors = factors
    np.testing.assert_allclose(tape.weights[0], loop.run(tape.batches[0]), rtol=1e-10)
    assert len(set(factors.values())) > 1
    for i in factors:
        np.testing.assert_allclose(shows.own[0][i].numpy(), loop.shown(i), rtol=1e-10, atol=1e-12)
    options: dict[str, Any] = {"net": Classifier, "precision": "64-true", "participation": work}
    one, other = (run(tmp_path, BESIDE[name](), engine=engine, **options)[1] for engine in ("sequential", "vectorized"))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


class FarAway(FederatedCallback):
    """Puts the own model of client 1 so far away that its next step leaves the range of single precision."""

    def __init__(self, key: str) -> None:
        self.key, self.entered, self.kept = key, [], torch.empty(0)

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        if trainer.round == 2:
            trainer.client_states.store(self.key, 1, torch.full_like(trainer.weights, 1e38))

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.entered.append([client.id for client in update.clients])
        if trainer.round == 2:
            self.kept = torch.empty_like(trainer.weights)
            trainer.client_states.recall(self.key, 1, self.kept)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_client_whose_own_model_diverges_is_left_out_and_keeps_its_former_one(
    name: str, engine: Any, tmp_path: Path
) -> None:
    algorithm = BESIDE[name]()
    far = FarAway(algorithm.key)
    options = {"max_rounds": 2, "net": Classifier, "rule": FedAvg(), "engine": engine}
    with pytest.warns(UserWarning, match="Client 1 diverged in round 2 and is left out"):
        run(tmp_path, algorithm, far, tolerance=Tolerance(max_diverged=0.25), **options)
    assert far.entered == [[0, 1, 2, 3], [0, 2, 3]]
    assert torch.equal(far.kept, torch.full_like(far.kept, 1e38))
    with pytest.raises(FederatedError, match="client 1 diverged in round 2"):
        run(tmp_path, BESIDE[name](), FarAway(algorithm.key), **options)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", BESIDE)
def test_clients_that_train_in_bfloat16_step_own_models_in_single_precision(
    name: str, precision: Any, tmp_path: Path
) -> None:
    plain, _ = run(tmp_path, None, net=Classifier, precision=precision)
    algorithm = BESIDE[name]()
    kept = Kept(algorithm)
    beside, _ = run(tmp_path, algorithm, kept, net=Classifier, precision=precision)
    exact = Kept(algorithm)
    run(tmp_path, algorithm, exact, net=Classifier)
    assert torch.equal(beside.weights, plain.weights)
    assert 0 < np.abs(kept.own[-1] - exact.own[-1]).max() < 0.1
    assert (kept.own[-1] != torch.tensor(kept.own[-1]).bfloat16().float().numpy()).any()


@pytest.mark.parametrize("location", ["device", "disk"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.quick(3)
def test_a_resumed_run_goes_on_with_own_models(name: str, location: Any, tmp_path: Path) -> None:
    options = {"enable_checkpointing": True, "client_states": location, "clients_per_round": 2}

    def part(folder: str, rounds: int) -> Any:
        algorithm = ALL[name]()
        shows = Shows(algorithm)
        torch.manual_seed(0)
        rule = FedAvg(buffers="local")
        trainer = federated_trainer(tmp_path / folder, rule, algorithm, shows, max_rounds=rounds, **options)
        trainer.fit(Stirred(), federated_data(*SIZES), ckpt_path="last")
        return trainer, shows.own[-1]

    whole, own = part("whole", 4)
    part("parts", 2)
    parts, found = part("parts", 4)
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(found, own)


REFUSED: dict[str, tuple[Any, str]] = {
    "two": (
        lambda: [Ditto(), APFL()],
        r"one client algorithm that gives each client a model of its own, got Ditto and",
    ),
    "displaced": (lambda: [Ditto(), FedGA()], r"Ditto without FedGA, which displaces"),
    "rule": (lambda: [LocalOnly(), FedNova()], r"aggregator FedAvg for LocalOnly, .* got FedNova"),
    "buffers": (
        lambda: [LocalOnly(), FedAvg(buffers="keep")],
        r"`--aggregator.buffers local` for LocalOnly.* got keep",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(name: str, tmp_path: Path) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(FederatedError, match=f"^Expected .*{sentence}"):
        federated_trainer(tmp_path, *make()).fit(Stirred(), federated_data(*SIZES))


class Strange(SGD):
    """Of a user's own."""


def test_an_optimizer_that_may_look_at_whole_parameters_is_refused(tmp_path: Path) -> None:
    net = lambda: Stirred(lambda m: Strange(m.parameters(), 0.1))  # noqa: E731  # no argument
    with pytest.raises(FederatedError, match=r"each weight by its own gradient alone for Ditto, .* got Strange"):
        run(tmp_path, Ditto(), net=net)
    run(tmp_path, LocalOnly(), FedProx(0.1), net=net)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Ditto(-1.0), "lam"),
        (lambda: APFL(1.1), "alpha"),
        (lambda: APFL(adaptive="yes"), "adaptive"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_name_the_option(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--client\.{option}` of"):
        make()
