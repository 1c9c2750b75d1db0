"""How long the runs of a study still take."""

import pytest

from lightning_fed.lab.runner.pool import seconds_left


@pytest.mark.parametrize(
    ("took", "running", "missing", "jobs", "left"),
    [
        ([10.0, 20.0], [], 4, 1, 60.0),
        ([10.0, 20.0], [5.0, 0.0], 4, 2, 27.5),
        ([10.0], [4.0, 99.0], 2, 2, 3.0),  # a slow one can end at any time
        ([10.0], [4.0], 1, 8, 6.0),  # more jobs than runs
        ([10.0], [], 0, 2, 0.0),
        ([], [5.0], 3, 2, 0.0),
    ],
)
def test_time_left_by_the_mean_run(took: list[float], running: list[float], missing: int, jobs: int, left: float):
    assert seconds_left(took, running, missing, jobs) == left
