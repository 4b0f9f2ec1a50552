"""What a clock is started and stopped at, what warms up, and who takes turns: on a clock that the test turns."""

from types import SimpleNamespace

import pytest
import torch

import medusa_train.eval.speed
from medusa_train.eval.speed import (
    Run,
    Spread,
    decode_speed,
    drafter_decoder,
    generate_decoder,
    measure_step_seconds,
)
from medusa_train.inference import NoDrafter, Tree
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Block


@pytest.fixture
def clock(monkeypatch):
    """Stands still until it is told."""
    at = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(medusa_train.eval.speed, "now", lambda device: at.seconds)
    return at


def test_our_clock_starts_when_the_first_tokens_are_there(clock):
    def stream(prompts, budget, *, drafter, stats):
        for seconds, tokens in ((5.0, (1,)), (0.5, (2, 3)), (0.25, (4,))):
            clock.seconds += seconds
            yield [Block(tokens, len(tokens) - 1, None) for _ in prompts]
        clock.seconds += 0.125  # what ends a generation is a part of it

    model = SimpleNamespace(stream_batch=stream, backbone=SimpleNamespace(device=torch.device("cpu")))
    run = drafter_decoder(model, NoDrafter())([torch.tensor([1])] * 2, 9)
    assert (run.prefill_seconds, run.decode_seconds) == (5.0, 0.875)
    assert run.ids == [[1, 2, 3, 4]] * 2


def test_the_clock_of_generate_starts_when_its_first_tokens_are_there(clock):
    """Two rows; the second ends with its third token, and what follows is padding."""
    passes = [(5.0, [11, 21]), (0.5, [12, 22]), (0.25, [13, 2]), (0.125, [14, 0])]
    prompts = [torch.tensor([7, 8, 9]), torch.tensor([6])]
    given = {}

    def generate(input_ids, attention_mask, streamer, **options):
        given.update(input_ids=input_ids.tolist(), attention_mask=attention_mask.tolist(), options=options)
        streamer.put(input_ids)
        for seconds, tokens in passes:
            clock.seconds += seconds
            streamer.put(torch.tensor(tokens))
        return torch.cat([input_ids, torch.tensor([tokens for _, tokens in passes]).T], dim=1)

    backbone = SimpleNamespace(
        model=SimpleNamespace(generate=generate), device=torch.device("cpu"), eos_token_ids=(2, 3)
    )  # fmt: skip
    run = generate_decoder(backbone, {"use_cache": True})(prompts, 4)
    assert (given["input_ids"], given["attention_mask"]) == ([[7, 8, 9], [0, 0, 6]], [[1, 1, 1], [0, 0, 1]])
    assert given["options"]["max_new_tokens"] == 4
    assert given["options"]["eos_token_id"] == [2, 3]
    assert given["options"]["use_cache"] is True
    assert (run.prefill_seconds, run.decode_seconds) == (5.0, 0.875)
    assert run.ids == [[11, 12, 13, 14], [21, 22, 2]], "up to the end token, which counts"
    assert (run.stats.prefill_tokens, run.stats.passes, run.stats.histogram) == (2, 3, {1: 5})


def test_an_assisted_pass_brings_several_tokens_and_the_last_one_what_is_left(clock):
    def generate(input_ids, streamer, **_):
        streamer.put(input_ids)
        for tokens in ([[1, 2]], [[3, 4, 5]], [[6, 7, 8]]):
            streamer.put(torch.tensor(tokens))
        return torch.cat([input_ids, torch.arange(1, 8)[None]], dim=1)  # cut at the budget

    backbone = SimpleNamespace(model=SimpleNamespace(generate=generate), device=torch.device("cpu"), eos_token_ids=())
    run = generate_decoder(backbone, {})([torch.tensor([9])], 7)
    assert (run.stats.prefill_tokens, run.stats.histogram) == (2, {3: 1, 2: 1})


def run_of(tokens, seconds):
    return Run([[]], 9.0, seconds, stats=DecodeStats(histogram={1: tokens}))


def test_a_speed_is_of_sums_and_a_spread_is_around_the_median():
    assert decode_speed([run_of(10, 1.0), run_of(30, 1.0)]) == 20
    assert decode_speed([run_of(40, 8.0)]) == 5
    assert Spread.of([1.0, 2.0, 9.0]) == Spread(2.0, 1.0, 9.0)


def test_a_step_time_is_the_median_step_of_a_round_after_one_that_warms_up(clock):
    asked = []

    def stream(prompts, budget, *, eos_token_ids, max_steps, drafter):
        asked.append((len(prompts), budget, max_steps, isinstance(drafter, NoDrafter)))
        assert eos_token_ids == (), "an end token may not cut the steps short"
        for number in range(max_steps + 1):
            # Prefill, then steps of 1, 2 and 9 seconds: longer with more rows, and from round to round.
            clock.seconds += [50.0, 1.0, 2.0, 9.0][number] + 10 * len(prompts) + (len(asked) - 1) // 2
            yield []

    model = SimpleNamespace(
        backbone=SimpleNamespace(device=torch.device("cpu")), stream_batch=stream, medusa_drafter=lambda tree: tree
    )  # fmt: skip
    prompt = torch.tensor([1, 2])
    cells = [(Tree.root_only(), [prompt]), (Tree.chain(2), [prompt] * 3)]
    found = measure_step_seconds(model, cells, steps=3, rounds=2)
    assert asked == [(1, 2, 1, True), (3, 4, 1, False)] + [(1, 4, 3, True), (3, 10, 3, False)] * 2
    assert found == [[13.0, 14.0], [33.0, 34.0]]
