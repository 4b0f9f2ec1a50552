"""Capacity planning: what tokens cost on a machine, from tokens per step, step times and what a pass has to read.

A pass over few tokens reads every weight once and computes little, so on most machines memory bandwidth bounds it:
bytes read / bandwidth is the least time of a step, and tokens per step over that the most tokens/s. Measured steps take
longer; by how much is the machine's efficiency, taken from the plain steps of the evaluation itself. What a step with
the tree costs beside a plain one is taken from the times that the tree was chosen by, so that the tokens/s of the heads
are a prediction, which the evaluation can refute. Every assumption is part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from medusa_train.eval.step_curve import timed_step_ms
from medusa_train.inference.cpu_linear import PackedLinear
from medusa_train.inference.errors import UserError

HOUR = 3600
MILLION = 1e6
GAP = 0.20  # between modelled and measured tokens/s, beyond which the model is not to be believed


@dataclass(frozen=True)
class Machine:
    """What is paid for.

    Attributes:
        price: of an hour, in any currency.
        bandwidth: of its memory, in bytes per second.
        watts: that it draws while it decodes; None if nobody knows.
        efficiency: share of the bandwidth that a plain step reaches; None: as in the run's evaluation.
    """

    price: float
    bandwidth: float
    watts: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True)
class Cost:
    """One way of decoding on one machine, at batch size 1.

    Attributes:
        tokens_per_second: modelled.
        limit: tokens/s if steps did nothing but read their weights.
        price_per_million: of a million tokens, in the machine's currency.
        kwh_per_million: energy of a million tokens; None without ``watts``.
    """

    tokens_per_second: float
    limit: float
    price_per_million: float
    kwh_per_million: float | None


def cost(tokens_per_step: float, step_seconds: float, pass_bytes: float, machine: Machine) -> Cost:
    """The cost of decoding with steps of this length.

    Args:
        tokens_per_step: emitted by a step; 1 for plain decoding.
        pass_bytes: read by a step, see `bytes_read`.
    """
    speed = tokens_per_step / step_seconds
    seconds = MILLION / speed
    return Cost(
        speed,
        tokens_per_step * machine.bandwidth / pass_bytes,
        machine.price * seconds / HOUR,
        None if machine.watts is None else machine.watts * seconds / HOUR / 1000,
    )


def bytes_read(module: nn.Module) -> int:
    """Bytes of weights that a pass over a few tokens reads: all but embeddings, of which it reads a few rows."""
    seen: set[int] = set()
    total = 0
    for part in module.modules():
        if isinstance(part, PackedLinear):
            total += part.in_features * part.out_features * part.packed.element_size()
            total += 0 if part.bias is None else part.bias.numel() * part.bias.element_size()
            continue
        for weight in part.parameters(recurse=False):
            if not isinstance(part, nn.Embedding) and id(weight) not in seen:
                seen.add(id(weight))
                total += weight.numel() * weight.element_size()
    return total


def cost_of_run(report: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """What plain decoding and the heads cost, modelled from a run's report, beside what the run measured.

    Raises:
        UserError: the report lacks the steps or tokens that the model needs.
    """
    setting, speed = report["setting"], report["speed"]
    step_ms = timed_step_ms(report["made"]["tree"]["result"]["sizes"], 1)
    tokens = speed["medusa"]["tokens_per_step"]
    if tokens is None or not {1, setting["tree_size"]} <= step_ms.keys() or "pass_bytes" not in setting:
        raise UserError(
            "the report lacks step times or tokens per step; run medusa-train tree and eval with --overwrite"
        )
    read = {"plain": setting["pass_bytes"]["backbone"], "medusa": sum(setting["pass_bytes"].values())}
    overhead = step_ms[setting["tree_size"]] / step_ms[1]
    if machine.efficiency is not None:
        plain = read["plain"] / (machine.bandwidth * machine.efficiency)
    elif plain_ms := speed.get("plain", {}).get("ms_per_step"):
        plain = plain_ms / 1000
    else:
        raise UserError("the report lacks plain steps; run medusa-train eval with plain among eval.arms")
    rows: list[dict[str, Any]] = []
    for arm, per_step, seconds in (("plain", 1.0, plain), ("medusa", tokens, plain * overhead)):
        modelled = cost(per_step, seconds, read[arm], machine)
        measured = speed.get(arm, {}).get("decode_tokens_per_second", {}).get("median")
        # Another machine's speed cannot be held against this run's.
        comparable = measured is not None and machine.efficiency is None
        rows.append(
            {
                "arm": arm,
                **asdict(modelled),
                "measured_tokens_per_second": measured if comparable else None,
                # Plain steps are what the model starts from: they cannot test it.
                "difference": modelled.tokens_per_second / measured - 1 if comparable and arm == "medusa" else None,
            }
        )
    apart = any(abs(row["difference"] or 0) > GAP for row in rows)
    warning = (
        f"Modelled and measured tokens/s of the heads differ by more than {GAP:.0%}: beside a plain step, one with the "
        "tree cost other than when the tree was chosen. Run medusa-train tree and eval with --overwrite, and believe "
        "what was measured."
    )
    return {
        "machine": asdict(machine),
        "rows": rows,
        "assumptions": _assumptions(report, machine, read, plain, overhead),
        "warning": warning if apart else None,
    }


def _assumptions(
    report: Mapping[str, Any], machine: Machine, read: Mapping[str, int], plain_seconds: float, overhead: float
) -> list[str]:
    setting = report["setting"]
    reached = read["plain"] / plain_seconds / machine.bandwidth
    steps = (
        f"a plain step takes the {1000 * plain_seconds:.3g} ms of this evaluation, {reached:.0%} of the bandwidth given"
        if machine.efficiency is None
        else f"a plain step reaches {machine.efficiency:.0%} of the bandwidth"
    )
    steps += f"; one with a tree of {setting['tree_size']} costs {overhead:.2f} plain ones, as when the run chose it"
    return [
        f"{report['speed']['medusa']['tokens_per_step']:.2f} tokens per step, as on the timed prompts of the run "
        f"({setting['asked']})",
        steps,
        f"a plain step reads {read['plain'] / 1e9:.3g} GB of weights, heads {setting['pass_bytes']['heads'] / 1e9:.3g} "
        "GB more; keys and values of the text are left out (short texts, batch size 1)",
        f"the machine costs {machine.price:g} per hour, used or not, and decodes all the time; prompts cost nothing",
        "energy is left out: no --watts was given"
        if machine.watts is None
        else f"it draws {machine.watts:g} W while it decodes",
    ]


def cost_table(result: Mapping[str, Any]) -> str:
    """The figures of `cost_of_run` for people."""

    def shown(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    lines = [
        f"{'':<8} {'tokens/s':>9} {'measured':>9} {'differs':>8} {'limit':>9} {'per million':>12} "
        f"{'kWh per million':>16}"
    ]
    lines += [
        f"{row['arm']:<8} {row['tokens_per_second']:>9.1f} {shown(row['measured_tokens_per_second'], '.1f'):>9} "
        f"{shown(row['difference'], '+.0%'):>8} {row['limit']:>9.1f} {row['price_per_million']:>12.2f} "
        f"{shown(row['kwh_per_million'], '.2f'):>16}"
        for row in result["rows"]
    ]
    lines.append("limit: tokens/s if a step did nothing but read its weights once")
    lines += [result["warning"]] if result["warning"] else []
    return "\n".join([*lines, *(f"assumed: {text}" for text in result["assumptions"])])
