"""One sentence for a mistake on the command line or in a configuration file.

jsonargparse's message is a tree by indentation: keys, classes within keys, one branch for each member of a union. What
matters is said under the deepest key: the others say only why the remaining members of the union did not fit either.
"""

import os
import re
from typing import NamedTuple

from jsonargparse import ArgumentParser

from lightning_fed.cli.configs_command import shipped_configs
from lightning_fed.cli.suggestions import class_options, classes_for, command_options, did_you_mean, listing, own_first
from lightning_fed.core.train_state import FLAT_NAMES

__all__ = ["explain"]

_COMMAND_FIRST = "Expected the command before its options, as in `lightning-fed fit --config FILE --trainer.name mine`."
_COMMANDS = ("fit", "validate", "test", "predict", "data", "report", "study", "dashboard", "attack", "configs")
_MISSING_FILE = re.compile(
    r"Parser key \"(?P<key>[\w.]+)\": (?:(?:File|Path) [a-z ]+: |Unable to load config )['\"](?P<path>.*?)['\"]"
)
_YAML_PLACE = r"(?: in \"<\w+ string>\",)? (?P<place>line \d+, column \d+|position \d+)"
# What was being read and where it begins may come first, what is wrong there and where last.
_YAML_MISTAKE = re.compile(
    r"(?:Problems parsing config|Parser key \"config\"|.*Invalid content in sub-config file (?P<file>.+?)): "
    rf"(?P<what>.*?){_YAML_PLACE}(?P<also>.*?)(?:{_YAML_PLACE.replace('place', 'last')})?(?: - Expected .*)?"
)
_OF_A_PART = re.compile(
    r"Parser key \"\w+\":\nUnable to load config '(?P<path>.*?)'\n +- (?P<rest>(?!Parser key \"\w+\": Unable).*)",
    re.DOTALL,
)

# A line may name a key and a class before it says anything.
_LINE = re.compile(
    r"(?P<indent> *)(?P<dash>- )?(?:Type .* expects a function or a callable class: ?)?"
    r"(?:Parser key \"(?P<key>[^\"]+)\"(?: element \d+)?:\s*)?(?:Type .* expects a function or a callable class: ?)?"
    r"(?:Problem with given class_path '(?P<path>[^']+)':)?(?P<text>.*)"
)
# What a line can say, in the order in which it explains more; the first pattern that fits decides.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern + r"(?:\. Got value: (?P<value>.*))?"))
    for kind, pattern in (
        ("unknown option", r"Group '(?P<group>[^']+)' does not accept option '(?P<name>[^']+)'"),
        ("unknown option", r"Option '(?P<name>[^']+)' is not accepted"),
        ("missing", r"the following arguments are required: (?P<name>[^ ]+(?:, [^ ]+)*?)"),
        ("ambiguous class", r"Multiple subclasses with name (?P<name>\w+)\..*ambiguity: (?P<detail>.*?)\.?"),
        ("unknown class", r"(?:Expected a dot import path string|Unexpected import path format): (?P<name>.+)"),
        ("abstract class", r"Expected an instantiatable class, but (?:(?P<name>\S+) )?is abstract"),
        ("wrong class", r"Import path (?:(?P<name>\S+) )?does not correspond to a subclass of (?P<detail>\w+)"),
        ("wrong class", r"Expected '(?P<name>\S+)' to be a subclass of (?P<detail>\S+?)\.?"),
        ("denied import", r"Importing '(?P<name>[^']+)' is not allowed, .*"),
        # Any other line of a class or of a union: what an import in the user's code raised.
        (
            "broken import",
            r"(?!Expected a|Does not|Not a valid subclass|Not of type|a class path|a dict |Unable)(?P<detail>.+)",
        ),
        ("wrong type", r"Expected an? (?P<detail>(?!path but).+?)"),
        ("wrong type", r"Not of type (?P<detail>\w+): .*"),
        ("no class", r"Not a valid subclass of (?P<detail>\w+)"),
    )
)
_GIVES_DATA = ("--data", "--config", "-c")
_ABOUT_KEY = re.compile(r"(Subtypes|Given value): (.*)")
_RANKS = [kind for kind, _ in _KINDS]
_TENSOR = "<class 'torch.Tensor'>"


class _Finding(NamedTuple):
    """One thing that is wrong: under which keys, in the arguments of which class, and what was given or expected."""

    kind: str
    keys: tuple[str, ...]
    class_path: str
    name: str = ""
    detail: str = ""
    value: str = ""


def _find(message: str) -> _Finding | None:
    """Returns what stands under the deepest key and explains most, None if the message has another form."""
    places: list[tuple[int, str, str]] = []  # the keys and classes that a line stands under, by their indentation
    said: dict[tuple[tuple[str, ...], str], str] = {}
    found: list[_Finding] = []
    for match in map(_LINE.fullmatch, filter(str.strip, message.splitlines())):
        assert match is not None  # whatever a line says, it has a text
        text, indent = match["text"], len(match["indent"])
        places = [place for place in places if place[0] < indent]
        if match["key"] or match["path"]:
            places.append((indent, match["key"] or "", match["path"] or ""))
        keys = tuple(part for _, key, _ in places if key for part in key.split("."))
        if about := _ABOUT_KEY.match(text):
            said[keys, about[1]] = about[2].split(". Got value: Namespace(")[0]
        elif one := _read(text, keys, [path for *_, path in places], bool(places and match["dash"])):
            found.append(one)
    # A number may also be a tensor, named by a class path: not what someone had in mind who wrote `lr: abc`.
    found = [one for one in found if one.kind == "wrong type" or _TENSOR not in said.get((one.keys, "Subtypes"), "")]
    best = max(found, key=lambda one: (len(one.keys), -_RANKS.index(one.kind)), default=None)
    if best is None:
        return None
    types = said.get((best.keys, "Subtypes"), "")[1:-1] if best.kind == "wrong type" else ""
    value = best.value.split(". Got value: Namespace(")[0] or said.get((best.keys, "Given value"), "")
    return best._replace(detail=types or best.detail, value=value)


def _read(text: str, keys: tuple[str, ...], class_paths: list[str], is_member: bool) -> _Finding | None:
    kind, said = next(((kind, m.groupdict("")) for kind, p in _KINDS if (m := p.fullmatch(text))), ("", {}))
    owner = next(filter(None, reversed(class_paths)), "")
    if kind == "broken import":  # only under a class, or beside the other members of a union
        under_class = bool(class_paths and class_paths[-1])
        return _Finding(kind, keys, "", owner if under_class else "", text) if under_class or is_member else None
    if built := re.search(r"Got value: Namespace\(class_path='([^']*)'", text):
        owner = built[1]
    group = said.pop("group", "")
    return _Finding(kind, (*keys, group) if group else keys, owner, **said) if kind else None


def explain(parser: ArgumentParser, message: str) -> str:
    """Turns jsonargparse's message into one sentence that names the option and what to do.

    Args:
        parser: The parser that failed: of the program or of one command.
        message: Its message, any number of lines.
    """
    if part := _OF_A_PART.fullmatch(message):
        vars(parser)["open_files"] = [part["path"] if os.path.isfile(part["path"]) else ""]
        message = part["rest"] if part["rest"].startswith("Parser key") else f"Problems parsing config: {part['rest']}"
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
    if match := re.match(r"unrecognized arguments: ?(-*)([^ =]*)", flat):
        if match[1]:
            return _unknown_option(parser, (match[2],))
        return f"Expected options as `--name value`, got the word {match[2]!r}; see `{_help(parser)}`."
    if match := re.match(r"--(\S+).help: Importing '(.*?)' is not allowed", flat):
        return _wrong_class(parser, _Finding("denied import", tuple(match[1].split(".")), "", match[2]))
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
    if match := _YAML_MISTAKE.fullmatch(flat):
        what, place = match["what"].rstrip(", ") + match["also"], match["last"] or match["place"]
        path = match["file"] or path or "the text given to `--config`"
        return f"Expected {path} to be YAML, got {what} at {place}; correct it there."
    if flat.startswith("Unexpected config:"):
        got = repr(text) if (text := flat.removeprefix("Unexpected config:").strip()) else "none"
        return f"Expected {path or 'the text'} given to `--config` to hold options as `name: value`, got {got}."
    if match := _MISSING_FILE.match(flat):
        meant = did_you_mean(os.path.basename(match["path"]), shipped_configs()) if match["key"] == "config" else ""
        ending = f"; did you mean `{meant}`?" if meant else "."
        where = "" if match["key"] == "config" else _source(parser, (match["key"],))
        expected = f"Expected `--{match['key']}` to name a file, got {match['path']!r}"
        return f"{expected}{where}, which is missing or cannot be read{ending}"
    return ""


def _finding(parser: ArgumentParser, message: str) -> str:
    """Explains a value or name that does not fit."""
    if match := re.match(r"Subcommand '(\w+)' does not accept option '(\S+)'", message):
        return _unknown_option(_command_parser(parser, match[1]), tuple(match[2].split(".")))
    finding = _find(message)
    if finding is None:
        return ""
    if finding.kind == "unknown option":
        return _unknown_option(parser, (*finding.keys, *finding.name.split(".")), finding.class_path)
    if finding.kind == "missing":
        return _missing(parser, finding)
    return (_wrong_type if finding.kind == "wrong type" else _wrong_class)(parser, finding)


def _command_parser(parser: ArgumentParser, command: str) -> ArgumentParser:
    """Returns the parser of a command: what it lacks is known only to the program's parser, checking it all last."""
    commands = parser._subcommands_action
    found = commands.choices.get(command) if commands and commands.choices else None
    return found if isinstance(found, ArgumentParser) else parser


def _option(keys: tuple[str, ...]) -> str:
    return "`--" + ".".join(keys) + "`"


def _source(parser: ArgumentParser, keys: tuple[str, ...]) -> str:
    """Says where a value came from, if it stands in a file that is being read or in a variable."""
    for count in range(len(keys) - 1, 0, -1):
        if part := getattr(parser, "part_files", {}).get(".".join(keys[:count])):
            return f" in {part}"
    if path := _file_read(parser):
        return f" in {path}"
    words = [word for word in getattr(parser, "args", ()) if word.startswith("--" + ".".join(keys))]
    variable = "__".join((f"PL_{_command(parser)}", *keys)).upper()
    return f" in the variable {variable}" if not words and variable in os.environ else ""


def _unknown_option(parser: ArgumentParser, keys: tuple[str, ...], class_path: str = "") -> str:
    name = ".".join(keys)
    if class_path:
        prefix, known = ".".join(keys[:-1]), class_options(class_path)
        meant = did_you_mean(keys[-1], known)
        meant = f"{prefix}.{meant}" if meant else ""
        exists = f"{class_path.rsplit('.', 1)[1]} has {listing(known) or 'no options'}"
    else:
        meant = did_you_mean(name, [*command_options(parser), *(f"trainer.{flat}" for flat in FLAT_NAMES)])
        exists = f"`{_help(parser)}` lists all"
    asked = f"did you mean `--{meant}` ({exists})?" if meant else f"{exists}."
    return f"There is no option `--{name}`{_source(parser, keys)}; {asked}"


def _missing(parser: ArgumentParser, finding: _Finding) -> str:
    names = [name.strip() for name in finding.name.split(",")]
    if finding.class_path:
        options = [_option((*finding.keys, name)) for name in names]
        return f"Expected a value for {listing(options)}, which {finding.class_path.rsplit('.', 1)[1]} needs, got none."
    keys = [tuple(name.split(".")[1:] or [name]) for name in names]
    # A model may bring its data, so only the model is asked for; who gave nothing at all mostly needs both.
    if keys == [("model",)] and not any(word.startswith(_GIVES_DATA) for word in getattr(parser, "args", ())):
        keys.insert(0, ("data",))
    options = [_option(key) for key in keys]
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


def _wrong_type(parser: ArgumentParser, finding: _Finding) -> str:
    value = f"{finding.value!r}" if finding.value else "another type"
    where = _source(parser, finding.keys)
    return f"Expected {_option(finding.keys)} to be {_expected(finding.detail)}, got {value}{where}."


def _wrong_class(parser: ArgumentParser, finding: _Finding) -> str:
    known = classes_for(parser, finding.keys, finding.class_path)
    option, name, where = _option(finding.keys), finding.name or finding.value, _source(parser, finding.keys)
    if finding.kind == "ambiguous class":
        paths = listing(finding.detail.split(", "))
        return f"Expected {option} to name one class, got {name!r}{where}; give its import path, one of {paths}."
    if finding.kind == "denied import":
        return (
            f"Expected {option} to name a class of lightning_fed's or one that `--safe_imports` names, got "
            f"{name!r}{where}: add it there if you trust it."
        )
    if finding.kind == "broken import":
        return (
            f"Expected {option} to name a class that can be imported, got {name!r}{where} "
            f"({finding.detail.rstrip('.')}; --debug shows where)."
        )
    subclass = f"a subclass of {finding.detail}"
    what = {"abstract class": "a class that can be built", "wrong class": subclass, "no class": subclass}.get(
        finding.kind, "a known class or an import path"
    )
    meant = did_you_mean(name, known)
    names = own_first(known)
    exists = f"known: {listing(names)}" if names else "give the full import path of your class"
    ending = f"did you mean {meant} ({exists})?" if meant else f"{exists}."
    return f"Expected {option} to name {what}, got {name!r}{where}; {ending}"
