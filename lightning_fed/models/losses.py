"""Cross-entropy with fewer operations when many clients train at once."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["cross_entropy"]

_IGNORED = -100  # the label that torch leaves out of the mean


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of scores (B, C) and labels, int64 of shape (B,); see torch's of the same name.

    It calls torch's, except under ``torch.func.vmap``. There torch's and its gradient take 26 operations; this one
    computes the same numbers with 15.
    """
    alone = torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(scores)
    if alone or labels.shape != scores.shape[:1]:
        return F.cross_entropy(scores, labels)
    device = scores.device.type
    if scores.itemsize < 4 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        scores = scores.float()  # as autocast does for torch's
    column = labels.unsqueeze(1)
    ignored = column == _IGNORED
    picked = scores.log_softmax(1).gather(1, column.masked_fill(ignored, 0)).masked_fill(ignored, 0)
    return picked.sum() / (ignored.sum() - len(labels))
