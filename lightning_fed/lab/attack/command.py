"""``lightning-fed attack --ckpt_path RUN_OR_FILE``: membership inference against the model of a run."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor

from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.core.files import png, write_atomically
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack import figures
from lightning_fed.lab.attack.options import FIGURES, TABLE, AttackOptions, expect_sound_attack
from lightning_fed.lab.attack.shadows import Draw, Outputs, read_outputs, shadow_confidences
from lightning_fed.lab.common import aligned, csv_text
from lightning_fed.lab.report.plots import COLOURS
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.options import expect_datamodule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main"]

_DESCRIPTION = (
    "Tells training samples from test samples by the outputs of a trained classifier. Data, model and trainer come "
    "from the run's config.yaml; you can change them by the options of fit."
)
_LEVELS = {"TPR at 1 % FPR": 0.01, "TPR at 0.1 % FPR": 0.001}
_TITLES = ("accuracy", "AUC", *_LEVELS)


class _Attack(NamedTuple):
    """Scores of members and of others, each of shape (n,); a score of at least the threshold means member."""

    members: Tensor
    others: Tensor
    threshold: float


class _AttackCLI(FederatedCLI):
    """Parses the options of ``fit``, and builds the data, model and trainer of ``test``."""

    def __init__(self, words: list[str]) -> None:
        parser = {"prog": "lightning-fed attack", "description": _DESCRIPTION, "default_env": False}
        super().__init__(words, run=False, parser_kwargs=parser, save_config_callback=None)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the options of ``fit`` and those of the attack."""
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(FederatedTrainer, "fit", skip=set(self.subcommands()["fit"]))
        parser.add_class_arguments(AttackOptions)
        parser.add_argument(
            "--output", type=str | None, help="Folder for attack.csv and attack.png (default: the run's)."
        )

    def after_instantiate_classes(self) -> None:
        """Does nothing, as this trainer neither makes nor finds runs."""


def main(words: list[str]) -> int:
    """Prints the table of attacks, writes it as CSV and draws their ROC curves; returns 0."""
    checkpoint, config = _find(words)
    words = [*(["--config", str(config)] if config is not None else []), *words]
    cli = _AttackCLI(words)
    options = cli._options(cli.config)
    expect_sound_attack(options, "--")
    draw = Draw(options["test_set"], options["samples"], options["draw_seed"])
    data = expect_datamodule(cli.model, cli.datamodule, train=None)
    members, others = read_outputs(cli.trainer, cli.model, data, checkpoint, draw)
    attacks = _attacks(members, others)
    if options["shadows"]:
        with TemporaryDirectory() as runs:
            build = partial(_build_shadow, words, cli.trainer.seed, runs)
            expected = shadow_confidences(build, data, options["shadows"], draw, options["weights"])
        attacks["calibrated"] = _by_threshold(members.confidences - expected[0], others.confidences - expected[1])
    if not cli.trainer.is_global_zero:
        return 0
    rows = {name: _figures(attack, options["bootstrap"], options["draw_seed"]) for name, attack in attacks.items()}
    folder = Path(options["output"] or (config.parent if config is not None else "."))
    print(f"membership inference on {checkpoint}: {len(members.labels)} training and as many test samples\n")
    lines = [[name, *(f"{v:.3f} [{low:.3f}, {high:.3f}]" for v, low, high in row)] for name, row in rows.items()]
    print(aligned([["attack", *_TITLES], *lines]))
    print(f"\n{_note(len(attacks['loss'].others))}")
    written = _write(attacks, rows, folder)
    print("\nwritten: " + ", ".join(map(str, written)))
    return 0


def _find(words: list[str]) -> tuple[Path, Path | None]:
    """Finds the checkpoint on the command line and the config of its run; None for a config that does not exist."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--ckpt_path", nargs="?", type=Path)
    given: Path | None = finder.parse_known_args(words)[0].ckpt_path
    if given is None:
        if {"-h", "--help"}.intersection(words):
            return Path(), None
        raise FederatedError("Expected the folder of a run, or a checkpoint, as `--ckpt_path`, got none.")
    checkpoint = given / "checkpoints" / "last.ckpt" if given.is_dir() else given
    if not checkpoint.is_file():
        raise FederatedError(
            f"Expected `--ckpt_path` to be the folder of a run, or a checkpoint, got {given}: there is no {checkpoint}."
        )
    config = checkpoint.absolute().parent.parent / "config.yaml"
    if not config.is_file() and not any(word.partition("=")[0] in ("--config", "-c") for word in words):
        raise FederatedError(f"Expected the run's config at {config}, but there is none: give one as `--config`.")
    return checkpoint, config if config.is_file() else None


def _build_shadow(words: list[str], first: int, runs: str, number: int) -> tuple[FederatedTrainer, LightningModule]:
    """Builds a shadow model: the same configuration with another seed, and with runs in a temporary folder."""
    seed = (first + 1 + number) % 2**32
    quiet = ("--trainer.logger=false", "--trainer.enable_model_summary=false", f"--trainer.default_root_dir={runs}")
    shadow = _AttackCLI([*words, *quiet, f"--seed_everything={seed}", f"--trainer.seed={seed}"])
    return shadow.trainer, shadow.model


def _attacks(members: Outputs, others: Outputs) -> dict[str, _Attack]:
    """Fits the attackers on one half of the samples, and scores the other half."""
    half = len(members.labels) // 2
    known = members.logits[:half], others.logits[:half]
    found = [figures.logistic_scores(*known, side.logits[half:]) for side in (members, others)]
    return {
        "logistic regression": _Attack(found[0], found[1], 0.0),
        "loss": _by_threshold(members.confidences, others.confidences),
    }


def _by_threshold(members: Tensor, others: Tensor) -> _Attack:
    """Uses the scores directly, with the best threshold on the attackers' half."""
    half = len(members) // 2
    return _Attack(members[half:], others[half:], figures.best_threshold(members[:half], others[:half]))


def _figures(attack: _Attack, repeats: int, seed: int) -> list[list[float]]:
    """Returns the value, the lower end and the upper end of each figure."""
    levels = tuple(_LEVELS.values())
    ends = figures.bootstrap_interval(*attack, levels, repeats, torch.Generator().manual_seed(seed))
    return torch.cat([figures.attack_figures(*attack, levels)[None], ends]).T.tolist()


def _note(count: int) -> str:
    note = f"On {count} training and {count} test samples that no attacker was fitted on, with 95 % CIs."
    few = [title for title, level in _LEVELS.items() if count * level < 1]
    return note if not few else f"{note} With so few samples, {few[0]} and below allow no false positive at all."


def _write(attacks: Mapping[str, _Attack], rows: Mapping[str, list[list[float]]], folder: Path) -> list[Path]:
    columns = [name + end for name in FIGURES for end in ("", "_low", "_high")]
    lines: list[list[object]] = [["attack", "members", "others", *columns]]
    for name, row in rows.items():
        counts = [len(attacks[name].members), len(attacks[name].others)]
        lines.append([name, *counts, *(value for figure in row for value in figure)])
    contents = {TABLE: csv_text(lines).encode(), "attack.png": png(_roc_figure(attacks), dpi=150)}
    for name, content in contents.items():
        write_atomically(folder / name, content, "--output")
    return [folder / name for name in contents]


def _roc_figure(attacks: Mapping[str, _Attack]) -> "Figure":
    """Draws the ROC curve of each attack, as steps on logarithmic axes, next to that of guessing."""
    from matplotlib.figure import Figure

    least = 1 / max(len(scores) for attack in attacks.values() for scores in attack[:2])
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([least, 1], [least, 1], "--", color="0.5", linewidth=1.0, label="guessing")
    for colour, (name, (members, others, _)) in zip(COLOURS, attacks.items(), strict=False):
        false, true, _ = figures.roc_curve(members, others)
        # A logarithmic axis has no 0: points without a false positive are drawn at the left edge.
        axes.step(false.clamp(min=least / 2), true, where="post", color=colour, linewidth=1.6, label=name)
    axes.set(
        xscale="log", yscale="log", xlim=(least / 2, 1), ylim=(least / 2, 1.05),
        xlabel="false positive rate", ylabel="true positive rate",
    )  # fmt: skip
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure
