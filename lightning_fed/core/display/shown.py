"""Says a line again only when it has changed, and gives objects a form for notebooks."""

from importlib import import_module

__all__ = ["ShownInNotebooks", "is_news"]

_SAID: dict[str, object] = {}


def is_news(about: str, said: object) -> bool:
    """Tells whether something differs from what this process last said about a thing, and notes that it is said."""
    news = _SAID.get(about) != said
    _SAID[about] = said
    return news


class ShownInNotebooks:
    """An object with an HTML form, for the last line of a notebook's cell."""

    def _repr_html_(self) -> str:
        # By its name, as the command line loads it: training waits for nothing of the lab.
        return str(import_module("lightning_fed.lab.notebook").html(self))
