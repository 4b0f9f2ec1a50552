"""The loss through liger-kernel's kernel, run by Triton's interpreter, against the chunked loss.

Triton reads how it is to run when it is imported, so the comparison is a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

from conftest import make_llama, make_shaping_model
from medusa_train.fused_loss import check_liger
from medusa_train.inference import Backbone, UserError

CPU = torch.device("cpu")
COMPARISON = """
import pytest, torch
from test_losses import HEADS, embed, heads_and_batch
from medusa_train.data.dataset import IGNORED
from medusa_train.losses import LossWeights, medusa_loss

torch.set_num_threads(1)

def results(fused, share, temperature, chunk, draft, kind, scale, trained, empty):
    heads, hidden, roots, teacher, labels, copies, *rest = heads_and_batch(draft=draft, kind=kind)
    if empty:
        labels.fill_(IGNORED)
    for head in range(HEADS):
        heads.projection(head).weight.requires_grad_(trained)
    hidden.requires_grad_()
    weights = LossWeights(1.5, 0.7, share, temperature, fused=fused)
    loss = medusa_loss(heads, hidden, roots, teacher, labels, copies, *rest, weights, chunk=chunk, embed=embed,
                       shape_logits=lambda logits: logits * scale)
    (2 * loss.loss).backward()
    gradients = [p.grad if p.grad is not None else torch.zeros(()) for p in [hidden, *heads.parameters()]]
    return [loss.loss.detach(), loss.sums, *gradients], loss.counts

# A grid over all would take minutes: each way of being different once or twice.
CASES = [  # alpha, temperature, chunk, draft vocabulary, kind, scale, trained projections, no target at all
    (0.8, 1.0, 3, [1, 4, 7, 11], "medusa", 1.0, True, False),
    (0.6, 2.0, 3, [1, 4, 7, 11], "medusa", 2.0, True, False),
    (0.0, 1.0, 1024, [1, 4, 7, 11], "hydra", 1.0, True, False),
    (1.0, 0.5, 2, None, "recurrent", 0.5, True, False),
    (0.5, 1.0, 3, None, "medusa", 2.0, False, False),
    (0.8, 1.0, 3, None, "medusa", 1.0, True, True),
]
for case in CASES:
    (expected, counts), (found, counted) = results(False, *case), results(True, *case)
    assert counts.equal(counted) and (counts.sum() == 0) == case[-1]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{case}: {text}")
    print("equal", *case)
"""


def test_the_kernel_gives_the_chunked_loss_and_its_gradients():
    pytest.importorskip("liger_kernel")
    paths = os.pathsep.join(path for path in sys.path if path.endswith("tests") or path.endswith("unit"))
    done = subprocess.run(
        [sys.executable, "-c", COMPARISON],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 6


def test_a_device_without_triton_is_told(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"^training\.use_liger_kernel needs a GPU; leave it out on this device$"):
        check_liger(Backbone.wrap(make_llama()), CPU)


def test_only_a_cap_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_liger(Backbone.wrap(make_shaping_model("cohere")), CPU)
    with pytest.raises(UserError, match="cannot cap logits"):
        check_liger(Backbone.wrap(make_shaping_model("gemma2")), CPU)
