"""Aggregator, mask, weighting and buffers are chosen by one option each, over any configuration."""

from itertools import cycle
from pathlib import Path

import pytest

from lightning_fed.cli import FederatedCLI
from tests.composition.composition_parts import MASKED, RULES, UNMASKED
from tests.parts import quick_first

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
MASKS = [
    ("SignAgreement", "--aggregator.mask.binary=true", "--aggregator.mask.comparison=>"),
    ("SignAgreement", "--aggregator.mask.votes=samples"),
    ("MagnitudeAgreement", "--aggregator.mask.threshold=0.3"),
    ("SANDMask", "--aggregator.mask.k=1e-3"),
    ("MaskControl", "--aggregator.mask.keep=length", "--aggregator.mask.mask=SignAgreement"),
    ("DelayedMask", "--aggregator.mask.rounds=0", "--aggregator.mask.mask=MagnitudeAgreement"),
]
LINES = [*zip(MASKED, cycle(MASKS), cycle(["local", "keep", "average"]), strict=False)]
LINES += [(rule, (), "local") for rule in UNMASKED]


@pytest.mark.parametrize(("rule", "mask", "buffers"), quick_first(4, LINES))
@pytest.mark.quick(2)
def test_trains_a_round(
    rule: str, mask: tuple[str, ...], buffers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    words = [f"--aggregator={rule}", f"--aggregator.weighting={RULES[rule].weightings[-1]}"]
    words += ["--trainer.clients_per_round=1.0"] if rule == "AFL" else []  # which refuses a cohort that is drawn
    words += ["--data.val_split=per_client"] if rule == "FedDGGA" else []  # which reads losses over held-out samples
    words += [f"--aggregator.buffers={buffers}", *(f"--aggregator.mask={word}" for word in mask[:1]), *mask[1:]]
    quiet = ["--trainer.max_rounds=1", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    cli = FederatedCLI(["fit", f"--config={QUICKSTART}", *words, *quiet, "--trainer.enable_progress_bar=false"])
    built = cli.trainer.run_config["aggregator"]
    assert built["class_path"] == f"lightning_fed.aggregators.{rule}"
    assert built["init_args"]["weighting"] == "uniform"
    assert built["init_args"]["buffers"] == buffers
    assert cli.trainer.round == 1
    assert cli.trainer.aggregator.label == "+".join([rule, *mask[:1]])
    for word in mask[1:]:
        option, _, value = word.partition("=")
        set_to = built["init_args"]["mask"]["init_args"][option.rpartition(".")[2]]
        set_to = set_to["class_path"].rpartition(".")[2] if isinstance(set_to, dict) else set_to
        assert set_to in (value, float(value) if value[0].isdigit() else value == "true"), word
