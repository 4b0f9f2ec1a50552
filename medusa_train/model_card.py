"""The model card that goes with a heads checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.inference.files import write_text

_CARD = """\
---
library_name: medusa-train
tags: [medusa, speculative-decoding]
{base_model}---

# Medusa heads for {backbone}

{num_heads} {kind} heads of {num_layers} residual layer(s), {vocabulary}; trained with medusa-train {version}.
{promise}

| measured on {prompts} held-out prompts, batch 1, temperature 0, {dtype} | |
|---|---|
| tokens per step (bonus token counted, plain decoding = 1) | {tokens_per_step:.2f} |
| the same, replayed over {answers} held-out answers to their end | {replayed:.2f} |
| decode speedup over transformers `generate` | {over_generate:.2f} |
| decode speedup over one-token decoding in the same loop | {over_plain:.2f} |
| tokens per verification pass | {tree_size} |
| identical to plain greedy decoding | {identical:.0%} of prompts |
| machine | {processor}, {threads} threads |

Trained on {positions:,} positions of {rows} answers that the backbone wrote itself (prompts: {source}).

```python
from medusa_train.inference import MedusaModel

model = MedusaModel.from_pretrained("this folder or repository")
output = model.generate(input_ids, max_new_tokens=256)
```
{note}"""

_FROZEN = "Greedy output with these heads is that of the backbone alone; the heads only make it faster."

_ADAPTED = """\
The backbone was trained along (Medusa-2): `adapter/` holds its LoRA adapter, which loading merges into the weights.
Greedy output with these heads is that of the adapted backbone, no longer that of the original. On held-out answers of
the original, KL to it is {kl_to_base:.2g} nats per token; perplexity went from {base_perplexity:.3f} to \
{adapted_perplexity:.3f}."""

_REDUCED = """
vLLM and TGI do not load a reduced draft vocabulary: `medusa-train export --pad-vocabulary` gives them the same drafts.
"""

_HYDRA = "\nvLLM and TGI do not load hydra heads; for them, train with `heads.kind=medusa`.\n"


def write_model_card(folder: Path, report: dict[str, Any]) -> None:
    """Write ``README.md`` beside the heads, with the figures of their evaluation."""
    setting, made = report["setting"], report["made"]
    train = made["train"]
    reduced = setting["draft_vocab_size"]
    source = setting["backbone"]
    is_hub_id = "://" not in source and not source.startswith((".", "/", "~")) and not source.endswith(".gguf")
    card = _CARD.format(
        base_model=f"base_model: {source}\n" if is_hub_id else "",
        backbone=source,
        kind=setting["kind"],
        num_heads=setting["num_heads"],
        num_layers=setting["num_layers"],
        vocabulary=f"drafting the {reduced} most frequent tokens" if reduced else "drafting the whole vocabulary",
        version=train["environment"]["medusa_train"],
        promise=_ADAPTED.format(**train["result"]) if "kl_to_base" in train["result"] else _FROZEN,
        prompts=setting["prompts"],
        dtype=setting["dtype"],
        tokens_per_step=report["acceptance"]["tokens_per_step"] or float("nan"),
        answers=report["replay"]["answers"],
        replayed=report["replay"]["tokens_per_step"] or float("nan"),
        over_generate=report["speedup"]["over_generate"]["median"],
        over_plain=report["speedup"]["over_plain"]["median"],
        tree_size=setting["tree_size"],
        identical=report["losslessness"]["over_plain"]["identical_share"],
        processor=train["environment"]["accelerator"] or train["environment"]["processor"],
        threads=train["environment"]["threads"],
        positions=train["result"]["positions"],
        rows=made["distill"]["result"]["rows"],
        source=made["prompts"]["result"]["source"],
        note=_HYDRA if setting["kind"] == "hydra" else _REDUCED if reduced else "",
    )
    write_text(folder / "README.md", card)
