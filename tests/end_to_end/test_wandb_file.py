"""The reader of offline W&B files, on files of several blocks and on those that are being written."""

import struct
import zlib

import pytest

from tests.end_to_end.wandb_file import BLOCK, FIRST, FULL, HEAD, HEADER, LAST, MIDDLE, contents


def write(records: list[bytes]) -> bytes:
    """Writes records as LevelDB's log does."""
    data = HEADER
    for record in records:
        if (left := BLOCK - len(data) % BLOCK) < HEAD:
            data += bytes(left)
        kinds = (FULL, FIRST)
        while True:
            room = BLOCK - len(data) % BLOCK - HEAD
            part, record = record[:room], record[room:]
            kind = kinds[1] if record else kinds[0]
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            kinds = (LAST, MIDDLE)
            if not record:
                break
    return data


# Where the first record ends, from the end of the first block: before, in and after the room that no head fits into.
@pytest.mark.parametrize("left", range(-3, 3 * HEAD))
def test_records_over_every_place_of_a_border(left: int) -> None:
    size = BLOCK - len(HEADER) - HEAD - left
    records = [b"a" * size, b"", b"bc" * 5, bytes(range(256)) * 300, b"d" * (2 * BLOCK - 3 * HEAD), b"e"]
    data = write(records)
    assert len(data) > 4 * BLOCK
    assert list(contents(data)) == records
    for end in (*range(len(HEADER), 60), *range(BLOCK - 30, BLOCK + 60), *range(len(data) - 60, len(data))):
        whole = list(contents(data[:end]))
        assert whole == records[: len(whole)]
        assert len(whole) < len(records)


def test_a_harmed_record_ends_the_reading() -> None:
    data = bytearray(write([b"first", b"second", b"third"]))
    data[data.index(b"second")] ^= 1
    assert list(contents(bytes(data))) == [b"first"]
