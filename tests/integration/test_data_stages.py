"""Prompts, answers and hidden states of a tiny model: against plain loops, and after a kill."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from conftest import no_copies
from medusa_train.data import distill as distill_module
from medusa_train.data import hidden_states as hidden_states_module
from medusa_train.data import journal as journal_module
from medusa_train.data import progress as progress_module
from medusa_train.data import synthesis as synthesis_module
from medusa_train.data import transformers_backend as backend_module
from medusa_train.data.asking import Asking
from medusa_train.data.chat import load_chat_tokenizer, render_prompt
from medusa_train.data.conversations import conversation_rows, write_rows
from medusa_train.data.dataset import IGNORED, HeadsDataset
from medusa_train.data.distill import distill
from medusa_train.data.hidden_states import (
    KeptStates,
    Shard,
    hidden_states_of,
    keep_states,
    position_bytes,
    read_cache,
    to_float8,
    write_cache,
    write_shard,
)
from medusa_train.data.prompts import load_conversations, normalized
from medusa_train.data.rows import Prompt, Row, read_prompts, read_rows, split_of
from medusa_train.data.sources import Source
from medusa_train.data.synthesis import synthesize_prompts
from medusa_train.data.transformers_backend import answer_here
from medusa_train.inference import UserError, load_backbone
from medusa_train.inference.copies import NO_COPY
from medusa_train.recipe import DataSection

PROMPTS = [Prompt.of([{"role": "user", "content": f"what is {'the ' * (i % 7)}{i} ?"}]) for i in range(14)]
BF16 = {"rtol": 2**-7, "atol": 1e-5}  # how exactly the cache keeps an fp32 state
# What many templates begin with.
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
SHARES = {"calibration_share": 0.3, "heldout_share": 0.3}


@pytest.fixture
def backbone(tiny_chat_folder):
    """A tiny model that ends some answers early: an eighth of its tokens are end tokens."""
    backbone = load_backbone(str(tiny_chat_folder), dtype="float32", device="cpu")
    backbone.model.generation_config.eos_token_id = list(range(1, 512, 8))
    return backbone


@pytest.fixture
def tokenizer(tiny_chat_folder):
    return load_chat_tokenizer(str(tiny_chat_folder))


def run_distill(
    backbone, tokenizer, path, prompts=PROMPTS, answer_tokens=None, max_new_tokens=8, batch_size=4, **asking
):
    """Rows of a folder of their own, ``path`` without its ending; states beside it."""
    folder = path.with_suffix("")
    asked = Asking(tokenizer, prompts, max_new_tokens, backbone.max_positions, answer_tokens, **SHARES, **asking)
    distill(asked, folder, answer_here(backbone, batch_size, path.with_suffix(".states")))
    return read_rows(folder / "rows.jsonl")


def assert_stored(state, exact, dtype="bfloat16"):
    """A cached state is the exact one, rounded once."""
    if dtype == "bfloat16":
        torch.testing.assert_close(state.float(), exact, **BF16)
    else:  # three bits of mantissa, then bf16's seven; below the range's end by 2^18 numbers are as far apart as there
        torch.testing.assert_close(state.float(), exact, rtol=2**-4 + 2**-8, atol=float(exact.abs().max()) / 450_000)


def run_cache(backbone, rows, folder, batch_tokens=1000, rows_per_shard=2, states="none", dtype="bfloat16"):
    kept = KeptStates(folder.with_name(states))
    write_cache(backbone, rows, kept, folder, batch_tokens, rows_per_shard, "test", dtype)
    return read_cache(folder)


def row(input_ids, spans, name="row"):
    return Row(name, "train", [], list(input_ids), spans, "stop")


END = 1  # the tokenizer's end token, which is its padding token too


def random_rows(count, vocab_size, seed=0):
    """Rows of different lengths with one or two spans; the first begins at the first token.

    All hold real end tokens, and the id that batches are filled up with.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        ids = torch.randint(0, vocab_size, (10 + 3 * i,), generator=generator).tolist()
        ids[1], ids[3], ids[7] = END, 0, END
        spans = [(0, 4), (6, 10)] if i == 0 else [(2 + i, 5 + i), (7 + i, len(ids))][: 1 + i % 2]
        rows.append(row(ids, spans, str(i)))
    return rows


def states_alone(backbone, ids):
    """Hidden states of one unpadded sequence, by the model's own forward pass."""
    with torch.inference_mode():
        return backbone.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


def greedy_alone(backbone, ids, max_new_tokens):
    """Greedy continuation of one unpadded prompt, without a cache."""
    ids, answer = list(ids), []
    with torch.inference_mode():
        while len(answer) < max_new_tokens and not (answer and answer[-1] in backbone.eos_token_ids):
            answer.append(int(backbone.model(input_ids=torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


# Hidden states


def test_hidden_states_of_a_batch_are_those_of_its_rows_alone(backbone):
    assert backbone.model.config.eos_token_id == backbone.model.config.pad_token_id == END
    rows = random_rows(3, backbone.vocab_size)
    alone = [states_alone(backbone, row.input_ids) for row in rows]
    for _ in range(2):
        together = hidden_states_of(backbone, rows)
        assert [len(states) for states in together] == [len(row.input_ids) for row in rows]
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        singles = [hidden_states_of(backbone, [row])[0] for row in rows]
        for ours, theirs in zip(together, singles, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_the_cache_keeps_the_state_before_every_learnt_token(backbone, tmp_path, batch_tokens, dtype):
    rows = random_rows(5, backbone.vocab_size)
    shards = run_cache(backbone, rows, tmp_path, batch_tokens, dtype=dtype)
    assert len(shards) == 3
    for number, shard in enumerate(shards):
        entry = 0
        for row in rows[2 * number : 2 * number + 2]:
            with torch.inference_mode():
                next_tokens = backbone.model(input_ids=torch.tensor([row.input_ids])).logits[0].argmax(-1)
            states = states_alone(backbone, row.input_ids)
            for start, end in row.spans:
                places = range(max(start, 1), end)  # nothing stands before the first token of a text
                for place in places:
                    state = shard.states(torch.tensor(entry))
                    assert shard.tokens[entry] == row.input_ids[place]
                    assert shard.ends[entry] == entry + (end - place)
                    assert_stored(state, states[place - 1], dtype)
                    if dtype == "bfloat16":
                        assert backbone.logits(state.float()).argmax() == next_tokens[place - 1]
                    entry += 1
        assert entry == len(shard.tokens) == len(shard.hidden) == len(shard.ends)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_head_k_at_position_t_learns_the_token_at_t_plus_k_plus_1(backbone, tmp_path, dtype):
    ids, (start, end) = list(range(100, 130)), (10, 28)
    ids[end - 1] = END  # heads learn to stop, although padding has the same id
    shards = run_cache(backbone, [row(ids, [(start, end)])], tmp_path, dtype=dtype)
    states = states_alone(backbone, ids)
    dataset = HeadsDataset(shards, num_heads=3)
    assert len(dataset) == end - start - 1
    for index, t in enumerate(range(start - 1, end - 2)):
        sample = dataset[index]
        targets = [t + k + 1 for k in (1, 2, 3)]
        assert sample["hidden"].dtype == torch.bfloat16
        assert_stored(sample["hidden"], states[t], dtype)
        assert sample["labels"].tolist() == [ids[target] if target < end else IGNORED for target in targets]
        for k in (k for k in (1, 2, 3) if t + k + 1 < end):
            assert_stored(sample["teacher_hidden"][k - 1], states[t + k], dtype)


def test_a_resumed_cache_keeps_whole_shards_and_makes_the_missing_ones(backbone, tmp_path):
    rows = random_rows(5, backbone.vocab_size)
    run_cache(backbone, rows, tmp_path, 40)
    whole = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    assert list(whole) == [f"shard-0000{i}.{ending}" for i in range(3) for ending in ("crc32", "safetensors")]
    (tmp_path / "shard-00001.safetensors").unlink()
    (tmp_path / "shard-00002.crc32").unlink()  # killed before it was written
    kept = tmp_path / "shard-00000.safetensors"
    before = kept.stat().st_mtime_ns
    run_cache(backbone, rows, tmp_path, 40)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("share", [0.3, 0.99])
def test_a_damaged_shard_is_refused_by_name(backbone, tmp_path, share, dtype):
    run_cache(backbone, random_rows(5, backbone.vocab_size), tmp_path / "cache" / "train", 40, dtype=dtype)
    path = tmp_path / "cache" / "train" / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"shard-00001\.safetensors is damaged.*remove .*/cache and run that stage again"
    ):
        read_cache(path.parent)


def test_a_shard_is_checked_once(backbone, tmp_path, monkeypatch):
    run_cache(backbone, random_rows(3, backbone.vocab_size), tmp_path, 40)
    monkeypatch.setattr(hidden_states_module, "_crc32", None)
    assert len(read_cache(tmp_path)) == 2


@pytest.mark.parametrize(("dtype", "gigabytes"), [("bfloat16", 1.2), ("float8", 0.62)])
def test_a_million_positions_of_a_small_model_fit(backbone, tmp_path, dtype, gigabytes):
    assert 1_000_000 * position_bytes(576, dtype) <= gigabytes * 1e9
    shards = run_cache(backbone, [row(range(200), [(100, 200)])], tmp_path, dtype=dtype)
    shard = shards[0]
    tensors = [shard.hidden, shard.tokens, shard.ends, shard.copies, *([shard.scales] if dtype == "float8" else [])]
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == 100 * position_bytes(32, dtype)


@settings(derandomize=True, deadline=None)
@given(data=st.data(), exponent=st.integers(-30, 30))
def test_float8_states_come_back_to_their_own_precision(data, exponent):
    numbers = st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6)
    hidden = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=4))) * 2.0**exponent
    stored, scales = to_float8(hidden)
    shard = Shard(
        stored, torch.arange(len(hidden)), torch.full((len(hidden),), len(hidden)), no_copies(len(hidden)), scales
    )
    for number, exact in enumerate(hidden):
        assert_stored(shard.states(torch.tensor(number)), exact, "float8")
    first = shard.first(1)
    assert torch.equal(first.states(slice(None)), shard.states(slice(0, 1)))
    assert first.ends.tolist() == [1]


def test_copies_are_of_the_whole_text_before_and_never_of_another(backbone, tmp_path):
    """What a prompt says counts for its answer; rows of one shard know nothing of each other."""
    first = row([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4], [(6, 11)], "a")
    second = row([0, 1, 2, 3, 8, 1, 2], [(2, 4), (5, 7)], "b")
    copies = run_cache(backbone, [first, second], tmp_path)[0].copies.tolist()
    new = [NO_COPY] * 5
    after_1_2, after_2_3, after_3_4 = [3, 4, 5, 6, 9], [4, 5, 6, 9, 1], [5, 6, 9, 1, 2]
    assert copies[:5] == [new, new, after_1_2, after_2_3, after_3_4]
    assert copies[5:] == [new, new, new, [3, 8, 1, 2, 3]]


def test_a_cache_without_copies_is_of_another_version(backbone, tmp_path):
    run_cache(backbone, random_rows(3, backbone.vocab_size), tmp_path / "cache" / "train", 40)
    path = next((tmp_path / "cache" / "train").glob("*.safetensors"))
    tensors = load_file(path)
    del tensors["copies"]
    write_shard(path, tensors)
    with pytest.raises(UserError, match=r"shard-.*\.safetensors is of another version; remove .*/cache and run"):
        read_cache(path.parent)


def test_a_kill_while_a_shard_is_written_leaves_none_behind(backbone, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_cache(backbone, random_rows(1, 64), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="holds no hidden states"):
        read_cache(tmp_path)


# Distillation


def test_distilling_keeps_the_states_that_reading_the_rows_would_give(backbone, tokenizer, tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(
        backend_module,
        "keep_states",
        lambda path, rows, states: kept.update(zip([r.id for r in rows], states, strict=True)),
    )
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", max_new_tokens=20)
    assert len({row.learnt_tokens for row in rows}) > 5, "rows of a batch should end at different times"
    for row in rows:
        ((start, end),) = row.spans
        states = states_alone(backbone, row.input_ids)[start - 1 : end - 1]
        assert kept[row.id].dtype == torch.float32
        torch.testing.assert_close(kept[row.id], states, rtol=0, atol=1e-5)


def shard_bytes(folder):
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def test_a_cache_of_kept_states_is_that_of_the_rows_and_computes_nothing(backbone, tokenizer, tmp_path, monkeypatch):
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    computed = run_cache(backbone, rows, tmp_path / "computed")
    monkeypatch.setattr(hidden_states_module, "hidden_states_of", None)
    arranged = run_cache(backbone, rows, tmp_path / "arranged", states="rows.states")
    for ours, theirs in zip(arranged, computed, strict=True):
        torch.testing.assert_close(ours.hidden.float(), theirs.hidden.float(), **BF16)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.ends, theirs.ends)


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


def test_every_token_moves_a_line_that_says_how_long_the_rest_takes(backbone, tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "LOG_SECONDS", 0)
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    total = sum(row.learnt_tokens for row in rows)
    assert len(lines) == total + 5  # four batches, and the end
    assert [int(line.split()[1]) for line in lines] == sorted(int(line.split()[1]) for line in lines)
    assert {line.split()[1] for line in lines} == {"0", "4", "8", "12", "14"}
    written = [int(line.split()[5]) for line in lines]
    assert sorted(set(written)) == list(range(1, total + 1))
    assert all(("minutes left" in line) == (not line.startswith("distill: 0 ")) for line in lines)
    assert f" of 14 prompts, {total} answer tokens, " in lines[-1]
    assert lines[-1].endswith(" 0.0 minutes left")
    run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    assert "tokens/s" not in capsys.readouterr().out  # nothing was generated

    path = tmp_path / "rows" / "rows.jsonl"  # goes on within a batch, which is answered as a whole
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert f" 14 of 14 prompts, {total} answer tokens, " in lines[-1]


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("where", ["before the states", "before the rows", "within a row", "behind a row"])
def test_rows_and_states_stay_in_step_after_a_kill(backbone, tokenizer, tmp_path, monkeypatch, batch, where):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    unbroken = run_distill(backbone, tokenizer, whole)
    run_cache(backbone, unbroken, tmp_path / "unbroken", states="whole.states")
    lines = (tmp_path / "whole" / "rows.jsonl").read_bytes().splitlines(keepends=True)
    module, name = (backend_module, "keep_states") if where == "before the states" else (journal_module, "append_jsonl")
    original, calls = getattr(module, name), iter(range(batch))

    def killed(*arguments):
        if next(calls, None) is None:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, killed)
        with pytest.raises(Killed):
            run_distill(backbone, tokenizer, path)
    appended = tmp_path / "rows" / "appended" / "rank-00000.jsonl"
    assert (appended.read_bytes() if batch else b"") == b"".join(lines[: 4 * batch])
    appended.parent.mkdir(parents=True, exist_ok=True)
    with appended.open("ab") as file:
        file.write({"within a row": lines[4 * batch][:30], "behind a row": lines[4 * batch]}.get(where, b""))
    assert run_distill(backbone, tokenizer, path) == unbroken
    assert (tmp_path / "rows" / "rows.jsonl").read_bytes() == b"".join(lines)
    monkeypatch.setattr(hidden_states_module, "hidden_states_of", None)  # no row without states
    run_cache(backbone, unbroken, tmp_path / "resumed", states="rows.states")
    assert shard_bytes(tmp_path / "resumed") == shard_bytes(tmp_path / "unbroken")


@pytest.mark.parametrize("loss", ["missing", "torn", "of other tokens"])
def test_lost_states_are_computed_again(backbone, tokenizer, tmp_path, loss):
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    computed = run_cache(backbone, rows, tmp_path / "computed")
    file = tmp_path / "rows.states" / "batch-00001.safetensors"
    if loss == "missing":
        file.unlink()
    elif loss == "torn":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        others = [replace(row, input_ids=[*row.input_ids[:-1], 5]) for row in rows[4:8]]
        keep_states(file, others, [torch.zeros(row.learnt_tokens, backbone.hidden_size) for row in others])
    arranged = run_cache(backbone, rows, tmp_path / "arranged", states="rows.states")
    for ours, theirs in zip(arranged, computed, strict=True):
        torch.testing.assert_close(ours.hidden.float(), theirs.hidden.float(), **BF16)
        assert torch.equal(ours.tokens, theirs.tokens)


def test_answers_are_the_models_own_greedy_tokens(backbone, tokenizer, tmp_path):
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    assert sorted(row.id for row in rows) == sorted(prompt.id for prompt in PROMPTS)
    messages = {prompt.id: prompt.messages for prompt in PROMPTS}
    for row in rows:
        prompt = render_prompt(tokenizer, messages[row.id])
        answer = greedy_alone(backbone, prompt, max_new_tokens=8)
        assert row.messages == messages[row.id]
        assert row.input_ids == prompt + answer
        assert row.spans == [(len(prompt), len(prompt) + len(answer))]
        assert row.finish_reason == ("stop" if answer[-1] in backbone.eos_token_ids else "length")
    assert {row.finish_reason for row in rows} == {"stop", "length"}


# Where the file ends after the kill: in which row, and after what share of its line (newline excluded).
@pytest.mark.parametrize(("whole_rows", "share"), [(0, 0.5), (4, 0.01), (5, 0.5), (6, 0.0), (6, 1.0), (13, 0.9)])
def test_distilling_on_after_a_kill_gives_the_rows_of_an_unbroken_run(backbone, tokenizer, tmp_path, whole_rows, share):
    unbroken = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl")
    path = tmp_path / "rows" / "rows.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    torn = lines[whole_rows][: int(share * (len(lines[whole_rows]) - 1))]
    killed = tmp_path / "killed" / "appended" / "rank-00000.jsonl"
    killed.parent.mkdir(parents=True)
    killed.write_bytes(b"".join(lines[:whole_rows]) + torn)
    assert run_distill(backbone, tokenizer, tmp_path / "killed.jsonl") == unbroken
    assert (tmp_path / "killed" / "rows.jsonl").read_bytes() == path.read_bytes()
    assert sorted(file.name for file in killed.parents[1].iterdir()) == ["rows.jsonl"]


@pytest.mark.parametrize("whole_rows", range(1, 13))
def test_a_token_budget_is_met_by_the_same_rows_after_a_kill(backbone, tokenizer, tmp_path, whole_rows):
    unbroken = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", answer_tokens=45)
    path = tmp_path / "rows" / "rows.jsonl"
    assert len(unbroken) == 12 < len(PROMPTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:whole_rows]))
    assert run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", answer_tokens=45) == unbroken


def test_a_finished_run_generates_nothing_again(backbone, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    unbroken = run_distill(backbone, tokenizer, path)
    monkeypatch.setattr(backend_module, "generate_batch", None)
    assert run_distill(backbone, tokenizer, path) == unbroken


def test_the_next_turn_is_asked_behind_the_models_own_answer(backbone, tokenizer, tmp_path, monkeypatch):
    """One conversation goes on to its end, one stops where it was cut, one where its answer has no such text."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    cat, mat = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "on the mat"))
    letters = [token for letter in "the cat" for token in tokenizer(letter)["input_ids"]]
    said = {"a": [[*cat, end], [*mat, end], [*cat, end]], "b": [[*cat, end], mat], "c": [[*letters, end]]}
    prompts = {name: Prompt.of([{"role": "user", "content": name}], ["and ?", "or ?"]) for name in said}
    asked = {name: [] for name in said}

    def generate(_, batch, max_new_tokens, eos, temperature, seed, states):
        answers = []
        for row, ids in enumerate(batch):
            (name,) = (name for name in said if f"user\n{name}<" in tokenizer.decode(ids))
            answers.append(said[name][len(asked[name])])
            asked[name].append((ids, seed[row]))
            states(row, torch.full((len(answers[-1]), backbone.hidden_size), float(len(asked[name]))))
        return answers

    kept = {}
    monkeypatch.setattr(backend_module, "generate_batch", generate)
    monkeypatch.setattr(
        backend_module,
        "keep_states",
        lambda _, rows, states: kept.update(zip([r.id for r in rows], states, strict=True)),
    )
    monkeypatch.setattr(distill_module, "check_splits", lambda _: None)
    rows = {row.id: row for row in run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", list(prompts.values()))}
    for name, prompt in prompts.items():
        row, messages = rows[prompt.id], list(prompt.messages)
        assert [row.input_ids[start:stop] for start, stop in row.spans] == said[name]
        assert [row.input_ids[:start] for start, _ in row.spans] == [ids for ids, _ in asked[name]]
        assert row.finish_reason == ("length" if name == "b" else "stop")
        states = [float(turn) for turn, answer in enumerate(said[name], start=1) for _ in answer]
        assert kept[row.id][:, 0].tolist() == states
        for turn, (ids, _) in enumerate(asked[name]):
            assert ids == render_prompt(tokenizer, messages)
            text = tokenizer.decode(said[name][turn][:-1])
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": ["and ?", "or ?", ""][turn]},
            ]
    assert len({seed for turns in asked.values() for _, seed in turns}) == 6


def test_every_prompt_has_a_temperature_and_draws_that_depend_on_nothing_else(backbone, tokenizer, tmp_path):
    greedy = {row.id: row for row in run_distill(backbone, tokenizer, tmp_path / "greedy.jsonl")}
    mixed = [
        run_distill(
            backbone, tokenizer, tmp_path / f"{size}-{seed}.jsonl", batch_size=size, temperatures=[0.0, 1.5], seed=seed
        )
        for size, seed in ((4, 0), (3, 0), (4, 1))
    ]
    by_id = [{row.id: row for row in rows} for rows in mixed]
    assert by_id[0] == by_id[1]
    assert {row.temperature for row in mixed[0]} == {0.0, 1.5}
    for row in mixed[0]:
        same = row.input_ids == greedy[row.id].input_ids
        assert same == (row.temperature == 0)
    drawn = [row.id for row in mixed[0] if row.temperature and by_id[2][row.id].temperature]
    assert any(by_id[0][name] != by_id[2][name] for name in drawn)


def test_other_prompts_do_not_move_a_prompt_to_another_split(backbone, tokenizer, tmp_path):
    few = run_distill(backbone, tokenizer, tmp_path / "few.jsonl", PROMPTS[:9], max_new_tokens=1)
    many = run_distill(backbone, tokenizer, tmp_path / "many.jsonl", PROMPTS[::-1], max_new_tokens=1)
    splits = {row.id: row.split for row in many}
    assert {row.id: row.split for row in few}.items() <= splits.items()
    assert set(splits.values()) == {"train", "calibration", "heldout"}


def test_stopping_early_leaves_no_measuring_split_empty(backbone, tokenizer, tmp_path):
    every = run_distill(backbone, tokenizer, tmp_path / "every.jsonl", max_new_tokens=1)
    measuring = {row.id for row in every if row.split != "train"}
    budget = run_distill(
        backbone, tokenizer, tmp_path / "budget.jsonl", answer_tokens=len(measuring) + 1, max_new_tokens=1
    )
    assert measuring < {row.id for row in budget}
    assert len(budget) < len(PROMPTS)


@pytest.mark.parametrize("split", ["train", "calibration", "heldout"])
def test_a_split_without_prompts_is_an_error_whose_advice_can_be_followed(backbone, tokenizer, tmp_path, split):
    prompts = [prompt for prompt in PROMPTS if split_of(prompt.id, **SHARES) != split]
    with pytest.raises(UserError, match=f"no row fell into the {split} split") as caught:
        run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", prompts, max_new_tokens=1)
    assert set(re.findall(r"data\.(\w+)", str(caught.value))) <= DataSection.model_fields.keys()


def test_a_prompt_that_the_template_refuses_does_not_stop_the_others(backbone, tokenizer, tmp_path):
    tokenizer.chat_template = STRICT + tokenizer.chat_template
    refused = Prompt.of([{"role": "user", "content": "what"}, {"role": "user", "content": "is this ?"}])
    rows = run_distill(backbone, tokenizer, tmp_path / "rows.jsonl", [*PROMPTS, refused], max_new_tokens=1)
    assert sorted(row.id for row in rows) == sorted(prompt.id for prompt in PROMPTS)


# Conversations


def conversation(i, answers=("the cat",)):
    question = {"role": "user", "content": f"what is {i} ?"}
    return [message for text in answers for message in (question, {"role": "assistant", "content": text})]


def run_conversations(tokenizer, tmp_path, conversations, max_length=4096):
    source = tmp_path / "conversations.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    path, skipped = tmp_path / "rows.jsonl", Counter()
    given = load_conversations([Source(str(source))], "skip", skipped)
    write_rows(path, conversation_rows(tokenizer, given, max_length, **SHARES, skipped=skipped), skipped)
    return read_rows(path)


@pytest.fixture(autouse=True)
def _conversions_stay_here(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def learnt(tokenizer, row):
    return [tokenizer.decode(row.input_ids[start:end]) for start, end in row.spans]


def test_answers_of_given_conversations_are_learnt(tokenizer, tmp_path):
    conversations = [conversation(i, ("the cat", "on the mat")) for i in range(12)]
    rows = run_conversations(tokenizer, tmp_path, conversations)
    assert [row.messages for row in rows] == [messages[:1] for messages in conversations]
    assert all(learnt(tokenizer, row) == ["the cat<|im_end|>", "on the mat<|im_end|>"] for row in rows)
    assert {row.finish_reason for row in rows} == {"given"}


def test_a_long_conversation_is_cut_and_its_spans_with_it(tokenizer, tmp_path):
    conversations = [conversation(i, ("the cat", "on the mat")) for i in range(10, 22)]
    whole = run_conversations(tokenizer, tmp_path, conversations)
    (_, first_end), (second_start, second_end) = whole[0].spans
    assert all(row.spans == whole[0].spans for row in whole)
    for max_length, second in [(second_end - 1, [(second_start, second_end - 1)]), (second_start, []), (first_end, [])]:
        cut = run_conversations(tokenizer, tmp_path, conversations, max_length)
        assert [row.input_ids for row in cut] == [row.input_ids[:max_length] for row in whole]
        assert all(row.spans == [whole[0].spans[0], *second] for row in cut)


def test_conversations_without_an_answer_are_left_out_and_counted(tokenizer, tmp_path, capsys):
    good = [conversation(i) for i in range(12)]
    rows = run_conversations(tokenizer, tmp_path, [conversation(99)[:1], *good, conversation(98)[:1]])
    assert [row.messages for row in rows] == [messages[:1] for messages in good]
    assert "conversations left out: 2 (no turn of an assistant)" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, 5])
def test_a_conversation_that_the_template_refuses_does_not_stop_the_others(tokenizer, tmp_path, place, capsys):
    tokenizer.chat_template = STRICT + tokenizer.chat_template
    good = [conversation(i) for i in range(12)]
    greeting = [{"role": "assistant", "content": "the cat"}, *conversation(98)]
    two_questions = [conversation(99)[0], *conversation(98)]
    bad = [greeting, two_questions, conversation(97)[:1]]
    rows = run_conversations(tokenizer, tmp_path, [*good[:place], *bad, *good[place:]])
    assert [row.messages for row in rows] == [messages[:1] for messages in good]
    told = capsys.readouterr().out
    for reason in ("roles must alternate", "two turns of the user in a row", "no turn of an assistant"):
        assert reason in told


def test_answers_to_one_question_stand_on_one_side_of_the_split(tokenizer, tmp_path):
    conversations = [conversation(i, (answer,)) for i in range(12) for answer in ("the cat", "the mat", "this")]
    rows = run_conversations(tokenizer, tmp_path, conversations)
    assert len(rows) == 36
    sides = {}
    for row in rows:
        sides.setdefault(row.messages[0]["content"], set()).add(row.split)
    assert all(len(splits) == 1 for splits in sides.values())
    assert {split for splits in sides.values() for split in splits} == {"train", "calibration", "heldout"}


def test_no_usable_conversation_is_an_error(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"nothing to learn from: 2 \(no turn of an assistant\)"):
        run_conversations(tokenizer, tmp_path, [conversation(i)[:1] for i in range(2)])


# Synthesized prompts


@pytest.fixture
def writer(backbone):
    """The same model with few end tokens, so that a turn has some words before it ends."""
    backbone.model.generation_config.eos_token_id = list(range(1, 512, 100))
    return backbone


def run_synthesis(writer, tokenizer, path, count=12, max_tokens=100, top_k=0, seed=3):
    synthesize_prompts(
        writer, tokenizer, path, count, max_tokens, temperature=1.5, top_k=top_k, batch_size=8, seed=seed
    )
    return read_prompts(path)


def test_synthesized_prompts_depend_on_the_seed_alone(writer, tokenizer, tmp_path):
    first = run_synthesis(writer, tokenizer, tmp_path / "first.jsonl")
    torch.rand(5)  # the state of the global generator does not matter
    assert run_synthesis(writer, tokenizer, tmp_path / "second.jsonl") == first
    other = run_synthesis(writer, tokenizer, tmp_path / "other.jsonl", seed=4)
    assert not {prompt.id for prompt in first} & {prompt.id for prompt in other}


def test_synthesized_prompts_are_whole_distinct_user_turns(writer, tokenizer, tmp_path):
    prompts = run_synthesis(writer, tokenizer, tmp_path / "prompts.jsonl")
    assert len({normalized(prompt) for prompt in prompts}) == len(prompts) == 12
    for prompt in prompts:
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert len(prompt.messages[0]["content"].split()) >= 4
        assert "<|im_" not in prompt.messages[0]["content"]


@pytest.mark.parametrize(("whole_rows", "share"), [(0, 0.5), (3, 0.5), (9, 0.0), (11, 0.9)])
def test_synthesis_goes_on_after_a_kill_as_if_unbroken(writer, tokenizer, tmp_path, whole_rows, share):
    path = tmp_path / "prompts.jsonl"
    unbroken = run_synthesis(writer, tokenizer, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:whole_rows]) + lines[whole_rows][: int(share * len(lines[whole_rows]))])
    assert run_synthesis(writer, tokenizer, path) == unbroken


@pytest.mark.parametrize("max_tokens", [4, 100])
def test_a_model_that_writes_no_usable_prompts_is_given_up_on(writer, tokenizer, tmp_path, max_tokens):
    """Turns of 4 tokens are too short; with top_k=1 all turns are the same."""
    top_k = 0 if max_tokens == 4 else 1
    with pytest.raises(UserError, match=r"wrote only [01] usable prompts of the 12 wanted; lower data\.num_prompts"):
        run_synthesis(writer, tokenizer, tmp_path / "prompts.jsonl", max_tokens=max_tokens, top_k=top_k)


def test_a_turn_that_never_ends_is_no_prompt(writer, tokenizer, tmp_path, monkeypatch):
    text = tokenizer("the cat sat on the mat", add_special_tokens=False)["input_ids"]
    end = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    monkeypatch.setattr(synthesis_module, "generate_batch", lambda *arguments, **keywords: [text, text + end])
    assert len(run_synthesis(writer, tokenizer, tmp_path / "ended.jsonl", count=1)) == 1

    monkeypatch.setattr(synthesis_module, "generate_batch", lambda *arguments, **keywords: [text, text])
    with pytest.raises(UserError, match="wrote only 0 usable prompts"):
        run_synthesis(writer, tokenizer, tmp_path / "fragments.jsonl", count=1)
    assert read_prompts(tmp_path / "fragments.jsonl") == []
