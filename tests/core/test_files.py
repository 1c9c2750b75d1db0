"""Files are opened only if reading them ends."""

import os
from pathlib import Path

import pytest

from lightning_fed.core.files import open_regular, read_regular


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [_pipe, _endless, _large, Path.mkdir])
def test_what_is_no_file_or_too_large_is_refused_before_it_is_read(make, tmp_path):
    make(tmp_path / "run.json")
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="run.json"):
        read_regular(tmp_path / "run.json")
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"
    with open_regular(tmp_path / "link", limit=7) as file:
        assert file.read() == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        open_regular(tmp_path / "link", limit=6)
