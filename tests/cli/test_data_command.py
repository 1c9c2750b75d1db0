"""``lightning-fed data`` shows the split that ``fit`` trains on, without a model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from lightning_fed.cli import main
from lightning_fed.data import IID, Digits, FederatedDataModule
from tests.cli.conftest import CommandLine

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = f"--config={REPOSITORY / 'configs' / 'quickstart.yaml'}"
MODEL = ("--model", "ImageClassifier", "--model.backbone", "MLP")


class Numbers(FederatedDataModule):
    """A regression."""

    def __init__(self, num_clients: int = 4) -> None:
        super().__init__(torch.utils.data.TensorDataset(torch.rand(20, 3), torch.rand(20)), num_clients=num_clients)


@pytest.fixture
def look(cli: CommandLine, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Runs the command and returns its lines by their names."""

    def run(*words: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as end:
            main(["data", *words])
        assert end.value.code == 0
        assert not cli.calls
        lines = [line for line in capsys.readouterr().out.splitlines() if line]
        return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}

    return run


def written(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_shows_numbers_and_pictures_of_the_split(look: Callable[..., dict[str, str]]) -> None:
    facts = look(QUICKSTART)
    assert facts["data"] == "Digits, split by Shards"
    assert facts["clients"] == "20, none of them empty"
    assert "written: data-Digits/split.png, data-Digits/sizes.png, data-Digits/samples.png" in facts
    assert written("data-Digits") == ["samples.png", "sizes.png", "split.png"]
    assert min(imread(path).std() for path in Path("data-Digits").iterdir()) > 0


@pytest.mark.parametrize("seeds", [(), ("--trainer.seed=3",), ("--seed_everything=4",), ("--data.split_seed=5",)])
def test_the_split_is_the_one_that_fit_trains_on(
    look: Callable[..., dict[str, str]], cli: CommandLine, seeds: tuple[str, ...]
) -> None:
    words = ("--data", "Digits", "--data.num_clients", "7", "--data.partitioner", "IID", *seeds)
    shown = look(*words, "--output", "here")["hash"]
    main(["fit", *MODEL, *words])
    call = cli.calls[-1]
    call.arguments["datamodule"].trainer = type("Trainer", (), {"seed": call.trainer.options.seed})
    assert shown == call.arguments["datamodule"].split_hash
    assert (shown == Digits(num_clients=7, partitioner=IID(), split_seed=0).split_hash) == (not seeds)


def test_takes_every_option_of_fit_and_builds_no_model(look: Callable[..., dict[str, str]]) -> None:
    model = ("--model", "tests.cli.linked_parts.Exploding", "--model.num_classes=3", "--weights=none.ckpt")
    words = ("--trainer.max_rounds=5", "--aggregator", "FedAvg", "--aggregator.lr=0.5", "--data.num_clients=3")
    facts = look(QUICKSTART, *model, *words)
    assert facts["clients"].startswith("3,")


@pytest.mark.usefixtures("pictures")
def test_takes_the_config_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer = (f"--trainer.default_root_dir={tmp_path}", "--trainer.name=run", "--trainer.logger=[]")
    main(["fit", QUICKSTART, *trainer, "--trainer.max_rounds=1", "--data.num_clients=11"])
    folder = tmp_path / "run" / "version_0"
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {"samples.png", "sizes.png", "split.png"}
    with pytest.raises(SystemExit):
        main(["data", f"--config={folder / 'config.yaml'}", f"--output={tmp_path / 'out'}"])
    assert re.search(r"^clients +11, none of them empty$", capsys.readouterr().out, re.MULTILINE)
    assert {path.name for path in (tmp_path / "out").iterdir()} == pictures


def test_shows_what_there_is_to_show(look: Callable[..., dict[str, str]]) -> None:
    facts = look("--data", "tests.cli.test_data_command.Numbers", "--output", "numbers")
    assert written("numbers") == ["sizes.png"]
    assert not {"classes per client", "label entropy", "validation", "test"} & facts.keys()
    assert facts["input"] == "3"
    assert facts["samples per client"] == "5"


def test_options_come_from_variables_too(look: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_DATA__OUTPUT", "from-here")
    monkeypatch.setenv("PL_DATA__CONFIG", QUICKSTART.partition("=")[2])
    monkeypatch.setenv("PL_FIT__DATA", "MNIST")
    assert look()["data"].startswith("Digits")
    assert written("from-here") == ["samples.png", "sizes.png", "split.png"]


def test_pictures_take_the_place_of_former_ones(look: Callable[..., dict[str, str]]) -> None:
    look("--data", "Digits", "--output", "out")
    before = Path("out/split.png").read_bytes()
    look("--data", "Digits", "--data.partitioner", "IID", "--output", "out")
    assert Path("out/split.png").read_bytes() != before
    assert written("out") == ["samples.png", "sizes.png", "split.png"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--data", "Digits", "--trainer.max_round", "3"), 2,
         "There is no option `--trainer.max_round`; did you mean `--trainer.max_rounds` (`lightning-fed data --help` "
         "lists all)?"),
        ((), 2, "Expected `--data` on the command line or in a file given to `--config`, got none."),
        (("--data", "tests.cli.linked_parts.Silent"), 1,
         "Expected `--data` to be a FederatedDataModule, which splits its data over clients, got Silent: subclass it, "
         "or choose another class."),
        (("--data", "Digits", "--output", "taken"), 1,
         "Expected to write taken/split.png, but the system refuses (File exists): free disk space, check "
         "its permissions, or change `--output`."),
    ],
    ids=["unknown", "no-data", "not-federated", "output"],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    mistake: Callable[..., str], words: tuple[str, ...], code: int, sentence: str
) -> None:
    Path("taken").write_text("a file")
    assert mistake("data", *words, code=code) == sentence


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", "--help", "all"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lightning-fed data")
    assert "--output" in text
    assert "PL_DATA__OUTPUT" in text
