"""Sets the equations of the pages as MathML, which browsers draw without a script or a font from elsewhere.

A hook of mkdocs: what a fence of the language ``math`` holds is LaTeX, as on GitHub.
"""

from typing import Any

from math_core import LatexToMathML

__all__ = ["on_config", "set_equation"]

_LATEX = LatexToMathML()


def set_equation(latex: str, *_: Any, **__: Any) -> str:
    """Returns LaTeX as a block of MathML; a mistake in it ends the build."""
    return f'<div class="equation">{_LATEX.convert_with_local_state(latex, displaystyle=True)}</div>'


def on_config(config: Any) -> Any:
    """Gives the fence to the pages' Markdown."""
    fence = {"name": "math", "class": "equation", "format": set_equation}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config
