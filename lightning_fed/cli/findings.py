"""Reads jsonargparse's long messages into what went wrong where.

A message is a tree by indentation: keys, classes within keys, one branch per member of a union. The finding that
matters is the deepest one: the others say only why the remaining members of the union did not fit either.
"""

import re
from dataclasses import dataclass, field, replace

__all__ = ["Finding", "find"]

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"(?: element \d+)?:\s*(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':")
_CALLABLE = re.compile(r"Type .* expects a function or a callable class: ?(?P<rest>.*)")
_SUBTYPES = re.compile(r"Subtypes: \[(?P<types>.*)\]")
_TENSOR = "<class 'torch.Tensor'>"
_GIVEN = re.compile(r"Given value: (?P<value>.*)")

# Kinds in the order in which they explain more; the first pattern that fits a line decides.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern + r"(?:\. Got value: (?P<value>.*))?$"))
    for kind, pattern in (
        ("unknown option", r"Group '(?P<group>[^']+)' does not accept option '(?P<name>[^']+)'"),
        ("unknown option", r"Option '(?P<name>[^']+)' is not accepted"),
        ("missing", r"the following arguments are required: (?P<name>[^ ]+(?:, [^ ]+)*?)"),
        ("ambiguous class", r"Multiple subclasses with name (?P<name>\w+)\..*ambiguity: (?P<detail>.*?)\.?"),
        ("unknown class", r"(?:Expected a dot import path string|Unexpected import path format): (?P<name>.+)"),
        ("abstract class", r"Expected an instantiatable class, but (?:(?P<name>\S+) )?is abstract"),
        ("wrong class", r"Import path (?:(?P<name>\S+) )?does not correspond to a subclass of (?P<detail>\w+)"),
        ("wrong class", r"Expected '(?P<name>\S+)' to be a subclass of (?P<detail>\S+?)\.?"),
        ("wrong type", r"Expected an? (?P<detail>(?!path but).+?)"),
    )
)
# Lines of a union that say nothing about the mistake; any other one is what an import in the user's code raised.
_NO_REASON = ("Expected a", "Does not", "Not a valid subclass", "a class path (str)", "a dict ", "Unable to load")
_RANKS = [*dict.fromkeys(kind for kind, _ in _KINDS[:-1]), "broken import", "wrong type"]


@dataclass
class _Node:
    indent: int
    key: str | None = None
    class_path: str | None = None
    types: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: What it is, such as ``unknown class``.
        keys: Path of the option, such as (aggregator, mask).
        class_path: The class whose argument it is, None for an option of the command itself.
        name: The name given: of an option or class.
        detail: The type or class expected, or the reason.
        value: The value given, as text.
    """

    kind: str
    keys: tuple[str, ...] = ()
    class_path: str | None = None
    name: str = ""
    detail: str = ""
    value: str = ""

    @property
    def depth(self) -> tuple[int, int]:
        """How much it explains: place in the tree, then kind."""
        return len(self.keys), -_RANKS.index(self.kind)


@dataclass
class _Reader:
    stack: list[_Node] = field(default_factory=list)
    findings: list[tuple[_Node | None, Finding]] = field(default_factory=list)

    def read(self, line: str) -> None:
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        while self.stack and self.stack[-1].indent >= indent:
            self.stack.pop()
        self._read_text(text.removeprefix("- "), indent, is_member=text.startswith("- "))

    def _read_text(self, text: str, indent: int, is_member: bool) -> None:
        if match := _CALLABLE.match(text):
            text = match["rest"]
        if match := _KEY.match(text):
            self.stack.append(_Node(indent, key=match["key"]))
            text, indent = match["rest"], indent + 1
        if match := _CALLABLE.match(text):
            text = match["rest"]
        if match := _CLASS.match(text):
            self.stack.append(_Node(indent, class_path=match["path"]))
        elif (match := _SUBTYPES.match(text)) and (node := self._key_node()):
            node.types = match["types"]
        elif (match := _GIVEN.match(text)) and (node := self._key_node()):
            node.value = match["value"].split(". Got value: Namespace(")[0]
        elif text:
            self._add(text, is_member)

    def _key_node(self) -> _Node | None:
        return next((node for node in reversed(self.stack) if node.key), None)

    def _add(self, text: str, is_member: bool) -> None:
        keys = tuple(part for node in self.stack if node.key for part in node.key.split("."))
        class_path = next((node.class_path for node in reversed(self.stack) if node.class_path), None)
        if "Got value: Namespace(class_path=" in text:
            class_path = text.split("Got value: Namespace(class_path='")[1].split("'")[0]
        for kind, pattern in _KINDS:
            if match := pattern.match(text):
                parts = {name: value or "" for name, value in match.groupdict().items() if name != "group"}
                group = match.groupdict().get("group")
                self._append(Finding(kind, (*keys, *([group] if group else [])), class_path, **parts))
                return
        if class_path and self.stack[-1].class_path:
            self._append(Finding("broken import", keys, None, class_path, text))
        elif is_member and self.stack and not text.startswith(_NO_REASON):
            self._append(Finding("broken import", keys, None, "", text))

    def _append(self, finding: Finding) -> None:
        self.findings.append((self._key_node(), finding))


def find(message: str) -> Finding | None:
    """Returns the finding that explains a message best, None if the message has another form."""
    reader = _Reader()
    for line in message.splitlines():
        if line.strip():
            reader.read(line)
    # A number may also be a tensor, named by a class path: not what someone had in mind who wrote `lr: abc`.
    found = [(node, one) for node, one in reader.findings if one.kind == "wrong type" or not _may_be_tensor(node)]
    if not found:
        return None
    node, best = max(found, key=lambda entry: entry[1].depth)
    types = node.types if node and best.kind == "wrong type" else None
    value = best.value or (node.value if node and node.value else "")
    return replace(best, detail=types or best.detail, value=value)


def _may_be_tensor(node: _Node | None) -> bool:
    return node is not None and node.types is not None and _TENSOR in node.types
