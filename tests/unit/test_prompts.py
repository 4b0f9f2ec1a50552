"""Prompts and conversations from files."""

import json

import pytest
from datasets import Dataset, config

from medusa_train.data.prompts import load_conversations, load_prompts, load_records, normalized
from medusa_train.data.rows import Prompt
from medusa_train.inference import UserError

USER = {"role": "user", "content": "What is this?"}
ASSISTANT = {"role": "assistant", "content": "A cat."}


@pytest.fixture(autouse=True)
def _conversions_stay_here(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write(path, records):
    """Records in the format that the path's ending names."""
    if path.suffix == ".parquet":
        Dataset.from_list(records).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def prompts_of(source, limit=None):
    return [prompt.messages for prompt in load_prompts(source, "train", limit)]


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(params=["jsonl", "json", "parquet"])
def path(request, tmp_path):
    return tmp_path / f"prompts.{request.param}"


def test_messages_are_taken_as_they_are(path):
    system = {"role": "system", "content": "Be brief. Grüße!"}
    source = write(path, [{"messages": [system, USER]}, {"messages": [USER, ASSISTANT, user("And that?")]}])
    assert prompts_of(source) == [[system, USER], [USER, ASSISTANT, user("And that?")]]


def test_a_prompt_field_is_a_user_turn_and_other_fields_are_left(path):
    source = write(path, [{"id": 1, "prompt": "What is this?"}, {"id": 2, "prompt": "And that?"}])
    assert prompts_of(source) == [[USER], [user("And that?")]]


def test_both_kinds_of_record_may_stand_in_one_file(path):
    source = write(path, [{"messages": [USER], "prompt": None}, {"messages": None, "prompt": "And that?"}])
    assert prompts_of(source) == [[USER], [user("And that?")]]


def test_a_final_answer_is_dropped_since_the_backbone_writes_its_own(path):
    source = write(path, [{"messages": [USER, ASSISTANT]}, {"messages": [user("Hi"), ASSISTANT, ASSISTANT]}])
    assert prompts_of(source) == [[USER], [user("Hi")]]


def test_duplicates_up_to_case_and_spaces_are_dropped_and_the_first_is_kept(path):
    source = write(path, [{"prompt": text} for text in ("What is this?", " what  IS\nthis? ", "What is that?")])
    assert prompts_of(source) == [[USER], [user("What is that?")]]


def test_prompts_without_text_are_dropped(path):
    source = write(path, [{"prompt": "  "}, {"prompt": "What is this?"}])
    assert prompts_of(source) == [[USER]]


def test_the_limit_counts_distinct_prompts(path):
    source = write(path, [{"prompt": text} for text in ("one", "one", "two", "three")])
    assert prompts_of(source, limit=2) == [[user("one")], [user("two")]]


def test_a_changed_file_is_read_anew(path):
    assert prompts_of(write(path, [{"prompt": "one"}])) == [[user("one")]]
    assert prompts_of(write(path, [{"prompt": "two"}])) == [[user("two")]]


def test_wrong_columns_are_named(path):
    source = write(path, [{"question": "What is this?", "answer": "A cat."}])
    with pytest.raises(UserError, match="needs 'messages', 'prompt' or 'turns', found answer, question"):
        load_prompts(source, "train", None)


def test_messages_in_another_schema_are_named(path):
    source = write(path, [{"messages": [{"from": "human", "value": "What is this?"}]}])
    with pytest.raises(UserError, match="from"):
        load_prompts(source, "train", None)


def test_records_without_any_prompt_are_refused(path):
    source = write(path, [{"messages": [ASSISTANT]}, {"messages": [ASSISTANT, ASSISTANT]}])
    with pytest.raises(UserError, match="holds no prompt"):
        load_prompts(source, "train", None)


def test_a_missing_file_is_named(path):
    with pytest.raises(UserError, match=rf"{path.name}: no such file"):
        load_prompts(str(path), "train", None)


@pytest.mark.parametrize("content", [b"", b"\n", b"[]"])
def test_an_empty_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_prompts(str(path), "train", None)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b'{"prompt": "What is', b"PAR1 and then nothing", b"plain text\n"])
def test_a_damaged_file_is_refused_in_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_prompts(str(path), "train", None)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_ending_is_refused_with_those_that_are_read(tmp_path):
    file = tmp_path / "prompts.csv"
    file.write_text("prompt\nWhat is this?\n")
    with pytest.raises(UserError, match=r"files end in \.jsonl, \.json, \.parquet"):
        load_prompts(str(file), "train", None)


def test_a_dataset_that_cannot_be_had_is_refused():
    with pytest.raises(UserError, match="nobody/nothing"):
        load_prompts("nobody/nothing", "train", None)


def test_conversations_keep_their_answers(path):
    source = write(path, [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}])
    assert list(load_conversations(source, "train")) == [[USER, ASSISTANT], [USER, ASSISTANT, USER, ASSISTANT]]


def test_prompt_and_completion_are_a_conversation(path):
    source = write(path, [{"prompt": "What is this?", "completion": "A cat."}])
    assert list(load_conversations(source, "train")) == [[USER, ASSISTANT]]


def test_a_completion_is_not_invented_for_records_that_have_messages(path):
    source = write(
        path,
        [
            {"messages": [USER, ASSISTANT], "prompt": None, "completion": None},
            {"messages": None, "prompt": "What is this?", "completion": "A cat."},
        ],
    )
    assert list(load_conversations(source, "train")) == [[USER, ASSISTANT], [USER, ASSISTANT]]


def test_texts_are_compared_up_to_case_and_spaces():
    assert normalized(Prompt.of([user(" What\n is  THIS?")])) == normalized(Prompt.of([USER]))
    assert normalized(Prompt.of([user("What is thi s?")])) != normalized(Prompt.of([USER]))


def test_the_first_of_several_user_turns_is_the_prompt(path):
    source = write(path, [{"question_id": 81, "category": "writing", "turns": ["What is this?", "And that?"]}])
    assert prompts_of(source) == [[USER]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a b"}\n{"prompt": "c"\n', "line 2, column 15: Expecting ',' delimiter"),
        ("\n  \n", "blank lines only"),
        ('{"prompt": "a b"}\n\n[1, 2]\n', "line 3 is not an object"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        list(load_records(str(path), "train"))
