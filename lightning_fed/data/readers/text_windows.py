"""Windows of a text as samples, gathered from one encoded text on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.errors import FederatedError

__all__ = ["TextWindows", "WindowGather"]


class WindowGather:
    """Gathers windows of ``length`` tokens from a text, uint8 of shape (tokens,), on the device of their starts."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __call__(self, starts: Tensor) -> Tensor:
        """Returns the windows that begin at ``starts`` (B,): shape (B, length), int64."""
        if self.text.device != starts.device:
            self.text = self.text.to(starts.device)
        # Row i of this view is the window that begins at i; only the rows asked for are copied.
        return self.text.unfold(0, self.length, 1).index_select(0, starts).long()


class TextWindows(TensorDataset):
    """A map-style data set whose sample i is ``length`` consecutive tokens of one text, and the token after them.

    The windows overlap and are not stored: beside the text a sample costs twelve bytes, its start and its target.

    Args:
        text: The encoded text, shape (tokens,), uint8, with at least ``length + 1`` tokens from every start on.
        starts: Where each window begins in it, shape (samples,), int32.
        length: Tokens in a window.
    """

    # After `convert_inputs`, which sources call on a whole batch.
    samples_are_rows = True

    def __init__(self, text: Tensor, starts: Tensor, length: int = 80) -> None:
        last = len(text) - length - 1
        if len(starts) and not 0 <= starts.min() <= starts.max() <= last:
            raise FederatedError(
                f"Expected windows of {length} tokens to begin at 0 to {last} in a text of {len(text)}, got `starts` "
                f"from {starts.min()} to {starts.max()}: leave out the others."
            )
        super().__init__(starts, text[starts.long() + length].long())
        self.convert_inputs = WindowGather(text, length)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Returns a window, shape (length,), int64, and the token after it, a scalar of type int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Returns several samples with one gather, as data loaders ask for them."""
        starts, targets = (tensor[torch.as_tensor(indices, dtype=torch.int64)] for tensor in self.tensors)
        return list(zip(self.convert_inputs(starts), targets, strict=True))
