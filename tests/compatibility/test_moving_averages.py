"""Frozen parameters that training moves (mean teachers, momentum encoders) are what the same tensors as buffers are."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import StatelessSCAFFOLD
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer

KINDS = ["lerp", "data", "replaced_data", "after"]


class Teacher(Classifier):
    """Learns from labels and from the moving average of itself, as parameters or as buffers."""

    def __init__(self, kind: str, as_buffers: bool = False, late: bool = False) -> None:
        super().__init__()
        self.kind, self.as_buffers, self.late = kind, as_buffers, late
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.teacher.load_state_dict(self.net.state_dict())
        for name, value in list(self.teacher.named_parameters()) if as_buffers else ():
            delattr(self.teacher, name)
            self.teacher.register_buffer(name, value.data)

    def move(self) -> None:
        if self.late and self.trainer.round < 2:
            return
        for name, new in self.net.named_parameters():
            old = getattr(self.teacher, name)
            if self.kind == "lerp" or self.as_buffers:
                with torch.no_grad():
                    old.copy_(old * 0.9 + new * 0.1)
            elif self.kind == "replaced_data":
                old.data = old.data * 0.9 + new.data * 0.1
            else:
                old.data.copy_(old.data * 0.9 + new.data * 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind != "after":
            self.move()
        return self.loss(batch) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind == "after":
            self.move()


def run(folder: Any, *args: Any, policy: Any = "average", parts: Any = (), **options: Any) -> dict[str, Tensor]:
    module = built(lambda: Teacher(*args))
    trainer = federated_trainer(folder, FedAvg(buffers=policy), *parts, max_rounds=2, **options)
    trainer.fit(module, federated_data(8, 20, 12))
    bytes_up = {"comm/bytes_up": trainer.logged_metrics["comm/bytes_up"]}
    return {name: value.clone() for name, value in module.state_dict().items()} | bytes_up


@pytest.mark.parametrize("policy", ["average", "local", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_follow_the_policy_of_buffers(tmp_path, kind, policy):
    found, expected = run(tmp_path, kind, policy=policy), run(tmp_path, kind, True, policy=policy)
    start = built(lambda: Teacher(kind)).teacher.weight
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["teacher.weight"], start) == (policy != "average")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_over_all_data_leaves_them_alone(tmp_path, kind):
    options = {"parts": [StatelessSCAFFOLD()], "full_gradient_mode": "train"}
    found, expected = run(tmp_path, kind, **options), run(tmp_path, kind, True, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected if name != "comm/bytes_up")


def test_those_that_begin_to_move_late(tmp_path):
    found, expected = run(tmp_path, "data", False, True), run(tmp_path, "data", True, True)
    assert torch.equal(found["teacher.weight"], expected["teacher.weight"])


def test_a_resumed_run_goes_on_with_them(tmp_path):
    def go(folder: Any, rounds: int, **options: Any) -> Tensor:
        module = built(lambda: Teacher("after"))
        trainer = federated_trainer(folder, max_rounds=rounds, enable_checkpointing=True, name="run")
        trainer.fit(module, federated_data(8, 20), **options)
        return module.teacher.weight

    go(tmp_path / "twice", 1)
    resumed = go(tmp_path / "twice", 2, ckpt_path=str(next((tmp_path / "twice").rglob("last.ckpt"))))
    assert torch.equal(resumed, go(tmp_path / "once", 2))


def test_what_hooks_between_rounds_move_is_the_global_models(tmp_path):
    class Between(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(float(self.teacher.weight[0, 0]))
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.teacher.weight.data.fill_(self.trainer.round)

    module = Between()
    first = float(module.teacher.weight[0, 0])
    federated_trainer(tmp_path, max_rounds=3).fit(module, federated_data(8, 8))
    assert module.seen == [first, first, 1.0, 1.0, 2.0, 2.0]


def test_copies_of_the_model_made_at_the_start_of_fit(tmp_path):
    class Copies(Teacher):
        def on_fit_start(self) -> None:
            self.teacher = deepcopy(self.net).requires_grad_(False)

    here, there = built(lambda: Copies("after")), built(lambda: Teacher("after"))
    for module in (here, there):
        federated_trainer(tmp_path, max_rounds=2).fit(module, federated_data(8, 20))
    assert torch.equal(here.teacher.weight, there.teacher.weight)


def test_what_is_much_larger_than_the_trained_part_is_refused(tmp_path):
    class Huge(Teacher):
        def __init__(self) -> None:
            super().__init__("data")
            self.teacher = nn.Linear(FEATURES, 50 * CLASSES).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.teacher.weight.data.mul_(0.9)
            return self.loss(batch)

    with pytest.raises(FederatedError, match=r"`teacher\.weight` of Huge.*register_buffer"):
        federated_trainer(tmp_path).fit(Huge(), federated_data(8, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_at_once_are_refused(tmp_path, kind):
    module = built(lambda: Teacher(kind))
    start = module.teacher.weight.clone()
    with pytest.raises(FederatedError, match="--trainer.engine sequential"):
        federated_trainer(tmp_path, engine="vectorized").fit(module, federated_data(8, 8))
    assert torch.equal(module.teacher.weight, start)
