"""One sentence for a mistake on the command line or in a configuration file.

jsonargparse's message is a tree by indentation: keys, classes within keys, one branch for each member of a union. The
cause is under the deepest key. The other branches only say why the other members of the union did not fit either.
"""

import os
import re
from typing import Any, NamedTuple

from lightning_fed.cli.class_names import (
    class_arguments,
    classes_for,
    command_options,
    did_you_mean,
    listing,
    load_shared,
    unknown_command,
)
from lightning_fed.cli.configs_command import shipped_configs
from lightning_fed.trainer.options import FOREIGN

__all__ = ["explain"]

_GIVES_DATA = ("--data", "--config", "-c")
_MISSING_FILE = re.compile(
    r"Parser key \"(?P<key>[\w.]+)\": (?:(?:File|Path) [a-z ]+: |Unable to load config )['\"](?P<path>.*?)['\"]"
)
_YAML_MISTAKE = re.compile(
    r"(?:.*?(?:Problems parsing config|Parser key \"config\"|sub-config file (?P<file>.+?)): )?"
    r"(?P<what>.* in \"<\w+ string>\", .*?)(?: - Expected .*)?"
)
_OF_A_PART = re.compile(r"Parser key \"[\w.]+\":\nUnable to load config '(?P<path>.*?)'\n +- ", re.DOTALL)
_PLACE = re.compile(
    r"(?:Parser key \"|^--)(?P<key>[^\"]+?)(?:\"(?: element \d+)?|\.help):"
    r"|Problem with given class_path '(?P<class_path>[^']+)':"
)
# What a line can say; kinds that explain more come first.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("unknown option", r"Option '(?P<name>[^']+)' is not accepted"),
        ("missing", r"the following arguments are required: (?P<name>[^\s,]+(?:, [^\s,]+)*)"),
        ("ambiguous class", r"Multiple subclasses with name (?P<name>\w+)\..*ambiguity: (?P<detail>.*?)\.?$"),
        ("denied import", r"Importing '(?P<name>[^']+)' is not allowed"),
        ("unknown class", r"(?:Expected a dot import path string|Unexpected import path format): ?(?P<name>.*)"),
        ("abstract class", r"Expected an instantiatable class, but (?:(?P<name>\S+) )?is abstract"),
        ("wrong class", r"Import path (?:(?P<name>\S+) )?does not correspond to a subclass of (?P<detail>\w+)"),
        ("wrong class", r"Expected '(?P<name>\S+)' to be a subclass of (?P<detail>[\w.]+\w)"),
        # An exception that an import in your code raised.
        ("broken import", r"^(?:class '(?P<name>.*?)'|.* a callable class): (?P<detail>(?!Expected a|Not a ).+)"),
        ("wrong type", r"Expected an? (?P<detail>(?!path but|<class 'NoneType'>$).+)"),
        ("wrong type", r"Not of type (?P<detail>\w+)"),
        ("wrong class", r"Not a valid subclass of (?P<detail>\w+)"),
    )
)
_TENSOR = "<class 'torch.Tensor'>"
_NOISE = ("Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a path but")
_LIBRARIES = ("lightning.", "torch.", "torchmetrics.", "torchvision.")


class _Finding(NamedTuple):
    """One mistake: its keys, the class whose arguments it is in, and what was given or expected."""

    keys: tuple[str, ...]
    class_path: str
    value: str
    name: str = ""
    detail: str = ""


def _read(message: str) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns the lines under the deepest key: for each its keys, its class and its text."""
    places: list[tuple[int, str, str]] = []  # keys and classes above a line, by indentation
    lines = []
    for line in filter(str.strip, message.splitlines()):
        indent, text = len(line) - len(line.lstrip()), line.strip().removeprefix("- ")
        places = [place for place in places if place[0] < indent]
        for place in _PLACE.finditer(line):
            places.append((indent, place["key"] or "", place["class_path"] or ""))
            text = line[place.end() :].strip()
        keys = tuple(part for _, key, _ in places if key for part in key.split("."))
        class_path = next((path for *_, path in reversed(places) if path), "")
        if text and places and places[-1][2]:
            text = f"class '{class_path}': {text}"
        lines.append((keys, class_path, text))
    depth = max((len(keys) for keys, *_ in lines), default=0)
    return [line for line in lines if len(line[0]) == depth and line[2]]


def explain(parser: Any, message: str) -> str:
    """Turns jsonargparse's message into one sentence that names the option and what to do.

    Args:
        parser: The parser that failed, of the program or of one command.
        message: Its message, of any number of lines.
    """
    if part := _OF_A_PART.match(message):
        message = message[part.end() :]
        if os.path.isfile(part["path"]):
            vars(parser)["open_files"] = [part["path"]]
    flat = " ".join(message.split())
    for explained in (_words(parser, flat), _file(parser, flat), _value(parser, message)):
        if explained:
            return explained
    keys, _, text = next((line for line in _read(message) if not line[2].startswith(_NOISE)), ((), "", flat))
    what = f"a value of {_option(keys)} that fits" if keys else "options that fit"
    return f"Expected {what}{_source(parser, ())}, got: {text.rstrip('.')}; see `{_help(parser)}`."


def _help(parser: Any) -> str:
    return f"{parser.prog.replace(' [options]', '')} --help"


def _words(parser: Any, flat: str) -> str:
    """Explains mistakes on the command line itself, which are found before any value is read."""
    if match := re.match(r"unrecognized arguments: ?(-*)([^ =]*)", flat):
        if match[1]:
            return _unknown_option(parser, (match[2],))
        return f"Expected options as `--name value`, got the word {match[2]!r}; see `{_help(parser)}`."
    if match := re.match(r"argument (?:-c/)?(--\S+): expected one argument", flat):
        return f"Expected a value after `{match[1]}`, got none."
    if match := re.match(r"argument subcommand: invalid choice: '(.*?)' \(|expected \"subcommand\"", flat):
        return unknown_command(match[1] or "")
    return ""


def _file(parser: Any, flat: str) -> str:
    """Explains a configuration file that is missing or not valid YAML."""
    path = parser.open_files[-1] if parser.open_files else ""
    if match := _YAML_MISTAKE.fullmatch(flat):
        what = re.sub(r" in \"<\w+ string>\",", " at", match["what"])
        path = match["file"] or path or "the text given to `--config`"
        return f"Expected {path} to be YAML, got {what}; correct it there."
    if flat.startswith("Unexpected config:"):
        got = repr(text) if (text := flat.removeprefix("Unexpected config:").strip()) else "none"
        return f"Expected {path or 'the text'} given to `--config` to hold options as `name: value`, got {got}."
    if match := _MISSING_FILE.match(flat):
        meant = did_you_mean(os.path.basename(match["path"]), shipped_configs() if match["key"] == "config" else ())
        got = f"{match['path']!r}{_source(parser, (match['key'],))}, which is missing or cannot be read"
        ending = f"; did you mean `{meant}`?" if meant else "."
        return f"Expected `--{match['key']}` to name a file, got {got}{ending}"
    return ""


def _value(parser: Any, message: str) -> str:
    """Explains a value or name that does not fit, by the most telling line under the deepest key."""
    if match := re.match(r"Subcommand '(\w+)' does not accept option '(\S+)'", message):
        # This message is from the program's parser, which checks everything last.
        return _unknown_option(parser._subcommands_action.choices[match[1]], tuple(match[2].split(".")))
    lines = _read(
        re.sub(r"Group '([^']+)' does not accept option '([^']+)'", r"Option '\1.\2' is not accepted", message)
    )
    whole = "\n".join(text for *_, text in lines)
    types, given = re.search(r"Subtypes: \[(.*)\]", whole), re.search("Given value: (.*)", whole)
    for kind, pattern in _KINDS:
        # A number may also be a tensor, given by a class path, but who writes `lr: abc` did not mean that.
        if kind != "wrong type" and types and _TENSOR in types[1]:
            continue
        for keys, class_path, text in lines:
            said, _, value = text.partition(". Got value: ")
            if match := pattern.search(said):
                value = value or (given[1] if given else "")
                if built := re.match(r"Namespace\(class_path='([^']*)'", value):
                    class_path = built[1]
                found = _Finding(keys, class_path, value.split(". Got value: ")[0], **match.groupdict(""))
                if kind == "unknown option":
                    return _unknown_option(parser, (*keys, *found.name.split(".")), class_path)
                if kind == "missing":
                    return _missing(parser, found)
                if kind == "wrong type":
                    value = f"{found.value!r}" if found.value else "another type"
                    expected = _expected(types[1] if types else found.detail)
                    return f"Expected {_option(found.keys)} to be {expected}, got {value}{_source(parser, found.keys)}."
                return _wrong_class(parser, kind, found)
    return ""


def _option(keys: tuple[str, ...]) -> str:
    return "`--" + ".".join(keys) + "`"


def _source(parser: Any, keys: tuple[str, ...]) -> str:
    """Says where a value came from, if from a file that is being read or from an environment variable."""
    if parser.open_files:
        return f" in {parser.open_files[-1]}"
    words = [word for word in getattr(parser, "args", ()) if word.startswith("--" + ".".join(keys))]
    variable = f"{parser.env_prefix}_{'__'.join(keys)}".upper()
    return f" in the variable {variable}" if not words and variable in os.environ else ""


def _unknown_option(parser: Any, keys: tuple[str, ...], class_path: str = "") -> str:
    known, prefix, exists = command_options(parser), "", f"`{_help(parser)}` lists all"
    if class_path:
        known, prefix = sorted(class_arguments(class_path)), ".".join(keys[:-1]) + "."
        exists = f"{class_path.rsplit('.', 1)[1]} has {listing(known) or 'no options'}"
    else:
        known += [f"trainer.{other}" for other in FOREIGN]
    name = ".".join(keys)
    meant = did_you_mean(name.removeprefix(prefix), known)
    asked = f"did you mean `--{prefix}{meant}` ({exists})?" if meant else f"{exists}."
    return f"There is no option `--{name}`{_source(parser, keys)}; {asked}"


def _missing(parser: Any, found: _Finding) -> str:
    names = found.name.split(", ")
    if found.class_path:
        options = [_option((*found.keys, name)) for name in names]
        return f"Expected a value for {listing(options)}, which {found.class_path.rsplit('.', 1)[1]} needs, got none."
    names = [name.rpartition(".")[2] for name in names]
    # A model may bring its own data, so only the model is required. Without any option both are usually missing.
    if names == ["model"] and not any(word.startswith(_GIVES_DATA) for word in getattr(parser, "args", ())):
        names = ["data", "model"]
    options = [_option((name,)) for name in names]
    return f"Expected {listing(options)} on the command line or in a file given to `--config`, got none."


def _expected(types: str) -> str:
    """Writes types in plain words: ``of type int or float``, ``one of 'a', 'b'``."""
    if " " in types and not re.search(r"[<\[]", types):
        return f"a {types}"
    types = re.sub(r"<class '([^']+)'>", r"\1", types).replace(", torch.Tensor", "")
    types = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", types).replace("NoneType", "null")
    named = " or ".join(re.split(r", (?![^\[]*\])", types))
    return re.sub(r"^Literal\[(.*?)\]", r"one of \1", named) if named.startswith("Literal") else f"of type {named}"


def _wrong_class(parser: Any, kind: str, found: _Finding) -> str:
    name, detail = found.name or found.value, found.detail
    what, ending = {
        "ambiguous class": ("one class", f"give its import path, one of {listing(detail.split(', '))}."),
        "denied import": (
            "a class of lightning_fed or one that `--safe_imports` names",
            "add it there if you trust it.",
        ),
        "broken import": ("a class that can be imported", f"{detail.rstrip('.')} (--debug shows where)."),
        "abstract class": ("a class that can be built", ""),
        "unknown class": ("a known class or an import path", ""),
    }.get(kind, (f"a subclass of {detail}", ""))
    if not ending:
        load_shared()
        known = classes_for(parser, found.keys, found.class_path)
        meant = did_you_mean(name, known)
        own = [name for name, path in known.items() if not path.startswith(_LIBRARIES)]
        exists = f"known: {listing(own or known)}" if known else "give the full import path of your class"
        ending = f"did you mean {meant} ({exists})?" if meant else f"{exists}."
    where = _source(parser, found.keys)
    return f"Expected {_option(found.keys)} to name {what}, got {name!r}{where}; {ending}"
