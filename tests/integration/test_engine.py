"""The decoding engine: batches, drafters, processors, stops, streams and samples never change what a row gets.

References are transformers' own `generate` wherever it has the feature, else exact probabilities from the model's own
forward pass.
"""

import itertools
import threading
import types
from collections import Counter
from functools import lru_cache

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import chisquare
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    BloomConfig,
    CodeGenConfig,
    EncoderRepetitionPenaltyLogitsProcessor,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2Config,
    LogitsProcessorList,
    MambaConfig,
    MinNewTokensLengthLogitsProcessor,
    MistralConfig,
    MixtralConfig,
    NoRepeatNGramLogitsProcessor,
    OPTConfig,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import ClassifierFreeGuidanceLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from conftest import make_llama, random_heads
from medusa_train.inference import (
    Backbone,
    DecodeStats,
    DraftModelDrafter,
    MedusaLookupDrafter,
    MedusaModel,
    NoDrafter,
    PromptLookupDrafter,
    Sampling,
    Tree,
    UserError,
    attention,
)
from medusa_train.inference.attention import new_cache, read_prompts
from medusa_train.inference.decode import decode
from medusa_train.inference.drafters import Context
from medusa_train.inference.sampling import Chances, draw
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Stopping
from medusa_train.inference.verify import Draft, accept_sampled, verify_greedy, verify_rejection

WIDE = Tree.from_paths([(0, 0, 0), (0, 1), (1, 0), (2,), (5, 3, 2)])
LENGTHS = (1, 5, 9)


class Oracle:
    """Drafts each row's true continuation in a branch that changes from step to step and from row to row.

    ``tree`` may be a list of one tree per row, all of one size.
    """

    def __init__(self, tree, truths):
        self.trees, self.truths = tree if isinstance(tree, list) else [tree] * len(truths), truths
        self.max_size = self.trees[0].size

    def start(self, prompts, max_new_tokens, generators):
        turn, lengths = 0, [len(prompt) for prompt in prompts]

        def draft(context):
            nonlocal turn
            turn += 1
            rows, trees = [], [self.trees[number] for number in context.numbers]
            for row, tree, text in zip(context.numbers, trees, context.texts, strict=True):
                leaves = [node for node in range(tree.size) if not tree.children[node]]
                branch = tree.ancestors[leaves[(turn + row) % len(leaves)]]
                ahead = self.truths[row][len(text) - lengths[row] :]
                tokens = [text[-1]]
                for node, path in enumerate(tree.paths[1:], start=1):
                    true = ahead[len(path) - 1] if len(path) <= len(ahead) else 1
                    tokens.append(true if node in branch else (true + 1 + node) % 60)
                rows.append(tokens)
            return Draft(trees, torch.tensor(rows))

        return draft


class Failing:
    """A drafter that raises at its third step."""

    max_size = 1

    def start(self, prompts, max_new_tokens, generators):
        plain, steps = NoDrafter().start(prompts, max_new_tokens, generators), itertools.count(1)

        def draft(context):
            if next(steps) == 3:
                raise RuntimeError("the drafter broke")
            return plain(context)

        return draft


def greedy(model, prompt, count, eos=None, **options):
    """transformers' own continuation of one prompt, without the prompt."""
    out = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=count, do_sample=False,
        pad_token_id=0, eos_token_id=eos, **options,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def cut(tokens, ends):
    """Tokens up to the first end token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def prompts(lengths, vocab=64, seed=11):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def padded(rows, side, pad=7):
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def drain(stream, seen):
    """Collect a stream's tokens for as long as it goes."""
    for block in stream:
        seen += block.tokens


def lookup_drafter(model, num_tokens=4):
    return MedusaLookupDrafter(model.drafter, PromptLookupDrafter(num_tokens, 2, 1))


@lru_cache(maxsize=4)
def near_copy(backbone, noise=0.02):
    """A draft model that often, but not always, agrees with the backbone."""
    copy = make_llama(vocab_size=backbone.config.vocab_size)
    copy.load_state_dict(backbone.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return Backbone.wrap(copy)


DRAFTERS = {
    "none": lambda model, truths: NoDrafter(),
    "heads": lambda model, truths: model.drafter,
    "recurrent-heads": lambda model, truths: MedusaModel(
        model.backbone, random_heads(vocab_size=model.backbone.vocab_size, kind="recurrent copies"), WIDE
    ).drafter,
    "hydra-heads": lambda model, truths: MedusaModel(
        model.backbone, random_heads(vocab_size=model.backbone.vocab_size, kind="hydra"), WIDE
    ).drafter,
    "oracle": lambda model, truths: Oracle(WIDE, truths),
    "oracle-a-tree-per-row": lambda model, truths: Oracle(
        [[Tree.chain(4), Tree.from_paths([(0, 0), (1, 0)]), Tree.from_paths([(i,) for i in range(4)])][i % 3]
         for i in range(len(truths))], truths,
    ),
    "prompt-lookup": lambda model, truths: PromptLookupDrafter(4, 2, 1),
    "heads-and-lookup": lambda model, truths: lookup_drafter(model),
    "draft-model": lambda model, truths: DraftModelDrafter(near_copy(model.backbone.model), model.backbone, 3),
    "sampling-draft-model": lambda model, truths: DraftModelDrafter(
        near_copy(model.backbone.model), model.backbone, 3, Sampling(0.5)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    """Shared and never changed by a test; those that change a model make their own."""
    return make_llama()


@pytest.fixture(scope="module")
def model(llama):
    return MedusaModel(llama, random_heads(), WIDE)


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_of_any_lengths_and_padding_equal_their_single_runs(llama, model, name):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 24) for row in rows]
    for row, truth in zip(rows, truths, strict=True):
        assert model.generate(row, 24, eos_token_ids=(), drafter=DRAFTERS[name](model, [truth])).new_tokens == [truth]
    drafter = DRAFTERS[name](model, truths)
    for given, mask in (padded(rows, "left"), padded(rows, "right"), (rows, None)):
        out = model.generate(given, 24, attention_mask=mask, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == truths
        assert out.finish_reasons == ["length"] * 3
        assert out.stats.prefill_tokens + out.stats.step_tokens == 72
        if name in ("oracle", "oracle-a-tree-per-row", "draft-model"):
            assert out.stats.tokens_per_step > 1.3  # branches were really accepted
            assert len(out.stats.histogram) > 1  # and not everywhere alike


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_end_early_leave_the_others_as_they_are(llama, model, name):
    rows = prompts((5, 1, 9, 3))
    truths = [greedy(llama, row, 40) for row in rows]
    ends = (truths[0][0], truths[1][7], truths[2][16])
    expected = [cut(truth, ends) for truth in truths]
    assert len({len(row) for row in expected}) >= 3, "the rows should end at different times"
    assert expected == [greedy(llama, row, 40, eos=list(ends)) for row in rows]
    out = model.generate(rows, 40, eos_token_ids=ends, drafter=DRAFTERS[name](model, truths))
    assert out.new_tokens == expected
    assert out.finish_reasons == ["stop" if row[-1] in ends else "length" for row in expected]
    assert out.stats.step_tokens == sum(map(len, expected)) - 4


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_have_ended_take_part_in_no_pass(llama, model, name, monkeypatch):
    rows = prompts((5, 1, 9, 3))
    truths = [greedy(llama, row, 40) for row in rows]
    ends = (truths[0][0], truths[1][7], truths[2][16])
    sizes, original = [], Step.__call__
    monkeypatch.setattr(
        Step, "__call__", lambda step, tokens, *rest: (sizes.append(len(tokens)), original(step, tokens, *rest))[1]
    )
    drafter = DRAFTERS[name](model, truths)
    running = []
    for blocks in model.stream_batch(rows, 40, eos_token_ids=ends, drafter=drafter):
        expected = running[-1] if running else 0  # rows that went on after the blocks before
        assert set(sizes) <= {expected}
        sizes.clear()
        running.append(sum(bool(block.tokens) and block.finish_reason is None for block in blocks))
    assert running[-1] == 0
    assert len(set(running)) >= 3, "the rows should end at different times"


@pytest.mark.parametrize("name", ["heads", "sampling-draft-model"])
def test_seeded_rows_that_end_early_leave_the_others_as_they_are(model, name):
    rows, drafter = prompts((*LENGTHS, 4, 2)), DRAFTERS[name](model, [])
    options = {"eos_token_ids": range(0, 64, 8), "temperature": 0.8, "repetition_penalty": 1.2, "drafter": drafter}
    singles = [
        model.generate(row, 30, generator=generator, **options)
        for row, generator in zip(rows, seeded(range(5)), strict=True)
    ]
    out = model.generate(rows, 30, generator=seeded(range(5)), **options)
    assert out.new_tokens == [single.new_tokens[0] for single in singles]
    assert out.finish_reasons == [single.finish_reasons[0] for single in singles]
    assert len({len(tokens) for tokens in out.new_tokens}) > 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sink_gets_the_state_that_each_token_was_chosen_from(llama, model, name):
    rows, states = prompts((5, 1, 9, 3)), [[] for _ in range(4)]
    truths = [greedy(llama, row, 40) for row in rows]
    stopping = Stopping(40, (truths[0][0], truths[1][7], truths[2][16]))
    new = [[] for _ in rows]
    for blocks in decode(
        model.step, DRAFTERS[name](model, truths), verify_greedy, rows, stopping, DecodeStats(),
        states=lambda row, hidden: states[row].append(hidden),
    ):  # fmt: skip
        for row, block in enumerate(blocks):
            new[row] += block.tokens
            assert [len(piece) for piece in states[row]][-1:] == [len(block.tokens)] or not block.tokens
    assert new == [cut(truth, stopping.eos_token_ids) for truth in truths]
    for row, tokens, pieces in zip(rows, new, states, strict=True):
        whole = torch.cat([row, torch.tensor(tokens)])
        with torch.inference_mode():
            alone = llama.model(whole[None])[0][0]
        torch.testing.assert_close(torch.cat(pieces), alone[len(row) - 1 : -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["heads", "draft-model"])
def test_each_row_of_a_batch_accepts_what_its_single_run_accepts(llama, name):
    """Speed is no accident of the batch: every row drafts from its own text and hidden state."""
    tree = Tree.from_paths([(i, j) for i in range(12) for j in range(3)])  # wide enough for random heads to hit
    model = MedusaModel(llama, random_heads(), tree)
    rows, drafter = prompts((*LENGTHS, 3)), DRAFTERS[name](model, [])
    together = list(model.stream_batch(rows, 30, eos_token_ids=(), drafter=drafter))
    singles = [list(model.stream(row, 30, eos_token_ids=(), drafter=drafter)) for row in rows]
    assert [[blocks[row] for blocks in together if blocks[row].tokens] for row in range(4)] == singles
    assert sum(block.drafted for blocks in singles for block in blocks) > 10


@pytest.mark.parametrize("name", DRAFTERS)
def test_eight_identical_prompts_give_eight_identical_rows(llama, model, name):
    (prompt,) = prompts((6,))
    truth = greedy(llama, prompt, 30)
    drafter = DRAFTERS[name](model, [truth] * 8)
    out = model.generate(prompt.repeat(8, 1), 30, eos_token_ids=(), drafter=drafter)
    assert out.new_tokens == [truth] * 8


def test_sequences_hold_the_prompts_as_given_then_new_tokens_padded_on_the_right(llama):
    model = MedusaModel(make_llama(pad_token_id=0), random_heads(), WIDE)
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 12) for row in rows]
    ends = (truths[0][2], truths[1][5])
    expected = [cut(truth, ends) for truth in truths]
    longest = max(map(len, expected))
    tail = [row + [0] * (longest - len(row)) for row in expected]
    assert len({len(row) for row in expected}) > 1
    ids, mask = padded(rows, "left")
    for given, how in ((ids, mask), (ids.int(), mask.bool())):
        out = model.generate(given, 12, attention_mask=how, eos_token_ids=ends)
        assert out.sequences.shape == (3, 9 + longest)
        assert out.sequences[:, :9].tolist() == ids.tolist()
        assert out.sequences[:, 9:].tolist() == tail
    listed = model.generate(rows, 12, eos_token_ids=ends).sequences
    assert listed[:, :9].tolist() == padded(rows, "right", pad=0)[0].tolist()
    assert listed[:, 9:].tolist() == tail
    assert model.generate(rows[1], 12, eos_token_ids=ends).sequences.shape == (1, 5 + len(expected[1]))
    assert model.generate(rows[1][None], 0).sequences.tolist() == [rows[1].tolist()]


def test_a_view_of_a_larger_tensor_is_a_prompt(llama, model):
    table = torch.stack(prompts((12, 12, 12)))
    out = model.generate(table.T[:5], 10, eos_token_ids=())  # (5, 3), not contiguous
    assert out.new_tokens == [greedy(llama, row, 10) for row in table.T[:5]]


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
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


def build(config, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).float().eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_architectures_decode_a_batch_of_two_exactly(name):
    backbone = build(ARCHITECTURES[name](), **({"attn_implementation": "eager"} if name == "gemma2-softcap" else {}))
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
    backbone = Backbone.wrap(make_llama() if name == "llama" else build(ARCHITECTURES[name](), **eager))
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
    backbone = build(config, attn_implementation="eager")
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


# --------------------------------------------------------------------------------------------------------- drafters


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
    drafter, columns = DraftModelDrafter(model.backbone, model.backbone, 3), []
    original = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kw: (columns.append(size), original(*size, **kw))[1])
    (prompt,) = prompts((8,))
    out = model.generate(prompt, 20_000, eos_token_ids=(), drafter=drafter)
    assert out.finish_reasons == ["context"]
    assert max(size[2] for size in columns if len(size) == 4) < 100


def test_a_draft_model_with_a_shorter_context_still_gives_the_backbones_text():
    torch.manual_seed(0)
    short = build(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **SPECIAL))
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
        assert drafter.max_size == tree.size + 5
        assert model.generate(torch.cat([prompt, prompt]), 40, eos_token_ids=(), drafter=drafter).new_tokens == [
            greedy(llama, torch.cat([prompt, prompt]), 40)
        ]
        # A prompt that holds the whole answer: the copied chain is accepted.
        longer = torch.cat([prompt, torch.tensor(truth), prompt])
        out = model.generate(longer, 20, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == [greedy(llama, longer, 20)]


def exact_joint(backbone, prompt, count, shape):
    """Probability of every text of ``count`` tokens after the prompt; ``shape``: logits (V,) -> probabilities."""
    vocab, exact = backbone.config.vocab_size, {(): 1.0}
    for _ in range(count):
        texts = list(exact)
        ids = torch.stack([torch.cat([prompt, torch.tensor(text, dtype=torch.long)]) for text in texts])
        with torch.inference_mode():
            logits = backbone(ids).logits[:, -1].float()
        exact = {
            (*text, token): exact[text] * p
            for text, row in zip(texts, logits, strict=True)
            for token, p in enumerate(shape(row).tolist())
        }
        assert len(exact) == len(texts) * vocab
    return exact


def p_value(counts, exact):
    """χ² of counts against exact probabilities, cells that are too rare for it pooled."""
    rounds = sum(counts.values())
    assert all(exact[text] > 0 for text in counts), "a text that the target excludes was emitted"
    common = [text for text in exact if exact[text] * rounds >= 5]
    observed, expected = [counts[text] for text in common], [exact[text] * rounds for text in common]
    observed.append(rounds - sum(observed))
    expected.append(rounds - sum(expected))
    if expected[-1] < 5:
        rare = observed.pop(), expected.pop()
        observed[-1] += rare[0]
        expected[-1] += rare[1]
    return chisquare(observed, [e * rounds / sum(expected) for e in expected]).pvalue


TOY = 5
SAMPLED_DRAFTERS = {
    "none": lambda model: NoDrafter(),
    "heads": lambda model: model.drafter,
    "heads-and-lookup": lambda model: lookup_drafter(model, 3),
    "draft-model-chosen": lambda model: DraftModelDrafter(toy_draft_model(), model.backbone, 2),
    "draft-model-sampled": lambda model: DraftModelDrafter(toy_draft_model(), model.backbone, 2, Sampling(1.0)),
    "draft-model-sampled-k1": lambda model: DraftModelDrafter(toy_draft_model(), model.backbone, 1, Sampling(2.0)),
}


def toy_draft_model():
    return Backbone.wrap(make_llama(vocab_size=TOY, seed=4))


@pytest.mark.parametrize(
    ("name", "processed"),
    [*((name, False) for name in SAMPLED_DRAFTERS), ("heads", True), ("draft-model-sampled", True)],
)
def test_sampled_texts_have_the_backbones_joint_distribution(name, processed):
    """Three tokens: prefill's, and two (of K + 1) that drafting and verification share."""
    backbone = make_llama(vocab_size=TOY, seed=1)
    model = MedusaModel(backbone, random_heads(vocab_size=TOY), Tree.from_paths([(0, 0), (1, 0), (0, 1)]))
    (prompt,), sampling = prompts((4,), vocab=TOY), Sampling(2.5)
    bias = torch.tensor([0.0, 2.0, 0.0, -2.0, 0.0])
    options = {"logits_processors": [lambda ids, scores: scores + bias]} if processed else {}

    def shape(row):
        return sampling.probabilities(row + bias if processed else row)

    exact = exact_joint(backbone, prompt, 3, shape)
    generator, counts = torch.Generator().manual_seed(3), Counter()
    for _ in range(6):
        out = model.generate(
            prompt.repeat(250, 1), 3, eos_token_ids=(), temperature=2.5, generator=generator,
            drafter=SAMPLED_DRAFTERS[name](model), **options,
        )  # fmt: skip
        counts.update(map(tuple, out.new_tokens))
    assert p_value(counts, exact) > 1e-3
    wrong = dict.fromkeys(exact, 1 / TOY**3)
    assert p_value(counts, wrong) < 1e-6  # the test has the power to see another distribution


# ------------------------------------------------------------------------------------------------------- processors


def even_only(ids, scores):
    return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, -torch.inf)


class Recorder:
    """Remembers the texts that it was called with, and bends the logits with how many those were."""

    def __init__(self):
        self.texts = []

    def __call__(self, ids, scores):
        self.texts.append(ids[0].tolist())
        return scores + 3 * torch.cos(torch.arange(scores.shape[-1]) * len(self.texts))


PROCESSORS = {
    "repetition-penalty": lambda prompt, ends: RepetitionPenaltyLogitsProcessor(1.3),
    "min-new-tokens": lambda prompt, ends: MinNewTokensLengthLogitsProcessor(len(prompt), 5, list(ends)),
    "no-repeat-ngram": lambda prompt, ends: NoRepeatNGramLogitsProcessor(2),
    "even-only": lambda prompt, ends: even_only,
    "stateful": lambda prompt, ends: Recorder(),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processed_greedy_equals_transformers_with_the_same_processor(llama, model, name, drafter):
    for prompt in prompts((9,)):
        free = greedy(llama, prompt, 24)
        ends = (free[1], free[12]) if name == "min-new-tokens" else ()
        truth = greedy(
            llama, prompt, 24, eos=list(ends) or None,
            logits_processor=LogitsProcessorList([PROCESSORS[name](prompt, ends)]),
        )  # fmt: skip
        out = model.generate(
            prompt, 24, eos_token_ids=ends, drafter=DRAFTERS[drafter](model, [truth]),
            logits_processors=[PROCESSORS[name](prompt, ends)],
        )  # fmt: skip
        assert out.new_tokens == [truth]
        if name == "min-new-tokens":
            assert len(truth) >= 5
            assert len(free) > free.index(ends[0]) + 1  # without the processor it would have ended at once
        if name in ("even-only", "stateful"):
            assert truth != free
        if drafter == "oracle" and len(truth) > 10:
            assert out.stats.tokens_per_step > 1.5


def test_the_repetition_penalty_option_equals_transformers(llama, model):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 24, repetition_penalty=1.3) for row in rows]
    assert truths != [greedy(llama, row, 24) for row in rows]
    for drafter in (None, Oracle(WIDE, truths)):
        out = model.generate(rows, 24, eos_token_ids=(), repetition_penalty=1.3, drafter=drafter)
        assert out.new_tokens == truths
    both = model.generate(rows, 24, eos_token_ids=(), repetition_penalty=1.3, logits_processors=[even_only])
    assert both.new_tokens == [
        greedy(llama, row, 24, repetition_penalty=1.3, logits_processor=LogitsProcessorList([even_only]))
        for row in rows
    ]
    with pytest.raises(UserError, match="repetition_penalty must be above 0"):
        model.generate(rows, 4, repetition_penalty=0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_processor_is_called_with_the_prefixes_of_plain_decoding_once_each_and_in_order(
    llama, model, drafter, temperature
):
    for prompt in prompts((1, 6)):
        truth = greedy(llama, prompt, 30, logits_processor=LogitsProcessorList([Recorder()]))
        recorder, options = Recorder(), {}
        if temperature:
            options = {"temperature": temperature, "generator": torch.Generator().manual_seed(1)}
        out = model.generate(
            prompt, 24, eos_token_ids=(), drafter=DRAFTERS[drafter](model, [truth]), logits_processors=[recorder],
            **options,
        )  # fmt: skip
        text = prompt.tolist() + out.new_tokens[0]
        prefixes = [text[:end] for end in range(len(prompt), len(text))]
        assert recorder.texts[: len(prefixes)] == prefixes


def test_a_processor_is_not_called_beyond_the_end_of_a_text(llama, model):
    """Plain decoding shows a processor no text that holds an end token or fills the budget; grammars rely on it."""
    (prompt,) = prompts((6,))
    truth = greedy(llama, prompt, 20)
    for count, ends in ((20, (truth[7],)), (7, ()), (8, ()), (9, ())):
        recorder = Recorder()
        recorder.__class__ = type("Passive", (Recorder,), {"__call__": lambda self, ids, scores: (
            self.texts.append(ids[0].tolist()), scores)[1]})  # fmt: skip
        out = model.generate(
            prompt, count, eos_token_ids=ends, drafter=Oracle(Tree.chain(3), [truth]), logits_processors=[recorder]
        )
        expected = cut(truth[:count], ends)
        assert out.new_tokens == [expected]
        assert recorder.texts == [prompt.tolist() + expected[:end] for end in range(len(expected))]


def test_only_even_ids_are_ever_sampled_when_only_those_are_allowed(model):
    for name in DRAFTERS:
        out = model.generate(
            prompts(LENGTHS), 20, eos_token_ids=(), temperature=1.5, logits_processors=[even_only],
            drafter=DRAFTERS[name](model, [[2] * 20] * 3),
        )  # fmt: skip
        assert all(token % 2 == 0 for row in out.new_tokens for token in row), name


@pytest.mark.parametrize("drafter", ["heads", "heads-and-lookup", "sampling-draft-model"])
def test_sampling_with_a_processor_repeats_with_a_seed(model, drafter):
    def sample(seed):
        return model.generate(
            prompts(LENGTHS), 20, eos_token_ids=(), temperature=0.9, repetition_penalty=1.2,
            generator=torch.Generator().manual_seed(seed), drafter=DRAFTERS[drafter](model, []),
        ).new_tokens  # fmt: skip

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_processor_that_allows_nothing_is_an_error_and_not_a_token(model):
    """transformers raises as well; drawing from nothing would emit the vocabulary's last token as if it were meant."""
    for drafter in (NoDrafter(), DRAFTERS["sampling-draft-model"](model, [])):
        with pytest.raises((UserError, RuntimeError)):
            model.generate(
                prompts((4,)), 5, eos_token_ids=(), temperature=1.0, drafter=drafter,
                logits_processors=[lambda ids, scores: torch.full_like(scores, -torch.inf)],
            )  # fmt: skip


def test_infinite_logits_are_an_error_and_not_a_token(model):
    """An overflow in fp16 or in a processor has no distribution to draw from; the path without processors says so."""
    for drafter in (NoDrafter(), DRAFTERS["sampling-draft-model"](model, [])):
        with pytest.raises((UserError, RuntimeError)):
            model.generate(
                prompts((4,)), 5, eos_token_ids=(), temperature=1.0, drafter=drafter,
                logits_processors=[lambda ids, scores: scores.index_fill(1, torch.tensor([3]), torch.inf)],
            )  # fmt: skip


def synth_id():
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[654, 400, 836, 123], sampling_table_size=2**10, sampling_table_seed=0,
        context_history_size=64, device=torch.device("cpu"),
    )  # fmt: skip


def test_processors_that_keep_state_for_a_batch_are_refused_by_name_but_exact_for_one_row(llama, model):
    (prompt,) = prompts((6,))
    makers = {
        "SynthIDTextWatermarkLogitsProcessor": synth_id,
        "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda: UnbatchedClassifierFreeGuidanceLogitsProcessor(
            1.8, llama, unconditional_ids=prompt[None, -1:]
        ),
    }
    for name, make in makers.items():
        with pytest.raises(UserError, match=f"{name} knows the rows"):
            model.generate(prompts(LENGTHS), 5, logits_processors=[make()])
        with pytest.raises(UserError, match=f"{name} knows the rows"):
            model.generate(prompt, 5, logits_processors=[make()], temperature=1.0, verifier="typical")
        truth = greedy(llama, prompt, 25, logits_processor=LogitsProcessorList([make()]))
        assert truth != greedy(llama, prompt, 25), f"{name} should change something"
        for drafter in (None, Oracle(WIDE, [truth])):
            out = model.generate(prompt, 25, eos_token_ids=(), logits_processors=[make()], drafter=drafter)
            assert out.new_tokens == [truth], name


def test_processors_that_know_the_rows_of_a_batch_are_right_in_each_row_or_refused_by_name(llama, model):
    rows = prompts((5, 5))
    allowed = [list(range(0, 64, 2)), list(range(1, 64, 2))]

    def encoder(wanted):
        return EncoderRepetitionPenaltyLogitsProcessor(3.0, torch.stack(wanted))

    makers = {
        "PrefixConstrained": lambda wanted: PrefixConstrainedLogitsProcessor(lambda row, ids: allowed[row], 1),
        "EncoderRepetitionPenalty": encoder,
    }
    for name, make in makers.items():
        theirs = llama.generate(
            torch.stack(rows), attention_mask=torch.ones(2, 5), max_new_tokens=10, do_sample=False, pad_token_id=0,
            eos_token_id=None, logits_processor=LogitsProcessorList([make(rows)]),
        )[:, 5:].tolist()  # fmt: skip
        try:
            out = model.generate(rows, 10, eos_token_ids=(), logits_processors=[make(rows)])
        except UserError as error:
            assert name in str(error)  # noqa: PT017
        else:
            assert out.new_tokens == theirs, name


def test_processors_that_need_more_than_one_rows_ids_and_logits_are_refused_by_name(model):
    class WithCache:
        def __call__(self, ids, scores, cache):
            return scores

    for processor, name in (
        (ClassifierFreeGuidanceLogitsProcessor(1.5), "ClassifierFreeGuidance"),
        (WithCache(), "WithCache"),
    ):
        with pytest.raises(UserError, match=f"{name}.* unsupported"):
            model.generate(prompts((4,)), 5, logits_processors=[processor])


# ------------------------------------------------------------------------------------------------------------ stops


@pytest.mark.parametrize("name", ["heads", "oracle", "heads-and-lookup", "draft-model", "sampling-draft-model"])
def test_the_budget_is_met_exactly_in_every_row(llama, model, name):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 12) for row in rows]
    for budget in range(10):
        out = model.generate(rows, budget, eos_token_ids=(), drafter=DRAFTERS[name](model, truths))
        assert out.new_tokens == [truth[:budget] for truth in truths]
        assert out.finish_reasons == ["length"] * 3


def test_an_end_token_at_the_budget_is_a_stop_and_any_of_several_ends(llama, model):
    (prompt,) = prompts((5,))
    truth = greedy(llama, prompt, 20)
    for place in range(9):
        for ends in ([truth[place]], (63, truth[place], truth[place + 4]), torch.tensor([truth[place]])):
            known = [int(end) for end in ends]
            for budget in (20, truth.index(truth[place]) + 1):
                out = model.generate(prompt, budget, eos_token_ids=ends, drafter=Oracle(Tree.chain(3), [truth]))
                expected = cut(truth[:budget], known)
                assert out.new_tokens == [expected] == [greedy(llama, prompt, budget, eos=known)]
                assert out.finish_reasons == ["stop"]


def test_the_backbones_own_end_tokens_count_unless_others_are_given(llama):
    backbone = make_llama()
    (prompt,) = prompts((5,))
    truth = greedy(llama, prompt, 20)
    backbone.generation_config.eos_token_id = [truth[9], truth[4]]
    model = MedusaModel(backbone, random_heads(), WIDE)
    assert model.generate(prompt, 20).new_tokens == [cut(truth, (truth[4], truth[9]))]
    assert model.generate(prompt, 20, eos_token_ids=()).new_tokens == [truth]
    assert model.generate(prompt, 20, eos_token_ids=[truth[6]]).new_tokens == [cut(truth, (truth[6],))]


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


def with_stops(model, tokenizer, prompt, stops, **options):
    return model.generate(prompt, 40, eos_token_ids=(), stop_strings=stops, tokenizer=tokenizer, **options)


def test_stop_strings_end_a_row_with_the_token_that_completes_them(ascii_model):
    model, tokenizer = ascii_model
    prompt = torch.tensor(tokenizer("the cat sat on")["input_ids"])
    truth = greedy(model.backbone.model, prompt, 40)
    text = tokenizer.decode(truth)
    ends = [len(tokenizer.decode(truth[: n + 1])) for n in range(len(truth))]
    assert text.isascii()
    stops = [[text[i : i + width]] for i in range(0, 40, 7) for width in (1, 6)]
    stops += [[text[20:24], text[9:13]], ["never in it", text[15:30]]]
    for stop in stops:
        place = min(text.index(each) + len(each) for each in stop if each in text)
        expected = truth[: next(n for n, end in enumerate(ends) if end >= place) + 1]
        hf = model.backbone.model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=40, do_sample=False,
            stop_strings=stop, tokenizer=tokenizer, eos_token_id=None,
        )[0, len(prompt) :].tolist()  # fmt: skip
        for drafter in (Oracle(WIDE, [truth]), None):
            out = with_stops(model, tokenizer, prompt, stop, drafter=drafter)
            assert out.new_tokens == [expected] == [hf], stop
            assert out.finish_reasons == ["stop"]
            assert out.stats.prefill_tokens + out.stats.step_tokens == len(expected)  # ids and counts agree
            assert any(each in tokenizer.decode(out.new_tokens[0]) for each in stop)
            assert not any(each in tokenizer.decode(out.new_tokens[0][:-1]) for each in stop)
    out = with_stops(model, tokenizer, prompt, ["never in it"], drafter=Oracle(WIDE, [truth]))
    assert out.new_tokens == [truth]
    assert out.finish_reasons == ["length"]


def test_stop_strings_end_each_row_of_a_batch_apart(ascii_model):
    model, tokenizer = ascii_model
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("the cat", "what is this ?", "user mat")]
    truths = [greedy(model.backbone.model, row, 40) for row in rows]
    texts = [tokenizer.decode(truth) for truth in truths]
    stops = [texts[0][4:8], texts[1][20:25]]
    out = with_stops(model, tokenizer, rows, stops, drafter=Oracle(WIDE, truths))
    singles = [
        with_stops(model, tokenizer, row, stops, drafter=Oracle(WIDE, [truth]))
        for row, truth in zip(rows, truths, strict=True)
    ]
    assert out.new_tokens == [single.new_tokens[0] for single in singles]
    assert out.finish_reasons == [single.finish_reasons[0] for single in singles]
    assert out.finish_reasons[:2] == ["stop", "stop"]
    assert len(out.new_tokens[0]) != len(out.new_tokens[1])


def test_a_stop_string_that_cannot_work_is_refused(ascii_model):
    model, tokenizer = ascii_model
    prompt = torch.tensor([40, 41])
    with pytest.raises(UserError, match="empty string"):
        model.generate(prompt, 5, stop_strings=["a", ""], tokenizer=tokenizer)
    with pytest.raises(UserError, match="needs the tokenizer"):
        model.generate(prompt, 5, stop_strings=["a"])


def test_one_stop_string_is_not_taken_for_its_letters(ascii_model):
    """transformers takes a single string, and users carry that over."""
    model, tokenizer = ascii_model
    prompt = torch.tensor(tokenizer("the cat sat on")["input_ids"])
    text = tokenizer.decode(greedy(model.backbone.model, prompt, 40))
    stop = text[20:26]
    try:
        out = with_stops(model, tokenizer, prompt, stop)
    except UserError:
        return
    assert out.new_tokens == with_stops(model, tokenizer, prompt, [stop]).new_tokens


def test_passes_are_bounded_per_call_and_row(llama, model):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 40) for row in rows]
    for bound in (0, 1, 4):
        out = model.generate(rows, 40, eos_token_ids=(), max_steps=bound, drafter=Oracle(WIDE, truths))
        assert out.stats.passes == bound
        assert out.stats.steps == 3 * bound
        assert out.finish_reasons == ["steps"] * 3
        assert [truth[: len(row)] for truth, row in zip(truths, out.new_tokens, strict=True)] == out.new_tokens


def test_counters_that_are_added_to_do_not_count_against_the_next_calls_bound(llama, model):
    (prompt,), stats = prompts((5,)), DecodeStats()
    first, second = (
        model.generate(prompt, 40, eos_token_ids=(), max_steps=4, drafter=NoDrafter(), stats=stats) for _ in range(2)
    )
    assert first.new_tokens == second.new_tokens == [greedy(llama, prompt, 5)]
    assert stats.passes == 8
    assert stats.prefill_tokens == 2


@pytest.mark.parametrize("name", ["heads", "oracle", "heads-and-lookup", "draft-model"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_row_of_a_batch_ends_at_the_context_by_itself(kind, name):
    if kind == "llama":
        backbone = make_llama(max_position_embeddings=24)
    else:
        backbone = build(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=24, initializer_range=0.3, **SPECIAL)
        )
    model = MedusaModel(backbone, random_heads(), WIDE)
    rows, room = prompts((3, 23, 22, 14)), (21, 1, 2, 10)
    truths = [greedy(backbone, row, left) for row, left in zip(rows, room, strict=True)]
    if name == "draft-model":
        drafter = DraftModelDrafter(model.backbone, model.backbone, 3)
    else:
        drafter = DRAFTERS[name](model, truths)
    out = model.generate(rows, 12, eos_token_ids=(), drafter=drafter)
    assert out.new_tokens == [truth[:12] for truth in truths]
    assert out.finish_reasons == ["length", "context", "context", "context"]
    out = model.generate(rows, 10, eos_token_ids=(truths[0][3],), drafter=drafter)
    assert out.new_tokens == [cut(truth[:10], (truths[0][3],)) for truth in truths]
    assert out.finish_reasons[0] == "stop"
    assert out.finish_reasons[1:3] == ["stop" if truths[0][3] in truth else "context" for truth in truths[1:3]]
    assert out.finish_reasons[3] == ("stop" if truths[0][3] in truths[3][:10] else "length")  # both limits meet


# ---------------------------------------------------------------------------------------------------------- streams


class Collector(BaseStreamer):
    def __init__(self):
        self.shapes, self.tokens, self.ended = [], [], 0

    def put(self, value):
        self.shapes.append(tuple(value.shape))
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_gets_what_transformers_would_put(llama, model):
    (prompt,) = prompts((5,))
    truth = greedy(llama, prompt, 20)
    theirs, ours = Collector(), Collector()
    greedy(llama, prompt, 20, streamer=theirs)
    model.generate(prompt, 20, eos_token_ids=(), streamer=ours, drafter=Oracle(WIDE, [truth]))
    assert ours.tokens == prompt.tolist() + truth == theirs.tokens
    assert ours.shapes == theirs.shapes
    assert ours.ended == 1
    with pytest.raises(UserError, match="a streamer shows one prompt, got 2"):
        model.generate(prompts((3, 4)), 5, streamer=Collector())


def test_a_text_streamer_shows_the_generated_text_while_another_thread_generates(ascii_model):
    model, tokenizer = ascii_model
    prompt = torch.tensor(tokenizer("the cat sat on")["input_ids"])
    truth = greedy(model.backbone.model, prompt, 40)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"eos_token_ids": (), "streamer": streamer, "drafter": Oracle(WIDE, [truth])}
    thread = threading.Thread(target=model.generate, args=(prompt, 40), kwargs=options)
    thread.start()
    assert "".join(streamer) == tokenizer.decode(truth)
    thread.join()


def test_blocks_concatenate_to_the_generated_ids(llama, model):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 30) for row in rows]
    ends = (truths[0][6], truths[2][11])
    expected = [cut(truth, ends) for truth in truths]
    for row, truth, want in zip(rows, truths, expected, strict=True):
        blocks = list(model.stream(row, 30, eos_token_ids=ends, drafter=Oracle(WIDE, [truth])))
        assert [token for block in blocks for token in block.tokens] == want
        assert [block.finish_reason for block in blocks[:-1]] == [None] * (len(blocks) - 1)
        assert blocks[-1].finish_reason == ("stop" if want[-1] in ends else "length")
        assert len(blocks[0].tokens) == 1
        assert blocks[0].drafted == 0
        for block in blocks[1:-1]:
            assert block.drafted == len(block.tokens) - 1
        assert max(len(block.tokens) for block in blocks) > 1
    together = list(model.stream_batch(rows, 30, eos_token_ids=ends, drafter=Oracle(WIDE, truths)))
    for row, want in enumerate(expected):
        assert [token for blocks in together for token in blocks[row].tokens] == want
        last = max(n for n, blocks in enumerate(together) if blocks[row].tokens)
        assert together[last][row].finish_reason is not None
        assert all(blocks[row].finish_reason is None for blocks in together[:last])
        assert all(not blocks[row].tokens for blocks in together[last + 1 :])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_closed_stream_leaves_model_and_drafter_usable(llama, model, name):
    first, second = prompts((6, 4))
    truth = greedy(llama, first, 20)
    drafter = DRAFTERS[name](model, [truth])
    stream = model.stream(second, 20, eos_token_ids=(), drafter=drafter)
    next(stream)
    next(stream)
    assert not torch.is_inference_mode_enabled()  # between blocks the caller's code runs as it did before
    # Another call while the stream is open, and after it was closed.
    assert model.generate(first, 20, eos_token_ids=(), drafter=drafter).new_tokens == [truth]
    next(stream)
    stream.close()
    assert model.generate(first, 20, eos_token_ids=(), drafter=drafter).new_tokens == [truth]
    assert not torch.is_inference_mode_enabled()


def test_two_streams_that_take_turns_do_not_mix(llama, model):
    rows = prompts((6, 4))
    truths = [greedy(llama, row, 20) for row in rows]
    for name in ("heads", "heads-and-lookup", "draft-model"):
        drafter = DRAFTERS[name](model, truths)
        alone, turns = ([model.stream(row, 20, eos_token_ids=(), drafter=drafter) for row in rows] for _ in range(2))
        blocks = [[block for block in blocks if block] for blocks in zip(*itertools.zip_longest(*turns), strict=True)]
        assert [[token for block in row for token in block.tokens] for row in blocks] == truths
        assert blocks == [list(stream) for stream in alone]  # what is accepted does not mix either


def test_an_exception_midway_leaves_the_model_usable(llama, model):
    (prompt,) = prompts((6,))
    truth = greedy(llama, prompt, 20)
    seen = []
    with pytest.raises(RuntimeError, match="the drafter broke"):
        drain(model.stream(prompt, 20, eos_token_ids=(), drafter=Failing()), seen)
    assert seen == truth[:3]
    assert not torch.is_inference_mode_enabled()
    assert model.generate(prompt, 20, eos_token_ids=()).new_tokens == [truth]


# --------------------------------------------------------------------------------------------------------- sampling


def seeded(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if not name.startswith("oracle")])
def test_a_generator_per_row_makes_each_row_its_own_seeded_run(model, name, processed):
    rows = [*prompts(LENGTHS), torch.tensor([5, 6, 7, 5, 6, 7, 5, 6])]  # the last repeats itself: lookup copies there
    drafter = DRAFTERS[name](model, [])
    options = {"eos_token_ids": (), "temperature": 0.8, "top_k": 20, "drafter": drafter}
    if processed:
        options["repetition_penalty"] = 1.2
    singles = [
        model.generate(row, 24, generator=generator, **options).new_tokens[0]
        for row, generator in zip(rows, seeded(range(4)), strict=True)
    ]
    assert model.generate(rows, 24, generator=seeded(range(4)), **options).new_tokens == singles
    alike = model.generate(torch.stack([rows[1]] * 3), 24, generator=seeded([7, 7, 8]), **options).new_tokens
    assert alike[0] == alike[1] != alike[2]


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampling_repeats_with_a_seed(model, name):
    def sample(seed):
        return model.generate(
            prompts(LENGTHS), 16, eos_token_ids=(), temperature=0.8, generator=torch.Generator().manual_seed(seed),
            drafter=DRAFTERS[name](model, [[3, 1, 4, 1, 5, 9, 2, 6] * 3] * 3),
        ).new_tokens  # fmt: skip

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_typical_runs_and_repeats_with_a_seed(llama, model, temperature):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 16) for row in rows]

    def sample(seed, drafter):
        return model.generate(
            rows, 16, eos_token_ids=(), temperature=temperature, verifier="typical",
            generator=torch.Generator().manual_seed(seed), drafter=drafter,
        )  # fmt: skip

    for name in ("heads", "heads-and-lookup", "draft-model"):
        first, again = (sample(1, DRAFTERS[name](model, truths)) for _ in range(2))
        assert first.new_tokens == again.new_tokens
        assert all(len(row) == 16 for row in first.new_tokens)
        assert sample(2, DRAFTERS[name](model, truths)).new_tokens != first.new_tokens
    with pytest.raises(UserError, match="typical takes chosen drafts"):
        sample(1, DRAFTERS["sampling-draft-model"](model, truths))


@pytest.mark.parametrize("verifier", [None, "greedy", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.7, 1.0])
def test_every_verifier_at_every_temperature_runs_or_says_why_not(llama, model, verifier, temperature):
    fits = {None: temperature >= 0, "greedy": temperature == 0}.get(verifier, temperature > 0)
    for name in ("heads", "heads-and-lookup", "draft-model"):
        call = {"eos_token_ids": (), "verifier": verifier, "temperature": temperature}
        if not fits:
            with pytest.raises(UserError, match="temperature"):
                model.generate(prompts((4,)), 5, **call)
            continue
        for extra in ({}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"repetition_penalty": 1.1}):
            drafter = DRAFTERS[name](model, [])
            out = model.generate(prompts((4, 2)), 6, drafter=drafter, **call, **extra)
            assert [len(row) for row in out.new_tokens] == [6, 6]
            if temperature == 0 and "repetition_penalty" not in extra:
                assert out.new_tokens == [greedy(llama, row, 6) for row in prompts((4, 2))]


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampling_from_the_best_token_alone_equals_greedy(llama, model, name):
    rows = prompts(LENGTHS)
    truths = [greedy(llama, row, 30) for row in rows]
    for extra in ({}, {"logits_processors": [lambda ids, scores: scores]}):
        out = model.generate(
            rows, 30, eos_token_ids=(), temperature=0.9, top_k=1, drafter=DRAFTERS[name](model, truths), **extra
        )
        assert out.new_tokens == truths
        if name == "oracle":
            assert out.stats.tokens_per_step > 1.3


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "verifier": "typical"}, {"repetition_penalty": 1.1}],
    ids=["greedy", "rejection", "typical", "processed"],
)
def test_nan_logits_are_an_error_that_names_the_prompt_or_the_step(options):
    (prompt,), backbone = prompts((5,)), make_llama()
    model = MedusaModel(backbone, random_heads(), WIDE)
    truth = greedy(backbone, prompt, 6)
    new = next(place for place in range(1, 6) if truth[place] not in (*prompt.tolist(), *truth[:place]))
    options = {"eos_token_ids": (), "drafter": NoDrafter(), **options}
    if "temperature" in options:
        options["top_k"] = 1  # the greedy text from a verifier that samples
    with torch.no_grad():
        backbone.model.embed_tokens.weight[truth[new]] = torch.nan  # read in the pass after the one that emits it
    if "repetition_penalty" not in options:
        seen = []
        with pytest.raises(UserError, match=rf"NaN at step {new + 1}; check"):
            drain(model.stream(prompt, 6, **options), seen)
        assert seen == truth[: new + 1]
    with torch.no_grad():
        backbone.lm_head.weight[7] = torch.nan
    with pytest.raises(UserError, match="NaN at the prompt; check"):
        model.generate(prompt, 5, **options)


def test_nan_in_a_finished_row_does_not_stop_the_others():
    backbone, rows = make_llama(), prompts((5, 4))
    truths = [greedy(backbone, row, 12) for row in rows]
    harmless = {*rows[0].tolist(), *rows[1].tolist(), *truths[1], 0}
    bad = next(token for token in truths[0] if token not in harmless)
    model = MedusaModel(backbone, random_heads(), WIDE)
    with torch.no_grad():
        backbone.model.embed_tokens.weight[bad] = torch.nan
    for extra in ({}, {"temperature": 1.0, "top_k": 1}, {"logits_processors": [lambda ids, scores: scores]}):
        out = model.generate(rows, 12, eos_token_ids=(bad,), drafter=NoDrafter(), **extra)
        assert out.new_tokens == [cut(truths[0], (bad,)), truths[1]]


def test_prompts_that_cannot_be_read_are_refused(model):
    good, empty = torch.tensor([4, 5]), torch.tensor([], dtype=torch.long)
    for given in (empty, [good, empty], empty[None]):
        with pytest.raises(UserError, match="no token"):
            model.generate(given, 5)
    with pytest.raises(UserError, match="no token"):
        model.generate(torch.stack([good, good]), 5, attention_mask=torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(UserError, match="no prompt"):
        model.generate([], 5)
    for length in (256, 300):
        with pytest.raises(UserError, match=f"has {length} tokens, the backbone reads at most 255"):
            model.generate([good, torch.ones(length, dtype=torch.long)], 5)
    assert model.generate(torch.ones(255, dtype=torch.long), 5, eos_token_ids=()).finish_reasons == ["context"]


def test_what_is_no_token_ids_is_refused_by_name(model):
    encoded = BatchEncoding({"input_ids": torch.tensor([[4, 5]])})
    wrong = (
        ("Hello", "not text; pass tokenizer"),
        (["Hello"], "but str; tokenize it"),
        (encoded, "not all that a tokenizer returns"),
        ([4, 5], "a list holds prompts, not token ids"),
        (7, "not int"),
    )
    for given, told in wrong:
        with pytest.raises(UserError, match=told):
            model.generate(given, 5)
    assert model.generate([[4, 5]], 5).new_tokens == model.generate(**encoded, max_new_tokens=5).new_tokens


def test_a_drafter_is_an_object_and_not_a_name(model):
    with pytest.raises(UserError, match="'none' is no drafter; pass one, NoDrafter"):
        model.generate(torch.tensor([4, 5]), 5, drafter="none")


def test_masks_that_are_not_padding_are_refused(model):
    ids = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    with pytest.raises(UserError, match="attention_mask of row 1 has a hole"):
        model.generate(ids, 5, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    with pytest.raises(UserError, match="attention_mask has shape"):
        model.generate(ids, 5, attention_mask=torch.ones(2, 3))
    # Padding on both sides is no hole.
    both = model.generate(ids, 8, attention_mask=torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]), eos_token_ids=())
    assert both.new_tokens[0] == model.generate(ids[0, 1:3], 8, eos_token_ids=()).new_tokens[0]


def test_a_mask_beside_a_list_of_prompts_is_not_ignored(llama, model):
    """A list needs no mask; one that comes with it (rows of a padded tensor, say) must count or be refused."""
    ids, mask = padded(prompts((3, 6)), "left")
    try:
        out = model.generate(list(ids), 8, attention_mask=mask, eos_token_ids=())
    except UserError as error:
        assert "attention_mask" in str(error)  # noqa: PT017
    else:
        assert out.new_tokens == [greedy(llama, row, 8) for row in prompts((3, 6))]


def test_one_end_token_is_taken_or_refused_by_name(llama, model):
    (prompt,) = prompts((5,))
    truth = greedy(llama, prompt, 12)
    try:
        out = model.generate(prompt, 12, eos_token_ids=truth[5])
    except UserError as error:
        assert "eos_token_ids" in str(error)  # noqa: PT017
    else:
        assert out.new_tokens == [cut(truth, (truth[5],))]


def test_generators_that_do_not_fit_are_refused(model):
    with pytest.raises(UserError, match="2 generators for 3 prompts"):
        model.generate(prompts(LENGTHS), 5, temperature=1.0, generator=seeded([1, 2]))
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 0))  # this build cannot make a real one
    with pytest.raises(UserError, match="the generator is on cuda:0, the backbone on cpu"):
        model.generate(prompts((4,)), 5, temperature=1.0, generator=[elsewhere])


def test_parts_that_do_not_fit_each_other_are_refused(llama):
    with pytest.raises(UserError, match="4 deep, but there are 3 heads"):
        MedusaModel(llama, random_heads(), Tree.chain(4))
    with pytest.raises(UserError, match="vocabulary 65"):
        MedusaModel(llama, random_heads(vocab_size=65))


def test_a_misspelt_option_is_refused_and_not_ignored(model):
    for option in ({"temprature": 0.7}, {"do_sample": True}, {"max_length": 9}):
        with pytest.raises((UserError, TypeError), match=next(iter(option))):
            model.generate(prompts((4,)), 5, **option)


# ------------------------------------------------------------------------------------------------------------- long


def test_two_thousand_tokens_equal_plain_greedy():
    backbone = make_llama(max_position_embeddings=4096, num_hidden_layers=1)
    model, rows = MedusaModel(backbone, random_heads(), Tree.chain(3)), prompts((3, 17))
    truths = [greedy(backbone, row, 2000) for row in rows]
    for batch in (1, 2):
        drafter = Oracle(Tree.from_paths([(0,) * 9, (1, 0)]), truths[:batch])
        out = model.generate(rows[:batch], 2000, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == truths[:batch]
        assert out.stats.tokens_per_step > 4


# -------------------------------------------------------------------------------------------------------- backbones


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
        backbone = build(config)
        with pytest.raises(UserError, match=rf"{name} has ({reason}).*cannot be rolled back"):
            MedusaModel(backbone, random_heads())
        with pytest.raises(UserError, match="cannot be rolled back"):
            DraftModelDrafter(Backbone.wrap(backbone), Backbone.wrap(make_llama()))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="T5ForConditionalGeneration is an encoder-decoder"):
        MedusaModel(t5, random_heads())


def test_a_model_whose_forward_takes_no_4d_mask_is_refused_by_name_and_does_not_crash():
    bloom = build(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, initializer_range=0.3, **SPECIAL))
    with pytest.raises(UserError, match="BloomForCausalLM"):
        MedusaModel(bloom, random_heads())


def test_a_config_without_a_padding_token_is_no_reason_to_fail():
    codegen = build(
        CodeGenConfig(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, rotary_dim=4, initializer_range=0.3,
            **SPECIAL,
        )
    )  # fmt: skip
    rows = prompts((5, 2))
    truths = [greedy(codegen, row, 20) for row in rows]
    out = MedusaModel(codegen, random_heads(), WIDE).generate(rows, 20, eos_token_ids=(), drafter=Oracle(WIDE, truths))
    assert out.new_tokens == truths
