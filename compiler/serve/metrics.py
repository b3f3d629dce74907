"""What ``/metrics`` says, in Prometheus' text; names as vLLM's, behind a prefix."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tilewright.compiler.runtime.messages import Beat, Ready
from tilewright.compiler.serve.answers import Choice

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 480, 960)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")


class Metrics:
    """Counters, gauges and histograms of one front."""

    def __init__(self, prefix: str, model: str) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._prefix, self._labels = prefix, {"model_name": model, "engine": "0"}
        self.running = self._gauge("num_requests_running", "requests that have a seat")
        self.waiting = self._gauge("num_requests_waiting", "requests in the queue")
        self.pages = self._gauge("kv_cache_usage_perc", "share of the pages that is held, 0 to 1")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "tokens of answers")
        self.cached_tokens = self._counter("prompt_tokens_cached", "tokens not computed again")
        self.queries = self._counter("prefix_cache_queries", "tokens looked up")
        self.hits = self._counter("prefix_cache_hits", "tokens found")
        self.preemptions = self._gauge("num_preemptions_total", "preemptions since its start")
        self.dropped = self._gauge("tokens_dropped_total", "computed for requests that had ended")
        self.restarts = self._gauge("engine_restarts_total", "of the engine process")
        self.success = self._counter("request_success", "ended", "finished_reason")
        self.refused = self._counter("requests_refused", "answered with an error", "code")
        self.first = self._histogram("time_to_first_token_seconds", _FIRST)
        self.between = self._histogram("inter_token_latency_seconds", _BETWEEN)
        self.per_token = self._histogram("request_time_per_output_token_seconds", _BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", _SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", _SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", _SECONDS)
        self.decode = self._histogram("request_decode_time_seconds", _SECONDS)
        self.inference = self._histogram("request_inference_time_seconds", _SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", _LENGTHS)
        self.computed = self._histogram("request_prefill_kv_computed_tokens", _LENGTHS)
        self.answer_length = self._histogram("request_generation_tokens", _LENGTHS)
        self.max_tokens = self._histogram("request_params_max_tokens", _LENGTHS)
        self.num_choices = self._histogram("request_params_n", (1, 2, 5, 10, 16))

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(self._name(name), text, _LABELS, registry=self.registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, text: str, more: str = "") -> Counter:
        labels = (*_LABELS, more) if more else _LABELS
        made = Counter(self._name(name), text, labels, registry=self.registry)
        return made if more else made.labels(**self._labels)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(self._name(name), name, _LABELS, registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

    def refuse(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self.refused.labels(**self._labels, code=code).inc()

    def take(self, prompt_length: int, choice: Choice, *, seconds: float, num_choices: int) -> None:
        """Count one answer that came to its end ``seconds`` after it was asked for."""
        self.success.labels(**self._labels, finished_reason=choice.finish_reason or "stop").inc()
        cached = choice.started.num_cached if choice.started is not None else 0
        count = len(choice.tokens)
        self.prompt_tokens.inc(prompt_length)
        self.generation_tokens.inc(count)
        self.cached_tokens.inc(cached)
        self.queries.inc(prompt_length)
        self.hits.inc(cached)
        self.whole.observe(seconds)
        self.prompt_length.observe(prompt_length)
        self.computed.observe(prompt_length - cached)
        self.answer_length.observe(count)
        self.max_tokens.observe(choice.sampling.max_tokens)
        self.num_choices.observe(num_choices)
        if choice.started is not None:
            self.queued.observe(choice.started.queue_s)
        if (done := choice.finished) is not None:
            self.prefill.observe(done.prefill_s)
            self.decode.observe(done.decode_s)
            self.inference.observe(done.prefill_s + done.decode_s)
            if count > 1:
                self.per_token.observe(done.decode_s / (count - 1))

    def render(self, ready: Ready | None, beat: Beat, num_restarts: int) -> bytes:
        """The text, with what the engine said last."""
        self.running.set(beat.num_running)
        self.waiting.set(beat.num_waiting)
        pages = ready.num_pages if ready is not None else 0
        self.pages.set(beat.num_pages_held / pages if pages else 0.0)
        self.preemptions.set(beat.num_preemptions)
        self.dropped.set(beat.num_dropped)
        self.restarts.set(num_restarts)
        return generate_latest(self.registry)
