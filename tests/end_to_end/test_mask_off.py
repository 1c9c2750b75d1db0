"""A mask that lets everything through gives, to the bit, the run without a mask."""

from pathlib import Path

import torch

from lightning_fed.cli import main
from tests.end_to_end.command import final_state, fit_words, rows, run_folders


def test_threshold_zero_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    threshold = ["--aggregator.mask", "SignAgreement", "--aggregator.mask.threshold"]
    main(fit_words(tmp_path / "plain", 3))
    main(fit_words(tmp_path / "open", 3, *threshold, "0"))
    main(fit_words(tmp_path / "masked", 3, *threshold, "0.8"))
    plain, opened, masked = (run_folders(tmp_path / name)[0] for name in ("plain", "open", "masked"))
    reference = final_state(plain)
    assert final_state(opened).keys() == reference.keys()
    for name, value in final_state(opened).items():
        assert torch.equal(value, reference[name]), name
    assert any(not torch.equal(value, reference[name]) for name, value in final_state(masked).items())
    own = [{k: v for k, v in row.items() if not k.startswith("mask/")} for row in rows(opened)]
    assert own == rows(plain)
    assert {row["mask/mean"] for row in rows(opened)[1:]} == {"1.0"}
