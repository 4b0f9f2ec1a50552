"""`custom_generate/generate.py` in plain transformers: the output of greedy decoding, from fewer passes."""

import ast
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config
from transformers.generation.streamers import BaseStreamer

from conftest import KINDS, SMALL, make_llama, random_heads
from medusa_train import custom_generate
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, Tree
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import save_heads


def make_qwen3():
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=64, head_dim=16, initializer_range=0.3, eos_token_id=None, **SMALL)
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture(scope="module", autouse=True)
def own_modules_folder(tmp_path_factory):
    """Where transformers copies code to that it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


MODELS = {"llama": lambda: make_llama(eos_token_id=None), "qwen3": make_qwen3}


def heads_of(kind, backbone):
    """Heads that are sometimes right: fresh ones say what the backbone says, and these are a little off."""
    reduced = kind.startswith("reduced")
    config = HeadsConfig(
        3, 1, 32, 64,
        draft_vocab_size=40 if reduced else 0,
        kind=next((name for name in ("hydra", "recurrent") if name in kind), "medusa"),
        reads_copies="copies" in kind,
        lm_head="shared" if "shared" in kind else "own",
    )  # fmt: skip
    heads = MedusaHeads.for_backbone(Backbone.wrap(backbone), config, torch.randperm(64)[:40] if reduced else None)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return heads


def published(folder, heads, tree, backbone=None):
    save_heads(folder, heads, backbone, tree)
    (folder / "custom_generate").mkdir()
    shutil.copy(custom_generate.__file__, folder / "custom_generate" / "generate.py")
    return str(folder)


def random_tree(chance):
    """Up to 60 paths below a root: wide enough that heads which know nothing are right now and then."""
    return Tree.from_paths(
        [[chance.randrange(12) for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(0, 60))]
    )


def decode(model, prompt, folder, tokens=24, **options):
    return model.generate(
        prompt, custom_generate=folder, heads=folder, trust_remote_code=True, max_new_tokens=tokens, do_sample=False,
        **options,
    )  # fmt: skip


def plain(model, prompt, tokens=24, **options):
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "kind",
    ["medusa", "hydra", "recurrent", "shared", "reduced", "reduced hydra shared", "reduced recurrent copies",
     "medusa copies", "hydra copies"],
)  # fmt: skip
def test_the_output_is_that_of_greedy_decoding_whatever_the_tree(tmp_path, name, kind):
    model, chance = MODELS[name](), random.Random(f"{name} {kind}")
    torch.manual_seed(0)
    heads = heads_of(kind, model)
    for number in range(4):
        folder = published(tmp_path / str(number), heads, random_tree(chance))
        prompt = torch.randint(64, (1, chance.randint(1, 12)))
        assert decode(model, prompt, folder).tolist() == plain(model, prompt).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_the_passes_that_the_package_takes(tmp_path, kind):
    model, tree = make_llama(eos_token_id=None), random_tree(random.Random(0))
    heads = heads_of(kind, model)
    folder = published(tmp_path / "heads", heads, tree)
    prompt = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])
    ours = MedusaModel(make_llama(eos_token_id=None), heads, tree).generate(prompt, 40, eos_token_ids=())
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    assert decode(model, prompt, folder, 40).tolist() == ours.sequences.tolist()
    assert len(passes) == 1 + ours.stats.steps
    assert ours.stats.tokens_per_step > 1.2


def test_it_stops_where_greedy_decoding_stops(tmp_path):
    model = make_llama(eos_token_id=None)
    folder = published(tmp_path / "heads", heads_of("medusa", model), Tree.from_paths([[0, 0], [1]]))
    prompt = torch.tensor([[5, 6, 7]])
    whole = plain(model, prompt, 12)[0].tolist()
    for tokens in range(1, 10):
        assert decode(model, prompt, folder, tokens)[0].tolist() == whole[: 3 + tokens]
    ends = {"eos_token_id": [whole[8], whole[10]], "pad_token_id": 0}
    assert decode(model, prompt, folder, 12, **ends).tolist() == plain(model, prompt, 12, **ends).tolist()


def test_a_streamer_sees_every_token_once(tmp_path):
    class Seen(BaseStreamer):
        tokens, ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, seen = make_llama(eos_token_id=None), Seen()
    folder = published(tmp_path / "heads", heads_of("medusa", model), Tree.chain(2))
    out = decode(model, torch.tensor([[5, 6, 7]]), folder, 9, streamer=seen)
    assert seen.ended
    assert seen.tokens == out[0].tolist()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"do_sample": True}, "sampling"),
        ({"num_beams": 2}, "beams"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "padding"),
        ({"assistant_model": make_llama()}, "assistant_model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path, options, named):
    model = make_llama()
    folder = published(tmp_path / "heads", random_heads(), Tree.chain(2))
    with pytest.raises(NotImplementedError, match=named) as refused:
        model.generate(
            torch.tensor([[1, 2, 3]]), custom_generate=folder, heads=folder, trust_remote_code=True,
            **({"do_sample": False, "max_new_tokens": 4} | options),
        )  # fmt: skip
    assert "medusa-train" in str(refused.value) or named == "assistant_model"


def test_two_prompts_and_sliding_windows_are_refused(tmp_path):
    folder = published(tmp_path / "heads", random_heads(), Tree.chain(2))
    with pytest.raises(NotImplementedError, match="more than one prompt"):
        decode(make_llama(), torch.ones(2, 3, dtype=torch.long), folder)
    sliding = AutoModelForCausalLM.from_config(MistralConfig(vocab_size=64, sliding_window=16, **SMALL))
    assert decode(sliding, torch.tensor([[1, 2, 3]]), folder, 10).shape == (1, 13)
    with pytest.raises(NotImplementedError, match="sliding window of 16"):
        decode(sliding, torch.tensor([[1, 2, 3]]), folder, 14)


def test_heads_of_another_model_are_refused(tmp_path):
    folder = published(tmp_path / "heads", random_heads(vocab_size=32), Tree.chain(2))
    with pytest.raises(ValueError, match=r"\(32, 32\), not \(64, 32\)"):
        decode(make_llama(), torch.tensor([[1, 2, 3]]), folder)


@pytest.mark.parametrize(("key", "value"), [("reads_copies", "no"), ("model_type", "eagle")])
def test_heads_of_an_unknown_kind_are_refused(tmp_path, key, value):
    folder = Path(published(tmp_path / "heads", random_heads(), Tree.chain(2)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match="are not known here"):
        decode(make_llama(), torch.tensor([[1, 2, 3]]), str(folder))


def test_it_needs_torch_transformers_and_safetensors_alone():
    """The published file runs where the package that made it is not installed."""
    tree = ast.parse(Path(custom_generate.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == {"torch", "transformers", "safetensors"}
