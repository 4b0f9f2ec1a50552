"""The public face of decoding: a backbone, its heads and a tree."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from medusa_train.inference.adaptive import AdaptiveDrafter, Calibration
from medusa_train.inference.attention import check_tree_attention
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.candidates import embeddings
from medusa_train.inference.checkpoint import load_heads
from medusa_train.inference.cpu_linear import can_pack, pack_linears
from medusa_train.inference.decode import Verify, decode
from medusa_train.inference.drafters import Drafter, MedusaDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads, check_embeddings
from medusa_train.inference.sampling import LogitsProcessor, Sampling, check_processors
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Block, FinishReason, Stopping
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import (
    Generators,
    Verdict,
    VerifierName,
    verify_greedy,
    verify_rejection,
    verify_typical,
)

# Eight tokens a pass suit most devices at batch 1; `medusa-train tree` replaces it by a measured choice.
DEFAULT_PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


@dataclass(frozen=True)
class Generation:
    """What `MedusaModel.generate` returns.

    Attributes:
        sequences: ``(B, T + longest)``: the prompts as they were given, then the new tokens, padded on the right.
        new_tokens: per row, the new tokens without padding.
        finish_reasons: per row, why it ended; see `Block`.
        stats: counters and times.
    """

    sequences: Tensor
    new_tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    stats: DecodeStats


class GenerateOptions(TypedDict, total=False):
    """Keywords of `MedusaModel.generate` and `MedusaModel.stream`.

    Attributes:
        verifier: ``greedy``, ``rejection`` or ``typical`` (lossy); by default the exact one that the temperature
            asks for.
        temperature: 0 (the default) for greedy decoding.
        top_k, top_p, min_p: as in `Sampling`.
        repetition_penalty: as in transformers; 1.0 changes nothing.
        logits_processors: transformers' ``LogitsProcessor`` or functions like it, applied before the temperature.
        generator: makes draws repeatable; a list gives each row its own.
        eos_token_ids: ids that end a row; the backbone's own by default.
        stop_strings: strings that end a row; needs ``tokenizer``.
        tokenizer: to see stop strings.
        max_steps: bound on backbone passes after prefill.
        drafter: another drafter than the heads; `NoDrafter()` is plain decoding.
        stats: counters to add to.
    """

    verifier: VerifierName | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    logits_processors: Sequence[LogitsProcessor]
    generator: torch.Generator | Sequence[torch.Generator | None] | None
    eos_token_ids: int | Sequence[int] | None
    stop_strings: str | Sequence[str]
    tokenizer: PreTrainedTokenizerBase | None
    max_steps: int | None
    drafter: Drafter | None
    stats: DecodeStats | None


class MedusaModel:
    """A frozen causal LM that drafts with Medusa heads and verifies a tree per pass."""

    def __init__(
        self,
        backbone: Backbone | PreTrainedModel,
        heads: MedusaHeads,
        tree: Tree | None = None,
        calibration: Calibration | None = None,
        step: Step | None = None,
        batch_trees: Mapping[int, Tree] | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            tree: verified in every pass; eight tokens by default.
            calibration: for `adaptive_drafter`.
            batch_trees: number of rows -> the tree that so many and more are decoded with instead.
            step: how the backbone's passes are made; eager by default, see `compiled`.

        Raises:
            UserError: heads, tree and backbone do not fit each other, or the backbone cannot verify a tree exactly.
        """
        self.backbone = backbone if isinstance(backbone, Backbone) else Backbone.wrap(backbone)
        config = heads.config
        ours, theirs = (self.backbone.hidden_size, self.backbone.vocab_size), (config.hidden_size, config.vocab_size)
        if ours != theirs:
            raise UserError(
                f"the heads are for a backbone with hidden size {theirs[0]} and vocabulary {theirs[1]}, "
                f"{self.backbone.source or 'this one'} has {ours[0]} and {ours[1]}"
            )
        check_embeddings(config, self.backbone)
        check_tree_attention(self.backbone)
        # A copy: what was passed in stays trainable and can be saved.
        self.heads = copy.deepcopy(heads).to(device=self.backbone.device, dtype=self.backbone.dtype).eval()
        self.heads.share_projection(self.backbone)
        self.heads.requires_grad_(False)
        if self.backbone.device.type == "cpu" and can_pack(self.backbone.dtype):
            pack_linears(self.heads)
        depth = min(config.num_heads, 3)
        self.tree = tree or Tree.from_paths([path for path in DEFAULT_PATHS if len(path) <= depth])
        self.batch_trees = dict(batch_trees or {})
        self.calibration = calibration
        self.step = step or Step(self.backbone)
        self.drafter = self._drafter(self.tree, self.batch_trees)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        backbone: str | Backbone | PreTrainedModel | None = None,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
    ) -> MedusaModel:
        """Load heads and, unless given, the backbone that their config names (arguments as of `load_backbone`).

        An adapter that the heads bring is added to a backbone that is loaded here. A model that is passed is used as
        it is: it has to be adapted, or merged, already. No code that a repository brings is run; a backbone that needs
        its own is passed loaded.

        Args:
            heads: folder, or repository on the Hub, which the client keeps in its cache.
            revision: branch, tag or commit of that repository.

        Raises:
            UserError: either cannot be loaded, or the heads were trained on another backbone.
        """
        checkpoint = load_heads(heads, revision)
        if backbone is None and not checkpoint.backbone_source:
            raise UserError(f"{heads} does not name its backbone; pass backbone=...")
        if backbone is None or isinstance(backbone, str):
            source = backbone or checkpoint.backbone_source
            backbone = load_backbone(source, dtype, device, quantization, adapter=checkpoint.adapter)
        elif isinstance(backbone, PreTrainedModel):
            backbone = Backbone.wrap(backbone)
        model = cls(
            backbone, checkpoint.heads, checkpoint.tree, checkpoint.calibration, batch_trees=checkpoint.batch_trees
        )
        model.backbone.check_probe(checkpoint.probe, str(heads))
        return model

    def compiled(self) -> MedusaModel:
        """The same parts with compiled steps (see `Step`), for plain decoding through it alike."""
        twin = copy.copy(self)
        twin.step = Step(self.backbone, compiled=True)
        twin.drafter = twin._drafter(self.tree, self.batch_trees)
        return twin

    def medusa_drafter(self, tree: Tree) -> MedusaDrafter:
        """Drafts with the heads and another tree than the model's own, for any number of rows."""
        return self._drafter(tree, {})

    def _drafter(self, tree: Tree, batch_trees: Mapping[int, Tree]) -> MedusaDrafter:
        return MedusaDrafter(self.heads, tree, self.backbone.embed, batch_trees, self.step.compiled)

    def draft_logits(self, hidden: Tensor, head: int, before: Tensor, copies: Tensor | None = None) -> Tensor:
        """What a head says with given tokens before it.

        Args:
            hidden: ``(B, hidden)`` last hidden states, of any device and dtype.
            head: ``0..K-1``.
            before: ``(B, head + 1)`` ids of the root and the tokens after it; medusa heads do not look at them.
            copies: ``(B, m > head)`` what followed the root's words before, for heads that read copies.

        Returns:
            ``(B, V')`` raw projections, see `MedusaHeads.forward`.
        """
        device = self.backbone.device
        states = hidden.to(device, self.backbone.dtype)
        copies = None if copies is None else copies.to(device)
        read = embeddings(self.heads.config, self.backbone.embed, before.to(device), copies)
        logits: Tensor = self.heads(states, head, *read)
        return logits

    def adaptive_drafter(self, size: int | None = None) -> AdaptiveDrafter:
        """A drafter whose tree follows the heads' confidence; with ``size``, always that many tokens per pass.

        Raises:
            UserError: the heads folder carries no calibration.
        """
        if self.calibration is None:
            raise UserError("adaptive drafting needs calibrated heads; run: medusa-train tree RECIPE")
        backbone = self.backbone
        return AdaptiveDrafter(
            self.heads, self.calibration, backbone.embed, size, backbone.shape_logits, timed_sizes=self.step.compiled
        )

    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor],
        max_new_tokens: int = 256,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate after one prompt or a batch of them; every row's output is that of its own run.

        Args:
            input_ids: ``(T,)`` or ``(B, T)`` token ids, or a list of ``(T_b,)``.
            max_new_tokens: budget of each row.
            attention_mask: ``(B, T)``, 0 where a row is padded (on either side).
            streamer: a transformers streamer, for one prompt.
            options: see `GenerateOptions`.

        Raises:
            UserError: a prompt is empty or too long, or settings contradict each other.
        """
        prompts = split_batch(input_ids, attention_mask)
        if streamer is not None and len(prompts) > 1:
            raise UserError(f"a streamer shows one prompt, got {len(prompts)}")
        stats = options.setdefault("stats", None) or DecodeStats()
        options["stats"] = stats
        new: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["length"] * len(prompts)
        if streamer is not None:
            streamer.put(prompts[0][None].cpu())
        for blocks in self.stream_batch(prompts, max_new_tokens, **options):
            for row, block in enumerate(blocks):
                new[row] += block.tokens
                reasons[row] = block.finish_reason or reasons[row]
            if streamer is not None:
                for token in blocks[0].tokens:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        given = input_ids if isinstance(input_ids, Tensor) else _pad(prompts, self._pad_token_id)
        tail = _pad([torch.tensor(row, dtype=torch.long) for row in new], self._pad_token_id)
        sequences = torch.cat([given.view(len(prompts), -1), tail.to(given.device)], dim=1)
        return Generation(sequences, new, reasons, stats)

    def stream(
        self, input_ids: Tensor, max_new_tokens: int = 256, **options: Unpack[GenerateOptions]
    ) -> Iterator[Block]:
        """`generate` for one prompt, a block of tokens at a time."""
        prompts = split_batch(input_ids, None)
        if len(prompts) > 1:
            raise UserError(f"stream takes one prompt, got {len(prompts)}; use stream_batch")
        return (blocks[0] for blocks in self.stream_batch(prompts, max_new_tokens, **options))

    def stream_batch(
        self, prompts: Sequence[Tensor], max_new_tokens: int = 256, **options: Unpack[GenerateOptions]
    ) -> Iterator[list[Block]]:
        """`generate` for prompts ``(T_b,)``, a block per row at a time (empty for rows that have ended)."""
        if not prompts:
            raise UserError("no prompt was given")
        if not isinstance(max_new_tokens, int):
            raise UserError(f"max_new_tokens must be a whole number, got {max_new_tokens}")
        if unknown := sorted(options.keys() - GenerateOptions.__annotations__.keys()):
            near = difflib.get_close_matches(unknown[0], GenerateOptions.__annotations__, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(GenerateOptions.__annotations__)}"
            raise UserError(f"unknown option {unknown[0]}{hint}")
        if (
            largest := max((int(prompt.max()) for prompt in prompts if len(prompt)), default=0)
        ) >= self.backbone.vocab_size:
            raise UserError(f"token id {largest} is outside the backbone's vocabulary of {self.backbone.vocab_size}")
        generators = _per_row(options.get("generator"), len(prompts), self.backbone.device)
        verifier = options.get("verifier")
        temperature = options.get("temperature", 0.0)
        sampling: dict[str, Any] = {key: options[key] for key in ("top_k", "top_p", "min_p") if key in options}
        verify = make_verifier(verifier, temperature, sampling)
        processors = list(options.get("logits_processors", ()))
        if (penalty := options.get("repetition_penalty", 1.0)) != 1.0:
            if penalty <= 0:
                raise UserError(f"repetition_penalty must be above 0, got {penalty}")
            processors.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
        check_processors(processors, len(prompts), in_order=verifier != "typical")
        eos, stop = options.get("eos_token_ids"), options.get("stop_strings", ())
        stopping = Stopping(
            max_new_tokens,
            self.backbone.eos_token_ids if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            (stop,) if isinstance(stop, str) else tuple(stop),
            options.get("max_steps"),
            options.get("tokenizer"),
        )
        stats, drafter = options.get("stats"), options.get("drafter")
        if drafter is not None and not hasattr(drafter, "start"):
            raise UserError(f"drafter={drafter!r} is no drafter; pass one, NoDrafter() say, which decodes plainly")
        return decode(
            self.step,
            drafter or self.drafter,
            verify,
            prompts,
            stopping,
            DecodeStats() if stats is None else stats,
            processors,
            generators,
        )

    @property
    def _pad_token_id(self) -> int:
        pad = getattr(self.backbone.model.config.get_text_config(), "pad_token_id", None)
        return int(pad) if pad is not None and pad >= 0 else (*self.backbone.eos_token_ids, 0)[0]


def make_verifier(name: VerifierName | None, temperature: float, sampling: dict[str, Any]) -> Verify:
    """A request's verifier; ``sampling`` holds top_k, top_p and min_p where they were given.

    Raises:
        UserError: ``greedy`` with a temperature, or a sampling verifier without one.
    """
    if math.isnan(temperature):
        raise UserError("temperature must be a number from 0, got NaN")
    name = name or ("greedy" if temperature == 0 else "rejection")
    verifiers: dict[str, Callable[..., list[Verdict]]] = {
        "greedy": verify_greedy,
        "rejection": verify_rejection,
        "typical": verify_typical,
    }
    function = verifiers.get(name)
    if function is None:
        raise UserError(f"no verifier {name}; there are greedy, rejection and typical")
    shape = Sampling(temperature if temperature > 0 else 1.0, **sampling)
    if name == "greedy":
        if temperature != 0:
            raise UserError(f"verifier greedy takes temperature 0, got {temperature}; use verifier rejection to sample")
        return verify_greedy
    if temperature <= 0:
        raise UserError(f"verifier {name} samples and needs temperature > 0; use verifier greedy for temperature 0")
    return partial(function, sampling=shape)


def split_batch(input_ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None) -> list[Tensor]:
    """The rows of a batch without padding.

    Raises:
        UserError: these are no token ids, the shapes do not fit, or a row's mask has holes.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise UserError("attention_mask goes with a padded tensor; a list of prompts has no padding")
        return [_token_ids(row) for row in _prompts_of(input_ids)]
    if input_ids.dim() not in (1, 2):
        raise UserError(f"input_ids must be (T,) or (B, T), got {tuple(input_ids.shape)}")
    rows = list(input_ids.view(1, -1) if input_ids.dim() == 1 else input_ids)
    if attention_mask is None:
        return rows
    if attention_mask.view(len(rows), -1).shape != (len(rows), len(rows[0])):
        raise UserError(f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
    kept = []
    for number, (row, mask) in enumerate(zip(rows, attention_mask.view(len(rows), -1).bool(), strict=True)):
        places = mask.nonzero()[:, 0]
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            raise UserError(f"attention_mask of row {number} has a hole; only padding at the ends can be masked")
        kept.append(row[mask.to(row.device)])
    return kept


def _prompts_of(given: Any) -> Iterable[Any]:
    """Something with an entry per prompt; whatever else a tokenizer takes or gives is refused by its name."""
    if isinstance(given, str):
        raise UserError("generate takes token ids, not text; pass tokenizer(text, return_tensors='pt')['input_ids']")
    if isinstance(given, Mapping):
        raise UserError("generate takes token ids, not all that a tokenizer returns; pass **encoded, or its input_ids")
    if not isinstance(given, Iterable):
        raise UserError(f"generate takes a tensor of token ids or a list of them, not {type(given).__name__}")
    return given


def _token_ids(row: Any) -> Tensor:
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"a prompt of the list is no tensor of token ids but {type(row).__name__}; tokenize it"
        ) from error
    if ids.dim() == 0:
        raise UserError("a list holds prompts, not token ids; for one prompt pass torch.tensor(ids)")
    return ids.long().view(-1)


def _per_row(
    generator: torch.Generator | Sequence[torch.Generator | None] | None, rows: int, device: torch.device
) -> Generators:
    generators = [generator] * rows if generator is None or isinstance(generator, torch.Generator) else list(generator)
    if len(generators) != rows:
        raise UserError(f"{len(generators)} generators for {rows} prompts; give one, or one per prompt")
    for each in generators:
        if each is not None and each.device.type != device.type:
            raise UserError(f"the generator is on {each.device}, the backbone on {device}; make it there")
    return generators


def _pad(rows: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
