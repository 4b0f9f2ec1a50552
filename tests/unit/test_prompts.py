"""Prompts and conversations of files: which layouts are read, what is left out, and which are taken."""

import csv
import gzip
import json
from collections import Counter

import pytest
from datasets import Dataset, DatasetDict, config
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.data.prompts import gather_prompts, load_conversations, normalized, prompt_of
from medusa_train.data.records import MAX_CHARACTERS, BadRecord
from medusa_train.data.rows import Prompt
from medusa_train.data.sources import Source, read_records
from medusa_train.inference import UserError

USER = {"role": "user", "content": "What is this?"}
ASSISTANT = {"role": "assistant", "content": "A cat."}
SYSTEM = {"role": "system", "content": "Be brief. Grüße!"}


@pytest.fixture(autouse=True)
def _conversions_stay_here(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write(path, records):
    """Records in the format that the path's ending names."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        Dataset.from_list(records).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, dict.fromkeys(name for record in records for name in record))
            rows.writeheader()
            rows.writerows(records)
    else:
        path.write_text(lines, encoding="utf-8")
    return str(path)


def gather(*sources, count=None, seed=0, on_bad="skip", skipped=None):
    given = [source if isinstance(source, Source) else Source(source) for source in sources]
    return list(gather_prompts(given, count, seed, on_bad, Counter() if skipped is None else skipped))


def prompts_of(source, **options):
    return [prompt.messages for prompt in gather(source, **options)]


def conversations_of(source):
    return list(load_conversations([Source(source)]))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(params=["jsonl", "jsonl.gz", "json", "parquet"])
def path(request, tmp_path):
    return tmp_path / f"prompts.{request.param}"


# Layouts

SAID = [user("What is this?"), assistant("A cat.")]
LAYOUTS = {
    "messages": {"messages": SAID},
    "sharegpt": {"conversations": [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": "A cat."}]},
    "prompt and completion": {"prompt": "What is this?", "completion": "A cat."},
    "both as messages": {"prompt": SAID[:1], "completion": SAID[1:]},
    "alpaca": {"instruction": "What is this?", "input": "", "output": "A cat."},
    "gsm8k": {"question": "What is this?", "answer": "A cat."},
    "humaneval": {"task_id": "1", "prompt": "What is this?", "canonical_solution": "A cat.", "test": "no"},
    "parts": {"messages": [{**message, "content": [{"text": message["content"]}]} for message in SAID]},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same(path, layout):
    source = write(path, [LAYOUTS[layout]])
    assert conversations_of(source) == [SAID]
    assert gather(source) == [Prompt.of(SAID[:1])]


def test_layouts_may_be_mixed_in_one_file(tmp_path):
    source = write(tmp_path / "mixed.jsonl", LAYOUTS.values())
    assert conversations_of(source) == [SAID] * len(LAYOUTS)
    skipped = Counter()
    assert prompts_of(source, skipped=skipped) == [SAID[:1]]
    assert skipped == {"the same prompt again": len(LAYOUTS) - 1}


def test_fields_that_are_null_are_missing(path):
    source = write(path, [{"messages": [USER], "prompt": None}, {"messages": None, "prompt": "And that?"}])
    assert prompts_of(source) == [[USER], [user("And that?")]]


def test_a_csv_file_is_read_by_its_columns(tmp_path):
    records = [{"question": "What, then?\nSay it.", "answer": '"A cat"'}, {"question": "And that?", "answer": ""}]
    source = write(tmp_path / "questions.csv", records)
    assert prompts_of(source) == [[user("What, then?\nSay it.")], [user("And that?")]]
    messages = write(tmp_path / "messages.csv", [{"messages": json.dumps(SAID)}])
    assert conversations_of(messages) == [SAID]


def test_an_alpaca_input_stands_below_the_instruction(path):
    source = write(path, [{"instruction": "Sort these.", "input": "b, a", "output": "a, b"}])
    assert prompts_of(source) == [[user("Sort these.\n\nb, a")]]


def test_a_system_prompt_is_kept_wherever_it_stands(path):
    turns = [{"from": "human", "value": "What is this?"}]
    assert prompts_of(write(path, [{"system": SYSTEM["content"], "conversations": turns}])) == [[SYSTEM, USER]]
    assert prompts_of(write(path, [{"messages": [SYSTEM, USER]}])) == [[SYSTEM, USER]]
    assert prompts_of(write(path, [{"messages": [{**SYSTEM, "content": " "}, USER]}])) == [[USER]]


def test_columns_may_have_other_names(path):
    source = Source(write(path, [{"query": "What is this?", "prompt": "no"}]), columns={"prompt": "query"})
    assert prompts_of(source) == [[USER]]
    with pytest.raises(UserError, match=r"(record|line) 1") as caught:
        gather(Source(source.path, columns={"prompt": "none"}), on_bad="stop")
    assert "there is no column none, found prompt, query" in str(caught.value)


def test_a_record_of_another_layout_is_refused_with_what_it_holds(path):
    source = write(path, [{"context": "What is this?", "reply": "A cat."}])
    with pytest.raises(UserError, match=r"needs messages, .* or question, found context, reply"):
        gather(source, on_bad="stop")


# Several turns


@pytest.mark.parametrize(
    "record",
    [
        {"turns": ["What is this?", "And that?", "Why?"], "category": "writing"},
        {"messages": [USER, assistant("no"), user("And that?"), assistant("no"), user("Why?"), assistant("no")]},
    ],
)
def test_later_turns_wait_for_the_backbones_own_answers(path, record):
    (prompt,) = gather(write(path, [record]))
    assert prompt == Prompt.of([USER], ["And that?", "Why?"])
    assert prompt_of(record, "x")[0] == USER


def test_a_greeting_in_front_stays(path):
    assert prompts_of(write(path, [{"messages": [ASSISTANT, USER, ASSISTANT]}])) == [[ASSISTANT, USER]]


def test_tool_calls_stay_with_their_results_and_what_the_user_says_then_follows(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    result = {"role": "tool", "content": "a cat", "tool_call_id": "1"}
    record = {"messages": [USER, {**call, "content": None}, result, ASSISTANT, user("Why?")]}
    (prompt,) = gather(write(tmp_path / "tools.jsonl", [record]))
    assert prompt == Prompt.of([USER, call, result], ["Why?"])
    assert prompt.messages[1:] == [call, result]


def test_declared_tools_open_the_conversation(tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    opening = {"role": "tools", "content": "", "tools": tools}
    records = [
        {"messages": [USER, ASSISTANT], "tools": given, "system": "Be brief."} for given in (tools, json.dumps(tools))
    ]
    system = {"role": "system", "content": "Be brief."}
    (prompt,) = gather(write(tmp_path / "tools.jsonl", records))  # the second is the first again
    assert prompt.messages == [opening, system, USER]
    assert conversations_of(write(tmp_path / "more.jsonl", records[:1])) == [[opening, system, USER, ASSISTANT]]
    other = {**records[0], "tools": [{"type": "function", "function": {"name": "hear", "parameters": {}}}]}
    assert len(gather(write(tmp_path / "two.jsonl", [records[0], other]))) == 2  # not duplicates
    older = {"messages": [USER], "functions": [tools[0]["function"]]}
    assert gather(write(tmp_path / "older.jsonl", [older])) == [Prompt.of([opening, USER])]
    assert gather(write(tmp_path / "own.jsonl", [{"messages": prompt.messages}])) == [prompt]  # what we wrote
    none = [{"messages": [USER], "tools": given} for given in ("[]", [], None)]
    assert gather(write(tmp_path / "none.jsonl", none)) == [Prompt.of([USER])]


def test_thoughts_are_kept(tmp_path):
    thoughtful = {**ASSISTANT, "reasoning_content": "Whiskers."}
    source = write(tmp_path / "thoughts.jsonl", [{"messages": [USER, thoughtful]}])
    assert conversations_of(source) == [[USER, thoughtful]]


# Bad records

BAD = {
    "an empty turn": {"messages": [user(" \n"), ASSISTANT]},
    "no turn of a user": {"messages": [ASSISTANT]},
    "two turns of the user in a row": {"messages": [USER, USER, ASSISTANT]},
    "two turns of the assistant in a row": {"messages": [USER, ASSISTANT, ASSISTANT]},
    "a system prompt behind the first turn": {"messages": [USER, SYSTEM, ASSISTANT]},
    "unknown role 'narrator'": {"messages": [{"role": "narrator", "content": "Once"}, USER]},
    "the result of a tool that nobody called": {"messages": [USER, {"role": "tool", "content": "a cat"}]},
    "half of a character (a lone surrogate)": {"prompt": "What is \ud83d this?"},
    "tools that are no objects": {"messages": [USER], "tools": ["look"]},
    "tools that is no list": {"messages": [USER], "tools": {"type": "function"}},
    "unknown role 'tools'": {"messages": [{"role": "tools", "content": "look"}, USER]},
    f"more than {MAX_CHARACTERS:,} characters": {"prompt": "What is this? " * 360_000},
    "a message that is no object": {"messages": ["What is this?"]},
    "messages that is no list": {"messages": {"role": "user"}},
    "a message with parts that are not text": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "a text that is int": {"prompt": 7},
    "a conversation without turns": {"messages": []},
    "a message needs 'role' and 'content' (or 'from' and 'value'), found role, text": {
        "messages": [{"role": "system", "text": "Be brief."}]
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_record_stops_or_is_counted_and_the_good_ones_are_kept(tmp_path, reason):
    source = write(tmp_path / "bad.jsonl", [{"prompt": "one"}, BAD[reason], {"prompt": "two"}])
    skipped = Counter()
    assert prompts_of(source, skipped=skipped) == [[user("one")], [user("two")]]
    assert skipped == {reason: 1}
    with pytest.raises(UserError, match=r"bad\.jsonl line 2: ") as caught:
        gather(source, on_bad="stop")
    assert reason in str(caught.value)
    assert "data.on_bad_rows=skip" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason", "told"),
    [
        ('{"prompt": "c"', "a line that is not JSON", "line 3, column 15: a line that is not JSON (Expecting ','"),
        ("[1, 2]", "a line that is not an object", "line 3: a line that is not an object"),
        ('{"prompt": ' + "[" * 100_000, "a line of too many brackets within brackets", "line 3: a line of too many"),
        (b'{"prompt": "\xff"}', "a line that is not UTF-8", "line 3: a line that is not UTF-8"),
    ],
)
def test_a_damaged_line_is_named_or_counted(tmp_path, line, reason, told):
    path = tmp_path / "prompts.jsonl"
    damaged = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "a b"}\n\n' + damaged + b'\n{"prompt": "c d"}\n')
    skipped = Counter()
    assert prompts_of(str(path), skipped=skipped) == [[user("a b")], [user("c d")]]
    assert skipped == {reason: 1}
    with pytest.raises(UserError) as caught:
        list(read_records(str(path)))
    assert told in str(caught.value)


def test_a_csv_row_of_another_width_is_counted(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_bytes("prompt,id\nWhat is this?,1\none,2,3\nAnd that?,4\n\xff?,5\n".encode("latin-1"))
    skipped = Counter()
    assert prompts_of(str(path), skipped=skipped) == [[USER], [user("And that?")]]
    assert skipped == {"a row with another number of fields": 1, "half of a character (a lone surrogate)": 1}


def test_a_check_of_the_callers_counts_too(path):
    def check(prompt):
        if prompt.messages == [USER]:
            raise BadRecord("known")

    source, skipped = write(path, [{"prompt": "What is this?"}, {"prompt": "And that?"}]), Counter()
    found = gather_prompts([Source(source)], None, 0, "skip", skipped, check)
    assert [prompt.messages for prompt in found] == [[user("And that?")]]
    assert skipped == {"known": 1}


def test_conversations_without_an_answer_are_counted(path):
    source, skipped = write(path, [{"messages": [USER]}, {"messages": SAID}]), Counter()
    assert list(load_conversations([Source(source)], "skip", skipped)) == [SAID]
    assert skipped == {"no turn of an assistant": 1}


def test_a_source_of_bad_records_alone_is_refused_with_the_reasons(path):
    source = write(path, [{"messages": [ASSISTANT]}, {"messages": [user(" ")]}, {"messages": [user(" ")]}])
    with pytest.raises(UserError, match=r"holds no prompt \(2 records: an empty turn; 1 records: no turn of a user\)"):
        gather(source)


# Sources


def test_a_missing_file_is_named(path):
    with pytest.raises(UserError, match=rf"{path.name}: no such file"):
        gather(str(path))


@pytest.mark.parametrize("content", [b"", b"\n", b"[]"])
def test_an_empty_file_is_refused(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and content else content)
    with pytest.raises(UserError) as caught:
        gather(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b'{"prompt": "What is', b"PAR1 and then nothing", b"plain text\n"])
def test_a_damaged_file_is_refused_in_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        gather(str(path), on_bad="stop")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_ending_is_refused_with_those_that_are_read(tmp_path):
    file = tmp_path / "prompts.xlsx"
    file.write_text("prompt\nWhat is this?\n")
    with pytest.raises(UserError, match=r"files end in \.jsonl, \.jsonl\.gz, \.json"):
        gather(str(file))


def test_json_lines_under_the_name_of_json_are_read(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert prompts_of(str(path)) == [[user("one")], [user("two")]]


def test_a_saved_dataset_is_read_by_its_split(tmp_path):
    parts = {name: Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    parts["test"].save_to_disk(tmp_path / "alone")
    assert prompts_of(Source(str(tmp_path / "saved"), "test")) == [[user("test")]]
    assert prompts_of(str(tmp_path / "alone")) == [[user("test")]]
    with pytest.raises(UserError, match="has no split valid, it has train, test"):
        gather(Source(str(tmp_path / "saved"), "valid"))


def test_a_dataset_that_cannot_be_had_is_refused():
    with pytest.raises(UserError, match="nobody/nothing"):
        gather("nobody/nothing")


def test_a_changed_file_is_read_anew(path):
    assert prompts_of(write(path, [{"prompt": "one"}])) == [[user("one")]]
    assert prompts_of(write(path, [{"prompt": "two"}])) == [[user("two")]]


# Which are taken


def test_duplicates_up_to_case_and_spaces_are_dropped_and_the_first_is_kept(path):
    source = write(path, [{"prompt": text} for text in ("What is this?", " what  IS\nthis? ", "What is that?")])
    assert prompts_of(source) == [[USER], [user("What is that?")]]


def numbered(name, count):
    return [{"prompt": f"{name} {i}"} for i in range(count)]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(order=st.permutations(range(12)), count=st.integers(1, 14), seed=st.integers(0, 3))
def test_a_sample_depends_on_prompts_and_seed_alone(tmp_path_factory, order, count, seed):
    path = tmp_path_factory.getbasetemp() / "sample.jsonl"
    records = numbered("p", 12)
    straight = {prompt.id for prompt in gather(write(path, records), count=count, seed=seed)}
    shuffled = gather(write(path, [records[i] for i in order] + records[:3]), count=count, seed=seed)
    assert {prompt.id for prompt in shuffled} == straight
    assert len(shuffled) == min(count, 12)
    places = [order.index(int(prompt.messages[0]["content"].split()[1])) for prompt in shuffled]
    assert places == sorted(places)


def test_another_seed_takes_others(tmp_path):
    source = write(tmp_path / "many.jsonl", numbered("p", 200))
    assert prompts_of(source, count=20, seed=1) != prompts_of(source, count=20, seed=2)


def test_a_larger_sample_holds_the_smaller_one(tmp_path):
    source = write(tmp_path / "many.jsonl", numbered("p", 200))
    small, large = (prompts_of(source, count=count) for count in (20, 50))
    assert all(prompt in large for prompt in small)


def test_sources_give_their_share_by_weight(tmp_path):
    a, b = (write(tmp_path / f"{name}.jsonl", numbered(name, 50)) for name in "ab")
    taken = gather(Source(a, weight=2), Source(b, weight=1), count=10)
    assert Counter(prompt.messages[0]["content"][0] for prompt in taken) == {"a": 7, "b": 3}
    assert gather(Source(a, weight=2), Source(b, weight=1), count=10) == taken


def test_a_source_that_has_too_little_gives_all_and_that_is_told(tmp_path, capsys):
    a, b = write(tmp_path / "a.jsonl", numbered("a", 2)), write(tmp_path / "b.jsonl", numbered("b", 50))
    assert len(gather(a, b, count=20)) == 12
    assert "gave 2 of the 10" in capsys.readouterr().out


def test_a_prompt_of_two_sources_is_taken_once(tmp_path):
    a = write(tmp_path / "a.jsonl", numbered("p", 5))
    assert len(gather(a, write(tmp_path / "b.jsonl", numbered("p", 6)))) == 6


def test_texts_are_compared_up_to_case_and_spaces():
    assert normalized(Prompt.of([user(" What\n is  THIS?")])) == normalized(Prompt.of([USER]))
    assert normalized(Prompt.of([user("What is thi s?")])) != normalized(Prompt.of([USER]))
    assert normalized(Prompt.of([USER], ["Why?"])) != normalized(Prompt.of([USER]))


def test_the_first_of_several_user_turns_is_a_question_of_its_own():
    assert prompt_of({"question_id": 81, "turns": ["What is this?", "And that?"]}, "x") == [USER]
    assert prompt_of({"messages": [USER, ASSISTANT, user("Why?")]}, "x") == [USER, ASSISTANT, user("Why?")]
