"""The journal of a distillation: every prompt ends once, and rows stand in the order of the prompts."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.data.journal import DONE, FAILED, WAITING, Failure, Journal, as_number
from medusa_train.data.rows import Row, open_rows, read_rows

IDS = [f"{number:016x}" for number in (9, 2**64 - 1, 5, 0, 2**63)]
NUMBERS = np.array([as_number(name) for name in IDS], np.uint64)


def row(name):
    return Row(name, "train", [], [1, 2, 3, 4 + int(name, 16) % 7], [(2, 4)], "stop")


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_the_order_of_outcomes_and_who_had_them_do_not_matter(tmp_path_factory, data):
    failed = data.draw(st.sets(st.sampled_from(IDS), max_size=4))
    outcomes = [Failure(name, "why") if name in failed else row(name) for name in IDS]
    kept = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("journal")
        for outcome in data.draw(st.permutations(outcomes)):
            rank = data.draw(st.integers(0, 2))
            Journal(folder, NUMBERS, rank).append([outcome])  # opened anew for each, as after a kill
        journal = Journal(folder, NUMBERS)
        assert journal.status.tolist() == [FAILED if name in failed else DONE for name in IDS]
        journal.finish(range(len(IDS)))
        kept.append(files(folder))
    assert kept[0] == kept[1]
    assert set(kept[0]) == {"rows.jsonl"} | ({"failed.jsonl"} if failed else set())
    done = list(open_rows(folder / "rows.jsonl")) if len(failed) < len(IDS) else []
    assert done == [row(name) for name in IDS if name not in failed]


def test_an_answer_stays_as_it_was_first_and_outweighs_a_failure(tmp_path):
    journal = Journal(tmp_path, NUMBERS)
    journal.append([Failure(IDS[0], "first"), row(IDS[1])])
    journal.append([row(IDS[0]), Failure(IDS[1], "late"), Row(IDS[1], "heldout", [], [7, 8], [(1, 2)], "stop")])
    journal.append([row("00000000000000aa")])  # of another list of prompts
    for again in (journal, Journal(tmp_path, NUMBERS)):
        assert again.status.tolist() == [DONE, DONE, WAITING, WAITING, WAITING]
        assert again.tokens.tolist() == [2, 2, 0, 0, 0]
    journal.finish([1, 0])
    assert read_rows(tmp_path / "rows.jsonl") == [row(IDS[1]), row(IDS[0])]
    assert not (tmp_path / "failed.jsonl").exists()


def test_what_is_finished_is_gone_on_with_and_failures_are_asked_again_on_request(tmp_path):
    journal = Journal(tmp_path, NUMBERS)
    journal.append([Failure(IDS[0], "why"), row(IDS[1])])
    journal.finish([0, 1])
    assert Journal(tmp_path, NUMBERS).status.tolist()[:2] == [FAILED, DONE]
    again = Journal(tmp_path, NUMBERS, retry_failed=True)
    assert again.status.tolist()[:2] == [WAITING, DONE]
    again.append([row(IDS[0])])
    again.finish([0, 1])
    assert list(files(tmp_path)) == ["rows.jsonl"]
    assert read_rows(tmp_path / "rows.jsonl") == [row(IDS[0]), row(IDS[1])]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_torn_line_is_waited_for_again(tmp_path, cut):
    Journal(tmp_path, NUMBERS).append([row(IDS[0]), row(IDS[1])])
    path = tmp_path / "appended" / "rank-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:cut])
    journal = Journal(tmp_path, NUMBERS)
    assert journal.status.tolist()[:2] == [DONE, WAITING]
    journal.append([row(IDS[1])])
    assert path.read_bytes() == b"".join(lines)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    journal = Journal(tmp_path, NUMBERS)
    journal.append([row(IDS[0])])

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append([row(IDS[1])])
    assert journal.status.tolist()[:2] == [DONE, WAITING]
    journal.append([row(IDS[1])])
    journal.finish([0, 1])
    assert read_rows(tmp_path / "rows.jsonl") == [row(IDS[0]), row(IDS[1])]


def test_rows_on_the_disk_are_a_sequence(tmp_path):
    journal = Journal(tmp_path, NUMBERS)
    journal.append([row(name) for name in IDS])
    journal.finish(range(5))
    rows = open_rows(tmp_path / "rows.jsonl")
    assert (len(rows), rows[2], rows[-1], rows[1:3]) == (5, row(IDS[2]), row(IDS[4]), [row(IDS[1]), row(IDS[2])])
    assert list(rows) == read_rows(tmp_path / "rows.jsonl")
