"""``lightning-fed attack``: from the folder of a run to a table and a picture."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from lightning_fed.cli import main
from lightning_fed.data import Augmentation, FederatedDataModule, PowerLaw
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack import command
from lightning_fed.lab.attack.command import Outputs, read_outputs, shadow_confidences
from lightning_fed.lab.attack.options import COLUMNS, AttackOptions, attack_columns
from lightning_fed.models import Classifier
from lightning_fed.trainer import FederatedTrainer

HERE = "tests.lab.attack.test_command"


class Echo(Classifier):
    """Returns its inputs, scaled by its one weight."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(nn.Identity(), num_classes=2)
        self.scale, self.fault = nn.Parameter(torch.ones(())), fault

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scale * x
        return {"flat": scores[:, 0], "nan": scores / 0}.get(self.fault, scores)


class Lookup(Classifier):
    """Keeps two scores for each sample: those that it was not trained on stay 0."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), num_classes=2, optimizer=lambda params: SGD(params, lr=1.0))
        self.table = nn.Parameter(torch.zeros(1100, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x[:, 0].long()]

    def known(self) -> set[int]:
        """The numbers of the samples that it was trained on."""
        return set(self.table.detach().abs().sum(dim=1).nonzero().flatten().tolist())


class Shift(Augmentation):
    """Makes other samples of them."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + 5


def rows(first: int, count: int) -> Tensor:
    return torch.stack([torch.arange(first, first + count).float(), torch.zeros(count)], dim=1)


class Numbers(FederatedDataModule):
    """Training samples have the numbers from 1000 on, those of the test set from 0 on.

    Args:
        test: How many test samples there are, 0 for none.
        kind: ``plain``; ``alike``, the test samples are the training samples; ``real``, targets are no labels;
            ``single``, batches have no labels.
        client_test_fraction: As of every data module.
        num_clients: As of every data module.
        unseen_clients: As of every data module.
        **kwargs: Options of every data module.
    """

    def __init__(
        self,
        test: int = 40,
        kind: str = "plain",
        client_test_fraction: float = 0.0,
        num_clients: int = 5,
        unseen_clients: int = 0,
        **kwargs,
    ) -> None:
        train, tests = rows(1000, 60), rows(1000 if kind == "alike" else 0, test)
        sets = [TensorDataset(x, torch.zeros(len(x), dtype=torch.int64)) for x in (train, tests)]
        if kind == "real":
            sets = [TensorDataset(x, x[:, 0] + 0.5) for x in (train, tests)]
        elif kind == "single":
            sets = [TensorDataset(x) for x in (train, tests)]
        given = {
            "num_clients": num_clients,
            "unseen_clients": unseen_clients,
            "client_test_fraction": client_test_fraction,
            "test_dataset": sets[1] if test else None,
            **kwargs,
        }
        super().__init__(sets[0], **given)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose model scales by 0.01."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": {"scale": torch.tensor(0.01)}}, folder / "checkpoints" / "last.ckpt")
    trainer = "{accelerator: cpu, logger: false, enable_progress_bar: false}"
    config = f"model: {{class_path: {HERE}.Echo}}\ndata: {{class_path: {HERE}.Numbers}}\ntrainer: {trainer}\n"
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def attack(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command with few draws and returns what it printed."""

    def call(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["attack", "--bootstrap=20", *words])
        assert end.value.code == 0
        return capsys.readouterr().out

    return call


def table(path: Path) -> dict[str, dict[str, float]]:
    with open(path, newline="") as file:
        return {row.pop("attack"): {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)}


def outputs(run: Path, datamodule: FederatedDataModule, test_set=None, samples=None, seed=0) -> tuple[Outputs, Outputs]:
    trainer = FederatedTrainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    checkpoint = run / "checkpoints" / "last.ckpt"
    return read_outputs(trainer, Echo(), datamodule, checkpoint, AttackOptions(test_set, samples, seed))


def numbers(side: Outputs) -> list[int]:
    """Which samples these are, by the model's outputs."""
    return (100 * side.logits[:, 0]).round().int().tolist()


@pytest.mark.parametrize("given", ["folder", "file"])
def test_writes_table_and_picture_beside_the_run(attack: Callable[..., str], run: Path, given: str) -> None:
    said = attack("--ckpt_path", str(run if given == "folder" else run / "checkpoints" / "last.ckpt"))
    found = table(run / "attack.csv")
    assert list(found) == ["logistic regression", "loss"]
    for row in found.values():  # members and others are apart in the first score, and so in the loss
        assert (row["members"], row["others"]) == (20, 20)
        figures = ("accuracy", "auc", "tpr_at_0.01", "tpr_at_0.001")
        assert [row[name + end] for name in figures for end in ("", "_low", "_high")] == [1.0] * 12
    assert imread(run / "attack.png").std() > 0
    assert "40 training and as many test samples" in said
    assert said.count("20 + 20") == 2
    assert "TPR at 1 % FPR and below allow no false positive at all" in said
    assert "written: " in said
    assert not any(Path.cwd().glob("*.png"))


def test_of_equal_samples_the_loss_tells_nothing(attack: Callable[..., str], run: Path, tmp_path: Path) -> None:
    words = ("--data.kind=alike", "--data.test=60", "--output", str(tmp_path / "out"))
    attack("--ckpt_path", str(run), *words)
    row = table(tmp_path / "out" / "attack.csv")["loss"]
    assert row["auc_low"] < 0.5 < row["auc_high"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_the_seed_of_the_draws_says_all(attack: Callable[..., str], run: Path) -> None:
    tables = []
    for seed in (0, 0, 1):
        attack("--ckpt_path", str(run), "--data.kind=alike", "--data.test=60", f"--draw_seed={seed}")
        tables.append((run / "attack.csv").read_text())
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("test", [40, 90])
def test_takes_as_many_of_either_kind_without_repetition(run: Path, in_memory: bool, test: int) -> None:
    module = Numbers(test, in_memory=in_memory, augmentation=Shift(), batch_size=7, eval_batch_size=8)
    members, others = outputs(run, module)
    count = min(60, test)
    assert len(set(numbers(members))) == len(set(numbers(others))) == count
    assert set(numbers(members)) <= set(range(1000, 1060))
    assert set(numbers(others)) <= set(range(test))
    assert numbers(members) != sorted(numbers(members))
    assert members.logits.dtype == torch.float64


def test_members_are_what_clients_train_on(run: Path) -> None:
    module = Numbers(90, val_fraction=0.25, unseen_clients=1, client_test_fraction=0.2)
    members, _ = outputs(run, module, test_set="test")
    module = Numbers(90, val_fraction=0.25, unseen_clients=1, client_test_fraction=0.2, split_seed=0)
    assert sorted(numbers(members)) == sorted(1000 + module.split.index)
    assert len(members.labels) < 60
    _, others = outputs(run, module, test_set="unseen")
    assert set(numbers(others)).isdisjoint(numbers(members))


def test_samples_limits_what_is_drawn(run: Path) -> None:
    drawn = [outputs(run, Numbers(), samples=10, seed=seed) for seed in (0, 0, 1)]
    found = [(numbers(members), numbers(others)) for members, others in drawn]
    assert [len(side) for side in found[0]] == [10, 10]
    assert found[0] == found[1] != found[2]


def test_the_model_and_the_data_are_left_as_they_were(run: Path) -> None:
    module, data = Echo(), Numbers()
    trainer = FederatedTrainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    read_outputs(trainer, module, data, run / "checkpoints" / "last.ckpt", AttackOptions())
    assert not {"predict_step", "predict_dataloader"} & (vars(module).keys() | vars(data).keys())


def test_clients_held_out_are_told_from_those_that_train(attack: Callable[..., str], run: Path) -> None:
    said = attack("--ckpt_path", str(run), "--data.num_clients=12", "--data.unseen_clients=5", "--test_set=unseen")
    row = table(run / "attack.csv")["client"]
    assert (row["members"], row["others"]) == (4, 3)  # halves of 7 and of 5 clients fit the threshold
    assert {f"attack/client/{name}" for name in ("accuracy", "auc", "tpr_at_0.01")} <= set(COLUMNS)
    assert attack_columns(run / "attack.csv")["attack/client/auc"] == row["auc"]
    assert "TPR on clients" not in said


@pytest.mark.parametrize("options", [{}, {"drop_last": True, "batch_size": 6, "partitioner": PowerLaw()}])
def test_a_client_has_the_mean_score_of_its_own_samples(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The confidence of a sample is its number here, so that the numbers of each client say its score."""
    data, drawn = Numbers(90, num_clients=12, unseen_clients=5, **options), []
    members, others = outputs(run, data, test_set="unseen")
    monkeypatch.setattr(command, "_by_threshold", lambda *scores: drawn.extend(scores))
    command._attack_on_clients(data, members, others, AttackOptions("unseen"))
    split, unseen = data.division.split, data.division.unseen
    sides = (drawn[0], members, split.index, split.owners), (drawn[1], others, unseen.rows, unseen.owners)
    for found, side, index, owners in sides:
        own = [[n / 100 for n in numbers(side) if n - 1000 in index[owners == client]] for client in np.unique(owners)]
        assert sorted(found.tolist()) == pytest.approx(sorted(np.mean(each) for each in own if each), rel=1e-5)
    assert command._attack_on_clients(data, members, others, AttackOptions("test")) == {}
    assert command._attack_on_clients(Numbers(), members, others, AttackOptions()) == {}


def test_says_what_epsilon_of_the_run_allows(attack: Callable[..., str], run: Path) -> None:
    words = "--trainer.callbacks CentralDP --trainer.callbacks.clip 1 --trainer.callbacks.noise 1"
    words = ["--ckpt_path", str(run), *words.split(), "--trainer.callbacks.delta=0.01"]
    assert "TPR on clients" not in attack(*words)  # no row has an ε
    (run / "metrics.csv").write_text("round,privacy/epsilon\n1,1.0\n2,2.0\n3,\n")
    said = attack(*words)
    assert "At ε = 2, δ = 0.01 TPR on clients is at most 8.389 % at 1 % FPR." in said  # e² 0.01 + 0.01
    assert "TPR on clients" not in attack("--ckpt_path", str(run))


CLASSIFIER = (
    "Expected Echo to be a classifier, whose `forward` returns finite scores of shape (B, C) for the inputs of a batch "
    "(inputs, labels), labels from 0 to C - 1, got "
)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Expected the folder of a run, or a checkpoint, as `--ckpt_path`, got none."),
        (["--ckpt_path"], "Expected the folder of a run, or a checkpoint, as `--ckpt_path`, got none."),
        (["--ckpt_path=gone.ckpt"],
         "Expected `--ckpt_path` to be the folder of a run, or a checkpoint, got gone.ckpt: there is no gone.ckpt."),
        (["--ckpt_path=runs"],
         "Expected `--ckpt_path` to be the folder of a run, or a checkpoint, got runs: there is no "
         "runs/checkpoints/last.ckpt."),
        (["RUN", "--data.test=0"],
         "Expected data with a test set, whose samples the model has never seen, got none."),
        (["RUN", "--data.test=1"], "Expected at least two training samples and two test samples to compare, got 1."),
        (["RUN", "--samples=1"], "Expected `--samples` to be an integer of at least 2, got 1."),
        (["RUN", "--shadows=3"], "Expected `--shadows` to be even, as they train in pairs, got 3."),
        (["RUN", "--test_set=clients"],
         "Expected `--test_set` to name one of the test sets (none with a name: leave it out), got clients."),
        (["RUN", "--data.client_test_fraction=0.5"],
         "Expected `--test_set` to name one of the test sets (test, clients), got none."),
        (["RUN", "--data.kind=real"], f"{CLASSIFIER}a float32 tensor of shape (7, 2) for labels that are a float32"),
        (["RUN", "--data.kind=single"], f"{CLASSIFIER}a batch that is a list of 1."),
        (["RUN", "--model.fault=flat"], f"{CLASSIFIER}a float32 tensor of shape"),
        (["RUN", "--model.fault=nan"], f"{CLASSIFIER}NaN or infinity: the model has diverged, give another"),
        (["RUN", "--output=taken"], "Expected to write taken/attack.csv, but the system refuses"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    Path("taken").write_text("a file")
    words = [f"--ckpt_path={run}" if word == "RUN" else word for word in words]
    with pytest.raises(SystemExit) as end:
        main(["attack", "--bootstrap=20", *words])
    assert end.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


def test_a_checkpoint_without_its_run_needs_a_config(
    attack: Callable[..., str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (run / "config.yaml").rename("other.yaml")
    with pytest.raises(SystemExit):
        main(["attack", "--ckpt_path", str(run)])
    assert "but there is none: give one as" in capsys.readouterr().err
    attack("--ckpt_path", str(run), "--config", str(config))
    assert Path("attack.csv").is_file()


@pytest.mark.parametrize("options", [{}, {"drop_last": True, "batch_size": 6, "partitioner": PowerLaw()}])
def test_shadow_models_know_a_half_of_each_client_and_are_asked_of_the_other(run: Path, options: dict) -> None:
    data, modules = Numbers(val_fraction=0.1, **options), []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_rounds": 1}

    def build(number: int) -> tuple[FederatedTrainer, Lookup]:
        modules.append(Lookup())
        return FederatedTrainer(accelerator="cpu", seed=5 + number, enable_checkpointing=False, **quiet), modules[-1]

    former = data.split_hash
    found = shadow_confidences(build, data, AttackOptions(shadows=4), None)
    # Of models that were not trained on it each sample has scores of 0, and so both classes are as likely.
    assert [side.tolist() for side in found] == [[0.0] * len(found[1])] * 2
    assert data.split_hash == former
    first, second, third, _ = (module.known() for module in modules)
    assert first.isdisjoint(second)
    assert first != third
    if not options:
        assert first | second == set(1000 + data.split.index)
        halves = [np.isin(1000 + data.split.index, [*known]) for known in (first, second)]
        sizes = [np.bincount(data.split.owners[half]) for half in halves]
        assert np.abs(sizes[0] - sizes[1]).max() <= 1


def test_shadow_models_calibrate_the_confidence(attack: Callable[..., str], run: Path) -> None:
    table_of_run = torch.zeros(1100, 2)
    table_of_run[1000:, 0] = 3.0
    torch.save({"state_dict": {"table": table_of_run}}, run / "checkpoints" / "last.ckpt")
    words = ("--model", f"{HERE}.Lookup", "--shadows=2", "--trainer.max_rounds=1")
    attack("--ckpt_path", str(run), *words)
    found = table(run / "attack.csv")
    assert list(found) == ["logistic regression", "loss", "calibrated"]
    assert found["calibrated"]["auc"] == found["calibrated"]["accuracy"] == 1.0
    assert sorted(path.name for path in Path.cwd().rglob("version_*")) == ["version_0"]


def test_shadow_models_need_clients_whose_data_can_be_halved() -> None:
    with pytest.raises(FederatedError, match="^Expected a FederatedDataModule for `--shadows`.*got object: wrap it"):
        shadow_confidences(lambda number: None, object(), AttackOptions(shadows=2), None)


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["attack", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lightning-fed attack")
    assert {"--draw_seed", "--test_set", "--ckpt_path"} <= set(text.split())
