"""The report's files from invented answers: golden summary, what was not measured, a page without anything foreign."""

import copy
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from conftest import make_llama
from medusa_train.eval.cost import Machine, bytes_read, cost_of_run, cost_table
from medusa_train.eval.report import figure_text, headline, interval_text, percent_text, summary_markdown, write_report
from medusa_train.inference import UserError
from synthetic import synthetic_report

GOLDEN = Path(__file__).parents[1] / "golden" / "report.md"


@pytest.fixture
def no_plots(monkeypatch):
    """Drawing takes longer than all else, and has a test of its own."""
    monkeypatch.setattr("medusa_train.eval.report.report_plots", lambda report: [])


def test_the_summary_is_the_golden_one():
    assert summary_markdown(synthetic_report()) == GOLDEN.read_text(encoding="utf-8")


def test_what_was_timed_and_what_was_counted_is_told(tmp_path, no_plots):
    report = synthetic_report()
    report["setting"]["timed_prompts"] = 5
    report["read_again"] = {
        "prompts": 12, "share": 11 / 12, "differences": [{"prompt": 7, "turn": 1, "index": 3, "below_best": 0.002}],
    }  # fmt: skip
    math = report["categories"][2]
    math["timed_prompts"] = 0
    math["arms"]["medusa"] |= {"decode_tokens_per_second": None, "over_plain": None}
    page = " ".join(Page(page_of(tmp_path, report)).text)
    summary, told = summary_markdown(report), headline(tmp_path)
    for text in (page, summary, told):
        assert "speed: 5 of 12 prompts, 3 repeats; counts: all 12" in text
        assert "91.7 %" in text
    assert "| identical to plain greedy decoding | 100 % of 5 prompts |" in summary
    assert "| math | 1 | 1.67 | 0 | n/a |" in summary
    assert "of the 5 timed prompts" in page
    assert "7, turn 2" in page
    report["setting"] |= {"timed_prompts": 12, "repeats": 1}
    assert "speed and counts: all 12 prompts, 1 repeat |" in summary_markdown(report)


def test_figures_are_written_alike_everywhere():
    assert [figure_text(value) for value in (None, 0.5, 12.345, 1234.5, 1234, "x")] == [
        "n/a", "0.500", "12.35", "1234", "1,234", "x",
    ]  # fmt: skip
    assert [percent_text(value) for value in (None, 1.0, 0.9166)] == ["n/a", "100 %", "91.7 %"]
    assert interval_text(None) == "n/a"
    assert interval_text({"median": 1.5, "low": None, "high": None}) == "1.50"
    assert interval_text({"median": None, "low": None, "high": None}) == "n/a"
    both = {"median": 1.5, "low": 1.4, "high": 1.6, "mean_prompt": 2.5, "mean_prompt_low": 2.4, "mean_prompt_high": 2.6}
    assert [interval_text(both), interval_text(both, "mean_prompt")] == ["1.50 (1.40–1.60)", "2.50 (2.40–2.60)"]


class Page(HTMLParser):
    """Text and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.tags, self.text, self._hidden = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")
        ]

    def handle_data(self, data):
        self.text.append(data)


def page_of(folder, report):
    write_report(folder, report)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    report = synthetic_report()
    text = page_of(tmp_path, report)
    page = Page(text)
    assert page.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import", text)
    shown = html.unescape(" ".join(page.text))
    for part in ("1.33×", "by category", "math", "1 only", "server http://localhost:1 cannot", "independence-greedy"):
        assert part.lower() in shown.lower(), part
    assert "<b>" in shown, "text of a model is shown, not obeyed"
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    assert page_of(tmp_path, report) == text, "equal reports are equal files"


def test_the_headline_is_the_reports(tmp_path, no_plots):
    """20 tokens in 12 steps of 50 ms, in 20 of 40 ms, and of 42 ms."""
    write_report(tmp_path, synthetic_report())
    lines = headline(tmp_path).splitlines()
    assert lines[0] == "tokens per step   1.67   (tree of 6; replayed on all held-out answers 1.60)"
    assert lines[1] == "decode tokens/s   33.33 medusa, 25.00 one token per pass, 23.81 transformers generate"
    assert lines[2] == (
        "speedup           1.40 (1.40–1.40) over generate, 1.33 (1.33–1.33) over one-token decoding in the same loop"
    )
    assert lines[3] == "of                speed and counts: all 12 prompts, 3 repeats"
    assert lines[4] == "identical         100 % of timed outputs equal plain greedy decoding token for token"


def test_what_was_not_measured_is_never_a_number(tmp_path, no_plots):
    report = synthetic_report()
    for arm in ("plain", "generate"):
        del report["speed"][arm]
        report["speedup"][f"over_{arm}"] = None
        report["losslessness"][f"over_{arm}"] = None
        report["speed"]["medusa"][f"over_{arm}"] = None
    report["model"] = {"overhead": None, "speedup": None, "measured": None, "difference": None}
    report["overhead"] = report["acceptance"]["tokens_per_step"] = None
    report["speed"]["medusa"] |= {"tokens_per_step": None, "ms_per_step": None, "identical_to_plain": None}
    report["categories"] = []
    report["batches"][0]["arms"] = {"medusa": report["batches"][0]["arms"]["medusa"] | {"over_plain": None}}
    text = page_of(tmp_path, report)
    assert not re.search(r"\b1\.00\b", text)
    assert text.count("n/a") >= 10
    assert "compared with nothing" in text
    lines = headline(tmp_path).splitlines()
    assert lines[0].startswith("tokens per step   n/a")
    assert lines[1].endswith(" medusa, n/a one token per pass, n/a transformers generate")
    assert lines[2].startswith("speedup           n/a over generate, n/a over")
    assert lines[4].startswith("identical         n/a of")
    assert "| n/a |" in (tmp_path / "report.md").read_text()


def test_batches_are_shown_with_the_sizes_that_suit_them(tmp_path):
    report = synthetic_report()
    (batch,) = report["batches"]
    # 20 tokens a row: 20 steps of 60 ms for four rows, or 12 of 100 ms.
    assert batch["arms"]["plain"]["decode_tokens_per_second"]["median"] == pytest.approx(80 / 1.2)
    assert batch["arms"]["medusa"]["decode_tokens_per_second"]["median"] == pytest.approx(80 / 1.2)
    assert batch["arms"]["medusa"]["over_plain"] == pytest.approx({"median": 1, "minimum": 1, "maximum": 1})
    assert batch["arms"]["medusa"]["tokens_per_step"] == pytest.approx(20 / 12)
    page = Page(page_of(tmp_path, report))
    shown = " ".join(" ".join(page.text).split())
    assert "Several prompts together" in shown
    assert "for batch size 4, 1 tokens per pass are best" in shown
    assert "batch size 4" in shown, "a curve of its own in the figure"
    report["batches"] = []
    page = Page(page_of(tmp_path, report))
    assert page.tags.count("svg") == 5
    assert "Several prompts together" not in " ".join(page.text)


def test_sections_of_other_commands_are_shown(tmp_path, no_plots):
    report = synthetic_report()
    cost = cost_of_run(report, Machine(2.0, 50e9, watts=100))
    sampling = {
        "verifier": "rejection", "temperature": 1.0, "samples": 256, "tokens": 6, "prompts": 4, "level": 0.01,
        "tests": [{}] * 20, "least_p": 0.04, "least_adjusted_p": 0.8, "rejected": 0,
        "verdict": "Consistent with lossless sampling: none of 20 tests rejects it.",
    }  # fmt: skip
    greedy = {"prompts": 8, "tokens": 500, "identical_share": 1.0, "differences": []}
    lossless = {"asked": "gsm8k", "max_new_tokens": 64, "dtype": "float32", "greedy": greedy, "sampling": sampling}
    text = page_of(tmp_path, report | {"cost": cost, "lossless": lossless})
    for part in ("Consistent with lossless sampling", "What a million tokens cost", "memory-bound limit", "0.800"):
        assert part in text, part


@pytest.mark.parametrize("watts", [None, 100.0])
def test_costs_are_those_of_the_steps(watts):
    report = synthetic_report()
    result = cost_of_run(report, Machine(price=3.6, bandwidth=50e9, watts=watts))
    plain, medusa = result["rows"]
    assert plain["tokens_per_second"] == pytest.approx(25)  # 40 ms a step
    assert plain["difference"] is None, "what a model starts from does not test it"
    assert medusa["tokens_per_second"] == pytest.approx(20 / 12 / 0.050)
    assert plain["limit"] == pytest.approx(50e9 / 400e6)
    assert medusa["limit"] == pytest.approx(20 / 12 * 50e9 / 420e6)
    assert plain["price_per_million"] == pytest.approx(3.6 / 3600 * 1e6 / 25)
    assert plain["kwh_per_million"] == (None if watts is None else pytest.approx(100 * 40_000 / 3.6e6))
    assert abs(medusa["difference"]) < 0.01, "the model is held against what was measured"
    assert len(result["assumptions"]) == 5
    assert "believe what was measured" not in cost_table(result)
    report["speed"]["medusa"]["decode_tokens_per_second"]["median"] = 25.0
    assert "believe what was measured" in cost_table(cost_of_run(report, Machine(3.6, 50e9)))
    report["speed"]["medusa"]["decode_tokens_per_second"]["median"] = 45.0
    assert "believe what was measured" in cost_table(cost_of_run(report, Machine(3.6, 50e9))), (
        "too slow a model as well"
    )


def test_a_pass_reads_every_weight_once_and_a_few_rows_of_embeddings():
    apart, tied = make_llama(tie_word_embeddings=False), make_llama(tie_word_embeddings=True)
    embeddings = apart.get_input_embeddings().weight.numel()
    assert bytes_read(apart) == 4 * (apart.num_parameters() - embeddings)
    assert bytes_read(tied) == 4 * tied.num_parameters(), "the projection is read, whatever else it is"
    heads = torch.nn.ModuleList([torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)])
    heads[1].weight = heads[0].weight
    assert bytes_read(heads) == 4 * (4 * 8 + 8 + 8)


def test_a_slower_hour_of_the_machine_is_no_error_of_the_cost_model():
    """The evaluation ran at half the speed of the time when the tree was chosen."""
    report = synthetic_report()
    for row in report["made"]["tree"]["result"]["sizes"]:
        row["step_ms"] /= 2
    plain, medusa = cost_of_run(report, Machine(3.6, 50e9))["rows"]
    assert plain["tokens_per_second"] == pytest.approx(25)
    assert abs(medusa["difference"]) < 0.01
    # What the tree costs beside a plain step is tested: here it was thought to cost nothing.
    for row in report["made"]["tree"]["result"]["sizes"]:
        row["step_ms"] = 20.0
    result = cost_of_run(report, Machine(3.6, 50e9))
    assert result["rows"][1]["difference"] == pytest.approx(0.25, abs=0.01)
    assert "believe what was measured" in result["warning"]


def test_costs_need_plain_steps_or_an_efficiency():
    report = synthetic_report()
    del report["speed"]["plain"]
    with pytest.raises(UserError, match=r"with plain among eval\.arms"):
        cost_of_run(report, Machine(1.0, 1e9))
    assert cost_of_run(report, Machine(1.0, 1e9, efficiency=0.5))["rows"][1]["tokens_per_second"] > 0


def test_another_machine_is_not_held_against_this_runs_speed():
    report = synthetic_report()
    plain, medusa = cost_of_run(report, Machine(2.0, 3350e9, efficiency=0.5))["rows"]
    assert plain["tokens_per_second"] == pytest.approx(plain["limit"] / 2)
    assert medusa["tokens_per_second"] == pytest.approx(plain["tokens_per_second"] * 20 / 12 / 1.25)
    assert plain["difference"] is plain["measured_tokens_per_second"] is None


def test_an_older_report_has_no_cost():
    report = copy.deepcopy(synthetic_report())
    del report["setting"]["pass_bytes"]
    with pytest.raises(UserError, match="run medusa-train tree and eval with --overwrite"):
        cost_of_run(report, Machine(1.0, 1e9))
