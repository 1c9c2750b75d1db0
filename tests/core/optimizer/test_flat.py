"""Stepping a flat vector, or rows of a matrix of them, against torch's optimizers on the parameters themselves."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_fed.core.optimizer.flat import _FUSED, ELEMENTWISE, FlatOptimizer
from lightning_fed.core.vector import ParameterVector

Make = Callable[[nn.Module], Optimizer]
CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.037}),
    "momentum": (SGD, {"lr": 0.037, "momentum": 0.9}),
    "nesterov": (SGD, {"lr": 0.037, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "dampening": (SGD, {"lr": 0.037, "momentum": 0.9, "dampening": 0.1, "maximize": True, "weight_decay": 1e-3}),
    "foreach": (SGD, {"lr": 0.037, "momentum": 0.9, "foreach": True}),
    "tensor_lr": (SGD, {"lr": torch.tensor(0.037), "momentum": 0.9}),
    "adam": (Adam, {"lr": 1e-2, "weight_decay": 1e-2, "amsgrad": True}),
    "adamw": (AdamW, {"lr": 1e-2}),
    "rmsprop": (RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9}),
    "adagrad": (Adagrad, {"lr": 1e-1, "initial_accumulator_value": 0.5}),
    "adadelta": (optim.Adadelta, {}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"t0": 2}),
}


class Net(nn.Module):
    """Sizes that no vector register divides, a number, a frozen and an untrained parameter, a channels_last one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.untrained = nn.Parameter(torch.randn(3))
        self.linear = nn.Linear(13, 7)


def one_group(net: Net) -> Any:
    return [p for p in net.parameters() if p is not net.untrained]


def two_groups(net: Net) -> Any:
    weights = [net.linear.weight, net.conv.weight]
    return [{"params": weights, "lr": 0.05}, {"params": [net.scale, net.linear.bias, net.conv.bias]}]


def built(groups: Callable[[Net], Any], cls: type[Optimizer], options: dict[str, Any]) -> tuple[Net, Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, cls(groups(net), **deepcopy(options))


def gradients(net: Net, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in net.parameters() if p.requires_grad]


def fill(vector: ParameterVector, grads: list[Tensor]) -> None:
    for p, grad in zip(vector.parameters, grads, strict=True):
        p.grad.copy_(grad)


def train_plainly(net: Net, optimizer: Optimizer, seeds: list[int]) -> list[Tensor]:
    """Steps the parameters; a changed learning rate is followed, state and weights are put back afterwards."""
    before = [p.detach().clone() for p in net.parameters()]
    state, rates = deepcopy(optimizer.state_dict()), [group["lr"] for group in optimizer.param_groups]
    for step, seed in enumerate(seeds):
        optimizer.param_groups[0]["lr"] = rates[0] * (1 + step)
        trained = [p for p in net.parameters() if p.requires_grad]
        for p, grad in zip(trained, gradients(net, seed), strict=True):
            p.grad = torch.empty_like(p).copy_(grad)  # with the strides of p, as fused kernels need them
        optimizer.step()
    result = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p, value in zip(net.parameters(), before, strict=True):
            p.copy_(value)
    optimizer.load_state_dict(state)
    return result


def step_flat(flat: FlatOptimizer, optimizer: Optimizer, rate: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = rate * (1 + step)
    flat.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize(("cls", "options"), CASES.values(), ids=CASES)
def test_a_vector_steps_like_its_parameters(
    groups: Callable[[Net], Any], cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    try:
        plain, net = built(groups, cls, options), built(groups, cls, options)
    finally:
        torch.set_default_dtype(torch.float32)
    vector = ParameterVector(net[0])
    start, rate = vector.data.clone(), net[1].param_groups[0]["lr"]
    flat = FlatOptimizer(net[1], vector, vector.data, vector.grad)
    for client in range(3):  # nothing is left of the client before
        vector.data.copy_(start)
        flat.start()
        for step in range(5):
            fill(vector, gradients(net[0], 10 * client + step))
            step_flat(flat, net[1], rate, step)
        expected = train_plainly(*plain, seeds=[10 * client + step for step in range(5)])
        for p, value in zip(net[0].parameters(), expected, strict=True):
            assert torch.equal(p, value)
        net[1].param_groups[0]["lr"] = rate
    assert not torch.equal(vector.data, start)


@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize(("cls", "options"), CASES.values(), ids=CASES)
def test_rows_of_a_matrix_step_like_vectors(
    groups: Callable[[Net], Any], cls: type[Optimizer], options: dict[str, Any]
) -> None:
    plain, net = built(groups, cls, options), built(groups, cls, options)
    vector = ParameterVector(net[0])
    steps, rate = [5, 5, 3, 1], net[1].param_groups[0]["lr"]
    weights = torch.full((6, vector.numel), torch.nan)
    grads = torch.zeros_like(weights)
    flat = FlatOptimizer(net[1], vector, weights, grads)
    for chunk in range(2):
        weights[:4] = vector.data
        flat.start(4)
        for step in range(5):
            active = sum(count > step for count in steps)
            flat.narrow(active)
            for row in range(active):
                fill(vector, gradients(net[0], 100 * chunk + 10 * row + step))
                grads[row] = vector.grad
            step_flat(flat, net[1], rate, step)
        net[1].param_groups[0]["lr"] = rate
        for row, count in enumerate(steps):
            seeds = [100 * chunk + 10 * row + step for step in range(count)]
            expected = flattened(plain[0], train_plainly(*plain, seeds=seeds))
            assert torch.equal(weights[row], expected), row
    assert weights[4:].isnan().all()


def flattened(net: Net, values: list[Tensor]) -> Tensor:
    """The values of the trainable parameters in the order and layout of a flat vector."""
    twin = deepcopy(net)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), values, strict=True):
            p.copy_(value)
    return ParameterVector(twin).data


def test_plain_sgd_is_stepped_without_torchs_step(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = built(one_group, SGD, {"lr": 0.1, "momentum": 0.9})
    vector = ParameterVector(net)
    flat = FlatOptimizer(optimizer, vector, vector.data, vector.grad)
    calls = []
    monkeypatch.setattr(SGD, "step", lambda self: calls.append(type(self)))
    flat.step()
    assert not calls
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    flat.step()
    assert calls == [SGD]


def test_neighbours_in_one_group_are_one_tensor() -> None:
    net, optimizer = built(one_group, SGD, {"lr": 0.1, "momentum": 0.9})
    vector = ParameterVector(net)
    flat = FlatOptimizer(optimizer, vector, vector.data, vector.grad)
    flat.step()
    # The scale and the untrained parameter come first, as parameters of the net itself do.
    assert [part for part, _ in flat.states()] == [slice(0, 1), slice(4, vector.numel)]
    assert [state["momentum_buffer"].shape for _, state in flat.states()] == [(1,), (vector.numel - 4,)]


def test_the_modules_own_optimizer_is_left_alone() -> None:
    net, optimizer = built(two_groups, Adagrad, {"initial_accumulator_value": 0.5})
    before = deepcopy(optimizer.state_dict())
    vector = ParameterVector(net)
    FlatOptimizer(optimizer, vector, vector.data, vector.grad).step()
    after = optimizer.state_dict()
    assert str(before) == str(after)
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(p) for p in g["params"]] for g in two_groups(net)
    ]


def test_all_elementwise_classes_are_compared_here() -> None:
    assert {cls for cls, _ in CASES.values()} == set(ELEMENTWISE)


def test_fused_kernels_step_rows_as_they_step_parameters() -> None:
    options = {"lr": 0.037, "momentum": 0.9, "fused": True}
    plain, net = built(two_groups, SGD, options), built(two_groups, SGD, options)
    vector = ParameterVector(net[0])
    weights, grads = vector.data.repeat(2, 1), torch.zeros(2, vector.numel)
    flat = FlatOptimizer(net[1], vector, weights, grads)
    for step in range(5):
        fill(vector, gradients(net[0], step))
        grads.copy_(vector.grad)
        step_flat(flat, net[1], 0.05, step)
    expected = flattened(plain[0], train_plainly(*plain, seeds=list(range(5))))
    torch.testing.assert_close(weights, expected.repeat(2, 1))


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", _FUSED)
def test_numbers_of_16_bits_are_all_stepped(
    monkeypatch: pytest.MonkeyPatch, cls: type[Optimizer], dtype: torch.dtype, asked: bool | None
) -> None:
    """With any length, full vector registers or not; torch 2.11's fused kernel of SGD steps what is left over alone."""

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("a fused kernel")

    for name in ("sgd", "adam", "adamw"):
        monkeypatch.setattr(torch, f"_fused_{name}_", called)
    for size in (1, 7, 8, 16, 31, 32, 33, 64, 100):
        net = nn.Linear(size, 1, bias=False, dtype=dtype)
        wide = nn.Linear(size, 1, bias=False)
        wide.weight.data.copy_(net.weight.data)
        vector = ParameterVector(net)
        weights, grads = vector.data.repeat(3, 1), torch.ones(3, size, dtype=dtype)
        wide.weight.grad = torch.ones(1, size)
        FlatOptimizer(cls(net.parameters(), lr=0.25, fused=asked), vector, weights, grads, fuse=True).step()
        cls(wide.parameters(), lr=0.25).step()
        torch.testing.assert_close(weights.float(), wide.weight.detach().repeat(3, 1), rtol=1e-2, atol=1e-2)
