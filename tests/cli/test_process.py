"""The program as a process of its own: what it loads, prints and leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command with the package of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_saves_a_config_that_does_it_again(tmp_path):
    small = ["--data.num_clients", "4", "--trainer.max_rounds", "1", "--trainer.logger", "false"]
    model = ["--model=ImageClassifier", "--model.backbone=LogisticRegression", "--model.backbone.in_features=64"]
    fit = run("-m", "lightning_fed", "fit", *model, "--data", "Digits", *small, cwd=tmp_path)
    assert fit.returncode == 0, fit.stderr
    assert "Warning" not in fit.stderr
    (saved,) = tmp_path.glob("runs/*/*/config.yaml")
    config = yaml.safe_load(saved.read_text())
    assert config["trainer"]["max_rounds"] == 1
    printed = run("-m", "lightning_fed", "fit", "--config", str(saved), "--print_config", cwd=tmp_path)
    assert yaml.safe_load(printed.stdout) == config
    tested = run(str(ROOT / "cli.py"), "test", "--config", str(saved), cwd=tmp_path)
    assert tested.returncode == 0, tested.stderr
    assert "test/acc" in tested.stdout
    assert list(tmp_path.glob("runs/*/*/config.yaml")) == [saved]


@pytest.mark.slow
def test_a_mistake_ends_with_its_sentence(tmp_path):
    done = run("-m", "lightning_fed", "fit", "--trainer.max_round", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("There is no option `--trainer.max_round`; did you mean")
    assert "usage" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import lightning_fed.lab.report_command", ["torch", "lightning", "lightning_fed.cli.federated_cli"]),
        ("import lightning_fed.lab.runner.command, lightning_fed.lab.runner.report", ["torch", "lightning", "optuna"]),
        (
            "import lightning.pytorch, sys; before = set(sys.modules); import lightning_fed.cli.federated_cli; "
            "[sys.modules.pop(name) for name in before]",
            ["matplotlib.pyplot", "sklearn", "wandb", "torchvision", "scipy", "pandas"],
        ),
        (
            "from lightning_fed.cli import main; "
            f"main(['fit', '--config', {str(ROOT / 'configs' / 'quickstart.yaml')!r}, '--trainer.max_rounds=1', "
            "'--trainer.logger=false', '--trainer.enable_progress_bar=false', '--trainer.enable_model_summary=false'])",
            ["lightning_fed.lab"],
        ),
    ],
)
@pytest.mark.slow
def test_nothing_heavy_is_loaded_before_it_is_needed(tmp_path, code, unwanted):
    done = run("-c", f"{code}; import sys; print(*[name for name in {unwanted} if name in sys.modules])", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
