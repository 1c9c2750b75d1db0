"""What became of the trials of a campaign, counted, and how one trial that started the program is judged."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Counts", "Ended", "Outcome", "run_program"]

Outcome = Literal["right", "lost", "traceback", "hang", "wrong success"]


@dataclass
class Counts:
    """The trials of a campaign; all but ``right`` must stay at zero.

    Attributes:
        tried: Trials that ended in some way.
        of: Trials by outcome.
        wrong: What went wrong, a line each, with what repeats it.
    """

    tried: int = 0
    of: dict[Outcome, int] = field(
        default_factory=lambda: dict.fromkeys(("right", "lost", "traceback", "hang", "wrong success"), 0)
    )
    wrong: list[str] = field(default_factory=list)

    def note(self, outcome: Outcome, trial: str) -> None:
        """Counts a trial, and keeps its description if it went wrong."""
        self.tried += 1
        self.of[outcome] += 1
        if outcome != "right":
            self.wrong.append(f"{outcome}: {trial}")


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit status (None if it had to be killed) and what it wrote."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def outcome(self) -> Outcome | None:
        """What can be said without knowing the trial; None where the trial must judge."""
        if self.status is None:
            return "hang"
        return "traceback" if "Traceback (most recent call last)" in self.stdout + self.stderr else None


def run_program(
    arguments: Sequence[str], folder: Path, environment: dict[str, str] | None = None, limit: float = 300.0
) -> Ended:
    """Runs ``python -m lightning_fed ARGUMENTS`` in a folder, in a group of its own, which is killed at the limit.

    Args:
        arguments: The command line's words.
        folder: Where it runs.
        environment: Variables besides those of this process.
        limit: Seconds after which the program counts as hung.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_fed", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Ended(None, out.decode(errors="replace"), err.decode(errors="replace"))
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
