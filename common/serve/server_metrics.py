"""`GET /metrics`, under vLLM's names, so that its dashboards show this engine too."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from common.serve.async_llm import AsyncLLM
from common.serve.deltas import RequestDelta
from common.serve.engine_loop import QueueFull

_LABELS = ("model_name", "engine")
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _SHORT),
    ("inter_token_latency_seconds", "Between two tokens.", _TOKEN),
    ("e2e_request_latency_seconds", "From arrival to the last token.", _LONG),
    ("request_queue_time_seconds", "From arrival to the first step.", _LONG),
)
_REASONS = ("stop", "length", "abort", "error")
# Of `EngineStats`: what it is there (None: worked out), what it says.
_GAUGES = {
    "kv_cache_usage_perc": (None, "Share of the KV blocks in use; 1: all."),
    "num_requests_running": ("num_running", "Sequences that hold memory and compute."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for their first step."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests, cached or not."),
    "generation_tokens": ("output_tokens", "Tokens generated."),
    "num_preemptions": ("num_preemptions", "Sequences that lost their memory to others."),
    "prefix_cache_queries": ("looked_up_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found there."),
}


class ServerMetrics:
    """Gauges and counters are the engine's, read when somebody asks. The first token's time is that
    of a request here, whether it comes to an end or not; other times are the engine's, at the end.
    """

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.llm, self.started_at, self.content_type = llm, time.time(), CONTENT_TYPE_LATEST
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

        self._first, self._between, self._whole, self._queued = (
            Histogram(
                f"vllm:{name}", says, _LABELS, buckets=buckets, registry=self._registry
            ).labels(*self._labels)
            for name, says, buckets in _HISTOGRAMS
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that have ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in _REASONS:
            self._ended.labels(*self._labels, reason)

    async def counted(self, request: AsyncIterator[RequestDelta]) -> AsyncIterator[RequestDelta]:
        """The same deltas, on their way to the client."""
        reason = "abort"  # unless it comes to an end
        begin, is_first = time.monotonic(), True
        try:
            async for delta in request:
                if is_first and any(piece.token_ids for piece in delta.completions.values()):
                    self._first.observe(time.monotonic() - begin)
                    is_first = False
                if delta.metrics is not None and delta.error is None:
                    reason = self._note(delta)
                yield delta
        except Exception as error:
            reason = "refused" if isinstance(error, ValueError | QueueFull) else "error"
            raise
        finally:
            await request.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            if reason in _REASONS:
                self._ended.labels(*self._labels, reason).inc()

    def _note(self, delta: RequestDelta) -> str:
        times = delta.metrics
        assert times is not None
        if times.last_token_time is not None:
            self._whole.observe(times.last_token_time - times.arrival_time)
        if times.queue_time is not None:
            self._queued.observe(times.queue_time)
        for seconds in times.inter_token_latencies:
            self._between.observe(seconds)
        return next(c.finish_reason for c in delta.completions.values() if c.finish_reason)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats = self.llm.stats
        usage = stats.kv_blocks_in_use / max(stats.kv_blocks_total, 1)
        for name, (field, says) in (_GAUGES | _COUNTERS).items():
            family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            metric = family(f"vllm:{name}", says, labels=_LABELS)
            metric.add_metric(self._labels, usage if field is None else getattr(stats, field))
            yield metric

    def text(self) -> bytes:
        return generate_latest(self._registry)
