"""A configuration that was saved when there were more options still runs, and its run is the same one."""

import pytest

from lightning_fed.cli.removed import REMOVED
from lightning_fed.runs.folder import fingerprint
from tests.cli.conftest import CommandLine

OLD = """
trainer:
  balance: measured
  cuda_graphs: false
  max_rounds: 3
"""


def test_a_saved_config_is_read_without_what_is_no_more(cli: CommandLine, caplog: pytest.LogCaptureFixture) -> None:
    file = cli.file("old.yaml", OLD)
    with caplog.at_level("INFO"):
        call = cli.run("--config", file)
    assert call.trainer.max_rounds == 3
    (said,) = [record.getMessage() for record in caplog.records if "Left out" in record.getMessage()]
    assert said.startswith(f"Left out of {file}: trainer.balance, trainer.cuda_graphs, ")


def test_so_is_a_part_of_a_config(cli: CommandLine) -> None:
    file = cli.file("trainer.yaml", "balance: samples\nmax_rounds: 4\n")
    assert cli.run("--trainer", file).trainer.max_rounds == 4


@pytest.mark.parametrize("option", REMOVED)
def test_words_that_name_it_are_refused(mistake: object, option: str) -> None:
    sentence = mistake("fit", "--model", "Plain", "--data", "Digits", f"--{option}=true")  # type: ignore[operator]
    assert sentence.startswith(f"There is no option `--{option}`")


def test_the_run_is_the_same_one() -> None:
    """By the hash that the release before would have made of it."""
    options = {"max_rounds": 3, "local_steps": 2}
    before = fingerprint({"trainer": {**options, "cuda_graphs": False}})
    assert fingerprint({"trainer": options}) == before
    assert fingerprint({"trainer": {**options, "cuda_graphs": True}}) != before
