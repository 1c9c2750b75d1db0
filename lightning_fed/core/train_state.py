"""What one fit works on, and how its clients train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CompileMode", "LocalOptions"]

# The modes of torch.compile.
CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class LocalOptions:
    """How clients train: the part of the trainer's options that engines read; ``FederatedTrainer`` documents each."""

    engine: Literal["sequential", "vectorized", "auto"] = "sequential"
    chunk_size: int | None = None
    compile: bool | CompileMode = False
    local_epochs: int | None = None
    local_steps: int | None = None
    local_schedule: Literal["restart", "continue"] = "restart"
    max_diverged: float = 0.0
    full_gradient_mode: Literal["eval", "train"] = "eval"
    full_gradient_batch_size: int | None = None
    full_gradient_weight_decay: bool = False
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    accumulate_grad_batches: int = 1
    deterministic: bool | Literal["warn"] = False

    @property
    def epochs(self) -> int | None:
        """Passes of a client over its data in a round, None where steps are counted."""
        return 1 if self.local_epochs is None and self.local_steps is None else self.local_epochs

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode of ``torch.compile`` for ``training_step``, None where it is not compiled."""
        return "default" if self.compile is True else self.compile or None
