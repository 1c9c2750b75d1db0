"""Networks from images to class scores, and from characters to those of the next one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederatedError, expect_choice, expect_count

__all__ = ["Backbone", "CNN", "CharLSTM", "LeNet", "LogisticRegression", "MLP", "ResNet18", "check_counts"]

_NARROWEST = 64  # channels of the first stage; those of the others are multiples


class Backbone(nn.Module, ABC):
    """Base of the package's networks.

    With this base the command line can resolve short names (`--model.backbone MLP`). As plain `nn.Module` classes they
    would be ambiguous with classes of the same name in other packages, such as torchvision's MLP.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Computes class scores.

        Args:
            x: Images, floating tensor of shape (B, ...); windows of characters for `CharLSTM`.

        Returns:
            Unnormalised scores (logits), tensor of shape (B, num_classes).
        """


class LeNet(Backbone):
    """LeNet-5 with ReLU and max pooling; 61,706 parameters for 10 classes of 1x28x28 images.

    Two 5x5 convolutions (6 and 16 channels, the first padded by 2), each followed by 2x2 max pooling, then fully
    connected layers of 120, 84 and ``num_classes`` units. Source: LeCun et al., "Gradient-based learning applied to
    document recognition", Proceedings of the IEEE 86(11), 1998, in the variant in use for federated benchmarks.

    Args:
        num_classes: Number of classes, at least 1.
        in_channels: Channels of the images: 1 for grey, 3 for colour.
        image_size: Height and width of the images in pixels, at least 12.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        check_counts(self, num_classes=num_classes, in_channels=in_channels)
        side = (image_size // 2 - 4) // 2
        if side < 1:
            raise FederatedError(
                f"LeNet expected images of at least 12x12 pixels, got `--model.backbone.image_size` {image_size}: "
                "choose a smaller network, such as `--model.backbone MLP`."
            )
        self.in_channels = in_channels
        self.image_size = image_size
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from images (B, in_channels, image_size, image_size), refusing others."""
        _check_images(self, x, self.in_channels, self.image_size)
        logits: Tensor = self.layers(x)
        return logits


class CNN(Backbone):
    """Convolutions, each with ReLU and 2x2 max pooling, then fully connected layers; 37,359 parameters for EMNIST.

    By default two 5x5 convolutions and one fully connected layer, the kind of network that Dandi et al., "Implicit
    Gradient Alignment in Distributed and Federated Learning", AAAI 2022, train on EMNIST (47 classes of 1x28x28), with
    further layers in ``hidden`` on CIFAR-10. They state no widths. McMahan et al., AISTATS 2017, use
    ``channels=(32, 64), padding=2, hidden=(512,)``. The default is half as wide and without padding, for a simulation
    on few CPU cores: a step takes about a fifth of the time of their convolutions.

    Args:
        num_classes: Number of classes, at least 1.
        in_channels: Channels of the images: 1 for grey, 3 for colour.
        image_size: Height and width of the images in pixels.
        channels: Channels of each convolution, at least one convolution.
        kernel_size: Height and width of every convolution.
        padding: Zeros at each border before every convolution; half of ``kernel_size`` keeps the size.
        hidden: Units of each fully connected layer before the last one.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int = 28,
        channels: Sequence[int] = (16, 32),
        kernel_size: int = 5,
        padding: int = 0,
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_counts(self, num_classes=num_classes, in_channels=in_channels, kernel_size=kernel_size)
        # No convolution at all is as wrong as one without channels.
        check_counts(self, channels=min(channels, default=0), hidden=min(hidden, default=1))
        check_counts(self, least=0, padding=padding)
        self.in_channels = in_channels
        self.image_size = image_size
        layers: list[nn.Module] = []
        side = image_size
        for before, after in zip([in_channels, *channels], channels, strict=False):
            layers += [nn.Conv2d(before, after, kernel_size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
            side = (side + 2 * padding - kernel_size + 1) // 2
            self._check_side(side, len(channels), kernel_size)
        self.layers = nn.Sequential(*layers, *_fully_connected([channels[-1] * side**2, *hidden, num_classes]))

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from images (B, in_channels, image_size, image_size), refusing others."""
        _check_images(self, x, self.in_channels, self.image_size)
        logits: Tensor = self.layers(x)
        return logits

    def _check_side(self, side: int, convolutions: int, kernel_size: int) -> None:
        if side < 1:
            raise FederatedError(
                f"CNN expected images large enough for {convolutions} convolutions of {kernel_size}x{kernel_size} with "
                f"pooling, got `--model.backbone.image_size` {self.image_size}: lower `--model.backbone.kernel_size`, "
                "raise `--model.backbone.padding`, or leave out some of `--model.backbone.channels`."
            )


class MLP(Backbone):
    """A multilayer perceptron with ReLU on flattened images; no hidden layer makes it `LogisticRegression`.

    Args:
        in_features: Values per image, C * H * W.
        hidden: Units of each hidden layer.
        num_classes: Number of classes, at least 1.
        norm: Normalisation between each hidden layer and its ReLU: ``batch``, ``layer`` or ``none``.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (200,),
        num_classes: int = 10,
        norm: Literal["none", "batch", "layer"] = "none",
    ) -> None:
        super().__init__()
        smallest = min(hidden, default=1)
        check_counts(self, in_features=in_features, num_classes=num_classes, hidden=smallest)
        expect_choice("--model.backbone.norm", norm, ("none", "batch", "layer"), of="MLP")
        self.in_features = in_features
        layers = _fully_connected([in_features, *hidden, num_classes])
        if norm != "none":
            kind = nn.BatchNorm1d if norm == "batch" else nn.LayerNorm
            for at in range(len(hidden), 0, -1):  # from the last on, so that the places before stay
                layers.insert(2 * at, kind(hidden[at - 1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from inputs (B, ...) of ``in_features`` values each, refusing others."""
        _check_features(self, x, self.in_features)
        logits: Tensor = self.layers(x)
        return logits


class LogisticRegression(Backbone):
    """One linear layer on flattened images; with cross-entropy a convex problem.

    Args:
        in_features: Values per image, C * H * W.
        num_classes: Number of classes, at least 1.
    """

    def __init__(self, in_features: int, num_classes: int = 10) -> None:
        super().__init__()
        check_counts(self, in_features=in_features, num_classes=num_classes)
        self.in_features = in_features
        self.linear = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from inputs (B, ...) of ``in_features`` values each, refusing others."""
        _check_features(self, x, self.in_features)
        logits: Tensor = self.linear(x.flatten(1))
        return logits


class CharLSTM(Backbone):
    """Predicts the next character with an LSTM; 133,629 parameters for 81 characters.

    Characters become vectors of ``embedding_dim`` values and go through ``num_layers`` layers of ``hidden_size`` units.
    A linear layer makes scores from the last output. The defaults are those of Dandi et al., "Implicit Gradient
    Alignment in Distributed and Federated Learning", AAAI 2022, appendix B.5, on windows of 80 characters.

    Args:
        num_classes: Number of different characters, at least 1.
        embedding_dim: Values of each character's vector.
        hidden_size: Units of each LSTM layer.
        num_layers: LSTM layers.
    """

    def __init__(
        self, num_classes: int = 81, embedding_dim: int = 8, hidden_size: int = 100, num_layers: int = 2
    ) -> None:
        super().__init__()
        check_counts(self, num_classes=num_classes, embedding_dim=embedding_dim)
        check_counts(self, hidden_size=hidden_size, num_layers=num_layers)
        self.embedding = nn.Embedding(num_classes, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden_size, num_layers, batch_first=True)
        self.linear = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from windows of characters, int64 (B, T), T > 0, refusing others."""
        # This runs in every local step: two comparisons, and more only for a mistake.
        if x.ndim != 2 or x.dtype != torch.int64:
            raise FederatedError(
                f"CharLSTM expected windows of characters, int64 of shape (B, T), got {x.dtype} of shape "
                f"{tuple(x.shape)}: choose `--data Shakespeare` or other text, or another `--model.backbone`."
            )
        outputs, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.linear(outputs[:, -1])
        return logits


def check_counts(backbone: Backbone, least: int = 1, **counts: int) -> None:
    """Refuses options that are no integers of at least ``least``."""
    for name, count in counts.items():
        expect_count(f"--model.backbone.{name}", count, least, of=type(backbone).__name__)


def _fully_connected(sizes: Sequence[int]) -> list[nn.Module]:
    """Flattens, then goes through linear layers of these sizes with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size, next_size in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    return layers[:-1]


def _check_images(backbone: Backbone, x: Tensor, in_channels: int, image_size: int) -> None:
    # This runs in every local step, like `_check_features`.
    if x.ndim != 4 or x.shape[1] != in_channels or x.shape[2:] != (image_size, image_size):
        raise FederatedError(
            f"{type(backbone).__name__} expected images of shape (B, {in_channels}, {image_size}, {image_size}), got "
            f"{tuple(x.shape)}: change `--model.backbone.in_channels` or `--model.backbone.image_size`, or choose "
            "other data."
        )


def _check_features(backbone: Backbone, x: Tensor, in_features: int) -> None:
    # This runs in every local step: one comparison, and more only for a mistake.
    if x.ndim < 2 or x.numel() != x.shape[0] * in_features:
        features = x[0].numel() if x.ndim > 1 else 0
        raise FederatedError(
            f"{type(backbone).__name__} expected {in_features} values per image, got {features} (a batch of shape "
            f"{tuple(x.shape)}): set `--model.backbone.in_features {features}`, or choose other data."
        )


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
