"""The parser: it accepts FederatedTrainer, drops arguments of a former class, and reports mistakes in one sentence."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from inspect import signature
from typing import Any, NoReturn

from jsonargparse import Namespace, _loaders_dumpers, _typehints, set_config_read_mode
from jsonargparse._actions import ActionConfigFile, _ActionConfigLoad
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._subcommands import find_action, is_branch_key
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.cli.class_names import find_class, listing, shared_path
from lightning_fed.cli.configs_command import with_found_configs
from lightning_fed.cli.exits import debugging, exit_with
from lightning_fed.cli.given_options import Renames, leave_to_the_data, mark_as_linked
from lightning_fed.cli.help import HelpAction, command_help
from lightning_fed.cli.messages import explain
from lightning_fed.cli.yaml_loader import ConfigLoader, is_endless
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import FLAT_NAMES
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.options import GROUPS

__all__ = ["FederatedArgumentParser"]


set_config_read_mode()  # only files: Lightning would also download a configuration from any URL


_OF_A_CLASS = {"class_path", "init_args", "dict_kwargs"}
# Errors of torch, NumPy and Python for sizes that no memory can hold.
_TOO_LARGE = re.compile(
    "can't allocate memory|out of memory|Overflow when unpacking long|overflow(ed)? with sizes|multiplication overflow|"
    "array is too big|Maximum allowed dimension exceeded|(to|into) (an index-sized|a C s?size_t|C s?size_t|C long)"
)


def _unfit(error: Exception, built: Any, options: dict[str, Any]) -> FederatedError | None:
    """Returns a mistake in one sentence if a constructor failed because of a huge size or a null.

    jsonargparse accepts null for every type.
    """
    reason = str(error).split("\n")[0].strip(".") or "out of memory"
    if isinstance(error, MemoryError) or _TOO_LARGE.search(reason):
        return FederatedError(f"Expected sizes of {built.__name__} that fit into memory, but: {reason}.")
    told = re.search("unexpected keyword argument '(.*)'|takes no arguments", reason)
    if isinstance(error, TypeError) and told:
        known = {parameter.name for parameter in get_signature_parameters(built)}
        for name in options:
            if name not in known and told[1] in (name, None):  # in `init_args` the parser has refused it
                return FederatedError(
                    f"Expected only options that {built.__name__} has, got `{name}` in `dict_kwargs`."
                )
    with suppress(Exception):  # a foreign signature may raise anything
        parameters = signature(built.__init__).parameters
        nulls = [name for name, value in options.items() if value is None and parameters[name].default is not None]
        if nulls and isinstance(error, (TypeError, AttributeError)):
            names = listing(f"`{name}`" for name in nulls)
            return FederatedError(f"Expected values for {names} of {built.__name__}, got null, but: {reason}.")
    return None


def _expect_no_pipe(words: Sequence[str]) -> None:
    """Refuses arguments and variables that name a pipe or a device, as reading one may never end."""
    given = [word.partition("=")[2] if word.startswith("-") else word for word in words]
    for text in [*given, *(value for name, value in os.environ.items() if name.startswith("PL_"))]:
        if is_endless(text):
            raise FederatedError(f"Expected a file, got {text!r}, a pipe or a device: write what it gives into a file.")


def _discard_former_arguments(parser_or_action: Any, prev_val: Any, value: Any) -> None:
    """Drops all arguments of the earlier class from ``prev_val`` if ``value`` names another class.

    By itself jsonargparse keeps the ``init_args`` that the new class accepts too. ``aggregator: FedAvg(lr=0.05,
    mask=...)`` in a file, then ``--aggregator Other``, would build Other with the learning rate and the mask of FedAvg:
    a baseline that nobody asked for. jsonargparse decides this in one function wherever an option has two values: from
    two files, a file and the command line, a default, an element of a list, or an argument of an argument.
    """
    former, new = prev_val.get("class_path") if prev_val else None, value["class_path"]
    if former and former != new and find_class(former) is not find_class(new):
        for arguments in ("init_args", "dict_kwargs"):
            prev_val.pop(arguments, None)


_resolve_name = _typehints.resolve_class_path_by_name


def _resolve_own_first(cls: Any, name: str) -> str:
    """Resolves a short class name; if several classes have it, the one of this package wins.

    Otherwise ``MLP`` would be ambiguous as soon as torchvision is loaded, which has an ``MLP`` too. A name that no
    loaded class has may be an entry point of another package.
    """
    if not isinstance(name, str):
        raise ValueError(f"Expected a dot import path string: {name}")
    try:
        found = _resolve_name(cls, name)
        return found if "." in found else shared_path(found) or found
    except ValueError:
        paths = _typehints.get_all_subclass_paths(cls)
        own = [path for path in paths if path.startswith("lightning_fed.") and path.rsplit(".", 1)[1] == name]
        if len(own) != 1:
            raise
        return own[0]


_RULES: tuple[tuple[Any, str, Any], ...] = (
    (_typehints, "discard_init_args_on_class_path_change", _discard_former_arguments),
    (_typehints, "resolve_class_path_by_name", _resolve_own_first),
    # Used for values in files, variables and on the command line; `set_loader` would change whole files only.
    (_loaders_dumpers, "yaml_default_loader", ConfigLoader),
)


@contextmanager
def _class_rules() -> Iterator[None]:
    """Applies the rules for classes and for YAML to all that is parsed inside the block, and to nothing else.

    Raises:
        AttributeError: If this version of jsonargparse lacks one of the functions. Wrong baselines would be worse.
    """
    with ExitStack() as rules:
        for module, name, rule in _RULES:
            rules.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, rule)
        yield


class FederatedArgumentParser(LightningArgumentParser):
    """Lightning's parser, for a trainer that does not derive from ``Trainer``.

    Attributes:
        open_files: Configuration files that are being read now, outermost first.
        renames: The other names of the trainer's options.
        says_all: Whether the help of a command says all; None for other parsers.
    """

    renames = Renames()
    says_all: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of Lightning's parser; options cannot be abbreviated."""
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.open_files: list[str] = []
        self._failure: Exception | None = None

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Adds the arguments of a class and returns their names. Lightning's parser would refuse our trainer."""
        if isinstance(lightning_class, type) and issubclass(lightning_class, FederatedTrainer):
            self.says_all, self._actions[0].nargs, self._actions[0].metavar = False, "?", "[all]"
            self._actions[0].__class__ = HelpAction
            options: dict[str, Any] = {"fail_untyped": False, "sub_configs": True}
            added: list[str] = self.add_class_arguments(
                lightning_class, nested_key, instantiate=False, skip=set(GROUPS), **options
            )
            taken = {parameter.name for parameter in get_signature_parameters(lightning_class)}
            for name, kind in GROUPS.items():
                # A subclass may have an own argument of that name.
                own = {path.split(".")[1] for flat, path in FLAT_NAMES.items() if flat in taken}
                if name in taken:
                    added += self.add_class_arguments(kind, f"{nested_key}.{name}", skip=own, **options)
            return added
        added = super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        if subclass_mode and isinstance(lightning_class, type) and issubclass(lightning_class, LightningModule):
            mark_as_linked(self, nested_key)
        return added

    def set_defaults(self, *defaults: dict[str, Any], **more: Any) -> None:
        """Sets defaults by any name of an option, also by names that are not in the trainer's signature."""
        super().set_defaults(
            *({self.renames.name(name): value for name, value in each.items()} for each in defaults), **more
        )

    def add_class_arguments(self, *args: Any, linked_to_data: bool = False, **kwargs: Any) -> list[str]:
        """Adds the arguments of a class; those of a model and its backbone that the data provide are not required."""
        added: list[str] = super().add_class_arguments(*args, **kwargs)
        if linked_to_data:
            leave_to_the_data(self)
        return added

    def add_function_arguments(self, *args: Any, linked_to_data: bool = False, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_function_arguments(*args, **kwargs)
        if linked_to_data:
            leave_to_the_data(self)
        return added

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]  # passes on what it gets
        """Parses command-line arguments; a new class gets no arguments of the former class."""
        try:
            words = with_found_configs(self.renames.words(sys.argv[1:] if args is None else args))
            _expect_no_pipe(words)
            with _class_rules():
                config: Namespace = super().parse_args(words, *more, **kwargs)
        except FederatedError as error:
            if debugging():
                raise
            exit_with(str(error), 2)
        return config

    def parse_object(self, *args: Any, **kwargs: Any) -> Namespace:
        """Parses a dict or namespace; a new class gets no arguments of the former class."""
        with _class_rules():
            config: Namespace = super().parse_object(*args, **kwargs)
        return config

    def parse_path(self, cfg_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Parses a configuration file, and keeps its name for messages."""
        self.open_files.append(str(cfg_path))
        try:
            parsed: Namespace = super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f'Problems parsing config: {error.reason} in "<byte string>", position {error.start}', error)
        self.open_files.pop()
        return parsed

    def format_help(self, *args: Any) -> str:
        """Returns the help of a command by task; that of a class, and of the program, as jsonargparse has it."""
        text: str = super().format_help(*args) if self.says_all is None else command_help(self, self.says_all)
        return text

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Writes a configuration without checking it again, which would take five times as long."""
        text: str = super().dump(*args, **{"skip_validation": True, **kwargs})
        return text

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Namespace:
        """Refuses mistakes that jsonargparse would ignore.

        Each file is checked by itself, as a group without options would drop the options of earlier files.
        """
        self._expect_options(cfg, f"{parent_key}." if parent_key else "")
        if isinstance(cfg, dict) and not parent_key:
            self.renames.file(cfg)
        elif isinstance(options := cfg if parent_key == "trainer" else cfg.get("trainer"), dict | Namespace):
            self.renames.options(options)
        config: Namespace = super()._apply_actions(cfg, parent_key, *args, **kwargs)
        return config

    def _load_env_vars(self, env: Mapping[str, str], defaults: bool) -> Namespace:
        config: Namespace = super()._load_env_vars(self.renames.variables(env), defaults)
        return config

    def _expect_options(self, config: Any, prefix: str) -> None:
        """Refuses a group of options that is not a mapping, and an empty mapping under an unknown name."""
        if not isinstance(config, dict | Namespace):
            self._refuse("init_args", "a mapping of options", config)
        for name, value in (vars(config) if isinstance(config, Namespace) else config).items():
            key = f"{prefix}{name}".removesuffix("+")
            action, is_mapping = find_action(self, key), isinstance(value, dict | Namespace)
            if isinstance(value, str):
                continue  # perhaps a file
            if isinstance(config, dict) and isinstance(action, ActionConfigFile):
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
        """Adds a function that builds classes; ``instantiate_classes`` raises its exceptions."""

        @wraps(instantiator)
        def build(*build_args: Any, **build_kwargs: Any) -> Any:
            try:
                return instantiator(*build_args, **build_kwargs)
            except Exception as error:  # another member of a union may fit
                self._failure = _unfit(error, build_args[0], build_kwargs) or error
                raise self._failure from error

        super().add_instantiator(build, *args, **kwargs)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """Builds all classes of a config, and raises the original exception of a constructor."""
        try:
            return super().instantiate_classes(*args, **kwargs)
        except ValueError as error:
            # jsonargparse's own message, if no class was built: lines for each type of a union, some about other types.
            lines = re.findall("^ *- (?!Does not|Expected a|Import path)(.+)", str(error), re.MULTILINE)
            if self._failure is None and not lines:
                raise
            if self._failure is None:
                reasons = "; ".join(lines)
                raise FederatedError(
                    f"Expected `init_args` and `dict_kwargs` that can be given, but: {reasons}."
                ) from error
            failure, self._failure = self._failure, None
        raise failure

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the program with one sentence and exit code 2; parsers of nested classes raise to the outer parser."""
        if not self.exit_on_error:
            super().error(message, ex)
        if debugging():
            traceback.print_exception(ex) if ex else traceback.print_stack()
            print(message, file=sys.stderr)
        exit_with(explain(self, message), 2)
