"""Plain and packed linear layers for narrow products: ``python benchmarks/cpu_linear.py``.

Prints, for every number of rows, the time to run through layers of a small model's shapes with `torch.nn.Linear` and
with `PackedLinear`, and their ratio. The layers together exceed the caches, as a model's do; both are timed in turn.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from medusa_train.inference.backbone import native_dtype
from medusa_train.inference.cpu_linear import PackedLinear, can_pack

SHAPES = [(576, 576), (576, 1536), (1536, 576)] * 30 + [(576, 49152)]
REPEATS = 9


def main() -> None:
    dtype = native_dtype("cpu")
    if not can_pack(dtype):
        raise SystemExit(f"this build of torch has no packed product for {dtype} on this CPU")
    plain = [nn.Linear(*shape, bias=False, dtype=dtype) for shape in SHAPES]
    packed = [PackedLinear(layer) for layer in plain]
    print(f"{dtype}, {torch.get_num_threads()} threads, {REPEATS} repeats: median ms (min)")
    print("rows      plain             packed            plain / packed")
    with torch.inference_mode():
        for rows in (1, 2, 4, 8, 16, 32, 64):
            inputs = [torch.randn(rows, layer.in_features, dtype=dtype) for layer in plain]
            times: dict[str, list[float]] = {"plain": [], "packed": []}
            for _ in range(REPEATS + 1):
                for name, layers in (("plain", plain), ("packed", packed)):
                    start = time.perf_counter()
                    for layer, x in zip(layers, inputs, strict=True):
                        layer(x)
                    times[name].append((time.perf_counter() - start) * 1000)
            warm = {name: found[1:] for name, found in times.items()}
            cells = [f"{statistics.median(found):7.1f} ({min(found):6.1f})" for found in warm.values()]
            ratio = statistics.median(warm["plain"]) / statistics.median(warm["packed"])
            print(f"{rows:4d}   {cells[0]}   {cells[1]}   {ratio:6.2f}")


if __name__ == "__main__":
    main()
