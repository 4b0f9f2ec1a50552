"""How logits become the distribution that a token is drawn from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.errors import UserError

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (n, T) token ids, (n, V) logits -> (n, V) logits
# Processors of transformers that treat the rows of a batch apart or carry state from call to call, and those that
# expect a doubled batch.
WHOLE_BATCH = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}
NEVER = {"ClassifierFreeGuidanceLogitsProcessor"}


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, in transformers' order; applied alike to every node and bonus token.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p.
        min_p: drop tokens less likely than this share of the likeliest one's probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UserError(f"sampling needs temperature > 0, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k counts tokens, 0 for all; got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be in [0, 1], got {self.min_p}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """``(..., V)`` logits -> fp32 probabilities that sum to 1."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays while the probability before it is below p, so the likeliest always stays.
            ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        if self.min_p > 0:
            least = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        if self.top_p < 1 or self.min_p > 0:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities


def draw(probabilities: Tensor, chances: Tensor) -> Tensor:
    """One index per row of ``(..., V)`` probabilities, by inverting their cumulative sum at ``chances`` ``(...)``.

    `torch.multinomial` draws noise for every token of the vocabulary, ten times the work. Sums are in fp64, so that
    small probabilities at the end of a large vocabulary are not rounded away; zeros are never drawn.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    index = torch.searchsorted(cumulative, chances.double()[..., None] * cumulative[..., -1:], right=True)
    return index.clamp(max=probabilities.shape[-1] - 1)[..., 0]


class Chances:
    """A row's stream of uniform numbers: each emitted token uses the next one.

    A drafted token at depth d of a tree is looked at with the d-th number ahead, whatever branch it is on, and only
    the numbers of emitted tokens are used up. So a seed gives one text, whatever is drafted: that of plain sampling.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self.generator, self.device = generator, device
        self._drawn = torch.empty(0, dtype=torch.float64, device=device)

    def ahead(self, count: int) -> Tensor:
        """The next ``count`` numbers in [0, 1), fp64, without using them up."""
        if (missing := count - len(self._drawn)) > 0:
            more = torch.rand(missing, generator=self.generator, device=self.device, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, more])
        return self._drawn[:count]

    def use(self, count: int) -> None:
        """Go on by as many numbers as tokens were emitted."""
        self.ahead(count)
        self._drawn = self._drawn[count:]


def check_processors(processors: Sequence[LogitsProcessor], batch: int, in_order: bool) -> None:
    """Refuse processors that cannot be applied node by node, by name.

    Args:
        batch: rows that are decoded together.
        in_order: whether the verifier visits nodes in the order of the text and never off it, so that a processor
            that remembers earlier calls sees what plain decoding would show it.

    Raises:
        UserError: one of them needs more than token ids and logits, or remembers calls that it would not get.
    """
    for processor in processors:
        name = type(processor).__name__
        if name in NEVER or _needed_arguments(processor) > 2:
            raise UserError(f"logits processor {name} needs more than one row's token ids and logits: unsupported")
        if name in WHOLE_BATCH and (batch > 1 or not in_order):
            raise UserError(
                f"logits processor {name} knows the rows of a batch or keeps state from token to token: decode one "
                "prompt at a time, with verifier greedy or rejection"
            )


def _needed_arguments(processor: LogitsProcessor) -> int:
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return 2  # a compiled function: calling it will tell
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def apply_processors(processors: Sequence[LogitsProcessor], text: Sequence[int], logits: Tensor) -> Tensor:
    """One row's ``(V,)`` fp32 logits after every processor, given the text before them."""
    ids, scores = torch.tensor([text], device=logits.device), logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]
