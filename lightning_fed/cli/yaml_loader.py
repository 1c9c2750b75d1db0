"""Reads YAML safely: no duplicate keys, no numbers in base 60, no content that grows when it is read."""

import os
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader
from yaml import CollectionEndEvent, CollectionStartEvent, MappingNode, Node, ScalarNode
from yaml.error import MarkedYAMLError

from lightning_fed.core.files import read_regular
from lightning_fed.errors import FederatedError

__all__ = ["ConfigLoader", "PlainLoader", "is_endless", "read_yaml"]

_LEVELS, _ALIASED, _LETTERS = 100, 100_000, 100
_TEXT, _IN_BASE_60 = "tag:yaml.org,2002:str", ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Jsonargparse: Any = get_yaml_default_loader()  # type: ignore[no-untyped-call]  # jsonargparse's has no annotations


class PlainLoader(_Safe):  # type: ignore[misc]  # chosen at runtime
    """PyYAML's safe loader, but it refuses what would take endless time and memory.

    That is an alias inside its own value, aliases of aliases or of long texts, and thousands of nested brackets.
    """

    def __init__(self, stream: Any) -> None:
        """Reads a text; refuses one that is nested so deeply that it would overflow the stack."""
        level, self._letters = 0, len(stream)
        for event in yaml.parse(stream, Loader=_Safe) if len(stream) > _LEVELS else ():
            level += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if level > _LEVELS:
                _refuse(f"values nested more than {_LEVELS} deep", event)
        super().__init__(stream)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Makes an object of a node; refuses a value that does not fit its tag, as in ``!!int x``."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, AttributeError, TypeError):
            _refuse(f"a value that is no {node.tag.rpartition(':')[2]}", node)

    def construct_document(self, node: Node) -> Any:
        """Checks a document and makes its objects."""
        if self._measure(node, {}) > self._letters + _ALIASED:
            _refuse(f"aliases that come to more than {_ALIASED:,} values", node)
        return super().construct_document(node)

    def _measure(self, node: Node, sizes: dict[int, int]) -> int:
        """Counts the values in a node with all aliases written out, a long text as several."""
        if known := sizes.get(id(node)):
            return known
        if id(node) in sizes:
            _refuse("an alias within the value that it stands for", node)
        sizes[id(node)] = 0
        self.expect_sound(node)
        parts: list[Node] = [] if isinstance(node, ScalarNode) else node.value
        if isinstance(node, MappingNode):
            parts = [part for pair in node.value for part in pair]
        letters = len(node.value) if isinstance(node, ScalarNode) else 0
        sizes[id(node)] = 1 + letters // _LETTERS + sum(self._measure(part, sizes) for part in parts)
        return sizes[id(node)]

    def expect_sound(self, node: Node) -> None:
        """Accepts every node."""


class ConfigLoader(PlainLoader, _Jsonargparse):  # type: ignore[misc]  # jsonargparse makes the class at runtime
    """jsonargparse's loader, but it also refuses what is surely a mistake.

    Of a duplicate key YAML silently keeps the last value.
    """

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        """Returns a value's type; ``1:30`` is text, not the number 90 as in YAML 1.1."""
        tag: str = super().resolve(kind, value, implicit)
        return _TEXT if kind is ScalarNode and ":" in value and tag in _IN_BASE_60 else tag

    def expect_sound(self, node: Node) -> None:
        """Refuses a key that is there twice, and a text that nobody means."""
        if isinstance(node, MappingNode):
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
                if key.value in lines:
                    _refuse(f"the key {key.value!r} of line {lines[key.value]} again", key)
                lines[key.value] = key.start_mark.line + 1
        elif isinstance(node, ScalarNode) and "\0" in node.value:
            _refuse("a null byte", node)
        elif isinstance(node, ScalarNode) and is_endless(node.value):
            _refuse(f"{node.value!r}, a pipe or a device", node)


def read_yaml(path: str | Path) -> Any:
    """Reads a file with the plain loader; refuses what cannot be read, or is no YAML."""
    try:
        return yaml.load(read_regular(path), Loader=PlainLoader)
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).replace(' in "<byte string>",', " at").split())
        raise FederatedError(f"Expected {path} to be a file of YAML, got: {reason}.") from error


def is_endless(path: str) -> bool:
    """Says whether a text names a pipe or a device, as reading one may never end."""
    path = os.path.expanduser(path.removeprefix("file://"))  # as jsonargparse reads it
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _refuse(what: str, part: Any) -> NoReturn:
    raise MarkedYAMLError(problem=what, problem_mark=part.start_mark)
