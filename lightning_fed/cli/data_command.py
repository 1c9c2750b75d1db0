"""The command ``lightning-fed data``: shows the data and their split without building a model or a trainer."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.cli.federated_cli import FederatedCLI, parser_of
from lightning_fed.cli.parser import FederatedArgumentParser
from lightning_fed.core.files import png, write_atomically
from lightning_fed.data import FederatedDataModule, split_figures
from lightning_fed.data.summary import overview
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer

__all__ = ["main", "make_parser"]

_DESCRIPTION = "Shows the data and their split in numbers and pictures before you train. Takes the options of fit."


class _DataParser(FederatedArgumentParser):
    """The parser of ``fit``, but the model is optional."""

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Adds the arguments of a class; only the class of the data is required."""
        return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, nested_key == "data")


class _DataCLI(FederatedCLI):
    """Parses the options of ``fit`` and builds only the data."""

    def __init__(self, words: list[str]) -> None:
        # A parser of its own: a subcommand named `data` would clash with the group of options `data`.
        parser = {"prog": "lightning-fed data", "description": _DESCRIPTION, "env_prefix": "PL_DATA_"}
        super().__init__(words, run=False, parser_class=_DataParser, parser_kwargs={**parser, "default_env": True})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(FederatedTrainer, "fit", skip=set(self.subcommands()["fit"]))
        parser.add_argument("--output", type=str | None, default=None, help="Folder for pictures (default: data-NAME).")

    def instantiate_classes(self) -> None:
        """Builds the data. As in training, a seed of the trainer is also the seed of the split."""
        self.datamodule = self.build_data()
        # The split reads its seed from the trainer.
        self.datamodule.trainer = SimpleNamespace(seed=self.config["trainer"].get("seed"))

    def after_instantiate_classes(self) -> None:
        """Does nothing, as there is no trainer to configure."""


def make_parser() -> Any:
    """Makes the parser of this command."""
    return parser_of(_DataCLI)


def main(words: list[str]) -> int:
    """Prints the overview and draws the pictures; returns 0."""
    cli = _DataCLI(words)
    datamodule = cli.datamodule
    if not isinstance(datamodule, FederatedDataModule):
        raise FederatedError(
            f"Expected `--data` to be a FederatedDataModule, which splits its data over clients, got "
            f"{type(datamodule).__name__}: subclass it, or choose another class."
        )
    datamodule.setup("fit")
    print(overview(datamodule))
    folder = Path(cli.config["output"] or f"data-{type(datamodule.source or datamodule).__name__}")
    print("\nwritten: " + ", ".join(str(path) for path in _write(datamodule, folder)))
    return 0


def _write(datamodule: FederatedDataModule, folder: Path) -> Iterator[Path]:
    """Draws the pictures into a folder. If the process dies, each file holds the whole old or the whole new picture."""
    for name, figure in split_figures(datamodule, datamodule.train_source()):
        write_atomically(folder / f"{name}.png", png(figure, dpi=150), "--output")
        yield folder / f"{name}.png"
