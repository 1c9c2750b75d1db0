"""Buffers of any kind are copied and reduced as one by one, to the bit, and in a few calls of torch."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fed.core.buffers import BufferSet, FrozenParameters, GlobalBuffers
from lightning_fed.core.reduction import RoundReducer, is_averaged
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from tests.engines.pretended_device import DEVICE, PretendedDevice

CPU = torch.device("cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
ODD = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41])


def buffer(shape: tuple[int, ...], dtype: torch.dtype, stream: torch.Generator) -> Tensor:
    if is_averaged(torch.empty(0, dtype=dtype)):
        value = torch.randn(shape, generator=stream, dtype=torch.float64)
        value.view(-1)[: len(ODD)] = ODD[: value.numel()]
        return value.to(dtype) * (1 - 0.5j if dtype.is_complex else 1)
    low, high = (0, 2) if dtype == torch.bool else (0, 200) if dtype == torch.uint8 else (-100, 100)
    return torch.randint(low, high, shape, generator=stream).to(dtype)


class Kinds(nn.Module):
    """Has buffers of every kind: two of each dtype, of no dimension, without numbers, and in other orders of memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        for dtype in (*FLOATS, *INTEGERS):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"{name}_many", buffer((7, 3), dtype, stream))
            self.register_buffer(f"{name}_one", buffer((), dtype, stream))
        self.register_buffer("none_at_all", torch.zeros(0))
        self.register_buffer("turned", buffer((4, 5), torch.float32, stream).T)
        self.register_buffer("last", buffer((2, 3, 4, 4), torch.float32, stream).to(memory_format=torch.channels_last))
        self.register_buffer("loose", torch.full((3,), seed), persistent=False)


def bits(value: Tensor) -> Any:
    value = value.cpu().contiguous().reshape(-1)
    return value.dtype, value.view(torch.uint8).tolist() if value.numel() else []


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(bits(found[name]) == bits(expected[name]) for name in expected)


def one_by_one(updates: Iterable[tuple[dict[str, Tensor], float]]) -> dict[str, Tensor]:
    """Reduces clients' buffers as each would be alone."""
    sums: dict[str, Tensor] = {}
    total = 0.0
    for values, weight in updates:
        for name, value in values.items():
            if not is_averaged(value):
                sums[name] = torch.maximum(sums[name], value) if name in sums else value.clone()
                continue
            wide = torch.promote_types(value.dtype, torch.float64)
            sums.setdefault(name, torch.zeros_like(value, dtype=wide)).add_(value, alpha=weight)
        total += weight
    return {name: value / total if is_averaged(value) else value for name, value in sums.items()}


@pytest.fixture(params=["cpu", "device"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cpu":
        yield CPU
        return
    with PretendedDevice():
        yield DEVICE


def test_buffers_are_loaded_and_copied(device: torch.device) -> None:
    one, other = (Kinds(seed).to(device) for seed in (1, 2))
    live = BufferSet(one)
    kept, values = live.copy(), BufferSet(other).tensors()
    assert equal(kept, BufferSet(Kinds(1)).tensors())
    live.load(values)
    found = dict(one.named_buffers())
    assert found.pop("loose").tolist() == [1, 1, 1], "what is not persistent is the module's own"
    assert equal(found, BufferSet(Kinds(2)).tensors())
    assert equal(kept, BufferSet(Kinds(1)).tensors()), "copies have memory of their own"


def test_buffers_are_reduced(device: torch.device) -> None:
    modules, weights = [Kinds(seed).to(device) for seed in range(4)], (3.0, 0.1, 7.7, 1e-3)
    reducer = RoundReducer(torch.zeros(3, device=device), Need.NOTHING)
    for _ in range(2):  # a round leaves nothing to the next
        reducer.reset(4)
        for number, (module, weight) in enumerate(zip(modules, weights, strict=True)):
            update = Update(Client(number, 5, 1), torch.zeros(3, device=device), 1, BufferSet(module).tensors(), weight)
            reducer.add(update, average_buffers=True)
        found = reducer.reduce(1).buffers
        assert list(found) == list(BufferSet(modules[0]).tensors())
        assert equal(found, one_by_one((BufferSet(Kinds(n)).tensors(), weight) for n, weight in enumerate(weights)))
    buffers = GlobalBuffers(modules[0], "average")
    buffers.step(ReducedUpdate(1, buffers=found))
    buffers.load()
    for name, value in BufferSet(modules[0]).tensors().items():
        kept = buffers.values[name]
        assert bits(kept) == bits(found[name].to(kept.dtype))
        assert bits(value) == bits(kept.to(value.dtype))


def test_a_further_client_costs_few_calls_however_many_buffers() -> None:
    """Loading: one for each dtype; reducing: to double precision, a sum, and a maximum."""
    with PretendedDevice() as device:
        module = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(10))).to(DEVICE)
        buffers, reducer = GlobalBuffers(module, "average"), RoundReducer(torch.zeros(3, device=DEVICE), Need.NOTHING)
        reducer.reset(3)
        for number in range(3):
            device.kernels.clear()
            buffers.load()
            update = Update(Client(number, 5, 1), torch.zeros(0), 1, buffers.live.tensors(), 2.0)
            reducer.add(update, average_buffers=True)
        assert +device.kernels == {"_foreach_copy_": 3, "_foreach_add_": 1, "_foreach_clamp_min_": 1}
        device.kernels.clear()
        buffers.step(reducer.reduce(1))
        assert +device.kernels == {"_foreach_div_": 1, "_foreach_copy_": 2}


def test_a_tensor_of_another_kind_is_copied_alone() -> None:
    """As those of quantized weights, which know no operations on lists; and dtypes that a GPU refuses in lists."""

    class Alone(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_foreach_" not in function.__name__
            return super().__torch_function__(function, types, args, kwargs or {})

    module = nn.Module()
    module.register_buffer("own", torch.zeros(3).as_subclass(Alone))
    module.register_buffer("plain", torch.zeros(3))
    module.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
    module.register_buffer("short", torch.zeros(3, dtype=torch.uint16))
    live = BufferSet(module)
    with Lists() as lists:
        live.load({name: torch.ones_like(value) for name, value in live.tensors().items()})
    assert lists.dtypes == [torch.float32]
    assert all(value.eq(1).all() for value in module.buffers())


class Lists(TorchDispatchMode):
    """Notes of which dtypes lists of tensors were given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_" in func._schema.name:
            self.dtypes += {tensor.dtype for tensor in args[0]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("size", "keeps"), [(40, True), (41, False)])
def test_frozen_parameters_have_a_copy_up_to_four_times_the_size_of_the_trained(size: int, keeps: bool) -> None:
    module = nn.ParameterDict({"trained": torch.zeros(10), "frozen": torch.zeros(size)})
    module["frozen"].requires_grad_(False)
    watch = FrozenParameters(module, ["trained"])
    watch.start_round([])
    module["frozen"].data.add_(1)
    assert (watch.moved()["frozen"] is not None) == keeps
