"""One sentence for a mistake on the command line or in a configuration file.

jsonargparse's message is a tree by indentation: keys, classes within keys, one branch for each member of a union. What
matters is said under the deepest key: the others say only why the remaining members of the union did not fit either.
"""

import os
import re
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

from lightning_fed.cli.configs_command import shipped_configs
from lightning_fed.cli.suggestions import class_arguments, classes_for, command_options, did_you_mean, listing

__all__ = ["explain"]

_COMMANDS = ("fit", "validate", "test", "predict", "data", "report", "study", "dashboard", "attack", "configs")
_GIVES_DATA = ("--data", "--config", "-c")
_MISSING_FILE = re.compile(
    r"Parser key \"(?P<key>\w+)\": (?:(?:File|Path) [a-z ]+: |Unable to load config )['\"](?P<path>.*?)['\"]"
)
_YAML_MISTAKE = re.compile(
    r"(?:.*?(?:Problems parsing config|Parser key \"config\"|sub-config file (?P<file>.+?)): )?"
    r"(?P<what>.* in \"<\w+ string>\", .*?)(?: - Expected .*)?"
)
_OF_A_PART = re.compile(r"Parser key \"\w+\":\nUnable to load config '(?P<path>.*?)'\n +- ", re.DOTALL)
_PLACE = re.compile(
    r"Parser key \"(?P<key>[^\"]+)\"(?: element \d+)?:|Problem with given class_path '(?P<class_path>[^']+)':"
)
# What a line can say, in the order in which it explains more; what follows is the value.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("unknown option", r"(?:Group '(?P<group>[^']+)' does not accept option|Option) '(?P<name>[^']+)'"),
        ("missing", r"the following arguments are required: (?P<name>\S+(?:, \S+)*)"),
        ("ambiguous class", r"Multiple subclasses with name (?P<name>\w+)\..*ambiguity: (?P<detail>.*?)\.?$"),
        ("denied import", r"Importing '(?P<name>[^']+)' is not allowed"),
        ("unknown class", r"(?:Expected a dot import path string|Unexpected import path format): ?(?P<name>.*)"),
        ("abstract class", r"Expected an instantiatable class, but (?:(?P<name>\S+) )?is abstract"),
        ("wrong class", r"Import path (?:(?P<name>\S+) )?does not correspond to a subclass of (?P<detail>\w+)"),
        ("wrong class", r"Expected '(?P<name>\S+)' to be a subclass of (?P<detail>[\w.]+\w)"),
        # What an import in the user's code raised.
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
    """One thing that is wrong: under which keys, in the arguments of which class, and what was given or expected."""

    kind: str
    keys: tuple[str, ...]
    class_path: str
    name: str
    detail: str
    value: str


def _read(message: str) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns the lines under the deepest key: the keys and the class that each stands under, and what it says."""
    places: list[tuple[int, str, str]] = []  # the keys and classes that a line stands under, by their indentation
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


def _find(message: str) -> _Finding | None:
    """Returns what explains most under the deepest key, None if the message has another form."""
    lines = _read(message)
    whole = "\n".join(text for *_, text in lines)
    types, given = re.search(r"Subtypes: \[(.*)\]", whole), re.search("Given value: (.*)", whole)
    for kind, pattern in _KINDS:
        # A number may also be a tensor, named by a class path: not what someone had in mind who wrote `lr: abc`.
        if kind != "wrong type" and types and _TENSOR in types[1]:
            continue
        for keys, class_path, text in lines:
            said, _, value = text.partition(". Got value: ")
            if match := pattern.search(said):
                found = {"group": "", "name": "", "detail": "", **match.groupdict("")}
                value = value or (given[1] if given else "")
                if built := re.match(r"Namespace\(class_path='([^']*)'", value):
                    class_path = built[1]
                keys += (found["group"],) if found["group"] else ()
                detail = types[1] if types and kind == "wrong type" else found["detail"]
                return _Finding(kind, keys, class_path, found["name"], detail, value.split(". Got value: ")[0])
    return None


def explain(parser: ArgumentParser, message: str) -> str:
    """Turns jsonargparse's message into one sentence that names the option and what to do.

    Args:
        parser: The parser that failed: of the program or of one command.
        message: Its message, any number of lines.
    """
    if part := _OF_A_PART.match(message):
        message = message[part.end() :]
        if os.path.isfile(part["path"]):
            vars(parser)["open_files"] = [part["path"]]
    flat = " ".join(message.split())
    for explained in (_words(parser, flat), _file(parser, flat), _finding(parser, message)):
        if explained:
            return explained
    keys, _, text = next((line for line in _read(message) if not line[2].startswith(_NOISE)), ((), "", flat))
    what = f"a value of {_option(keys)} that fits" if keys else "options that fit"
    where = f" in {_file_read(parser)}" if _file_read(parser) else ""
    return f"Expected {what}{where}, got: {text.rstrip('.')}; see `{_help(parser)}`."


def _command(parser: ArgumentParser) -> str:
    return getattr(parser, "command", "") or getattr(parser, "subcommand", "") or ""


def _help(parser: ArgumentParser) -> str:
    return " ".join(filter(None, ("lightning-fed", _command(parser), "--help")))


def _words(parser: ArgumentParser, flat: str) -> str:
    """Explains mistakes in the words of the command line, before any value is looked at."""
    if match := re.match(r"unrecognized arguments: ?(-*)([^ =]*)", flat):
        if match[1]:
            return _unknown_option(parser, (match[2],))
        return f"Expected options as `--name value`, got the word {match[2]!r}; see `{_help(parser)}`."
    if match := re.match(r"argument (?:-c/)?(--\S+): expected one argument", flat):
        return f"Expected a value after `{match[1]}`, got none."
    if match := re.match(r"argument subcommand: invalid choice: '(.*?)' \(|expected \"subcommand\"", flat):
        meant = did_you_mean(match[1] or "", _COMMANDS)
        ending = f"{match[1]!r}; did you mean `{meant}`?" if meant else f"{match[1]!r}." if match[1] else "none."
        return f"Expected the command before its options, one of {listing(_COMMANDS)}, got {ending}"
    return ""


def _file(parser: ArgumentParser, flat: str) -> str:
    """Explains a configuration file that is missing or is no YAML."""
    path = _file_read(parser)
    if match := _YAML_MISTAKE.fullmatch(flat):
        what = re.sub(r" in \"<\w+ string>\",", " at", match["what"])
        path = match["file"] or path or "the text given to `--config`"
        return f"Expected {path} to be YAML, got {what}; correct it there."
    if flat.startswith("Unexpected config:"):
        got = repr(text) if (text := flat.removeprefix("Unexpected config:").strip()) else "none"
        return f"Expected {path or 'the text'} given to `--config` to hold options as `name: value`, got {got}."
    if match := _MISSING_FILE.match(flat):
        meant, where = "", _source(parser, (match["key"],))
        if match["key"] == "config":
            meant, where = did_you_mean(os.path.basename(match["path"]), shipped_configs()), ""
        ending = f"; did you mean `{meant}`?" if meant else "."
        expected = f"Expected `--{match['key']}` to name a file, got {match['path']!r}"
        return f"{expected}{where}, which is missing or cannot be read{ending}"
    return ""


def _file_read(parser: ArgumentParser) -> str:
    open_files: list[str] = getattr(parser, "open_files", [])
    return open_files[-1] if open_files else ""


def _finding(parser: ArgumentParser, message: str) -> str:
    """Explains a value or name that does not fit."""
    if match := re.match(r"Subcommand '(\w+)' does not accept option '(\S+)'", message):
        commands: Any = parser._subcommands_action  # of the program, which checks it all last
        return _unknown_option(commands.choices[match[1]], tuple(match[2].split(".")))
    if match := re.match(r"--(\S+).help: (.*)", message):
        message = f'Parser key "{match[1]}": {match[2]}'
    finding = _find(message)
    if finding is None:
        return ""
    if finding.kind == "unknown option":
        return _unknown_option(parser, (*finding.keys, *finding.name.split(".")), finding.class_path)
    if finding.kind == "missing":
        return _missing(parser, finding)
    return (_wrong_type if finding.kind == "wrong type" else _wrong_class)(parser, finding)


def _option(keys: tuple[str, ...]) -> str:
    return "`--" + ".".join(keys) + "`"


def _source(parser: ArgumentParser, keys: tuple[str, ...]) -> str:
    """Says where a value came from, if it stands in a file that is being read or in a variable."""
    if path := _file_read(parser):
        return f" in {path}"
    words = [word for word in getattr(parser, "args", ()) if word.startswith("--" + ".".join(keys))]
    variable = "__".join((f"PL_{_command(parser)}", *keys)).upper()
    return f" in the variable {variable}" if not words and variable in os.environ else ""


def _unknown_option(parser: ArgumentParser, keys: tuple[str, ...], class_path: str = "") -> str:
    known, prefix, exists = command_options(parser), "", f"`{_help(parser)}` lists all"
    if class_path:
        known, prefix = sorted(class_arguments(class_path)), ".".join(keys[:-1]) + "."
        exists = f"{class_path.rsplit('.', 1)[1]} has {listing(known) or 'no options'}"
    name = ".".join(keys)
    meant = did_you_mean(name.removeprefix(prefix), known)
    asked = f"did you mean `--{prefix}{meant}` ({exists})?" if meant else f"{exists}."
    return f"There is no option `--{name}`{_source(parser, keys)}; {asked}"


def _missing(parser: ArgumentParser, finding: _Finding) -> str:
    names = finding.name.split(", ")
    if finding.class_path:
        options = [_option((*finding.keys, name)) for name in names]
        return f"Expected a value for {listing(options)}, which {finding.class_path.rsplit('.', 1)[1]} needs, got none."
    names = [name.rpartition(".")[2] for name in names]
    # A model may bring its data, so only the model is asked for; who gave nothing at all mostly needs both.
    if names == ["model"] and not any(word.startswith(_GIVES_DATA) for word in getattr(parser, "args", ())):
        names = ["data", "model"]
    options = [_option((name,)) for name in names]
    return f"Expected {listing(options)} on the command line or in a file given to `--config`, got none."


def _expected(types: str) -> str:
    """Writes types as a user would: ``of type int or float``, ``one of 'a', 'b'``."""
    if " " in types and not re.search(r"[<\[]", types):
        return f"a {types}"
    types = re.sub(r"<class '([^']+)'>", r"\1", types).replace(", torch.Tensor", "")
    types = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", types).replace("NoneType", "null")
    named = " or ".join(re.split(r", (?![^\[]*\])", types))
    return re.sub(r"^Literal\[(.*?)\]", r"one of \1", named) if named.startswith("Literal") else f"of type {named}"


def _wrong_type(parser: ArgumentParser, finding: _Finding) -> str:
    value = f"{finding.value!r}" if finding.value else "another type"
    where = _source(parser, finding.keys)
    return f"Expected {_option(finding.keys)} to be {_expected(finding.detail)}, got {value}{where}."


def _wrong_class(parser: ArgumentParser, finding: _Finding) -> str:
    name, detail = finding.name or finding.value, finding.detail
    what, ending = {
        "ambiguous class": ("one class", f"give its import path, one of {listing(detail.split(', '))}."),
        "denied import": (
            "a class of lightning_fed's or one that `--safe_imports` names",
            "add it there if you trust it.",
        ),
        "broken import": ("a class that can be imported", f"{detail.rstrip('.')} (--debug shows where)."),
        "abstract class": ("a class that can be built", ""),
        "unknown class": ("a known class or an import path", ""),
    }.get(finding.kind, (f"a subclass of {detail}", ""))
    if not ending:
        known = classes_for(parser, finding.keys, finding.class_path)
        meant = did_you_mean(name, known)
        own = [name for name, path in known.items() if not path.startswith(_LIBRARIES)]
        exists = f"known: {listing(own or known)}" if known else "give the full import path of your class"
        ending = f"did you mean {meant} ({exists})?" if meant else f"{exists}."
    where = _source(parser, finding.keys)
    return f"Expected {_option(finding.keys)} to name {what}, got {name!r}{where}; {ending}"
