"""Client algorithms are chosen by one option, over any configuration."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.cli import FederatedCLI, main
from tests.composition.client_parts import ALONE, BESIDE, LATE, PRIVATE, UNSENT
from tests.parts import quick_first

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
ON_ALL_DATA = ("--data.batch_size=1000",)
NORMED = ("--model.backbone.norm=batch", "--data.drop_last=true")
LINES: list[tuple[tuple[str, ...], list[str], dict[str, Any]]] = [
    (("--client=FedProx", "--client.mu=0.1"), ["FedProx"], {"mu": 0.1}),
    (("--client=SCAFFOLD",), ["SCAFFOLD"], {"option": "II"}),
    (("--client=SCAFFOLD", "--client.option=I", "--model.optimizer=Adam"), ["SCAFFOLD"], {"option": "I"}),
    (("--client=StatelessSCAFFOLD", "--aggregator=FedNova"), ["StatelessSCAFFOLD"], {}),
    (("--client=FedGA", "--client.beta={1: 0.1, 50: 0.01}"), ["FedGA"], {"beta": {1: 0.1, 50: 0.01}}),
    (("--client=FedGA", "--client.measure_from=global"), ["FedGA"], {"measure_from": "global", "beta": 0.05}),
    (("--client=GradAlign", "--client.beta=2", *ON_ALL_DATA), ["GradAlign"], {"beta": 2.0}),
    (("--client=LinearScaling", "--aggregator.weighting=uniform", *ON_ALL_DATA), ["LinearScaling"], {}),
    (("--client=FedCM", "--client.alpha=0.3"), ["FedCM"], {"alpha": 0.3}),
    (("--client=MimeLite", "--client.beta=0.5"), ["MimeLite"], {"beta": 0.5}),
    (("--client=FedSAM", "--client.rho=0.2"), ["FedSAM"], {"rho": 0.2}),
    (("--client=FedLESAM", "--client.since=last"), ["FedLESAM"], {"since": "last", "rho": 0.1}),
    (("--client=FedGaLA", "--client.threshold=0.1"), ["FedGaLA"], {"threshold": 0.1, "compare": "gradient"}),
    (
        ("--client=DeltaSGD", "--client.delta=0.02", "--model.optimizer.momentum=0"),
        ["DeltaSGD"],
        {"delta": 0.02, "gamma": 2.0},
    ),
    (("--client=PFedMe", "--client.lam=5", "--aggregator.lr=0.5"), ["PFedMe"], {"lam": 5.0, "inner_steps": 5}),
    (("--client=PerFedAvg", "--client.form=hessian_free"), ["PerFedAvg"], {"form": "hessian_free"}),
    (("--client=Ditto", "--client.lam=0.3"), ["Ditto"], {"lam": 0.3}),
    (("--client=APFL", "--client.adaptive=true"), ["APFL"], {"adaptive": True, "alpha": 0.5}),
    (("--client=LocalOnly",), ["LocalOnly"], {}),
    (("--client=Stale", "--trainer.participation.sampler=Arrivals"), ["Stale"], {"exponent": 0.5}),
    (("--client=DPSGD", "--client.clip=1", "--client.noise=1"), ["DPSGD"], {"clip": 1.0, "delta": 1e-5}),
    (("--client=FedDyn", "--aggregator=FedDynServer", "--aggregator.alpha=0.3"), ["FedDyn"], {"pull": 0.3}),
    (("--client=FedLC", "--client.tau=0.5"), ["FedLC"], {"tau": 0.5, "absent": 0.0}),
    (("--client=LogitAdjustment", "--client.absent=0.5"), ["LogitAdjustment"], {"tau": 1.0, "absent": 0.5}),
    (("--client=FedRS", "--client.alpha=0.2"), ["FedRS"], {"alpha": 0.2}),
    (("--client=MOON", "--client.mu=5"), ["MOON"], {"mu": 5.0, "temperature": 0.5}),
    (("--client=FedNTD", "--model.optimizer=Adam"), ["FedNTD"], {"beta": 1.0}),
    (("--client=FedIIR", "--client.gamma=0.01"), ["FedIIR"], {"gamma": 0.01, "ema": 0.95}),
    (("--client=FedPer", "--client.last=1"), ["FedPer"], {"last": 1}),
    (("--client=FedRep", "--client.head_epochs=2", "--trainer.local_epochs=3"), ["FedRep"], {"head_epochs": 2}),
    (("--client=LGFedAvg",), ["LGFedAvg"], {"last": 1}),
    (("--client=PersonalParameters", "--client.names=['*.bias']"), ["PersonalParameters"], {"names": ["*.bias"]}),
    (("--client=FedBN", "--aggregator.buffers=local", *NORMED), ["FedBN"], {}),
    (("--client=LabelFlip", "--client.share=0.3"), ["LabelFlip"], {"share": 0.3}),
    (("--client=SignFlip", "--client.factor=-5", "--aggregator=CoordinateMedian"), ["SignFlip"], {"factor": -5.0}),
    (("--client=GaussianNoise", "--client.clients=[0, 3]"), ["GaussianNoise"], {"clients": [0, 3], "scale": 100.0}),
    (("--client=ALIE", "--aggregator=Krum"), ["ALIE"], {"z": None, "share": 0.2}),
    (("--client=IPM", "--client.epsilon=2"), ["IPM"], {"epsilon": 2.0}),
    (("--client+=FedProx", "--client.mu=.3", "--client+=FedGA", "--client.beta=.1"), ["FedProx", "FedGA"], {"mu": 0.3}),
    (("--client=[SCAFFOLD, FedGA]", "--aggregator=Krum"), ["SCAFFOLD", "FedGA"], {"option": "II"}),
]
QUIET = ("--trainer.max_rounds=1", "--trainer.logger=false", "--trainer.enable_progress_bar=false")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def test_every_client_algorithm_has_a_line() -> None:
    named = {name for _, names, _ in LINES for name in names}
    assert named == {
        type(local.make()[0]).__name__ for local in {**ALONE, **BESIDE, **UNSENT, **LATE, **PRIVATE}.values()
    }


@pytest.mark.parametrize(("words", "names", "arguments"), quick_first(4, LINES))
def test_trains_a_round(words: tuple[str, ...], names: list[str], arguments: dict[str, Any]) -> None:
    cli = FederatedCLI(["fit", f"--config={QUICKSTART}", *words, *QUIET, "--trainer.enable_checkpointing=false"])
    trainer = cli.trainer
    first = trainer.callbacks[0]
    assert [type(callback).__name__ for callback in trainer.callbacks[: len(names)]] == names
    assert {name: getattr(first, name) for name in arguments} == arguments
    assert trainer.label == "+".join([type(trainer.aggregator).__name__, *names])
    assert trainer.name == trainer.label.lower()
    assert trainer.round == 1
    assert trainer.callback_metrics["privacy/sample_epsilon" if names == ["DPSGD"] else "train/loss"] > 0


REFUSED = [
    (["--client=FedDyn"], r"aggregator FedDynServer.*, got FedAvg: set `--aggregator FedDynServer`\."),
    (["--client=[SCAFFOLD, StatelessSCAFFOLD]"], r"SCAFFOLD without StatelessSCAFFOLD.*`--client`\."),
    (["--client=SCAFFOLD", "--model.optimizer=Adam"], r"SGD.*got Adam.*`--model.optimizer` or `--client.option`\."),
    (["--client=[FedCM, MimeLite]"], r"scales the gradient.*FedCM and MimeLite.*`--client`\."),
    (["--client=[FedCM, SCAFFOLD]"], r"FedCM without SCAFFOLD.*`--client`\."),
    (["--client=FedPer", "--client.last=2"], r"FedPer to leave parameters .* all 4 would stay .* LocalOnly"),
    (["--client=PersonalParameters", "--client.names=[hed]"], r"the pattern `hed` in `--client.names` .*`--model`\."),
    (["--client=GradAlign"], r"all of a client's data, got batches of 10 .*`--data.batch_size \d+`"),
    (["--client=GradAlign", *ON_ALL_DATA, "--trainer.local_epochs=2"], r"one local step.*`--trainer.local_steps 1`"),
    (["--client=LinearScaling", *ON_ALL_DATA], r"`--aggregator.weighting uniform` for LinearScaling.*samples\."),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_does_not_fit_together_is_one_sentence_and_leaves_nothing_behind(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={QUICKSTART}", *words, *QUIET])
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^Expected .*" + sentence, last), last
    assert not list(tmp_path.glob("runs/*/*"))
