"""Every client algorithm, alone and with others, under every aggregator and mask: each part changes the model."""

from typing import Any

import pytest
import torch

from lightning_fed import FederatedTrainer, aggregators, client_algorithms
from lightning_fed.client_algorithms import (
    SCAFFOLD,
    Attack,
    ClientAlgorithm,
    FedDyn,
    FedGA,
    FedProx,
    GradAlign,
    LinearScaling,
    LossAlgorithm,
    PerFedAvg,
    StatelessSCAFFOLD,
)
from lightning_fed.errors import FederatedError
from tests.composition.client_parts import ALONE, BESIDE, CLIENT_LIMITS, CLIENTS, LATE, PRIVATE, TOGETHER, UNSENT, Local
from tests.composition.composition_parts import (
    MASKED,
    MASKS,
    RULES,
    Net,
    Outcome,
    distance,
    make_data,
    run,
    same,
    start,
)
from tests.parts import graded, leaves, quick_first

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:FedDynServer without the clients' half")]

# What the order of sums may do to float32 in three rounds, and what a part does at least.
ROUNDING, CLEAR = 5e-6, 2e-4
# What has nobody to agree with if one client is drawn: nothing, or what is left without FedGA, remains of it.
VANISHING = [
    "StatelessSCAFFOLD",
    "GradAlign",
    "LinearScaling",
    "FedRS",  # the one that is drawn has samples of every class
    *(name for name in CLIENTS if "FedGA" in name),
    "all three",
]
AT_LIMIT = [*BESIDE, *(name for name in CLIENT_LIMITS if name.endswith((" at 0", "FedRS at 1", "round 4")))]
FULL_PARTICIPATION = ["SCAFFOLD on all data", "stateless on all data"]


def local_of(client: str) -> Local:
    return {**CLIENTS, **CLIENT_LIMITS}[client]


def rules_for(client: str) -> list[str]:
    rule = local_of(client).rule
    return (list(RULES) if not local_of(client).few else FEW) if rule is None else [rule]


FEW = ["FedAvg", "FedAdam", "FedNova", "GeometricMedian"]
GRID = [
    (client, rule, mask)
    for client in CLIENTS
    for rule in rules_for(client)
    for mask in (MASKS if rule in MASKED else ["none"])
    if mask in ("none", "soft", "sand") or not local_of(client).few
]
# Each under one rule: each alone, and all together, is not slow.
ONE_RULE = graded(
    [(name, local.rule or "FedAvg") for name, local in CLIENTS.items()],
    kept=[(name, ALONE[name].rule or "FedAvg") for name in ALONE] + [("all three", "FedAvg")],
)
# No rule sees what made the mean.
FEW_RULES = graded([(rule,) for rule in RULES], kept=[("FedAvg",), ("FedAdam",), ("GeometricMedian",)])


def weighting(client: str, rule: str) -> str:
    """The weighting of a run that is compared with one of this client algorithm."""
    return "uniform" if local_of(client).uniform else RULES[rule].weightings[0]


def trained(rule: str, mask: str, client: str, **options: Any) -> Outcome:
    return run(rule, mask, client=client, **{"weighting": weighting(client, rule), **options})


def fit(*callbacks: Any, net: Net | None = None, batch_size: int = 1000, **options: Any) -> None:
    """A run of one round; by default every client takes one step on all of its data."""
    FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=list(callbacks), max_rounds=1, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir="not-written", **options,
    ).fit(net or start(), make_data("unequal", batch_size))  # fmt: skip


def test_every_client_algorithm_of_the_package_is_in_the_suite() -> None:
    kinds = {kind for kind in leaves(ClientAlgorithm) if not kind.__name__.startswith("_")} - {LossAlgorithm, Attack}
    others = (*BESIDE.values(), *UNSENT.values(), *LATE.values(), *PRIVATE.values())
    apart = {type(local.make()[0]) for local in others}
    alone = [local.make() for local in (*ALONE.values(), *others)]
    assert all(len(made) == 1 for made in alone)
    assert {type(made[0]) for made in alone} == kinds, "say in ALONE how the client algorithm is made"
    assert all(kind.__name__ in client_algorithms.__all__ for kind in kinds)
    # An algorithm whose one step leaves nothing to others, or that goes with another's data, is not combined.
    single = {GradAlign, LinearScaling, PerFedAvg}
    assert {type(one) for local in TOGETHER.values() for one in local.make()} == kinds - apart - single


@pytest.mark.parametrize(("client", "rule", "mask"), graded(GRID, 8, ()))
def test_each_part_changes_the_model(client: str, rule: str, mask: str) -> None:
    here, local, weights = trained(rule, mask, client), local_of(client), weighting(client, rule)
    assert here.weights.isfinite().all()
    assert (here.buffers["layers.1.running_var"] > 0).all()
    assert (here.logged["clients/trained"], here.logged["clients/diverged"]) == (5, 0)
    for left in local.without:
        assert distance(here, run(rule, mask, client=left, weighting=weights)) > CLEAR, f"with {left} alone"
    if mask != "none":
        assert distance(here, trained(rule, "none", client)) > CLEAR, "without the mask"
    if rule != "FedAvg" and local.rule is None and not RULES[rule].is_mean:
        there = run("FedAvg", mask, client=client, weighting=weights)
        if rule == "FedNova" and local.full_batch:  # all clients take one step: nothing is left to normalise
            assert distance(here, there) < ROUNDING
        else:
            assert distance(here, there) > CLEAR, "FedAvg instead"


@pytest.mark.parametrize("rule", FEW_RULES)
def test_at_its_limit_an_algorithm_changes_no_bit(rule: str) -> None:
    for client in ("FedGA at 0 on FedProx at 0", "GradAlign at 0"):
        assert same(run(rule, client=client), run(rule, client=local_of(client).without[0])), client
    assert distance(run(rule, client="FedGA from round 3"), run(rule)) > CLEAR


@pytest.mark.parametrize("client", AT_LIMIT)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"mask": "soft", "precision": "bf16-true"}, marks=pytest.mark.slow)]
)
def test_no_limit_changes_a_bit(client: str, options: dict[str, Any]) -> None:
    assert same(run("FedAvg", client=client, **options), run("FedAvg", client=local_of(client).without[0], **options))


@pytest.mark.parametrize(
    ("client", "rule", "mask"),
    graded(
        [
            (client, rule, mask)
            for client in BESIDE
            for rule in RULES
            if rule != "FedDynServer"
            for mask in ("none", "soft")
            if rule in MASKED or mask == "none"
        ],
        2,
        (),
    ),
)
def test_own_models_beside_leave_every_rule_its_global_model_to_the_bit(client: str, rule: str, mask: str) -> None:
    assert same(run(rule, mask, client=client), run(rule, mask))


def test_clients_that_send_nothing_leave_the_global_model_as_it_was() -> None:
    here = run("FedAvg", client="LocalOnly", buffers="local")
    assert torch.equal(here.weights, torch.cat([p.detach().flatten() for p in start().parameters()]))
    assert here.logged["comm/bytes_up"] == here.logged["comm/bytes_down"] == here.logged["comm/rounds"] == 0


@pytest.mark.parametrize("rule", graded([(rule,) for rule in RULES], 4, [(rule,) for rule in FEW]))
def test_clients_that_arrive_late_but_in_time_are_those_of_any_rule_of_updates(rule: str) -> None:
    if rule in ("FedACG", "FedGMA", "CGW", "FedFV", "QFedAvg", "TERM", "AFL", "FedDGGA"):
        with pytest.raises(FederatedError, match=f"Expected no {rule} with Stale, as late clients have an older model"):
            run(rule, client="Stale")
    else:
        assert same(run(rule, client="Stale"), run(rule, buffers="keep"))


@pytest.mark.parametrize("rule", FEW_RULES)
def test_scaffold_begins_as_plain_training(rule: str) -> None:
    for client in ("SCAFFOLD", "SCAFFOLD I", "FedGA on SCAFFOLD"):
        plain = "FedGA" if "FedGA" in client else "none"
        assert same(run(rule, client=client, max_rounds=1), run(rule, client=plain, max_rounds=1)), client
    assert same(run(rule, client="FedProx on SCAFFOLD", max_rounds=1), run(rule, client="FedProx", max_rounds=1))


@pytest.mark.parametrize("mask", quick_first(2, MASKS))
@pytest.mark.slow
def test_feddyn_begins_as_fedprox(mask: str) -> None:
    first = [run("FedDynServer", mask, client=name, max_rounds=1) for name in ("FedDyn", "FedProx as FedDyn", "none")]
    assert distance(first[0], first[1]) < ROUNDING
    assert distance(first[0], first[2]) > CLEAR
    assert distance(*(run("FedDynServer", mask, client=name) for name in ("FedDyn", "FedProx as FedDyn"))) > CLEAR


@pytest.mark.parametrize("rule", FEW_RULES)
def test_the_order_of_a_list_changes_no_bit_of_parts_that_commute(rule: str) -> None:
    assert same(run(rule, client="FedGA on FedProx"), run(rule, client="FedProx on FedGA"))


@pytest.mark.parametrize("rule", quick_first(2, ["FedAvg", "FedNova", "CoordinateMedian", "GeometricMedian"]))
@pytest.mark.parametrize("mask", ["none", "soft"])
@pytest.mark.slow
def test_forms_of_fedga(rule: str, mask: str) -> None:
    mask = mask if rule in MASKED else "none"
    forms = [run(rule, mask, client=form, max_rounds=2) for form in ("FedGA", "FedGA step")]
    assert distance(*forms) < ROUNDING
    displaced = run(rule, mask, client="FedGA")
    linear = rule == "FedAvg" and mask == "none"  # there Σ p_i v_i = 0, and the displacements cancel
    from_global = distance(displaced, run(rule, mask, client="FedGA global"))
    assert from_global < ROUNDING if linear else from_global > CLEAR


@pytest.mark.parametrize("client", FULL_PARTICIPATION)
def test_corrections_of_a_whole_cohort_cancel_in_the_mean_of_single_steps(client: str) -> None:
    """Σ p_i (c - c_i) = 0 if all clients are drawn: what remains is seen by rules that are not linear."""
    for rule in ("FedAvg", "FedAvgM", "FedAdam", "FedNova"):
        assert distance(run(rule, client=client), run(rule, client="none on all data")) < ROUNDING, rule
    for rule in ("CoordinateMedian", "Krum"):
        assert distance(run(rule, client=client), run(rule, client="none on all data")) > CLEAR, rule


@pytest.mark.parametrize("other", quick_first(1, ["FedProx", "SCAFFOLD", "FedDyn"]))
@pytest.mark.slow
def test_forms_of_fedga_agree_over_terms_that_read_the_iterate(other: str) -> None:
    for rule in ["FedDynServer"] if other == "FedDyn" else ["FedAvg", "FedNova", "CoordinateMedian"]:
        forms = [run(rule, client=f"{form} on {other}", max_rounds=2) for form in ("FedGA", "FedGA step")]
        assert distance(*forms) < ROUNDING, rule


# A method that takes one policy alone has nothing to compare.
ANY_BUFFERS = [case for case in ONE_RULE if "buffers" not in local_of(str(case.values[0])).given]


@pytest.mark.parametrize(("client", "rule"), ANY_BUFFERS)
@pytest.mark.slow
def test_weights_and_buffers_still_count(client: str, rule: str) -> None:
    # FedCM's gradients, and what buffers make of them, are 0.3 as long; a part of the model differs less than all.
    clear = CLEAR * (0.3 if "FedCM" in client or local_of(client).few else 1.0)
    here = {policy: trained(rule, "none", client, buffers=policy) for policy in ("average", "local", "keep")}
    assert distance(here["average"], here["local"]) > clear
    assert distance(here["average"], here["keep"]) > clear
    assert distance(here["local"], here["keep"]) > clear
    for policy in ("local", "keep") if client in ALONE else ():
        without = run(rule, client=local_of(client).without[0], buffers=policy, weighting=weighting(client, rule))
        assert distance(here[policy], without) > clear, policy
    if weighting(client, rule) == "samples":
        assert distance(here["average"], run(rule, client=client, weighting="uniform")) > clear


@pytest.mark.parametrize(("client", "rule"), ONE_RULE)
def test_a_mask_before_the_rule(client: str, rule: str) -> None:
    before = trained(rule, "soft", client, apply="before")
    assert before.weights.isfinite().all()
    assert distance(before, trained(rule, "none", client)) > CLEAR
    if rule == "FedAvg":
        assert distance(before, trained(rule, "soft", client)) < ROUNDING


@pytest.mark.parametrize(("client", "rule"), ONE_RULE)
def test_who_is_drawn_in_which_order_and_without_samples_changes_nothing(client: str, rule: str) -> None:
    mask = "soft" if client in ALONE else "none"
    plain = trained(rule, mask, client)
    filled = trained(rule, mask, client, draws="filled")
    assert same(filled, plain)
    assert (filled.logged["clients/skipped"], plain.logged["clients/skipped"]) == (0, 1)
    assert filled.logged["comm/bytes_up"] == plain.logged["comm/bytes_up"] > 0
    assert filled.logged["gradients"] == plain.logged["gradients"] > 0


@pytest.mark.parametrize(("client", "rule"), ONE_RULE)
@pytest.mark.parametrize("other", ["FedAvg", "FedNova"])
def test_one_client_in_a_round(client: str, rule: str, other: str) -> None:
    rule = other if rule == "FedAvg" else rule
    alone, left = trained(rule, "none", client, draws="one"), local_of(client).without[0]
    assert alone.weights.isfinite().all()
    assert alone.logged["clients/trained"] == 1
    without = run(rule, client=left, draws="one", weighting=weighting(client, rule))
    assert distance(alone, without) < ROUNDING if client in VANISHING else distance(alone, without) > CLEAR


@pytest.mark.parametrize(("client", "rule"), ONE_RULE)
@pytest.mark.slow
def test_clients_that_train_in_bfloat16(client: str, rule: str) -> None:
    mask = "soft" if client in ALONE else "none"
    narrow = trained(rule, mask, client, precision="bf16-true")
    assert narrow.weights.isfinite().all()
    assert narrow.weights.dtype == torch.float32
    assert narrow.buffers["center"].dtype == torch.bfloat16
    assert distance(narrow, trained(rule, mask, client)) > CLEAR
    for left in local_of(client).without:
        weights = weighting(client, rule)
        assert distance(narrow, run(rule, mask, client=left, weighting=weights, precision="bf16-true")) > CLEAR, left
    if mask != "none":
        assert distance(narrow, trained(rule, "none", client, precision="bf16-true")) > CLEAR


class AdamNet(Net):
    """The same module with Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


FEDDYN, UNIFORM = aggregators.FedDynServer, lambda: aggregators.FedAvg(weighting="uniform")
PAIRS = [
    (SCAFFOLD, StatelessSCAFFOLD, "^Expected {first} without {second}, as both .*`--client`"),
    (SCAFFOLD, FedDyn, "^Expected SCAFFOLD without FedDyn, as both .*`--client`"),
    (StatelessSCAFFOLD, FedDyn, "^Expected StatelessSCAFFOLD without FedDyn, as both .*`--client`"),
    (FedGA, GradAlign, "^Expected one .* that displaces .*, got {first} and {second}: .*`--client`"),
    (FedGA, LinearScaling, "^Expected one .* that displaces .*, got {first} and {second}: .*`--client`"),
    (GradAlign, LinearScaling, "^Expected one .* that displaces .*, got {first} and {second}: .*`--client`"),
]


@pytest.mark.parametrize(("one", "other", "words"), PAIRS)
def test_pairs_without_meaning_are_refused_by_name_in_either_order(one: Any, other: Any, words: str) -> None:
    for first, second in ((one, other), (other, one)):
        match = words.format(first=first.__name__, second=second.__name__)
        with pytest.raises(FederatedError, match=match):
            fit(first(), second(), aggregators.FedDynServer())


@pytest.mark.parametrize("make", [local.make for local in {**ALONE, **BESIDE, **UNSENT, **LATE}.values()])
def test_an_algorithm_given_twice_is_refused(make: Any) -> None:
    (one,), (other,) = make(), make()
    name = type(one).__name__
    with pytest.raises(FederatedError, match=f"^Expected each callback once, got {name} twice: .*"):
        fit(one, FedProx() if name != "FedProx" else FedGA(), other)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "FedDynServer"])
def test_feddyn_without_its_server_is_refused(rule: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected the aggregator FedDynServer.* got {rule}: .*`--aggregator "):
        run(rule, client="FedDyn")


SINGLE = [
    (GradAlign, {"batch_size": 30}, r"batches of 30 for a client of 31 samples: .*`--data.batch_size 31`"),
    (GradAlign, {"accumulate_grad_batches": 2}, r"`--trainer.accumulate_grad_batches`"),
    (GradAlign, {"local_epochs": 2}, r"one local step, got 2 epochs: .*`--trainer.local_steps 1`"),
    (GradAlign, {"local_steps": 3}, r"one local step, got 3 steps: .*`--trainer.local_steps 1`"),
    (LinearScaling, {"batch_size": 30}, r"batches of 30 for a client of 31 samples: .*`--data.batch_size 31`"),
    (LinearScaling, {"local_steps": 3}, r"one local step, got 3 steps: .*`--trainer.local_steps 1`"),
]


@pytest.mark.parametrize(("kind", "options", "words"), SINGLE)
def test_what_takes_one_step_on_all_data_refuses_anything_else(kind: Any, options: Any, words: str) -> None:
    fit(kind(), UNIFORM(), **({"local_steps": 1} if "local_steps" in options else {}))
    with pytest.raises(FederatedError, match=f"^Expected {kind.__name__} .*{words}"):
        fit(kind(), UNIFORM(), **options)


def test_weights_and_optimizers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"^Expected `--aggregator.weighting uniform` for LinearScaling.*samples"):
        fit(LinearScaling(), aggregators.FedAvg())
    with pytest.raises(FederatedError, match=r"^Expected SGD .* LinearScaling, got Adam: .*`--model.optimizer`"):
        fit(LinearScaling(), UNIFORM(), net=AdamNet())
    with pytest.raises(FederatedError, match=r"^Expected SGD .*got Adam.*`--model.optimizer` or `--client.option`"):
        fit(SCAFFOLD(), net=AdamNet())
    fit(SCAFFOLD("I"), net=AdamNet())
    fit(StatelessSCAFFOLD(), FedGA(), FedProx(), net=AdamNet())


def test_a_refusal_comes_before_the_first_round() -> None:
    net = start()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(FederatedError):
        fit(FedDyn(), net=net)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
