"""What a method sees must not depend on another's form: displaced starts, parameters nobody trains, votes, noise."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.aggregators import CGW, FedAvg, FedDynServer, FedGMA, MultiKrum, TrimmedMean
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import (
    SCAFFOLD,
    FedDyn,
    FedGA,
    FedProx,
    GradAlign,
    LinearScaling,
    StatelessSCAFFOLD,
)
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import checkpoint_contents
from tests.parts import Classifier, federated_data, federated_trainer


def model(**options: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(**options)


def weights_after(folder: Path, *callbacks: Any, module: Any = None, **options: Any) -> torch.Tensor:
    options = {"max_rounds": 3, "precision": "64-true", **options}
    trainer = federated_trainer(folder, *callbacks, **options)
    trainer.fit(module if module is not None else model(), federated_data(6, 20, 11))
    return trainer.weights.clone()


@pytest.mark.parametrize("make", [lambda: CGW(0.3), lambda: FedGMA(gradient_at="end")], ids=["cgw", "fedgma"])
def test_both_forms_of_fedga_agree_under_methods_that_take_a_gradient_at_the_end(make: Any, tmp_path: Path) -> None:
    start, step = (weights_after(tmp_path, make(), FedGA(0.5, form=form)) for form in ("start", "step"))
    torch.testing.assert_close(start, step, rtol=0, atol=1e-10)
    assert (start - weights_after(tmp_path, make())).abs().max() > 1e-3


@pytest.mark.parametrize(
    "aggregator", [CGW(0.3), FedGMA(), FedGMA(gradient_at="end"), FedGMA(gradient_at="last_step")],
    ids=["cgw", "start", "end", "last_step"],
)  # fmt: skip
def test_what_no_client_trains_is_left_alone(aggregator: Any, tmp_path: Path) -> None:
    body, head = nn.Linear(5, 4), nn.Linear(4, 3)
    before = body.weight.detach().clone().double()
    module = model(
        net=nn.Sequential(body, nn.Tanh(), head), optimizer=lambda m: torch.optim.SGD(head.parameters(), lr=0.1)
    )
    weights_after(tmp_path, aggregator, module=module)
    assert torch.equal(body.weight, before)


@pytest.mark.parametrize("rule", [TrimmedMean(0), MultiKrum(0, 3)], ids=["trimmed", "multi-krum"])
@pytest.mark.parametrize("client", [lambda: SCAFFOLD("I"), StatelessSCAFFOLD, lambda: FedGA(0.5)])
def test_exchanges_weigh_clients_as_the_rule_does(rule: Any, client: Any, tmp_path: Path) -> None:
    uniform = weights_after(tmp_path, FedAvg(weighting="uniform"), client())
    torch.testing.assert_close(weights_after(tmp_path, rule, client()), uniform, rtol=0, atol=1e-12)


class Noise(FederatedCallback):
    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.delta.add_(torch.randn_like(update.delta), alpha=0.1)


@pytest.mark.parametrize("at_limit", [lambda: CGW(0.0), lambda: FedGMA(server_lr=0.0, gradient_at="end")])
def test_a_pass_at_the_end_leaves_later_draws_alone(at_limit: Any, tmp_path: Path) -> None:
    assert torch.equal(weights_after(tmp_path, at_limit(), Noise()), weights_after(tmp_path, FedAvg(), Noise()))


class Spoil(FederatedCallback):
    """Makes the update of client 1 unusable after the engine has looked at it."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.id == 1:
            update.delta.fill_(torch.nan)


class Votes(FederatedCallback):
    """Keeps what FedGMA's clients sent besides."""

    def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.votes = update.sums["FedGMA"].clone()


def test_a_client_that_is_left_out_late_has_no_vote_and_keeps_its_buffers(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    rule, seen = FedGMA(p_means="prose", buffers="local"), Votes()
    trainer = federated_trainer(tmp_path, rule, Spoil(), seen, max_diverged=0.5)
    trainer.fit(model(net=net), federated_data(6, 20, 11))
    assert seen.votes.max() == 2
    assert set(trainer.buffers._of_client) == {0, 2}


def test_train_mode_leaves_parts_in_eval_that_training_leaves_there(tmp_path: Path) -> None:
    class Frozen(Classifier):
        def on_fit_start(self) -> None:
            self.net[0].eval()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.net[0].training
            return self.loss(batch)

    torch.manual_seed(0)
    module = Frozen(net=nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)))
    weights_after(tmp_path, FedGA(0.1), module=module, full_gradient_mode="train")


def test_lbfgs_with_accumulated_batches_is_refused(tmp_path: Path) -> None:
    module = model(optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(FederatedError, match="accumulate_grad_batches 1` with LBFGS"):
        weights_after(tmp_path, module=module, accumulate_grad_batches=2)


def test_measuring_from_the_global_model_holds_with_weight_decay(tmp_path: Path) -> None:
    class Keep(FederatedCallback):
        def __init__(self) -> None:
            self.deltas: list[torch.Tensor] = []

        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            self.deltas.append(update.delta.clone())

    def deltas(measure_from: Any, decay: float) -> torch.Tensor:
        keep = Keep()
        module = model(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=decay))
        weights_after(tmp_path, FedGA(0.5, measure_from=measure_from), keep, module=module, max_rounds=1)
        return torch.stack(keep.deltas)

    for decay in (0.0, 1e-12):
        assert (deltas("global", decay) - deltas("displaced", decay)).abs().max() > 1e-2
    torch.testing.assert_close(deltas("global", 1e-12), deltas("global", 0.0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("algorithm", [GradAlign(), LinearScaling()])
def test_a_fast_run_of_several_rounds_keeps_one_local_step(algorithm: Any, tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, FedAvg(weighting="uniform"), algorithm, local_steps=1, fast_dev_run=2)
    trainer.fit(model(), federated_data(6, 20, 11, batch_size=64))
    assert trainer.round == 2


def test_linear_scaling_refuses_clipping(tmp_path: Path) -> None:
    trainer = federated_trainer(
        tmp_path, FedAvg(weighting="uniform"), LinearScaling(), local_steps=1, gradient_clip_val=1.0
    )
    with pytest.raises(FederatedError, match="no gradient clipping with LinearScaling"):
        trainer.fit(model(), federated_data(6, 20, batch_size=64))


def run_with(folder: Path, *callbacks: Any, **fit: Any) -> Any:
    trainer = federated_trainer(folder, *callbacks, enable_checkpointing=True, logger=None, max_rounds=2)
    trainer.logger_choice = []
    trainer.fit(model(), federated_data(6, 20), **fit)
    return trainer


def test_a_run_is_not_resumed_by_another_method_or_another_alpha(tmp_path: Path) -> None:
    path = str(run_with(tmp_path, FedDynServer(alpha=0.5), FedDyn()).run.checkpoints / "last.ckpt")
    for callbacks, said in (
        ((FedDynServer(alpha=0.05), FedDyn()), "alpha 0.5"),
        ((FedAvg(), SCAFFOLD()), "same methods as in the run"),
        ((FedDynServer(alpha=0.5),), "same methods as in the run"),
    ):
        with pytest.raises(FederatedError, match=said):
            run_with(tmp_path, *callbacks, ckpt_path=path)


def test_the_server_half_of_feddyn_alone_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="--client FedDyn"):
        weights_after(tmp_path, FedDynServer(), max_rounds=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrimmedMean(1.5), lambda: TrimmedMean(True), lambda: FedGA({"1": 0.1}), lambda: FedGA("0.1"),
        lambda: FedGA({1.5: 0.1}), lambda: FedGA(True), lambda: FedProx(None), lambda: FedAvg(lr="1"),
        lambda: FedDynServer(alpha=None), lambda: FederatedCheckpoint(mode="Max"),
        lambda: FederatedCheckpoint(every_n_rounds=1.5),
    ],
)  # fmt: skip
def test_wrong_types_are_told_in_one_sentence(make: Any) -> None:
    with pytest.raises(FederatedError, match="^Expected "):
        make()


class DivergesIn(FederatedCallback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.round == self.round:
            update.delta.fill_(torch.nan)


def test_a_run_that_diverges_between_checkpoints_leaves_the_last_good_model(tmp_path: Path) -> None:
    def run(*callbacks: Any, ckpt_path: str | None = None, **options: Any) -> Any:
        trainer = federated_trainer(
            tmp_path, FederatedCheckpoint(every_n_rounds=5), *callbacks, enable_checkpointing=True, **options
        )
        trainer.logger_choice = []
        module = model()
        with suppress(FederatedError):
            trainer.fit(module, federated_data(6, 20), ckpt_path=ckpt_path)
        return trainer, module

    diverged, _ = run(DivergesIn(4), max_rounds=9)
    saved = diverged.run.checkpoints / "last_good.ckpt"
    good = torch.load(saved, weights_only=True)
    whole, reference = run(max_rounds=3)
    assert diverged.finished_round == 3
    for name, value in reference.state_dict().items():
        assert torch.equal(good[name], value), name
    assert not (whole.run.checkpoints / "last_good.ckpt").exists()
    again = federated_trainer(tmp_path, max_rounds=1)
    again.fit(model(), federated_data(6, 20), weights=str(saved))
    at_once, _ = run(DivergesIn(6), max_rounds=9)
    assert not (at_once.run.checkpoints / "last_good.ckpt").exists(), "round 5 has a checkpoint of its own"
    last = at_once.run.checkpoints / "last.ckpt"
    resumed, _ = run(DivergesIn(6), max_rounds=9, ckpt_path=str(last))
    assert resumed.finished_round == 5
    assert not (resumed.run.checkpoints / "last_good.ckpt").exists(), "it is the checkpoint it went on from"


def test_a_last_good_model_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(content: Any, path: Path) -> None:
        if path.stem == "last_good":
            raise OSError("No space left on device")

    trainer = federated_trainer(
        tmp_path, FederatedCheckpoint(every_n_rounds=5), DivergesIn(4), enable_checkpointing=True, max_rounds=9
    )
    trainer.logger_choice = []
    monkeypatch.setattr(checkpoint_contents, "save_checkpoint", refuse)
    with pytest.warns(UserWarning, match="round 3 could not be .*No space"), pytest.raises(FederatedError):
        trainer.fit(model(), federated_data(6, 20))
