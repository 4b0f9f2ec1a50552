"""What CUDA graphs ask of compiled functions, seen without a GPU."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from conftest import make_llama
from medusa_train.inference import graphs
from medusa_train.inference.attention import read_prompts
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.graphs import Graphs
from medusa_train.inference.step import Step
from medusa_train.inference.tree import Tree


def test_results_outlive_the_next_run_of_a_recording(monkeypatch):
    """A recording writes its results to the same place every time."""
    asked, steps, place = {}, [], torch.zeros(3)

    def compile_(function, dynamic, options):
        asked.update(options)
        return lambda x: (place.copy_(function(x)), x)

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    run = Graphs(lambda x: x + 1, torch.device("cuda"))
    assert asked["triton.cudagraphs"]
    first, _ = run(3, "a test", torch.zeros(3))
    second, _ = run(3, "a test", torch.ones(3))
    assert (first.tolist(), second.tolist(), len(steps)) == ([1, 1, 1], [2, 2, 2], 2)


def test_nothing_is_recorded_on_a_cpu(monkeypatch):
    asked = {}
    monkeypatch.setattr(graphs, "_check_compiler", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, options: (asked.update(options), function)[1])
    given = torch.zeros(1)
    assert Graphs(lambda x: x, torch.device("cpu"))(1, "a test", given) is given
    assert not asked["triton.cudagraphs"]


def test_a_pass_writes_to_nothing_but_what_stays_in_its_place(monkeypatch):
    """Inductor leaves a graph unrecorded that writes to other inputs."""
    seen = []

    def spy(graph, inputs):
        known = TracingContext.get().fw_metadata
        seen.append((set(known.mutated_inp_runtime_indices), set(known.static_input_indices)))
        return graph.forward

    compile_, backend = torch.compile, aot_autograd(fw_compiler=spy, inference_compiler=spy)
    monkeypatch.setattr(graphs, "_check_compiler", lambda: None)
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic, options: compile_(function, dynamic=dynamic, backend=backend)
    )
    backbone, tree = Backbone.wrap(make_llama()), Tree.from_paths([(0,), (1,)])
    step = Step(backbone, compiled=True)
    with torch.inference_mode():
        cache = step.new_cache(3, 20)
        read_prompts(backbone, [torch.tensor([1, 2, 3])], cache)
        step(torch.tensor([[4, 5, 6]]), [tree], cache)
    ((written, standing),) = seen
    assert len(written) == 2 * len(cache.layers)
    assert written <= standing
