"""The vectorized engine gives what the sequential one gives, for every model and method."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.composition.client_parts import CLIENT_LIMITS, CLIENTS
from tests.composition.composition_parts import MASKS, RULES, Net, make_data
from tests.engines.package_models import PACKAGE, SMALL
from tests.engines.parts import agree, train
from tests.parts import graded, quick_first

EVERY_CLIENT = {**CLIENTS, **CLIENT_LIMITS}
MODELS = {**{name: PACKAGE[name] for name in SMALL}, "Net": (Net, partial(make_data, "unequal"))}


def goes(rule: str, client: str) -> bool:
    """Whether an aggregator and client algorithms go together."""
    local, weightings = EVERY_CLIENT[client], RULES[rule].weightings
    alone = client in CLIENT_LIMITS and local.rule is None  # the server sees plain local training
    if (local.few or alone) and rule not in ("FedAvg", "FedNova", "FedGMA"):
        return False
    return local.rule in (None, rule) and (not local.uniform or "uniform" in weightings)


def trained_alike(
    folder: Path, model: str, rule: str, client: str, mask: str = "none", rtol: float = 1e-10, **options: Any
) -> None:
    """Trains under both engines and asserts that they agree."""
    (make, make_data), local, make_mask = MODELS[model], EVERY_CLIENT[client], MASKS[mask]
    found = []
    for engine in ("sequential", "vectorized"):
        datamodule = make_data()
        if local.full_batch:
            datamodule.batch_size = 1000
        weighting = "uniform" if local.uniform else RULES[rule].weightings[0]
        given = {"max_rounds": 2 if "round" not in client else 4, **local.options(**options)}
        of_rule = {"weighting": weighting, **({"buffers": given.pop("buffers")} if "buffers" in given else {})}
        aggregator = RULES[rule].make(mask=None if make_mask is None else make_mask(), **of_rule)
        if engine == "sequential":
            given.pop("chunk_size", None)
        found.append(train(folder, make, engine, aggregator, *local.make(), datamodule=datamodule, **given))
    assert found[1].trainer.engine_choice["engine"] == "vectorized"
    agree(*found, rtol=rtol)


COMPARES = [name for name in EVERY_CLIENT if name.startswith("MOON") and name != "MOON at 0"]  # features of layers
METHODS = [(rule, client) for rule, client in product(RULES, EVERY_CLIENT) if goes(rule, client)]
GRID = [
    (model, rule, client)
    for model in MODELS
    for rule, client in METHODS
    if model == "Net" or not EVERY_CLIENT[client].few
    if model != "LogisticRegression" or client not in COMPARES
]


# A rule steps on the server and never sees which client algorithm made the mean, and hardly any sees the model.
FEW = ("none", "SCAFFOLD", "FedGA on FedProx", "FedNTD", "FedSAM", "PFedMe", "APFL")
KEPT = [
    *(("Net", EVERY_CLIENT[client].rule or "FedAvg", client) for client in EVERY_CLIENT),
    *(("Net", rule, "none") for rule in RULES),
    *((model, "FedAvg", client) for model, client in product(MODELS, FEW)),
]


@pytest.mark.parametrize(("model", "rule", "client"), graded(GRID, 24, KEPT))
@pytest.mark.quick(6)
def test_every_method_trains_every_model_alike(model: str, rule: str, client: str, tmp_path: Path) -> None:
    trained_alike(tmp_path, model, rule, client)


STEPS = [(), ("local_epochs", 3), ("local_steps", 5), ("local_steps", 1), ("gradient_clip_val", 0.05)]
OPTIONS = [
    (client, mask, chunk_size, steps)
    for client, mask, chunk_size, steps in product(EVERY_CLIENT, MASKS, (None, 1, 4), STEPS)
    if not (steps and EVERY_CLIENT[client].full_batch)  # takes one step as it is, and LinearScaling no clipped one
    if not ("FedRep" in client and steps == ("local_steps", 1))  # one for the head, one for the body
]


@pytest.mark.parametrize(("client", "mask", "chunk_size", "steps"), graded(OPTIONS, 12, ()))
def test_masks_chunks_and_steps_are_alike(client: str, mask: str, chunk_size: Any, steps: Any, tmp_path: Path) -> None:
    rule, options = EVERY_CLIENT[client].rule or "FedAvg", dict([steps] if steps else [])
    trained_alike(tmp_path, "Net", rule, client, mask, chunk_size=chunk_size, **options)


@pytest.mark.parametrize("rule", quick_first(1, RULES))
def test_chunks_are_alike_under_every_rule(rule: str, tmp_path: Path) -> None:
    trained_alike(tmp_path, "Net", rule, "none", chunk_size=2)


PRECISE = product(["FedAvg", "FedAdam", "FedNova", "CGW"], ["none", "SCAFFOLD", "FedGA on FedProx"])


@pytest.mark.parametrize(("rule", "client"), graded(PRECISE))
def test_single_precision_agrees_to_its_rounding(rule: str, client: str, tmp_path: Path) -> None:
    """Clients' updates too, which begin where FedAdam has divided what rounding leaves by little."""
    trained_alike(tmp_path, "Net", rule, client, precision="32-true", rtol=3e-4)
