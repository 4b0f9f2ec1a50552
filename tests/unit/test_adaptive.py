"""Adaptive trees: the likeliest nodes, the fastest size, and never another output."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import SHAPING_CONFIGS, make_llama, make_shaping_model, no_copies, random_heads, reading
from medusa_train.data.hidden_states import Shard
from medusa_train.eval.calibration import fit_temperatures
from medusa_train.inference import Backbone, HeadsConfig, MedusaHeads, MedusaModel, NoDrafter, Tree, UserError
from medusa_train.inference.adaptive import LONGEST_COPY, AdaptiveDrafter, Calibration, Choice
from medusa_train.inference.candidates import TreeFiller
from medusa_train.inference.checkpoint import load_heads, save_heads, save_tree
from medusa_train.inference.drafters import Context
from medusa_train.inference.heads_config import MOST_COPIED
from medusa_train.inference.pass_size import PROBE_EVERY, TIMED_TEXT, SizeChooser, reckon_seconds

FREE = {1: 0.0}  # text that adds nothing
TIMES = {1: {1: 1.0, 2: 1.1, 4: 1.2, 8: 2.0}, 4: {1: 1.5, 2: 2.0, 4: 3.0, 8: 5.0}}
SUPERSET = Tree.from_paths([(0, 0, 0), (0, 1, 0), (1, 0), (1, 1), (2,), (0, 0, 1)])


def calibration(**changes):
    settings = {
        "nodes": SUPERSET.paths[1:],
        "temperatures": (1.0, 1.5, 0.7),
        "step_seconds": TIMES,
        "text_seconds": FREE,
    }
    return Calibration(**(settings | changes))


def context(rows=2, hidden_size=32, seed=0):
    hidden = torch.randn(rows, hidden_size, generator=torch.Generator().manual_seed(seed))
    return Context([[5, 7]] * rows, hidden, torch.tensor([7] * rows), list(range(rows)), [0] * rows, range(rows))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 8))
def test_the_chosen_nodes_are_the_likeliest_tree(seed, size):
    """Against every tree of that size: none has a larger sum of node chances."""
    heads = random_heads(seed=seed)
    drafter = AdaptiveDrafter(heads, calibration(), size=size)
    ctx = context(seed=seed)
    draft = drafter.start([torch.tensor([5])] * 2, 10, [None] * 2)(ctx)
    for row in range(2):
        best = [
            (heads(ctx.hidden, head)[row] / (1.0, 1.5, 0.7)[head]).softmax(-1).sort(descending=True)
            for head in range(3)
        ]  # fmt: skip

        def chance(path, best=best):
            product = 1.0
            for depth, rank in enumerate(path):
                product *= float(best[depth].values[rank])
            return product

        def value(paths):
            return sum(chance(path) for path in paths)

        every = [
            nodes
            for nodes in itertools.combinations(SUPERSET.paths[1:], size - 1)
            if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
        ]
        tree = draft.trees[row]
        assert tree.size == size
        assert value(tree.paths[1:]) == pytest.approx(max(map(value, every)), rel=1e-4)
        # And every node holds the token that its rank stands for.
        for node, path in enumerate(tree.paths[1:], start=1):
            assert int(draft.tokens[row, node]) == int(best[len(path) - 1].indices[path[-1]])
        assert int(draft.tokens[row, 0]) == 7


@settings(deadline=None)
@given(st.data())
def test_copied_tokens_are_chosen_beside_the_heads_by_their_chances(data):
    """Against all nodes by their paths of tokens: the best of them, none twice, each after its parent."""
    tree = Tree.from_paths(data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=6)))
    tokens, chances = [50], [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        taken = {tokens[other] for other in tree.children[parent] if other < node}
        tokens.append(data.draw(st.sampled_from([token for token in range(5) if token not in taken])))
        chances.append(chances[parent] * data.draw(st.floats(0.1, 0.9)))
    copy = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=LONGEST_COPY, max_size=LONGEST_COPY))
    rate, size = data.draw(st.floats(0.1, 1.0)), data.draw(st.integers(2, 12))

    expected = {
        tuple(tokens[ancestor] for ancestor in line[1:]): chances[node] for node, line in enumerate(tree.ancestors)
    }
    for depth in range(1, 1 + len(copy or ())):  # shortest first, so that what a token goes on from is there
        expected.setdefault(tuple(copy[:depth]), expected[tuple(copy[: depth - 1])] * rate)
    choice = Choice.of(tree, tokens, chances, copy, rate)
    picked, held = choice.best(size)
    found = [tuple(held[ancestor] for ancestor in line[1:]) for line in picked.ancestors]
    assert len(set(found)) == len(found) == min(size, len(expected)) == picked.size
    best = sorted(expected.values(), reverse=True)
    assert sorted((expected[path] for path in found), reverse=True) == pytest.approx(best[: len(found)])
    assert choice.chances == pytest.approx(best[1:])
    assert held[0] == 50


def test_a_long_copy_in_one_row_makes_the_pass_longer_and_the_other_rows_trees_do_not_grow(monkeypatch):
    """Steps are cheap, so that all there is is verified: the row without a copy has its own nodes, then padding."""
    times = {1: {1: 1.0, 2: 1.0, 4: 1.0, 16: 1.0}}
    nodes = [(rank, *zeros) for rank in range(5) for zeros in ((), (0,), (0, 0))]
    monkeypatch.setattr(SizeChooser, "largest", lambda self, rows: 4)
    drafter = AdaptiveDrafter(random_heads(), calibration(nodes=tuple(nodes), step_seconds=times))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2]
    ctx = replace(context(), texts=[text, list(range(20, 20 + len(text)))], roots=torch.tensor([2, 33]))
    draft = drafter.start([torch.tensor([5])] * 2, 10, [None] * 2)(ctx)
    lines = [draft.tokens[0, list(line)].tolist() for line in draft.trees[0].ancestors]
    assert [2, 3, 4, 5, 6, 7, 8, 9, 10] in lines
    assert [tree.size for tree in draft.trees] == [4 + LONGEST_COPY, 4]
    assert draft.trees[1].paths == ((), *nodes[:1], *nodes[1:2], *nodes[2:3])
    assert draft.tokens.shape == (2, 4 + LONGEST_COPY)
    assert draft.tokens[1, 4:].tolist() == [33] * LONGEST_COPY


@pytest.mark.parametrize("size", [None, 2, 5, SUPERSET.size])
def test_output_is_that_of_plain_decoding_alone_and_in_a_batch(size):
    backbone = make_llama()
    model = MedusaModel(backbone, random_heads(), calibration=calibration())
    prompts = [torch.tensor([3, 9, 4]), torch.tensor([8]), torch.tensor([1, 2, 3, 4, 5, 6])]
    alone = [model.generate(p, 40, eos_token_ids=(), drafter=NoDrafter()).new_tokens[0] for p in prompts]
    drafter = model.adaptive_drafter(size)
    assert model.generate(prompts, 40, eos_token_ids=(), drafter=drafter).new_tokens == alone
    assert [model.generate(p, 40, eos_token_ids=(), drafter=drafter).new_tokens[0] for p in prompts] == alone


def test_the_size_with_the_most_tokens_per_second_is_chosen():
    times = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.5}

    def chosen(*chances):
        return SizeChooser({1: times}, FREE, [1, 2, 4, 8]).choose(
            [list(chances) + [0.0] * (7 - len(chances))], [TIMED_TEXT]
        )

    assert chosen(0.05) == 1  # 1.05 / 1.1 < 1
    assert chosen(0.3) == 2  # 1.30 / 1.1 beats 1.30 / 1.3
    assert chosen(0.3, 0.3, 0.3) == 4  # 1.90 / 1.3
    assert chosen(*[0.9] * 7) == 8  # 7.30 / 2.5 beats 3.70 / 1.3


def test_step_times_are_read_between_and_beyond_the_measured_ones():
    one = {1: {1: 1.0, 2: 1.2, 4: 1.4, 8: 3.1}}
    expected = {1: 1.0, 2: 1.2, 3: 1.3, 4: 1.4, 6: 2.25, 8: 3.1, 15: 5.2}  # beyond: 0.3 a token, as from 1 to 8
    assert {size: reckon_seconds(one, size, 1) for size in expected} == pytest.approx(expected)
    # Rows are taken for nodes where one row is all that was timed.
    assert {rows: reckon_seconds(one, 1, rows) for rows in expected} == pytest.approx(expected)
    assert reckon_seconds({1: {1: 2.0}}, 9, 3) == 2.0


def test_step_times_of_batches_are_those_that_were_timed():
    for rows, curve in TIMES.items():
        assert {size: reckon_seconds(TIMES, size, rows) for size in curve} == curve
    assert reckon_seconds(TIMES, 4, 2) == pytest.approx(1.2 + (3.0 - 1.2) / 3)  # between 1 and 4 rows
    assert reckon_seconds(TIMES, 4, 8) == pytest.approx(5.0)  # 8 rows of 4 tokens as 4 of 8
    assert reckon_seconds(TIMES, 4, 12) == pytest.approx(5.0 + 4 * 0.5)  # beyond both: 0.5 a token of the batch of 4


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([2, 3, 4, 8, 16]), st.floats(0.1, 5), max_size=3),
    st.dictionaries(st.sampled_from([2, 4, 8]), st.floats(0.1, 2), min_size=1),
    st.integers(1, 40),
)
def test_a_step_never_costs_less_with_more_rows_or_tokens(batches, nodes, rows):
    """For times that grow with both, as those of any device do."""
    times = {n: {size: 1 + b + n * c for size, c in ({1: 0.05} | nodes_in_order(nodes)).items()}
             for n, b in ({1: 0.0} | nodes_in_order(batches)).items()}  # fmt: skip
    found = [[reckon_seconds(times, size, n) for size in sorted(times[1])] for n in range(1, rows + 1)]
    assert all(low <= high + 1e-9 for row in found for low, high in itertools.pairwise(row))
    assert all(low <= high + 1e-9 for column in zip(*found, strict=True) for low, high in itertools.pairwise(column))


def nodes_in_order(values):
    """The same keys, values summed up so that they grow."""
    keys = sorted(values)
    return dict(zip(keys, itertools.accumulate(values[key] for key in keys), strict=True))


def test_rows_fill_a_pass_like_nodes():
    times, promise = {1: {1: 1.0, 4: 1.1, 16: 3.0}}, [[0.5, 0.4, 0.3, *[0.0] * 12]]
    assert SizeChooser(times, FREE, [1, 4, 16]).choose(promise, [TIMED_TEXT]) == 4
    assert SizeChooser(times, FREE, [1, 4, 16]).choose(promise * 16, [TIMED_TEXT] * 16) == 1  # 2.2 / 9.4 is below 1 / 3


def test_the_times_of_a_batch_decide_its_size():
    """Where a device has room for many rows, a timed batch says so, and nodes are worth their time."""
    promise = [[0.5, 0.4, 0.3, *[0.0] * 12]] * 16
    one = {1: 1.0, 4: 1.1, 16: 3.0}
    assert SizeChooser({1: one}, FREE, [1, 4, 16]).choose(promise, [TIMED_TEXT] * 16) == 1
    assert (
        SizeChooser({1: one, 16: {1: 1.2, 4: 1.3, 16: 4.0}}, FREE, [1, 4, 16]).choose(promise, [TIMED_TEXT] * 16) == 4
    )


def test_text_beyond_that_of_the_timed_steps_makes_passes_dearer():
    """Where attention to long texts is most of a step, a few nodes more cost little beside it."""
    times, promise = {1: {1: 1.0, 2: 2.0, 4: 3.5}}, [[0.6, 0.3, 0.2]]
    chooser = SizeChooser(times, {1: 0.01, 3: 0.01, 4: 0.1}, [1, 2, 4])
    assert chooser.choose(promise, [TIMED_TEXT]) == 1  # 1.6 / 2 < 1
    assert chooser.choose(promise, [TIMED_TEXT - 30]) == 1, "a short text makes no step cheaper"
    assert chooser.choose(promise, [TIMED_TEXT + 400]) == 2  # 1.6 / 6 beats 1 / 5 and 2.1 / 43.5
    flat = SizeChooser(times, {1: 0.01}, [1, 2, 4])
    assert flat.choose(promise, [TIMED_TEXT + 2000]) == 4  # 2.1 / 23.5 beats 1.6 / 22
    # Rows share a pass: what is short in one makes up for what is long in another.
    assert chooser.choose(promise * 2, [TIMED_TEXT + 400, TIMED_TEXT - 400]) == 1
    assert (chooser.largest([TIMED_TEXT]), chooser.largest([TIMED_TEXT + 400])) == (2, 2)
    assert flat.largest([TIMED_TEXT + 400]) == 4  # 7.5 is below 2 * 5


def test_no_more_nodes_are_drafted_than_a_pass_of_so_many_rows_may_hold(monkeypatch):
    times = {1: {1: 1.0, 2: 1.1, 4: 1.9, 8: 2.1}, 4: {1: 1.0, 2: 2.5, 4: 3.0, 8: 4.0}}
    chooser = SizeChooser(times, FREE, [1, 2, 4, 8])
    assert [chooser.largest([TIMED_TEXT] * rows) for rows in (1, 2, 4)] == [4, 2, 2], (
        "the smallest tree can always probe"
    )
    drafted, original = [], TreeFiller.tokens_and_chances
    monkeypatch.setattr(
        TreeFiller, "tokens_and_chances",
        lambda self, *rest: drafted.append(self.tree) or original(self, *rest),
    )  # fmt: skip
    nodes = ((1,), (1, 0), (0,), (1, 0, 0), (2,), (0, 0), (3,))
    drafter = AdaptiveDrafter(random_heads(), calibration(nodes=nodes, step_seconds=times))
    for rows in (1, 4):
        draft = drafter.start([torch.tensor([5])] * rows, 10, [None] * rows)(context(rows=rows))
        assert all(set(tree.paths) <= set(drafted[-1].paths) for tree in draft.trees)
    assert [set(tree.paths) for tree in drafted] == [{(), *nodes[:5]}, {(), *nodes[:1]}], "the most often accepted"


def test_broken_promises_lead_to_plain_decoding_and_probes_lead_back():
    chooser, sizes = SizeChooser({1: {1: 1.0, 2: 1.2, 4: 1.5}}, FREE, [1, 2, 4]), []
    promise = [[0.6, 0.5, 0.4]]
    kept = 0  # accepted by a drafting pass
    for turn in range(400):
        chooser.observe([kept] if sizes and sizes[-1] > 1 else [0])
        kept = 0 if turn < 200 else 1
        sizes.append(1 if chooser.rests() else chooser.choose(promise, [TIMED_TEXT]))
    assert sizes[0] == 4
    late = sizes[100:200]
    assert late.count(1) > 80
    assert 2 <= len(late) - late.count(1) <= 100 // PROBE_EVERY + 2
    assert sizes[-30:].count(1) == 0


def test_promises_and_what_came_of_them_are_means_over_the_rows_that_took_part():
    chooser = SizeChooser({1: {1: 1.0, 2: 1.01, 4: 1.02}}, FREE, [1, 2, 4])
    assert chooser.choose([[0.6, 0.5, 0.4], [0.2, 0.1, 0.0]], [TIMED_TEXT] * 2) == 4
    chooser.observe([2, 1])
    # Of ten drafts that were taken to be kept; 0.9 were promised to each row.
    assert chooser.trust == pytest.approx((9.5 + 1.5) / (9.5 + 0.9))
    chooser.observe([3, 3])
    assert chooser.trust == pytest.approx(11 / 10.4), "a pass counts once"
    assert chooser.choose([[0.3, 0.0, 0.0]], [TIMED_TEXT]) == 2, "the smaller of two that promise the same"
    chooser.observe([0])
    assert chooser.trust == pytest.approx(0.95 * 11 / (0.95 * 10.4 + 0.3)), "the promise of the size that was taken"


def test_after_a_rest_the_smallest_tree_probes_and_a_tree_that_pays_ends_all_rest():
    chooser = SizeChooser({1: {1: 1.0, 2: 1.2, 4: 1.5}}, FREE, [1, 2, 4])
    nothing, much = [[0.0, 0.0, 0.0]], [[0.9, 0.9, 0.9]]
    found = [1 if chooser.rests() else chooser.choose(nothing, [TIMED_TEXT]) for _ in range(2 * PROBE_EVERY + 2)]
    assert found == [*[1] * PROBE_EVERY, 2] * 2
    assert (chooser.choose(nothing, [TIMED_TEXT]), chooser.rests()) == (1, True)
    assert (chooser.choose(much, [TIMED_TEXT]), chooser.rests()) == (4, False)


def test_rows_that_have_ended_are_neither_learnt_from_nor_asked(monkeypatch):
    seen = []
    observe, choose = SizeChooser.observe, SizeChooser.choose
    monkeypatch.setattr(SizeChooser, "observe", lambda self, accepted: seen.append(accepted) or observe(self, accepted))
    monkeypatch.setattr(
        SizeChooser, "choose",
        lambda self, chances, texts: seen.append((len(chances), len(texts))) or choose(self, chances, texts),
    )  # fmt: skip
    whole = context(rows=3)
    drafting = AdaptiveDrafter(random_heads(), calibration()).start([torch.tensor([5])] * 3, 10, [None] * 3)
    draft = drafting(replace(whole, active=[0, 2], accepted=[5, 7, 2]))
    assert seen == [[5, 2], (2, 3)], "a pass holds all rows"
    assert len(draft.trees) == len(draft.tokens) == 3
    assert AdaptiveDrafter(random_heads(), calibration(), size=5).max_size == 5
    assert list(AdaptiveDrafter(random_heads(), calibration()).sizes) == list(range(1, 9))
    assert AdaptiveDrafter(random_heads(), calibration(), timed_sizes=True).sizes == [1, 2, 4, 8]


def test_a_plan_survives_saving(tmp_path):
    heads, plan = random_heads(), calibration()
    save_heads(tmp_path, heads)
    save_tree(tmp_path, Tree.chain(2), plan)
    loaded = load_heads(tmp_path)
    assert (loaded.tree, loaded.calibration) == (Tree.chain(2), plan)
    save_tree(tmp_path, Tree.chain(2))
    assert load_heads(tmp_path).calibration is None
    content = json.loads((tmp_path / "tree.json").read_text()) | {"adaptive": {"nodes": [[0]]}}
    (tmp_path / "tree.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="'adaptive' is damaged"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": ((0, 0), (0,))}, "after their parents"),
        ({"nodes": ((0,), (1,), (0,))}, "once each"),
        ({"temperatures": (1.0,)}, "3 positive temperatures"),
        ({"temperatures": (1.0, 0.0, 1.0)}, "3 positive temperatures"),
        ({"step_seconds": {2: {1: 1.0}}}, "that of 1 row"),
        ({"step_seconds": {1: {2: 1.0}}}, "that of 1 token"),
        ({"step_seconds": {1: {1: 1.0, 2: 0.0}}}, "positive times"),
        ({"step_seconds": {1: {1: 1.0}, 2: {1: 1.0, 2: 1.1}}}, "the same sizes for every batch"),
        ({"step_seconds": {1: {1: 1.0, 64: 3.0}}}, "has size 64"),
        ({"text_seconds": {2: 1.0}}, "text_seconds must hold"),
        ({"text_seconds": {1: 1.0, 2: -1.0}}, "text_seconds must hold"),
        ({"text_seconds": {1: float("nan")}}, "text_seconds must hold"),
    ],
)
def test_an_impossible_plan_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        calibration(**changes)


def test_without_calibration_or_with_an_impossible_size_it_says_so():
    model = MedusaModel(make_llama(), random_heads())
    with pytest.raises(UserError, match="medusa-train tree"):
        model.adaptive_drafter()
    with pytest.raises(UserError, match="from 2 to 11"):
        AdaptiveDrafter(random_heads(), calibration(), size=12)


DRAFTED = torch.arange(0, 64, 2)


def heads_of(kind):
    """Heads that draft every second token."""
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(3, 1, 32, 64, len(DRAFTED), **reading(kind)), DRAFTED)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads.requires_grad_(False)


def answers_at_temperature(model, head, truth, answers, seed=0):
    """A shard of answers that are just long enough for this head, whose last tokens are drawn from what it says.

    An answer begins with the token that the head finds least likely: whoever takes it for a target is far off. Every
    third ends with a token that no head can draft.
    """
    generator = torch.Generator().manual_seed(seed)
    length = head + 2
    hidden = torch.randn(answers * length, 32, generator=generator).bfloat16()
    tokens = torch.randint(64, (answers, length), generator=generator)
    copies = torch.randint(64, (answers * length, MOST_COPIED), generator=generator, dtype=torch.int32)

    def said():
        return model.draft_logits(hidden[::length], head, tokens[:, : head + 1], copies[::length])

    with torch.inference_mode():
        tokens[:, 0] = DRAFTED[said().mean(dim=0).argmin()]
        tokens[:, -1] = DRAFTED[torch.multinomial((said() / truth).softmax(-1), 1, generator=generator)[:, 0]]
    tokens[::3, -1] = 1
    ends = (torch.arange(answers * length) // length + 1) * length
    return Shard(hidden, tokens.flatten(), ends, copies)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent copies"])
@pytest.mark.parametrize(("head", "truth"), [(0, 0.7), (0, 1.0), (0, 2.0), (1, 0.7), (2, 2.0)])
def test_the_temperature_of_known_distributions_is_found(kind, head, truth):
    model = MedusaModel(make_llama(), heads_of(kind))
    shards = [answers_at_temperature(model, head, truth, 1000, seed) for seed in (0, 1)]
    found = fit_temperatures(model, shards)
    assert found[head] == pytest.approx(truth, rel=0.15)
    assert found[head + 1 :] == (1.0,) * (2 - head), "no answer is long enough to tell"


def test_of_many_positions_some_are_taken_all_over(monkeypatch):
    model = MedusaModel(make_llama(), heads_of("medusa"))
    shards = [answers_at_temperature(model, 0, truth, 1500, seed) for seed, truth in enumerate((0.7, 2.0))]
    apart = [fit_temperatures(model, [shard])[0] for shard in shards]
    together = fit_temperatures(model, shards)[0]
    monkeypatch.setattr("medusa_train.eval.calibration.POSITIONS", 750)
    assert apart[0] * 1.15 < together < apart[1] / 1.15
    assert fit_temperatures(model, shards)[0] == pytest.approx(together, rel=0.15)


@pytest.mark.parametrize("name", SHAPING_CONFIGS)
def test_confidence_is_that_of_scaled_or_capped_logits(name):
    """A fresh head says what the backbone says, so its chances, and its temperature, are the backbone's own."""
    backbone = Backbone.wrap(make_shaping_model(name))
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(1, 1, 32, 64))
    plan = Calibration(tuple((rank,) for rank in range(8)), (1.0,), {1: {1: 1.0, 9: 1.1}}, FREE)
    model, texts = MedusaModel(backbone, heads, Tree.chain(1), plan), torch.randint(0, 64, (40, 50))
    with torch.inference_mode():
        hidden, exact = backbone.hidden_states(texts), backbone.model(texts).logits.softmax(-1)
    drafter, seen = model.adaptive_drafter(9), []
    filler = drafter._filler(9)
    compute = filler.tokens_and_chances
    filler.tokens_and_chances = lambda *given: seen.append(compute(*given)) or seen[-1]
    drafter.start([texts[0]], 10, [None])(Context([[5, 7]], hidden[0, -1:], torch.tensor([7]), [0], [0], [0]))
    (tokens, chances), best = seen[0], exact[0, -1].topk(8)
    assert tokens[0, 1:].tolist() == best.indices.tolist()
    torch.testing.assert_close(chances[0, 1:], best.values, rtol=1e-4, atol=1e-6)
    # The tokens that "came" are drawn from what the backbone says at the place before.
    drawn = torch.multinomial(exact.flatten(0, 1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), drawn[:-1]])
    shard = Shard(hidden.flatten(0, 1), tokens, torch.full((2000,), 2000), no_copies(2000))
    assert fit_temperatures(model, [shard])[0] == pytest.approx(1.0, rel=0.15)
