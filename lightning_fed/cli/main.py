"""The entry point: commands without a trainer are dispatched before LightningCLI is loaded."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

from lightning_fed.cli.exits import debug_mode, exit_with, mistakes_in_one_sentence, open_streams, output_is_written
from lightning_fed.errors import FederatedError, expect_variables

__all__ = ["main"]

_SAFE_IMPORTS = "--safe_imports"
# Within packages that are allowed as a whole: what runs code that it is told to fetch or to read.
_RUN_CODE = ("lightning_fed.cli", "torch.hub", "torch.load", "torch.package", "torch.utils.cpp_extension")


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: Words of the command line, None for those of the process. ``--debug`` anywhere, or the variable
            ``LIGHTNING_FED_DEBUG=1``, shows tracebacks of mistakes; ``--safe_imports PACKAGES`` anywhere lets options
            name classes of these packages and of this one alone.

    Raises:
        SystemExit: With 2 after a mistake on the command line or in a config file, 1 after one found later, 130 after
            Ctrl-C, 128 + the signal's number after a training that a signal ended.
    """
    words = list(sys.argv[1:] if args is None else args)
    open_streams()
    with debug_mode("--debug" in words), output_is_written(), mistakes_in_one_sentence():
        _expect_text(words)
        words, packages = _without_safe_imports([word for word in words if word != "--debug"])
        with _imports_from(packages):
            _run(words, partial(_imports_from, packages))


def _run(words: list[str], guard: Callable[[], AbstractContextManager[None]]) -> None:
    if words[:1] == ["report"]:
        from lightning_fed.cli.report_command import main as report

        raise SystemExit(report(words[1:]))
    if words[:1] == ["dashboard"]:
        from lightning_fed.cli.dashboard.command import main as dashboard

        raise SystemExit(dashboard(words[1:]))
    if words[:1] == ["configs"]:
        from lightning_fed.cli.configs_command import main as configs

        raise SystemExit(configs(words[1:]))
    # Lightning reads them when it is imported.
    expect_variables("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    _hide_parser_deprecations()
    _make_working_folder_importable()
    if words[:1] == ["study"]:
        from lightning_fed.cli.study.command import main as study

        raise SystemExit(study(words[1:], guard))
    if words[:1] == ["data"]:
        from lightning_fed.cli.data_command import main as data

        raise SystemExit(data(words[1:]))
    if words[:1] == ["attack"]:
        from lightning_fed.cli.attack.command import main as attack

        raise SystemExit(attack(words[1:]))
    from lightning_fed.cli.federated_cli import FederatedCLI

    FederatedCLI(words)


def _expect_text(words: list[str]) -> None:
    """Refuses bytes that are no UTF-8: Python keeps them in words and variables, but no config file can hold them."""
    given = [("the command line", word) for word in words]
    given += [(f"the variable {name}", value) for name, value in os.environ.items() if name.startswith("PL_")]
    for place, text in given:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FederatedError(f"Expected text in UTF-8, got {ascii(text)[:80]} in {place}.") from None


def _without_safe_imports(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Returns the words without the option, and the packages that it was given, None if it is not there."""
    kept, packages, rest = [], None, iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option != _SAFE_IMPORTS:
            kept.append(word)
            continue
        packages = (value if equals else next(rest, "")).split(",")
        if not all(name.isidentifier() for package in packages for name in package.split(".")):
            exit_with(f"Expected packages after `{_SAFE_IMPORTS}`, as in `torch,my_package`, got {packages}.", 2)
    return kept, packages


@contextmanager
def _imports_from(packages: list[str] | None) -> Iterator[None]:
    """Refuses, while open, options that name what is not of the packages or of this one, before it is imported.

    A function runs as soon as it is given arguments, whatever it does: it has to be named by itself.
    """
    if packages is None:
        yield
        return
    from jsonargparse import _common, _typehints, _util, set_parsing_settings

    former, typehints = dict(_common.parsing_settings), cast(Any, _typehints)
    build = typehints.adapt_class_type

    def build_class(value: Any, *args: Any, **kwargs: Any) -> Any:
        path = value["class_path"]
        found = _util.import_object(path)
        if not isinstance(found, type) and not {path, _defined_as(found)} & set(packages):
            raise _common.ImportDenied(f"Importing '{path}' is not allowed, as a function is no class")
        return build(value, *args, **kwargs)

    set_parsing_settings(import_path_denylist=["*", *_RUN_CODE], import_path_allowlist=["lightning_fed", *packages])
    typehints.adapt_class_type = build_class
    try:
        yield
    finally:
        typehints.adapt_class_type = build
        _common.parsing_settings.update(former)


def _defined_as(found: Any) -> str:
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def _hide_parser_deprecations() -> None:
    """Hides what jsonargparse says about its use by Lightning, which a user of ours cannot change."""
    for start in ("By default only one", "``ArgumentParser.add_instantiator", "``instantiate_classes", "skip_none"):
        warnings.filterwarnings("ignore", rf"\s*{re.escape(start)}", DeprecationWarning)


def _make_working_folder_importable() -> None:
    """Lets ``class_path: my_file.MyClass`` find my_file.py here; last, so that it shadows nothing installed."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FederatedError("Expected a working folder, but this one is gone: change to another.") from None
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
