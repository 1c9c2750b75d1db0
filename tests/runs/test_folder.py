"""The fingerprint of a run, by which a later start finds it."""

from importlib import import_module

import pytest

from lightning_fed.core.user_code import describe
from lightning_fed.runs.folder import _MOVED, fingerprint


@pytest.mark.parametrize(("now", "then"), _MOVED.items())
def test_runs_from_before_a_class_moved_are_found(now: str, then: str) -> None:
    place, _, name = now.rpartition(".")
    named = describe(getattr(import_module(f"lightning_fed.{place}"), name))
    assert named == f"lightning_fed.{now}", "where it is: a run from Python has this in its config"
    old, new = ({"client": [{"class_path": path, "init_args": {}}]} for path in (f"lightning_fed.{then}", named))
    assert fingerprint(new) == fingerprint(old)


def test_a_fingerprint_is_the_one_that_runs_had_before() -> None:
    """Of a run from Python, as the commit before the files moved has written it."""
    config = {
        "client": [
            {"class_path": "lightning_fed.client_algorithms.server_direction.FedCM", "init_args": {"alpha": 0.1}}
        ]
    }
    assert fingerprint(config) == "553cd5de8615d495b80817ca9386ac090dd18b475f39bf7bf8184993e70aa196"
