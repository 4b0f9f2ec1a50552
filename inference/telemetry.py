"""`DecodeStats` for Prometheus: read when it scrapes, so that decoding pays nothing for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from medusa_train.inference.stats import TIMES, DecodeStats

PREFIX = "medusa_decode"


class StatsCollector(Collector):
    """Metrics of counters that generations add to (``model.generate(..., stats=stats)``)."""

    def __init__(self, stats: DecodeStats) -> None:
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for name, text, value in (
            ("tokens", "Tokens emitted, prefill's included.", stats.prefill_tokens + stats.step_tokens),
            ("steps", "Rows times backbone passes after prefill.", stats.steps),
            ("passes", "Backbone passes after prefill.", stats.passes),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
        seconds = CounterMetricFamily(f"{PREFIX}_seconds", "Where the time went.", labels=["part"])
        for name in TIMES:
            seconds.add_metric([name.removesuffix("_seconds")], getattr(stats, name))
        yield seconds
        # A copy first: another thread may be decoding.
        histogram = dict(sorted(stats.histogram.copy().items()))
        most = max(histogram, default=1)
        accepted = CounterMetricFamily(
            f"{PREFIX}_accepted", "Steps that emitted at least this many drafted tokens.", labels=["depth"]
        )
        for depth in range(1, most):
            accepted.add_metric([str(depth)], stats.accepted_at(depth))
        yield accepted
        below = accumulate(histogram.values())
        buckets = [(f"{float(tokens)}", float(count)) for tokens, count in zip(histogram, below, strict=True)]
        buckets.append(("+Inf", float(sum(histogram.values()))))
        yield HistogramMetricFamily(
            f"{PREFIX}_tokens_per_step", "Tokens emitted by a step.", buckets=buckets,
            sum_value=float(sum(tokens * count for tokens, count in histogram.items())),
        )  # fmt: skip
        yield GaugeMetricFamily(
            f"{PREFIX}_tree_size", "Tokens per row of the latest pass, root included.", value=stats.last_pass_size
        )


def serve_metrics(stats: DecodeStats, port: int) -> None:
    """Answer ``http://localhost:port/metrics`` from a thread of its own until the process ends."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats))
    start_http_server(port, addr="127.0.0.1", registry=registry)
