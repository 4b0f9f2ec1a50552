"""Drafting with a small language model: speculative decoding as in the literature (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.inference.attention import check_tree_attention, read_prompts
from medusa_train.inference.backbone import Backbone, load_tokenizer
from medusa_train.inference.drafters import Context, Drafting
from medusa_train.inference.errors import UserError
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.sampling import Sampling, draw
from medusa_train.inference.step import Step
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import Draft, Generators


class DraftModelDrafter:
    """Proposes a chain of K tokens, one pass of the small model each.

    With ``sampling`` the tokens are drawn and the draft carries their distributions; without, they are the small
    model's best. Drawing pays when the backbone samples as well: rejection then accepts with min(1, p/q).
    """

    def __init__(
        self,
        draft_model: Backbone,
        backbone: Backbone,
        num_tokens: int = 4,
        sampling: Sampling | None = None,
        compiled: bool = False,
    ) -> None:
        """Check that the small model can draft for the backbone.

        Raises:
            UserError: they do not share a tokenizer, or the small model cannot be rolled back.
        """
        if num_tokens < 1:
            raise UserError(f"a draft model needs num_tokens >= 1, got {num_tokens}")
        _check_vocabularies(draft_model, backbone)
        check_tree_attention(draft_model)
        self.model, self.num_tokens, self.sampling = draft_model, num_tokens, sampling
        self._step = Step(draft_model, compiled)
        self.vocab_size = backbone.vocab_size
        self.max_size = num_tokens + 1
        self._chain, self._pair, self._single = Tree.chain(num_tokens), Tree.chain(1), Tree.root_only()

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        longest = max(map(len, prompts))
        if self.model.max_positions is not None and longest > self.model.max_positions:
            raise UserError(
                f"the prompt has {longest} tokens, the draft model reads at most {self.model.max_positions}; "
                "shorten it or take another draft model"
            )
        cache = self._step.new_cache(2, longest + max_new_tokens + self.num_tokens)
        read_prompts(self.model, [prompt.to(self.model.device) for prompt in prompts], cache)

        present = list(range(len(prompts)))

        def draft(context: Context) -> Draft:
            nonlocal present
            rows = len(context.numbers)
            if list(context.numbers) != present:
                cache.keep([present.index(number) for number in context.numbers])
                present = list(context.numbers)
            # Everything before the last two tokens was read in earlier steps and is kept; tokens that the backbone
            # rejected lie behind it and are forgotten. The last two are read again: the one before the root was read
            # unless every draft was accepted, and reading two in any case gives all rows one shape.
            cache.set_lengths([len(text) - 2 for text in context.texts])
            last = torch.tensor([list(text[-2:]) for text in context.texts], device=self.model.device)
            logits = self._read(last, [self._pair] * rows, cache)
            tokens, distributions = [context.roots[:, None]], []
            for turn in range(self.num_tokens):
                choice, distribution = self._choose(logits, [generators[number] for number in present])
                tokens.append(choice[:, None].to(context.roots.device))
                distributions.append(distribution)
                if turn + 1 < self.num_tokens:
                    logits = self._read(choice[:, None], [self._single] * rows, cache)
            probabilities = None
            if self.sampling is not None:
                # Nothing is drafted below the last node.
                distributions.append(torch.zeros_like(distributions[0]))
                probabilities = torch.stack(distributions, dim=1).to(context.roots.device)
            return Draft([self._chain] * rows, torch.cat(tokens, dim=1), probabilities)

        return draft

    def _read(self, tokens: Tensor, trees: Sequence[Tree], cache: TreeCache) -> Tensor:
        """Read ``(B, n)`` tokens into the cache; logits after the last, ``(B, V)``, as wide as the backbone's."""
        count = tokens.shape[1]
        # Padded vocabularies differ in length: a token that the small model lacks is read as some other.
        _, all_logits = self._step(tokens.clamp(max=self.model.vocab_size - 1), trees, cache)
        cache.commit([range(count)] * len(tokens), count)
        logits = all_logits[:, -1]
        missing = self.vocab_size - logits.shape[-1]
        # A token that one of the two lacks is never drafted.
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _choose(self, logits: Tensor, generators: Generators) -> tuple[Tensor, Tensor]:
        if self.sampling is None:
            return logits.argmax(dim=-1), logits
        probabilities = self.sampling.probabilities(logits)
        chances = [torch.rand((), generator=g, device=logits.device, dtype=torch.float64) for g in generators]
        return draw(probabilities, torch.stack(chances)), probabilities


def _check_vocabularies(draft_model: Backbone, backbone: Backbone) -> None:
    if draft_model.source and backbone.source:
        ours, theirs = (load_tokenizer(model.source).get_vocab() for model in (draft_model, backbone))
        if ours != theirs:
            raise UserError(f"draft model {draft_model.source} has another tokenizer than {backbone.source}")
    elif draft_model.vocab_size != backbone.vocab_size:
        raise UserError(
            f"the draft model has {draft_model.vocab_size} tokens, the backbone {backbone.vocab_size}: "
            "they need the same tokenizer"
        )
