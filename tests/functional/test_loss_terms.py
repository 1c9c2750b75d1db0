"""The formulas of losses at the client: closed forms, shapes, and many clients at once."""

import math

import pytest
import torch
from torch.func import vmap
from torch.nn.functional import cross_entropy

from lightning_fed.functional import (
    calibration_margins,
    contrastive_loss,
    log_priors,
    not_true_divergence,
    restricted_factors,
)

COUNTS = torch.tensor([16.0, 0.0, 1.0, 81.0], dtype=torch.float64)


def test_closed_forms() -> None:
    # 16^{-1/4} = 1/2, 81^{-1/4} = 1/3; 1/16 sample counts as 2.
    assert calibration_margins(COUNTS, 3.0, absent=1 / 16).tolist() == pytest.approx([-1.5, -6.0, -3.0, -1.0])
    assert log_priors(COUNTS, 2.0, absent=0.5).exp().tolist() == pytest.approx(
        [(n / 98) ** 2 for n in (16, 0.5, 1, 81)]
    )
    assert restricted_factors(COUNTS, 0.25).tolist() == [1, 0.25, 1, 1]


@pytest.mark.parametrize("value", [calibration_margins, log_priors])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_class_without_samples_leaves_the_softmax_exactly(value, dtype) -> None:
    scores = torch.tensor([[0.0, 900.0, 1.0, 2.0]], dtype=dtype, requires_grad=True)
    changed = scores + value(COUNTS, 1.0).to(dtype)
    assert changed.softmax(1)[0, 1] == 0
    cross_entropy(changed, torch.tensor([3])).backward()
    assert scores.grad[0, 1] == 0
    assert scores.grad.isfinite().all()
    assert scores.grad.any()


def test_equal_priors_move_no_probability() -> None:
    scores = torch.randn(5, 4, dtype=torch.float64)
    for value in (calibration_margins, log_priors):
        moved = scores + value(torch.full((4,), 7.0, dtype=torch.float64), 1.3)
        torch.testing.assert_close(moved.softmax(1), scores.softmax(1))


def test_contrast_of_like_and_of_opposite_features() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=torch.float64)
    assert contrastive_loss(z, 3 * z, z, 0.5).item() == pytest.approx(math.log(2))
    # s = 1 towards w and -1 towards the last model: log(1 + e^{-2/τ}).
    assert contrastive_loss(z, z, -z, 0.5).item() == pytest.approx(math.log1p(math.exp(-4)))
    assert contrastive_loss(z.view(2, 1, 2), z, -z, 0.5) == contrastive_loss(z, z, -z, 0.5)


def test_the_true_class_is_no_part_of_the_divergence() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 6, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    found = not_true_divergence(live, teacher, labels, 1.5)
    live[range(6), labels] += 7.0
    teacher[range(6), labels] -= 300.0
    assert not_true_divergence(live, teacher, labels, 1.5).item() == pytest.approx(found.item(), rel=1e-12)
    assert not_true_divergence(teacher, teacher, labels, 1.5) == 0
    assert found > 0


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2)])
def test_labels_that_are_no_class_count_for_nothing(shape: tuple[int, ...]) -> None:
    """As in torch's cross-entropy, whose mean is over the others."""
    live, teacher = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(6 * math.prod(shape[2:])).view(6, *shape[2:]) % 3
    labels[4:] = -100
    known = not_true_divergence(live[:4], teacher[:4], labels[:4], 1.3)
    torch.testing.assert_close(not_true_divergence(live, teacher, labels, 1.3), known)
    assert known > 0.01
    assert not_true_divergence(live[4:], teacher[4:], labels[4:], 1.3) == 0


def test_places_of_a_sequence_count_like_samples() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 2, 4, 3)
    labels = torch.randint(4, (2, 3))
    flat = [part.movedim(1, 2).flatten(0, 1) for part in (live, teacher)]
    found = not_true_divergence(live, teacher, labels, 2.0)
    torch.testing.assert_close(found, not_true_divergence(*flat, labels.flatten(), 2.0))


def test_many_clients_at_once() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 3, 6, 4)
    labels = torch.randint(4, (3, 6))
    found = vmap(lambda a, b, c: not_true_divergence(a, b, c, 1.5))(live, teacher, labels)
    alone = [not_true_divergence(*one, 1.5) for one in zip(live, teacher, labels, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone))
    torch.testing.assert_close(
        vmap(lambda a, b: contrastive_loss(a, b, -b, 0.5))(live, teacher),
        torch.stack([contrastive_loss(a, b, -b, 0.5) for a, b in zip(live, teacher, strict=True)]),
    )
