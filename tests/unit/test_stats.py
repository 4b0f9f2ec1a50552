"""Counters add up, and Prometheus sees what was counted."""

from urllib.request import urlopen

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conftest import make_llama, random_heads
from medusa_train.inference import DecodeStats, MedusaModel
from medusa_train.inference.telemetry import StatsCollector, serve_metrics


@given(st.lists(st.integers(1, 5), max_size=20), st.lists(st.integers(1, 5), max_size=20))
def test_adding_is_counting_everything_together(first, second):
    stats, other = DecodeStats(prefill_tokens=1), DecodeStats(prefill_tokens=2, commit_seconds=0.5)
    for each, steps in ((stats, first), (other, second)):
        for tokens in steps:
            each.histogram[tokens] += 1
    stats.add(other)
    both = first + second
    assert stats.prefill_tokens == 3
    assert stats.steps == len(both)
    assert stats.step_tokens == sum(both)
    assert stats.tokens_per_step == (sum(both) / len(both) if both else None)
    for depth in range(6):
        assert stats.accepted_at(depth) == sum(tokens > depth for tokens in both)
    assert stats.decode_seconds == 0.5


def sample(families, name, **labels):
    return next(
        s.value for family in families for s in family.samples if s.name == name and labels.items() <= s.labels.items()
    )


def test_prometheus_scrapes_what_generations_counted():
    model, stats = MedusaModel(make_llama(), random_heads()), DecodeStats()
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats))
    generate_latest(registry)  # before anything was counted
    for start in (3, 9):
        model.generate(torch.tensor([start, 5]), 20, eos_token_ids=(), stats=stats)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert sample(families, "medusa_decode_tokens_total") == 40
    assert sample(families, "medusa_decode_steps_total") == stats.steps
    assert sample(families, "medusa_decode_tree_size") == model.tree.size
    assert sample(families, "medusa_decode_tokens_per_step_sum") == 38
    assert sample(families, "medusa_decode_tokens_per_step_count") == stats.steps
    assert len(stats.histogram) > 1
    for bound in stats.histogram:
        below = sum(count for tokens, count in stats.histogram.items() if tokens <= bound)
        assert sample(families, "medusa_decode_tokens_per_step_bucket", le=f"{bound}.0") == below
    assert sample(families, "medusa_decode_seconds_total", part="forward") == pytest.approx(stats.forward_seconds)
    for depth in range(1, max(stats.histogram)):
        assert sample(families, "medusa_decode_accepted_total", depth=str(depth)) == stats.accepted_at(depth)


def test_metrics_are_served_over_http(unused_port):
    serve_metrics(DecodeStats(prefill_tokens=7), unused_port)
    with urlopen(f"http://127.0.0.1:{unused_port}/metrics") as answer:
        assert b"medusa_decode_tokens_total 7.0" in answer.read()


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
