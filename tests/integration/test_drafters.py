"""Draft models, prompt lookup and lookup below a Medusa tree: exact, and accepted where they should be."""

from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config

from conftest import WIDE, make_llama, random_heads
from decoding import LENGTHS, SPECIAL, Oracle, build_model, greedy, lookup_drafter, near_copy, prompts
from medusa_train.inference import (
    Backbone,
    DraftModelDrafter,
    MedusaLookupDrafter,
    MedusaModel,
    PromptLookupDrafter,
    Sampling,
    Tree,
    UserError,
)
from medusa_train.inference.drafters import Context
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.sampling import Chances, draw
from medusa_train.inference.verify import Draft, accept_sampled, verify_rejection


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_draft_models_greedy_chain_gives_the_backbones_greedy_text(llama, model, num_tokens):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 40) for row in rows]
    stranger = Backbone.wrap(make_llama(seed=3, num_hidden_layers=1))
    for draft_model in (stranger, near_copy(llama)):
        drafter = DraftModelDrafter(draft_model, model.backbone, num_tokens)
        assert drafter.max_size == num_tokens + 1
        out = model.generate(rows, 40, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == truths
    assert out.stats.tokens_per_step > 1.2


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("sampling", [None, Sampling(0.8)])
def test_a_draft_model_equal_to_the_backbone_is_always_accepted(llama, model, num_tokens, sampling):
    drafter = DraftModelDrafter(model.backbone, model.backbone, num_tokens, sampling)
    count = 1 + 5 * (num_tokens + 1) - 1  # prefill's token, four full blocks and one that the budget cuts by one
    options = {} if sampling is None else {"temperature": 0.8, "generator": torch.Generator().manual_seed(1)}
    out = model.generate(prompts(LENGTHS), count, eos_token_ids=(), drafter=drafter, **options)
    assert out.stats.histogram == {num_tokens + 1: 12, num_tokens: 3}
    if sampling is None:
        assert out.new_tokens == [greedy(llama, row, count) for row in prompts(LENGTHS)]


def test_half_precision_drafts_are_judged_by_the_distribution_that_they_were_drawn_from(monkeypatch):
    """One fp32 tensor is drawn from, stated and compared; rounding it anew anywhere would bias what is accepted."""
    drawn, compared = [], []
    monkeypatch.setattr(
        "medusa_train.inference.draft_model.draw", lambda p, chances: drawn.append(p) or draw(p, chances)
    )
    llama, sampling = make_llama().bfloat16(), Sampling(1.3, top_k=20)
    drafter = DraftModelDrafter(Backbone.wrap(make_llama(seed=4).bfloat16()), Backbone.wrap(llama), 3, sampling)
    texts = prompts((4, 7))
    drafting = drafter.start(texts, 8, [torch.Generator().manual_seed(row) for row in range(2)])
    roots = torch.stack([text[-1] for text in texts])
    draft = drafting(Context([text.tolist() for text in texts], torch.zeros(2, 32), roots, [0, 1], [0, 0], [0, 1]))
    assert draft.probabilities.dtype == torch.float32
    assert torch.equal(draft.probabilities[:, :3], torch.stack(drawn, dim=1))
    assert (draft.probabilities[:, :3].gather(2, draft.tokens[:, 1:, None]) > 0).all()

    def compare(tokens, tree, q, target, generator):
        """The backbone's bf16 logits, warped in fp32, meet the same numbers."""
        compared.append((q, target(0)))
        return accept_sampled(tokens, tree, q, target, generator)

    monkeypatch.setattr("medusa_train.inference.verify.accept_sampled", compare)
    with torch.inference_mode():
        logits = torch.stack([llama(text[None]).logits[0, -1] for text in texts])[:, None].expand(-1, 4, -1)
    verify_rejection(logits, draft, [0, 1], chances=[Chances(None, logits.device) for _ in texts], sampling=sampling)
    for row, (q, p) in enumerate(compared):
        assert torch.equal(q, draft.probabilities[row])
        assert p.dtype == torch.float32
        assert torch.equal(p, sampling.probabilities(logits[row, 0].float()))


def test_a_draft_model_with_another_vocabulary_is_refused(model, tiny_chat_folder, tmp_path):
    other = Backbone.wrap(make_llama(vocab_size=65))
    with pytest.raises(UserError, match="65 tokens, the backbone 64"):
        DraftModelDrafter(other, model.backbone)
    with pytest.raises(UserError, match="num_tokens >= 1"):
        DraftModelDrafter(model.backbone, model.backbone, 0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat_folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    one, two = (Backbone.wrap(make_llama(vocab_size=512), str(folder)) for folder in (tiny_chat_folder, tmp_path))
    with pytest.raises(UserError, match="another tokenizer"):
        DraftModelDrafter(one, two)
    assert DraftModelDrafter(one, one).num_tokens == 4


@pytest.mark.parametrize("change", [-8, 8])
def test_a_draft_model_may_pad_its_vocabulary_otherwise(llama, tiny_chat_folder, change):
    source = str(tiny_chat_folder)
    backbone = Backbone.wrap(make_llama(vocab_size=512), source)
    model = MedusaModel(backbone, random_heads(vocab_size=512))
    narrow = Backbone.wrap(make_llama(vocab_size=512 + change, seed=2), source)
    (prompt,) = prompts((5,), vocab=500)
    for sampling in (None, Sampling(1.0)):
        out = model.generate(prompt, 20, eos_token_ids=(), drafter=DraftModelDrafter(narrow, backbone, 2, sampling))
        assert out.new_tokens == [greedy(backbone.model, prompt, 20)]
    sampled = model.generate(prompt, 20, eos_token_ids=(), temperature=1.0, drafter=DraftModelDrafter(
        narrow, backbone, 2, Sampling(1.0)))  # fmt: skip
    assert len(sampled.new_tokens[0]) == 20


def test_a_draft_models_cache_is_bounded_by_the_context_and_not_by_a_boundless_budget(monkeypatch):
    backbone = make_llama(max_position_embeddings=48)
    model = MedusaModel(backbone, random_heads())
    drafter, held = DraftModelDrafter(model.backbone, model.backbone, 3), []
    original = TreeCache.commit
    monkeypatch.setattr(
        TreeCache, "commit", lambda cache, *moved: (original(cache, *moved), held.append(cache.layers[0].keys.shape))[0]
    )
    (prompt,) = prompts((8,))
    out = model.generate(prompt, 20_000, eos_token_ids=(), drafter=drafter)
    assert out.finish_reasons == ["context"]
    assert 48 < max(shape[2] for shape in held) < 100


def test_a_draft_model_with_a_shorter_context_still_gives_the_backbones_text():
    torch.manual_seed(0)
    short = build_model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **SPECIAL))
    backbone = make_llama()
    model = MedusaModel(backbone, random_heads())
    for length in (10, 20):  # outgrows the draft model's context; begins beyond it
        (prompt,) = prompts((length,))
        try:
            drafter = DraftModelDrafter(Backbone.wrap(short), model.backbone, 2)
            out = model.generate(prompt, 20, eos_token_ids=(), drafter=drafter)
        except UserError as error:  # refusing is honest as well
            assert "16" in str(error) or "15" in str(error)  # noqa: PT017
        else:
            assert out.new_tokens == [greedy(backbone, prompt, 20)]


def test_prompt_lookup_accepts_on_looping_text_and_changes_nothing_on_random_text(llama, model):
    # Without layers a model's next token depends on the last one alone, so its text soon loops.
    backbone = make_llama(num_hidden_layers=1, num_key_value_heads=1)
    with torch.no_grad():
        backbone.model.layers[0].self_attn.o_proj.weight.zero_()
    looping = MedusaModel(backbone, random_heads(), WIDE)
    (prompt,) = prompts((5,))
    truth = greedy(backbone, prompt, 80)
    for drafter in (PromptLookupDrafter(8), lookup_drafter(looping, 8)):
        out = looping.generate(prompt, 80, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == [truth]
        assert out.stats.tokens_per_step > 3
    rows = prompts((40, 3))
    truths = [greedy(llama, row, 30) for row in rows]
    for drafter in (PromptLookupDrafter(8, 3, 1), PromptLookupDrafter(1, 5, 5), lookup_drafter(model, 8)):
        assert model.generate(rows, 30, eos_token_ids=(), drafter=drafter).new_tokens == truths


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.7, "verifier": "typical"}])
def test_a_row_without_a_copy_accepts_in_a_batch_what_it_accepts_alone(options):
    # One token for ever: padding that repeats the root would be accepted if it were looked at.
    backbone = make_llama()
    for layer in backbone.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    backbone.model.embed_tokens.weight.data.fill_(1.0)
    backbone.lm_head.weight.data.zero_()[7] = 9.0
    model = MedusaModel(backbone, random_heads(), Tree.root_only())
    rows = [torch.tensor([7, 8, 9, 7, 8, 9, 7, 8]), torch.tensor([1, 2, 7])]
    for drafter in (PromptLookupDrafter(4, 3, 3), MedusaLookupDrafter(model.drafter, PromptLookupDrafter(4, 3, 3))):
        arguments = {"max_new_tokens": 12, "eos_token_ids": (), "drafter": drafter} | options
        alone = Counter()
        for row in rows:
            alone += model.generate(row, **arguments).stats.histogram
        batch = model.generate(rows, **arguments).stats
        assert batch.histogram == alone
        assert 1 < batch.tokens_per_step < 5


@pytest.mark.parametrize("right", [0, 1])
def test_of_two_branches_that_begin_alike_the_longer_true_one_is_accepted(llama, model, right):
    (prompt,), tree = prompts((5,)), Tree.from_paths([(0, 0, 0), (1, 0, 0)])
    truth = greedy(llama, prompt, 25)

    class Twins(Oracle):
        def start(self, prompts, max_new_tokens, generators):
            def draft(context):
                (text,) = context.texts
                ahead = [*truth, 1, 1, 1][len(text) - len(prompt) :]
                tokens = [text[-1]]
                for path in tree.paths[1:]:
                    wrong = len(path) > 1 and path[0] != right
                    tokens.append((ahead[len(path) - 1] + wrong) % 64)
                return Draft([tree], torch.tensor([tokens]))

            return draft

    for options in ({}, {"logits_processors": [lambda ids, scores: scores]}, {"temperature": 1.0, "top_k": 1}):
        out = model.generate(prompt, 25, eos_token_ids=(), drafter=Twins(tree, [truth]), **options)
        assert out.new_tokens == [truth]
        assert out.stats.histogram == {4: 6}


def test_lookup_below_any_medusa_tree_equals_greedy(llama):
    (prompt,) = prompts((5,))
    truth = greedy(llama, prompt, 40)
    for tree in (Tree.root_only(), Tree.chain(3), WIDE):
        model = MedusaModel(llama, random_heads(), tree)
        drafter = lookup_drafter(model, 5)
        assert drafter.max_size == tree.size + 5 - tree.depth
        assert model.generate(torch.cat([prompt, prompt]), 40, eos_token_ids=(), drafter=drafter).new_tokens == [
            greedy(llama, torch.cat([prompt, prompt]), 40)
        ]
        # A prompt that holds the whole answer: the copied chain is accepted.
        longer = torch.cat([prompt, torch.tensor(truth), prompt])
        out = model.generate(longer, 20, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == [greedy(llama, longer, 20)]
