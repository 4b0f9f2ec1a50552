"""The model card that goes with a heads checkpoint: every figure in it is one of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from medusa_train.eval.report import summary_markdown
from medusa_train.inference.files import write_text
from medusa_train.recipe import SYNTHESIZE

_CARD = """\
# Medusa heads for {backbone}

{num_heads} {kind} heads{copies} of {num_layers} residual layer(s), {vocabulary}: small drafters that read the last \
hidden state of
{backbone_link} and guess its next tokens; one pass of it verifies a tree of guesses.
Trained {copy}with medusa-train {version}. {promise}

## Measured

On {machine}{weights}:

{summary}
Tokens per step: {tokens_per_step}.
Speedup: {speedup}.

## Training

{data} Loss, optimizer and all other settings are in {recipe}.

| heads | |
|---|---|
{training}

## Use

```python
from medusa_train.inference import MedusaModel

model = MedusaModel.from_pretrained("{where}")
output = model.generate(input_ids, max_new_tokens=256)
```
{elsewhere}
## Limits

{limits}
"""

_FROZEN = "The backbone is as it was: greedy output with these heads is that of the backbone alone, in fewer passes."

_ADAPTED = """\
The backbone was trained along (Medusa-2): `adapter/` holds its LoRA adapter, which loading merges into the weights.
Greedy output with these heads is that of the adapted backbone, no longer that of the original. On held-out answers of
the original, KL to it is {kl_to_base:.2g} nats per token; perplexity went from {base_perplexity:.3f} to \
{adapted_perplexity:.3f}."""

_CUSTOM_GENERATE = """
In plain transformers, without medusa-train; greedy, one prompt at a time; it runs `custom_generate/generate.py` of this
repository:

```python
model.generate(input_ids, custom_generate="{where}", trust_remote_code=True, do_sample=False, max_new_tokens=256)
```
{adapter}"""

_MERGE = """
Give it the adapted model: `PeftModel.from_pretrained(model, "{where}", subfolder="adapter").merge_and_unload()`.
"""

_SERVERS = """
In vLLM and Text Generation Inference, which draft a chain of each head's best token:

```
medusa-train export {where} heads-for-vllm --to vllm{pad}
vllm serve {backbone} --speculative-config '{{"method": "medusa", "model": "heads-for-vllm", "num_speculative_tokens": \
{num_heads}}}'

medusa-train export {where} heads-for-tgi --to tgi{pad}
text-generation-launcher --model-id heads-for-tgi
```
"""

_MERGED_SERVERS = """
vLLM and Text Generation Inference need the merged model (medusa-train's recipes/README.md, Medusa-2), named with
`medusa-train export {where} heads-for-vllm --to vllm --backbone merged{pad}`.
"""

_UNSERVED = "\nvLLM and Text Generation Inference do not load {kind} heads{copies}.\n"

_BASELINES = {"over_generate": "over transformers `generate`", "over_plain": "over one-token decoding in the same loop"}


def write_model_card(folder: Path, report: dict[str, Any]) -> None:
    """Write ``README.md`` beside the heads, with the figures of their evaluation."""
    write_text(folder / "README.md", model_card(report, str(folder)))


def model_card(report: dict[str, Any], where: str, licence: dict[str, str] | None = None) -> str:
    """The card of one report.

    Args:
        where: the folder, or the repository on the Hub, that a reader loads.
        licence: the backbone's, as its card states it, for heads that are published; None for a folder.
    """
    setting, made, train = report["setting"], report["made"], report["made"]["train"]
    backbone, reduced = setting["backbone"], setting["draft_vocab_size"]
    link = f"[{backbone}](https://huggingface.co/{backbone})"
    adapted = "kl_to_base" in train["result"]
    quantization = train["recipe"]["backbone"].get("quantization")
    pad = " --pad-vocabulary" if reduced else ""
    elsewhere = ""
    if licence is not None:
        adapter = _MERGE.format(where=where) if adapted else ""
        elsewhere += _CUSTOM_GENERATE.format(where=where, adapter=adapter)
    copies = " that read copies" if setting["reads_copies"] else ""
    served = _served(setting)
    elsewhere += (_UNSERVED if not served else _MERGED_SERVERS if adapted else _SERVERS).format(
        where=where, backbone=backbone, num_heads=setting["num_heads"], pad=pad, kind=setting["kind"], copies=copies
    )
    body = _CARD.format(
        backbone=backbone,
        backbone_link=link if is_hub_id(backbone) else backbone,
        copy=f"and measured on the copy {setting['backbone_copy']} of it, " if "backbone_copy" in setting else "",
        kind=setting["kind"],
        copies=copies,
        num_heads=setting["num_heads"],
        num_layers=setting["num_layers"],
        vocabulary=f"drafting the {reduced} most frequent tokens" if reduced else "drafting the whole vocabulary",
        version=train["environment"]["medusa_train"],
        promise=_ADAPTED.format(**train["result"]) if adapted else _FROZEN,
        machine=_machine(report["environment"]),
        weights=f", the backbone in {quantization}" if quantization else "",
        summary=summary_markdown(report),
        tokens_per_step=report["definitions"]["tokens_per_step"],
        speedup=report["definitions"]["speedup"],
        data=_data(made),
        recipe="`run.json`" if licence is not None else "`train/run.json` of the run",
        training="\n".join(f"| `{name}` | {value} |" for name, value in _settings(train["recipe"])),
        where=where,
        elsewhere=elsewhere,
        limits="\n".join(f"- {limit}" for limit in _limits(report, link, licence)),
    )
    return f"---\n{_metadata(report, where, licence).to_yaml()}\n---\n\n{body}"


def is_hub_id(source: str) -> bool:
    """Whether a source of a backbone or of prompts is a repository on the Hub, and not on this machine."""
    is_file = source.endswith((".gguf", ".json", ".jsonl", ".parquet", ".csv")) or Path(source).exists()
    return source != SYNTHESIZE and source.count("/") <= 1 and not source.startswith((".", "/", "~")) and not is_file


def tokens_per_step(report: dict[str, Any]) -> float:
    """NaN for prompts whose answers all end with their first token."""
    return float(report["acceptance"]["tokens_per_step"] or float("nan"))


def speedups(report: dict[str, Any]) -> dict[str, float]:
    """Baseline -> the median decode speedup over it, for those that were measured."""
    return {name: float(report["speedup"][name]["median"]) for name in _BASELINES if report["speedup"].get(name)}


def _asked(setting: dict[str, Any]) -> str:
    return f"{setting['prompts']} prompts ({setting.get('asked', 'held-out prompts of the run')})"


def _machine(environment: dict[str, Any]) -> str:
    return str(environment["accelerator"] or f"{environment['processor']} ({environment['threads']} threads)")


def _data(made: dict[str, Any]) -> str:
    train, source = made["train"], made["prompts"]["result"]["source"]
    positions, rows = train["result"]["positions"], made["distill"]["result"]["rows"]
    if train["recipe"]["data"]["conversations"]:
        return f"{positions:,} positions of {rows} given conversations ({source})."
    names = source.split(", ")
    read = ", ".join(name for name in names if name != SYNTHESIZE)
    kinds = [f"prompts of {read}"] * bool(read) + ["prompts that it wrote too"] * (SYNTHESIZE in names)
    by = " and ".join(kinds)
    return f"{positions:,} positions of {rows} answers that the backbone wrote itself ({by})."


def _settings(recipe: dict[str, Any]) -> list[tuple[str, Any]]:
    """What tells these heads from others of the same shape."""
    training, lora = recipe["training"], recipe.get("lora")
    names = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "soft_share", "loss_decay")
    return [
        *((f"training.{name}", training[name]) for name in names),
        *((f"lora.{name}", lora[name]) for name in ("r", "alpha") if lora),
    ]


def _limits(report: dict[str, Any], link: str, licence: dict[str, str] | None) -> list[str]:
    setting, terms = report["setting"], []
    if licence is not None:
        name = licence.get("license_name") or licence.get("license")
        named = f" ({name}, {licence['license_link']})" if "license_link" in licence else f" ({name})" if name else ""
        terms = [f"The backbone's licence{named} holds for heads made of it: see {link}."]
    chain = "vLLM and TGI draft a chain, which gives fewer tokens per step than a tree."
    return [
        *terms,
        f"For {setting['backbone']} alone; loading compares a fingerprint and refuses other models.",
        "Speed was measured on one device at batch 1. Where a pass over a tree costs as much as its tokens one by one, "
        "as on a busy server, heads gain nothing.",
        "In bf16 and fp16, passes of different sizes round differently, and near-ties may fall the other way; "
        "the share of identical outputs above is measured.",
        *([chain] if _served(setting) else []),
    ]


def _served(setting: dict[str, Any]) -> bool:
    """Whether serving engines load such heads."""
    return bool(setting["kind"] == "medusa" and not setting["reads_copies"])


def _metadata(report: dict[str, Any], where: str, licence: dict[str, str] | None) -> ModelCardData:
    setting, source = report["setting"], report["made"]["prompts"]["result"]["source"]
    backbone = setting["backbone"] if is_hub_id(setting["backbone"]) else None
    common: dict[str, Any] = {
        "task_type": "text-generation",
        "task_name": "Text generation, greedy",
        "dataset_type": source if is_hub_id(source) else "held-out",
        "dataset_name": _asked(setting),
    }
    results = [
        EvalResult(**common, metric_type="tokens_per_step", metric_value=tokens_per_step(report),
                   metric_name="Tokens per step"),
        *(EvalResult(**common, metric_type=f"speedup_{name}", metric_value=value,
                     metric_name=f"Decode speedup {_BASELINES[name]}") for name, value in speedups(report).items()),
    ]  # fmt: skip
    terms: dict[str, Any] = dict(licence or {})
    return ModelCardData(
        base_model=backbone,
        base_model_relation="adapter" if backbone else None,
        datasets=[source] if is_hub_id(source) else None,
        library_name="medusa-train",
        tags=["medusa", "speculative-decoding", *(["custom_generate"] if licence is not None else [])],
        pipeline_tag="text-generation",
        eval_results=results,
        model_name=where.rpartition("/")[2],
        **terms,
    )
