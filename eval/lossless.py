"""Whether drafts change what is decoded.

Greedy outputs in fp32 must be equal, token for token. In half precision a pass over N tokens rounds differently from a
pass over one, which may turn a near-tie; the gap between the two best logits at the first difference tells such a tie
from an error. Sampled outputs must have one distribution; see `sampling_test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import CHUNK
from medusa_train.eval.answers import Answer, fits, local_ask, prompt_ids
from medusa_train.eval.arms import make_decoder
from medusa_train.eval.questions import Question
from medusa_train.eval.sampling_test import compare_samples
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Drafter, NoDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.verify import VerifierName

LEVEL = 0.01  # chance of a false alarm over all tests of a run
ROWS = 64  # continuations drawn together
TYPICAL = {"epsilon": 0.09, "delta": 0.3}  # the defaults of `verify_typical`


@dataclass(frozen=True)
class Divergence:
    """First difference of two outputs: its index, and the gap between the backbone's two best logits there."""

    index: int
    top2_gap: float


def first_divergence(
    backbone: Backbone, prompt: Tensor, ours: Sequence[int], reference: Sequence[int]
) -> Divergence | None:
    """None if the outputs are equal, token for token and in length."""
    if list(ours) == list(reference):
        return None
    pairs = zip(ours, reference, strict=False)
    shorter = min(len(ours), len(reference))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    text = torch.cat([prompt.view(-1), torch.tensor(list(reference[:index]), dtype=torch.long)])
    with torch.inference_mode():
        logits = backbone.logits(backbone.hidden_states(text[None].to(backbone.device))[0, -1]).float()
    best = logits.topk(2).values
    return Divergence(index, float(best[0] - best[1]))


def compare_outputs(backbone: Backbone, reference: Sequence[Answer], ours: Sequence[Answer]) -> dict[str, Any]:
    """Share of prompts whose answers are equal token for token, and where the others part first.

    Of a conversation, the turns after a difference answer other questions and are not looked at.
    """
    differences = []
    for number, (base, answer) in enumerate(zip(reference, ours, strict=True)):
        for turn, (theirs, own) in enumerate(zip(base.turns, answer.turns, strict=False)):
            if found := first_divergence(backbone, torch.tensor(theirs.prompt), own.ids, theirs.ids):
                differences.append({"prompt": number, "turn": turn, **asdict(found)})
                break
    return {"identical_share": 1 - len(differences) / len(reference), "differences": differences}


@torch.inference_mode()
def read_again(backbone: Backbone, shard: Shard, answers: Sequence[Answer]) -> dict[str, Any]:
    """Share of prompts whose answers are the backbone's own greedy choice, token for token, as one pass reads them.

    Args:
        shard: the states of every turn of ``answers``, in order.
        answers: that were decoded greedily.
    """
    below = []
    for places in torch.arange(len(shard.tokens)).split(CHUNK):
        logits = backbone.logits(shard.states(places).to(backbone.device, backbone.dtype)).float()
        own = logits.gather(1, shard.tokens[places].to(logits.device)[:, None])[:, 0]
        below.append((logits.amax(dim=1) - own).cpu())
    turns = iter(torch.cat(below).split([len(turn.ids) for answer in answers for turn in answer.turns]))
    differences = []
    for number, answer in enumerate(answers):
        # Every turn is taken from the iterator; the first that is not greedy text is told.
        for turn, gaps in enumerate([next(turns) for _ in answer.turns]):
            if gaps.any():
                index = int(gaps.nonzero()[0])
                differences.append({"prompt": number, "turn": turn, "index": index, "below_best": float(gaps[index])})
                break
    return {"prompts": len(answers), "share": 1 - len(differences) / len(answers), "differences": differences}


def greedy_identity(
    model: MedusaModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], max_new_tokens: int
) -> dict[str, Any]:
    """Answer every question greedily with the heads and without; see `compare_outputs`.

    Raises:
        UserError: no question leaves room for the budget.
    """
    asked = [q for q in questions if fits(prompt_ids(q, tokenizer), max_new_tokens, model.backbone)]
    if not asked:
        raise UserError(f"no prompt leaves room for {max_new_tokens} tokens in the model's context; ask for fewer")
    answers: dict[str, list[Answer]] = {}
    with tqdm(total=2 * len(asked), desc="greedy", unit="answer") as bar:
        for arm in ("plain", "medusa"):
            ask = local_ask(make_decoder(arm, model, None), model.backbone, tokenizer)
            answers[arm] = []
            for question in asked:
                (turns,) = ask([question], max_new_tokens)
                answers[arm].append(Answer("", question.id, arm, 0, turns))
                bar.update()
    tokens = sum(answer.tokens for answer in answers["plain"])
    return {"prompts": len(asked), "tokens": tokens, **compare_outputs(model.backbone, *answers.values())}


def sampling_identity(
    model: MedusaModel,
    prompts: Sequence[Sequence[int]],
    samples: int,
    tokens: int,
    temperature: float,
    verifier: VerifierName,
    seed: int,
) -> dict[str, Any]:
    """Test whether continuations drawn with the heads are distributed as the backbone's own.

    Args:
        samples: continuations of each prompt, drawn in each way.
        tokens: of each.
        verifier: ``rejection``, which must pass, or ``typical``, which is lossy by design.
    """
    drawn: dict[bool, list[list[list[int]]]] = {False: [], True: []}
    with tqdm(total=len(prompts), desc="sampling", unit="prompt") as bar:
        for number, prompt in enumerate(prompts):
            draw = partial(_continuations, model, prompt, samples, tokens, temperature)
            own_seed = (seed * len(prompts) + number) * 2
            drawn[False].append(draw("rejection", NoDrafter(), own_seed))
            drawn[True].append(draw(verifier, model.drafter, own_seed + 1))
            bar.update()
    tests = compare_samples(drawn[True], drawn[False], tokens, seed)
    rejected = sum(test.adjusted_p < LEVEL for test in tests)
    return {
        "verifier": verifier,
        "temperature": temperature,
        "samples": samples,
        "tokens": tokens,
        "prompts": len(prompts),
        "level": LEVEL,
        "tests": [asdict(test) for test in tests],
        "least_p": min((test.p for test in tests), default=None),
        "least_adjusted_p": min((test.adjusted_p for test in tests), default=None),
        "rejected": rejected,
        "verdict": verdict(verifier, len(tests), rejected),
    }


def verdict(verifier: VerifierName, tests: int, rejected: int) -> str:
    """What the tests say, in a sentence."""
    if not tests:
        return "Nothing could be tested: every position held one token; raise the temperature or the samples."
    if verifier == "typical":
        settings = ", ".join(f"{name} {value}" for name, value in TYPICAL.items())
        outcome = f"{rejected} of {tests} tests see it" if rejected else f"{tests} tests do not see it in this sample"
        return f"Typical acceptance ({settings}) is lossy by design: it changes the distribution; {outcome}."
    if rejected:
        return f"NOT lossless: {rejected} of {tests} tests reject that drafts leave the distribution as it is."
    return f"Consistent with lossless sampling: none of {tests} tests rejects it."


def _continuations(
    model: MedusaModel,
    prompt: Sequence[int],
    samples: int,
    tokens: int,
    temperature: float,
    verifier: VerifierName,
    drafter: Drafter,
    seed: int,
) -> list[list[int]]:
    generator = torch.Generator(model.backbone.device).manual_seed(seed)
    ids = torch.tensor(list(prompt))
    found: list[list[int]] = []
    while len(found) < samples:
        found += model.generate(
            [ids] * min(ROWS, samples - len(found)),
            tokens,
            verifier=verifier,
            temperature=temperature,
            drafter=drafter,
            generator=generator,
        ).new_tokens
    return found
