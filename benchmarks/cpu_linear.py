"""Plain, packed and joined linear layers for narrow products: ``python benchmarks/cpu_linear.py``.

Prints, for every number of rows, the time to run through layers of a small model's shapes with `torch.nn.Linear`, with
`PackedLinear`, and with those joined that read the same tensor, and the ratios. The layers together exceed the caches,
as a model's do; all are timed in turn.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch import Tensor, nn

from medusa_train.inference.backbone import native_dtype
from medusa_train.inference.cpu_linear import can_pack, pack_linears

HIDDEN, KEYS, MIDDLE, LAYERS = 576, 192, 1536, 30  # SmolLM2-135M
REPEATS = 9


class Layer(nn.Module):
    """The products of a decoder layer, each with the input that it has there."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [
            (HIDDEN, HIDDEN),
            (HIDDEN, KEYS),
            (HIDDEN, KEYS),
            (HIDDEN, HIDDEN),
            (HIDDEN, MIDDLE),
            (HIDDEN, MIDDLE),
        ]
        self.query, self.key, self.value, self.out, self.gate, self.up = (
            nn.Linear(*shape, bias=False, dtype=dtype) for shape in shapes
        )
        self.down = nn.Linear(MIDDLE, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        query, _, _ = self.query(x), self.key(x), self.value(x)
        between = self.out(query)
        gate, _ = self.gate(between), self.up(between)
        result: Tensor = self.down(gate)
        return result


def main() -> None:
    dtype = native_dtype("cpu")
    if not can_pack(dtype):
        raise SystemExit(f"this build of torch has no packed product for {dtype} on this CPU")
    plain = nn.Sequential(*(Layer(dtype) for _ in range(LAYERS))).requires_grad_(False)
    packed, joined = copy.deepcopy(plain), copy.deepcopy(plain)
    pack_linears(packed)
    pack_linears(joined, lambda: joined(torch.zeros(2, HIDDEN, dtype=dtype)))
    models = {"plain": plain, "packed": packed, "joined": joined}
    print(f"{dtype}, {torch.get_num_threads()} threads, {REPEATS} repeats: median ms (min)")
    print("rows      plain             packed            joined            plain / packed   packed / joined")
    with torch.inference_mode():
        for rows in (1, 2, 4, 8, 16, 32, 64):
            x = torch.randn(rows, HIDDEN, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(REPEATS + 1):
                for name, model in models.items():
                    start = time.perf_counter()
                    model(x)
                    times[name].append((time.perf_counter() - start) * 1000)
            warm = {name: found[1:] for name, found in times.items()}
            medians = [statistics.median(found) for found in warm.values()]
            cells = "   ".join(f"{statistics.median(found):7.1f} ({min(found):6.1f})" for found in warm.values())
            print(f"{rows:4d}   {cells}   {medians[0] / medians[1]:6.2f}           {medians[1] / medians[2]:6.2f}")


if __name__ == "__main__":
    main()
