"""Checks of the trainer's arguments: one sentence for each mistake, before any work begins."""

from typing import Any

from lightning_fed.errors import FederatedError

__all__ = ["batch_limit", "validate_options"]


def validate_options(options: dict[str, Any]) -> None:
    """Checks the arguments of ``FederatedTrainer``.

    Args:
        options: The constructor's arguments by name.

    Raises:
        FederatedError: On the first argument that is out of range.
    """
    for name in ("max_rounds", "check_val_every_n_rounds", "accumulate_grad_batches", "num_nodes"):
        _expect_count(name, options[name])
    for name in ("local_epochs", "local_steps", "check_test_every_n_rounds"):
        if options[name] is not None:
            _expect_count(name, options[name])
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        _expect_share(name, options[name], smallest=0)
    _expect_share("clients_per_round", options["clients_per_round"], smallest=1)
    _expect_choice("gradient_clip_algorithm", options["gradient_clip_algorithm"], ("norm", "value"))
    _expect_choice("local_schedule", options["local_schedule"], ("restart", "continue"))
    _expect_choice("deterministic", options["deterministic"], (True, False, "warn"))
    clip, seed = options["gradient_clip_val"], options["seed"]
    if clip is not None and not clip >= 0:
        raise _error("gradient_clip_val", "a number of at least 0", clip)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise _error("seed", "an integer of at least 0", seed)
    if options["local_epochs"] is not None and options["local_steps"] is not None:
        raise FederatedError(
            "Expected either `--trainer.local_epochs` or `--trainer.local_steps`, got both: leave one out."
        )
    name = options["name"]
    if name is not None and (not name or name.startswith("/") or ".." in name.split("/")):
        raise _error("name", "a folder name below `--trainer.default_root_dir`", name)


def batch_limit(limit: int | float, total: int | None) -> int | None:
    """Turns a count or a fraction into a number of batches.

    Args:
        limit: A count (int) or a fraction in [0, 1] (float).
        total: Batches that the loader has, None if it does not say.

    Returns:
        The largest number of batches to run, None for no limit.
    """
    if isinstance(limit, float):
        return None if limit == 1.0 or total is None else int(limit * total)
    return limit


def _error(name: str, expected: str, value: Any) -> FederatedError:
    return FederatedError(f"Expected `--trainer.{name}` to be {expected}, got {value!r}.")


def _expect_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(name, "an integer of at least 1", value)


def _expect_share(name: str, value: Any, smallest: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= smallest
    is_share = isinstance(value, float) and 0 <= value <= 1 and (smallest == 0 or value > 0)
    if not (is_count or is_share):
        lower = "[0" if smallest == 0 else "(0"
        raise _error(name, f"a count (an integer of at least {smallest}) or a fraction in {lower}, 1]", value)


def _expect_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise _error(name, f"one of {', '.join(map(str, known))}", value)
