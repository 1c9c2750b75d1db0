"""A run of a client algorithm goes on from its checkpoint as if it had never stopped, and does its run again."""

from pathlib import Path

import pytest

from lightning_fed.cli import main
from tests.end_to_end.command import assert_same_run, final_state, fit_words, rows, run_folders

LINES = {
    "SCAFFOLD": ("--client=SCAFFOLD",),
    "SCAFFOLD I": ("--client=SCAFFOLD", "--client.option=I"),
    "FedDyn": ("--client=FedDyn", "--aggregator=FedDynServer"),
    "FedGA on SCAFFOLD": ("--client+=SCAFFOLD", "--client+=FedGA", "--client.beta={1: 0.3, 3: 0.1}"),
}
COUNTED = ("samples", "gradients", "comm/rounds", "comm/bytes_down", "comm/bytes_up")


@pytest.mark.parametrize("line", LINES)
def test_a_resumed_run_is_that_of_one_start(line: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(fit_words(whole, 4, *LINES[line]))
    main(fit_words(parts, 2, *LINES[line]))
    main(fit_words(parts, 4, *LINES[line], "--ckpt_path=last"))
    (one,), (other,) = run_folders(whole), run_folders(parts)
    assert_same_run(one, other)
    assert [row["round"] for row in rows(other)] == ["0", "1", "2", "3", "4"]
    # Totals go on where they were: every round of this run costs the same exchanges.
    counts = [[float(row[name]) for row in rows(other)[1:]] for name in ("comm/rounds", "comm/bytes_up")]
    assert all(values == [values[0] * at for at in (1, 2, 3, 4)] for values in counts)
    assert all(float(rows(other)[4][name]) > float(rows(other)[2][name]) for name in COUNTED)


def test_the_saved_config_does_a_run_of_a_list_again(tmp_path: Path) -> None:
    main(fit_words(tmp_path, 3, *LINES["FedGA on SCAFFOLD"]))
    (first,) = run_folders(tmp_path)
    main(["fit", f"--config={first / 'config.yaml'}"])
    main(["fit", f"--config={first / 'config.yaml'}", "--trainer.max_rounds=4", "--ckpt_path=last"])
    _, second = run_folders(tmp_path)
    assert rows(second)[:4] == rows(first)
    assert len(rows(second)) == 5


def test_another_client_algorithm_is_another_run(tmp_path: Path) -> None:
    main(fit_words(tmp_path, 1, *LINES["SCAFFOLD"]))
    main(fit_words(tmp_path, 1, *LINES["SCAFFOLD I"], "--ckpt_path=last"))
    main(fit_words(tmp_path, 1, "--client=FedProx", "--client.mu=2", "--ckpt_path=last"))
    one, other, third = run_folders(tmp_path)
    # The first round from zero is that of plain clients under either option, but is counted differently.
    assert all(final_state(one)[name].equal(value) for name, value in final_state(other).items())
    assert float(rows(other)[1]["gradients"]) > float(rows(one)[1]["gradients"])
    assert not all(final_state(one)[name].equal(value) for name, value in final_state(third).items())
