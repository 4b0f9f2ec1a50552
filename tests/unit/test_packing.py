"""Packs: every row once, nothing of one text in the labels of another, the samples of the cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, OPTConfig

from conftest import SMALL, make_llama
from medusa_train.data.dataset import IGNORED
from medusa_train.data.packing import PackedRows, answer_tokens, check_packing, row_labels
from medusa_train.data.rows import Row
from medusa_train.inference import UserError
from medusa_train.inference.backbone import Backbone


@st.composite
def rows(draw, most=12):
    made = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(2, 20))
        start = draw(st.integers(0, length - 1))
        spans = [(start, draw(st.integers(start + 1, length)))]
        ids = draw(st.lists(st.integers(1, 63), min_size=length, max_size=length))
        made.append(Row(str(number), "train", [], ids, spans, "stop"))
    return made


@given(rows(), st.integers(2, 40), st.integers(0, 3))
def test_every_row_is_in_one_pack_and_whole(made, pack_tokens, seed):
    packed = PackedRows(made, 3, pack_tokens, seed)
    assert sorted(row.id for pack in packed.packs for row in pack) == sorted(row.id for row in made)
    labels = torch.cat([packed[index]["labels"] for index in range(len(packed))])
    assert packed.positions == int((labels[:, 0] != IGNORED).sum())
    for index in range(len(packed)):
        sample, start = packed[index], 0
        for row in packed.packs[index]:
            end = start + len(row.input_ids)
            assert sample["input_ids"][start:end].tolist() == row.input_ids
            assert sample["position_ids"][start:end].tolist() == list(range(end - start))
            assert torch.equal(sample["labels"][start:end], row_labels(row, 3))
            start = end
        assert start <= packed.length == len(sample["input_ids"])
        assert (sample["labels"][start:] == IGNORED).all()


@given(rows(most=1), st.integers(1, 5))
def test_labels_are_the_tokens_ahead_within_the_answer(made, num_heads):
    row = made[0]
    (start, end), labels = row.spans[0], row_labels(row, num_heads)
    for place in range(len(row.input_ids)):
        for head in range(1, num_heads + 1):
            # The state must predict a token of the answer itself, and the head another one.
            inside = max(start, 1) <= place + 1 and place + 1 + head < end
            expected = row.input_ids[place + 1 + head] if inside else IGNORED
            assert int(labels[place, head - 1]) == expected


def test_the_last_places_of_a_text_teach_no_head_about_the_next():
    first, second = (
        Row(name, "train", [], ids, [(1, 6)], "stop") for name, ids in (("a", range(1, 7)), ("b", [9] * 6))
    )
    packed = PackedRows([first, second], 3, 12, seed=0)
    order = [row.id for row in packed.packs[0]]
    labels = packed[0]["labels"][:6] if order[0] == "a" else packed[0]["labels"][6:]
    assert labels.tolist() == [
        [3, 4, 5],
        [4, 5, 6],
        [5, 6, IGNORED],
        [6, IGNORED, IGNORED],
        [IGNORED] * 3,
        [IGNORED] * 3,
    ]


def test_packs_are_the_same_for_a_seed_and_batches_stack_samples():
    made = [Row(str(i), "train", [], [i + 1] * (3 + i), [(1, 3 + i)], "stop") for i in range(9)]
    packs = [[[row.id for row in pack] for pack in PackedRows(made, 2, 16, seed).packs] for seed in (0, 0, 1)]
    assert packs[0] == packs[1] != packs[2]
    packed = PackedRows(made, 2, 16, 0)
    batch = packed.__getitems__([1, 0])
    assert batch["labels"].shape == (2, 16, 2)
    assert torch.equal(batch["input_ids"][0], packed[1]["input_ids"])
    assert packed.place(0) == "+".join(packs[0][0])


def test_answer_tokens_leave_out_a_first_token_that_no_state_predicts():
    made = [Row("a", "train", [], [5, 6, 7], [(0, 2)], "stop"), Row("b", "train", [], [8, 9], [(1, 2)], "stop")]
    assert [tokens.tolist() for tokens in answer_tokens(made)] == [[6], [9]]


def test_models_that_keep_texts_apart_pass_and_others_are_refused():
    check_packing(Backbone.wrap(make_llama()))
    torch.manual_seed(0)
    gemma = Gemma3TextConfig(vocab_size=64, sliding_window=3, head_dim=8, initializer_range=0.3, **SMALL)
    check_packing(Backbone.wrap(AutoModelForCausalLM.from_config(gemma).eval()))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
    opt = OPTConfig(
        num_hidden_layers=2, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=0, init_std=0.3, **sizes
    )  # fmt: skip
    bloom = BloomConfig(n_layer=2, n_head=4, initializer_range=0.3, vocab_size=64, hidden_size=32)
    for config in (opt, bloom):
        backbone = Backbone.wrap(AutoModelForCausalLM.from_config(config).eval())
        with pytest.raises(UserError, match=r"lets texts of one pack see each other; use training\.mode: cached"):
            check_packing(backbone)
