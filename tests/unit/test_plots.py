"""Figures show the report's numbers: what is drawn is read back from the axes."""

import pytest

from medusa_train.eval import plots
from medusa_train.inference import Tree
from synthetic import PATHS, synthetic_report


@pytest.fixture
def report():
    return synthetic_report()


@pytest.fixture
def drawn(monkeypatch):
    """Axes of the figure whose caption begins so; of the tree's picture without one."""
    monkeypatch.setattr(plots, "svg", lambda figure: figure)

    def axes_of(report, caption=None):
        if caption is None:
            return plots.tree_picture(report).axes
        (figure,) = (row["svg"] for row in plots.report_plots(report) if row["caption"].startswith(caption))
        return figure.axes

    return axes_of


def numbers(axes):
    return [text.get_text() for text in axes.texts]


def test_every_batch_has_its_curve_with_a_ring_at_its_chosen_size(report, drawn):
    assert plots.chosen_size(report)["step_ms"] == 50.0
    left, right = drawn(report, "Expected tokens per step")
    (tokens,) = left.lines
    assert (list(tokens.get_xdata()), list(tokens.get_ydata())) == ([1, 4, 6, 16], [1.0, 1.5, 1.7, 1.9])
    curves = {line.get_label(): list(line.get_ydata()) for line in right.lines if line.get_marker() == "s"}
    # Over steps of one token: 40 ms of one row, 48 ms of four.
    assert curves == {
        "batch size 1": pytest.approx([1, 1.5 * 40 / 46, 1.7 * 40 / 50, 1.9 * 40 / 70]),
        "batch size 4": pytest.approx([1, 1.5 * 48 / 78, 1.7 * 48 / 98, 1.9 * 48 / 198]),
    }
    rings = [line.get_xydata().tolist() for line in right.lines if line.get_marker() == "o"]
    assert rings == [[[6, pytest.approx(1.7 * 40 / 50)]], [[1, 1.0]]]


def test_bars_over_batches_reach_from_the_slowest_to_the_fastest_repeat(report, drawn):
    def row(plain, generate=None):
        names = ("median", "minimum", "maximum")
        return {"over_plain": dict(zip(names, plain, strict=True)),
                "over_generate": generate and dict(zip(names, generate, strict=True))}  # fmt: skip

    report["speed"] = {"medusa": row((1.5, 1.4, 1.9), (2.0, 1.9, 2.1))}
    report["batches"] = [{"batch_size": 4, "arms": {"medusa": row((1.2, 0.9, 1.3))}}]
    (axes,) = drawn(report, "Measured speedup")
    found = {
        bars.get_label(): [
            (x, y, low, high)
            for (x, y), ((_, low), (_, high)) in zip(
                bars.lines[0].get_xydata().tolist(), bars.lines[2][0].get_segments(), strict=True
            )
        ]
        for bars in axes.containers
    }
    assert found == {
        "over one-token decoding in the same loop": [(1, 1.5, 1.4, 1.9), (4, 1.2, 0.9, 1.3)],
        "over transformers generate": [(1, 2.0, 1.9, 2.1)],
    }, "what was not measured has no point"


def test_recall_and_histogram_are_the_reports(report, drawn):
    (axes,) = drawn(report, "Rank of the token")
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[0.5, 0.3], [0.7, 0.5], [0.8, 0.6]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["in best 1", "in best 5", "in best 10"]
    (axes,) = drawn(report, "Tokens emitted")
    (bars,) = axes.containers
    assert [(bar.get_center()[0], bar.get_height()) for bar in bars] == [(1, 72), (2, 48), (3, 24)]


def test_a_depth_that_no_step_reached_is_not_a_share(report, drawn):
    report["acceptance"] |= {"accepted_at_depth": [0.5, 0.0, 0.0], "accepted_at_depth_given_parent": [0.5, 0.0, None]}
    (axes,) = drawn(report, "Steps that accepted")
    assert numbers(axes) == ["0.50", "0.00", "0.00", "0.50", "0.00", "n/a"]


def test_a_parent_stands_above_the_middle_of_its_children(report, drawn):
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0)]
    report["setting"]["tree_paths"] = paths
    (axes,) = drawn(report)
    places = dict(zip(Tree.from_paths(paths).paths, (dot.get_offsets()[0] for dot in axes.collections), strict=True))
    assert [places[path][0] for path in ((0, 0), (0, 1), (0, 2), (1, 0))] == [0, 1, 2, 3], "leaves side by side"
    assert [places[path][0] for path in ((0,), (1,), ())] == [1, 3, 2]
    assert all(places[path][1] == -len(path) for path in places)


def test_nodes_are_shaded_by_their_gain_and_named_by_their_rank(report, drawn):
    (axes,) = drawn(report)
    assert numbers(axes) == ["•", "0", "1", "0", "1", "0"]
    gains = {tuple(path): gain for path, gain in report["made"]["tree"]["result"]["gains"]}
    shades = [dot.get_facecolor()[0][3] for dot in axes.collections[1:]]
    tree = Tree.from_paths(PATHS)
    assert shades == pytest.approx([0.08 + 0.92 * gains[path] / 0.5 for path in tree.paths[1:]])


def test_of_a_large_tree_the_first_nodes_are_drawn(report, drawn):
    report["setting"]["tree_paths"] = [[rank] for rank in range(90)]
    (axes,) = drawn(report)
    assert len(axes.collections) == plots.LARGEST_TREE
