"""`GET /metrics`, under vLLM's names, so that its dashboards show this engine too.

See common/serve/README.md"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from common.requests.output_processor import RequestMetrics
from common.serve.async_llm import AsyncLLM
from common.serve.deltas import RequestDelta
from common.serve.engine_loop import QueueFull
from request import SamplingParams

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60, 240, 960)
_TOKENS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
_TIMES = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens.",
    "request_time_per_output_token_seconds": "Mean time between a request's tokens.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last one.",
    "request_inference_time_seconds": "From the first step to the last token.",
}
_COUNTS = {
    "request_params_n": "`n` of the request.",
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens generated, of all choices.",
    "request_max_num_generation_tokens": "Tokens generated, of the longest choice.",
    "request_prefill_kv_computed_tokens": "Tokens of the prompt that were not cached.",
    "request_params_max_tokens": "`max_tokens` of the request, or its default.",
}
_REASONS = ("stop", "length", "abort", "error")
# By vLLM's name: the field of `EngineStats` (None: computed), and the help text.
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
    "prompt_tokens_cached": ("cached_tokens", "Prompt tokens found in the prefix cache."),
}
_SPECULATION = {  # counters of an engine that has it
    "spec_decode_num_drafts": ("num_drafted_passes", "Runs of draft tokens that were verified."),
    "spec_decode_num_draft_tokens": ("num_drafted_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted."),
}


class ServerMetrics:
    """The server's Prometheus metrics. Gauges and counters are the engine's, read at each scrape;
    the others are observed when a request ends."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.llm = llm
        self.started_at = time.time()
        self.content_type = CONTENT_TYPE_LATEST
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

        self._histograms = {
            name: Histogram(
                f"vllm:{name}",
                says,
                _LABELS,
                buckets=_SECONDS if name in _TIMES else _TOKENS,
                registry=self._registry,
            ).labels(*self._labels)
            for name, says in (_TIMES | _COUNTS).items()
        }
        ended = Counter(
            "vllm:request_success",
            "Requests that have ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._ended = {reason: ended.labels(*self._labels, reason) for reason in _REASONS}
        for collector in ProcessCollector, GCCollector, PlatformCollector:
            collector(registry=self._registry)

    async def counted(
        self, request: AsyncIterator[RequestDelta], params: SamplingParams
    ) -> AsyncIterator[RequestDelta]:
        """Yield the deltas of a request unchanged, and count them."""
        reason = "abort"  # unless the request finishes
        num_prompt = 0
        num_generated = [0] * params.n
        try:
            async for delta in request:
                num_prompt += len(delta.prompt_token_ids or ())
                for completion in delta.completions.values():
                    num_generated[completion.index] += len(completion.token_ids)
                    reason = completion.finish_reason or reason
                if delta.metrics is not None and delta.error is None:
                    self._observe_times(delta.metrics, max(num_generated))
                    self._observe(
                        request_prompt_tokens=num_prompt,
                        request_prefill_kv_computed_tokens=num_prompt - delta.num_cached_tokens,
                        request_generation_tokens=sum(num_generated),
                        request_max_num_generation_tokens=max(num_generated),
                        request_params_n=params.n,
                    )
                    if params.max_tokens is not None:  # a number of any size
                        limit = min(params.max_tokens, self.llm.max_model_len)
                        self._observe(request_params_max_tokens=limit)
                yield delta
        except Exception as error:
            reason = "refused" if isinstance(error, ValueError | QueueFull) else "error"
            raise
        finally:
            await request.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            if reason in self._ended:
                self._ended[reason].inc()

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)

    def _observe_times(self, times: RequestMetrics, num_tokens: int) -> None:
        """Observe the times of a request whose longest choice has `num_tokens`."""
        begin = times.first_scheduled_time
        first = times.first_token_time
        last = times.last_token_time
        if times.queue_time is not None:
            self._observe(request_queue_time_seconds=times.queue_time)
        if begin is not None and first is not None and last is not None:
            self._observe(
                time_to_first_token_seconds=first - times.arrival_time,
                e2e_request_latency_seconds=last - times.arrival_time,
                request_prefill_time_seconds=first - begin,
                request_decode_time_seconds=last - first,
                request_inference_time_seconds=last - begin,
            )
            if num_tokens > 1:
                mean = (last - first) / (num_tokens - 1)
                self._observe(request_time_per_output_token_seconds=mean)
        for seconds in times.inter_token_latencies:
            self._observe(inter_token_latency_seconds=seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics. Called by the registry."""
        stats = self.llm.stats
        config = self.llm.config
        usage = stats.kv_blocks_in_use / max(stats.kv_blocks_total, 1)
        counters = _COUNTERS | ({} if config.speculative is None else _SPECULATION)
        for name, (field, says) in (_GAUGES | counters).items():
            family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            metric = family(f"vllm:{name}", says, labels=_LABELS)
            metric.add_metric(self._labels, usage if field is None else getattr(stats, field))
            yield metric

    def text(self) -> bytes:
        return generate_latest(self._registry)
