"""Packets come back as they were sent, are small, and are refused if they are not whole."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.engines.fleet.packets import NAMES, pack, planted, restored, squeezed, unpack, widened
from lightning_fed.errors import FederatedError
from tests.parts import same

TENSORS = {
    "number": torch.tensor(1.5, dtype=torch.float64), "matrix": torch.arange(6.0).view(2, 3).T,
    "none": torch.empty(0, 3),
    "half": torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "flags": torch.tensor([True, False, True]),
    "counts": torch.tensor([-1, 2**60]), "complex": torch.tensor([1 + 2j]),
}  # fmt: skip


def test_a_packet_comes_back_as_it_was_sent() -> None:
    facts = {"a": [1, 0.1 + 0.2, None, "é"], "b": {"c": True}}
    data = pack(facts, TENSORS)
    again, tensors = unpack(data)
    assert again == facts
    assert same({name: value.contiguous() for name, value in TENSORS.items()}, tensors)
    assert len(data) < sum(value.nbytes for value in TENSORS.values()) + 1000


@pytest.mark.parametrize("change", [
    lambda data: data[:-1], lambda data: data + b"0", lambda data: data[:4], lambda data: b"\xff" * 16,
    lambda data: data.replace(b'"F64"', b'"F99"'), lambda data: data.replace(b"[3,2]", b"[9,2]"),
    lambda data: data.replace(b"[3,2]", b"[-3,-2]"), lambda data: data.replace(b'"__metadata__"', b'"__metaduta__"'),
])  # fmt: skip
def test_a_packet_that_is_not_whole_is_refused(change: Any) -> None:
    data = pack({}, TENSORS)
    assert change(data) != data
    with pytest.raises((FederatedError, KeyError, ValueError)):
        unpack(change(data))


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.bool), (3, torch.int64), (12, torch.int64), (13, torch.int32)])
def test_integers_take_the_bits_that_they_need(bits: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2**bits, (7, 5), generator=torch.Generator().manual_seed(bits)).to(dtype)
    packed = squeezed(values, bits)
    assert len(packed) == -(-35 * bits // 8)
    assert same([widened(packed, bits, [7, 5], NAMES[dtype])], [values])


def test_a_claim_of_more_integers_than_sent_is_refused() -> None:
    with pytest.raises(FederatedError, match="at most 63 bits"):
        widened(torch.zeros(4, dtype=torch.uint8), 8, [1 << 40], "I64")


def test_states_of_methods_come_back() -> None:
    state = {3: (1, 2.5, None), "a": [torch.ones(2), {"b": np.float64(0.1)}], "c": Counter({5: 2})}
    tensors: dict[str, Any] = {}
    facts, sent = unpack(pack({"state": planted(state, tensors, "state")}, tensors))
    again = restored(facts["state"], sent)
    assert list(again) == [3, "a", "c"]
    assert again[3] == (1, 2.5, None)
    assert torch.equal(again["a"][0], torch.ones(2))
    assert again["a"][1] == {"b": 0.1}
    assert again["c"] == {5: 2}


def test_a_state_that_is_more_than_numbers_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"got a function in state\.call: change what its `state_dict` returns"):
        planted({"call": test_states_of_methods_come_back}, {}, "state")
