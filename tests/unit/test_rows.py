"""Rows on disk: what is written is read, a kill costs one line, and a prompt's split never moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.data.rows import (
    SPLITS,
    Prompt,
    Row,
    append_jsonl,
    drop_torn_tail,
    read_prompts,
    read_rows,
    split_of,
)
from medusa_train.inference import UserError


def row(name, split="train", spans=((2, 4),)):
    messages = [{"role": "user", "content": f"„{name}“ –\nwas heißt das? 猫"}]
    return Row(name, split, messages, [5, 6, 7, 8], list(spans), "stop")


ROWS = [row("a"), row("b", "heldout", [(1, 2), (3, 4)]), row("c", "calibration")]


def test_rows_come_back_as_they_were_in_the_order_written(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append_jsonl(path, ROWS[:1])
    append_jsonl(path, ROWS[1:])
    assert read_rows(path) == ROWS
    assert [read_rows(path, split) for split in SPLITS] == [[ROWS[0]], [ROWS[2]], [ROWS[1]]]


@settings(derandomize=True, deadline=None)
@given(texts=st.lists(st.text()))
def test_prompts_of_any_text_come_back(tmp_path_factory, texts):
    prompts = [Prompt.of([{"role": "user", "content": text}]) for text in texts]
    path = tmp_path_factory.getbasetemp() / "any-text.jsonl"
    path.unlink(missing_ok=True)
    append_jsonl(path, prompts)
    assert read_prompts(path) == prompts


def test_a_prompt_is_known_by_its_messages_alone():
    prompt = Prompt.of([{"role": "user", "content": "hello"}])
    assert Prompt.of([{"content": "hello", "name": "x", "role": "user"}]) == prompt
    assert Prompt.of([{"role": "user", "content": "hello "}]).id != prompt.id
    assert Prompt.of([{"role": "system", "content": "hello"}]).id != prompt.id


def torn_files(path):
    """Every content that a kill during the append of the last row may leave, after the content before it."""
    append_jsonl(path, ROWS[:2])
    before = path.read_bytes()
    append_jsonl(path, ROWS[2:])
    after = path.read_bytes()
    return before, after, [after[:cut] for cut in range(len(before) + 1, len(after))]


def test_a_torn_last_line_is_cut_off_and_written_again_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    before, after, torn = torn_files(path)
    for content in torn:
        path.write_bytes(content)
        drop_torn_tail(path)
        assert path.read_bytes() == before
        append_jsonl(path, ROWS[2:])
        assert path.read_bytes() == after


def test_a_whole_file_is_not_cut(tmp_path):
    path = tmp_path / "rows.jsonl"
    drop_torn_tail(path)
    assert not path.exists()
    append_jsonl(path, ROWS)
    content = path.read_bytes()
    drop_torn_tail(path)
    assert path.read_bytes() == content


def test_reading_passes_over_a_torn_last_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    _, _, torn = torn_files(path)
    for content in torn[:-1]:  # the last one lacks nothing but its newline
        path.write_bytes(content)
        assert read_rows(path) == ROWS[:2]


@pytest.mark.parametrize("damaged", [2, 3])
def test_a_damaged_whole_line_is_named(tmp_path, damaged):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, ROWS)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[damaged - 1] = lines[damaged - 1][:20] + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=f"line {damaged} is not JSON"):
        read_rows(path)


@pytest.mark.parametrize("spans", [[], [(4, 4)]])
def test_a_row_without_an_assistant_token_is_named(tmp_path, spans):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [*ROWS, row("silent", spans=spans)])
    with pytest.raises(UserError, match=r"row 4 \(id silent\) has no assistant token"):
        read_rows(path)


@pytest.mark.parametrize("content", [None, ""])
def test_no_row_at_all_is_an_error_that_says_what_to_run(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="holds no row; run medusa-train distill"):
        read_rows(path)


def test_the_split_of_an_id_is_the_same_everywhere():
    # SHA-256 of "split:<id>" puts these three at 0.021, 0.082 and 0.506 of the way from 0 to 1.
    found = [
        split_of(name, calibration_share=0.05, heldout_share=0.05) for name in ("prompt-0", "prompt-8", "prompt-1")
    ]
    assert found == ["heldout", "calibration", "train"]


@settings(derandomize=True, deadline=None)
@given(calibration=st.floats(0.02, 0.49), heldout=st.floats(0.02, 0.49))
def test_shares_are_about_those_asked_for(calibration, heldout):
    splits = [split_of(f"prompt-{i}", calibration, heldout) for i in range(3000)]
    assert splits.count("calibration") / 3000 == pytest.approx(calibration, abs=0.03)
    assert splits.count("heldout") / 3000 == pytest.approx(heldout, abs=0.03)
