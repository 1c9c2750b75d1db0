"""FedRotMNIST: images turned by an angle that is unique to each client."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from lightning_fed.data.skews.base import DataFacts, FeatureSkew, Shown
from lightning_fed.errors import expect_number

__all__ = ["ClientRotation"]


class ClientRotation(FeatureSkew):
    """Every client turns its images by an angle of its own, counter-clockwise for a positive one.

    Our reading of FedRotMNIST, which Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023,
    name in the caption of Table 3 but do not define: like their FedCMNIST, but with angles instead of colours; the test
    set has an angle that no client has. The N + 1 angles are the middles of N + 1 equal parts of [-max_angle,
    max_angle], dealt to the clients and the test set at random, so any two differ by at least 2 max_angle / (N + 1).
    With the default a 6 does not look like a 9.

    Pixels are interpolated linearly; outside of the image all is black.

    Args:
        max_angle: Largest angle in degrees, above 0 and at most 180.
    """

    def __init__(self, max_angle: float = 45.0) -> None:
        expect_number("--data.skew.max_angle", max_angle, above=0, most=180)
        self.max_angle = max_angle
        self._places = torch.empty(0)
        self._black = torch.empty(0)

    def check(self, facts: DataFacts) -> None:
        """Refuses data that are no images of shape (C, H, W), or not in [0, 1], as their black is then unknown."""
        facts.check_images("ClientRotation", grey=False)

    def angles(self, generator: np.random.Generator) -> np.ndarray:
        """Deals the angles of all schemes in degrees, shape (num_clients + 1,), float64."""
        count = self.num_clients + 1
        return ((generator.permutation(count) + 0.5) / count * 2 - 1) * self.max_angle

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns cosine and sine of each angle, shape (num_clients + 1, 2)."""
        assert self.facts.image_shape is not None
        _, height, width = self.facts.image_shape
        # Centres of the pixels, measured in pixels from the centre of the image.
        y, x = torch.meshgrid(
            torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij"
        )
        self._places = torch.stack([x, y])
        mean, std = torch.as_tensor(self.facts.mean), torch.as_tensor(self.facts.std)
        self._black = (-mean / std).reshape(-1, 1, 1).to(torch.float32)
        radians = np.deg2rad(self.angles(generator))
        return torch.from_numpy(np.stack([np.cos(radians), np.sin(radians)], axis=1)).to(torch.float32)

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        if isinstance(scheme, Tensor):
            turns = self.table.index_select(0, scheme)[:, :, None, None]
        else:
            turns = self.table[scheme, None, :, None, None]
        (cosine, sine), (x, y), (height, width) = turns.unbind(1), self._places, inputs.shape[2:]
        # Where each pixel is read, in units of half the image, shape (1 or B, H, W, 2). Element by element and not as a
        # matrix product, whose rounding depends on the size of the batch.
        read_x = (cosine * x - sine * y) * (2 / width)
        read_y = (sine * x + cosine * y) * (2 / height)
        grid = torch.stack([read_x, read_y], dim=-1).to(inputs.dtype).expand(len(inputs), -1, -1, -1)
        black = self._black.to(inputs.dtype)
        turned = grid_sample(inputs - black, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return turned.add_(black), targets
