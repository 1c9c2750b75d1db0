"""Which parameters are personal, what is refused, and what lies where in memory, on disk and on the wire."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import FedBN, FedPer, FedRep, LGFedAvg, LocalOnly, PersonalParameters
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.vector import ParameterVector
from lightning_fed.sampling import Participation, Stragglers, UnequalWork
from tests.client_algorithms.client_runs import make_data, make_trainer
from tests.client_algorithms.known_clients import Known, Layered
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer

PROBLEM = Layered()


class OwnNorm(nn.BatchNorm1d):
    """A normalisation layer of a user's own."""


class Deep(nn.Sequential):
    """Layers that hold parameters: 0, 1, 3 and 4."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 6), OwnNorm(6), nn.ReLU(), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES, bias=False)
        )


def chosen(method: PersonalParameters, net: nn.Module | None = None) -> set[str]:
    return set(method.choose(net or Deep()))


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (FedBN(), {"1.weight", "1.bias", "3.weight", "3.bias"}),
        (FedPer(), {"4.weight"}),
        (FedPer(2), {"3.weight", "3.bias", "4.weight"}),
        (FedPer(0), set()),
        (LGFedAvg(1), {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}),
        (FedRep(1), {"4.weight"}),
        (PersonalParameters(first=1), {"0.weight", "0.bias"}),
        (PersonalParameters(["4"]), {"4.weight"}),
        (PersonalParameters(["*.bias"]), {"0.bias", "1.bias", "3.bias"}),
        (PersonalParameters(modules=["BatchNorm*"]), {"1.weight", "1.bias"}),
        (PersonalParameters(modules=["OwnNorm"]), {"1.weight", "1.bias"}),
        (PersonalParameters(["0.bias"], ["GroupNorm"], last=1), {"0.bias", "3.weight", "3.bias", "4.weight"}),
    ],
)
def test_what_is_chosen(method: PersonalParameters, names: set[str]) -> None:
    assert chosen(method) == names


def test_normalisation_is_found_by_class_whatever_its_name() -> None:
    kinds = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.LayerNorm, nn.RMSNorm)
    made = [kind(4, affine=True) if kind is nn.InstanceNorm1d else kind(4) for kind in kinds]  # type: ignore[call-arg]
    net = nn.ModuleDict({**{f"part{i}": layer for i, layer in enumerate(made)}, "bn": nn.Linear(4, 4)})
    assert {name.partition(".")[0] for name in chosen(FedBN(), net)} == {f"part{i}" for i in range(len(kinds))}


def test_frozen_parameters_and_layers_do_not_count() -> None:
    net = Deep()
    net[4].requires_grad_(False)
    net[0].bias.requires_grad_(False)
    assert chosen(FedPer(), net) == {"3.weight", "3.bias"}
    assert chosen(PersonalParameters(["0"]), net) == {"0.weight"}
    with pytest.raises(FederatedError, match=r"trainable .* pattern `4` in `--client.names` of PersonalParameters"):
        chosen(PersonalParameters(["4"]), net)


def test_a_tied_parameter_is_personal_if_one_of_its_places_is() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "middle": nn.Linear(3, 3), "out": nn.Linear(3, 4)})
    net["out"].weight = net["embedding"].weight
    assert chosen(PersonalParameters(["out.weight"]), net) == {"embedding.weight"}
    assert chosen(FedPer(), net) == {"embedding.weight", "out.bias"}


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            PersonalParameters(["4", "hed.*"]),
            r"^Expected trainable parameters for the pattern `hed.\*` in `--client.names` of PersonalParameters, but "
            r"the trained layers of Deep are `0` \(Linear\), .*`4` \(Linear\): change `--client` or `--model`.$",
        ),
        (PersonalParameters(modules=["LSTM"]), r"^Expected .* for the pattern `LSTM` in `--client.modules`"),
        (PersonalParameters(["*"]), r"^Expected PersonalParameters to leave .* all 7 would stay .*LocalOnly"),
        (FedPer(4), r"^Expected FedPer to leave parameters .*LocalOnly"),
        (FedPer(9), r"^Expected FedPer to leave parameters .*LocalOnly"),
        (LGFedAvg(4), r"^Expected trainable parameters for `--client.last` of LGFedAvg"),
    ],
)
def test_a_choice_of_nothing_or_everything_is_refused(method: PersonalParameters, sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence):
        chosen(method)


def test_without_normalisation_fedbn_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"in the normalisation layers of FedBN, .* `0` \(Linear\): change"):
        chosen(FedBN(), nn.Sequential(nn.Linear(2, 2)))
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    with pytest.raises(FederatedError, match=r"are `0` \(Linear\), `1` .*, `2` .*, \.\.\., `6` .*, `7` .*, `8` "):
        chosen(FedBN(), many)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PersonalParameters(), r"`--client.names`, .* or `--client.last` .* got none"),
        (lambda: PersonalParameters("head"), r"`--client.names` of PersonalParameters to be a list"),  # type: ignore[arg-type]
        (lambda: PersonalParameters(last=-1), r"`--client.last` of PersonalParameters"),
        (lambda: LGFedAvg(0), r"`--client.last` of LGFedAvg"),
        (lambda: FedRep(0), r"`--client.last` of FedRep"),
        (lambda: FedRep(head_epochs=0), r"`--client.head_epochs` of FedRep"),
    ],
)
def test_bad_arguments_name_the_option(make: Any, sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence):
        make()


class Fits(Known):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Deep()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def fit(*parts: Any, module: Any = None, **options: Any) -> Any:
    trainer = make_trainer(*parts, **{"max_rounds": 1, **options})
    trainer.fit(module or Fits(), federated_data(8, 8))
    return trainer


@pytest.mark.parametrize(
    ("parts", "options", "sentence"),
    [
        ([FedBN(), FedAvg(buffers="keep")], {}, r"`--aggregator.buffers local` for FedBN, got keep"),
        ([FedPer(), FedBN()], {}, r"one client algorithm that gives each client a model .* got FedPer and FedBN"),
        (
            [FedRep()],
            {"local_epochs": 1},
            r"local_epochs` to leave FedRep .*, got 1, of which 0 .*: raise it, or",
        ),
        ([FedRep(head_epochs=3)], {"local_epochs": 3}, r"`--trainer.local_epochs` .*, got 3, of which 3 for the head"),
        ([FedRep(head_epochs=1)], {"local_steps": 3}, r"head_steps` of FedRep .*local_steps`, got .*head_epochs`"),
        ([FedRep(head_steps=1)], {"local_epochs": 3}, r"head_epochs` of FedRep .*local_epochs`, got .*head_steps`"),
        (
            [FedRep()],
            {"local_epochs": 2, "participation": Participation(work=UnequalWork(epochs=[1, 2]))},
            r"FedRep with the same work .* got UnequalWork: leave out `--trainer.participation.work`",
        ),
        (
            [FedRep()],
            {"local_epochs": 2, "participation": Participation(stragglers=Stragglers(9.0, "partial"))},
            r"FedRep with the same work .* got Stragglers: leave out `--trainer.participation.stragglers.late`",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(parts: Any, options: Any, sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence):
        fit(*parts, **options)
    if options == {}:
        fit(FedBN(), FedAvg(buffers="local"))


def test_fedrep_refuses_what_cannot_hold_a_part() -> None:
    class Lbfgs(Fits):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    class Steps(Fits):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    for module, got in ((Lbfgs(), "LBFGS"), (Steps(), "a module that steps by itself")):
        with pytest.raises(FederatedError, match=rf"optimizer for FedRep that skips .* got {got}: .*use FedPer"):
            fit(FedRep(), module=module, local_epochs=2)


def test_shared_parameters_come_first_and_every_part_is_a_view() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(2, 3, 5, 5))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    vector = ParameterVector(net, {"0.weight", "1.bias"})
    assert vector.names == ("0.bias", "1.weight", "3.weight", "3.bias")
    assert vector.all_names == (*vector.names, "0.weight", "1.bias")
    assert (vector.numel, vector.all_numel) == (4 + 4 + 72 + 2, 194)
    assert list(vector.places().values())[-1].stop == vector.numel == len(vector.data) == len(vector.grad)
    assert len(vector.personal) == 4 * 27 + 4
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    for tensor in (vector.data, vector.personal, vector.grad, vector.all_grad):
        tensor.fill_(1.0)
    assert all((p == 1).all() for p in net.parameters())
    assert all((p.grad == 1).all() for p in net.parameters() if p.grad is not None)
    vector.hide(vector.all_parameters[4:])
    assert [name for name, p in net.named_parameters() if p.grad is None] == ["0.weight", "1.bias"]
    vector.add_to_gradient(torch.ones(vector.numel))
    assert [name for name, p in net.named_parameters() if p.grad is None] == ["0.weight", "1.bias"]
    vector.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


class Bytes(FederatedCallback):
    """Notes the length of an update and of the records."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.lengths.add(len(update.delta))


@pytest.mark.parametrize(
    ("make", "sent"),
    [
        # γ, β, weight and bias have 4, 4, 12 and 3 numbers of 8 bytes each.
        (FedBN, 15), (FedPer, 8), (LGFedAvg, 15), (FedRep, 8), (lambda: PersonalParameters(["layer.bias"]), 20),
        (lambda: FedPer(0), 23),
    ],
)  # fmt: skip
def test_a_personal_part_costs_no_byte(make: Any, sent: int, tmp_path: Path) -> None:
    notes = Bytes()
    trainer = make_trainer(
        make(), notes, max_rounds=2, local_epochs=2, precision="64-true", client_states="disk",
        enable_checkpointing=True, logger=[], default_root_dir=tmp_path, name="run",
    )  # fmt: skip
    trainer.fit(PROBLEM.module(PROBLEM.start), make_data(PROBLEM))
    clients = 4  # of five, one of which has no samples
    assert notes.lengths == {sent}
    for way in ("comm/bytes_up", "comm/bytes_down"):
        assert trainer.totals[way] == 2 * clients * sent * 8, way
    files = list(tmp_path.glob("run/version_0/client_states/personal/*.npy"))
    assert len(files) == (clients if sent < 23 else 0)
    assert all(np.load(file).shape == (23 - sent,) for file in files)


@pytest.mark.parametrize(
    ("method", "where"), [(FedPer, "device"), (FedPer, "host"), (FedPer, "disk"), (FedRep, "disk")]
)
def test_a_killed_run_goes_on_to_the_bit(where: Any, method: Any, tmp_path: Path) -> None:
    def go(folder: Path, rounds: int, **options: Any) -> tuple[Tensor, dict[str, np.ndarray]]:
        torch.manual_seed(0)
        trainer = federated_trainer(
            folder, method(), max_rounds=rounds, enable_checkpointing=True, name="run", client_states=where,
            local_epochs=2, clients_per_round=2, logger=[],
        )  # fmt: skip
        module = Classifier(Deep(), lambda net: SGD(net.parameters(), 0.1, momentum=0.9))
        trainer.fit(module, federated_data(8, 8, 8), ckpt_path="last", **options)
        assert trainer.resumed is (rounds == 4 and folder.name == "parts")
        (run,) = folder.glob("run/version_*")
        kept = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["federated"]
        assert kept["personal"] == ["net.4.weight"]
        found = {file.partition("-")[0]: np.load(run / "client_states" / file) for file in kept["client_states"]}
        return torch.nn.utils.parameters_to_vector(module.parameters()), found

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    for leftover in tmp_path.glob("parts/run/version_0/client_states/personal/0-*"):  # as a kill amid a write leaves it
        shutil.copy(leftover, leftover.with_name("0-9-00000000.npy"))
    parts = go(tmp_path / "parts", 4)
    assert torch.equal(whole[0], parts[0])
    assert whole[1].keys() == parts[1].keys() != set()
    assert all(np.array_equal(whole[1][name], parts[1][name]) for name in whole[1])


def test_another_split_of_the_vector_cannot_be_resumed(tmp_path: Path) -> None:
    def go(method: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, method, enable_checkpointing=True, name="run", logger=[], **options)
        trainer.fit(Classifier(Deep()), federated_data(8, 8), ckpt_path=options.pop("ckpt", "last"))

    go(FedPer(), max_rounds=1)
    (path,) = tmp_path.glob("run/version_0/checkpoints/last.ckpt")
    trainer = federated_trainer(tmp_path, FedPer(2), max_rounds=2)
    with pytest.raises(
        FederatedError, match=r"^Expected the 1 parameters that stay .*, got 3, .*`--client` and `--mod"
    ):
        trainer.fit(Classifier(Deep()), federated_data(8, 8), ckpt_path=str(path))


def test_parameters_that_are_unfrozen_later_may_be_personal() -> None:
    """Lightning's finetuning: the backbone is the client's own, and moves from round 2 on."""

    class Later(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    class Tunes(Fits):
        def configure_optimizers(self) -> Any:
            return SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    found = []

    class Notes(FederatedCallback):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            row = torch.empty_like(trainer.train_state.initial)
            trainer.train_state.load_own(0, row)
            found.append((row - trainer.train_state.initial).abs().max().item())
            assert len(trainer.weights) == 12 + 12 + 6 * CLASSES

    fit(PersonalParameters(first=1), Later(), Notes(), module=Tunes(), max_rounds=3)
    assert found[0] == 0.0
    assert found[1] > 0
    assert found[2] > found[1]


def test_parameters_unfrozen_by_hand_are_refused() -> None:
    class Unfreezes(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            pl_module.net[0].requires_grad_(True)

    module = Fits()
    module.net[0].requires_grad_(False)
    with pytest.raises(FederatedError, match=r"^Expected `net.0.weight` of Fits to stay frozen"):
        fit(FedPer(), Unfreezes(), module=module)


def test_a_hook_that_writes_to_a_personal_part_between_rounds_is_refused() -> None:
    class Writes(FederatedCallback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[4].weight.data.add_(1.0)

    with pytest.raises(FederatedError, match=r"to leave the parameters of Fits unchanged"):
        fit(FedPer(), Writes())


@pytest.mark.parametrize(
    ("alone", "explicit", "options", "said"),
    [
        ([FedBN], [FedBN, lambda: FedAvg(buffers="local")], {}, "FedBN sets `--aggregator.buffers local`"),
        ([LocalOnly], [LocalOnly, lambda: FedAvg(buffers="local")], {}, "LocalOnly sets `--aggregator.buffers local`"),
        ([FedRep], [FedRep], {"local_epochs": 2}, "FedRep sets `--trainer.local_epochs 2`"),
        ([lambda: FedRep(head_epochs=3)], [lambda: FedRep(head_epochs=3)], {"local_epochs": 4}, "local_epochs 4`"),
    ],
    ids=["FedBN", "LocalOnly", "FedRep", "FedRep 3"],
)
def test_a_method_alone_sets_what_it_needs_and_says_so(alone, explicit, options, said, caplog) -> None:
    with caplog.at_level("INFO"):
        found = fit(*(make() for make in alone), module=built(Fits), max_rounds=2)
    assert said in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        right = fit(*(make() for make in explicit), module=built(Fits), max_rounds=2, **options)
    assert said not in caplog.text
    left, other = (trainer.lightning_module.state_dict() for trainer in (found, right))
    assert all(torch.equal(left[name], value) for name, value in other.items())
    assert found.totals == right.totals
