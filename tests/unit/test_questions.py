"""What is asked: benchmarks by name or file, and subsets that depend on the questions alone."""

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.eval.questions import (
    Question,
    benchmark_names,
    check_benchmark,
    load_benchmark,
    load_questions,
    question_of,
    select,
    spread,
)
from medusa_train.inference import UserError

ROWS = {
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
    "mt_bench": {"prompt_id": 1, "category": "writing", "prompt": ["one", "two"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add"},
    "gsm8k": {"question": "one", "answer": "2"},
    "alpaca_eval": {"instruction": "one", "output": "two", "dataset": "koala"},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_every_benchmark_makes_a_question_of_its_rows():
    assert benchmark_names() == sorted(ROWS)
    for name, row in ROWS.items():
        benchmark = load_benchmark(name)
        assert (benchmark.name, benchmark.version) == (name, 1)
        assert benchmark.source.startswith("https://")
        question = question_of(benchmark, row, "row 1")
        assert question.follow_ups == (("two",) if name in ("spec_bench", "mt_bench") else ())
        assert question.category == {"alpaca_eval": "koala"}.get(name, "writing" if question.follow_ups else "")
        said = question.messages[0]["content"]
        assert said == "one" or (name == "humaneval" and "```python\ndef add(a, b):\n" in said)


def test_a_benchmark_is_read_from_a_local_file(tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(ROWS["humaneval"]) + "\n").encode()))
    (question,) = load_questions("humaneval", str(path))
    assert "def add" in question.messages[0]["content"]


@pytest.mark.parametrize(
    ("name", "records", "told"),
    [
        (
            "spec_bench",
            [ROWS["spec_bench"], {"question_id": 2, "category": "qa"}],
            r"line 2 has no 'turns', it has cat",
        ),
        ("spec_bench", [{"question_id": 2, "turns": ["what"]}], "line 1 has no 'category'"),
        ("gsm8k", [{"question": "a"}, {"question": ""}], "line 2 has no 'question'"),
    ],
)
def test_rows_without_their_fields_are_named(tmp_path, name, records, told):
    with pytest.raises(UserError, match=told):
        load_questions(name, write(tmp_path / "rows.jsonl", records))


def test_files_of_any_kind_need_no_benchmark(tmp_path):
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"turns": ["x", "y"], "category": "qa"}, {"messages": [*answered, {"role": "user", "content": "c"}]}]
    first, second = load_questions(write(tmp_path / "any.jsonl", records))
    assert (first.follow_ups, first.category) == (("y",), "qa")
    assert [message["content"] for message in second.messages] == ["a", "b", "c"]


def test_mistakes_are_told_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="'spec_bnch' is unknown; did you mean spec_bench"):
        check_benchmark("spec_bnch", None)
    with pytest.raises(UserError, match=r"set eval\.benchmark_file to its path"):
        check_benchmark("spec_bench", None)
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        check_benchmark("gsm8k", str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="a file of its own"):
        check_benchmark(str(tmp_path / "a.jsonl"), "b.jsonl")
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("name: mine\nversion: 1\nabut: x\n")
    with pytest.raises(UserError, match=r"mine\.yaml: (about|from|max_new_tokens): field required"):
        check_benchmark(str(wrong), None)
    with pytest.raises(UserError, match=r"no\.yaml: No such file"):
        check_benchmark(str(tmp_path / "no.yaml"), None)


def test_without_the_hub_a_benchmark_says_what_to_do():
    with pytest.raises(UserError, match=r"benchmark mt_bench: cannot read .*set eval\.benchmark_file"):
        load_questions("mt_bench")


questions = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), min_size=1, max_size=30, unique=True).map(
    lambda pairs: [Question([{"role": "user", "content": f"{n} {kind}"}], category=kind) for kind, n in pairs]
)


@given(questions, st.integers(1, 40))
def test_what_is_timed_is_spread_over_categories_by_their_sizes(asked, count):
    places = spread(asked, count)
    assert places == sorted(set(places))
    assert len(places) == min(count, len(asked))
    for kind in {question.category for question in asked}:
        size = sum(question.category == kind for question in asked)
        taken = sum(asked[place].category == kind for place in places)
        assert abs(taken - len(places) * size / len(asked)) < 1
    assert spread(asked, None) == list(range(len(asked)))


def test_what_is_timed_does_not_follow_the_order_of_a_file():
    """Of kinds that alternate, not every second question, which would be of one kind."""
    asked = [Question([{"role": "user", "content": str(n)}], category="ab"[n % 2]) for n in range(12)]
    assert [asked[place].category for place in spread(asked, 4)].count("a") == 2
    alike = [replace(question, category="") for question in asked]
    assert spread(alike, 2) == [3, 9], "the middle of either half"


@given(questions, st.integers(1, 40), st.randoms())
def test_a_subset_depends_on_the_questions_alone_and_is_spread_over_categories(asked, count, random):
    chosen = select(asked, count)
    assert [question for question in asked if question in chosen] == chosen
    assert len(chosen) == min(count, len(asked))
    sizes = {kind: [q.category for q in asked].count(kind) for kind in {q.category for q in asked}}
    taken = {kind: [q.category for q in chosen].count(kind) for kind in sizes}
    for kind, size in sizes.items():
        assert taken[kind] == size or taken[kind] >= max(taken.values()) - 1
    shuffled = list(asked)
    random.shuffle(shuffled)
    assert {q.id for q in select(shuffled, None, 2)} == {q.id for q in select(asked, None, 2)}
    assert all(
        len([q for q in select(asked, count, 2) if q.category == kind]) == min(2, size) for kind, size in sizes.items()
    )
