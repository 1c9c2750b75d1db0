"""The flat parameter vector under everything that users and torch do to a module."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError


class Net(nn.Module):
    """A convolution, tied and frozen weights, a scalar, a head that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.encode, self.decode = nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(5)
        self.spare = nn.Linear(5, 2)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        h = self.frozen(self.conv(x).mean((2, 3)))
        h = self.norm((self.encode(h) + self.decode(h)) * self.scale)
        return self.spare(h) if spare else h


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(net: nn.Module, spare: bool = True) -> Tensor:
    dtype = next(net.parameters()).dtype
    return net(images(dtype), spare).square().mean()


def expect_views(vector: ParameterVector, module: nn.Module) -> None:
    """Every parameter and every gradient lies in the flat vectors: a write on either side shows on the other."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert [id(p) for p in trainable] == [id(p) for p in vector.parameters]
    assert vector.data.shape == vector.grad.shape == (sum(p.numel() for p in trainable),)
    assert vector.data.is_contiguous()
    assert vector.grad.is_contiguous()
    before = vector.data.clone()
    for flat, pick in ((vector.data, lambda p: p.data), (vector.grad, lambda p: p.grad)):
        offset = 0
        for p in trainable:
            flat[offset : offset + p.numel()] = torch.arange(p.numel(), dtype=flat.dtype)
            assert pick(p).sum().item() == pytest.approx(p.numel() * (p.numel() - 1) / 2, rel=1e-2)
            pick(p).fill_(-1)
            assert flat[offset : offset + p.numel()].eq(-1).all()
            offset += p.numel()
    vector.data.copy_(before)
    vector.grad.zero_()


def test_parameters_and_gradients_are_views(net: Net) -> None:
    values = [p.clone() for p in net.parameters()]
    vector = ParameterVector(net)
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), values, strict=True))
    expect_views(vector, net)
    assert vector.numel == vector.data.numel() == 4 * 27 + 4 + 20 + 1 + 5 + 5 + 12


def test_order_is_that_of_named_parameters_with_tied_ones_once_and_frozen_ones_left_out(net: Net) -> None:
    vector = ParameterVector(net)
    assert vector.names == (
        "scale", "conv.weight", "conv.bias", "encode.weight", "norm.weight", "norm.bias", "spare.weight", "spare.bias",
    )  # fmt: skip
    assert torch.equal(vector.data, torch.cat([dict(net.named_parameters())[name].flatten() for name in vector.names]))
    assert net.decode.weight is net.encode.weight
    frozen = net.frozen.weight.clone()
    vector.data.fill_(7)
    assert torch.equal(net.frozen.weight, frozen)
    assert net.frozen.weight.grad is None


def test_tied_weights_stay_tied_and_gather_both_gradients(net: Net) -> None:
    plain = deepcopy(net)
    loss_of(plain).backward()
    vector = ParameterVector(net)
    loss_of(net).backward()
    assert torch.equal(net.encode.weight.grad, plain.encode.weight.grad)
    vector.data.mul_(3)
    assert torch.equal(net.decode.weight, 3 * plain.decode.weight)


def train(net: nn.Module, steps: int, vector: ParameterVector | None, spare: Callable[[int], bool]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad() if vector is None else vector.drop_gradients()
        loss_of(net, spare(step)).backward()
        if vector is not None:
            vector.collect_gradients()
        optimizer.step()


def test_training_on_the_vector_equals_training_without_it(net: Net) -> None:
    plain = deepcopy(net)
    train(plain, 6, None, lambda step: step % 2 == 0)
    train(net, 6, ParameterVector(net), lambda step: step % 2 == 0)
    for (name, p), q in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def test_parameters_without_gradient_are_left_without_one(net: Net) -> None:
    vector = ParameterVector(net)
    view = net.spare.weight.grad
    vector.drop_gradients()
    loss_of(net, spare=False).backward()
    vector.collect_gradients()
    assert net.spare.weight.grad is None
    assert net.spare.bias.grad is None
    assert net.conv.weight.grad is not None
    assert not vector.whole
    vector.zero_grad()
    assert net.spare.weight.grad is view
    loss_of(net).backward()
    vector.collect_gradients()
    assert net.spare.weight.grad is view
    assert view.abs().sum() > 0
    expect_views(vector, net)


def test_a_gradient_from_any_of_several_backward_passes_counts(net: Net) -> None:
    vector = ParameterVector(net)
    vector.drop_gradients()
    loss_of(net).backward()
    loss_of(net, spare=False).backward()
    vector.collect_gradients()
    assert net.spare.weight.grad is not None


def assign(net: Net, loss: Tensor) -> None:
    params = [p for p in net.parameters() if p.requires_grad]
    for p, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
        p.grad = grad


@pytest.mark.parametrize(
    "backward",
    [assign, lambda net, loss: loss.backward(create_graph=True)],
    ids=["assigned", "create_graph"],
)
@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_that_user_code_assigns_reach_the_vector(net: Net, backward: Callable[[Net, Tensor], None]) -> None:
    plain = deepcopy(net)
    loss_of(plain, spare=False).backward()
    vector = ParameterVector(net)
    vector.drop_gradients()
    backward(net, loss_of(net, spare=False))
    vector.collect_gradients()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters() if p.requires_grad]
    assert torch.equal(vector.grad, torch.cat([grad.flatten() for grad in flat]))
    assert torch.equal(net.conv.weight.grad, plain.conv.weight.grad)
    assert net.conv.weight.grad.data_ptr() == vector.grad[1:].data_ptr(), "an edit of vector.grad must reach the step"
    assert not net.conv.weight.grad.requires_grad
    assert net.spare.weight.grad is None


def test_a_gradient_that_user_code_drops_leaves_nothing_behind(net: Net) -> None:
    vector = ParameterVector(net)
    vector.drop_gradients()
    loss_of(net).backward()
    for p in net.spare.parameters():
        p.grad = None
    vector.collect_gradients()
    assert net.spare.weight.grad is None
    assert vector.grad[-12:].eq(0).all()
    assert vector.grad[:-12].abs().sum() > 0


def double(net: Net) -> None:
    net.double()


def channels_last(net: Net) -> None:
    net.to(memory_format=torch.channels_last)


def own_storage(net: Net) -> None:
    net.conv.weight.data = net.conv.weight.data.clone()


@pytest.mark.parametrize("change", [double, channels_last, own_storage])
def test_refresh_mends_what_was_cut_loose(net: Net, change: Callable[[Net], None]) -> None:
    vector = ParameterVector(net)
    assert vector.refresh() is False
    plain = deepcopy(net)
    change(net)
    assert vector.refresh() is True
    assert vector.refresh() is False
    assert vector.dtype == net.conv.weight.dtype == vector.grad.dtype
    assert all(torch.equal(p, q.to(p.dtype)) for p, q in zip(net.parameters(), plain.parameters(), strict=True))
    expect_views(vector, net)
    vector.drop_gradients()
    loss_of(net, spare=False).backward()
    vector.collect_gradients()
    assert net.spare.weight.grad is None
    assert net.conv.weight.grad is not None
    assert vector.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.to(torch.float32),
        lambda net: net.load_state_dict(deepcopy(net.state_dict())),
        lambda net: net.zero_grad(set_to_none=False),
        lambda net: net.requires_grad_(True) and net.frozen.requires_grad_(False),
    ],
    ids=["to", "load_state_dict", "zero_grad", "requires_grad_"],
)
def test_harmless_calls_leave_the_views_alone(net: Net, change: Callable[[Net], object]) -> None:
    vector = ParameterVector(net)
    change(net)
    assert vector.refresh() is False
    expect_views(vector, net)


def test_load_state_dict_writes_into_the_vector(net: Net) -> None:
    vector = ParameterVector(net)
    state = {name: value + 1 if value.is_floating_point() else value for name, value in net.state_dict().items()}
    before = vector.data.clone()
    net.load_state_dict(state)
    assert torch.equal(vector.data, before + 1)


def test_zero_grad_of_the_module_is_undone_by_that_of_the_vector(net: Net) -> None:
    vector = ParameterVector(net)
    net.zero_grad()
    assert net.conv.weight.grad is None
    vector.grad.fill_(3)
    vector.zero_grad()
    assert vector.grad.eq(0).all()
    loss_of(net).backward()
    assert vector.grad.abs().sum() > 0
    expect_views(vector, net)


@pytest.mark.parametrize("copy", [deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_copies_are_ordinary_modules(net: Net, copy: Callable[[Net], Net]) -> None:
    vector = ParameterVector(net)
    before = vector.data.clone()
    other = copy(net)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), net.parameters(), strict=True))
    vector.zero_grad()
    train(other, 2, None, lambda step: True)
    assert torch.equal(vector.data, before)
    assert vector.grad.eq(0).all()
    vector.drop_gradients()
    loss_of(net, spare=False).backward()
    loss_of(other).backward()
    vector.collect_gradients()
    assert net.spare.weight.grad is None, "a gradient of the copy was taken for one of the original"


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_strides_are_kept(dims: int) -> None:
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    conv = (nn.Conv2d if dims == 2 else nn.Conv3d)(3, 4, 2)
    plain = deepcopy(conv)
    conv = conv.to(memory_format=layout)
    strides = conv.weight.stride()
    assert strides != plain.weight.stride()
    vector = ParameterVector(conv)
    x = torch.randn(2, 3, *[4] * dims)
    conv(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert conv.weight.stride() == conv.weight.grad.stride() == strides
    assert torch.equal(conv.weight, plain.weight)
    torch.testing.assert_close(conv.weight.grad, plain.weight.grad)
    expect_views(vector, conv)
    vector.release()
    assert conv.weight.stride() == strides


def test_transposed_parameters_become_contiguous_with_their_values() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    vector = ParameterVector(module)
    assert torch.equal(module.weight, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(vector.data, module.weight.flatten())


def saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getvalue()


def test_state_dict_loads_in_the_plain_module_and_is_no_larger(net: Net) -> None:
    big = nn.Sequential(*[nn.Linear(50, 50) for _ in range(8)])
    for module in (net, big):
        plain, content = deepcopy(module), saved(module)
        vector = ParameterVector(module)
        vector.data.add_(1)
        flat = saved(module)
        assert len(flat) <= len(content) + 512
        plain.load_state_dict(torch.load(io.BytesIO(flat), weights_only=True))
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_of_the_module_is_saved_alone(dtype: torch.dtype) -> None:
    """Its state, the part, its parameters or a copy, within a module of a million weights."""
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(4, 3)).to(dtype)
    vector = ParameterVector(module)
    head = module[1]
    for part in (head.state_dict(), head, list(head.parameters()), deepcopy(head)):
        file = io.BytesIO()
        torch.save(part, file)
        assert len(file.getvalue()) < 4000
    for value in head.state_dict().values():  # moving averages write there
        value.fill_(3)
    assert vector.data[-15:].eq(3).all()
    assert vector.data[:-15].ne(3).all()


def test_release_gives_an_ordinary_module(net: Net) -> None:
    vector = ParameterVector(net)
    loss_of(net).backward()
    values = [p.detach().clone() for p in net.parameters()]
    vector.release()
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), values, strict=True))
    assert all(p.grad is None for p in net.parameters())
    vector.data.fill_(9)
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), values, strict=True))
    storages = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(storages) == len(list(net.parameters()))
    assert net.conv.weight.untyped_storage().nbytes() == net.conv.weight.numel() * 4
    assert all(p._post_accumulate_grad_hooks is None for p in net.parameters()), "hooks must be gone"
    loss_of(net).backward()
    expect_views(ParameterVector(net), net)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"`0\.weight` is lazy"):
        ParameterVector(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(FederatedError, match=r"`0\.running_mean` is lazy"):
        ParameterVector(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(2, 2)))


def test_nothing_trainable_is_refused(net: Net) -> None:
    with pytest.raises(FederatedError, match="Expected Net to have trainable parameters"):
        ParameterVector(net.requires_grad_(False))
    with pytest.raises(FederatedError, match="trainable"):
        ParameterVector(nn.ReLU())


def test_mixed_dtypes_are_refused_at_the_start_and_later(net: Net) -> None:
    vector = ParameterVector(net)
    net.spare.double()
    with pytest.raises(FederatedError, match="Expected all trainable parameters of Net to share one dtype"):
        vector.refresh()
    with pytest.raises(FederatedError, match=r"torch\.float32 on cpu, torch\.float64 on cpu.*--trainer\.precision"):
        ParameterVector(net)
    net.spare.float()
    net.frozen.double()  # what is not trained may have any dtype
    expect_views(ParameterVector(net), net)
