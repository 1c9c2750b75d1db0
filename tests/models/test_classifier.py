from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.errors import FederatedError
from lightning_fed.models import ImageClassifier, LeNet, LogisticRegression


def trainer(tmp_path: Path, **kwargs) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    return Trainer(accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **quiet, **kwargs)


def data(num_samples: int, seed: int = 0, features: int = 4, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, features, generator=generator)
    return TensorDataset(x, torch.randint(classes, (num_samples,), generator=generator))


def small() -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(LogisticRegression(4, num_classes=3), num_classes=3)


def test_training_step_is_cross_entropy() -> None:
    model = small()
    x, y = data(5).tensors
    expected = -model.backbone(x).log_softmax(1)[torch.arange(5), y].mean()
    torch.testing.assert_close(model.training_step([x, y], 0), expected)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_is_exact_over_uneven_batches(tmp_path: Path, stage: str) -> None:
    model, dataset = small(), data(7)
    run = trainer(tmp_path)
    evaluate = run.validate if stage == "val" else run.test
    (metrics,) = evaluate(model, DataLoader(dataset, batch_size=3), verbose=False)
    x, y = dataset.tensors
    logits = model(x)
    assert set(metrics) == {f"{stage}/loss", f"{stage}/acc"}
    assert metrics[f"{stage}/acc"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert metrics[f"{stage}/loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-6)


def test_predictions_are_probabilities_with_and_without_labels(tmp_path: Path) -> None:
    model, dataset = small(), data(5)
    batches = trainer(tmp_path).predict(model, DataLoader(dataset, batch_size=5))
    assert batches is not None
    torch.testing.assert_close(batches[0], model(dataset.tensors[0]).softmax(1))
    torch.testing.assert_close(model.predict_step(dataset.tensors[0], 0), batches[0])
    torch.testing.assert_close(batches[0].sum(1), torch.ones(5))


def test_it_learns_under_the_stock_trainer(tmp_path: Path) -> None:
    model = ImageClassifier(LogisticRegression(4, 3), num_classes=3, optimizer=lambda params: SGD(params, lr=0.5))
    x = data(60).tensors[0]
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(dataset, batch_size=10)
    trainer(tmp_path, max_epochs=20).fit(model, loader, loader)
    assert (model(x).argmax(1) == dataset.tensors[1]).float().mean() > 0.8


def test_optimizer_is_fresh_each_time_and_defaults_to_sgd() -> None:
    model = small()
    first, second = model.configure_optimizers(), model.configure_optimizers()
    assert isinstance(first, SGD)
    assert first is not second
    assert first.defaults["lr"] == 0.01
    assert first.defaults["momentum"] == 0
    assert [id(p) for p in first.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_schedulers() -> None:
    backbone = LogisticRegression(4)
    step = ImageClassifier(backbone, lr_scheduler=lambda optimizer: StepLR(optimizer, 3)).configure_optimizers()
    assert isinstance(step["lr_scheduler"]["scheduler"], StepLR)
    assert step["lr_scheduler"]["scheduler"].optimizer is step["optimizer"]
    assert "monitor" not in step["lr_scheduler"]
    plateau = ImageClassifier(
        backbone, optimizer=Adam, lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, monitor="val/loss")
    ).configure_optimizers()
    assert isinstance(plateau["optimizer"], Adam)
    assert plateau["lr_scheduler"]["monitor"] == "val/loss"


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_what_makes_no_optimizer_is_refused(name: str) -> None:
    made = SGD([torch.zeros(1, requires_grad=True)])
    for wrong in (made, None) if name == "optimizer" else (made,):
        with pytest.raises(
            FederatedError, match=rf"^Expected `--model\.{name}` to be .* got {type(wrong).__name__}\.$"
        ):
            ImageClassifier(LogisticRegression(4), **{name: wrong})


@pytest.mark.parametrize("num_classes", [2, 11])
def test_another_number_of_classes_than_the_backbone_is_refused(num_classes: int) -> None:
    model = ImageClassifier(LeNet(), num_classes=num_classes)
    with pytest.raises(FederatedError, match=r"LeNet .*--model\.num_classes"):
        model.training_step([torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long)], 0)


def test_state_dict_holds_the_backbone_only() -> None:
    assert list(small().state_dict()) == ["backbone.linear.weight", "backbone.linear.bias"]


def test_checkpoint_of_a_python_model_loads_with_its_backbone(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "model.ckpt"
    run = trainer(tmp_path)
    run.strategy.connect(model)
    run.save_checkpoint(path, weights_only=True)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"num_classes": 3}
    loaded = ImageClassifier.load_from_checkpoint(path, backbone=LogisticRegression(4, num_classes=3))
    assert loaded.num_classes == 3
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
