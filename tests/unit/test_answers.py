"""What is asked when, whose answer counts, and which share of a batch's time is a row's."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from medusa_train.eval.answers import Answer, AnswerFile, Turn, fits, local_ask
from medusa_train.eval.collect import collect
from medusa_train.eval.questions import Question
from medusa_train.eval.speed import WARM_UP_TOKENS, Run
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Block

QUESTIONS = [Question([{"role": "user", "content": str(n)}], ("and?",) if n == 0 else ()) for n in range(4)]
BUDGET = 20


def spoken(tokens=3, seconds=0.5):
    return [Turn(tokens, 1, 0.25, seconds, "", [1], list(range(tokens)), {tokens - 1: 1})]


class Asked:
    """Arms that note what they are asked."""

    def __init__(self, *arms, failing=()):
        self.calls = []
        self.asks = {arm: self.ask_of(arm, arm in failing) for arm in arms}

    def ask_of(self, arm, fails):
        def ask(questions, budget):
            self.calls.append((arm, [QUESTIONS.index(by_text(question)) for question in questions], budget,
                               any(question.follow_ups for question in questions)))  # fmt: skip
            if fails:
                raise MemoryError("no\n room")
            return [spoken(len(self.calls)) for _ in questions]

        return ask


def by_text(question):
    return next(each for each in QUESTIONS if each.messages == question.messages)


def ask_all(asked, path, **changes):
    settings = {"timed": [0, 1, 2], "max_new_tokens": BUDGET, "repeats": 2, "needed": ("medusa",)} | changes
    together = {1: list(asked.asks)} | settings.pop("together", {})
    return collect(
        asked.asks, QUESTIONS, settings.pop("timed"), kept=AnswerFile(path, "k"), together=together, **settings
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_every_arm_warms_up_once_and_turns_rotate_from_question_to_question_and_repeat(path):
    asked = Asked("plain", "medusa")
    ask_all(asked, path, timed=[0, 1])
    warm, timed = asked.calls[:2], asked.calls[2:10]
    assert warm == [("plain", [0], WARM_UP_TOKENS, False), ("medusa", [0], WARM_UP_TOKENS, False)], "first turns alone"
    assert [(arm, places[0]) for arm, places, *_ in timed] == [
        ("plain", 0), ("medusa", 0), ("medusa", 1), ("plain", 1),
        ("medusa", 0), ("plain", 0), ("plain", 1), ("medusa", 1),
    ]  # fmt: skip
    assert {budget for _, _, budget, _ in timed} == {BUDGET}
    assert [(arm, sorted(places)) for arm, places, *_ in asked.calls[10:]] == [("medusa", [2, 3])], "counted together"


def test_a_compiled_arm_meets_every_shape_before_it_counts_and_only_once(path):
    asked = Asked("plain", "medusa")
    ask_all(asked, path, timed=[0, 1], compiled=("medusa",))
    assert asked.calls[:3] == [
        ("plain", [0], WARM_UP_TOKENS, False), ("medusa", [0], BUDGET, True), ("medusa", [1], BUDGET, False),
    ]  # fmt: skip
    assert Counter(arm for arm, *_ in asked.calls) == {"plain": 1 + 4, "medusa": 2 + 4 + 1}


def test_what_was_kept_is_not_asked_again_and_a_batch_kept_in_part_is_asked_whole(path):
    whole = ask_all(Asked("plain", "medusa"), path, together={2: ("plain", "medusa")})
    assert [answer.batch_size for answer in whole.timed[2]["plain"][0]] == [2, 2], "of three, one full batch"
    again = Asked("plain", "medusa")
    assert ask_all(again, path, together={2: ("plain", "medusa")}).timed == whole.timed
    assert again.calls == []
    # A kill between the two answers of a batch, and the file tells both sittings.
    kept = [line for line in path.read_text().splitlines() if '"batch_size": 2' not in line]
    together = [line for line in path.read_text().splitlines() if '"batch_size": 2' in line]
    path.write_text("".join(line + "\n" for line in [*kept, together[0]]))
    rest = Asked("plain", "medusa")
    found = ask_all(rest, path, together={2: ("plain", "medusa")})
    assert all(len(places) == 2 for _, places, *_ in rest.calls)
    assert found.timed[1] == whole.timed[1]
    tokens = [answer.tokens for answer in found.timed[2]["plain"][0]]
    assert (len(tokens), len(set(tokens))) == (2, 1), "both of one sitting: the later record counts"
    reread = ask_all(Asked("plain", "medusa"), path, together={2: ("plain", "medusa")})
    assert [answer.tokens for answer in reread.timed[2]["plain"][0]] == tokens


def test_one_answer_of_another_key_makes_all_of_a_file_doubtful(path):
    file = AnswerFile(path, "k")
    file.add("q", "plain", 0, spoken())
    assert AnswerFile(path, "k").get("q", "plain", 0) is not None
    path.write_text(path.read_text() + path.read_text().replace('"k"', '"older"'))
    assert AnswerFile(path, "k").get("q", "plain", 0) is None
    assert not path.exists()


def test_an_error_of_a_needed_arm_ends_the_evaluation_and_another_is_told(path):
    found = ask_all(Asked("plain", "medusa", failing=("plain",)), path)
    assert found.unavailable == {"plain": "no room"}
    assert found.timed[1].keys() == {"medusa"}
    with pytest.raises(MemoryError):
        ask_all(Asked("plain", "medusa", failing=("medusa",)), path.with_name("other.jsonl"))


def test_only_needed_arms_answer_what_is_not_timed_and_all_seconds_are_summed(path):
    asked = Asked("plain", "medusa")
    found = ask_all(asked, path)
    assert Counter((arm, place) for arm, places, budget, _ in asked.calls if budget == BUDGET for place in places) == {
        (arm, place): 2 for arm in ("plain", "medusa") for place in (0, 1, 2)
    } | {("medusa", 3): 1}
    assert found.counted.keys() == {"medusa"}
    assert [answer.question for answer in found.counted["medusa"]] == [question.id for question in QUESTIONS]
    assert found.seconds == pytest.approx(13 * 0.75), "prefill and decoding of 13 answers"


# Rows of a run


def test_rows_share_the_time_of_their_batch_and_each_has_its_own_steps():
    blocks = [
        [Block((5,), 0, None), Block((6,), 0, None)],
        [Block((1, 2, 3), 2, None), Block((4,), 0, "stop")],
        [Block((7, 8), 1, "length"), Block((), 0, None)],
    ]
    stats = DecodeStats(draft_seconds=1.0, forward_seconds=6.0, verify_seconds=0.5, commit_seconds=0.25)
    run = Run([[5, 1, 2, 3, 7, 8], [6, 4]], 3.0, 8.0, blocks, stats)
    first, second = (Turn.of([9], run, row, "") for row in (0, 1))
    for turn in (first, second):
        assert (turn.prefill_seconds, turn.decode_seconds) == (1.5, 4.0)
        assert turn.part_seconds == {"draft": 0.5, "forward": 3.0, "verify": 0.25, "commit": 0.125}
        assert turn.prefill_tokens == 1
    assert (first.tokens, first.histogram, first.blocks) == (6, {2: 1, 3: 1}, [[1, 0], [3, 2], [2, 1]])
    assert (second.tokens, second.histogram, second.blocks) == (2, {1: 1}, [[1, 0], [1, 0]]), "none after its end"


def test_transformers_counts_one_answer_itself_and_emits_one_token_of_several_per_pass():
    counted = DecodeStats(prefill_tokens=2, histogram=Counter({3: 1, 1: 1}))
    alone = Turn.of([9], Run([[1, 2, 3, 4, 5, 6]], 1.0, 2.0, stats=counted), 0, "")
    assert (alone.prefill_tokens, alone.histogram, alone.part_seconds) == (2, {1: 1, 3: 1}, {})
    together = Run([[1, 2, 3], [4]], 1.0, 2.0)
    rows = [Turn.of([9], together, row, "") for row in (0, 1)]
    assert [(turn.prefill_tokens, turn.histogram, turn.decode_seconds) for turn in rows] == [
        (1, {1: 2}, 1.0),
        (1, {}, 1.0),
    ]


def test_an_answer_is_the_sum_of_its_turns():
    turns = [
        Turn(6, 2, 0.5, 1.0, "", histogram={1: 2, 2: 1}, part_seconds={"draft": 0.25, "forward": 0.5}),
        Turn(3, 1, 0.25, 0.75, "", histogram={2: 1}, part_seconds={"draft": 0.125, "commit": 0.0625}),
    ]
    answer = Answer("k", "q", "medusa", 0, turns)
    assert (answer.tokens, answer.step_tokens, answer.prefill_seconds, answer.decode_seconds) == (9, 6, 0.75, 1.75)
    assert answer.stats == DecodeStats(
        prefill_tokens=3,
        histogram=Counter({1: 2, 2: 2}),
        draft_seconds=0.375,
        forward_seconds=0.5,
        commit_seconds=0.0625,
    )


class Words:
    """A tokenizer whose words are its token ids."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens, "an end token is no part of what was said"
        return " ".join(map(str, ids))


def test_conversations_go_on_with_their_own_answers_as_long_as_there_is_room(monkeypatch):
    monkeypatch.setattr(
        "medusa_train.eval.answers.render_prompt",
        lambda tokenizer, messages: [int(word) for each in messages for word in each["content"].split()],
    )
    asked = []

    def decoder(prompts, budget):
        asked.append([prompt.tolist() for prompt in prompts])
        return Run([[len(prompt), 3] for prompt in prompts], 1.0, 1.0)

    questions = [
        Question([{"role": "user", "content": "1 1"}], ("7",)),
        Question([{"role": "user", "content": "2"}], ("8", "9")),
    ]
    ask = local_ask(decoder, SimpleNamespace(max_positions=9), Words())
    found = ask(questions, 4)
    assert asked == [[[1, 1], [2]], [[1, 1, 2, 3, 7], [2, 1, 3, 8]]], "a third turn would not fit"
    assert [[turn.text for turn in turns] for turns in found] == [["2 3", "5 3"], ["1 3", "4 3"]]
    assert asked == [[turn.prompt for turn in turns] for turns in zip(*found, strict=True)]


def test_a_prompt_fits_up_to_the_last_position():
    assert fits([1] * 6, 4, SimpleNamespace(max_positions=10))
    assert not fits([1] * 7, 4, SimpleNamespace(max_positions=10))
    assert fits([1] * 7, 4, SimpleNamespace(max_positions=None))


def test_a_prompt_that_was_rendered_before_is_asked_as_it_is():
    (turns,) = local_ask(lambda prompts, budget: Run([prompts[0].tolist()]), None, Words())(
        [Question([{"role": "user", "content": "x"}], input_ids=(4, 5))], 3
    )
    assert turns[0].prompt == torch.tensor([4, 5]).tolist()
