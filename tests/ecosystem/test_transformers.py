"""FedAvg of models of transformers, made from their configs, is the mean of clients that a loop by hand trains."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne, federated_trainer

transformers: Any = pytest.importorskip("transformers", reason="pip install 'lightning_fed[ecosystem]'")

RATE, ROUNDS, SIZES = 0.05, 2, (4, 6, 5)
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Text(LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([w for w in self.parameters() if w.requires_grad], lr=RATE)


def tokens(length: int = 8) -> Any:
    return torch.randint(3, 50, (length,))


def written() -> Any:
    text = tokens()
    return {"input_ids": text, "labels": text}


def labelled() -> Any:
    return {"input_ids": tokens(), "labels": torch.randint(0, 3, ())}


def drawn() -> Any:
    return {"pixel_values": torch.randn(1, 8, 8), "labels": torch.randint(0, 3, ())}


def spoken() -> Any:
    return {"input_features": torch.randn(4, 16), "labels": tokens()}


def gpt2() -> Any:
    from peft import LoraConfig, get_peft_model

    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **still)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="gaussian")
    return get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, **DRY, max_position_embeddings=16, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    """Its cache of rotations is another one for texts beyond 4 tokens."""
    turns = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, max_position_embeddings=4, rope_parameters=turns)
    )


def vit() -> Any:
    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**small, **DRY, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    return transformers.ViTForImageClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )
    return transformers.T5ForConditionalGeneration(config)


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=4, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gpt2": (gpt2, written), "bert": (bert, labelled), "llama": (llama, written), "vit": (vit, drawn),
    "t5": (t5, written), "distilbert": (distilbert, labelled), "whisper": (whisper, spoken),
}  # fmt: skip


def by_hand(net: Text, parts: list[Any]) -> None:
    """Trains in place: each client takes one step over all that it has, from the same weights."""
    for _ in range(ROUNDS):
        clients = [deepcopy(net).train() for _ in parts]
        for client, part in zip(clients, parts, strict=True):
            optimizer = client.configure_optimizers()
            client.training_step(next(iter(DataLoader(part, batch_size=len(part)))), 0).backward()
            optimizer.step()
        every = zip(net.parameters(), *(client.parameters() for client in clients), strict=True)
        for own, *theirs in (each for each in every if each[0].requires_grad):
            mean = sum(size * p.detach() for size, p in zip(SIZES, theirs, strict=True)) / sum(SIZES)
            own.data.copy_(mean)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", MODELS)
def test_fedavg_is_the_mean_of_clients_trained_by_hand(name: str, engine: Any, tmp_path: Path) -> None:
    make, sample = MODELS[name]
    torch.manual_seed(0)
    net = Text(make())
    parts = [OneByOne(size, [sample() for _ in range(size)].__getitem__) for size in SIZES]
    alone, begun = deepcopy(net), deepcopy(net)
    by_hand(alone, parts)
    trainer = federated_trainer(tmp_path, engine=engine, max_rounds=ROUNDS)
    if name == "llama" and engine == "vectorized":
        with pytest.raises(FederatedError, match="replaces the buffer `inv_freq`"):
            trainer.fit(net, FederatedDataModule(parts, batch_size=max(SIZES)))
        return
    trainer.fit(net, FederatedDataModule(parts, batch_size=max(SIZES)))
    for (key, own), start, other in zip(net.named_parameters(), begun.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-5), key
        assert own.requires_grad or torch.equal(own, start), key
    trained = [(w, start) for w, start in zip(net.parameters(), begun.parameters(), strict=True) if w.requires_grad]
    assert trainer.weights.numel() == sum(w.numel() for w, _ in trained)
    assert any(not torch.equal(w, start) for w, start in trained)
