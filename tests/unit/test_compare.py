"""Comparing two reports: a difference counts only beyond the noise of both."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.eval.compare import Measured, compare, comparison_text, judge, mean_of_histogram
from medusa_train.eval.report import SCHEMA, read_report
from medusa_train.inference import UserError


def spread(median, low, high):
    return {"median": median, "minimum": low, "maximum": high}


REPORT = {
    "setting": {"dtype": "float32", "tree_size": 4},
    "acceptance": {"histogram": {"1": 60, "2": 40}},
    "replay": {"tokens_per_step": 1.5},
    "recall": {"top1": [0.5, 0.25]},
    "speedup": {"over_generate": spread(1.4, 1.3, 1.5), "over_plain": spread(1.2, 1.1, 1.3)},
    "speed": {
        arm: {"decode_tokens_per_second": spread(20, 19, 21), "time_to_first_token_ms": spread(50, 40, 60)}
        for arm in ("generate", "plain", "medusa")
    },
    "overhead": 1.2,
    "losslessness": {"over_plain": {"identical_share": 1}},
    "made": {"tree": {"environment": {"torch": "2"}}, "train": {"wall_seconds": 90, "result": {"last_loss": 2.5}}},
}


def changed(**parts):
    report = copy.deepcopy(REPORT)
    for path, value in parts.items():
        *keys, last = path.split("__")
        at = report
        for key in keys:
            at = at[key]
        at[last] = value
    return report


def verdicts(a, b):
    return {row.name: row.verdict for row in compare(a, b)[1]}


def test_a_report_equals_itself():
    settings, rows = compare(REPORT, REPORT)
    assert settings == []
    assert {row.verdict for row in rows} == {"within noise", ""}
    assert all(row.a == row.b for row in rows)


def test_whatever_was_set_or_made_differently_is_named():
    other = changed(setting__dtype="bfloat16", made__tree__environment={"torch": "3", "threads": 2})
    other["setting"]["kind"] = "hydra"
    assert compare(REPORT, other)[0] == [
        'dtype: "float32" against "bfloat16"', 'kind: n/a against "hydra"',
        "threads: n/a against 2", 'torch: "2" against "3"',
    ]  # fmt: skip
    assert compare(other, REPORT)[0][1] == 'kind: "hydra" against n/a'


def test_every_figure_is_read_from_its_place():
    found = {row.name: row.a for row in compare(REPORT, REPORT)[1]}
    assert found["speedup over transformers generate"] == Measured(1.4, 1.3, 1.5)
    assert found["speedup over one-token decoding"] == Measured(1.2, 1.1, 1.3)
    assert found["first token, ms, medusa"] == Measured(50, 40, 60)
    shares = [found[f"best token of head {k} is right"] for k in (1, 2, 3)]
    assert shares == [Measured(0.5), Measured(0.25), Measured(None)], "there is no third head"
    assert found["training, seconds"] == Measured(90)


def test_only_ranges_that_do_not_meet_differ():
    apart = verdicts(REPORT, changed(speedup__over_generate=spread(1.6, 1.51, 1.7)))
    assert apart["speedup over transformers generate"] == "better"
    assert apart["speedup over one-token decoding"] == "within noise"
    touching = verdicts(REPORT, changed(speedup__over_generate=spread(1.6, 1.5, 1.7)))
    assert touching["speedup over transformers generate"] == "within noise"
    slower = changed(
        speed__medusa={"decode_tokens_per_second": spread(9, 8, 10), "time_to_first_token_ms": spread(90, 80, 99)}
    )
    assert verdicts(REPORT, slower)["decode tokens/s, medusa"] == "worse"
    assert verdicts(REPORT, slower)["first token, ms, medusa"] == "worse"
    assert verdicts(slower, REPORT)["first token, ms, medusa"] == "better"


def test_tokens_per_step_carries_its_standard_error():
    measured = mean_of_histogram({"1": 60, "2": 40})
    assert measured.value == pytest.approx(1.4)
    assert measured.high - measured.value == pytest.approx(2 * (0.24 / 100) ** 0.5)
    few, many = {"1": 50, "2": 50}, {"1": 5000, "2": 5000}
    assert verdicts(REPORT, changed(acceptance__histogram=few))["tokens per step"] == "within noise"
    assert (
        verdicts(changed(acceptance__histogram={"1": 6000, "2": 4000}), changed(acceptance__histogram=many))[
            "tokens per step"
        ]
        == "better"
    )
    assert mean_of_histogram({}) == Measured(None)


def test_what_is_missing_is_n_a_and_never_judged():
    older = changed(replay={}, recall={"top1": [0.5]})
    del older["made"]["train"]
    text = comparison_text(*compare(older, changed(setting__tree_size=8)))
    assert "differs: tree_size: 4 against 8" in text
    line = next(line for line in text.splitlines() if line.startswith("tokens per step, replayed"))
    assert line.split()[-2:] == ["n/a", "1.5"]
    fewer = changed(speed__medusa={})
    assert (
        verdicts(REPORT, fewer)["decode tokens/s, medusa"] == verdicts(fewer, REPORT)["first token, ms, medusa"] == ""
    )
    assert verdicts(REPORT, changed(overhead=9.0))["medusa step / plain step"] == "", "nothing says how noisy it is"


@given(*[st.floats(-5, 5)] * 4, st.booleans())
def test_judging_is_antisymmetric(a, b, c, d, up):
    one, other = Measured(0, min(a, b), max(a, b)), Measured(0, min(c, d), max(c, d))
    flip = {"better": "worse", "worse": "better", "within noise": "within noise"}
    assert judge(other, one, up) == flip[judge(one, other, up)]
    assert judge(one, other, not up) == flip[judge(one, other, up)]


def test_what_is_not_a_report_is_named(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UserError, match="not a report"):
        read_report(tmp_path)
    report = REPORT | {"schema": SCHEMA}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == report
    (tmp_path / "report.json").write_text(json.dumps(report | {"schema": SCHEMA - 1}))
    with pytest.raises(UserError, match="another version of medusa-train; run medusa-train eval --overwrite"):
        read_report(tmp_path)
