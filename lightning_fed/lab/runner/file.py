"""Reads the file of a study by the types of its dataclasses; each mistake is one sentence with file and place.

jsonargparse can read such dataclasses too, but it ignores unknown keys of a dataclass inside a mapping.
"""

from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse

from lightning_fed.cli.configs_command import find_config
from lightning_fed.cli.yaml_loader import ConfigLoader, is_endless
from lightning_fed.errors import FederatedError, expect, expect_choice
from lightning_fed.lab.runner.tuning import expect_sound_stages
from lightning_fed.lab.studies.cells import combinations, in_profile
from lightning_fed.lab.studies.published import read_published
from lightning_fed.lab.studies.study import PARTS, Name, Study, expect_sound, name_of, reported_axes

__all__ = ["help_on_keys", "load_study"]

_SHORT = {"option", "values"}
_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


def load_study(name: str, profile: str = "full") -> Study:
    """Reads a study, a file or one in the package such as ``studies/quickstart``, and checks all its profiles."""
    path = _find(name)
    try:
        raw = _mapping(yaml.load(path.read_text(encoding="utf-8"), Loader=ConfigLoader), "")
        if isinstance(raw.get("axes"), dict):
            raw["axes"] = {name: _long_axis(name, axis) for name, axis in raw["axes"].items()}
        study: Study = _read(Study, {"name": _name(path), **raw}, "")
        for each in ("full", *study.profiles):
            expect_sound(sized := in_profile(study, each))
            expect_sound_stages(sized)
            some = next(combinations(sized), None) is not None
            expect(some, "Expected `without` to leave some combinations of `axes`, got none.")
        if study.report.published:
            read_published(study.report.published, reported_axes(study))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise FederatedError(
            f"Expected {name} to be the YAML file of a study, but it cannot be read: {why}."
        ) from error
    except FederatedError as error:
        raise FederatedError(f"{str(error).removesuffix('.')}, in {path}.") from error
    return in_profile(study, profile)


def _find(name: str) -> Path:
    expect(not is_endless(name), f"Expected the YAML file of a study, got {name}, a pipe or a device.")
    if Path(name).is_file():
        return Path(name)
    shipped = name.removeprefix("configs/").removeprefix("studies/")
    return Path(find_config(f"studies/{shipped}"))


def _name(path: Path) -> str:
    """Returns the name of a study: the file name, with the folders below ``studies`` if there are any."""
    parts = path.absolute().with_suffix("").parts
    return "/".join(parts[len(parts) - parts[::-1].index("studies") :]) if "studies" in parts[:-1] else parts[-1]


def _long_axis(name: str, axis: Any) -> Any:
    """Converts the short form of an axis, one option with values, to the long form."""
    if not isinstance(axis, dict) or set(axis) != _SHORT:
        return axis
    option, values = _read(str, axis["option"], f"axes.{name}.option"), axis["values"]
    if not isinstance(values, list):
        raise _wrong(f"axes.{name}.values", "a list", values)
    axis = {name_of(_read(Any, value, f"axes.{name}.values")): {"set": {option: value}} for value in values}
    expect(len(axis) == len(values), f"Expected `axes.{name}.values` to be different values, got {values}.")
    return axis


def _read(hint: Any, value: Any, place: str) -> Any:
    """Converts a value to the type of a type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _read_part(hint, _mapping(value, place), place)
    if hint is Any or hint is Name:
        try:
            name = name_of(value)
        except TypeError:  # a date, bytes or a set
            raise _wrong(place, "text, a number or a list or mapping of such", value) from None
        if hint is Name and isinstance(value, (list, dict)):
            raise _wrong(place, "one value", value)
        return value if hint is Any else name
    if origin is dict:
        return {
            _read(Name, key, place): _read(arguments[1], v, _at(place, key))
            for key, v in _mapping(value, place).items()
        }
    if origin is list:
        if arguments == (Name,) and not isinstance(value, (list, dict)):
            value = [value]  # one name needs no brackets
        if not isinstance(value, list):
            raise _wrong(place, "a list", value)
        return [_read(arguments[0], one, f"{place}[{index}]") for index, one in enumerate(value)]
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [one for one in arguments if one is not type(None)]  # a mapping is a dataclass or dict, if one may be
        fitting = (k for k in kinds if (is_dataclass(k) or get_origin(k) is dict) == isinstance(value, dict))
        return _read(next(fitting, kinds[0]), value, place)
    if origin is Literal:
        expect_choice(place, value, arguments)
        return value
    right = (int, float) if hint is float else hint
    if not isinstance(value, right) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(place, _WORDS.get(hint, "text"), value)
    return value


def _read_part(kind: type, raw: dict[str, Any], place: str) -> Any:
    hints, known = get_type_hints(kind), {one.name: one for one in fields(kind)}
    for key in raw:
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            meant = f"; did you mean `{_at(place, close[0])}`?" if close else ""
            raise FederatedError(f"There is no key `{_at(place, key)}`, only {', '.join(known)}{meant}")
    for name, one in known.items():
        expect(name in raw or _default(one) is not MISSING, f"Expected `{_at(place, name)}`, got none.")
    return kind(**{key: _read(hints[key], value, _at(place, key)) for key, value in raw.items()})


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(place, "a mapping", value)
    return value


def _at(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _wrong(place: str, expected: str, value: Any) -> FederatedError:
    what = f"`{place}`" if place else "a study"
    return FederatedError(f"Expected {what} to be {expected}, got {'null' if value is None else repr(value)}.")


def help_on_keys() -> str:
    """Describes every key of the file, from the docstrings of the dataclasses."""
    lines = []
    for title, kind in PARTS.items():
        told = parse(kind.__doc__ or "")
        texts = {one.arg_name: " ".join((one.description or "").split()) for one in told.params}
        lines.append(f"\n{title}: {told.short_description}")
        for one in fields(kind):
            default = _default(one)
            shown = "" if is_dataclass(default) or default in ([], {}, None, "") else f" (default: {default})"
            lines.append(f"  {one.name}: {texts[one.name]}" + (" (required)" if default is MISSING else shown))
    return "\n".join(lines)
