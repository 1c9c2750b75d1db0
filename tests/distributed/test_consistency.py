"""The model and every hyper-parameter of the local optimizer are compared after a round."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.distributed.consistency import Standing, checksum, expect_same_standing
from lightning_fed.errors import FederatedError


def optimizer(**of_second: Any) -> torch.optim.Optimizer:
    parts = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], **of_second}]
    return torch.optim.AdamW(parts, lr=0.1)


def standing(weight: float = 1.0, **of_second: Any) -> Standing:
    return Standing(None, False, checksum(torch.tensor([weight, 2.0]), optimizer(**of_second)))


def test_the_same_options_agree() -> None:
    expect_same_standing([standing(), standing(lr=0.1), standing(betas=(0.9, 0.999))], 3)
    assert standing(lr=torch.tensor(0.1, dtype=torch.float64)) == standing()
    own, other = optimizer(), optimizer()
    for one in (own, other):  # whose text is another in each process
        one.param_groups[0]["of the user's own"] = object()
    assert checksum(torch.ones(1), own) == checksum(torch.ones(1), other)


@pytest.mark.parametrize(
    "other",
    [{"weight": 1.1}, {"lr": 0.1 + 1e-16}, {"betas": (0.9, 0.99)}, {"amsgrad": True}, {"lr": torch.tensor(0.2)}],
    ids=str,
)
def test_another_model_or_option_of_any_group_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match="the same options of the local optimizer, after round 3, but they differ"):
        expect_same_standing([standing(), standing(), standing(**other)], 3)
