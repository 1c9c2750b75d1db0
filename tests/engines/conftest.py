"""What the tests of the engines share."""

import pytest

from lightning_fed.engines import choice as rule


@pytest.fixture
def few_lanes_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``auto`` train few clients at once, which would be slower."""
    monkeypatch.setattr(rule, "FEWEST_LANES", 1)
