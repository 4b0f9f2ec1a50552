"""Rows of a batch get what they get alone, whatever drafts, and long ones too."""

import pytest
import torch

from conftest import WIDE, make_llama, random_heads
from decoding import DRAFTERS, LENGTHS, Oracle, cut, greedy, padded, prompts, seeded
from medusa_train.inference import DecodeStats, MedusaModel, Tree
from medusa_train.inference.decode import decode
from medusa_train.inference.prompt_lookup import MedusaLookupDrafter, PromptLookupDrafter
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Stopping
from medusa_train.inference.verify import verify_greedy


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


@pytest.mark.parametrize("lookup", [False, True])
def test_rows_are_decoded_with_the_tree_for_so_many(llama, lookup, monkeypatch):
    """That of the largest number within theirs, in an order that the mapping does not have; as rows end, of fewer."""
    trees = {5: Tree.chain(1), 3: Tree.from_paths([(0,), (1,), (0, 0)])}
    expected = dict.fromkeys((1, 2), WIDE) | dict.fromkeys((3, 4), trees[3]) | dict.fromkeys((5, 6, 7), trees[5])
    model = MedusaModel(llama, random_heads(), WIDE, batch_trees=trees)
    drafter = MedusaLookupDrafter(model.drafter, PromptLookupDrafter(4, 2, 1)) if lookup else model.drafter
    run, seen = model.step.__call__, set()

    def step(tokens, drafted, cache):
        seen.update((len(drafted), tree) for tree in drafted)
        return run(tokens, drafted, cache)

    monkeypatch.setattr("medusa_train.inference.step.Step.__call__", lambda self, *arguments: step(*arguments))
    given = prompts(range(2, 9))
    truths = [greedy(llama, row, 24) for row in given]
    ends = (truths[0][3], truths[1][7], truths[2][16])
    cuts = [cut(truth, ends) for truth in truths]
    for rows in expected:
        seen.clear()
        out = model.generate(given[:rows], 24, eos_token_ids=ends, drafter=drafter)
        assert out.new_tokens == cuts[:rows]
        assert max(number for number, _ in seen) == rows
        for number, tree in seen:
            own = expected[number]
            more = max(1, 4 - own.depth)
            assert tree == own or (lookup and set(own.paths) < set(tree.paths) and tree.size == own.size + more)
    assert len({number for number, _ in seen}) >= 4, "rows should end at different times"
    assert drafter.max_size == WIDE.size + (4 - WIDE.depth if lookup else 0)


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


def test_two_thousand_tokens_equal_plain_greedy():
    backbone = make_llama(max_position_embeddings=4096, num_hidden_layers=1)
    model, rows = MedusaModel(backbone, random_heads(), Tree.chain(3)), prompts((3, 17))
    truths = [greedy(backbone, row, 2000) for row in rows]
    for batch in (1, 2):
        drafter = Oracle(Tree.from_paths([(0,) * 9, (1, 0)]), truths[:batch])
        out = model.generate(rows[:batch], 2000, eos_token_ids=(), drafter=drafter)
        assert out.new_tokens == truths[:batch]
        assert out.stats.tokens_per_step > 4
