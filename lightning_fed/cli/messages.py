"""One sentence for a mistake on the command line or in a configuration file."""

import os
import re

from jsonargparse import ArgumentParser

from lightning_fed.cli.findings import Finding, find
from lightning_fed.cli.suggestions import (
    class_options,
    classes_for,
    command_options,
    did_you_mean,
    listing,
    own_first,
    yaml_has,
)

__all__ = ["explain"]

_COMMAND_FIRST = "Expected the command before its options, as in `lightning-fed fit --config FILE --trainer.name mine`."
_COMMANDS = ("fit", "validate", "test", "predict", "data", "report")
_MISSING_FILE = re.compile(
    r"Parser key \"(?P<key>\w+)\": (?:(?:File|Path) [a-z ]+: |Unable to load config )['\"](?P<path>.*?)['\"]"
)
_YAML_MISTAKE = re.compile(
    r"Problems parsing config: (?P<what>.*?)(?: in \"<\w+ string>\",)? line (?P<place>\d+, column \d+)"
)


def explain(parser: ArgumentParser, message: str) -> str:
    """Turns jsonargparse's message into one sentence that names the option and what to do.

    Args:
        parser: The parser that failed: of the program or of one command.
        message: Its message, any number of lines.
    """
    flat = " ".join(message.split())
    for explained in (_words(parser, flat), _file(parser, flat), _finding(parser, message)):
        if explained:
            return explained
    where = f" in {_file_read(parser)}" if _file_read(parser) else ""
    return f"{flat.rstrip('.')}{where}; see `{_help(parser)}`."


def _help(parser: ArgumentParser) -> str:
    command = _command(parser)
    return f"lightning-fed {command} --help" if command else "lightning-fed --help"


def _command(parser: ArgumentParser) -> str:
    return getattr(parser, "command", "") or getattr(parser, "subcommand", "") or ""


def _file_read(parser: ArgumentParser) -> str:
    open_files: list[str] = getattr(parser, "open_files", [])
    return open_files[-1] if open_files else ""


def _words(parser: ArgumentParser, flat: str) -> str:
    """Explains mistakes in the words of the command line, before any value is looked at."""
    if match := re.match(r"unrecognized arguments: (-*)([^ =]+)", flat):
        if match[1]:
            return _unknown_option(parser, (match[2],), None)
        return f"Expected options as `--name value`, got the word {match[2]!r}; see `{_help(parser)}`."
    if match := re.match(r"argument (?:-c/)?(--\S+): expected one argument", flat):
        return f"Expected a value after `{match[1]}`, got none."
    if match := re.match(r"argument subcommand: invalid choice: '(.*?)' \(", flat):
        if any(word in _COMMANDS for word in getattr(parser, "args", ())):
            return _COMMAND_FIRST
        meant = did_you_mean(match[1], _COMMANDS)
        ending = f"; did you mean `{meant}`?" if meant else "."
        return f"Expected a command, one of {listing(_COMMANDS)}, got {match[1]!r}{ending}"
    if "is not accepted before subcommand" in flat:
        return _COMMAND_FIRST
    if flat.startswith('expected "subcommand"'):
        return f"Expected a command, one of {listing(_COMMANDS)}, as in `lightning-fed fit --config FILE`, got none."
    return ""


def _file(parser: ArgumentParser, flat: str) -> str:
    """Explains a configuration file that is missing or is no YAML."""
    path = _file_read(parser)
    if match := _YAML_MISTAKE.match(flat):
        return (
            f"Expected {path or 'the configuration'} to be YAML, got {match['what'].rstrip(', ')} at line "
            f"{match['place']}; correct the file given to `--config`."
        )
    if flat.startswith("Unexpected config:"):
        return f"Expected {path or 'the configuration'} given to `--config` to hold options as `name: value`, got none."
    if match := _MISSING_FILE.match(flat):
        return f"Expected `--{match['key']}` to name a file, got {match['path']!r}, which is missing or cannot be read."
    return ""


def _finding(parser: ArgumentParser, message: str) -> str:
    """Explains a value or name that does not fit."""
    if match := re.match(r"Subcommand '(\w+)' does not accept option '(\S+)'", message):
        return _unknown_option(_command_parser(parser, match[1]), tuple(match[2].split(".")), None)
    finding = find(message)
    if finding is None:
        return ""
    keys = tuple(part for key in finding.keys for part in key.split("."))
    if finding.kind == "unknown option":
        return _unknown_option(parser, (*keys, *finding.name.split(".")), finding.class_path)
    if finding.kind == "missing":
        return _missing(keys, finding)
    if finding.kind == "wrong type":
        return _wrong_type(parser, keys, finding)
    return _wrong_class(parser, keys, finding)


def _command_parser(parser: ArgumentParser, command: str) -> ArgumentParser:
    """Returns the parser of a command: what it lacks is known only to the program's parser, checking it all last."""
    commands = parser._subcommands_action
    found = commands.choices.get(command) if commands and commands.choices else None
    return found if isinstance(found, ArgumentParser) else parser


def _option(keys: tuple[str, ...]) -> str:
    return "`--" + ".".join(keys) + "`"


def _source(parser: ArgumentParser, keys: tuple[str, ...]) -> str:
    """Says where a value came from, if it was not the command line."""
    if path := _file_read(parser):
        return f" in {path}"
    words = [word for word in getattr(parser, "args", ()) if word.startswith("--" + ".".join(keys))]
    variable = "_".join(("PL", _command(parser))) + "__" + "__".join(keys)
    if not words and variable.upper() in os.environ:
        return f" in the variable {variable.upper()}"
    files = [path for path in getattr(parser, "config_files", ()) if yaml_has(path, keys)]
    return f" in {files[-1]}" if files and not words else ""


def _unknown_option(parser: ArgumentParser, keys: tuple[str, ...], class_path: str | None) -> str:
    name = ".".join(keys)
    if class_path:
        prefix, known = ".".join(keys[:-1]), class_options(class_path)
        meant = did_you_mean(keys[-1], known)
        meant = f"{prefix}.{meant}" if meant else ""
        exists = f"{class_path.rsplit('.', 1)[1]} has {listing(known) or 'no options'}"
    else:
        meant = did_you_mean(name, command_options(parser))
        exists = f"`{_help(parser)}` lists all"
    asked = f"did you mean `--{meant}` ({exists})?" if meant else f"{exists}."
    return f"There is no option `--{name}`{_source(parser, keys)}; {asked}"


def _missing(keys: tuple[str, ...], finding: Finding) -> str:
    names = [name.strip() for name in finding.name.split(",")]
    if finding.class_path:
        options = [_option((*keys, name)) for name in names]
        return f"Expected a value for {listing(options)}, which {finding.class_path.rsplit('.', 1)[1]} needs, got none."
    options = [_option(tuple(name.split(".")[1:] or [name])) for name in names]
    return f"Expected {listing(options)} on the command line or in a file given to `--config`, got none."


def _expected(types: str) -> str:
    """Writes types as a user would: ``of type int or float``, ``one of 'a', 'b'``."""
    if " " in types and not re.search(r"[<\[]", types):
        return f"a {types}"
    words = []
    types = re.sub(r"<class '([^']+)'>", r"\1", types).replace(", torch.Tensor", "")
    for part in re.split(r", (?![^\[]*\])", types):
        literal = re.fullmatch(r"typing\.Literal\[(.*)\]", part)
        plain = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", part).replace("NoneType", "null")
        words.append(f"one of {literal[1]}" if literal else plain)
    return " or ".join(words) if words[0].startswith("one of") else "of type " + " or ".join(words)


def _wrong_type(parser: ArgumentParser, keys: tuple[str, ...], finding: Finding) -> str:
    value = f"{finding.value!r}" if finding.value else "another type"
    return f"Expected {_option(keys)} to be {_expected(finding.detail)}, got {value}{_source(parser, keys)}."


def _wrong_class(parser: ArgumentParser, keys: tuple[str, ...], finding: Finding) -> str:
    known = classes_for(parser, keys, finding.class_path)
    name, where = finding.name or finding.value, _source(parser, keys)
    if finding.kind == "ambiguous class":
        paths = listing(finding.detail.split(", "))
        return f"Expected {_option(keys)} to name one class, got {name!r}{where}; give its import path, one of {paths}."
    if finding.kind == "broken import":
        return (
            f"Expected {_option(keys)} to name a class that can be imported, got {name!r}{where} "
            f"({finding.detail.rstrip('.')}; --debug shows where)."
        )
    what = {"abstract class": "a class that can be built", "wrong class": f"a subclass of {finding.detail}"}.get(
        finding.kind, "a known class or an import path"
    )
    meant = did_you_mean(name, known)
    names = own_first(known)
    exists = f"known: {listing(names)}" if names else "give the full import path of your class"
    ending = f"did you mean {meant} ({exists})?" if meant else f"{exists}."
    return f"Expected {_option(keys)} to name {what}, got {name!r}{where}; {ending}"
