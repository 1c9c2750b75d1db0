"""The clients' losses at w, for rules that ask for them alone: right, by forward passes, and without a trace."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer, Need
from lightning_fed.aggregators import TERM, FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, GradAlign
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.holdout import DivisionOptions
from lightning_fed.engines.vectorized.step import StackedStep
from tests.engines.test_full_gradient import ENGINES, Collecting, Linear, Net, _fit, _tensors
from tests.parts import BySizes

LOSSES = Need.MEAN | Need.LOSSES


def collecting() -> Collecting:
    return Collecting(LOSSES, "start")


@pytest.mark.parametrize(("mode", "engine"), list(product(["eval", "train"], ENGINES)))
def test_asking_for_losses_changes_nothing_else(mode: Any, engine: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"full_gradient_mode": mode, "engine": engine}
    trainer, net = _fit(tmp_path, collecting(), **options)
    plain, other = _fit(tmp_path, FedAvg(), **options)
    assert torch.equal(trainer.weights, plain.weights)
    for (name, value), there in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, there), name
    assert trainer.logged_metrics["seen"] == plain.logged_metrics["seen"]


@pytest.mark.parametrize(("engine", "size"), list(product(ENGINES, [None, 5, 64])))
def test_a_loss_is_the_mean_over_all_samples_of_the_client(engine: Any, size: Any, tmp_path: Path) -> None:
    """At w, in whatever batches, and to the bit that of the pass that takes gradients there."""
    aggregator, gradients = collecting(), Collecting(Need.MEAN | Need.GRADIENTS, "start")
    options: dict[str, Any] = {"engine": engine, "full_gradient_batch_size": size}
    _, net = _fit(tmp_path, aggregator, **options)
    _fit(tmp_path, gradients, **options)
    for found, there in zip(aggregator.given, gradients.given, strict=True):
        torch.testing.assert_close(found.losses, there.losses, rtol=1e-6, atol=0)
        assert found.losses.dtype == torch.float64
        assert not len(found.gradients)
    assert (aggregator.given[0].losses - aggregator.given[1].losses).abs().min() > 1e-4


class Watched(Net):
    """Notes the grad mode of each pass, and whether dropout was on."""

    seen: list[tuple[bool, bool]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((torch.is_grad_enabled(), self.layers.training))
        return super().training_step(batch, batch_idx)


def test_it_is_a_forward_pass_alone(tmp_path: Path) -> None:
    Watched.seen = []
    _fit(tmp_path, collecting(), 1, Watched, engine="sequential")
    passes = [training for recorded, training in Watched.seen if not recorded]
    steps = [training for recorded, training in Watched.seen if recorded]
    assert passes == [False] * len(steps), "as many batches, without a gradient, in eval mode"
    assert all(steps)


def test_many_clients_at_once_take_forward_passes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(StackedStep):
        without: list[int] = []

        def _flat_loss(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            self.without.append(torch.is_grad_enabled())
            return super()._flat_loss(*inputs)

    monkeypatch.setattr("lightning_fed.engines.vectorized.engine.StackedStep", Counting)
    aggregator = collecting()
    _fit(tmp_path, aggregator, 1, engine="vectorized")
    assert Counting.without
    assert not any(Counting.without)
    assert len(aggregator.given[0].losses) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", [lambda: SCAFFOLD("I"), FedGA], ids=["SCAFFOLD", "FedGA"])
def test_a_pass_that_takes_gradients_serves_losses_too(client: Any, engine: Any, tmp_path: Path) -> None:
    def losses(*callbacks: Any) -> tuple[Tensor, float]:
        aggregator = collecting()
        parts: Any = [aggregator, *callbacks]
        trainer, _ = _fit(tmp_path, parts, 1, PlainLosses, engine=engine)
        return aggregator.given[0].losses, float(trainer.logged_metrics["gradients"])

    (alone, alone_cost), (shared, shared_cost) = losses(), losses(client())
    torch.testing.assert_close(alone, shared, rtol=1e-6, atol=0)
    assert alone_cost == shared_cost == 100, "50 samples in steps, and 50 in one pass"


class PlainLosses(Net):
    """With an optimizer whose distance is known."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Net):
    """No loss at w over the data of the client that holds the sample of most, but a finite one in its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.is_grad_enabled():
            return loss
        return torch.where(batch[0].max() > LARGEST, loss * torch.nan, loss)


LARGEST = _tensors()[0].max().item() - 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_a_finite_loss_is_left_out(engine: Any, tmp_path: Path) -> None:
    aggregator = collecting()
    trainer, _ = _fit(tmp_path, aggregator, 1, Broken, engine=engine, max_diverged=0.5)
    assert aggregator.given[0].num_clients == 2
    assert aggregator.given[0].losses.isfinite().all()
    with pytest.raises(FederatedError, match="diverged"):
        _fit(tmp_path, collecting(), 1, Broken, engine=engine)


def test_losses_over_other_samples_than_gradients_are_refused(tmp_path: Path) -> None:
    parts: Any = [collecting(), GradAlign(0.1, over="batch")]
    with pytest.raises(FederatedError, match=r"over the same samples, got Collecting, .*`--client.over batch`"):
        _fit(tmp_path, parts, local_steps=1)


def test_losses_at_w_beside_gradients_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"Expected `gradient_at` start of Collecting, .* got end"):
        _fit(tmp_path, Collecting(LOSSES | Need.GRADIENTS, "end"))


class Elsewhere(Collecting):
    """Asks for losses at another point, or over other samples."""

    def __init__(self, at: Any, over: Any) -> None:
        super().__init__(LOSSES, "start")
        self.losses_at, self.losses_over = at, over
        self.now: list[Tensor] = []
        self.after: list[Tensor] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.after.append(trainer.weights.clone())
        self.now.append(trainer.start_gradients.losses_now(update.clients))
        assert torch.equal(trainer.vector.data, trainer.weights), "the module is the global model again"
        values = trainer.train_state.buffers.values
        assert all(torch.equal(values[name], buffer) for name, buffer in pl_module.named_buffers())


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_after_the_step_leave_no_buffers_of_a_client(engine: Any, tmp_path: Path) -> None:
    rule = Elsewhere("end", "train")
    rule.buffers = "local"
    _fit(tmp_path, rule, engine=engine)
    assert len(rule.now) == 2


class Holding(FederatedDataModule):
    """Of the 50 samples in order clients get 20, 20 and 10, of which every fifth is held out."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(*_tensors()), BySizes(20, 20, 10), num_clients=3, batch_size=6)
        self.held_out = DivisionOptions(0.2, "per_client")


class LinearAlone(Linear):
    """Without decay, dropout and BatchNorm."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AsksAtTheEnd(FederatedCallback):
    """Keeps where each client ends."""

    stacks = True

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.found.append(trainer.vector.data.clone())


def quiet_trainer(folder: Path, *callbacks: Any, **options: Any) -> FederatedTrainer:
    return FederatedTrainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(folder), **{"max_rounds": 2, **options},
    )  # fmt: skip


POINTS = list(product(["start", "end"], ["train", "held_out"]))


@pytest.mark.parametrize(("at", "over"), POINTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [LinearAlone, Net])
def test_losses_are_where_and_over_what_the_rule_says(
    kind: Any, at: Any, over: Any, engine: Any, tmp_path: Path
) -> None:
    """In double precision that of a model made anew; and training goes on as if nobody had asked."""
    aggregator, ends, plain_ends = Elsewhere(at, over), AsksAtTheEnd(), AsksAtTheEnd()
    runs = []
    for rule, keeps in ((aggregator, ends), (FedAvg(), plain_ends)):
        torch.manual_seed(0)
        net, data = kind(), Holding()
        trainer = quiet_trainer(tmp_path, rule, keeps, engine=engine, precision="64-true")
        trainer.fit(net, data)
        runs.append(trainer)
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert torch.equal(torch.stack(ends.found), torch.stack(plain_ends.found)), "the client's model when it has entered"
    assert runs[0].logged_metrics["seen"] == runs[1].logged_metrics["seen"]
    split = data.split if over == "train" else data._client_data().held_out_split("val")
    count = int(split.sizes.sum())
    once = runs[1].totals["samples"] + count * 4
    assert runs[0].totals["gradients"] == once, "a pass for each round, and one after it"
    if kind is Net:  # what BatchNorm keeps is another for each
        return
    for number, update in enumerate(aggregator.given):
        for i in range(3):
            rows = split.index[split.offsets[i] : split.offsets[i + 1]]
            start = aggregator.before[number] if at == "start" else ends.found[3 * number + i]
            for weights, found in ((start, update.losses), (aggregator.after[number], aggregator.now[number])):
                made = LinearAlone().double()
                torch.nn.utils.vector_to_parameters(weights, made.parameters())
                x, y = (tensor[rows] for tensor in _tensors())
                loss = torch.nn.functional.cross_entropy(made.layers(x.double()), y)
                torch.testing.assert_close(found[i], loss.detach(), rtol=1e-10, atol=1e-12)


def test_clients_that_keep_their_buffers_leave_none_of_them_in_the_model(tmp_path: Path) -> None:
    seen = []

    class Looking(Elsewhere):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            super().on_after_server_step(trainer, pl_module, update)
            seen.append(pl_module.layers[1].running_mean.clone())

    aggregator = Looking("end", "held_out")
    aggregator.buffers = "local"
    quiet_trainer(tmp_path, aggregator).fit(Net(), Holding())
    assert not torch.stack(seen).any(), "the global model keeps its initial ones"


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_over_other_samples_do_not_mix_with_gradients_at_w(engine: Any, tmp_path: Path) -> None:
    """SCAFFOLD's are over training samples; and gradients that end elsewhere go beside them."""
    alone, beside = Elsewhere("start", "held_out"), Elsewhere("start", "held_out")
    for rule, others in ((alone, []), (beside, [SCAFFOLD("I")])):
        torch.manual_seed(0)
        quiet_trainer(tmp_path, rule, *others, engine=engine, max_rounds=1).fit(PlainLosses(), Holding())
    assert torch.equal(alone.given[0].losses, beside.given[0].losses)
    both = Elsewhere("end", "train")
    both.needs, both.gradient_at = LOSSES | Need.GRADIENTS, "end"
    torch.manual_seed(0)
    quiet_trainer(tmp_path, both, engine=engine, max_rounds=1).fit(PlainLosses(), Holding())
    assert len(both.given[0].gradients) == 3


class Asks(FederatedCallback):
    """Reads losses of the reduced update."""

    needs = Need.LOSSES


def test_a_callback_gets_losses_only_beside_a_rule_that_asks_too(tmp_path: Path) -> None:
    with pytest.raises(
        FederatedError, match=r"`needs` of Asks .* that FedAvg asks for too, got .*LOSSES.*--aggregator"
    ):
        quiet_trainer(tmp_path, FedAvg(), Asks())
    quiet_trainer(tmp_path, TERM(), Asks())


class Inward(Net):
    """Takes a gradient of its own in each step."""

    recorded = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(self.recorded or torch.is_grad_enabled()):
            loss = super().training_step(batch, batch_idx)
            (inner,) = torch.autograd.grad(loss, [self.layers[0].weight], create_graph=True)
            return loss + inner.square().sum()


def test_a_step_that_takes_gradients_itself_is_told_how_to(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"`training_step` of Inward to give .* `with torch.enable_grad\(\):`"):
        _fit(tmp_path, collecting(), 1, Inward)

    class Recorded(Inward):
        recorded = True

    aggregator = collecting()
    _fit(tmp_path, aggregator, 1, Recorded)
    assert aggregator.given[0].losses.isfinite().all()
