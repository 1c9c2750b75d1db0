"""The classifiers' cross-entropy: torch's own for one client, and the same numbers by fewer operations for many."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jvp, vmap
from torch.nn import functional as F

from lightning_fed.models.losses import cross_entropy
from tests.parts import Operations

N, B, C = 4, 5, 3
IGNORED = -100


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
    return scores, torch.randint(C, tuple(size for size in shape if size != C), generator=rng)


def of_many(loss: Callable[..., Tensor], scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the clients' gradients and losses."""
    return vmap(grad_and_value(loss))(scores, labels)


def by_formula(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(softmax(z) - onehot(y)) / m and -mean(log softmax(z)[y]) over the m samples that are not ignored."""
    kept = labels != IGNORED
    powers = np.exp(scores - scores.max(1, keepdims=True))
    probs = powers / powers.sum(1, keepdims=True)
    targets = np.eye(C)[np.where(kept, labels, 0)]
    gradient = np.where(kept[:, None], probs - targets, 0) / kept.sum()
    return gradient, -(np.log((probs * targets).sum(1)) * kept).sum() / kept.sum()


@pytest.mark.parametrize("ignored", [0, 2])
def test_many_clients_by_the_formula(ignored):
    scores, labels = inputs(N, B, C)
    labels[1, :ignored] = IGNORED
    gradients, losses = of_many(cross_entropy, scores, labels)
    for i in range(N):
        gradient, loss = by_formula(scores[i].numpy(), labels[i].numpy())
        np.testing.assert_allclose(gradients[i].numpy(), gradient, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(losses[i].item(), loss, rtol=1e-12)


def test_one_client_by_the_formula():
    scores, labels = inputs(B, C)
    gradient, loss = by_formula(scores.numpy(), labels.numpy())
    scores.requires_grad_()
    value = cross_entropy(scores, labels)
    value.backward()
    np.testing.assert_allclose(value.item(), loss, rtol=1e-12)
    np.testing.assert_allclose(scores.grad.numpy(), gradient, rtol=1e-12, atol=1e-15)


ARGUMENTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "float32": lambda: inputs(B, C, dtype=torch.float32),
    "float64": lambda: inputs(B, C),
    "bfloat16": lambda: inputs(B, C, dtype=torch.bfloat16),
    "sequences": lambda: inputs(B, C, 6, dtype=torch.float32),
    "shares of classes": lambda: (inputs(B, C)[0], inputs(B, C)[0].softmax(1).roll(1, 0)),
    "one sample": lambda: (inputs(B, C)[0][0], torch.tensor(1)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_alone_it_is_torchs_to_the_bit(name):
    found = []
    for loss in (F.cross_entropy, cross_entropy):
        scores, labels = ARGUMENTS[name]()
        value = loss(scores.requires_grad_(), labels)
        value.backward()
        found.append((value, scores.grad, type(value.grad_fn).__name__))
    (a, b, kind), (value, gradient, own) = found
    assert torch.equal(a, value)
    assert torch.equal(b, gradient)
    assert kind == own


@pytest.mark.parametrize("name", ARGUMENTS)
def test_many_clients_are_a_loop_and_torchs_to_the_bit(name):
    scores, labels = ARGUMENTS[name]()
    scores = torch.stack([scores * (1 + 0.1 * i) for i in range(N)])
    labels = torch.stack([labels] * N)
    gradients, losses = of_many(cross_entropy, scores, labels)
    for before, now in zip(of_many(F.cross_entropy, scores, labels), (gradients, losses), strict=True):
        assert torch.equal(before, now)
        assert before.dtype == now.dtype
    tolerance = 0.02 if name == "bfloat16" else 1e-6
    for i in range(N):
        gradient, loss = grad_and_value(F.cross_entropy)(scores[i], labels[i])
        torch.testing.assert_close(gradients[i], gradient, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(losses[i], loss, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixed_precision_is_as_torchs(dtype):
    scores, labels = inputs(N, B, C, dtype=dtype)

    def under(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mixed(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(*args)

        return mixed

    now = of_many(under(cross_entropy), scores, labels)
    assert now[1].dtype == torch.promote_types(dtype, torch.float32)
    for a, b in zip(of_many(under(F.cross_entropy), scores, labels), now, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_a_client_whose_labels_are_all_ignored_is_as_torchs():
    scores, labels = inputs(N, B, C)
    labels[2] = IGNORED
    for a, b in zip(of_many(F.cross_entropy, scores, labels), of_many(cross_entropy, scores, labels), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_scores_of_minus_infinity_are_as_torchs():
    scores, labels = inputs(N, B, C)
    scores[0, 0, (labels[0, 0] + 1) % C] = -torch.inf
    for a, b in zip(of_many(F.cross_entropy, scores, labels), of_many(cross_entropy, scores, labels), strict=True):
        assert torch.equal(a, b)


def test_dimensions_elsewhere_and_shared_labels():
    scores, labels = inputs(N, B, C)
    expected = of_many(F.cross_entropy, scores, labels)
    moved = vmap(grad_and_value(cross_entropy), in_dims=(1, 1))(scores.movedim(0, 1), labels.T)
    shared = vmap(grad_and_value(cross_entropy), in_dims=(0, None))(scores, labels[0])
    nested = vmap(vmap(grad_and_value(cross_entropy)))(scores.view(2, 2, B, C), labels.view(2, 2, B))
    again = vmap(grad_and_value(F.cross_entropy), in_dims=(0, None))(scores, labels[0])
    for k in (0, 1):
        assert torch.equal(moved[k], expected[k])
        assert torch.equal(shared[k], again[k])
        assert torch.equal(nested[k].flatten(0, 1), expected[k])


def penalised(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds ‖∇‖² to a loss, so that its gradient needs the second derivative."""
    return lambda scores, labels: 0.3 * loss(scores, labels) ** 2 + grad(loss)(scores, labels).square().sum()


SECOND: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {
    "gradient penalty": lambda loss, *args: of_many(penalised(loss), *args),
    "Hessian": lambda loss, *args: vmap(hessian(loss))(*args),
    "gradient of all": lambda loss, s, y: grad(lambda z: vmap(loss)(z, y).square().sum())(s),
    "forward": lambda loss, *args: vmap(jacfwd(loss))(*args),
    "forward, one": lambda loss, s, y: jvp(lambda z: loss(z, y[0]), (s[0],), (s[1],)),
}


@pytest.mark.parametrize("which", SECOND)
def test_further_derivatives_are_right(which):
    args = inputs(N, B, C)
    torch.testing.assert_close(SECOND[which](cross_entropy, *args), SECOND[which](F.cross_entropy, *args))


@pytest.mark.parametrize("label", [C, -1, IGNORED - 1])
def test_foreign_labels_are_refused(label):
    scores, labels = inputs(N, B, C)
    labels[0, 0] = label
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(scores[0], labels[0])
    with pytest.raises(RuntimeError, match="out of bounds"):
        of_many(cross_entropy, scores, labels)


def test_labels_of_another_number_are_refused():
    scores, labels = inputs(N, B, C)
    with pytest.raises(ValueError, match="to match target batch_size"):
        of_many(cross_entropy, scores, labels[:, 1:])


def test_compiled_steps_trace_torchs():
    scores, labels = inputs(B, C)
    compiled = torch.compile(cross_entropy, backend="eager", fullgraph=True)
    assert torch.equal(compiled(scores, labels), F.cross_entropy(scores, labels))


def operations(loss: Callable[..., Tensor]) -> int:
    args = inputs(N, B, C)
    with Operations() as seen:
        of_many(loss, *args)
    return seen.count


def test_many_clients_take_fewer_operations_than_torchs():
    assert operations(cross_entropy) <= 15 < operations(F.cross_entropy)
