"""Many clients at once where nobody asked for it: by which rule, and what becomes of what fails."""

from lightning_fed.engines.automatic.engine import AutomaticEngine

__all__ = ["AutomaticEngine"]
