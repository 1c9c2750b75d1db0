"""A run of a client algorithm goes on from its checkpoint as if it had never stopped."""

from pathlib import Path

import pytest

from lightning_fed.cli import main
from tests.end_to_end.command import assert_same_run, fit_words, rows, run_folders
from tests.parts import quick_first

LINES = {
    "SCAFFOLD": ("--client=SCAFFOLD",),
    "SCAFFOLD I": ("--client=SCAFFOLD", "--client.option=I"),
    "FedDyn": ("--client=FedDyn", "--aggregator=FedDynServer"),
    "MOON": ("--client=MOON", "--trainer.client_states=disk"),
    "FedIIR": ("--client=FedIIR", "--client.gamma=0.1"),
    "Ditto on disk": ("--client=Ditto", "--trainer.client_states=disk"),
    "APFL": ("--client=APFL", "--client.adaptive=true"),
    "MoFedSAM": ("--client+=FedSAM", "--client.rho=0.1", "--client+=FedCM"),
    "FedLESAM": ("--client=FedLESAM",),
    "FedLESAM last": ("--client=FedLESAM", "--client.since=last"),
    "FedGaLA": ("--client=FedGaLA", "--aggregator=FedGaLAServer"),
    "DeltaSGD, FedAWA": ("--client=DeltaSGD", "--aggregator=FedAWA", "--model.optimizer.momentum=0"),
    "FedGA on SCAFFOLD": ("--client+=SCAFFOLD", "--client+=FedGA", "--client.beta={1: 0.3, 3: 0.1}"),
}


@pytest.mark.parametrize("line", quick_first(0, LINES))
def test_a_resumed_run_is_that_of_one_start(line: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(fit_words(whole, 4, *LINES[line]))
    main(fit_words(parts, 2, *LINES[line]))
    main(fit_words(parts, 4, *LINES[line], "--ckpt_path=last"))
    (one,), (other,) = run_folders(whole), run_folders(parts)
    assert_same_run(one, other)
    assert [row["round"] for row in rows(other)] == ["0", "1", "2", "3", "4"]
