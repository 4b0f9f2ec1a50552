"""What the tests of decoding share: drafters of all kinds, one that knows the truth, and transformers' own answers."""

import itertools
from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM

from conftest import WIDE, make_llama, random_heads
from medusa_train.inference import (
    Backbone,
    DraftModelDrafter,
    MedusaLookupDrafter,
    MedusaModel,
    NoDrafter,
    PromptLookupDrafter,
    Sampling,
    Tree,
)
from medusa_train.inference.verify import Draft

LENGTHS = (1, 5, 9)
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


class Oracle:
    """Drafts each row's true continuation in a branch that changes from step to step and from row to row.

    ``tree`` may be a list of one tree per row, all of one size.
    """

    def __init__(self, tree, truths):
        self.trees, self.truths = tree if isinstance(tree, list) else [tree] * len(truths), truths
        self.max_size = self.trees[0].size

    def start(self, prompts, max_new_tokens, generators):
        turn, lengths = 0, [len(prompt) for prompt in prompts]

        def draft(context):
            nonlocal turn
            turn += 1
            rows, trees = [], [self.trees[number] for number in context.numbers]
            for row, tree, text in zip(context.numbers, trees, context.texts, strict=True):
                leaves = [node for node in range(tree.size) if not tree.children[node]]
                branch = tree.ancestors[leaves[(turn + row) % len(leaves)]]
                ahead = self.truths[row][len(text) - lengths[row] :]
                tokens = [text[-1]]
                for node, path in enumerate(tree.paths[1:], start=1):
                    true = ahead[len(path) - 1] if len(path) <= len(ahead) else 1
                    tokens.append(true if node in branch else (true + 1 + node) % 60)
                rows.append(tokens)
            return Draft(trees, torch.tensor(rows))

        return draft


class Failing:
    """A drafter that raises at its third step."""

    max_size = 1

    def start(self, prompts, max_new_tokens, generators):
        plain, steps = NoDrafter().start(prompts, max_new_tokens, generators), itertools.count(1)

        def draft(context):
            if next(steps) == 3:
                raise RuntimeError("the drafter broke")
            return plain(context)

        return draft


def greedy(model, prompt, count, eos=None, **options):
    """transformers' own continuation of one prompt, without the prompt."""
    out = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=count, do_sample=False,
        pad_token_id=0, eos_token_id=eos, **options,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def cut(tokens, ends):
    """Tokens up to the first end token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def prompts(lengths, vocab=64, seed=11):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def padded(rows, side, pad=7):
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def seeded(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def build_model(config, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).float().eval()


def drain(stream, seen):
    """Collect a stream's tokens for as long as it goes."""
    for block in stream:
        seen += block.tokens


def lookup_drafter(model, num_tokens=4):
    return MedusaLookupDrafter(model.drafter, PromptLookupDrafter(num_tokens, 2, 1))


@lru_cache(maxsize=4)
def near_copy(backbone, noise=0.02):
    """A draft model that often, but not always, agrees with the backbone."""
    copy = make_llama(vocab_size=backbone.config.vocab_size)
    copy.load_state_dict(backbone.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return Backbone.wrap(copy)


DRAFTERS = {
    "none": lambda model, truths: NoDrafter(),
    "heads": lambda model, truths: model.drafter,
    "recurrent-heads": lambda model, truths: MedusaModel(
        model.backbone, random_heads(vocab_size=model.backbone.vocab_size, kind="recurrent copies"), WIDE
    ).drafter,
    "hydra-heads": lambda model, truths: MedusaModel(
        model.backbone, random_heads(vocab_size=model.backbone.vocab_size, kind="hydra"), WIDE
    ).drafter,
    "oracle": lambda model, truths: Oracle(WIDE, truths),
    "oracle-a-tree-per-row": lambda model, truths: Oracle(
        [[Tree.chain(4), Tree.from_paths([(0, 0), (1, 0)]), Tree.from_paths([(i,) for i in range(4)])][i % 3]
         for i in range(len(truths))], truths,
    ),
    "prompt-lookup": lambda model, truths: PromptLookupDrafter(4, 2, 1),
    "heads-and-lookup": lambda model, truths: lookup_drafter(model),
    "draft-model": lambda model, truths: DraftModelDrafter(near_copy(model.backbone.model), model.backbone, 3),
    "sampling-draft-model": lambda model, truths: DraftModelDrafter(
        near_copy(model.backbone.model), model.backbone, 3, Sampling(0.5)
    ),
}  # fmt: skip
