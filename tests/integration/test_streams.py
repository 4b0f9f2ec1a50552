"""Streams and streamers give what the whole gives, and leave the model as it was."""

import itertools
import threading

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from conftest import WIDE
from decoding import DRAFTERS, LENGTHS, Failing, Oracle, cut, drain, greedy, prompts
from medusa_train.inference import UserError


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
