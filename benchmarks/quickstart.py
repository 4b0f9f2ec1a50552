"""What the quickstart reaches on this machine: ``python benchmarks/quickstart.py [--out DIR]``.

Runs `medusa-train quickstart` in a process of its own from nothing and prints every figure that the project promises
beside its target. Ratios come from one run: interleaved, repeated, one model object (see `eval/speed.py`).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(command: list[str]) -> float:
    """Best wall time of five runs of a command."""
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        runs.append(time.perf_counter() - start)
    return min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep the run here; removed first")
    parser.add_argument("--report-only", action="store_true", help="print the figures of the run in --out")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp()) / "run"
    elapsed = peak = None
    if not arguments.report_only:
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "medusa_train.cli", "quickstart", "--out", str(out)], check=True)
        elapsed = (time.perf_counter() - start) / 60
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit / 1e9
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    empty = seconds([sys.executable, "-c", ""])
    imported = seconds([sys.executable, "-c", "import medusa_train"]) - empty
    shown = seconds([sys.executable, "-m", "medusa_train.cli", "--help"])
    answers = report["made"]["distill"]["result"]["answer_tokens"]
    identical = statistics.fmean(entry["identical_share"] for entry in report["losslessness"].values())
    rows = [
        ("answer tokens", answers, ">= 40000"),
        ("tokens per step", report["acceptance"]["tokens_per_step"], ">= 1.60"),
        ("replayed on all answers", report["replay"]["tokens_per_step"], ">= 1.60"),
        ("speedup over generate", report["speedup"]["over_generate"]["median"], ">= 1.30"),
        ("speedup over plain", report["speedup"]["over_plain"]["median"], "> 1.00"),
        ("identical outputs", identical, "= 1 (fp32)"),
        ("whole job, minutes", elapsed, "<= 12"),
        ("peak memory, GB", peak, "<= 6"),
        ("import medusa_train, s", imported, "<= 0.2"),
        ("medusa-train --help, s", shown, "<= 1"),
    ]
    setting, environment = report["setting"], report["made"]["tree"]["environment"]
    print(f"\n{setting['backbone']}, {setting['dtype']}, {environment['processor']}, {environment['threads']} threads")
    print(f"tree of {setting['tree_size']} tokens per pass")
    for name, value, target in rows:
        print(f"{name:26s} {'n/a' if value is None else f'{value:10.2f}'}   target {target}")


if __name__ == "__main__":
    main()
