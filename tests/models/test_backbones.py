import pytest
import torch
from torch import nn

from lightning_fed.errors import FederatedError
from lightning_fed.models import CNN, MLP, LeNet, LogisticRegression, ResNet18


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("backbone", "shape", "parameters"),
    [
        (LeNet(), (1, 28, 28), 61_706),
        # First convolution 3 * 6 * 25 + 6, first linear layer 16 * 6 * 6 * 120 + 120.
        (LeNet(100, in_channels=3, image_size=32), (3, 32, 32), 456 + 2_416 + 69_240 + 10_164 + 8_500),
        (LeNet(image_size=12), (1, 12, 12), 156 + 2_416 + (16 * 120 + 120) + 10_164 + 850),
        # 16 * 25 + 16, 32 * 16 * 25 + 32, then 32 maps of 4x4 to 47 classes.
        (CNN(47), (1, 28, 28), 416 + 12_832 + 24_111),
        # The convolutional network of McMahan et al., AISTATS 2017, who state its number of parameters.
        (CNN(channels=[32, 64], padding=2, hidden=[512]), (1, 28, 28), 1_663_370),
        (CNN(in_channels=3, image_size=32, hidden=(64, 32)), (3, 32, 32), 1_216 + 12_832 + 51_264 + 2_080 + 330),
        (CNN(channels=(4,), kernel_size=3, image_size=4), (1, 4, 4), 40 + 50),
        (MLP(784), (1, 28, 28), 784 * 200 + 200 + 200 * 10 + 10),
        (MLP(64, hidden=[32, 16], num_classes=5), (1, 8, 8), 64 * 32 + 32 + 32 * 16 + 16 + 16 * 5 + 5),
        (MLP(64, hidden=()), (64,), 650),
        (MLP(64, hidden=(32, 16), norm="layer"), (64,), 64 * 32 + 32 + 2 * 32 + 32 * 16 + 16 + 2 * 16 + 170),
        (LogisticRegression(784), (1, 28, 28), 7_850),
        # Stem, stages of 64, 128, 256 and 512 channels (weights, then pairs of normalisations), linear layer.
        (
            ResNet18(),
            (3, 32, 32),
            (1_728 + 128)
            + (4 * 36_864 + 4 * 128)
            + (73_728 + 3 * 147_456 + 8_192 + 5 * 256)
            + (294_912 + 3 * 589_824 + 32_768 + 5 * 512)
            + (1_179_648 + 3 * 2_359_296 + 131_072 + 5 * 1_024)
            + 5_130,
        ),
        (ResNet18(100, in_channels=1, groups=32), (1, 8, 8), 11_173_962 - 1_152 + 90 * 513),
    ],
    ids=[
        "lenet",
        "lenet-colour",
        "lenet-smallest",
        "cnn",
        "cnn-mcmahan",
        "cnn-deep",
        "cnn-smallest",
        "mlp",
        "mlp-deep",
        "mlp-none",
        "mlp-norm",
        "logistic",
        "resnet",
        "resnet-grey",
    ],
)
def test_parameters_and_output_shape(backbone: nn.Module, shape: tuple[int, ...], parameters: int) -> None:
    assert count(backbone) == parameters
    logits = backbone(torch.randn(3, *shape))
    assert logits.ndim == 2
    assert len(logits) == 3
    assert count(backbone) == sum(v.numel() for v in backbone.state_dict().values())


def test_lenet_is_the_network_of_its_docstring() -> None:
    net = LeNet()
    conv1, conv2, fc1, fc2, fc3 = (m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    x = torch.rand(2, 1, 28, 28)
    pool = nn.functional.max_pool2d
    hidden = pool(conv2(pool(conv1(x).relu(), 2)).relu(), 2).flatten(1)
    torch.testing.assert_close(net(x), fc3(fc2(fc1(hidden).relu()).relu()))


def test_cnn_is_the_network_of_its_docstring() -> None:
    net = CNN(5, channels=(3, 4), padding=1, hidden=(7,))
    conv1, conv2, fc1, fc2 = (m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    x = torch.rand(2, 1, 28, 28)
    functional = nn.functional
    maps = functional.max_pool2d(functional.conv2d(x, conv1.weight, conv1.bias, padding=1).relu(), 2)
    maps = functional.max_pool2d(functional.conv2d(maps, conv2.weight, conv2.bias, padding=1).relu(), 2)
    hidden = (maps.reshape(2, 4 * 5 * 5) @ fc1.weight.T + fc1.bias).relu()
    torch.testing.assert_close(net(x), hidden @ fc2.weight.T + fc2.bias)


def test_logistic_regression_is_linear() -> None:
    net = LogisticRegression(4, num_classes=3)
    x = torch.rand(2, 1, 2, 2)
    torch.testing.assert_close(net(x), x.reshape(2, 4) @ net.linear.weight.T + net.linear.bias)


def by_hand(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A basic block: two convolutions with normalisation, beside the input or a 1x1 convolution of it."""
    stride = block.conv1.stride
    hidden = block.bn1(nn.functional.conv2d(x, block.conv1.weight, stride=stride, padding=1)).relu()
    shortcut = x if block.downsample is None else block.downsample(x)
    return (block.bn2(nn.functional.conv2d(hidden, block.conv2.weight, padding=1)) + shortcut).relu()


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet_is_the_network_of_its_docstring(norm) -> None:
    net = ResNet18(5, norm=norm, groups=4)
    kind = nn.GroupNorm if norm == "group" else nn.BatchNorm2d
    norms = [m for m in net.modules() if isinstance(m, (nn.GroupNorm, nn.BatchNorm2d))]
    assert len(norms) == 20
    assert all(type(m) is kind for m in norms)
    assert norm == "batch" or {m.num_groups for m in norms} == {4}
    net.eval()
    x, parts = torch.rand(2, 3, 16, 16), net.layers
    maps = parts.bn1(nn.functional.conv2d(x, parts.conv1.weight, padding=1)).relu()
    for stage in (parts.layer1, parts.layer2, parts.layer3, parts.layer4):
        for block in stage:
            maps = by_hand(block, maps)
    assert maps.shape == (2, 512, 2, 2)  # three stages halve the side
    torch.testing.assert_close(net(x), parts.fc(maps.mean(dim=(2, 3))))


@pytest.mark.parametrize(
    "make",
    [LeNet, CNN, lambda: MLP(64), lambda: LogisticRegression(64), ResNet18],
    ids=["lenet", "cnn", "mlp", "log", "resnet"],
)
def test_initialisation_follows_the_seed(make) -> None:
    def initial(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make().parameters())

    assert torch.equal(initial(0), initial(0))
    assert not torch.equal(initial(0), initial(1))


@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (LeNet, (2, 3, 28, 28), ["LeNet", "(2, 3, 28, 28)", "--model.backbone.in_channels"]),
        (LeNet, (2, 1, 32, 32), ["LeNet", "(2, 1, 32, 32)", "--model.backbone.image_size"]),
        (LeNet, (2, 784), ["LeNet", "(2, 784)"]),
        (CNN, (2, 3, 28, 28), ["CNN", "(2, 3, 28, 28)", "--model.backbone.in_channels"]),
        (CNN, (2, 28, 28), ["CNN", "(B, 1, 28, 28)", "(2, 28, 28)"]),
        (lambda: MLP(784), (2, 1, 8, 8), ["MLP", "expected 784", "--model.backbone.in_features 64"]),
        (lambda: LogisticRegression(4), (2, 5), ["LogisticRegression", "--model.backbone.in_features 5"]),
        (lambda: LogisticRegression(4), (4,), ["LogisticRegression", "(4,)"]),
        (ResNet18, (2, 1, 32, 32), ["ResNet18", "(B, 3, H, W)", "(2, 1, 32, 32)", "--model.backbone.in_channels"]),
        (ResNet18, (2, 3, 32), ["ResNet18", "(2, 3, 32)"]),
    ],
)
def test_wrong_input_shape_names_backbone_and_option(make, shape: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(FederatedError) as error:
        make()(torch.zeros(shape))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: LeNet(num_classes=0), "--model.backbone.num_classes"),
        (lambda: LeNet(in_channels=-1), "--model.backbone.in_channels"),
        (lambda: LeNet(image_size=8), "--model.backbone.image_size"),
        (lambda: CNN(num_classes=0), "--model.backbone.num_classes` of CNN to be an integer of at least 1, got 0"),
        (lambda: CNN(in_channels=0), "--model.backbone.in_channels"),
        (lambda: CNN(channels=()), "--model.backbone.channels` of CNN to be an integer of at least 1, got 0"),
        (lambda: CNN(channels=(16, 0)), "--model.backbone.channels"),
        (lambda: CNN(hidden=(0,)), "--model.backbone.hidden"),
        (lambda: CNN(kernel_size=0), "--model.backbone.kernel_size"),
        (lambda: CNN(padding=-1), "--model.backbone.padding` of CNN to be an integer of at least 0, got -1"),
        (lambda: CNN(image_size=15), "2 convolutions of 5x5 with pooling, got `--model.backbone.image_size` 15"),
        (lambda: MLP(0), "--model.backbone.in_features"),
        (lambda: MLP(64, hidden=(32, 0)), "--model.backbone.hidden"),
        (lambda: MLP(64, norm="group"), "--model.backbone.norm` of MLP to be one of none, batch, layer, got 'group'"),
        (lambda: LogisticRegression(64, num_classes=-3), "--model.backbone.num_classes"),
        (lambda: ResNet18(num_classes=0), "num_classes` of ResNet18 to be an integer of at least 1, got 0"),
        (lambda: ResNet18(in_channels=0), "--model.backbone.in_channels"),
        (lambda: ResNet18(groups=3), "--model.backbone.groups` to be a divisor of 64, got 3"),
        (lambda: ResNet18(groups=0), "--model.backbone.groups"),
        (lambda: ResNet18(norm="layer"), "--model.backbone.norm` of ResNet18 to be one of group, batch, got 'layer'"),
    ],
)
def test_impossible_sizes_are_refused(make, option: str) -> None:
    with pytest.raises(FederatedError, match=option):
        make()


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm)])
def test_normalisation_stands_before_each_relu(norm: str, kind: type[nn.Module]) -> None:
    layers = list(MLP(6, hidden=(5, 4), num_classes=3, norm=norm).layers)
    order = [nn.Flatten, nn.Linear, kind, nn.ReLU, nn.Linear, kind, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in layers] == order
