"""Budgets, end tokens, stop strings and contexts end each row exactly where plain decoding ends."""

import pytest
import torch
from transformers import GPT2Config

from conftest import WIDE, make_llama, random_heads
from decoding import DRAFTERS, LENGTHS, SPECIAL, Oracle, build_model, cut, greedy, prompts
from medusa_train.inference import DecodeStats, DraftModelDrafter, MedusaModel, NoDrafter, Tree, UserError


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
        backbone = build_model(
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
