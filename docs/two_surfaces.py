"""Draws two clients' losses that share a minimum, and their mean, which is lowest elsewhere.

    python docs/two_surfaces.py

Both have a well of depth 0.4 at the same place and one of depth 1 at a place of their own, as in figure 1 of Tenison,
Francis, Rish, "Gradient-Masked Federated Optimization", 2021, which names the places and no formula.
"""

from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
from matplotlib.pyplot import subplots
from pictures import save

__all__ = ["OWN", "SHARED", "loss", "main"]

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "two-surfaces.png"
SHARED = torch.tensor([-0.5, 0.5], dtype=torch.float64)
OWN = torch.tensor([[0.5, -0.5], [-0.5, -0.5]], dtype=torch.float64)
DEPTHS, WIDTH = (0.4, 1.0), 0.3


def loss(points: Tensor, own: Tensor) -> Tensor:
    """Computes a client's loss.

    Args:
        points: θ, shape (..., 2).
        own: Where its deeper well is, shape (2,).

    Returns:
        Shape (...).
    """
    wells = [
        depth * torch.exp(-(points - at).square().sum(-1) / (2 * WIDTH**2))
        for depth, at in zip(DEPTHS, (SHARED, own), strict=True)
    ]
    return -wells[0] - wells[1]


def main() -> None:
    """Writes the picture."""
    line = torch.linspace(-1, 1, 201, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    clients = [loss(grid, own) for own in OWN]
    surfaces = {"client A": clients[0], "client B": clients[1], "their mean": (clients[0] + clients[1]) / 2}
    figure, panels = subplots(1, 3, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axes, (name, values) in zip(panels, surfaces.items(), strict=True):
        levels = axes.contourf(line, line, values, levels=torch.linspace(-1, 0, 21).tolist(), cmap="viridis")
        axes.plot(*SHARED, "w*", markersize=12)
        axes.plot(*OWN.T, "wx")
        axes.set(title=f"{name}\nlowest: {values.min():.2f}", xlabel="θ₁", aspect="equal")
    panels[0].set_ylabel("θ₂")
    figure.colorbar(levels, ax=panels, label="loss")
    save(figure, PICTURE, dpi=100)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
