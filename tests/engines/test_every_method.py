"""Every model of the package under every client algorithm and every aggregator: both engines find the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.composition.client_parts import CLIENT_LIMITS, CLIENTS
from tests.composition.composition_parts import RULES
from tests.engines.package_models import PACKAGE, SMALL
from tests.engines.parts import agree, train

EVERY_CLIENT = {**CLIENTS, **CLIENT_LIMITS}


def options_of(rule: str, client: str) -> dict[str, Any] | None:
    """What an aggregator takes beside client algorithms, None where they do not go together."""
    local, weightings = EVERY_CLIENT[client], RULES[rule].weightings
    if local.rule not in (None, rule) or (local.uniform and "uniform" not in weightings):
        return None
    return {"weighting": "uniform" if local.uniform else weightings[0]}


def outcomes(folder: Path, name: str, rule: str, client: str) -> list[Any]:
    (make, make_data), local = PACKAGE[name], EVERY_CLIENT[client]
    found = []
    for engine in ("sequential", "vectorized"):
        datamodule = make_data()
        if local.full_batch:
            datamodule.batch_size = 1000
        callbacks = [RULES[rule].make(**options_of(rule, client)), *local.make()]
        found.append(train(folder, make, engine, *callbacks, datamodule=datamodule, max_rounds=2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("rule", RULES)
def test_every_model_under_every_method(tmp_path: Path, name: str, rule: str) -> None:
    for client in EVERY_CLIENT:
        if options_of(rule, client) is not None:
            one, other = outcomes(tmp_path, name, rule, client)
            assert other.trainer.engine_choice["engine"] == "vectorized"
            agree(one, other)


@pytest.mark.parametrize("name", SMALL)
def test_every_model_under_some_methods(tmp_path: Path, name: str) -> None:
    for rule, client in (("FedAdam", "all three"), ("CGW", "FedGA on FedProx")):
        agree(*outcomes(tmp_path, name, rule, client))
