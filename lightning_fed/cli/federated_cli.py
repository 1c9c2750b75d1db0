"""LightningCLI for a FederatedTrainer, with two more groups: ``aggregator`` and ``client``."""

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

# Short class names (`--aggregator FedAvg`) resolve only for classes that are loaded.
import lightning_fed.callbacks
import lightning_fed.callbacks.diagnostics
import lightning_fed.client_algorithms
import lightning_fed.data
import lightning_fed.masks
import lightning_fed.models
import lightning_fed.sampling  # noqa: F401  # loaded for its class names alone
from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.cli.data_links import fill_from_data, linked_arguments
from lightning_fed.cli.exits import exit_with
from lightning_fed.cli.other_names import Renames
from lightning_fed.cli.parser import FederatedArgumentParser
from lightning_fed.cli.suggestions import find_class
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.files import write_atomically
from lightning_fed.data.adoption import adopt
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.bookkeeping import going_on

__all__ = ["FederatedCLI"]

_LARGEST_SEED = 2**32 - 1
_NOT_OF_THE_EXPERIMENT = ("config", "ckpt_path", "verbose", "output", "link_data")
# Left out of the experiment where they are not given, as in runs made before there were such.
_OPTIMIZATION = ("optimizer", "lr_scheduler")

_DESCRIPTION = "Federated learning on PyTorch Lightning: every option comes from YAML files, variables or words here."
_EPILOG = (
    "Six further commands, each with a --help: `data` takes the options of fit and shows the split, `study FILE` runs "
    "the product of some axes over seeds, `report RUNS` makes tables and plots over finished runs, `dashboard RUNS` "
    "arranges them at Weights & Biases, `attack --ckpt_path RUN` tells training from test samples by a model's "
    "outputs, `configs` lists the configurations that come with the package. Add --debug to any command for the "
    "traceback of a mistake, and --safe_imports NAMES, as in `torch.optim.SGD,my_file.MyModel`, to one with a "
    "configuration of somebody else's: options name these classes and functions and those of lightning_fed alone."
)
_CLIENT_HELP = (
    "What clients do differently in local training: one client algorithm or a list of them, in order "
    "(`--client+=A --client.x 1 --client+=B`)."
)
_LINK_HELP = (
    "Whether the model and its backbone take num_classes, class_names, input_shape, in_channels, image_size, "
    "in_features, mean and std from the data; what is given all the same must then agree with them."
)

# Defaults of Lightning's, such as its Timer's, are words that YAML would not know how to write.
yaml.SafeDumper.add_multi_representer(LightningEnum, lambda dumper, word: dumper.represent_str(word.value))


class _SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config in the run's folder, without the checkpoint the run was resumed from.

    So that ``fit --config RUN/config.yaml`` does the run again, however often it was interrupted. What the model takes
    from the data is left out as well: it comes from them again, also from other data.
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
        """Writes the file as every other of a run is written."""
        if trainer.is_global_zero and trainer.log_dir is not None:
            with going_on(trainer):
                text = self.parser.dump(self.config, skip_none=False)
                write_atomically(Path(trainer.log_dir) / self.config_filename, text.encode())


class _DataInstantiator(_InstantiatorFn):
    """Gives the options of ``--data`` to the class that they are of: a ``source`` within it saves its own."""

    def __call__(self, class_type: Any, *args: Any, applied_instantiation_links: Any, **kwargs: Any) -> Any:
        self.cli._dump_config()
        named = self.cli.config_dump.get(self.key, {}).get("class_path")
        if named is None or find_class(named) is class_type:
            # By its name: with `super()` Lightning 2.5 would take this frame for that of a constructor with `hparams`.
            kwargs["applied_instantiation_links"] = applied_instantiation_links
            return _InstantiatorFn.__call__(self, class_type, *args, **kwargs)
        return class_type(*args, **kwargs)


class FederatedCLI(LightningCLI):
    """The command line of a federated run.

    Args:
        args: Words of the command line, or a nested configuration; None for the words of the process.
        **kwargs: Passed to LightningCLI, over the defaults chosen here.
    """

    trainer: FederatedTrainer  # type: ignore[assignment]  # Lightning asks for its own, and needs only what ours has

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        """Parses, builds and runs the command."""
        defaults: dict[str, Any] = {
            "trainer_class": FederatedTrainer,
            "subclass_mode_data": True,
            "parser_class": FederatedArgumentParser,
            "parser_kwargs": {
                "prog": "lightning-fed",
                "description": _DESCRIPTION,
                "epilog": _EPILOG,
                "default_env": True,
            },
            "seed_everything_default": 0,
            "save_config_callback": _SaveRunConfig,
            # A resumed run continues in its folder.
            "save_config_kwargs": {"overwrite": True},
        }
        super().__init__(args=args, **{**defaults, **kwargs})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Makes a parser that knows which names the trainer class has itself."""
        parser = super().init_parser(**kwargs)
        if isinstance(parser, FederatedArgumentParser) and isinstance(self.trainer_class, type):
            parser.renames = Renames(one.name for one in get_signature_parameters(self.trainer_class))
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Commands that need a trainer, and the arguments of its methods that the CLI fills itself."""
        evaluations = {name: {"model", "datamodule", "dataloaders"} for name in ("validate", "test", "predict")}
        return {"fit": {"model", "datamodule", "train_dataloaders", "val_dataloaders"}, **evaluations}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the groups ``aggregator`` and ``client``; both end up among ``trainer.callbacks``."""
        parser.add_lightning_class_args(Aggregator, "aggregator", subclass_mode=True, required=False)
        parser.set_defaults({"aggregator": {"class_path": f"{FedAvg.__module__}.{FedAvg.__qualname__}"}})
        algorithms = ClientAlgorithm | list[ClientAlgorithm] | None
        parser.add_argument("--client", type=algorithms, default=None, help=_CLIENT_HELP)
        parser.callback_keys.append("client")
        parser.add_argument("--link_data", type=bool, default=True, help=_LINK_HELP)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses words (those of the process if None) or a nested configuration into ``self.config``."""
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
        # For every other class as well, so that the parser keeps what its constructor raises.
        self.parser.add_instantiator(lambda kind, *args, **kwargs: kind(*args, **kwargs), object)

    def _parse_ckpt_path(self) -> None:
        """Leaves the checkpoint alone: ``last`` and ``best`` are words, and the config says what is run."""

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is None or not 0 <= seed <= _LARGEST_SEED:
            got = "null" if seed is None else seed
            raise FederatedError(f"Expected `--seed_everything` to be in [0, {_LARGEST_SEED}], got {got}.")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Lets only training write the run's config."""
        if self.subcommand not in (None, "fit"):
            self.save_config_callback = None

    def instantiate_classes(self) -> None:
        """Builds the data, the model with what it takes from them, and the trainer."""
        config, options = self.config.clone(), self._options(self.config)
        if slots := linked_arguments(options):
            datamodule = self.build_data()
            linked = fill_from_data(slots, options, datamodule if options["link_data"] else None)
            self.save_config_kwargs = {**self.save_config_kwargs, "linked": linked}
            vars(self).pop("config_dump", None)  # described without them, for the data
            self._dump_config()
            config = self.config.clone()
            if self.subclass_mode_data:  # a class of the program's own is given by its arguments alone
                self._options(config)["data"] = datamodule
        self.config_init = self.parser.instantiate_classes(config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()  # type: ignore[assignment]  # of our class

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Lets ``--optimizer`` and ``--lr_scheduler`` stand for the model's own, over the parameters of the time.

        Lightning builds both here at once, over parameters that the model may still replace.
        """
        optimizer, scheduler = (self._get(self.config_init, name) for name in _OPTIMIZATION)
        if scheduler and not optimizer:
            raise FederatedError(
                "Expected `--optimizer` with `--lr_scheduler`, which sets its learning rate, got none."
            )
        if not optimizer or not self.auto_configure_optimizers:
            return
        if is_overridden("configure_optimizers", self.model):
            rank_zero_info(f"`--optimizer` takes the place of `{type(self.model).__name__}.configure_optimizers`.")

        def configure(module: LightningModule) -> Any:
            built = instantiate_class((module.parameters(),), optimizer)
            schedule = instantiate_class((built,), scheduler) if scheduler else None
            return self.configure_optimizers(module, built, schedule)

        self.model.configure_optimizers = MethodType(configure, self.model)

    def build_data(self) -> Any:
        """Builds the data module alone; None if there is none."""
        config = self.config.clone()
        options = vars(self._options(config))
        for key in options.keys() - {"data"}:
            del options[key]
        return adopt(self._get(self.parser.instantiate_classes(config), "data"))

    def _options(self, config: Namespace) -> Namespace:
        options: Namespace = config.get(str(self.subcommand), config)
        return options

    def after_instantiate_classes(self) -> None:
        """Tells the trainer the resolved config of the experiment, by which it names, groups and finds runs."""
        self._dump_config()
        self.trainer.run_config = {
            key: value
            for key, value in self.config_dump.items()
            if key not in _NOT_OF_THE_EXPERIMENT and not (key in _OPTIMIZATION and value is None)
        }

    def after_fit(self) -> None:
        """Exits as a process ended by a signal does, if one ended the training early."""
        number = self.trainer.interrupted
        if number is not None:
            exit_with(self.trainer.stop_message if self.trainer.is_global_zero else "", 128 + number)


def _brings_data(model: Any, command: str | None) -> bool:
    """Whether the class of the model, as it was given, may have the loaders of a command itself."""
    found = find_class(model.class_path) if isinstance(model, Namespace) and "class_path" in model else None
    stage = {None: "train", "fit": "train", "validate": "val"}.get(command, command)
    loader = f"{stage}_dataloader"
    return not isinstance(found, type) or getattr(found, loader, None) is not getattr(LightningModule, loader)
