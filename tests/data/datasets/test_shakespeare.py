"""Shakespeare: three forms of its files, windows that are not stored, the division by time, and the real files."""

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fed.data import IID, FederatedDataModule, Shakespeare, TensorSource
from lightning_fed.data.batch_sources import LoaderSource
from lightning_fed.data.datasets.leaf import by_time
from lightning_fed.data.readers.plays import LETTERS, UNKNOWN, TextWindows, decode, encode, read_plays, read_roles
from lightning_fed.errors import FederatedError
from tests.user_files import write_leaf

PLAYS = """==== The First Play ====

KING:
A line to the {A}
 and another   one

First Fool:
only this line

==== The Second Play ====

KING:
The same name,

Queen::
one

KING:
another king.

QUEEN:
two
"""


def text_of(seed: int, length: int) -> str:
    return decode(np.random.default_rng(seed).integers(0, 80, length))


def chained(text: str, rows: list[int] | None = None) -> dict[str, Any]:
    """What LEAF stores of a text: every window, or some of them, and the character after it."""
    rows = list(range(len(text) - 80)) if rows is None else rows
    return {"x": [text[row : row + 80] for row in rows], "y": [text[row + 80] for row in rows]}


def samples(dataset: Any) -> list[tuple[str, str]]:
    inputs, targets = next(iter(DataLoader(dataset, len(dataset))))
    return [(decode(window), LETTERS[target]) for window, target in zip(inputs, targets.tolist(), strict=True)]


def test_letters_are_leafs() -> None:
    assert (len(LETTERS), len(set(LETTERS)), UNKNOWN) == (80, 80, 80)
    assert encode(LETTERS).tolist() == list(range(80))
    assert encode("$~\x7fé€\U0001f3ad\ud800A").tolist() == [80] * 7 + [LETTERS.index("A")]
    assert decode(encode("To be, or not $")) == "To be, or not \N{REPLACEMENT CHARACTER}"
    assert encode("").tolist() == []


def test_windows_are_the_text(tmp_path: Path) -> None:
    text = text_of(0, 100)
    path = write_leaf(tmp_path / "roles.json", {"A": {"raw": text}, "B": {"raw": text_of(1, 81)}})
    data = Shakespeare(path, test_fraction=0.0, split_seed=0)
    datasets = data.load_datasets()
    assert isinstance(datasets.train, TextWindows)
    assert datasets.test is None
    assert samples(datasets.train)[:20] == [(text[i : i + 80], text[i + 80]) for i in range(20)]
    assert datasets.users.tolist() == [0] * 20 + [1]
    assert (data.input_shape, data.num_classes, data.split.sizes.tolist()) == ((80,), 81, [20, 1])
    assert data.class_counts().sum(axis=0)[LETTERS.index(text[80])] > 0


def test_both_paths_give_the_same_batches(tmp_path: Path) -> None:
    path = write_leaf(tmp_path / "roles.json", {name: {"raw": text_of(i, 1600)} for i, name in enumerate("ABC")})
    options: dict[str, Any] = {
        "path": path,
        "batch_size": 100,
        "eval_batch_size": 7,
        "val_fraction": 0.2,
        "split_seed": 0,
    }
    near, far = Shakespeare(**options), Shakespeare(in_memory=False, **options)
    sources = near.train_source(), far.train_source()
    assert [type(source) for source in sources] == [TensorSource, LoaderSource]
    for client in range(3):
        order = torch.randperm(int(near.split.sizes[client]), generator=torch.Generator().manual_seed(client))
        pairs = list(zip(*(source.batches(client, order, seed=0) for source in sources), strict=True))
        assert len(pairs) == -(-len(order) // 100) > 10
        for one, other in pairs:
            assert [part.dtype for part in one] == [part.dtype for part in other] == [torch.int64] * 2
            assert all(map(torch.equal, one, other))
    for stage in ("val", "test"):
        loaders = [getattr(data, f"{stage}_dataloader")() for data in (near, far)]
        assert isinstance(loaders[1], DataLoader)
        assert len(loaders[0]) == len(loaders[1]) > 1
        for one, other in zip(*loaders, strict=True):
            assert all(map(torch.equal, one, other))


def test_windows_are_not_stored() -> None:
    windows = TextWindows(torch.zeros(100_080, dtype=torch.uint8), torch.arange(100_000, dtype=torch.int32))
    stored = sum(tensor.numel() * tensor.element_size() for tensor in (*windows.tensors, windows.convert_inputs.text))
    assert stored < 14 * len(windows)
    data = FederatedDataModule(windows, num_clients=2, split_seed=0)
    assert data.memory == stored, "with the text"
    assert FederatedDataModule(windows, num_clients=2, split_seed=0, in_memory=False).memory is None


@pytest.mark.parametrize(("starts", "refused"), [([0, 4], False), ([], False), ([-1, 3], True), ([0, 5], True)])
def test_windows_lie_within_the_text(starts: list[int], refused: bool) -> None:
    text, places = torch.arange(10, dtype=torch.uint8), torch.tensor(starts, dtype=torch.int32)
    if not refused:
        samples = list(TextWindows(text, places, 5))
        assert [(x.tolist(), int(y)) for x, y in samples] == [(list(range(s, s + 5)), s + 5) for s in starts]
        return
    with pytest.raises(FederatedError) as error:
        TextWindows(text, places, 5)
    assert str(error.value).startswith("Expected windows of 5 tokens to begin at 0 to 4 in a text of 10, got `starts` ")


def test_the_test_windows_are_later_and_share_no_character(tmp_path: Path) -> None:
    texts = {name: text_of(0, length) for name, length in {"A": 1000, "B": 85, "C": 81, "D": 900}.items()}
    path = write_leaf(tmp_path / "roles.json", {name: {"raw": text} for name, text in texts.items()})
    datasets = Shakespeare(path, test_fraction=0.1).load_datasets()
    sizes = np.bincount(datasets.users).tolist()
    assert sizes == [828, 4, 1, 738]
    assert isinstance(datasets.test, TextWindows)
    later = samples(datasets.test)
    # A has 920 windows: 0 to 827 read characters up to 907, so the first test window is 908.
    expected = [
        (t[i : i + 80], t[i + 80])
        for t, first in ((texts["A"], 908), (texts["D"], 818))
        for i in range(first, len(t) - 80)
    ]
    assert later == expected
    assert len(later) == 12 + 2


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_by_time(fraction: float) -> None:
    for count in (1, 2, 79, 162, 1000):
        train, test = by_time(np.arange(count), fraction)
        assert len(train) == max(1, round((1 - fraction) * count))
        assert test.tolist() == list(range(len(train) + 80, count))


def test_leafs_files(tmp_path: Path) -> None:
    """Consecutive windows are joined; others, as LEAF's random division leaves them, are stored apart."""
    first, second = text_of(0, 300), text_of(1, 200)
    kept = [0, 1, 2, 5, 6, 9, 100, 219]
    write_leaf(tmp_path / "train" / "a.json", {"A": chained(first, kept), "B": chained(second)})
    write_leaf(tmp_path / "test" / "a.json", {"A": chained(first, [50]), "C": chained(second, [3, 4])})
    datasets = Shakespeare(tmp_path).load_datasets()
    assert isinstance(datasets.train, TextWindows)
    expected = [(first[i : i + 80], first[i + 80]) for i in kept] + [
        (second[i : i + 80], second[i + 80]) for i in range(120)
    ]
    assert samples(datasets.train) == expected
    assert datasets.users.tolist() == [0] * 8 + [1] * 120
    assert len(datasets.train.convert_inputs.text) == (5 * 80 + 8) + 200
    assert isinstance(datasets.test, dict)
    assert samples(datasets.test["test"]) == [(first[50:130], first[130])]
    assert samples(datasets.test["unseen"]) == [(second[i : i + 80], second[i + 80]) for i in (3, 4)]


def test_leafs_training_files_alone_are_divided_by_time(tmp_path: Path) -> None:
    text = text_of(0, 1080)
    write_leaf(tmp_path / "train" / "a.json", {"A": chained(text)})
    datasets = Shakespeare(tmp_path).load_datasets()
    assert isinstance(datasets.test, TextWindows)
    assert len(datasets.users) == 900
    assert samples(datasets.test) == [(text[i : i + 80], text[i + 80]) for i in range(980, 1000)]


def test_windows_that_are_not_consecutive_are_not_divided_by_time(tmp_path: Path) -> None:
    windows = chained(text_of(0, 1080))
    write_leaf(tmp_path / "train" / "a.json", {"A": {key: values[::5] for key, values in windows.items()}})
    with pytest.raises(FederatedError, match="Expected consecutive windows .* `--data.test_fraction 0`"):
        Shakespeare(tmp_path).load_datasets()
    assert Shakespeare(tmp_path, test_fraction=0.0).load_datasets().test is None


def test_the_hash_tells_which_roles_were_drawn(tmp_path: Path) -> None:
    write_leaf(tmp_path / "train" / "a.json", {name: chained(text_of(i, 1080)) for i, name in enumerate("ABCDEF")})
    hashes = {Shakespeare(tmp_path, num_clients=3, draw_seed=seed, split_seed=0).split_hash for seed in range(4)}
    assert len(hashes) == 4


def test_plays(tmp_path: Path) -> None:
    (tmp_path / "plays.txt").write_text(PLAYS)
    roles = read_plays(tmp_path / "plays.txt", min_lines=1)
    assert {role.name: decode(role.codes) for role in roles} == {
        "THE_FIRST_PLAY_KING": "A line to the \N{REPLACEMENT CHARACTER}A} and another one",
        "THE_FIRST_PLAY_FIRST_FOOL": "only this line",
        "THE_SECOND_PLAY_KING": "The same name, another king.",
        "THE_SECOND_PLAY_QUEEN": "one two",
    }
    two = read_plays(tmp_path / "plays.txt", min_lines=2)
    assert [role.name for role in two] == ["THE_FIRST_PLAY_KING", "THE_SECOND_PLAY_KING", "THE_SECOND_PLAY_QUEEN"]
    assert all(len(role.starts) == 0 for role in two)


def test_roles_are_chosen(tmp_path: Path) -> None:
    path = write_leaf(tmp_path / "roles.json", {f"R{i}": {"raw": text_of(i, 90 + 10 * i)} for i in range(10)})
    options: dict[str, Any] = {"path": path, "test_fraction": 0.0, "split_seed": 0}
    assert Shakespeare(**options).split.sizes.tolist() == [10 * i for i in range(1, 11)]
    assert Shakespeare(min_samples=80, **options).split.sizes.tolist() == [80, 90, 100]
    assert Shakespeare(max_samples=35, **options).split.sizes.tolist() == [10, 20, 30] + [35] * 7
    drawn = [Shakespeare(num_clients=4, draw_seed=seed, **options).split.sizes.tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(sizes == sorted(set(sizes)) and len(sizes) == 4 for sizes in drawn)
    mixed = Shakespeare(num_users=4, partitioner=IID(), num_clients=2, **options)
    assert int(mixed.split.sizes.sum()) == sum(drawn[0])


def test_the_real_files(shakespeare_root: Path) -> None:
    """Both forms of the same plays hold the same text, role by role, and as many windows as their source says."""
    folder = shakespeare_root / "shakespeare"
    roles = {role.name: role for role in read_roles(folder / "by_role.json.gz")}
    assert len(roles) == 1154
    assert sum(len(role.starts) for role in roles.values()) == 4_219_210
    every = read_plays(folder / "plays.txt.gz", min_lines=1)
    assert len(every) == 1338
    plays = read_plays(folder / "plays.txt.gz")
    assert len(plays) == 1227
    spoken = {role.name: role for role in plays if len(role.starts)}
    assert spoken.keys() == roles.keys()
    assert all(np.array_equal(spoken[name].codes, roles[name].codes) for name in roles)
    unknown = sum(int((role.codes == UNKNOWN).sum()) for role in roles.values())
    assert unknown == 1  # a dollar sign
    import gzip
    import re

    titles = re.findall(r"^=+ .* =+$", gzip.decompress((folder / "plays.txt.gz").read_bytes()).decode(), re.MULTILINE)
    assert len(titles) == len(set(titles)) == 37


def test_the_module_of_the_real_file(shakespeare_root: Path) -> None:
    data = Shakespeare(root=shakespeare_root, split_seed=0)
    assert data.split.num_clients == 1154
    datasets = data.load_datasets()
    assert isinstance(datasets.test, TextWindows)
    assert isinstance(datasets.train, TextWindows)
    assert (len(datasets.train), len(datasets.test)) == (3_797_270, 353_658)
    drawn = Shakespeare(root=shakespeare_root, num_clients=134, draw_seed=22, test_fraction=0.0, split_seed=0)
    assert drawn.split_summary()["samples"] == 420_644


@pytest.mark.parametrize(
    ("user_data", "changes", "words"),
    [
        ({"A": {"raw": "a" * 100}}, {"num_samples": [21]}, "Expected 21 samples of user A in "),
        ({"A": {"raw": "a" * 80}}, {}, "Expected users with samples in "),
        ({"A": {"raw": 5}}, {"num_samples": [1]}, "user A of "),
        ({"A": {"text": "a" * 99}}, {"num_samples": [1]}, "got text: write"),
        ({"A": {"x": ["a" * 79], "y": ["b"]}}, {}, "Expected samples of 80 characters"),
        ({"A": {"x": ["a" * 80], "y": ["bc"]}}, {}, "got 'bc'"),
        ({"A": {"x": [[1] * 80], "y": ["b"]}}, {}, "got '[1.0, 1"),
        ({"A": {"x": ["a" * 80, "b" * 80], "y": ["b"]}}, {}, "x and y of the same length, got x, y"),
    ],
)
def test_json_that_does_not_fit(tmp_path: Path, user_data: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    path = write_leaf(tmp_path / "roles.json", user_data, **changes)
    with pytest.raises(FederatedError) as caught:
        Shakespeare(path).setup()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("No speaker here\nand a line", "got 'No speaker here'"),
        ("KING:\n" + "a" * 99, "Expected roles with at least 1"),
    ],
)
def test_plays_that_do_not_fit(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "plays.txt").write_text(content)
    with pytest.raises(FederatedError) as caught:
        Shakespeare(tmp_path / "plays.txt").setup()
    assert words in str(caught.value)


def test_plays_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plays.txt.gz"
    packed = bytearray(gzip.compress(PLAYS.encode()))
    packed[20:40] = bytes(20)
    for content in (b"no gzip", bytes(packed), gzip.compress(b"\xff\xfe")):
        path.write_bytes(content)
        with pytest.raises(FederatedError, match="cannot be read as text"):
            Shakespeare(path).setup()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FederatedError, match="cannot be read as text .*no regular file"):
        Shakespeare(path).setup()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clients": 4}, "`--data.num_clients` to be at most 3"),
        ({"min_samples": 0}, "`--data.min_samples`"),
        ({"max_samples": 0}, "`--data.max_samples`"),
        ({"min_lines": 0}, "`--data.min_lines`"),
        ({"test_fraction": 1.0}, "`--data.test_fraction`"),
        ({"min_samples": 999}, "lower `--data.min_samples`"),
        ({"path": "nowhere.json"}, "Expected the file or folder "),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    path = write_leaf(tmp_path / "roles.json", {name: {"raw": text_of(0, 100)} for name in "ABC"})
    with pytest.raises(FederatedError) as caught:
        Shakespeare(**{"path": path, **options}).setup()
    assert words in str(caught.value)
