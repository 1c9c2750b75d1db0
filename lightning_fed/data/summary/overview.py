"""The data and their split in a few lines of text."""

from typing import Any

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.evaluation import num_samples

__all__ = ["facts", "overview"]

_MEBIBYTE = 2**20


def overview(datamodule: FederatedDataModule) -> str:
    """Describes data and split, one named fact per line."""
    lines = facts(datamodule)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{line}" for name, line in lines.items())


def facts(datamodule: FederatedDataModule) -> dict[str, str]:
    """Returns facts about data and split, by name."""
    figures: dict[str, Any] = datamodule.split_summary()
    shape, classes = datamodule.input_shape, datamodule.num_classes
    described = "without a shape" if shape is None else " × ".join(map(str, shape)) or "a number"
    lines = {
        "data": f"{type(datamodule.source or datamodule).__name__}, split by {datamodule.split_by}",
        "input": described if classes is None else f"{described}, {classes} classes",
        "clients": f"{figures['clients']}, {figures['clients_empty'] or 'none'} of them empty",
        "training samples": f"{figures['samples']}",
        "samples per client": _spread(figures, "samples_per_client"),
    }
    if "label_entropy_mean" in figures:
        lines["classes per client"] = _spread(figures, "classes_per_client")
        lines["label entropy"] = (
            f"{figures['label_entropy_mean']:.3f} bits, mean over clients; {figures['label_entropy_pooled']:.3f} for "
            "all together"
        )
    if "label_divergence_mean" in figures:
        pairs = figures["label_divergence_pairs"]
        holding = figures["clients"] - figures["clients_empty"]
        sampled = "" if pairs == holding * (holding - 1) // 2 else ", drawn at random"
        lines["label divergence"] = (
            f"{figures['label_divergence_mean']:.3f} bits, Jensen-Shannon, mean over {pairs} pairs of clients{sampled}"
        )
    lines |= _evaluation(datamodule)
    memory = datamodule.memory
    lines["memory"] = "read one by one" if memory is None else f"{memory / _MEBIBYTE:.1f} MiB of training tensors"
    return lines | {"hash": datamodule.split_hash}


def _spread(figures: dict[str, Any], name: str) -> str:
    """Describes a number by its smallest, median and largest value."""
    low, median, high = (figures[f"{name}_{which}"] for which in ("min", "median", "max"))
    return f"{low} to {high}, median {median:g}" if low < high else f"{low}"


def _evaluation(datamodule: FederatedDataModule) -> dict[str, str]:
    """Counts the samples of validation and test sets."""
    lines = {}
    for name, loaders in (("validation", datamodule.val_dataloader()), ("test", datamodule.test_dataloader())):
        if isinstance(loaders, list):
            loaders = {str(number): loader for number, loader in enumerate(loaders)}
        named = loaders if isinstance(loaders, dict) else {"": loaders}
        for part, loader in named.items():
            known = hasattr(loader, "num_samples") or hasattr(getattr(loader, "dataset", None), "__len__")
            lines[f"{name} {part}".strip()] = f"{num_samples(loader)} samples" if known else f"{len(loader)} batches"
    return lines
