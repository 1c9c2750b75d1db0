"""Detects what training changes in a module besides its trained parameters and buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torchmetrics import Metric

from lightning_fed.core.devices import same_values
from lightning_fed.core.train_state import TrainState, names_kept
from lightning_fed.core.user_code import is_ours, own_places
from lightning_fed.distributed.consistency import follow_first
from lightning_fed.distributed.processes import Processes
from lightning_fed.engines.trial import Attributes
from lightning_fed.errors import FederatedError

__all__ = ["HookGuard", "ModuleWatch"]

# Attributes that torch and Lightning themselves set on a module.
_NOT_OF_THE_USER = frozenset({*vars(LightningModule()), "log"})
_OF_LIBRARIES = ("torch.", "torchvision.")


class ModuleWatch:
    """Refuses parameters that were replaced, and warns of attributes that carry values from client to client.

    Attributes are compared once in a run, before and after the second client: what is made once and kept, such as a
    cache, exists by then.

    Args:
        state: What ``fit`` works on.
        compares: Whether attributes are compared at all.
    """

    def __init__(self, state: TrainState, compares: bool = True) -> None:
        self._module, self._vector = state.module, state.vector
        vector = state.vector
        self._parameters = dict(zip(vector.all_names, vector.all_parameters, strict=True))
        self._known = state.known
        self._clients = 0 if compares else 2
        self._before: Attributes | None = None

    def expect_parameters(self) -> None:
        """Refuses other parameters and buffers than ``fit`` began with: nobody would train or average them."""
        live = dict(self._module.named_parameters())
        if added := sorted(names_kept(self._module) - self._known):
            raise FederatedError(
                f"Expected {type(self._module).__name__} to keep the parameters and buffers that `fit` began with, but "
                f"`{added[0]}` was added: make it in `__init__`, `setup` or `configure_model`."
            )
        for name, parameter in self._parameters.items():
            if live.get(name) is not parameter:
                raise FederatedError(
                    f"Expected `{name}` of {type(self._module).__name__} to stay the parameter that clients train, but "
                    "it was replaced after `fit` had begun: replace it in `setup` or `configure_model`, or change its "
                    "values in place."
                )

    def guarded(self, name: str, hooks: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Wraps hooks that run after a client's training so that the user's may not write to the parameters."""
        if all(is_ours(hook) for hook in hooks):
            return hooks

        def call(*args: Any) -> None:
            before = self._vector.all_data.clone()
            for hook in hooks:
                hook(*args)
            if not (self._vector.in_place and same_values(self._vector.all_data, before)):
                raise FederatedError(
                    f"Expected `{name}` to leave the parameters of {type(self._module).__name__} as they are, but it "
                    "wrote to them after the client's update was taken: edit `update.delta` in `on_client_end` instead."
                )

        return [call]

    def start_client(self) -> None:
        """Notes the attributes before the second client trains."""
        self._clients += 1
        if self._clients == 2:
            self._before = Attributes(self._module, own_places(self._module))

    def end_client(self) -> None:
        """Warns once of attributes that it changed; lists and dicts may grow, as some collect until a round ends."""
        if self._before is None:
            return
        before, self._before = self._before, None
        own = {
            part: name
            for name, part in self._module.named_modules()
            if not (isinstance(part, Metric) or type(part).__module__.startswith(_OF_LIBRARIES))
        }
        found = {(own[owner], name) for owner, name in before.changes(may_grow=True) if owner in own}
        changed = sorted(".".join(place).lstrip(".") for place in found if place[1] not in _NOT_OF_THE_USER)
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            rank_zero_warn(
                f"A client's training changes {', '.join(f'`{name}`' for name in changed[:3])}{more} of "
                f"{type(self._module).__name__}, and the next client starts with the changed value: set it anew when "
                "`batch_idx` is 0, or keep it in a buffer (`register_buffer`), which each client has for itself."
            )


class HookGuard:
    """Checks what the user's own code writes to the module between clients.

    Changed buffers are copied into the global model. Changed parameters are refused, because clients start from
    ``trainer.weights``.
    """

    def __init__(self, state: TrainState, processes: Processes) -> None:
        self.state, self.processes, self.name = state, processes, type(state.module).__name__
        self._written = state.weights._version

    @contextmanager
    def watching(
        self, what: str, watched: bool = True, before_step: bool = False, is_global: bool = False
    ) -> Iterator[None]:
        """Watches over a block.

        Args:
            what: What runs in it.
            watched: Whether that is code of the user's own; otherwise nothing is checked.
            before_step: Whether the server's step, which sets averaged buffers anew, is still to come.
            is_global: Whether the module holds the global model, which the block leaves alone.
        """
        if not watched:
            yield
            return
        live, buffers = self.state.vector, self.state.buffers
        before = self.state.whole_model() if is_global else live.all_data.clone()
        held = buffers.live.copy()
        yield
        is_kept, changed = buffers.changed(held, (live.all_data, before))
        if not (live.in_place and (is_kept or same_values(live.all_data, self.state.whole_model()))):
            raise FederatedError(
                f"Expected {what} to leave the parameters of {self.name} unchanged, because no client would start from "
                "them: write to the global model, `trainer.weights`, instead."
            )
        if changed and before_step:
            raise FederatedError(
                f"Expected {what} not to change the buffers of {self.name}, but it wrote to `{changed[0]}`, which the "
                "server's step overwrites: write to it in `on_after_server_step`."
            )
        if changed:
            buffers.take_over(changed)
            follow_first(self.processes, [buffers.values[name] for name in changed], what)

    def take_over_start(self, resumed: bool) -> None:
        """Takes over what hooks wrote to module or global model before round 1; a resumed run ignores it."""
        state = self.state
        state.vector.refresh()
        is_kept, changed = state.buffers.changed(state.buffers.values, (state.vector.all_data, state.whole_model()))
        if resumed:
            if changed or not is_kept:
                rank_zero_info("A resumed run keeps its checkpoint's model: what hooks wrote at the start is ignored.")
            state.load_global_model()
            return
        if not is_kept:
            if state.weights._version != self._written:  # a hook wrote to the global model itself
                state.vector.data.copy_(state.weights)
            else:
                state.weights.copy_(state.vector.data)
            state.initial.copy_(state.vector.personal)
        state.buffers.take_over(changed)
        personal = [state.initial] if state.num_personal else []
        follow_first(self.processes, [state.weights, *personal, *state.buffers.values.values()], "start")
