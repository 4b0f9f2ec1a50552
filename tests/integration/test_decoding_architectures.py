"""Stock architectures decode exactly, or are refused by name before the first token."""

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    CodeGenConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from conftest import WIDE, make_llama, random_heads
from decoding import SPECIAL, Oracle, build_model, greedy, prompts
from medusa_train.inference import Backbone, DraftModelDrafter, MedusaModel, UserError, attention
from medusa_train.inference.attention import new_cache, read_prompts

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "mistral-window-8": lambda: MistralConfig(**SMALL, sliding_window=8),
    "gemma3-mixed-layers": lambda: Gemma3TextConfig(**(SMALL | {"num_hidden_layers": 7}), head_dim=8, sliding_window=8),
    "gemma2-softcap": lambda: Gemma2Config(**SMALL, head_dim=8, sliding_window=8),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, initializer_range=0.3, **SPECIAL
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.3,
    ),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4),
    "gpt-neox": lambda: GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=256, initializer_range=0.3, **SPECIAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_architectures_decode_a_batch_of_two_exactly(name):
    backbone = build_model(
        ARCHITECTURES[name](), **({"attn_implementation": "eager"} if name == "gemma2-softcap" else {})
    )
    model = MedusaModel(backbone, random_heads(), WIDE)
    rows = prompts((13, 2))  # more than the window, and less
    truths = [greedy(backbone, row, 30) for row in rows]
    out = model.generate(rows, 30, eos_token_ids=(), drafter=Oracle(WIDE, truths))
    assert out.new_tokens == truths
    assert out.stats.tokens_per_step > 1.5
    assert model.generate(rows, 30, eos_token_ids=()).new_tokens == truths


@pytest.mark.parametrize("name", ["llama", *ARCHITECTURES])
@pytest.mark.parametrize(("prefix", "rests"), [(11, (13, 2, 1)), (3, (1, 1)), (6, (0, 0, 0)), (0, (4, 2))])
def test_a_prefix_that_rows_share_is_read_once_and_gives_the_same(name, prefix, rests, monkeypatch):
    eager = {"attn_implementation": "eager"} if name == "gemma2-softcap" else {}
    backbone = Backbone.wrap(make_llama() if name == "llama" else build_model(ARCHITECTURES[name](), **eager))
    (start,) = prompts((prefix,))
    rows = [torch.cat([start, rest]) for rest in prompts(rests, seed=5)]
    read, original = [], Backbone.hidden_states
    monkeypatch.setattr(
        Backbone, "hidden_states",
        lambda self, ids, *rest, **more: (read.append(ids.numel()), original(self, ids, *rest, **more))[1],
    )  # fmt: skip
    results = []
    for worth in (1, 10_000):
        monkeypatch.setattr(attention, "WORTH_A_PASS", worth)
        del read[:]
        cache = new_cache(backbone, 2, 64)
        with torch.inference_mode():
            hidden = read_prompts(backbone, rows, cache)
        assert cache.lengths == list(map(len, rows))
        once = worth == 1 or not any(rests)
        assert sum(read) == (prefix if once else prefix * len(rows)) + max(rests) * len(rows)
        results.append((hidden, cache))
    (hidden, cache), (whole_hidden, whole_cache) = results
    torch.testing.assert_close(hidden, whole_hidden, rtol=0, atol=1e-5)
    for layer, whole in zip(cache.layers, whole_cache.layers, strict=True):
        for row, length in enumerate(cache.lengths):
            for ours, theirs in ((layer.keys, whole.keys), (layer.values, whole.values)):
                torch.testing.assert_close(
                    ours[row, :, 2 : 2 + length], theirs[row, :, 2 : 2 + length], rtol=0, atol=1e-5
                )
    monkeypatch.setattr(attention, "WORTH_A_PASS", 1)
    out = MedusaModel(backbone, random_heads(), WIDE).generate(rows, 12, eos_token_ids=())
    assert out.new_tokens == [greedy(backbone.model, row, 12) for row in rows]


def test_capped_logits_are_capped_in_what_the_verifier_sees():
    config = Gemma2Config(**SMALL, head_dim=8, sliding_window=8)
    config.final_logit_softcapping = 2.0
    backbone = build_model(config, attn_implementation="eager")
    model, (prompt,), seen = MedusaModel(backbone, random_heads(), WIDE), prompts((6,)), []

    def record(ids, scores):
        seen.append(scores.clone())
        return scores

    out = model.generate(prompt, 8, eos_token_ids=(), logits_processors=[record])
    assert out.new_tokens == [greedy(backbone, prompt, 8)]
    with torch.inference_mode():
        raw = backbone.lm_head(backbone.model(prompt[None])[0][:, -1])
        capped = backbone(prompt[None]).logits[:, -1]
    assert float(raw.abs().max()) > 2
    assert torch.allclose(seen[0], capped, atol=1e-5)
    assert all(float(scores.abs().max()) <= 2 for scores in seen)


def test_a_backbone_with_adapters_decodes_as_its_own_generate():
    (prompt,) = prompts((5,))
    plain = greedy(make_llama(), prompt, 20)
    torch.manual_seed(3)
    adapted = get_peft_model(
        make_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    truth = adapted.generate(
        input_ids=prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 5:].tolist()
    assert truth != plain, "the adapters should change something"
    model = MedusaModel(adapted, random_heads(), WIDE)
    assert model.generate(prompt, 20, eos_token_ids=(), drafter=Oracle(WIDE, [truth])).new_tokens == [truth]


@pytest.mark.parametrize("how", ["dispatch", "dispatch-offloaded-embeddings", "cpu_offload", "disk_offload"])
def test_a_model_that_accelerate_spreads_works_or_is_refused_by_name(how, tmp_path):
    (prompt,), backbone = prompts((5,)), make_llama()
    truth = greedy(backbone, prompt, 20)
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
    places |= {"model.layers.1": "disk", "lm_head": "disk"}
    if how == "cpu_offload":
        accelerate.cpu_offload(backbone, execution_device=torch.device("cpu"))
    elif how == "disk_offload":
        accelerate.disk_offload(backbone, tmp_path, execution_device=torch.device("cpu"))
    else:
        if how.endswith("embeddings"):
            places["model.embed_tokens"] = "disk"
        accelerate.dispatch_model(backbone, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert greedy(backbone, prompt, 20) == truth
    try:
        model = MedusaModel(backbone, random_heads(), WIDE)
    except UserError as error:
        assert "LlamaForCausalLM" in str(error)  # noqa: PT017
        return
    assert model.generate(prompt, 20, eos_token_ids=(), drafter=Oracle(WIDE, [truth])).new_tokens == [truth]


def test_models_whose_state_cannot_be_rolled_back_are_refused_with_the_reason():
    hybrids = {
        "MambaForCausalLM": (
            MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4),
            "linear_attention layers|state-space layers",
        ),
        "JambaForCausalLM": (
            JambaConfig(
                **SMALL, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
                mamba_d_state=4,
            ),
            "linear_attention layers|state-space layers",
        ),
        "Lfm2ForCausalLM": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "conv layers"),
    }  # fmt: skip
    for name, (config, reason) in hybrids.items():
        backbone = build_model(config)
        with pytest.raises(UserError, match=rf"{name} has ({reason}).*cannot be rolled back"):
            MedusaModel(backbone, random_heads())
        with pytest.raises(UserError, match="cannot be rolled back"):
            DraftModelDrafter(Backbone.wrap(backbone), Backbone.wrap(make_llama()))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="T5ForConditionalGeneration is an encoder-decoder"):
        MedusaModel(t5, random_heads())


def test_a_model_whose_forward_takes_no_4d_mask_is_refused_by_name_and_does_not_crash():
    bloom = build_model(
        BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, initializer_range=0.3, **SPECIAL)
    )
    with pytest.raises(UserError, match="BloomForCausalLM"):
        MedusaModel(bloom, random_heads())


def test_a_config_without_a_padding_token_is_no_reason_to_fail():
    codegen = build_model(
        CodeGenConfig(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, rotary_dim=4, initializer_range=0.3,
            **SPECIAL,
        )
    )  # fmt: skip
    rows = prompts((5, 2))
    truths = [greedy(codegen, row, 20) for row in rows]
    out = MedusaModel(codegen, random_heads(), WIDE).generate(rows, 20, eos_token_ids=(), drafter=Oracle(WIDE, truths))
    assert out.new_tokens == truths
