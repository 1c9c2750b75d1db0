"""Keeps the pictures of the pages small: PNGs of at most 256 colours, a third of what matplotlib writes.

    python docs/pictures.py

makes all below docs/ small, whatever drew them.
"""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

__all__ = ["main", "save", "shrink"]

DOCS = Path(__file__).resolve().parent
COLOURS, EXACT = 256, 64


def save(figure: Any, path: Path, **options: Any) -> None:
    """Saves a matplotlib figure as a small PNG, with options of its ``savefig``."""
    figure.savefig(path, **options)
    shrink(path)


def shrink(path: Path) -> None:
    """Gives a PNG a palette; one that has a palette stays as it is."""
    with Image.open(path) as picture:
        picture.load()
    if picture.mode == "P":
        return
    if picture.mode == "RGBA" and picture.getextrema()[-1] != (255, 255):
        small = with_clear_colours(picture)
    else:
        small = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    drawn_by = PngInfo()
    drawn_by.add_text("Software", picture.info.get("Software", ""))
    small.save(path, optimize=True, pnginfo=drawn_by)


def with_clear_colours(picture: Image.Image) -> Image.Image:
    """Gives a picture on a transparent ground a palette: its commonest colours as they are, and Pillow's for the rest.

    Of Pillow's methods only the octree knows transparency, and alone it makes one colour of two near ones.
    """
    pixels = np.asarray(picture).reshape(-1, 4)
    colours, at, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    common = colours[np.argsort(-counts, kind="stable")[:EXACT]]
    rest = picture.quantize(COLOURS - EXACT, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette = np.concatenate([common, np.array(rest.getpalette("RGBA"), np.uint8).reshape(-1, 4)])
    nearest = ((colours[:, None].astype(int) - palette) ** 2).sum(-1).argmin(1).astype(np.uint8)
    small = Image.frombytes("P", picture.size, nearest[at].tobytes())
    small.putpalette(palette.tobytes(), "RGBA")
    return small


def main() -> None:
    """Makes every picture of the pages small."""
    for path in sorted(DOCS.rglob("*.png")):
        shrink(path)


if __name__ == "__main__":
    main()
