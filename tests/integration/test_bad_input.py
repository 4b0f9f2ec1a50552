"""What cannot be decoded is refused by name before work is lost."""

import types

import pytest
import torch
from transformers import BatchEncoding

from conftest import WIDE, make_llama, random_heads
from decoding import LENGTHS, cut, drain, greedy, padded, prompts, seeded
from medusa_train.inference import MedusaModel, NoDrafter, Tree, UserError


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
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 0))  # this build_model cannot make a real one
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
