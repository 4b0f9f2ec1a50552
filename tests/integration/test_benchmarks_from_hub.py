"""Every benchmark that the Hub holds is read from there by the real client, and without a network from its cache."""

import io
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_server import HubServer

from medusa_train.eval.questions import benchmark_names, load_benchmark

READ = """
import sys
from medusa_train.eval.questions import load_questions
from medusa_train.inference.errors import UserError
try:
    for question in load_questions(sys.argv[1]):
        print(question.messages[0]["content"], *question.follow_ups, question.category, sep="|")
except UserError as error:
    sys.exit(str(error))
"""
ROWS = {
    "gsm8k": [{"question": "Two and two?", "answer": "4"}, {"question": "Three and three?", "answer": "6"}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def one():"}],
    "mt_bench": [{"category": "writing", "prompt": ["Write.", "Again."], "reference": [], "prompt_id": 1}],
    "alpaca_eval": [{"instruction": "Say hello.", "output": "Hello.", "dataset": "vicuna"}],
}
ASKED = {
    "gsm8k": ["Two and two?|", "Three and three?|"],
    "humaneval": ["Complete this Python function. Answer with the whole function.", "def one():", "```|"],
    "mt_bench": ["Write.|Again.|writing"],
    "alpaca_eval": ["Say hello.|vicuna"],
}


def read(name, environment):
    return subprocess.run(
        [sys.executable, "-c", READ, name], env=environment, capture_output=True, text=True, timeout=120
    )


def publish(server, benchmark, rows):
    """Put a dataset where the benchmark expects it, laid out as the Hub's are."""
    if benchmark.file:
        server.put(benchmark.dataset, {benchmark.file: json.dumps(rows).encode()}, "dataset")
        return
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    folder = benchmark.config or "data"
    card = {
        "configs": [
            {
                "config_name": benchmark.config or "default",
                "data_files": [{"split": benchmark.split, "path": f"{folder}/{benchmark.split}-*"}],
            }
        ]
    }
    files = {
        "README.md": f"---\n{yaml.safe_dump(card)}---\n".encode(),
        f"{folder}/{benchmark.split}-00000-of-00001.parquet": parquet.getvalue(),
    }
    server.put(benchmark.dataset, files, "dataset")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_benchmark_comes_from_the_hub_once(name, tmp_path):
    with HubServer() as server:
        publish(server, load_benchmark(name), ROWS[name])
        environment = server.environment(tmp_path, OMP_NUM_THREADS="1")
        first = read(name, environment)
        assert first.returncode == 0, first.stderr
        for line in ASKED[name]:
            assert line in first.stdout.splitlines()
    again = read(name, environment | {"HF_HUB_OFFLINE": "1"})
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr


def test_all_but_those_with_files_of_their_own_are_tried_here():
    assert {name for name in benchmark_names() if load_benchmark(name).dataset} == ROWS.keys()


def test_a_hub_without_the_benchmark_is_one_line_that_says_what_to_do(tmp_path):
    with HubServer() as server:
        missing = read("gsm8k", server.environment(tmp_path))
    assert missing.returncode == 1
    last = missing.stderr.splitlines()[-1]
    assert last.startswith("benchmark gsm8k: cannot read openai/gsm8k (")
    assert last.endswith("save https://huggingface.co/datasets/openai/gsm8k and set eval.benchmark_file to its path")
