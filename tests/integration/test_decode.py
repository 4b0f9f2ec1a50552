"""Decoding on tiny random models: the output never depends on what was drafted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.exc import InvalidCxxCompiler
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from conftest import make_llama, random_heads
from medusa_train.inference import MedusaModel, NoDrafter, PromptLookupDrafter, Tree, UserError
from medusa_train.inference.attention import check_tree_attention, new_cache
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.candidates import TreeFiller
from medusa_train.inference.cpu_linear import pack_linears
from medusa_train.inference.graphs import _check_compiler
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.step import SMALLEST_BUCKET
from medusa_train.inference.verify import Draft

TREES = [
    Tree.root_only(),
    Tree.chain(3),
    Tree.from_paths([(i,) for i in range(6)]),
    Tree.from_paths([(0, 0, 0), (0, 1), (1, 0), (2,), (5, 3, 2)]),
    Tree.from_paths([(i, j, 0) for i in range(3) for j in range(3)]),
]


class Oracle:
    """Drafts the true continuation in a branch that changes from step to step, so every path gets accepted."""

    def __init__(self, tree, truths):
        self.tree, self.truths, self.max_size = tree, truths, tree.size

    def start(self, prompts, max_new_tokens, generators):
        turn, lengths = 0, [len(prompt) for prompt in prompts]
        leaves = [node for node in range(self.tree.size) if not self.tree.children[node]]

        def draft(context):
            nonlocal turn
            turn += 1
            rows = []
            for row, text in zip(context.numbers, context.texts, strict=True):
                branch = self.tree.ancestors[leaves[(turn + row) % len(leaves)]]
                ahead = self.truths[row][len(text) - lengths[row] :]
                tokens = [text[-1]]
                for node, path in enumerate(self.tree.paths[1:], start=1):
                    true = ahead[len(path) - 1] if len(path) <= len(ahead) else 1
                    tokens.append(true if node in branch else (true + 1 + node) % 60)
                rows.append(tokens)
            return Draft([self.tree] * len(rows), torch.tensor(rows))

        return draft


def greedy(model, prompt, count, **options):
    return model.generate(
        prompt[None], max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )[0].tolist()


def prompts(count, length, vocab=64):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, vocab, (length,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"tree{tree.size}x{tree.depth}")
def test_twenty_prompts_equal_transformers_greedy(tiny_llama, tree):
    model = MedusaModel(tiny_llama, random_heads(), tree)
    for number, prompt in enumerate(prompts(20, 7)):
        expected = greedy(tiny_llama, prompt, 64)
        assert model.generate(prompt, 64, eos_token_ids=()).sequences[0].tolist() == expected, number


@pytest.mark.parametrize("tree", TREES[1:], ids=lambda tree: f"tree{tree.size}x{tree.depth}")
def test_accepted_branches_equal_transformers_greedy(tiny_llama, tree):
    model = MedusaModel(tiny_llama, random_heads(), tree)
    for prompt in prompts(5, 4):
        expected = greedy(tiny_llama, prompt, 50)
        truth = expected[len(prompt) :]
        out = model.generate(prompt, 50, eos_token_ids=(), drafter=Oracle(tree, [truth]))
        assert out.sequences[0].tolist() == expected
        assert out.stats.tokens_per_step > 1.5
        assert out.stats.prefill_tokens + out.stats.step_tokens == 50


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
ARCHITECTURES = {
    "llama-tied": lambda: make_llama(tie_word_embeddings=True).config,
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "mistral-window": lambda: MistralConfig(**SMALL, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**(SMALL | {"num_hidden_layers": 7}), head_dim=8, sliding_window=8),
    "phi3": lambda: Phi3Config(**SMALL, pad_token_id=0),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, initializer_range=0.3
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=256, initializer_range=0.3,
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_architectures_decode_exactly(name, attention):
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(ARCHITECTURES[name](), attn_implementation=attention).float().eval()
    model = MedusaModel(backbone, random_heads(), TREES[3])
    for length in (1, 13):  # one token, and more than the window
        prompt = prompts(1, length)[0]
        expected = greedy(backbone, prompt, 30)
        drafter = Oracle(TREES[3], [expected[length:]])
        assert model.generate(prompt, 30, eos_token_ids=(), drafter=drafter).sequences[0].tolist() == expected
        assert model.generate(prompt, 30, eos_token_ids=()).sequences[0].tolist() == expected


def test_models_that_cannot_verify_a_tree_are_refused_with_the_reason():
    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    )
    with pytest.raises(UserError, match="MambaForCausalLM"):
        check_tree_attention(Backbone.wrap(mamba.float().eval()))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="encoder-decoder"):
        Backbone.wrap(t5)


def test_a_model_that_ignores_the_mask_is_refused(tiny_llama, monkeypatch):
    forward = tiny_llama.model.forward
    monkeypatch.setattr(
        tiny_llama.model, "forward", lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)
    )
    with pytest.raises(UserError, match="does not follow a tree attention mask"):
        check_tree_attention(Backbone.wrap(tiny_llama))


@pytest.mark.parametrize("budget", range(1, 10))
def test_the_budget_is_met_exactly_inside_a_block(tiny_llama, budget):
    tree, prompt = Tree.chain(3), prompts(1, 5)[0]
    truth = greedy(tiny_llama, prompt, 20)[5:]
    model = MedusaModel(tiny_llama, random_heads(), tree)
    out = model.generate(prompt, budget, eos_token_ids=(), drafter=Oracle(tree, [truth]))
    assert out.sequences[0, 5:].tolist() == truth[:budget]
    assert out.finish_reasons == ["length"]


def test_any_of_several_end_tokens_stops_inside_a_block(tiny_llama):
    tree, prompt = Tree.chain(3), prompts(1, 5)[0]
    truth = greedy(tiny_llama, prompt, 20)[5:]
    for place in range(9):
        ends = (truth[place], 63)
        expected = truth[: truth.index(truth[place]) + 1]
        model = MedusaModel(tiny_llama, random_heads(), tree)
        out = model.generate(prompt, 20, eos_token_ids=ends, drafter=Oracle(tree, [truth]))
        if 63 not in expected:
            assert out.sequences[0, 5:].tolist() == expected
            assert out.finish_reasons == ["stop"]


def test_a_prompt_that_ends_in_an_end_token_still_generates(tiny_llama):
    model = MedusaModel(tiny_llama, random_heads())
    assert len(model.generate(torch.tensor([4, 9]), 3, eos_token_ids=(9,)).sequences[0]) > 2


def test_passes_can_be_bounded(tiny_llama):
    out = MedusaModel(tiny_llama, random_heads()).generate(prompts(1, 5)[0], 50, eos_token_ids=(), max_steps=4)
    assert out.stats.steps == 4
    assert out.finish_reasons == ["steps"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_end_of_the_context_is_reached_and_not_crossed(kind):
    torch.manual_seed(0)
    if kind == "llama":
        backbone = make_llama(max_position_embeddings=24)
    else:
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=24, initializer_range=0.3)
        backbone = AutoModelForCausalLM.from_config(config).float().eval()
    model = MedusaModel(backbone, random_heads(), TREES[3])
    prompt = prompts(1, 22)[0]
    out = model.generate(prompt, 50, eos_token_ids=())
    assert out.finish_reasons == ["context"]
    assert out.sequences[0].tolist() == greedy(backbone, prompt, 2)
    with pytest.raises(UserError, match="reads at most 23"):
        model.generate(prompts(1, 24)[0], 5)


def test_the_cache_does_not_grow_with_the_models_context(monkeypatch):
    backbone = make_llama(max_position_embeddings=131072)
    held, original = [], TreeCache.commit
    monkeypatch.setattr(
        TreeCache, "commit", lambda cache, *moved: (original(cache, *moved), held.append(cache.layers[0].keys.shape))[0]
    )
    MedusaModel(backbone, random_heads(), TREES[3]).generate(prompts(1, 5)[0], 10, eos_token_ids=())
    assert max(shape[2] for shape in held) <= 5 + 10 + TREES[3].size


def test_calls_do_not_leak_into_each_other(tiny_llama):
    model = MedusaModel(tiny_llama, random_heads())
    first, second = prompts(2, 6)
    once = model.generate(first, 20, eos_token_ids=()).sequences.tolist()
    stream = model.stream(second, 20, eos_token_ids=())
    next(stream)
    stream.close()  # a reader that walks away
    assert model.generate(first, 20, eos_token_ids=()).sequences.tolist() == once
    assert not torch.is_inference_mode_enabled()


def test_sampling_with_a_seed_repeats_and_stays_in_top_k(tiny_llama):
    model, prompt = MedusaModel(tiny_llama, random_heads(), TREES[3]), prompts(1, 6)[0]

    def sample(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 30, temperature=0.9, generator=generator, eos_token_ids=(), **options)

    assert torch.equal(sample(3).sequences, sample(3).sequences)
    assert not torch.equal(sample(3).sequences, sample(4).sequences)
    greedy_ids = model.generate(prompt, 30, eos_token_ids=()).sequences
    assert torch.equal(sample(5, top_k=1).sequences, greedy_ids)


def test_a_seed_gives_the_text_of_plain_sampling_whatever_is_drafted(tiny_llama):
    model, rows = MedusaModel(tiny_llama, random_heads(), TREES[3]), [*prompts(2, 6), *prompts(1, 3)]

    def sample(prompt, drafter, **options):
        seeded = [torch.Generator().manual_seed(seed) for seed in range(3 if isinstance(prompt, list) else 1)]
        return model.generate(
            prompt, 30, temperature=0.8, generator=seeded, drafter=drafter, eos_token_ids=(), **options
        ).new_tokens

    for options in ({}, {"repetition_penalty": 1.3}, {"top_p": 0.7}):
        plain = sample(rows, NoDrafter(), **options)
        drafters = [None, Oracle(TREES[1], plain), Oracle(TREES[4], plain), PromptLookupDrafter(4, min_ngram=1)]
        for drafter in drafters:
            assert sample(rows, drafter, **options) == plain
            assert sample(rows[0], drafter, **options) == plain[:1]


def test_contradicting_settings_are_refused(tiny_llama):
    model, prompt = MedusaModel(tiny_llama, random_heads()), prompts(1, 6)[0]
    with pytest.raises(UserError, match="temperature 0"):
        model.generate(prompt, 5, verifier="greedy", temperature=0.5)
    with pytest.raises(UserError, match="temperature > 0"):
        model.generate(prompt, 5, verifier="rejection")
    with pytest.raises(UserError, match="stream takes one prompt"):
        model.stream(torch.ones(2, 5, dtype=torch.long), 5)
    with pytest.raises(UserError, match="no token"):
        model.generate(torch.tensor([], dtype=torch.long), 5)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), max_size=10), st.integers(0, 2**20))
def test_random_trees_and_prompts(paths, seed):
    backbone = make_llama()
    prompt = torch.randint(1, 64, (1 + seed % 9,), generator=torch.Generator().manual_seed(seed))
    model = MedusaModel(backbone, random_heads(seed=seed), Tree.from_paths(paths))
    out = model.generate(prompt, 24, eos_token_ids=())
    assert out.sequences[0].tolist() == greedy(backbone, prompt, 24)
    plain = model.generate(prompt, 24, eos_token_ids=(), drafter=NoDrafter())
    assert torch.equal(plain.sequences, out.sequences)
    assert plain.stats.tokens_per_step == 1


def has_compiler():
    try:
        _check_compiler()
    except UserError:
        return False
    return True


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_steps_decode_the_same_tokens_across_buckets():
    plain, packed = make_llama(), make_llama()
    pack_linears(packed, lambda: packed(input_ids=torch.zeros(1, 2, dtype=torch.long)))
    tree = Tree.from_paths([(0, 0), (1,)])
    model = MedusaModel(Backbone.wrap(packed), random_heads(), tree).compiled()
    prompt = prompts(1, 5)[0]
    expected = greedy(plain, prompt, 150)  # beyond SMALLEST_BUCKET
    model.generate(prompt, 20, eos_token_ids=())
    assert model.generate(prompt, 150, eos_token_ids=()).sequences[0].tolist() == expected
    assert len(model.step._graphs._seen) == 2  # a graph per bucket, whatever the budget
    # Graphs are told apart by the few guards that are kept: other numbers of tokens and rows get their own.
    rows = [prompt, prompts(1, 7)[0]]
    wanted = [expected[:25], greedy(plain, rows[1], 20)]
    for drafter in (NoDrafter(), model.medusa_drafter(Tree.chain(2)), None, NoDrafter()):
        for together in (rows[:1], rows, rows[:1]):
            out = model.generate(together, 20, eos_token_ids=(), drafter=drafter)
            assert out.new_tokens == [text[len(row) :] for row, text in zip(together, wanted, strict=False)]


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_drafting_proposes_the_same_tokens():
    heads = random_heads(kind="recurrent copies")
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(2)
    trees = [Tree.from_paths(paths) for paths in ([(0,), (1,)], [(0,), (2,)], [(0, 0), (1, 1)], [(0, 1, 0)])]
    fillers = [
        [TreeFiller(heads, tree, lambda ids: table[ids], compiled) for compiled in (False, True)] for tree in trees
    ]
    for rows in (1, 2, 1):
        for eager, compiled in fillers:
            hidden, roots = torch.randn(rows, 32, generator=draw), torch.randint(0, 64, (rows,), generator=draw)
            for copies in (None, torch.randint(-1, 64, (rows, 3), generator=draw), None):
                assert torch.equal(compiled.tokens(hidden, roots, copies), eager.tokens(hidden, roots, copies))


def test_compiling_without_a_compiler_says_what_to_install(tiny_llama, monkeypatch):
    def missing(*arguments):
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"install g\+\+"):
        MedusaModel(tiny_llama, random_heads()).compiled()


def test_a_long_text_crosses_the_buckets_of_the_cache(monkeypatch):
    """2,000 tokens, seen in slices of 128, 256, 512, ... columns: what compiled steps do, without compiling."""
    backbone = make_llama(max_position_embeddings=4096)
    model = MedusaModel(backbone, random_heads(), TREES[3])
    caches = []

    def bucketed(scratch, capacity):
        caches.append(new_cache(model.backbone, scratch, SMALLEST_BUCKET, SMALLEST_BUCKET))
        return caches[-1]

    monkeypatch.setattr(model.step, "new_cache", bucketed)
    prompt, seen = prompts(1, 5)[0], set()
    expected = greedy(backbone, prompt, 2000)
    tokens = prompt.tolist()
    for block in model.stream(prompt, 2000, eos_token_ids=(), drafter=Oracle(TREES[3], [expected[5:]])):
        tokens += block.tokens
        seen.add((caches[0].visible, caches[0].capacity))
    assert tokens == expected
    assert sorted(seen) == [(size, size) for size in (128, 256, 512, 1024, 2048)]
