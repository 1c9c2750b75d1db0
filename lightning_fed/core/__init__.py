"""What all stand on; here lines that are said once and kept printable, and the form of objects in notebooks."""

from collections.abc import Callable

__all__ = ["ShownInNotebooks", "is_news", "one_line"]

_SAID: dict[str, object] = {}

html_of: Callable[[object], str] = repr
"""Returns an object's HTML for notebooks. The laboratory has this function; the root of the package puts it here."""


def is_news(about: str, said: object) -> bool:
    """Returns whether a message differs from the last one that this process showed on a topic, and remembers it."""
    news = _SAID.get(about) != said
    _SAID[about] = said
    return news


def one_line(text: str) -> str:
    """Replaces characters that are not printable, such as line breaks and control characters, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class ShownInNotebooks:
    """An object with an HTML form, for the last line of a notebook's cell."""

    def _repr_html_(self) -> str:
        return html_of(self)
