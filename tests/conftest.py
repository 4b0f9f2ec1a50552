"""Tiny random models, made in memory: no network, no files outside pytest's own folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from medusa_train.cli import main
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, Tree
from medusa_train.inference.copies import NO_COPY
from medusa_train.inference.heads_config import MOST_COPIED

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


WIDE = Tree.from_paths([(0, 0, 0), (0, 1), (1, 0), (2,), (5, 3, 2)])


def make_llama(vocab_size: int = 64, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random fp32 Llama whose logits are spread enough that greedy decoding has no near-ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **(SMALL | changes))
    return AutoModelForCausalLM.from_config(config).float().eval()


# Models that do something to their raw projections: cap, multiply, divide.
SHAPING_CONFIGS = {
    "gemma2": lambda sizes: Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager"),
    "cohere": lambda sizes: CohereConfig(**sizes, logit_scale=0.25),
    "granite": lambda sizes: GraniteConfig(**sizes, logits_scaling=4.0),
}


def make_shaping_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of one of ``SHAPING_CONFIGS``, 64 tokens, whose logits it scales or caps visibly."""
    torch.manual_seed(seed)
    sizes = SMALL | {"vocab_size": 64, "pad_token_id": 0, "initializer_range": 0.3}
    return AutoModelForCausalLM.from_config(SHAPING_CONFIGS[name](sizes)).float().eval()


KINDS = ["medusa", "hydra", "recurrent", "medusa copies", "hydra copies", "recurrent copies"]


def reading(name: str) -> dict[str, Any]:
    """What heads of one of ``KINDS`` read, as keywords of `HeadsConfig`."""
    kind, *copies = name.split()
    return {"kind": kind, "reads_copies": bool(copies)}


def no_copies(positions: int) -> torch.Tensor:
    """The copies of texts in which nothing repeats."""
    return torch.full((positions, MOST_COPIED), NO_COPY, dtype=torch.int32)


def random_heads(
    hidden_size: int = 32,
    vocab_size: int = 64,
    num_heads: int = 3,
    seed: int = 0,
    kind: str = "medusa",
    num_layers: int = 1,
) -> MedusaHeads:
    """Heads with random weights: they draft nonsense, which must never change what is decoded."""
    torch.manual_seed(seed)
    heads = MedusaHeads(HeadsConfig(num_heads, num_layers, hidden_size, vocab_size, **reading(kind)))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    return make_llama()


@pytest.fixture(scope="module")
def llama():
    """Shared and never changed by a test; those that change a model make their own."""
    return make_llama()


@pytest.fixture(scope="module")
def model(llama):
    return MedusaModel(llama, random_heads(), WIDE)


@pytest.fixture(scope="session")
def tiny_chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with a byte-level chat tokenizer whose padding token is its end token."""
    return save_tiny_chat(tmp_path_factory.mktemp("tiny-chat"))


def save_tiny_chat(folder: Path, **changes: object) -> Path:
    """Write what `tiny_chat_folder` is; changes are of the model's config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["user assistant system the cat sat on the mat and what is this ?"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    end = fast.convert_tokens_to_ids("<|im_end|>")
    ends = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    make_llama(vocab_size=512, **ends, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ascii_model(tiny_chat_folder):
    """A tiny chat model that writes printable ASCII only, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat_folder)
    backbone = AutoModelForCausalLM.from_pretrained(tiny_chat_folder).float().eval()
    plain = [
        token for token in range(len(tokenizer))
        if token not in tokenizer.all_special_ids and tokenizer.decode([token]).isascii()
        and tokenizer.decode([token]).isprintable()
    ]  # fmt: skip
    others = [token for token in range(backbone.config.vocab_size) if token not in set(plain)]
    with torch.no_grad():
        backbone.lm_head.weight[others] = 0  # some other logit is always above 0
    backbone.generation_config.eos_token_id = None
    return MedusaModel(backbone, random_heads(vocab_size=512), WIDE), tokenizer


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """The command in this process: arguments -> exit code, standard output, standard error."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["medusa-train", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capfd.readouterr()

    return run


def assert_refused(outcome, *told):
    """Exit code 2 and one line on standard error that tells all of this."""
    code, _, error = outcome
    assert code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("medusa-train: ")
    assert all(part in error for part in told), error
