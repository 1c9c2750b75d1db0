"""LightningCLI for a FederatedTrainer, with two more groups of options: ``aggregator`` and ``client``."""

from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import yaml
from jsonargparse import Namespace
from jsonargparse._parameter_resolvers import get_signature_parameters
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    _InstantiatorFn,
    instantiate_class,
)
from lightning.pytorch.utilities import LightningEnum, rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

# Short class names (`--aggregator FedAvg`) work only for classes that are loaded.
import lightning_fed.callbacks
import lightning_fed.callbacks.diagnostics
import lightning_fed.client_algorithms
import lightning_fed.data
import lightning_fed.masks
import lightning_fed.models
import lightning_fed.sampling  # noqa: F401  # loaded only for its class names
from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.cli.class_names import find_class
from lightning_fed.cli.exits import exit_with
from lightning_fed.cli.given_options import Renames, fill_from_data, linked_arguments
from lightning_fed.cli.main import ABOUT
from lightning_fed.cli.parser import FederatedArgumentParser
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.files import write_atomically
from lightning_fed.data.adoption import adopt
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.bookkeeping import going_on

__all__ = ["FederatedCLI", "parser_of"]

_LARGEST_SEED = 2**32 - 1
_NOT_OF_THE_EXPERIMENT = (
    "config", "ckpt_path", "weights_only", "return_predictions", "verbose", "output", "link_data"
)  # fmt: skip
# Left out of the experiment if not given, so that runs from before these options existed are found again.
_OPTIMIZATION = ("optimizer", "lr_scheduler")

_CLIENT_HELP = (
    "What clients change in local training: one client algorithm, or a list of them in order "
    "(`--client+=A --client.x 1 --client+=B`)."
)
_LINK_HELP = (
    "Whether the model and its backbone take num_classes, class_names, input_shape, in_channels, image_size, "
    "in_features, mean and std from the data. If you give one of them too, it must agree with the data."
)

# Some defaults of Lightning, such as that of its Timer, are enums, which YAML cannot write by itself.
yaml.SafeDumper.add_multi_representer(LightningEnum, lambda dumper, word: dumper.represent_str(word.value))


class _SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config in the run's folder, without the checkpoint that the run was resumed from.

    ``fit --config RUN/config.yaml`` then repeats the run, however often it was interrupted. Options that the model
    takes from the data are left out too, so that the file also works with other data.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, linked: Sequence[str] = (), **kwargs: Any
    ) -> None:
        config = config.clone()
        config["ckpt_path"] = None
        for path in linked:
            config.pop(path)
        super().__init__(parser, config, **kwargs)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Writes the file atomically, as all files of a run."""
        if trainer.is_global_zero and trainer.log_dir is not None:
            with going_on(trainer):
                text = self.parser.dump(self.config, skip_none=False)
                write_atomically(Path(trainer.log_dir) / self.config_filename, text.encode())


class _DataInstantiator(_InstantiatorFn):
    """Gives the options of ``--data`` to the class that they belong to; a ``source`` inside it saves its own."""

    def __call__(self, class_type: Any, *args: Any, applied_instantiation_links: Any, **kwargs: Any) -> Any:
        self.cli._dump_config()
        named = self.cli.config_dump.get(self.key, {}).get("class_path")
        if named is None or find_class(named) is class_type:
            # Not `super()`: Lightning 2.5 would mistake this frame for that of a constructor with `hparams`.
            kwargs["applied_instantiation_links"] = applied_instantiation_links
            return _InstantiatorFn.__call__(self, class_type, *args, **kwargs)
        return class_type(*args, **kwargs)


class FederatedCLI(LightningCLI):
    """The command line of a federated run.

    Args:
        args: Command-line arguments or a nested configuration; None for the arguments of the process.
        **kwargs: Passed to LightningCLI; they win over the defaults chosen here.
    """

    trainer: FederatedTrainer  # type: ignore[assignment]  # Lightning asks for its own, and needs only what ours has

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        """Parses, builds and runs the command."""
        defaults: dict[str, Any] = {
            "trainer_class": FederatedTrainer,
            "subclass_mode_data": True,
            "parser_class": FederatedArgumentParser,
            "parser_kwargs": ABOUT,
            "seed_everything_default": 0,
            "save_config_callback": _SaveRunConfig,
            # A resumed run goes on in its folder.
            "save_config_kwargs": {"overwrite": True},
        }
        super().__init__(args=args, **{**defaults, **kwargs})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Makes a parser that knows which argument names the trainer class has itself."""
        parser = super().init_parser(**kwargs)
        if isinstance(parser, FederatedArgumentParser) and isinstance(self.trainer_class, type):
            parser.renames = Renames(one.name for one in get_signature_parameters(self.trainer_class))
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        evaluations = {name: {"model", "datamodule", "dataloaders"} for name in ("validate", "test", "predict")}
        return {"fit": {"model", "datamodule", "train_dataloaders", "val_dataloaders"}, **evaluations}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the groups ``aggregator`` and ``client``; both become callbacks of the trainer."""
        parser.add_lightning_class_args(Aggregator, "aggregator", subclass_mode=True, required=False)
        parser.set_defaults({"aggregator": {"class_path": f"{FedAvg.__module__}.{FedAvg.__qualname__}"}})
        algorithms = ClientAlgorithm | list[ClientAlgorithm] | None
        parser.add_argument("--client", type=algorithms, default=None, help=_CLIENT_HELP)
        parser.callback_keys.append("client")
        parser.add_argument("--link_data", type=bool, default=True, help=_LINK_HELP)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses arguments (of the process if None) or a nested configuration into ``self.config``."""
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)
        command = self.config.get("subcommand")
        options = self.config[command] if command else self.config
        if not isinstance(options.trainer, Namespace):
            parser.error(f'Parser key "trainer": Expected a mapping of options. Got value: {options.trainer}')
        if options.get("data") is None and not _brings_data(options.model, command):
            parser.error("the following arguments are required: data")

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        self.parser.add_instantiator(_DataInstantiator(cli=self, key="data"), LightningDataModule)
        # For all other classes too, so that the parser keeps the exception of a constructor.
        self.parser.add_instantiator(lambda kind, *args, **kwargs: kind(*args, **kwargs), object)

    def _parse_ckpt_path(self) -> None:
        """Does not read the checkpoint: ``last`` and ``best`` are no paths, and only the config says what to run."""

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is None or not 0 <= seed <= _LARGEST_SEED:
            got = "null" if seed is None else seed
            raise FederatedError(f"Expected `--seed_everything` to be in [0, {_LARGEST_SEED}], got {got}.")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Saves the run's config only for training."""
        if self.subcommand not in (None, "fit"):
            self.save_config_callback = None

    def instantiate_classes(self) -> None:
        """Builds the data, then the model with its options from the data, then the trainer."""
        config, options = self.config.clone(), self._options(self.config)
        if slots := linked_arguments(options):
            datamodule = self.build_data()
            linked = fill_from_data(slots, options, datamodule if options["link_data"] else None)
            self.save_config_kwargs = {**self.save_config_kwargs, "linked": linked}
            vars(self).pop("config_dump", None)  # made without the options that come from the data
            self._dump_config()
            config = self.config.clone()
            if self.subclass_mode_data:  # a fixed class of your program has only arguments, no class path
                self._options(config)["data"] = datamodule
        self.config_init = self.parser.instantiate_classes(config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()  # type: ignore[assignment]  # of our class

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Replaces the model's optimizer and schedule by ``--optimizer`` and ``--lr_scheduler``.

        Lightning would build both now, over parameters that the model may still replace; here they are built later.
        """
        optimizer, scheduler = (self._get(self.config_init, name) for name in _OPTIMIZATION)
        if scheduler and not optimizer:
            raise FederatedError(
                "Expected `--optimizer` with `--lr_scheduler`, which sets its learning rate, got none."
            )
        if not optimizer or not self.auto_configure_optimizers:
            return
        if given := [name for name in _OPTIMIZATION if (self._get(self.config, name) or {}).get("dict_kwargs")]:
            raise FederatedError(f"Expected the options of `--{given[0]}` in `init_args`, got some in `dict_kwargs`.")
        if is_overridden("configure_optimizers", self.model):
            rank_zero_info(f"`--optimizer` replaces `{type(self.model).__name__}.configure_optimizers`.")

        def configure(module: LightningModule) -> Any:
            built = instantiate_class((module.parameters(),), optimizer)
            schedule = instantiate_class((built,), scheduler) if scheduler else None
            return self.configure_optimizers(module, built, schedule)

        self.model.configure_optimizers = MethodType(configure, self.model)

    def build_data(self) -> Any:
        """Builds only the data module; returns None if there is none."""
        config = self.config.clone()
        options = vars(self._options(config))
        for key in options.keys() - {"data"}:
            del options[key]
        return adopt(self._get(self.parser.instantiate_classes(config), "data"))

    def _options(self, config: Namespace) -> Namespace:
        options: Namespace = config.get(str(self.subcommand), config)
        return options

    def after_instantiate_classes(self) -> None:
        """Gives the trainer the resolved config, by which it names, groups and finds runs."""
        self._dump_config()
        self.trainer.run_config = {
            key: value
            for key, value in self.config_dump.items()
            if key not in _NOT_OF_THE_EXPERIMENT and not (key in _OPTIMIZATION and value is None)
        }

    def after_fit(self) -> None:
        """Exits with the code of a signal if a signal ended the training early."""
        number = self.trainer.interrupted
        if number is not None:
            exit_with(self.trainer.stop_message if self.trainer.is_global_zero else "", 128 + number)


def _brings_data(model: Any, command: str | None) -> bool:
    """Whether the model's class may have the data loaders of a command itself."""
    found = find_class(model.class_path) if isinstance(model, Namespace) and "class_path" in model else None
    stage = {None: "train", "fit": "train", "validate": "val"}.get(command, command)
    loader = f"{stage}_dataloader"
    return not isinstance(found, type) or getattr(found, loader, None) is not getattr(LightningModule, loader)


def parser_of(kind: type[FederatedCLI]) -> Any:
    """Makes the parser of a command line, and parses nothing."""

    class Made(Exception):
        """Ends the constructor when the parser is there."""

    class ParserAlone(kind):  # type: ignore[misc, valid-type]
        def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
            raise Made(parser)

    try:
        return ParserAlone([]).parser
    except Made as made:
        return made.args[0]
