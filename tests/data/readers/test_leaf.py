"""The reader of LEAF's JSON: what it returns, how much memory it takes, and which files it refuses."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.data.readers.leaf import leaf_users, read_leaf
from lightning_fed.errors import FederatedError
from tests.user_files import write_leaf

ANN = {"x": [[0.5, 1], [2, 3]], "y": [0, 1]}
BOB = {"x": [[4, 5.25]], "y": [7]}


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(FederatedError) as caught:
        read_leaf(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert message.count(". ") == 0
    for word in words:
        assert word in message


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files_are_merged_in_the_order_of_their_names(tmp_path: Path, suffix: str) -> None:
    write_leaf(tmp_path / f"b{suffix}", {"cid": BOB, "dan": {"x": [], "y": []}})
    write_leaf(tmp_path / f"a{suffix}", {"bob": BOB, "ann": ANN}, hierarchies=["any", "thing"])
    read = read_leaf(tmp_path)
    assert read.names == ["bob", "ann", "cid"]
    assert read.inputs.dtype == torch.float32
    assert read.inputs.tolist() == [[4, 5.25], [0.5, 1], [2, 3], [4, 5.25]]
    assert (read.labels.dtype, read.labels.tolist()) == (torch.int64, [7, 0, 1, 7])
    assert read.users.dtype == np.int64
    assert read.users.tolist() == [0, 1, 1, 2]
    chosen = read.of(np.array([1, 2]))
    assert (chosen.names, chosen.users.tolist(), chosen.labels.tolist()) == (["ann", "cid"], [0, 0, 1], [0, 1, 7])


def test_keys_may_come_in_any_order_and_with_spaces(tmp_path: Path) -> None:
    entries = {"user_data": {"ann": ANN}, "num_samples": [2], "users": ["ann"]}
    (tmp_path / "a.json").write_text(" \n" + json.dumps(entries, indent=3) + "\n")
    assert read_leaf(tmp_path).labels.tolist() == [0, 1]


def test_entries_that_leaf_leaves_behind_are_not_users(tmp_path: Path) -> None:
    """LEAF's split by sample drops a user with one sample from the list, and writes an empty entry for it."""
    write_leaf(tmp_path / "a.json", {"ann": ANN, "eve": {"x": [], "y": []}}, users=["ann"], num_samples=[2])
    assert read_leaf(tmp_path).names == ["ann"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": [2, 3]}, ["Expected 3 samples of user bob in ", "a.json", "got 1"]),
        ({"num_samples": [2]}, ["lists of the same length", "2 entries and 1 entries"]),
        ({"num_samples": None}, ["got no num_samples", "a.json"]),
        ({"user_data": None}, ["got no user_data"]),
        ({"user_data": [ANN, BOB]}, ["got no user_data by name"]),
        ({"users": "ann"}, ["lists of the same length, got str"]),
        ({"users": ["ann", "eve"]}, ["got no eve", "a.json"]),
        ({"users": [["ann"], "bob"]}, ["to be a list of names", "a.json"]),
        ({"users": ["ann", "ann"], "num_samples": [2, 2]}, ["got ann twice in users of "]),
        ({"users": ["ann"], "num_samples": [2]}, ["the users of its list only, got bob as well"]),
        ({"user_data": {"ann": ANN, "bob": {"x": [[1, 2]]}}}, ["x and y of user bob of ", "1 entries and NoneType"]),
        ({"user_data": {"ann": {"x": [[1, 2]], "y": [1, 1]}}}, ["x and y of user ann of ", "1 entries and 2 entries"]),
        ({"user_data": {"ann": [1]}}, ["x and y of user ann of ", "NoneType"]),
        ({"user_data": {"ann": {"x": [[1, 2], [1]], "y": [0, 1]}}}, ["x of user ann of ", "different lengths"]),
        ({"user_data": {"ann": {"x": [["a", "b"], [1, 2]], "y": [0, 1]}}}, ["x of user ann of ", "got text"]),
        ({"user_data": {"ann": {"x": [[None, 1], [1, 2]], "y": [0, 1]}}}, ["x of user ann of ", "other values"]),
        ({"user_data": {"ann": {"x": [[1, 2], [3, 4]], "y": [0, -1]}}}, ["y of user ann of ", "got -1"]),
        ({"user_data": {"ann": {"x": [[1, 2], [3, 4]], "y": [0, 10**30]}}}, ["y of user ann of ", f"got {10**30}"]),
        ({"user_data": {"ann": {"x": [[1, 2], [3, 4]], "y": [2**63, 0]}}}, ["y of user ann of ", f"got {2**63}"]),
        ({"user_data": {"ann": {"x": [[1, 10**30], [3, 4]], "y": [0, 1]}}}, ["x of user ann of ", "other values"]),
        ({"user_data": {"ann": {"x": [[1, 2], [3, 4]], "y": [0, 0.5]}}}, ["y of user ann of ", "got 0.5"]),
        ({"user_data": {"ann": {"x": [[1, 2], [3, 4]], "y": [0, "1"]}}}, ["y of user ann of ", "got '1'"]),
        ({"user_data": {"ann": ANN, "bob": {"x": [[1, 2, 3]], "y": [0]}}}, ["as those of ann, got (3,) in user bob"]),
    ],
)  # fmt: skip
def test_files_that_disagree(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    users = {"ann": ANN, "bob": BOB}
    if isinstance(changes.get("user_data"), dict):
        changes = {"user_data": users | changes["user_data"]}
    write_leaf(tmp_path / "a.json", users, **changes)
    refused(tmp_path, *words)


def test_a_user_twice(tmp_path: Path) -> None:
    write_leaf(tmp_path / "a.json", {"ann": ANN})
    write_leaf(tmp_path / "b.json", {"ann": ANN})
    refused(tmp_path, "got ann in ", "a.json and again in ", "b.json")
    (tmp_path / "b.json").unlink()
    text = json.dumps({"users": ["ann"], "num_samples": [2], "user_data": {"ann": ANN}})
    entry = f'"ann": {json.dumps(ANN)}'
    (tmp_path / "a.json").write_text(text.replace(entry, f"{entry}, {entry}"))
    refused(tmp_path, "got ann twice in ", "a.json")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write_leaf(tmp_path / "a.json", {"ann": ANN, "bob": BOB}).read_text()
    for length in range(len(whole)):
        (tmp_path / "a.json").write_text(whole[:length])
        refused(tmp_path, "a.json cannot be read as JSON", ": line 1 column ")
    (tmp_path / "a.json").write_text(whole + "}")
    refused(tmp_path, "Extra data: line 1 column ")


@pytest.mark.parametrize("content", [b"[1, 2]", b"{1: 2}", b"\xff\xfe", b"", b"{} {}", b'{"users" 1}'])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    refused(tmp_path, "a.json")


def test_packed_files_that_are_cut(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"users": ["ann"], "num_samples": [2], "user_data": {"ann": ANN}}).encode())
    for content in (packed[:-9], packed[:20], b"no gzip"):
        (tmp_path / "a.json.gz").write_bytes(content)
        refused(tmp_path, "a.json.gz cannot be read as JSON (")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name} cannot be read as JSON (", "no regular file")
    refused(tmp_path / name, f"{name} cannot be read as JSON (", "no regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    refused(tmp_path, "no regular file")


def test_folders_without_users(tmp_path: Path) -> None:
    refused(tmp_path, "Expected .json files in ", "--data.root")
    write_leaf(tmp_path / "a.json", {"ann": {"x": [], "y": []}})
    refused(tmp_path, "Expected users with samples in ")


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """What is not kept is freed: reading 12 files peaks where one does, at its text and arrays and one user's lists."""
    samples = (np.random.default_rng(0).integers(0, 256, (10, 784)) / 255).tolist()
    for number in range(12):
        users = {f"{number}-{user}": {"x": samples, "y": [0] * 10} for user in range(3)}
        write_leaf(tmp_path / f"{number:02d}.json", users)

    def peak(path: Path) -> int:
        tracemalloc.start()
        for user in leaf_users(path):
            user.data.clear()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    text = (tmp_path / "00.json").stat().st_size
    one = peak(tmp_path / "00.json")
    assert peak(tmp_path) < one + text / 10
    assert one < 2 * text + 3 * 10 * 784 * 4 + 1.5 * 10 * 784 * 32  # bytes and text; arrays; lists of floats
