"""Evaluation on tiny models: conversations, arms that fail, a server, a kill midway, and what `lossless` catches."""

import json
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import medusa_train.inference.model
from conftest import random_heads
from medusa_train.data.chat import load_chat_tokenizer, render_prompt
from medusa_train.data.hidden_states import shard_of
from medusa_train.data.rows import Row
from medusa_train.eval.acceptance import recall, replay, token_ranks
from medusa_train.eval.answers import Answer, AnswerFile, Turn, local_ask
from medusa_train.eval.arms import make_decoder
from medusa_train.eval.evaluate import Plan, evaluate, rows_of, typical_generation
from medusa_train.eval.figures import step_model
from medusa_train.eval.lossless import compare_outputs, greedy_identity, read_again, sampling_identity
from medusa_train.eval.questions import Question
from medusa_train.eval.server import Server
from medusa_train.inference import MedusaModel, Tree, UserError, load_backbone
from medusa_train.inference.verify import Verdict, verify_rejection

TREE = Tree.from_paths([[0], [1], [0, 0], [2]])


@pytest.fixture(scope="module")
def model(tiny_chat_folder):
    backbone = load_backbone(str(tiny_chat_folder), "float32", "cpu")
    heads = random_heads(vocab_size=512)
    # The first head often agrees with the backbone, so that drafts are accepted and refused.
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.5)
    return MedusaModel(backbone, heads, TREE)


@pytest.fixture(scope="module")
def tokenizer(tiny_chat_folder):
    return load_chat_tokenizer(str(tiny_chat_folder))


@pytest.fixture(scope="module")
def heldout(model, tokenizer):
    ids = render_prompt(tokenizer, [{"role": "user", "content": "the cat sat ?"}])
    answer = model.generate(torch.tensor(ids), 12).new_tokens[0]
    row = Row("a", "heldout", [], ids + answer, [(len(ids), len(ids) + len(answer))], "length")
    return [shard_of(model.backbone, [row], 512)]


QUESTIONS = [
    Question([{"role": "user", "content": "what is this ?"}], ("and that ?",), "qa"),
    Question([{"role": "user", "content": "the cat sat on the mat"}], (), "qa"),
    Question([{"role": "user", "content": "mat and cat ?"}], (), "writing"),
]
PLAN = Plan(
    QUESTIONS, "a test", ("generate", "plain", "medusa"), 10, 2, None, (1,), lambda: None, None,
    {1: 0.01, TREE.size: 0.012},
    [{"tree": "chosen", "size": TREE.size, "paths": [list(path) for path in TREE.paths if path]}],
)  # fmt: skip


def run(model, tokenizer, heldout, path, plan=PLAN, key="k"):
    return evaluate(model, tokenizer, heldout, plan, AnswerFile(path, key))


def counts(report):
    """All that must not depend on time."""
    keys = ("acceptance", "read_again", "simulated", "replay", "recall", "losslessness", "trees", "sample")
    return {key: report[key] for key in keys} | {
        "speed": {arm: row["tokens_per_step"] for arm, row in report["speed"].items()}
    }


def answers_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(model, tokenizer, heldout, tmp_path_factory):
    """An evaluation that nothing disturbed, and its file of answers."""
    path = tmp_path_factory.mktemp("unbroken") / "answers.jsonl"
    return run(model, tokenizer, heldout, path), path


def test_a_second_turn_follows_the_arms_own_answer(unbroken, tokenizer):
    report, path = unbroken
    records = answers_in(path)
    assert len(records) == 3 * 3 * 2
    for record in (record for record in records if record["question"] == QUESTIONS[0].id):
        first, second = record["turns"]
        answer = {"role": "assistant", "content": first["text"]}
        said = [*QUESTIONS[0].messages, answer, {"role": "user", "content": "and that ?"}]
        assert second["prompt"] == render_prompt(tokenizer, said)
    assert report["setting"]["turns"] == 4
    assert report["losslessness"]["over_plain"] == {"identical_share": 1, "differences": []}
    assert report["losslessness"]["over_generate"]["identical_share"] == 1
    assert abs(report["simulated"]["difference"]) < 0.05, "the same texts, the same tree"
    assert {row["category"]: row["prompts"] for row in report["categories"]} == {"qa": 2, "writing": 1}
    assert any("One prompt only: writing" in text for text in report["warnings"])
    assert report["speed"]["plain"]["tokens_per_step"] == 1


def test_what_is_set_against_each_other_in_a_report_are_its_own_figures(unbroken, model, heldout):
    report, _ = unbroken
    plain, medusa = (report["speed"][arm]["ms_per_step"] for arm in ("plain", "medusa"))
    assert report["overhead"] == pytest.approx(medusa / plain)
    measured = report["speedup"]["over_plain"]["median"]
    assert report["model"] == pytest.approx(step_model(report["speed"]["medusa"]["tokens_per_step"], 1.2, measured))
    assert report["speedup"] == {
        f"over_{base}": report["speed"]["medusa"][f"over_{base}"] for base in ("generate", "plain")
    }
    simulated = report["simulated"]
    ratio = simulated["tokens_per_step"] / report["acceptance"]["tokens_per_step"]
    assert simulated["difference"] == pytest.approx(ratio - 1)
    ranks = token_ranks(model, heldout)
    assert report["recall"] == {f"top{best}": recall(ranks, best) for best in (1, 5, 10)}
    (chosen,) = report["trees"]
    assert chosen["replayed"] == report["replay"]["tokens_per_step"] == replay(ranks, TREE).tokens_per_step


def test_the_sample_is_a_typical_one_of_the_longer_half(tokenizer):
    def answer(*blocks):
        tokens = sum(count for count, _ in blocks)
        histogram = Counter(count for count, _ in blocks[1:])
        turn = Turn(tokens, 1, 0.0, 1.0, "", [1], list(range(20, 20 + tokens)), histogram, [list(b) for b in blocks])
        return Answer("", str(tokens), "medusa", 0, [turn])

    answers = [
        answer((1, 0), (2, 1)), answer((1, 0), (1, 0)), answer((1, 0)),  # short
        answer((1, 0), (5, 4), (5, 4)), answer((1, 0), (3, 2), (1, 0), (3, 3)), answer((1, 0), *[(1, 0)] * 9),
    ]  # fmt: skip
    questions = [Question([{"role": "user", "content": f"question {n}"}]) for n in range(6)]
    found = typical_generation(tokenizer, questions, answers)
    assert (found["prompt"], found["tokens_per_step"]) == ("question 4", pytest.approx(7 / 3))
    assert [(piece["step"], piece["drafted"]) for piece in found["pieces"]] == [
        (0, False), (1, True), (1, True), (1, False), (2, False), (3, True), (3, True), (3, True),
    ]  # fmt: skip
    assert [piece["text"] for piece in found["pieces"]] == [tokenizer.decode([id]) for id in range(20, 28)]


def test_steps_of_our_loop_are_compiled_before_they_are_timed_and_those_of_others_are_not(
    model, tokenizer, heldout, tmp_path, monkeypatch
):
    def collect(*settings, compiled, needed):
        raise Killed(compiled)

    monkeypatch.setattr("medusa_train.eval.evaluate.collect", collect)
    for compiled, arms in ((True, ["plain", "medusa"]), (False, [])):
        monkeypatch.setattr(model.step, "compiled", compiled)
        with pytest.raises(Killed) as told:
            run(model, tokenizer, heldout, tmp_path / "a.jsonl")
        assert told.value.args == (arms,)


def test_questions_that_are_not_timed_are_answered_once_by_the_heads(model, tokenizer, heldout, unbroken, tmp_path):
    path = tmp_path / "answers.jsonl"
    report = run(model, tokenizer, heldout, path, replace(PLAN, timed=1))
    given = Counter((record["question"], record["arm"]) for record in answers_in(path))
    (timed,) = {question for (question, arm) in given if arm == "plain"}
    assert given == {(timed, arm): 2 for arm in PLAN.arms} | {
        (question.id, "medusa"): 1 for question in QUESTIONS if question.id != timed
    }
    whole = unbroken[0]
    assert (report["setting"]["prompts"], report["setting"]["timed_prompts"]) == (3, 1)
    assert whole["setting"]["timed_prompts"] == 3
    for counted in ("acceptance", "simulated", "read_again", "sample"):
        assert report[counted] == whole[counted]
    assert report["setting"]["turns"] == 4
    rows = {row["category"]: row for row in report["categories"]}
    assert sorted(row["timed_prompts"] for row in rows.values()) == [0, 1]
    for row, other in zip(report["categories"], whole["categories"], strict=True):
        assert row["prompts"] == other["prompts"]
        assert row["arms"]["medusa"]["tokens_per_step"] == other["arms"]["medusa"]["tokens_per_step"]
        for arm in row["arms"].values() if not row["timed_prompts"] else ():
            assert arm["decode_tokens_per_second"] is arm["over_plain"] is None
    # Times and what is held against them are of the timed question alone.
    steps = [sum(turn["histogram"].values()) for record in answers_in(path) if record["question"] == timed
             and record["arm"] == "medusa" for turn in record["turns"]]  # fmt: skip
    tokens = [turn["tokens"] - 1 for record in answers_in(path) if record["question"] == timed
              and record["arm"] == "medusa" for turn in record["turns"]]  # fmt: skip
    assert report["speed"]["medusa"]["tokens_per_step"] == pytest.approx(sum(tokens) / sum(steps))
    assert report["model"]["speedup"] == pytest.approx(sum(tokens) / sum(steps) / 1.2)


def test_prompts_that_are_answered_together_have_speeds_of_their_own(model, tokenizer, heldout, unbroken, tmp_path):
    path = tmp_path / "answers.jsonl"
    arms = (*PLAN.arms, "generate-lookup")
    report = run(model, tokenizer, heldout, path, replace(PLAN, arms=arms, batch_sizes=(1, 2, 8)))
    (batch,) = report["batches"]
    assert (batch["batch_size"], batch["prompts"]) == (2, 2), "full batches alone"
    assert batch["arms"].keys() == set(PLAN.arms), "transformers' lookup takes one prompt at a time"
    assert report["unavailable"] == {"8 prompts together": "3 are timed"}
    records = [record for record in answers_in(path) if record["batch_size"] == 2]
    alone = {(r["question"], r["arm"]): r for r in answers_in(path) if r["batch_size"] == 1 and r["repeat"] == 0}
    assert len(records) == 2 * len(PLAN.arms) * PLAN.repeats
    for record in records:
        other = alone[record["question"], record["arm"]]
        assert [turn["ids"] for turn in record["turns"]] == [turn["ids"] for turn in other["turns"]]
    for arm, row in batch["arms"].items():
        own = [record for record in records if record["arm"] == arm]
        speeds = [
            sum(turn["tokens"] - turn["prefill_tokens"] for record in own if record["repeat"] == r
                for turn in record["turns"])
            / sum(turn["decode_seconds"] for record in own if record["repeat"] == r for turn in record["turns"])
            for r in range(PLAN.repeats)
        ]  # fmt: skip
        assert row["decode_tokens_per_second"]["median"] == pytest.approx(sum(speeds) / 2)
        assert row["identical_to_plain"] == 1
    # All else is as without them.
    assert counts(report) | {"speed": None} == counts(unbroken[0]) | {"speed": None}
    whole = path.read_text()
    run(model, tokenizer, heldout, path, replace(PLAN, arms=arms, batch_sizes=(1, 2, 8)))
    assert path.read_text() == whole, "nothing is answered twice"


def test_an_arm_that_fails_with_several_prompts_keeps_its_own_row(model, tokenizer, heldout, tmp_path, monkeypatch):
    def ask(decoder, backbone, tokenizer):
        asked = local_ask(decoder, backbone, tokenizer)

        def fail(questions, budget):
            if len(questions) > 1 and budget <= 10 and decoder in lookups:
                raise MemoryError("no room")
            return asked(questions, budget)

        return fail

    lookups = []

    def decode(arm, *models):
        decoder = make_decoder(arm, *models)
        lookups.extend([decoder] if arm == "lookup" else [])
        return decoder

    monkeypatch.setattr("medusa_train.eval.evaluate.local_ask", ask)
    monkeypatch.setattr("medusa_train.eval.evaluate.make_decoder", decode)
    plan = replace(PLAN, arms=("plain", "medusa", "lookup"), batch_sizes=(2,), repeats=1)
    report = run(model, tokenizer, heldout, tmp_path / "answers.jsonl", plan)
    assert report["unavailable"] == {"lookup, 2 prompts together": "no room"}
    assert report["batches"][0]["arms"].keys() == {"plain", "medusa"}
    assert "lookup" in report["speed"]


def test_answers_that_are_not_greedy_text_are_found_by_reading_them(model, tokenizer):
    answers = [greedy_turn(model, tokenizer, question) for question in QUESTIONS]
    assert read(model, answers) == {"prompts": 3, "share": 1, "differences": []}
    # The last token of a second turn: nothing comes after it, so it alone is wrong.
    first, last = answers[0].turns
    wrong = replace(last, ids=[*last.ids[:-1], (last.ids[-1] + 1) % 512])
    found = read(model, [replace(answers[0], turns=[first, wrong]), *answers[1:]])
    assert found["share"] == pytest.approx(2 / 3)
    (difference,) = found["differences"]
    assert (difference["prompt"], difference["turn"], difference["index"]) == (0, 1, len(last.ids) - 1)
    assert difference["below_best"] > 0
    # And a prompt behind it is not taken for the wrong one.
    (late,) = answers[2].turns
    found = read(model, [*answers[:2], replace(answers[2], turns=[replace(late, ids=[(late.ids[0] + 1) % 512])])])
    assert [(row["prompt"], row["turn"], row["index"]) for row in found["differences"]] == [(2, 0, 0)]


def read(model, answers):
    return read_again(model.backbone, shard_of(model.backbone, rows_of(answers), 512), answers)


@pytest.mark.parametrize("continued", [True, False])
def test_a_turn_that_the_next_one_begins_with_is_read_once(model, continued):
    def turn(prompt, ids):
        return Turn(len(ids), 1, 0.0, 0.0, "", prompt, ids)

    first, alone = turn([5, 6, 7], [8, 9]), turn([20, 21], [22, 23, 24])
    second = turn([*first.prompt, *first.ids, 10, 11] if continued else [5, 6, 7, 8, 99, 10, 11], [12, 13, 14])
    answers = [Answer("", "q", "medusa", 0, [first, second]), Answer("", "r", "medusa", 0, [alone])]
    rows = rows_of(answers)
    assert len(rows) == (2 if continued else 3)
    assert len({row.id for row in rows}) == len(rows)
    apart = shard_of(model.backbone, [row for turn in (first, second, alone) for row in row_of(turn)], 512)
    read = shard_of(model.backbone, rows, 512)
    assert torch.equal(read.tokens, apart.tokens)
    assert torch.equal(read.ends, apart.ends)
    torch.testing.assert_close(read.hidden, apart.hidden, rtol=1e-4, atol=1e-5)


def row_of(turn):
    return rows_of([Answer("", str(turn.prompt), "medusa", 0, [turn])])


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("timed", [None, 1])
def test_a_killed_evaluation_goes_on_to_the_same_counts(model, tokenizer, heldout, tmp_path, monkeypatch, timed):
    plan = replace(PLAN, timed=timed)
    unbroken = run(model, tokenizer, heldout, tmp_path / "unbroken.jsonl", plan)
    path = tmp_path / "broken.jsonl"
    add = AnswerFile.add
    with monkeypatch.context() as patch:
        left = iter(range(7))

        def dying(*arguments):
            if next(left, None) is None:
                raise Killed
            return add(*arguments)

        patch.setattr(AnswerFile, "add", dying)
        with pytest.raises(Killed):
            run(model, tokenizer, heldout, path, plan)
    kept = path.read_text()
    assert kept.count("\n") == 7
    path.write_text(kept + '{"key": "k", "quest')  # and the kill tore a line
    resumed = run(model, tokenizer, heldout, path, plan)
    assert path.read_text().startswith(kept), "nothing is answered twice"
    assert counts(resumed) == counts(unbroken)
    whole = path.read_text()
    run(model, tokenizer, heldout, path, plan)
    assert path.read_text() == whole
    AnswerFile(path, "other heads")
    assert not path.exists(), "what depends on other heads is thrown away"


def test_arms_that_cannot_run_say_why_and_the_others_go_on(model, tokenizer, heldout, tmp_path):
    arms = ("plain", "medusa", "adaptive", "draft-model", "openai", "lookup")
    server = Server("http://127.0.0.1:9", "x")
    report = run(model, tokenizer, heldout, tmp_path / "a.jsonl", replace(PLAN, arms=arms, server=server, repeats=1))
    assert report["speed"].keys() == {"plain", "medusa", "lookup"}
    assert "medusa-train tree" in report["unavailable"]["adaptive"]
    assert "eval.draft_model" in report["unavailable"]["draft-model"]
    assert "cannot be reached" in report["unavailable"]["openai"]
    assert report["speedup"]["over_generate"] is None
    assert report["losslessness"]["over_generate"] is None
    assert sum("did not run" in text for text in report["warnings"]) == 3


def test_prompts_without_room_are_left_out_and_counted(model, tokenizer, heldout, tmp_path):
    long = Question([{"role": "user", "content": "the cat sat on the mat " * 60}])
    report = run(model, tokenizer, heldout, tmp_path / "a.jsonl", replace(PLAN, questions=[long, QUESTIONS[1]]))
    assert (report["setting"]["prompts"], report["setting"]["left_out"]) == (1, 1)
    with pytest.raises(UserError, match=r"no prompt of a test leaves room for eval\.max_new_tokens=10"):
        run(model, tokenizer, heldout, tmp_path / "b.jsonl", replace(PLAN, questions=[long]))


class FakeVllm(BaseHTTPRequestHandler):
    """Streams three tokens and counts 2 drafts, of which 3 tokens were accepted."""

    totals = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    bodies: list[dict] = []

    def do_GET(self):
        lines = ["# HELP", *(f'vllm:spec_decode_{name}_total{{m="x"}} {n}.0' for name, n in self.totals.items())]
        self.reply("\n".join(lines))

    def do_POST(self):
        assert self.headers["Authorization"] == "Bearer secret"
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        for name, count in (("num_drafts", 2), ("num_draft_tokens", 6), ("num_accepted_tokens", 3)):
            self.totals[name] += count
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("the", " cat")]
        events.append({"choices": [], "usage": {"completion_tokens": 6}})
        self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


def test_a_server_is_an_arm_with_its_own_counters(model, tokenizer, heldout, tmp_path):
    httpd = HTTPServer(("127.0.0.1", 0), FakeVllm)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        server = Server(f"http://127.0.0.1:{httpd.server_port}/v1", "some-model", key="secret")
        plan = replace(PLAN, arms=("plain", "medusa", "openai"), server=server)
        report = run(model, tokenizer, heldout, tmp_path / "a.jsonl", plan)
    finally:
        httpd.shutdown()
    row = report["speed"]["openai"]
    assert row["tokens_per_step"] == pytest.approx(2.5)
    assert row["ms_per_step"] is row["identical_to_plain"] is None
    assert row["over_plain"]["median"] > 0
    assert all(body["temperature"] == 0 and body["model"] == "some-model" for body in FakeVllm.bodies)
    assert any([message["content"] for message in body["messages"]][1:] == ["the cat", "and that ?"]
               for body in FakeVllm.bodies)  # fmt: skip
    assert "secret" not in (tmp_path / "a.jsonl").read_text() + repr(server) + json.dumps(report)


# Losslessness


def test_greedy_outputs_are_identical_and_a_difference_is_found(model, tokenizer):
    found = greedy_identity(model, tokenizer, QUESTIONS, 10)
    assert (found["identical_share"], found["prompts"]) == (1, 3)
    long = Question([{"role": "user", "content": "the cat sat on the mat " * 60}])
    assert greedy_identity(model, tokenizer, [long, QUESTIONS[1]], 10)["prompts"] == 1
    with pytest.raises(UserError, match="no prompt leaves room for 10 tokens"):
        greedy_identity(model, tokenizer, [long], 10)
    turns = [greedy_turn(model, tokenizer, question) for question in QUESTIONS]
    changed = [replace(turns[0], turns=[replace(turns[0].turns[0], ids=[0, *turns[0].turns[0].ids[1:]])]), *turns[1:]]
    outcome = compare_outputs(model.backbone, turns, changed)
    assert outcome["identical_share"] == pytest.approx(2 / 3)
    assert [(row["prompt"], row["turn"], row["index"]) for row in outcome["differences"]] == [(0, 0, 0)]
    assert outcome["differences"][0]["top2_gap"] > 0


def greedy_turn(model, tokenizer, question):
    ask = local_ask(make_decoder("plain", model, None), model.backbone, tokenizer)
    return Answer("", question.id, "plain", 0, *ask([question], 6))


def sampled(model, tokenizer, verifier="rejection", seed=0):
    prompts = [render_prompt(tokenizer, question.messages) for question in QUESTIONS[:2]]
    return sampling_identity(model, prompts, 192, 4, 1.0, verifier, seed)


def test_exact_sampling_passes(model, tokenizer):
    found = sampled(model, tokenizer)
    assert found["rejected"] == 0, found["least_adjusted_p"]
    assert len(found["tests"]) >= 4
    assert found["verdict"].startswith("Consistent with lossless")


def test_a_biased_verifier_is_caught(model, tokenizer, monkeypatch):
    """Every fifth time that the root's best draft is refused, it is taken all the same."""
    turn = iter(range(10**9))

    def biased(logits, draft, rows, process=None, chances=(), *, sampling):
        honest = verify_rejection(logits, draft, rows, process, chances, sampling=sampling)
        return [
            Verdict((0, 1), (int(draft.tokens[row, 1]), verdict.tokens[-1]))
            if draft.trees[row].size > 1 and len(verdict.path) == 1 and next(turn) % 5 == 0
            else verdict
            for row, verdict in zip(rows, honest, strict=True)
        ]

    monkeypatch.setattr(medusa_train.inference.model, "verify_rejection", biased)
    found = sampled(model, tokenizer)
    assert found["rejected"] > 0
    assert found["verdict"].startswith("NOT lossless")


def test_typical_acceptance_is_reported_as_lossy(model, tokenizer):
    found = sampled(model, tokenizer, "typical")
    assert "lossy by design" in found["verdict"]
    assert "epsilon 0.09, delta 0.3" in found["verdict"]
