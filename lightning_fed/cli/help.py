"""The help of a command: its options by task, with the first sentence on each; ``--help all`` has all of it."""

import json
import re
import sys
from argparse import SUPPRESS, Action, _HelpAction
from collections.abc import Iterator
from fnmatch import fnmatch
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._actions import _ActionConfigLoad, _ActionHelpClassPath
from jsonargparse._formatters import get_env_var
from jsonargparse._link_arguments import ActionLink
from jsonargparse._typehints import get_all_subclass_paths, type_to_str

from lightning_fed.aggregators import Aggregator
from lightning_fed.cli.class_names import load_shared
from lightning_fed.cli.exits import exit_with
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.masks import Mask
from lightning_fed.trainer.callback_order import WORKING

__all__ = ["HelpAction", "command_help"]

# Patterns of the options of a task; an option is in the first that has it.
_TASKS = {
    "": "help config print_config",
    "Model": "model model.* link_data optimizer lr_scheduler",
    "Data": "data data.*",
    "Aggregator": "aggregator aggregator.*",
    "Client": "client",
    "Rounds and cohorts": "seed_everything *.seed *.max_rounds *.max_time *.clients_per_round *.participation*",
    "Local training": "*.local_* *.accumulate_* *.gradient_* *.full_gradients* *.client_states",
    "Validation and tests": "*.check_* *.limit_*",
    "Logging, callbacks and files": "*.logger *.callbacks *.enable_* *.default_root_dir *.name",
    "Devices and speed": "*.accelerator *.devices *.num_nodes *.strategy *.precision *.memory_format *.engine "
    "*.chunk_size *.compile *.benchmark *.deterministic",
    "Failures and trials": "*.tolerance* *.fast_dev_run *.detect_anomaly",
    "Start and resume": "ckpt_path weights weights_only",
    "More of the trainer": "trainer*",
    "Of this command": "*",
}  # fmt: skip
# Instead of the words of Lightning and jsonargparse.
_TEXTS = {
    "help": "Shows this help; `--help all` shows whole texts, variables, and what each class does.",
    "config": "YAML file of options, or a name that `lightning-fed configs` lists. Later files and options win.",
    "print_config": "Prints all options as YAML.",
    "seed_everything": "Seed of the run, its data and its model.",
    "model": "A LightningModule: one of these, or yours, as `my_file.MyModel`.",
    "data": "A LightningDataModule: one of these, or yours.",
    "aggregator": "What the server does with the updates of a cohort.",
    "aggregator.mask": "A factor for each coordinate of the aggregator's step.",
    "optimizer": "Replaces the module's optimizer.",
    "lr_scheduler": "Changes the learning rate of `--optimizer`.",
}
# What one derives from, and cannot name as it is.
_BASES = {
    "BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ClientAlgorithm", "FederatedCallback",
    "LightningDataModule", "LightningModule", "LossAlgorithm", "LRScheduler", "Optimizer", "Payload",
}  # fmt: skip


class HelpAction(_HelpAction):
    """``--help`` of a command, or ``--help all``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values not in (None, "all"):
            exit_with(f"Expected `--help` or `--help all`, got `--help {values}`.", 2)
        parser.says_all = values == "all"
        super().__call__(parser, namespace, values, option_string)


def command_help(parser: ArgumentParser, says_all: bool) -> str:
    """Returns the help of a command: what most need, or all that is known of its options and their classes."""
    load_shared()
    hidden = (ActionLink, _ActionHelpClassPath, *(() if says_all else (_ActionConfigLoad,)))
    left = {one.dest: one for one in parser._actions if one.help != SUPPRESS and not isinstance(one, hidden)}
    if "aggregator" in left:
        mask: Any = Mask  # an option of every aggregator
        left["aggregator.mask"] = Action(["--aggregator.mask"], "aggregator.mask", type=mask)
    about = f"{parser.description} `--OPTION.help CLASS` shows the options of a class: `--aggregator.help FedGMA`."
    usage = f"usage: {parser.prog.replace(' [options]', '')} [--OPTION VALUE ...]"
    lines = [usage, "", *_wrapped(about.replace("``", "`"), 0), ""]
    for task, patterns in _TASKS.items():
        found = [left.pop(name) for name in [*left] if any(fnmatch(name, each) for each in patterns.split())]
        lines += ["", f"{task}:"] if task and found else []
        lines += [line for action in found for line in _entry(parser, action, says_all)]
    return "\n".join(lines) + "\n"


def _entry(parser: ArgumentParser, action: Action, says_all: bool) -> Iterator[str]:
    """Yields the lines on an option, and on its classes."""
    hint: Any = getattr(action, "_typehint", action.type)
    classes = _classes(action.dest, hint) if hint else {}
    text = (_TEXTS.get(action.dest) or action.help or "").replace("``", "`")
    facts = "" if (default := _default(action)) is None else f" (default: {default})"
    if says_all and hint and parser.default_env:
        facts += f" [{get_env_var(parser, action)}]"
    kind = "CLASS" if classes else _kind(hint) if hint else action.metavar or "VALUE"
    yield f"  {', '.join(name for name in action.option_strings if not name.endswith('+'))} {kind}"
    yield from _wrapped((text if says_all else re.split(r"(?<=[^.]\.) (?=[A-Z`])", text)[0]) + facts, 6)
    for name, kind in classes.items() if says_all else ():
        does = (kind.__doc__ or "").strip().partition("\n")[0].replace("``", "`")
        yield from _wrapped(f"{name}: {does}".removesuffix(": "), 8)
    yield from () if says_all else _wrapped(", ".join(classes), 8)


def _wrapped(text: str, indent: int) -> list[str]:
    width = min(get_terminal_size().columns, 120) - 2 - indent
    return [" " * indent + line for line in wrap(text.strip(), max(width, 20), break_on_hyphens=False)]


def _kind(hint: Any) -> str:
    """Returns the words of a type, as ``int|float``, unless they are many."""
    told: str = type_to_str(hint)  # type: ignore[no-untyped-call]  # jsonargparse has no annotations
    words = re.sub("Union|Optional|Literal|null|list|dict", "", told)
    kind = "|".join(dict.fromkeys(re.findall(r"[\w-]+", words)))
    return kind if len(kind) < 40 else "VALUE"


def _default(action: Action) -> str | None:
    if isinstance(action.default, Namespace):
        return str(action.default.class_path).rpartition(".")[2]
    return None if action.default in (None, SUPPRESS) else json.dumps(action.default).strip('"')


def _classes(option: str, hint: Any) -> dict[str, Any]:
    """Returns the loaded classes that an option takes, by short name: those that work, each where it belongs."""
    split = (path.rpartition(".") for path in get_all_subclass_paths(hint, closed_types=False))
    found = ((place, name, getattr(sys.modules.get(place), name, None)) for place, _, name in split)
    return {name: kind for place, name, kind in found if _is_listed(option, place, name, kind)}


def _is_listed(option: str, place: str, name: str, kind: Any) -> bool:
    """Whether a package exports a class, if it is no user's own, and whether it is at home where an option takes it."""
    if name in _BASES or re.match(r"lightning(_fed)?\.\w+\.", place) and not hasattr(sys.modules[place], "__path__"):
        return False
    bases = getattr(kind, "__mro__", ()) if option == "trainer.callbacks" else ()
    works = not place.startswith("lightning.") or any(base.__name__ in WORKING for base in bases)
    return not bases or works and not {Aggregator, ClientAlgorithm} & set(bases)
