"""``lightning-fed attack --ckpt_path RUN_OR_FILE``: membership inference against the model of a run."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.callbacks import CentralDP, LocalDP
from lightning_fed.cli.exits import exit_with
from lightning_fed.cli.federated_cli import FederatedCLI, parser_of
from lightning_fed.core.files import png, write_atomically
from lightning_fed.data import FederatedDataModule, Split
from lightning_fed.data.batch_sources import BatchSource, num_samples
from lightning_fed.engines.client_batches import read_batches
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack import figures
from lightning_fed.lab.attack.options import FIGURES, TABLE, AttackOptions, expect_sound_attack
from lightning_fed.lab.common import aligned, csv_text
from lightning_fed.lab.report.runs import read_metrics
from lightning_fed.models.classifier import class_scores
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.evaluation import named_loaders
from lightning_fed.trainer.options import expect_datamodule

__all__ = ["Build", "Outputs", "main", "make_parser", "read_outputs", "shadow_confidences"]

Build: TypeAlias = Callable[[int], tuple[FederatedTrainer, LightningModule]]

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


class Outputs(NamedTuple):
    """Logits, shape (n, C), float64; labels, and the index of each sample in its set, shape (n,), int64."""

    logits: Tensor
    labels: Tensor
    rows: Tensor

    @property
    def confidences(self) -> Tensor:
        """The log-odds of each sample's own label, shape (n,)."""
        return figures.confidences(self.logits, self.labels)


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


def make_parser() -> Any:
    """Makes the parser of this command."""
    return parser_of(_AttackCLI)


def main(words: list[str]) -> int:
    """Prints the table of attacks, writes it as CSV and draws their ROC curves; returns 0."""
    checkpoint, config = _find(words)
    words = [*(["--config", str(config)] if config is not None else []), *words]
    cli = _AttackCLI(words)
    given = cli._options(cli.config)
    options = AttackOptions(**{name: given[name] for name in vars(AttackOptions())})
    expect_sound_attack(options, "--")
    data = expect_datamodule(cli.model, cli.datamodule, train=None)
    members, others = read_outputs(cli.trainer, cli.model, data, checkpoint, options)
    attacks = _attacks(members, others) | _attack_on_clients(data, members, others, options)
    if options.shadows:
        with TemporaryDirectory() as runs:
            build = partial(_build_shadow, words, cli.trainer.seed, runs)
            expected = shadow_confidences(build, data, options, given["weights"])
        attacks["calibrated"] = _by_threshold(members.confidences - expected[0], others.confidences - expected[1])
    if not cli.trainer.is_global_zero:
        return 0
    rows = {name: _figures(attack, options.bootstrap, options.draw_seed) for name, attack in attacks.items()}
    folder = Path(given["output"] or (config.parent if config is not None else "."))
    print(f"membership inference on {checkpoint}: {len(members.labels)} training and as many test samples\n")
    audited = {name: f"{len(attack.members)} + {len(attack.others)}" for name, attack in attacks.items()}
    lines = [[name, audited[name], *(f"{v:.3f} [{a:.3f}, {b:.3f}]" for v, a, b in row)] for name, row in rows.items()]
    print(aligned([["attack", "audited", *_TITLES], *lines]))
    privacy = _privacy_of(cli.trainer, checkpoint.absolute().parent.parent / "metrics.csv")
    print(f"\n{_note(len(attacks['loss'].others), privacy)}")
    written = _write(attacks, rows, folder, privacy)
    print("\nwritten: " + ", ".join(map(str, written)))
    return 0


def _find(words: list[str]) -> tuple[Path, Path | None]:
    """Finds the checkpoint on the command line and the config of its run; None for a config that does not exist."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--ckpt_path", nargs="?", type=Path)
    given: Path | None = finder.parse_known_args(words)[0].ckpt_path
    if given is None:
        if {"-h", "--help", "--help=all"}.intersection(words):
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


def _attack_on_clients(data: Any, members: Outputs, others: Outputs, options: AttackOptions) -> dict[str, _Attack]:
    """Tells clients that train from those held out by their mean confidence; empty without two of the latter."""
    if options.test_set not in (None, "unseen") or not isinstance(data, FederatedDataModule):
        return {}
    inside = torch.from_numpy(np.cumsum(np.asarray(data.train_source().sizes)))
    outside = torch.from_numpy(data.division.unseen.owners)
    known = others.rows < len(outside)  # after them come test samples of unseen users
    owners = torch.searchsorted(inside, members.rows, right=True), outside[others.rows[known]]
    scores = map(figures.client_means, (members.confidences, others.confidences[known]), owners)
    generator = torch.Generator().manual_seed(options.draw_seed)
    drawn = [each[torch.randperm(len(each), generator=generator)] for each in scores]
    return {"client": _by_threshold(*drawn)} if min(map(len, drawn)) > 1 else {}


def _by_threshold(members: Tensor, others: Tensor) -> _Attack:
    """Uses the scores directly, with the best threshold on the attackers' half."""
    half, rest = len(members) // 2, len(others) // 2
    return _Attack(members[half:], others[rest:], figures.best_threshold(members[:half], others[:rest]))


def _figures(attack: _Attack, repeats: int, seed: int) -> list[list[float]]:
    """Returns the value, the lower end and the upper end of each figure."""
    levels = tuple(_LEVELS.values())
    ends = figures.bootstrap_interval(*attack, levels, repeats, torch.Generator().manual_seed(seed))
    return torch.cat([figures.attack_figures(*attack, levels)[None], ends]).T.tolist()


def _privacy_of(trainer: FederatedTrainer, metrics: Path) -> tuple[float, float] | None:
    """Returns ε after the run's last round, and δ, of its clients; None without."""
    deltas = [callback.delta for callback in trainer.callbacks if isinstance(callback, (CentralDP, LocalDP))]
    columns = read_metrics(metrics) if deltas and metrics.is_file() else {}
    spent = columns.get("privacy/epsilon", columns.get("privacy/local_epsilon"))
    return None if spent is None else (spent[max(spent)], deltas[0])


def _note(count: int, privacy: tuple[float, float] | None) -> str:
    note = f"On {count} training and {count} test samples that no attacker was fitted on, with 95 % CIs."
    if few := [title for title, level in _LEVELS.items() if count * level < 1]:
        note += f" With so few samples, {few[0]} and below allow no false positive at all."
    if privacy is not None:
        most = 100 * float(figures.most_true(torch.tensor(0.01), *privacy))
        note += f"\nAt ε = {privacy[0]:.4g}, δ = {privacy[1]:g} TPR on clients is at most {most:.4g} % at 1 % FPR."
    return note


def _write(attacks: Mapping[str, _Attack], rows: Mapping[str, Any], folder: Path, privacy: Any) -> list[Path]:
    columns = [name + end for name in FIGURES for end in ("", "_low", "_high")]
    lines: list[list[object]] = [["attack", "members", "others", *columns]]
    for name, row in rows.items():
        counts = [len(attacks[name].members), len(attacks[name].others)]
        lines.append([name, *counts, *(value for figure in row for value in figure)])
    contents = {TABLE: csv_text(lines).encode(), "attack.png": png(figures.roc_figure(attacks, privacy), dpi=150)}
    for name, content in contents.items():
        write_atomically(folder / name, content, "--output")
    return [folder / name for name in contents]


def read_outputs(
    trainer: FederatedTrainer, module: LightningModule, data: Any, checkpoint: Path | None, options: AttackOptions
) -> tuple[Outputs, Outputs]:
    """Runs a trained classifier on equally many training samples of all clients and test samples, drawn at random.

    Training samples are read without augmentation; ``forward`` must return scores of shape (B, C). Without a
    checkpoint the classifier keeps its current weights. Returns members and non-members in random order; the same draw
    gives the same order.
    """
    generator = torch.Generator().manual_seed(options.draw_seed)
    rows: Tensor

    def loaders() -> dict[str, Any]:
        nonlocal rows
        others = _test_set(named_loaders(data.test_dataloader()), options.test_set)
        source: BatchSource = data.train_source()
        source = getattr(source, "unaugmented", source)
        most = num_samples(others) if options.samples is None else min(options.samples, num_samples(others))
        rows = torch.randperm(int(np.sum(source.sizes)), generator=generator)[:most].sort().values
        return {"members": _batches(source, rows, getattr(data, "eval_batch_size", None)), "others": others}

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        scores, labels = class_scores(module, batch, ", give another `--ckpt_path`")
        return scores.cpu().double(), labels.cpu().long()

    vars(data)["predict_dataloader"], vars(module)["predict_step"] = loaders, step
    try:
        found = trainer.predict(module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint))
    finally:
        del vars(data)["predict_dataloader"], vars(module)["predict_step"]
    sides = [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in found or ()]
    count = min(*(len(labels) for _, labels in sides), options.samples or 2**63)
    if count < 2:
        raise FederatedError(f"Expected at least two training samples and two test samples to compare, got {count}.")
    numbers = (rows[: len(sides[0][1])], torch.arange(len(sides[1][1])))
    drawn = []
    for (logits, labels), number in zip(sides, numbers, strict=True):
        places = torch.randperm(len(number), generator=generator)[:count]
        drawn.append(Outputs(logits[places], labels[places], number[places]))
    return drawn[0], drawn[1]


def _test_set(loaders: dict[str, Any], name: str | None) -> Any:
    if not loaders:
        raise FederatedError("Expected data with a test set, whose samples the model has never seen, got none.")
    if name is None and len(loaders) == 1:
        return next(iter(loaders.values()))
    if name not in loaders:
        known = ", ".join(loaders) or "none with a name: leave it out"
        raise FederatedError(f"Expected `--test_set` to name one of the test sets ({known}), got {name or 'none'}.")
    return loaders[name]


def _batches(source: BatchSource, rows: Tensor, batch_size: int | None) -> Iterator[Any]:
    """Yields batches of training samples of all clients, client after client, with indices in ascending order."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(source.sizes))])
    for client, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        own = rows[(rows >= start) & (rows < end)] - start
        if len(own):
            yield from read_batches(source, client, own, seed=client, batch_size=batch_size)


def shadow_confidences(build: Build, data: Any, options: AttackOptions, weights: str | None) -> tuple[Tensor, Tensor]:
    """Trains pairs of models, one on a random half of each client's samples and one on the other half.

    Neither model of a pair saw a non-member, so one of the two is picked at random for it. Members and non-members are
    then averages over equally many models. ``weights`` is the file with which training starts, if not with the modules'
    own.

    Returns:
        For each sample, the mean confidence of the models not trained on it: members and others, shape (n,) each.
    """
    if not isinstance(data, FederatedDataModule):
        raise FederatedError(
            f"Expected a FederatedDataModule for `--shadows`, whose clients can train on halves of their data, got "
            f"{type(data).__name__}: wrap it as its `source`, or leave `--shadows` out."
        )
    data.split_seed, split = data.division.seed, data.split  # the seeds of the shadow models would give another split
    # Members are indexed over the clients that train, and `drop_last` leaves some clients out.
    trained = torch.from_numpy(np.flatnonzero(np.asarray(data.train_source().sizes)[split.owners]))
    generator = torch.Generator().manual_seed(options.draw_seed)
    means: list[Any] = [0.0, 0.0]
    for pair in range(options.shadows // 2):
        half, asked = _half_of_each(split, generator), []
        for number, inside in enumerate((half, ~half), 2 * pair):
            rank_zero_info(f"Training shadow model {number + 1} of {options.shadows}.")
            trainer, module = build(number)
            with data.training_on(split.keep(inside.numpy())):
                trainer.fit(module, datamodule=data, weights=weights)
            if trainer.interrupted is not None:
                exit_with(
                    "Stopped in the training of a shadow model: start the attack again.", 128 + trainer.interrupted
                )
            asked.append(read_outputs(trainer, module, data, None, options))
        first = [~half[trained[asked[0][0].rows]], torch.rand(len(asked[0][1].rows), generator=generator) < 0.5]
        for side in range(2):
            one, other = (outputs[side].confidences for outputs in asked)
            means[side] = means[side] + torch.where(first[side], one, other) / (options.shadows // 2)
    return means[0], means[1]


def _half_of_each(split: Split, generator: torch.Generator) -> Tensor:
    """Draws a random half of each client's samples, shape (samples,), bool."""
    drawn = torch.rand(len(split.index), generator=generator)
    order = np.lexsort([drawn.numpy(), split.owners])  # client after client, each in random order
    half = torch.empty(len(order), dtype=torch.bool)
    half[torch.from_numpy(order)] = torch.arange(len(order)) % 2 == 0
    return half
