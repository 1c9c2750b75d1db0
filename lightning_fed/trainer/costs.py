"""What a round costs: communication rounds, bytes each way, gradient evaluations."""

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.engines import Engine
from lightning_fed.trainer.lightning_names import LightningNames

__all__ = ["round_costs"]


def round_costs(trainer: LightningNames, engine: Engine, update: ReducedUpdate) -> dict[str, int]:
    """Counts what one round adds to the totals.

    Each client that entered gets the model and sends its update, which says its bytes, and what it sends besides
    (``Update.sums``): one communication round. Gradients and what methods send down have the model's length d; buffers
    travel with the model if they are averaged. An exchange before training (gradients up, their mean down) is a
    communication round of its own, however many methods use it; where nothing is sent there is none.
    Reductions, losses and counts are scalars and not counted. ``gradients`` are samples whose gradient was computed, or
    their loss alone for a rule that asks for the clients' losses.
    """
    aggregator = trainer.aggregator
    algorithms = [callback for callback in trainer.callbacks if isinstance(callback, ClientAlgorithm)]
    exchanges, by_rule = int(engine.start_gradients.exchanged), bool(aggregator.all_needs & Need.ANY_GRADIENT)
    at_start = any(algorithm.sends_gradient for algorithm in algorithms)
    at_start |= by_rule and aggregator.gradient_at == "start"
    sends_gradient = (at_start and not exchanges) + (by_rule and aggregator.gradient_at != "start")
    down = 1 + aggregator.vectors_down + sum(algorithm.vectors_down for algorithm in algorithms)
    vector = trainer.vector.numel * trainer.vector.data.element_size()
    buffers = trainer.buffers.num_bytes if trainer.buffers.policy == "average" else 0
    clients = update.num_clients
    return {
        "samples": engine.counts.samples,
        "gradients": engine.counts.samples + engine.counts.gradients,
        "comm/rounds": bool(down or sends_gradient or engine.counts.bytes_up) + exchanges if clients else 0,
        "comm/bytes_down": ((down + exchanges) * vector + buffers) * clients,
        "comm/bytes_up": engine.counts.bytes_up + ((sends_gradient + exchanges) * vector + buffers) * clients,
    }
