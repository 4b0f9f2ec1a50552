"""Functions compiled to one graph per shape of their inputs, for a model that never changes.

Before a compiled graph runs, torch asks whether everything that it was traced from is still the same: for a model of
30 layers 7,500 questions, a millisecond of a step of twenty. Nobody changes a frozen model between two steps, so only
what steps themselves vary is asked: tensors and constants that are handed in.

On a GPU, inductor also records each graph's kernels (CUDA graphs), so that the host starts all of them at once. It
copies inputs to where they were when it recorded, unless they are marked as standing still, as the weights are and the
cache's keys and values (`TreeCacheLayer`), and leaves what writes to others unrecorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from medusa_train.inference.errors import UserError

MOST_GRAPHS = 256  # dynamo's own limit of 8 per function would silently go back to eager code
ASKED = {"TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH"}

Result = TypeVar("Result")


class Graphs(Generic[Result]):
    """A function and its compiled graphs; inductor keeps their code on disk (``TORCHINDUCTOR_CACHE_DIR``)."""

    def __init__(self, function: Callable[..., Result], device: torch.device) -> None:
        """Prepare; nothing is compiled before the first call.

        Raises:
            UserError: the device is a CPU without a C++ compiler.
        """
        if device.type == "cpu":
            _check_compiler()
        self._recorded = device.type == "cuda"
        options: dict[str, Any] = {"guard_filter_fn": _asked, "triton.cudagraphs": self._recorded}
        self._compiled = torch.compile(function, dynamic=False, options=options)
        self._seen: set[Hashable] = set()

    def __call__(self, shape: Hashable, what: str, *arguments: Any) -> Result:
        """Call the function.

        Args:
            shape: tells calls apart that need different graphs.
            what: named in a note on standard error when this shape is compiled.
        """
        if shape in self._seen:
            return self._run(*arguments)
        self._seen.add(shape)
        tqdm.write(f"compiling {what}…", file=sys.stderr)
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS):
            return self._run(*arguments)

    def _run(self, *arguments: Any) -> Result:
        if not self._recorded:
            return self._compiled(*arguments)
        # A recording writes its results to the same place every time: they are taken from there before the next run.
        torch.compiler.cudagraph_mark_step_begin()
        result: Result = tree_map_only(Tensor, Tensor.clone, self._compiled(*arguments))
        return result


def _asked(guards: Sequence[Any]) -> list[bool]:
    return [
        guard.guard_type in ASKED
        and not guard.is_global
        and "_modules" not in guard.name
        and not isinstance(guard.value, nn.Parameter)
        for guard in guards
    ]


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError("compiled steps need a C++ compiler: install g++, or leave compiling off") from error
