"""Where two outputs part, and what is drawn to test sampling."""

from types import SimpleNamespace

import pytest
import torch

from conftest import make_llama
from medusa_train.data.hidden_states import shard_of
from medusa_train.eval import lossless
from medusa_train.eval.answers import Answer, Turn
from medusa_train.eval.evaluate import rows_of
from medusa_train.eval.lossless import LEVEL, ROWS, compare_outputs, first_divergence, read_again, sampling_identity
from medusa_train.eval.sampling_test import PositionTest
from medusa_train.inference import NoDrafter
from medusa_train.inference.backbone import Backbone

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def backbone():
    return Backbone.wrap(make_llama())


def next_logits(backbone, ids):
    with torch.inference_mode():
        return backbone.model(torch.tensor([ids])).logits[0, -1]


@pytest.mark.parametrize(
    ("ours", "reference", "index"),
    [([7, 8, 3], [7, 1, 3], 1), ([7, 8], [7, 8, 3], 2), ([7, 8, 3], [7, 8], 2), ([4], [7], 0)],
    ids=["a token", "shorter", "longer", "the first"],
)
def test_outputs_part_at_their_first_difference_and_the_gap_is_the_backbones_there(backbone, ours, reference, index):
    found = first_divergence(backbone, torch.tensor(PROMPT), ours, reference)
    first, second = next_logits(backbone, PROMPT + reference[:index]).topk(2).values.tolist()
    assert found.index == index
    assert found.top2_gap == pytest.approx(first - second, rel=1e-4)
    assert first_divergence(backbone, torch.tensor(PROMPT), reference, reference) is None


def conversation(*answers):
    """An answer to every turn; what is said before it is the same whatever the answers are."""
    return Answer("", "q", "plain", 0, [
        Turn(len(ids), 1, 0.0, 0.0, "", [*PROMPT, turn], list(ids)) for turn, ids in enumerate(answers)
    ])  # fmt: skip


def test_a_conversation_differs_once_at_its_first_turn_that_does(backbone):
    base = [conversation([1, 2], [3, 4], [5, 6]), conversation([1]), conversation([7])]
    ours = [conversation([1, 2], [3, 5], [6, 6]), conversation([1]), conversation([8])]
    found = compare_outputs(backbone, base, ours)
    assert [(row["prompt"], row["turn"], row["index"]) for row in found["differences"]] == [(0, 1, 1), (2, 0, 0)]
    assert found["identical_share"] == pytest.approx(1 / 3)


def test_of_a_conversation_that_is_not_greedy_the_first_place_is_told(backbone):
    prompt = [*PROMPT, 0]
    best, second = next_logits(backbone, prompt).topk(2).indices.tolist()
    worst = int(next_logits(backbone, [*prompt, second]).argmin())
    answers = [conversation([second, worst, 1], [3, 4]), conversation([best])]
    found = read_again(backbone, shard_of(backbone, rows_of(answers), 512), answers)
    (difference,) = found["differences"]
    assert (difference["prompt"], difference["turn"], difference["index"]) == (0, 0, 0)
    logits = next_logits(backbone, prompt)
    # Cached states are in half precision.
    assert difference["below_best"] == pytest.approx(float(logits[best] - logits[second]), abs=0.05)
    assert (found["share"], found["prompts"]) == (0.5, 2)


@pytest.fixture
def drawn(monkeypatch):
    """Every batch that is drawn, and the p-values that the tests of them give."""
    calls, tests = [], []

    def generate(prompts, tokens, *, verifier, temperature, drafter, generator):
        calls.append((prompts[0].tolist(), len(prompts), tokens, verifier, temperature,
                      "none" if isinstance(drafter, NoDrafter) else drafter, generator.initial_seed()))  # fmt: skip
        return SimpleNamespace(new_tokens=[[generator.initial_seed()] * tokens] * len(prompts))

    def compare_samples(ours, theirs, length, seed):
        assert [len(continuations) for continuations in (*ours, *theirs)] == [ROWS + 6] * 4
        assert (length, seed) == (3, 7)
        return tests

    monkeypatch.setattr(lossless, "compare_samples", compare_samples)
    model = SimpleNamespace(backbone=SimpleNamespace(device=torch.device("cpu")), drafter="heads", generate=generate)

    def draw(verifier="rejection"):
        return sampling_identity(model, [[1, 2], [3]], ROWS + 6, 3, 0.8, verifier, 7)

    return SimpleNamespace(calls=calls, tests=tests, draw=draw)


def test_every_sample_has_a_seed_of_its_own_and_only_one_of_a_pair_has_drafts(drawn):
    drawn.draw("typical")
    seeds = {call[-1] for call in drawn.calls}
    assert len(seeds) == 4, "with one seed the texts would be equal and prove nothing"
    assert [call[:-1] for call in drawn.calls] == [
        (prompt, rows, 3, verifier, 0.8, drafter)
        for prompt in ([1, 2], [3])
        for verifier, drafter in (("rejection", "none"), ("typical", "heads"))
        for rows in (ROWS, 6)
    ]


def test_what_is_corrected_for_all_tests_decides(drawn):
    assert (drawn.draw()["least_p"], drawn.draw()["rejected"]) == (None, 0)
    drawn.tests += [PositionTest(0, 0, 4, LEVEL / 2, LEVEL * 2), PositionTest(1, 2, 3, LEVEL / 4, LEVEL)]
    found = drawn.draw()
    assert (found["least_p"], found["least_adjusted_p"], found["rejected"]) == (LEVEL / 4, LEVEL, 0)
    assert found["verdict"].startswith("Consistent with lossless")
    drawn.tests.append(PositionTest(1, 1, 4, 1e-4, LEVEL * 0.9))
    assert drawn.draw()["verdict"].startswith("NOT lossless: 1 of 3")
