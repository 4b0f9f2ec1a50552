"""The sums of the preflight against what they stand for, and every finding against rows that deserve it."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_llama
from medusa_train.data.dataset import HeadsDataset, draft_vocabulary
from medusa_train.data.hidden_states import KeptStates, read_cache, write_cache
from medusa_train.data.rows import Row
from medusa_train.data.statistics import repeated_share
from medusa_train.inference import HeadsConfig, MedusaHeads
from medusa_train.inference.backbone import Backbone
from medusa_train.preflight import (
    cache_bytes,
    checkpoint_bytes,
    count_parameters,
    judge,
    optimizer_steps,
    survey,
    training_memory,
)

END = 1
CONFIG = HeadsConfig(3, 1, 8, 64, 16)


def row(name, answer, split="train", prompt=(5, 6, 7), finish_reason="stop"):
    ids = [*prompt, *answer]
    return Row(str(name), split, [], ids, [(len(prompt), len(ids))], finish_reason)


def healthy_rows():
    """Rows that nothing is wrong with for `CONFIG`: different answers that end, enough in every split."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(60):
        split = ("train", "calibration", "heldout")[number % 3]
        answer = torch.randint(2, 16, (120,), generator=generator).tolist()
        rows.append(row(number, [*answer, END], split))
    return rows


def told(rows, config=CONFIG, level="warning", eval_prompts=4):
    return [
        finding.message
        for finding in judge(survey(rows, config, {END}), config, eval_prompts)
        if finding.level == level
    ]


# Sums


@pytest.mark.parametrize(("heads", "layers", "draft"), product((1, 3), (0, 1, 2), (0, 16)))
def test_parameters_are_those_of_the_heads(heads, layers, draft):
    config = HeadsConfig(heads, layers, 8, 64, draft)
    assert count_parameters(config) == sum(parameter.numel() for parameter in MedusaHeads(config).parameters())
    assert count_parameters(config) == heads * (layers * (8 * 8 + 8) + 8 * (draft or 64))


@pytest.mark.parametrize(("kind", "lm_head"), product(("medusa", "hydra", "recurrent"), ("own", "shared")))
def test_parameters_of_every_kind_of_heads(kind, lm_head):
    config = HeadsConfig(3, 2, 8, 64, 16, kind, lm_head)
    assert count_parameters(config) == sum(parameter.numel() for parameter in MedusaHeads(config).parameters())


def test_memory_is_that_of_weights_gradients_and_adam():
    heads = MedusaHeads(CONFIG)
    optimizer = torch.optim.AdamW(heads.parameters())
    sum(heads(torch.randn(2, 8), head).sum() for head in range(3)).backward()
    optimizer.step()
    memory = training_memory(CONFIG, 256)
    parameters = list(heads.parameters())
    assert memory.weights == sum(parameter.nbytes for parameter in parameters)
    assert memory.gradients == sum(parameter.grad.nbytes for parameter in parameters)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert memory.optimizer == sum(moment.nbytes for moment in moments) == 2 * memory.weights
    assert memory.projections == 16 * 8 * 4
    assert memory.total_estimate > memory.weights + memory.gradients + memory.optimizer + memory.projections
    assert checkpoint_bytes(CONFIG) == 3 * (memory.weights + memory.optimizer) + memory.weights


def test_logits_of_a_batch_stop_growing_at_the_chunk():
    small, large, larger = (training_memory(CONFIG, batch).logits_estimate for batch in (10, 4096, 8192))
    assert small == 4 * 4 * 10 * 3 * 16
    assert large == larger == 4 * 4 * 1024 * 16


def test_cache_is_as_large_as_said(tmp_path):
    rows = [row(1, [3, 4, END]), row(2, [8, 9, 10, 11, END]), row(3, [7, END], prompt=())]
    write_cache(Backbone.wrap(make_llama()), rows, KeptStates(tmp_path / "none"), tmp_path, 64, 2, "test")
    stats = survey(rows, HeadsConfig(2, 1, 32, 64), {END})
    shards = read_cache(tmp_path)
    assert stats.positions["train"] == sum(len(shard.tokens) for shard in shards)
    assert stats.training_positions == len(HeadsDataset(shards, 2))
    contents = [path.read_bytes() for path in tmp_path.glob("*.safetensors")]
    headers = sum(8 + int.from_bytes(content[:8], "little") for content in contents)
    assert sum(map(len, contents)) - headers == cache_bytes(stats.positions["train"], 32)


@given(
    positions=st.integers(1, 500), batch=st.integers(1, 64), accumulation=st.integers(1, 4), epochs=st.integers(1, 3)
)
def test_steps_are_counted_as_the_trainer_does(positions, batch, accumulation, epochs):
    batches = math.ceil(positions / batch)
    counted = epochs * max(1, batches // accumulation + (batches % accumulation > 0))
    assert optimizer_steps(positions, batch, accumulation, epochs) == counted


# Rows


def test_targets_of_each_head_are_those_of_the_dataset(tmp_path):
    rows = [row(number, range(2, 2 + length)) for number, length in enumerate((1, 2, 3, 9))]
    write_cache(Backbone.wrap(make_llama()), rows, KeptStates(tmp_path / "none"), tmp_path, 64, 64, "test")
    dataset = HeadsDataset(read_cache(tmp_path), 4)
    labels = dataset.__getitems__(range(len(dataset)))["labels"]
    stats = survey(rows, HeadsConfig(4, 1, 32, 64), {END})
    assert stats.targets == (labels >= 0).sum(dim=0).tolist() == [11, 8, 6, 5]
    assert (stats.spans, stats.short_spans) == (4, 3)


def test_coverage_is_that_of_the_vocabulary_which_training_chooses(tmp_path):
    rows = [row(1, [2, 2, 2, 3, 3, 4]), row(2, [2, 9, 9, 9], "heldout")]
    config = HeadsConfig(1, 1, 32, 64, 2)
    write_cache(Backbone.wrap(make_llama()), rows[:1], KeptStates(tmp_path / "none"), tmp_path, 64, 64, "test")
    kept, coverage = draft_vocabulary([shard.tokens for shard in read_cache(tmp_path)], 2, 64)
    stats = survey(rows, config, {END})
    assert kept.tolist() == [2, 3]
    assert stats.coverage == pytest.approx(coverage) == pytest.approx(5 / 6)
    assert stats.unseen_coverage == pytest.approx(1 / 4)
    assert stats.distinct_tokens == 3


@given(st.lists(st.integers(0, 9), min_size=4, max_size=30))
def test_the_second_half_of_a_text_said_twice_repeats(ids):
    least = 1 - len(ids) / (2 * len(ids) - 3)  # its 4-grams are windows of a ring, as many as it has tokens
    assert least <= repeated_share(ids + ids) <= 1


def test_repeated_share_of_ordinary_and_of_looping_text():
    assert repeated_share(range(50)) == 0
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1, 2, 3, 4] * 25) == pytest.approx(1 - 4 / 97)


# Findings


def test_nothing_is_wrong_with_healthy_rows():
    assert told(healthy_rows()) == told(healthy_rows(), level="error") == []


def change(rows, **fields):
    return [Row(**(vars(row) | {name: value(row) for name, value in fields.items()})) for row in rows]


SHORT = [row(f"short {i}", [2, i, END]) for i in range(9)]
LOOPING = [row(f"loop {i}", [*[2, 3, i] * 9, END]) for i in range(9)]
EQUAL = [row(f"equal {i}", [*range(2, 9), END]) for i in range(4)]
FEW = [row for row in healthy_rows() if int(row.id) < 45]


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        (healthy_rows(), HeadsConfig(3, 1, 64, 64, 16), "training positions are few"),
        (healthy_rows(), HeadsConfig(3, 1, 8, 64, 8), "the head vocabulary of 8 tokens misses"),
        (change(healthy_rows(), finish_reason=lambda row: "length"), CONFIG, "60 of 60 (100%) of the answers are cut"),
        (change(healthy_rows(), input_ids=lambda row: [*row.input_ids[:-1], 2]), CONFIG, "no end token is ever"),
        (healthy_rows() + SHORT, CONFIG, "9 of 29 (31%) of the answers are no longer"),
        (FEW, CONFIG, "the calibration split has 15 rows"),
        (FEW, CONFIG, "the heldout split has 15 rows"),
        (healthy_rows() + LOOPING, CONFIG, "9 of 69 (13%) of the answers loop"),
        (healthy_rows() + EQUAL, CONFIG, "3 of 64 (5%) of the answers equal"),
        (change(healthy_rows(), spans=lambda row: [(0, len(row.input_ids))]), CONFIG, "60 rows are learnt whole"),
    ],
)
def test_what_is_wrong_is_told_once(rows, config, words):
    assert sum(words in message for message in told(rows, config)) == 1
    assert not any(words in message for message in told(healthy_rows()))


def test_more_evaluation_prompts_than_held_out_rows_are_told():
    assert any("eval.num_prompts=21" in message for message in told(healthy_rows(), eval_prompts=21))
    assert told(healthy_rows(), eval_prompts=20) == []


def test_answers_that_never_reach_the_last_head_stop_the_run():
    rows = [row(number, [2, END]) for number in range(4)] + healthy_rows()[1::3] + healthy_rows()[2::3]
    assert any("long enough for head 3" in message for message in told(rows, level="error"))


@pytest.mark.parametrize("split", ["train", "calibration", "heldout"])
def test_an_empty_split_stops_the_run(split):
    rows = [row for row in healthy_rows() if row.split != split]
    assert any(f"no row in the {split} split" in message for message in told(rows, level="error"))


def test_a_head_vocabulary_with_room_to_spare_is_noted():
    config = HeadsConfig(3, 1, 8, 64, 32)
    assert any("the other 17 of the head" in message for message in told(healthy_rows(), config, "note"))
