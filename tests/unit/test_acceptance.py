"""Ranks of the tokens that came, against one position and head at a time."""

import pytest
import torch

from conftest import KINDS, make_llama, random_heads, reading
from medusa_train.data.hidden_states import Shard
from medusa_train.eval import acceptance
from medusa_train.eval.acceptance import token_ranks
from medusa_train.eval.tree_search import MISS
from medusa_train.inference import MedusaModel
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import MOST_COPIED, HeadsConfig

DRAFTED = torch.tensor([0, 3, *range(10, 50), 63])


def shard_of_answers(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    positions = sum(lengths)
    hidden = torch.randn(positions, 32, generator=generator).bfloat16()
    tokens = torch.randint(64, (positions,), generator=generator)
    tokens[::4] = DRAFTED[0]
    copies = torch.randint(64, (positions, MOST_COPIED), generator=generator, dtype=torch.int32)
    ends = torch.tensor([end for n, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True)
                         for _ in range(n)])  # fmt: skip
    return Shard(hidden, tokens, ends, copies)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_the_token_that_came_behind_the_tokens_before_it(kind, monkeypatch):
    monkeypatch.setattr(acceptance, "CHUNK", 3)  # several parts of every head's positions
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(3, 1, 32, 64, len(DRAFTED), **reading(kind)), DRAFTED)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = MedusaModel(make_llama(), heads.requires_grad_(False))
    shards = [shard_of_answers([4, 1, 6], 0), shard_of_answers([2, 5], 1)]
    found = token_ranks(model, shards)
    expected, offset, place = [], 0, 0
    for shard in shards:
        for position in range(len(shard.tokens)):
            end = int(shard.ends[position])
            assert int(found.ends[place]) == end + offset
            for head in range(3):
                target = position + head + 1
                assert bool(found.present[place, head]) == (target < end)
                rank = MISS
                if target < end and int(shard.tokens[target]) in DRAFTED.tolist():
                    with torch.inference_mode():
                        (logits,) = model.draft_logits(
                            shard.hidden[position : position + 1], head, shard.tokens[None, position:target],
                            shard.copies[position : position + 1],
                        )  # fmt: skip
                    order = DRAFTED[logits.argsort(descending=True)].tolist()
                    rank = order.index(int(shard.tokens[target]))
                expected.append(rank)
            place += 1
        offset += len(shard.tokens)
    assert found.ranks.flatten().tolist() == expected
    assert len({rank for rank in expected if rank != MISS}) > 10
    assert found.calibration().tolist() == found.ranks[found.present[:, 0]].tolist()
    assert len(found.calibration()) == (3 + 0 + 5) + (1 + 4), "an answer's last token has nothing to predict"


def test_no_likelier_token_is_rank_nought_also_in_a_tie():
    heads = random_heads()
    for parameter in heads.parameters():
        parameter.zero_()
    found = token_ranks(MedusaModel(make_llama(), heads), [shard_of_answers([3], 0)])
    assert found.ranks.tolist() == [[0, 0, MISS], [0, MISS, MISS], [MISS] * 3]
