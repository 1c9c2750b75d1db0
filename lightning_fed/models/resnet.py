"""A residual network for small images."""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from lightning_fed.errors import FederatedError, expect_choice
from lightning_fed.models.backbones import Backbone, check_counts

__all__ = ["ResNet18"]

_NARROWEST = 64  # channels of the first stage; those of the others are multiples


class ResNet18(Backbone):
    """ResNet-18 with group normalisation; 11,173,962 parameters for 10 classes of 3x32x32 images.

    torchvision's network with a stem for small images: the first convolution is 3x3 with stride 1, and no pooling
    follows it. Sources: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; with two groups in each
    group normalisation, Reddi et al., "Adaptive Federated Optimization", ICLR 2021. Batch normalisation mixes the
    statistics of clients that differ; the aggregator's option ``buffers`` says how.

    Args:
        num_classes: Number of classes, at least 1.
        in_channels: Channels of the images: 1 for grey, 3 for colour.
        norm: ``group`` or ``batch`` normalisation.
        groups: Groups of each group normalisation, a divisor of 64.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, norm: Literal["group", "batch"] = "group", groups: int = 2
    ) -> None:
        super().__init__()
        check_counts(self, num_classes=num_classes, in_channels=in_channels)
        expect_choice("--model.backbone.norm", norm, ("group", "batch"), of="ResNet18")
        if groups < 1 or _NARROWEST % groups:
            raise FederatedError(
                f"ResNet18 expected `--model.backbone.groups` to be a divisor of {_NARROWEST}, got {groups}."
            )
        # Imported here, because that takes half a second.
        from torchvision.models import resnet18

        self.in_channels = in_channels
        layer = partial(nn.GroupNorm, groups) if norm == "group" else nn.BatchNorm2d
        self.layers = resnet18(num_classes=num_classes, norm_layer=layer)
        self.layers.conv1 = nn.Conv2d(in_channels, _NARROWEST, kernel_size=3, padding=1, bias=False)
        # As torchvision initialises its own convolutions.
        nn.init.kaiming_normal_(self.layers.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.layers.maxpool = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from images (B, in_channels, H, W), refusing others."""
        # This runs in every local step: one comparison, and more only for a mistake.
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise FederatedError(
                f"ResNet18 expected images of shape (B, {self.in_channels}, H, W), got {tuple(x.shape)}: change "
                "`--model.backbone.in_channels`, or choose other data."
            )
        logits: Tensor = self.layers(x)
        return logits
