"""A representative part of the campaign on processes."""

from pathlib import Path

import pytest

from tests.faults.ranks import MOMENTS, Trial, draw, try_all


def test_trials_are_drawn_alike_and_cover_all_moments() -> None:
    assert draw(50, 3) == draw(50, 3) != draw(50, 4)
    assert {trial.moment for trial in draw(42, 0)} == set(MOMENTS)


@pytest.mark.slow
def test_hurt_processes_end_the_others_and_their_runs_go_on(tmp_path: Path) -> None:
    trials = [
        Trial("killed", 0, "joining", 0),
        Trial("stopped", 0, "training", 1),
        Trial("stopped", 1, "within an exchange", 30),
        Trial("raises", 1, "training alone", 0),
        Trial("killed", 1, "saving", 0),
    ]
    counts = try_all(trials, tmp_path)
    assert counts.wrong == []
    assert counts.tried == len(trials)
