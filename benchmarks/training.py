"""Training from cached hidden states beside the original recipe: ``python benchmarks/training.py [RUN]``.

RUN is the folder of a run that has been distilled (default ``runs/quickstart``); its rows and its recipe are used. The
stand-in of the original recipe runs the frozen backbone on every batch, applies a residual block and a projection to
the whole vocabulary to *all* positions, keeps the logits of all heads in one tensor and learns hard labels. The online
arm runs the backbone on every batch too, with this project's loss; the cached ones never run it.

Every arm is a process of its own. All are loaded first and then train in turn, a slice of their steps at a time, so
that a busy machine slows all alike. One loop trains every arm; only the batches and the loss differ, and a batch holds
about as many positions that carry loss in each. Peak memory is the highest resident memory during training less the
resident memory right before it (backbone and fresh heads loaded, a forward pass done); Linux resets that mark on
request. On a GPU it is the allocator's peak less what was allocated before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import get_cosine_schedule_with_warmup

from medusa_train.data.dataset import IGNORED, HeadsDataset, draft_vocabulary
from medusa_train.data.hidden_states import KeptStates, read_cache, write_cache
from medusa_train.data.packing import PackedRows
from medusa_train.data.rows import Row, read_rows
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.files import write_json
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads
from medusa_train.recipe import Recipe
from medusa_train.run_folder import environment
from medusa_train.trainer import HeadsForTraining

DRAFT_VOCABULARY = 4096
ORIGINAL_LEARNING_RATE = 1e-3  # what its documentation trains heads with
WARMUP = 0.05
# Arm -> size of the heads' vocabulary, 0 for the whole.
ARMS = {
    "original": 0,
    f"online, vocabulary {DRAFT_VOCABULARY}": DRAFT_VOCABULARY,
    "cached, whole vocabulary": 0,
    f"cached, vocabulary {DRAFT_VOCABULARY}": DRAFT_VOCABULARY,
}


def original_loss(backbone: Backbone, heads: MedusaHeads, rows: list[Row], decay: float) -> Tensor:
    """The loss of a batch of whole rows as the original recipe makes it."""
    ids = pad_sequence([torch.tensor(row.input_ids) for row in rows], batch_first=True).to(backbone.device)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        mask[i, : len(row.input_ids)] = 1
        for start, end in row.spans:
            labels[i, start:end] = ids[i, start:end]
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, attention_mask=mask)
    logits = torch.stack([heads(hidden, head) for head in range(heads.config.num_heads)])  # (K, B, T, V)
    loss = torch.zeros((), device=ids.device)
    for head in range(heads.config.num_heads):
        predicted, wanted = logits[head, :, : -(2 + head)], labels[:, 2 + head :]
        loss = loss + decay**head * functional.cross_entropy(
            predicted.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED
        )
    return loss


def head_positions(row: Row) -> int:
    """Positions of a row that have a target for head 1."""
    return sum(max(0, end - max(start, 1) - 1) for start, end in row.spans)


def longest(rows: list[Row]) -> int:
    return max(len(row.input_ids) for row in rows)


class Arm:
    """A way of training, loaded and ready: its batches, its loss, and heads as the backbone starts them."""

    def __init__(self, name: str, settings: argparse.Namespace, cache: Path) -> None:
        recipe, training = recipe_of(settings.run), recipe_of(settings.run).training
        torch.manual_seed(recipe.seed)
        self.backbone = load_backbone(recipe.backbone.source, settings.dtype, recipe.backbone.device)
        self.settings = settings
        shards = read_cache(cache / "train")
        vocabulary, whole = ARMS[name], self.backbone.vocab_size
        kept = draft_vocabulary((shard.tokens for shard in shards), vocabulary, whole)[0] if vocabulary else None
        config = HeadsConfig(recipe.heads.num_heads, 1, self.backbone.hidden_size, whole, vocabulary)
        self.heads = MedusaHeads.for_backbone(self.backbone, config, kept)
        rows, size = train_rows(settings), training.per_device_train_batch_size
        self.learning_rate = ORIGINAL_LEARNING_RATE if name == "original" else training.learning_rate
        self.loss: Callable[[list[int]], Tensor]
        self.positions: Callable[[list[int]], int] = len
        if name == "original":
            samples, size = len(rows), settings.rows_per_batch
            self.loss = lambda picked: original_loss(
                self.backbone, self.heads, [rows[i] for i in picked], training.loss_decay
            )
            self.positions = lambda picked: sum(head_positions(rows[i]) for i in picked)
        else:
            weights = LossWeights.of(training)
            online = name.startswith("online")
            module = (OnlineHeads if online else HeadsForTraining)(self.heads, self.backbone, weights)
            dataset: PackedRows | HeadsDataset
            if online:
                packs = PackedRows(rows, config.num_heads, settings.rows_per_batch * longest(rows), recipe.seed)
                self.positions = lambda picked: sum(head_positions(row) for i in picked for row in packs.packs[i])
                dataset, samples, size = packs, len(packs), 1
            else:
                dataset = HeadsDataset(shards, config.num_heads)
                samples = len(dataset)

            def heads_loss(picked: list[int]) -> Tensor:
                batch = dataset.__getitems__(picked)
                del batch["index"]  # for the Trainer's messages
                return module(**{name: tensor.to(self.backbone.device) for name, tensor in batch.items()})["loss"]

            self.loss = heads_loss
        shuffled = [part for _ in range(settings.epochs) for part in torch.randperm(samples).split(size)]
        self.batches = [part.tolist() for part in shuffled]

    def step_loss(self, picked: list[int]) -> Tensor:
        with torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=self.backbone.dtype == torch.bfloat16):
            return self.loss(picked)

    @torch.inference_mode()
    def top1(self, heldout: Path) -> float:
        """Share of held-out positions whose next-but-one token is head 1's best."""
        hits = total = 0
        dataset = HeadsDataset(read_cache(heldout), 1)
        for part in torch.arange(len(dataset)).split(512):
            batch = dataset.__getitems__(part.tolist())
            hidden = batch["hidden"].to(self.backbone.device, next(self.heads.parameters()).dtype)
            best = self.heads.draft_token_ids[self.heads(hidden, 0).argmax(dim=-1)].cpu()
            hits += int((best == batch["labels"][:, 0]).sum())
            total += len(part)
        return hits / total


def run_arm(connection: Connection, name: str, settings: argparse.Namespace, cache: Path) -> None:
    """A child process: load, wait for a turn, train a slice, report; at the end memory and accuracy."""
    arm = Arm(name, settings, cache)
    optimizer = torch.optim.AdamW(arm.heads.parameters(), arm.learning_rate, weight_decay=0.0, fused=True)
    steps = len(arm.batches)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)
    before = Memory(arm.backbone.device)
    arm.step_loss(arm.batches[0]).backward()  # warms up, and is forgotten
    optimizer.zero_grad()
    connection.send("ready")
    for turn in range(settings.repeats):
        connection.recv()
        start, positions = time.perf_counter(), 0
        for picked in arm.batches[turn * steps // settings.repeats : (turn + 1) * steps // settings.repeats]:
            loss = arm.step_loss(picked)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(arm.heads.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            positions += arm.positions(picked)
        loss.item()  # waits for the device
        connection.send((positions, time.perf_counter() - start))
    peak = before.peak_since()
    connection.recv()
    connection.send({"steps": steps, "peak_bytes": peak, "head1_top1": arm.top1(cache / "heldout")})


class Memory:
    """Memory of this process now, against which a later peak is measured."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)  # what loading freed would otherwise hide growth
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the mark starts again at what is resident
        self.start = _status("VmRSS")

    def peak_since(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else _status("VmHWM")) - self.start


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def build_cache(connection: Connection, settings: argparse.Namespace, cache: Path) -> None:
    """A child process: cache training and held-out rows; reports tokens read and seconds of the former."""
    recipe = recipe_of(settings.run)
    backbone = load_backbone(recipe.backbone.source, settings.dtype, recipe.backbone.device)
    rows, batch = train_rows(settings), recipe.data.cache_batch_tokens
    nothing = KeptStates(cache / "none")  # what distillation kept would make it free
    start = time.perf_counter()
    write_cache(backbone, rows, nothing, cache / "train", batch, 64, "train")
    seconds = time.perf_counter() - start
    heldout = read_rows(settings.run / "distill" / "rows.jsonl", "heldout")
    write_cache(backbone, heldout, nothing, cache / "heldout", batch, 64, "heldout")
    connection.send((sum(len(row.input_ids) for row in rows), seconds))


def recipe_of(run: Path) -> Recipe:
    return Recipe.model_validate(json.loads((run / "distill" / "run.json").read_text(encoding="utf-8"))["recipe"])


def train_rows(settings: argparse.Namespace) -> list[Row]:
    return read_rows(settings.run / "distill" / "rows.jsonl", "train")[: settings.rows]


def measure(settings: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Everything that is printed, by arm."""
    spawn = multiprocessing.get_context("spawn")

    def start(work: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, *arguments), daemon=True).start()
        theirs.close()  # a child that dies then ends the wait for it
        return ours

    tokens, seconds = start(build_cache, settings, cache).recv()
    rows = train_rows(settings)
    made: dict[str, Any] = {
        "rows": len(rows), "positions": sum(map(head_positions, rows)), "epochs": settings.epochs,
        "cache": {"tokens": tokens, "seconds": seconds}, "dtype": settings.dtype,
    }  # fmt: skip
    arms = {name: start(run_arm, name, settings, cache) for name in ARMS}
    for connection in arms.values():
        connection.recv()
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(settings.repeats):
        for name, connection in arms.items():
            connection.send("your turn")
            positions, elapsed = connection.recv()
            speeds[name].append(positions / elapsed)
            print(f"turn {turn + 1}, {name}: {positions} positions in {elapsed:.1f} s", flush=True)
    made["arms"] = {}
    for name, connection in arms.items():
        connection.send("that was all")
        made["arms"][name] = connection.recv() | {"positions_per_second": speeds[name]}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/quickstart"), help="folder of a distilled run")
    parser.add_argument("--rows", type=int, default=96, help="training rows to use")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="turns that the steps of an arm are cut into")
    parser.add_argument("--rows-per-batch", type=int, default=2, help="of the original recipe, and of a pack")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    settings = parser.parse_args()
    if not (settings.run / "distill" / "run.json").exists():
        raise SystemExit(f"{settings.run} has no finished distill stage; run medusa-train quickstart first")
    with tempfile.TemporaryDirectory() as folder:
        made = measure(settings, Path(folder))
    made["environment"] = environment()
    where = f"{made['environment']['processor']}, {torch.get_num_threads()} threads, dtype {made['dtype']}"
    print(f"\n{made['rows']} rows, {made['positions']:,} positions, {made['epochs']} epochs; {where}")
    print(f"{'arm':26s} {'positions/s (range)':>24s}         peak MB         head-1 top-1  steps")
    first = made["arms"]["original"]
    for name, arm in made["arms"].items():
        speed = statistics.median(arm["positions_per_second"])
        ratio = speed / statistics.median(first["positions_per_second"])
        spread = f"{speed:.0f} ({min(arm['positions_per_second']):.0f}-{max(arm['positions_per_second']):.0f})"
        share = arm["peak_bytes"] / first["peak_bytes"]
        print(
            f"{name:26s} {spread:>24s} {ratio:6.1f}x {arm['peak_bytes'] / 1e6:8.0f} {share:6.2f} "
            f"{arm['head1_top1']:13.3f} {arm['steps']:6d}"
        )
    cache = made["cache"]
    print(
        f"making the cache: {cache['seconds']:.0f} s once for {cache['tokens']:,} tokens "
        f"({made['positions'] / cache['seconds']:.0f} positions/s); every epoch and every further recipe reuses it"
    )
    if settings.out:
        write_json(settings.out, made)


if __name__ == "__main__":
    main()
