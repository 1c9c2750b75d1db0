"""The vectors that client algorithms work with, in every precision that the live weights can have."""

import pytest
import torch

from lightning_fed.functional import difference

PRECISIONS = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
]


@pytest.mark.parametrize(("left", "right", "out"), PRECISIONS)
@pytest.mark.parametrize("rows", [(), (3,)])
def test_a_difference_has_the_precision_of_its_result(rows, left, right, out):
    torch.manual_seed(0)
    a, b = torch.randn(*rows, 1003).to(left), torch.randn(1003).to(right)
    result = torch.full(a.shape, torch.nan, dtype=out)
    assert difference(a, b, result) is result
    assert torch.equal(result, a.to(out) - b.to(out))
