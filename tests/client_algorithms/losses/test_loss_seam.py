"""What every loss algorithm stands on: the call at other weights, terms, what goes with them and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import MOON, FedIIR, FedLC, FedNTD, FedProx, FedRS, LogitAdjustment, LossAlgorithm
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.client_algorithms.losses import scored_clients as hand
from tests.client_algorithms.losses.scored_clients import CLASSES, SIZES, ScoredModule, fit, fit_weights, scored_data
from tests.client_algorithms.losses.test_loss_parity import ENGINES, batches, differ

ALL = {"sampler": None, "clients_per_round": 1.0}


class Busy(ScoredModule):
    """Everything that a second pass could disturb: BatchNorm, dropout, a running centre."""

    dropout = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5).double(), nn.Dropout(self.dropout)
        self.register_buffer("center", torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.body(x))))
        self.center.lerp_(hidden.detach().mean(0), 0.3)
        scores: Tensor = self.head(hidden - self.center)
        return nn.functional.dropout(scores, self.dropout / 2, self.training)


class Calm(Busy):
    """The same without random numbers, for many clients at once."""

    dropout = 0.0


class LooksOnly(LossAlgorithm):
    """Calls the module at two other points and adds nothing."""

    stacks = True

    def prepare(self, trainer: Any, client: Any) -> dict[str, Tensor]:
        return {"other": trainer.weights + client.id}

    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        for point in (call.weights, own["other"]):
            assert not call.at(point).output.requires_grad
        return 0 * call.output.sum()


@pytest.mark.parametrize(("kind", "engine"), [(Busy, "sequential"), (Calm, "sequential"), (Calm, "vectorized")])
def test_a_look_at_other_weights_changes_no_bit(kind: type[Busy], engine: str) -> None:
    looked, plain = kind(), kind()
    found = fit_weights(LooksOnly(), module=looked, engine=engine)
    assert differ(found, fit_weights(module=plain, engine=engine)) == 0
    assert all(torch.equal(a, b) for a, b in zip(looked.buffers(), plain.buffers(), strict=True))
    assert not looked._forward_hooks
    assert not looked.head._forward_pre_hooks
    assert all(part.training for part in looked.modules())


class AtLive(LossAlgorithm):
    """Notes whether the module at the live weights gives what the step gave."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        self.vector = trainer.vector

    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        again = call.at(self.vector.data.clone())
        self.same += [torch.equal(again.output, call.output), torch.equal(again.features[None], call.features[None])]
        return 0 * call.output.sum()


class Convolved(LightningModule):
    """A convolution whose weights lie in memory by channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, (1, 2)).double().to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :2, None, None].expand(-1, 2, 3, 4)
        scores: Tensor = self.head(self.conv(images).mean((2, 3)))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NormedModule(ScoredModule):
    """BatchNorm, which normalises by the batch at other weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return scores


@pytest.mark.parametrize("kind", [ScoredModule, NormedModule, Calm, Convolved])
def test_at_the_live_weights_the_module_gives_what_the_step_gave(kind: Any) -> None:
    looks = AtLive()
    fit(looks, module=kind(), max_rounds=1)
    assert len(looks.same) > 4
    # Calm's running centre has moved on between the two.
    assert all(looks.same[1::2]) or kind is Calm
    assert all(looks.same[::2]) != (kind is Calm)


def test_memory_order_is_kept_for_many_clients() -> None:
    found = [fit_weights(MOON(3.0), module=Convolved(), engine=engine) for engine in ENGINES]
    assert differ(*found) < 1e-12
    assert differ(found[0], fit_weights(module=Convolved())) > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_of_the_step_and_the_term_are_logged_apart(engine: str) -> None:
    """In a first round MOON's term is μ log 2 whatever the features."""
    trainer = fit(MOON(3.0), engine=engine, max_rounds=1, local_epochs=None, local_steps=1)
    plain = fit(engine=engine, max_rounds=1, local_epochs=None, local_steps=1)
    assert trainer.callback_metrics["train/term"] == pytest.approx(3 * math.log(2), rel=1e-6)
    assert trainer.callback_metrics["train/loss"] == plain.callback_metrics["train/loss"]
    assert "train/term" not in {**plain.callback_metrics, **fit(FedLC(), max_rounds=1).callback_metrics}


LIMITS = [FedLC(0.0), LogitAdjustment(0.0), FedRS(1.0), MOON(0.0), FedNTD(0.0), FedIIR(0.0)]


@pytest.mark.parametrize(("kind", "engine"), [(Busy, "sequential"), (Calm, "vectorized")])
@pytest.mark.parametrize("at_limit", LIMITS, ids=lambda one: type(one).__name__)
@pytest.mark.quick(3)
def test_at_its_limit_it_is_fedavg_to_the_bit(at_limit: LossAlgorithm, kind: type[Busy], engine: str) -> None:
    assert differ(fit_weights(at_limit, module=kind(), engine=engine), fit_weights(module=kind(), engine=engine)) == 0


def test_at_its_limit_fediir_exchanges_nothing() -> None:
    plain, at_limit = fit().totals, fit(FedIIR(0.0)).totals
    assert at_limit == plain
    assert plain["comm/rounds"] == hand.ROUNDS


class ProximalByHand(hand.CalibratedByHand):
    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(i, w, x, y) + 0.35 * (w - self.w).square().sum()


class MaskedByHand(hand.MoonByHand):
    """GMA: coordinates whose signs agree less than 0.8 are scaled by their agreement; all clients count alike."""

    def run(self, batches: dict[int, list[list[int]]]) -> Tensor:
        before = self.w
        super().run(batches)
        steps = torch.stack([self.ends[i] - before for i in batches])
        agreement = steps.sign().mean(0).abs()
        self.w = before + torch.where(agreement >= 0.8, 1.0, agreement) * steps.mean(0)
        return self.w


@pytest.mark.parametrize("engine", ENGINES)
def test_with_fedprox_and_with_gma(engine: str) -> None:
    proximal, masked = ProximalByHand(0.7), MaskedByHand(3.0, 0.4)
    found = fit_weights(FedLC(0.7), FedProx(0.7), engine=engine)
    assert differ(found, [proximal.run(each) for each in batches()]) < 1e-12
    gma = FedAvg(mask=SignAgreement(0.8), weighting="uniform")
    found = fit_weights(MOON(3.0, 0.4), gma, engine=engine)
    assert differ(found, [masked.run(each) for each in batches()]) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_a_list_changes_no_bit(engine: str) -> None:
    made = [FedIIR(0.5), FedRS(0.5), FedNTD(1.0), FedLC(0.7, 0.5), MOON(3.0)]
    assert differ(fit_weights(*made, engine=engine), fit_weights(*reversed(made), engine=engine)) == 0


class Smoothed(ScoredModule):
    smoothing = 0.1


def smoothed(scores: Tensor, y: Tensor) -> Tensor:
    logs = scores.log_softmax(1)
    return -(0.9 * logs[range(len(y)), y] + 0.1 * logs.mean(1)).mean()


class SmoothedByHand(hand.ByHand):
    """Logit adjustment and FedIIR over label smoothing, whose head gradient has smoothed targets."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(6 * CLASSES, dtype=torch.float64)

    def gradient(self, w: Tensor, rows: Any, offsets: Tensor) -> Tensor:
        x, y = self.inputs[rows], self.labels[rows]
        targets = 0.9 * torch.eye(CLASSES, dtype=w.dtype)[y] + 0.1 / CLASSES
        away = ((hand.scores_of(w, x) + offsets).softmax(1) - targets) / len(y)
        return torch.cat([(away.T @ hand.features_of(w, x)).flatten(), away.sum(0)])

    def begin(self, cohort: list[int]) -> None:
        total, none = sum(SIZES[i] for i in cohort), torch.zeros(CLASSES)
        new = sum(SIZES[i] / total * self.gradient(self.w, self.rows_of(i), none) for i in cohort)
        self.mean = 0.5 * self.mean + 0.5 * new

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        counts = torch.tensor([n or 0.5 for n in hand.counts_of(i).values()])
        offsets = (counts.double() / SIZES[i]).log()
        rows = [int((self.inputs == row).all(1).nonzero()) for row in x]
        away = self.gradient(w, rows, offsets) - self.mean
        return smoothed(hand.scores_of(w, x) + offsets, y) + 0.8 * away @ away


@pytest.mark.parametrize("engine", ENGINES)
def test_with_another_criterion_of_the_users(engine: str) -> None:
    """The mean gradients, taken over all data, are of the module's own loss; the step's is the adjusted one."""
    algorithms = LogitAdjustment(1.0, absent=0.5), FedIIR(0.8, 0.5)
    loop = SmoothedByHand()
    found = fit_weights(*algorithms, module=Smoothed(), engine=engine)
    assert differ(found, [loop.run(each) for each in batches()]) < 1e-12


def test_left_out_classes_stay_finite_under_a_criterion_that_reads_them() -> None:
    assert all(w.isfinite().all() for w in fit_weights(FedLC(), module=Smoothed()))


@pytest.mark.parametrize("algorithm", [FedLC(0.7), FedNTD(2.0), MOON(3.0)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_accumulated_batches_are_one_batch(algorithm: LossAlgorithm, engine: str) -> None:
    inputs, labels = (part[:18] for part in hand.make_samples())
    found = []
    for size, window, given in ((6, 1, [algorithm]), (3, 2, [algorithm]), (3, 2, [])):
        data = scored_data(inputs, labels, sizes=(12, 6))
        data.batch_size = size
        options: Any = {"accumulate_grad_batches": window, "local_epochs": 1, "max_rounds": 2, **ALL}
        found.append(fit_weights(*given, data=data, engine=engine, **options))
    assert differ(found[0], found[1]) < 1e-12
    assert differ(found[0], found[2]) > 1e-4


class SearchingScored(ScoredModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")


def test_a_line_search_sees_the_term() -> None:
    """LBFGS with FedNTD is torch's over the loss with its term."""
    loop = hand.DistilledByHand(2.0, 1.7)
    w = loop.w.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([w], lr=1.0, max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loop.loss(0, w, loop.inputs[:6], loop.labels[:6])
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]  # torch asks for float
    data = scored_data(*(part[:6] for part in hand.make_samples()), sizes=(6,))
    data.batch_size = 6
    options: Any = {"local_epochs": 2, "max_rounds": 1, **ALL}
    found = fit(FedNTD(2.0, 1.7), module=SearchingScored(), data=data, **options).weights
    torch.testing.assert_close(found, w.detach(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_narrow_precision_is_near(precision: str, engine: str) -> None:
    algorithms = FedLC(0.7), MOON(3.0), FedNTD(1.0), FedIIR(0.5)
    module, options = ScoredModule().float(), {"max_rounds": 2, "engine": engine}
    inputs, labels = hand.make_samples()
    narrow = fit_weights(
        *algorithms, module=module, data=scored_data(inputs.float(), labels), precision=precision, **options
    )
    torch.testing.assert_close(narrow[-1].double(), fit_weights(*algorithms, **options)[-1], rtol=0, atol=0.05)


def test_a_killed_run_goes_on_with_the_last_models_and_the_mean_gradient(tmp_path: Path) -> None:
    def run(name: str, rounds: int, **options: Any) -> Any:
        made = FedIIR(0.5)
        kept = {"enable_checkpointing": True, "client_states": "disk", "default_root_dir": str(tmp_path / name)}
        return fit(MOON(3.0), made, max_rounds=rounds, **kept, **options), made

    whole, wanted = run("whole", 4)
    run("parts", 2)
    assert len(list(tmp_path.glob("parts/**/client_states/MOON/*.npy"))) == 4
    parts, found = run("parts", 4, ckpt_path="last")
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(found.mean, wanted.mean)


class Apart(ScoredModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.head(torch.tanh(self.body(batch[0]))), batch[1])


class CallsTwice(ScoredModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]) + self(batch[0]), batch[1])


class OneLayerScored(ScoredModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(3, CLASSES).double()


class ByHandSteps(ScoredModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Few(ScoredModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2).double()


class Headless(ScoredModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Bilinear(3, 3, 5).double(), nn.Bilinear(5, 5, CLASSES).double()


class Spare(ScoredModule):
    """Assigns a linear layer after the head that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2).double()


class FrozenHead(ScoredModule):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


class Numbered(LossAlgorithm):
    def prepare(self, trainer: Any, client: Any) -> dict[str, Tensor]:
        return {"strength": torch.ones(())}

    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        return own["strength"] * call.loss


class CountingLoss(LossAlgorithm):
    def prepare(self, trainer: Any, client: Any) -> dict[str, Tensor]:
        return {"counts": self.class_counts(trainer, client)}

    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        return own["counts"].sum() * call.loss


class Vector(LossAlgorithm):
    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        return torch.zeros(2)


REFUSED: list[tuple[LossAlgorithm, type[ScoredModule], dict[str, Any], str]] = [
    (FedLC(), Apart, {}, r"`training_step` of Apart to call `self\(x\)` for FedLC, .* 0 times: .*`forward`"),
    (MOON(), CallsTwice, {}, r"`self\(x\)` once for MOON, .* does so 2 times"),
    (FedLC(), ScoredModule, {"compile": True}, r"not compiled for FedLC.*`--trainer.compile`"),
    (MOON(), ByHandSteps, {}, r"automatic optimization.*MOON changes the loss before the backward pass"),
    (MOON(), OneLayerScored, {}, r"train layers before .*`--client.layer`"),
    (
        MOON(layer="neck"),
        ScoredModule,
        {},
        r"`--client.layer` to name a layer of ScoredModule, got 'neck': it has body, head\.",
    ),
    (MOON(), Headless, {}, r"Headless to have a linear layer.*`--client.layer`"),
    (FedIIR(layer="none"), ScoredModule, {}, r"`--client.layer` to name a layer"),
    (MOON(), Spare, {}, r"`self\(x\)` of Spare to call the layer .*`--client.layer`"),
    (FedIIR(), Spare, {}, r"loss to depend on the layer .*FedIIR.*`--client.layer`"),
    (FedIIR(), FrozenHead, {}, r"FedIIR compares to be trained.*`--client.layer`"),
    (Numbered(), ScoredModule, {}, r"`prepare` of Numbered to return vectors by name, got 'strength' of shape \(\)"),
    (FedRS(), Few, {}, r"scores \(B, C\) of the 4 classes .* FedRS, got shape \(\d, 2\)"),
    (Vector(), ScoredModule, {}, r"`term` of Vector to return a scalar tensor, got a tensor of shape \(2,\)"),
]


@pytest.mark.parametrize(("algorithm", "kind", "options", "words"), REFUSED)
@pytest.mark.quick(5)
def test_what_cannot_work_is_one_sentence(algorithm: Any, kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError, match=f"^Expected .*{words}"):
        fit(algorithm, module=kind(), max_rounds=1, **options)


def test_data_without_labels_are_refused() -> None:
    inputs = hand.make_samples()[0]
    for algorithm in (FedLC(), CountingLoss()):
        name = type(algorithm).__name__
        with pytest.raises(FederatedError, match=rf"^Expected class labels for {name}.*FederatedDataModule.*`targets`"):
            fit(algorithm, data=scored_data(inputs, inputs))


class Reversed(ScoredModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[1]), batch[0])


def test_a_batch_without_labels_in_second_place_is_refused() -> None:
    inputs, labels = hand.make_samples()
    with pytest.raises(FederatedError, match=r"^Expected a batch \(inputs, labels, \.\.\.\).*`--data`"):
        fit(FedNTD(), module=Reversed(), data=scored_data(labels, inputs))


@pytest.mark.parametrize(
    ("kind", "arguments", "option"),
    [
        (FedLC, {"tau": -1}, "tau"), (FedLC, {"absent": -1}, "absent"), (LogitAdjustment, {"tau": "x"}, "tau"),
        (LogitAdjustment, {"absent": math.inf}, "absent"), (FedRS, {"alpha": 1.1}, "alpha"), (MOON, {"mu": -1}, "mu"),
        (MOON, {"temperature": 0}, "temperature"), (FedNTD, {"beta": -1}, "beta"), (FedIIR, {"ema": 1.0}, "ema"),
        (FedNTD, {"temperature": 0}, "temperature"), (FedIIR, {"gamma": -1}, "gamma"),
    ],
)  # fmt: skip
def test_bad_arguments_name_the_option(kind: Any, arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected `--client\.{option}` of {kind.__name__}"):
        kind(**arguments)
