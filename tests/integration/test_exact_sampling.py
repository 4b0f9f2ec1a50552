"""Sampling with drafts has the backbone's own joint distribution, and repeats with a seed."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from conftest import make_llama, random_heads
from decoding import DRAFTERS, LENGTHS, greedy, lookup_drafter, prompts, seeded
from medusa_train.inference import Backbone, DraftModelDrafter, MedusaModel, NoDrafter, Sampling, Tree, UserError


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
