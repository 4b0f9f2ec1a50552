"""Logits processors see the prefixes of plain decoding, and change what they would change there."""

import pytest
import torch
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import ClassifierFreeGuidanceLogitsProcessor

from conftest import WIDE
from decoding import DRAFTERS, LENGTHS, Oracle, cut, greedy, prompts
from medusa_train.inference import NoDrafter, Tree, UserError


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
