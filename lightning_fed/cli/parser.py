"""The parser: FederatedTrainer as a class of arguments, whole changes of class, mistakes in one sentence."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_config_read_mode
from jsonargparse._actions import ActionConfigFile, _ActionConfigLoad
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._subcommands import find_action, is_branch_key
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.cli.class_change import class_rules
from lightning_fed.cli.configs_command import with_found_configs
from lightning_fed.cli.data_links import leave_to_the_data, mark_as_linked
from lightning_fed.cli.exits import debugging, exit_with
from lightning_fed.cli.messages import explain
from lightning_fed.cli.other_names import own_name, own_variables, own_words, take_lightnings
from lightning_fed.cli.yaml_loader import is_endless
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.options import GROUPS

__all__ = ["FederatedArgumentParser"]

set_config_read_mode()  # files alone: Lightning lets a configuration be fetched from any address


@contextmanager
def _mistakes_end(parser: ArgumentParser) -> Iterator[None]:
    """Ends the program with a sentence of ours as it is, which jsonargparse would take for a value of a wrong type."""
    try:
        yield
    except FederatedError as error:
        if not parser.exit_on_error or debugging():
            raise
        exit_with(str(error), 2)


_OF_A_CLASS = {"class_path", "init_args", "dict_kwargs"}
# What torch, NumPy and Python say of sizes that no memory holds, before any of it is used.
_TOO_LARGE = re.compile(
    "can't allocate memory|out of memory|Overflow when unpacking long|overflow(ed)? with sizes|multiplication overflow|"
    "array is too big|Maximum allowed dimension exceeded|(to|into) (an index-sized|a C s?size_t|C s?size_t|C long)"
)


def _too_large(error: Exception, built: Any) -> FederatedError | None:
    """Returns a mistake in one sentence if a constructor asked for memory that there is not."""
    if not isinstance(error, MemoryError) and not _TOO_LARGE.search(str(error)):
        return None
    reason = str(error).split("\n")[0] or "out of memory"
    return FederatedError(
        f"Expected sizes of {built.__name__} that the memory of this machine holds, but: {reason.strip('.')}."
    )


def _null(error: Exception, built: Any, options: dict[str, Any]) -> FederatedError | None:
    """Returns a mistake in one sentence if a constructor failed where it got null for an option that takes none.

    jsonargparse lets null be a value of every type.
    """
    if not isinstance(error, (TypeError, AttributeError)):
        return None
    try:
        hints, parameters = get_type_hints(built.__init__), signature(built.__init__).parameters
    except Exception:  # noqa: BLE001  # whatever the names in annotations of somebody else's raise
        return None
    for name, value in options.items():
        hint = hints.get(name, Any)
        by_default = name in parameters and parameters[name].default is None
        if (
            value is None
            and not by_default
            and hint not in (Any, object, type(None))
            and type(None) not in get_args(hint)
        ):
            return FederatedError(
                f"Expected `{name}` of {built.__name__} to be {getattr(hint, '__name__', hint)}, got null: give a "
                "value, or leave it out."
            )
    return None


def _expect_no_pipe(path: str) -> None:
    """Refuses a pipe or a device, whose reading may never end."""
    if is_endless(path):
        raise FederatedError(f"Expected a file, got {path!r}, a pipe or a device: write what it gives into a file.")


class FederatedArgumentParser(LightningArgumentParser):
    """Lightning's parser, for a trainer that is no ``Trainer``.

    Attributes:
        command: The command that it parses, where it is not one of several parsers of a program.
        open_files: Configuration files being read right now, outermost first.
        part_files: Files that options are given by in other files or mappings, by option.
    """

    command = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what Lightning's parser takes; options must be given by their full names."""
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._failure: Exception | None = None
        self.open_files: list[str] = []
        self.part_files: dict[str, str] = {}

    def add_lightning_class_args(
        self,
        lightning_class: Any,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Adds the arguments of a class and returns their names; Lightning's parser refuses a trainer of ours."""
        if isinstance(lightning_class, type) and issubclass(lightning_class, FederatedTrainer):
            options: dict[str, Any] = {"fail_untyped": False, "sub_configs": True}
            added: list[str] = self.add_class_arguments(
                lightning_class, nested_key, instantiate=False, skip=set(GROUPS), **options
            )
            taken = {parameter.name for parameter in get_signature_parameters(lightning_class)}
            for name, kind in GROUPS.items():
                added += self.add_class_arguments(kind, f"{nested_key}.{name}", **options) if name in taken else []
            return added
        added = super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        if subclass_mode and isinstance(lightning_class, type) and issubclass(lightning_class, LightningModule):
            mark_as_linked(self, nested_key)
        return added

    def set_defaults(self, *defaults: dict[str, Any], **more: Any) -> None:
        """Sets defaults by the names of options, also those that are not of the trainer's signature."""
        super().set_defaults(*({own_name(name): value for name, value in each.items()} for each in defaults), **more)

    def add_class_arguments(
        self, theclass: type, nested_key: str | None = None, *args: Any, linked_to_data: bool = False, **kwargs: Any
    ) -> list[str]:
        """Adds the arguments of a class; those of a model and its backbone that the data tell are not required."""
        added: list[str] = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        if linked_to_data:
            leave_to_the_data(self, f"{nested_key}." if nested_key else "")
        return added

    def add_function_arguments(self, function: Any, *args: Any, linked_to_data: bool = False, **kwargs: Any) -> Any:
        """Adds the arguments of a function that makes a model or a backbone, as those of a class."""
        added = super().add_function_arguments(function, *args, **kwargs)
        if linked_to_data:
            leave_to_the_data(self, "")
        return added

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]  # passes on what it gets
        """Parses words of the command line; a class that changes takes none of the former one's arguments."""
        with class_rules(), _mistakes_end(self):
            words = with_found_configs(own_words(sys.argv[1:] if args is None else args))
            for word in words:
                _expect_no_pipe(word.partition("=")[2] if word.startswith("-") else word)
            for name in os.environ:
                _expect_no_pipe(os.environ[name] if name.startswith("PL_") else "")
            config: Namespace = super().parse_args(words, *more, **kwargs)
        return config

    def parse_object(self, *args: Any, **kwargs: Any) -> Namespace:
        """Parses a dict or namespace; a class that changes takes none of the former one's arguments."""
        with class_rules():
            config: Namespace = super().parse_object(*args, **kwargs)
        return config

    def parse_path(self, cfg_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Parses a configuration file, keeping its name for messages."""
        with _mistakes_end(self):
            _expect_no_pipe(str(cfg_path))
        self.open_files.append(str(cfg_path))
        try:
            parsed: Namespace = super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"Problems parsing config: {error.reason} line 1, column {error.start + 1}", error)
        self.open_files.pop()
        return parsed

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Writes a configuration, which was checked when it was parsed: to check it again takes five times as long."""
        text: str = super().dump(*args, **{"skip_validation": True, **kwargs})
        return text

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Namespace:
        """Refuses what jsonargparse would pass over.

        Each file is looked at for itself: a group without options would drop those of the files before it.
        """
        self._expect_options(cfg, f"{parent_key}." if parent_key else "")
        with _mistakes_end(self):
            take_lightnings(cfg, parent_key)
        config: Namespace = super()._apply_actions(cfg, parent_key, *args, **kwargs)
        return config

    def _load_env_vars(self, env: Mapping[str, str], defaults: bool) -> Namespace:
        config: Namespace = super()._load_env_vars(own_variables(env), defaults)
        return config

    def _expect_options(self, config: Any, prefix: str) -> None:
        """Refuses a group of options that is no mapping, and an empty mapping where there is no option."""
        if not isinstance(config, dict | Namespace):
            self._refuse("init_args", "a mapping of options", config)
        for name, value in (vars(config) if isinstance(config, Namespace) else config).items():
            key = f"{prefix}{name}".removesuffix("+")
            action, is_mapping = find_action(self, key), isinstance(value, dict | Namespace)
            if isinstance(value, str):
                if os.path.isfile(value):
                    self.part_files[key] = value
            elif isinstance(config, dict) and isinstance(action, ActionConfigFile):
                self._refuse(key, "a single file", value)
            elif isinstance(action, _ActionConfigLoad) and not is_mapping:
                self._refuse(key, "a mapping of options", value)
            elif action is None and is_mapping and not value and not is_branch_key(self, key):
                self.error(f"Option '{key}' is not accepted")
            elif is_mapping and (action is None or isinstance(action, _ActionConfigLoad)):
                self._expect_options(value, f"{key}.")
            for spec in value if isinstance(value, list) else [value]:
                if isinstance(spec, dict) and "class_path" in spec and (more := spec.keys() - _OF_A_CLASS):
                    self.error(f"Option '{key}.{min(map(str, more))}' is not accepted")

    def _refuse(self, key: str, expected: str, value: Any) -> NoReturn:
        self.error(f'Parser key "{key}": Expected {expected}. Got value: {"null" if value is None else value}')

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Adds a function that builds classes; what it raises is kept for ``instantiate_classes``."""

        @wraps(instantiator)
        def build(*build_args: Any, **build_kwargs: Any) -> Any:
            try:
                return instantiator(*build_args, **build_kwargs)
            except Exception as error:
                said = _too_large(error, build_args[0]) or _null(error, build_args[0], build_kwargs)
                self._failure = said or error
                raise self._failure from error

        super().add_instantiator(build, *args, **kwargs)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """Builds all classes of a config; what a constructor raises is in no ValueError of jsonargparse's."""
        try:
            return super().instantiate_classes(*args, **kwargs)
        except ValueError:
            if self._failure is None:
                raise
            failure, self._failure = self._failure, None
        raise failure

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the program with one sentence and exit code 2; parsers of nested classes raise to the outer one."""
        if not self.exit_on_error:
            super().error(message, ex)
        if debugging():
            traceback.print_exception(ex) if ex else traceback.print_stack()
            print(message, file=sys.stderr)
        exit_with(explain(self, message), 2)
