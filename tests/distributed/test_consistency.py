"""Which hyper-parameters of the local optimizer are compared, and that every one of them is."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.distributed.consistency import Standing, expect_same_standing, option_sums
from lightning_fed.errors import FederatedError


def optimizer(**of_second: Any) -> torch.optim.Optimizer:
    parts = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], **of_second}]
    return torch.optim.AdamW(parts, lr=0.1)


def standing(**of_second: Any) -> Standing:
    return Standing(None, False, "0x1p0", option_sums(optimizer(**of_second)))


def test_the_same_options_agree() -> None:
    expect_same_standing([standing(), standing(lr=0.1), standing(betas=(0.9, 0.999))], 3)
    assert option_sums(optimizer(lr=torch.tensor(0.1, dtype=torch.float64))) == option_sums(optimizer())
    own, other = optimizer(), optimizer()
    for one in (own, other):  # whose text is another in each process
        one.param_groups[0]["of the user's own"] = object()
    assert option_sums(own) == option_sums(other)


@pytest.mark.parametrize(
    "of_second", [{"lr": 0.1 + 1e-16}, {"betas": (0.9, 0.99)}, {"amsgrad": True}, {"lr": torch.tensor(0.2)}], ids=str
)
def test_any_other_option_of_any_group_is_named(of_second: dict[str, Any]) -> None:
    (name,) = of_second
    with pytest.raises(
        FederatedError, match=f"the same `{name}` of the local optimizer after round 3, but they differ"
    ):
        expect_same_standing([standing(), standing(), standing(**of_second)], 3)
