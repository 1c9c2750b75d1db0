"""Says a line again only when it has changed, keeps lines printable, and gives objects a form for notebooks."""

from importlib import import_module

__all__ = ["ShownInNotebooks", "is_news", "one_line"]

_SAID: dict[str, object] = {}


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
        # Imported by name and only here, so that training does not wait for the lab to load.
        return str(import_module("lightning_fed.lab.notebook").html(self))
