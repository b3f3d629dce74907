"""What ``/metrics`` says, in Prometheus' text; names as vLLM's, behind a prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from tilewright.compiler.runtime.messages import Beat, Ready
from tilewright.compiler.runtime.tallies import HOST, IDLE, SIZE, STEP, Tally, bounds_of
from tilewright.compiler.serve.answers import Choice

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 480, 960)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")
_EXEMPLAR = "request_id"
_EXEMPLAR_CHARACTERS = 128 - len(_EXEMPLAR)  # of name and value together
OPEN_METRICS = openmetrics.CONTENT_TYPE_LATEST


class Metrics:
    """Counters, gauges and histograms of one front, and what both processes hold of memory and
    files (``process_...`` and ``engine_process_...``).
    """

    def __init__(self, prefix: str, model: str, engine_pid: Callable[[], int]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        ProcessCollector("engine", engine_pid, registry=self.registry)
        self._prefix, self._labels = prefix, {"model_name": model, "engine": "0"}
        self.running = self._gauge("num_requests_running", "requests that have a seat")
        self.waiting = self._gauge("num_requests_waiting", "requests in the queue")
        self.pages = self._gauge("kv_cache_usage_perc", "share of the pages that is held, 0 to 1")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "tokens of answers")
        self.cached_tokens = self._counter("prompt_tokens_cached", "tokens not computed again")
        self.queries = self._counter("prefix_cache_queries", "tokens looked up")
        self.hits = self._counter("prefix_cache_hits", "tokens found")
        self.swapped = self._gauge("num_requests_swapped", "requests whose state made room")
        self.snapshots = self._gauge("snapshots_used", "snapshots that hold a state")
        self._engine = _EngineCounts(prefix, self._labels)
        self.registry.register(self._engine)
        self.success = self._counter("request_success", "ended", "finished_reason")
        self.refused = self._counter("requests_refused", "answered with an error", "code")
        self.first = self._histogram("time_to_first_token_seconds", _FIRST)
        self.between = self._histogram("inter_token_latency_seconds", _BETWEEN)
        self.per_token = self._histogram("request_time_per_output_token_seconds", _BETWEEN)
        whole = self._name("e2e_request_latency_seconds")
        self.whole = Histogram(whole, whole, _LABELS, registry=self.registry, buckets=_SECONDS)
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

    def _histogram(self, name: str, buckets: Sequence[float]) -> _Counted:
        made = _Counted(self._name(name), name, buckets, self._labels)
        self.registry.register(made)
        return made

    def refuse(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self.refused.labels(**self._labels, code=code).inc()

    def take_prompt(self, length: int, choice: Choice, *, num_choices: int) -> None:
        """Count a prompt of so many tokens, which is computed once for all of its choices, when the
        first of them has come to its end.
        """
        cached = choice.started.num_cached if choice.started is not None else 0
        self.prompt_tokens.inc(length)
        self.cached_tokens.inc(cached)
        self.queries.inc(length)
        self.hits.inc(cached)
        self.prompt_length.observe(length)
        self.computed.observe(length - cached)
        self.num_choices.observe(num_choices)

    def take(self, choice: Choice, *, seconds: float, request_id: str = "") -> None:
        """Count one answer that came to its end ``seconds`` after it was asked for."""
        self.success.labels(**self._labels, finished_reason=choice.finish_reason or "stop").inc()
        count = len(choice.tokens)
        self.generation_tokens.inc(count)
        named = {_EXEMPLAR: request_id[:_EXEMPLAR_CHARACTERS]} if request_id.isascii() else None
        self.whole.labels(**self._labels).observe(seconds, named)
        self.answer_length.observe(count)
        self.max_tokens.observe(choice.sampling.max_tokens)
        if choice.started is not None:
            self.queued.observe(choice.started.queue_s)
        if (done := choice.finished) is not None:
            self.prefill.observe(done.prefill_s)
            self.decode.observe(done.decode_s)
            self.inference.observe(done.prefill_s + done.decode_s)
            if count > 1:
                self.per_token.observe(done.decode_s / (count - 1))

    def render(
        self, ready: Ready | None, beat: Beat, num_restarts: int, *, is_open: bool = False
    ) -> bytes:
        """The text, with what the engine said last; ``is_open``: as OpenMetrics, with exemplars."""
        self.running.set(beat.num_running)
        self.waiting.set(beat.num_waiting)
        self.swapped.set(beat.num_swapped)
        self.snapshots.set(beat.num_snapshots_used)
        pages = ready.num_pages if ready is not None else 0
        self.pages.set(beat.num_pages_held / pages if pages else 0.0)
        self._engine.show(ready, beat, num_restarts)
        write = openmetrics.generate_latest if is_open else generate_latest
        return write(self.registry)


class _Counted(Collector):
    """A histogram that every token may go into: no lock, for one thread observes, and no exemplars.

    ``bounds``: the upper bounds of its counts.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Mapping[str, str]
    ) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, bounds, labels
        self._tally = Tally([0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count a value."""
        self._tally.counts[bisect_left(self._bounds, value)] += 1
        self._tally.total += value

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        found = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        found.add_metric(
            tuple(self._labels.values()), _buckets(self._bounds, self._tally), self._tally.total
        )
        yield found


def _buckets(bounds: Sequence[float], tally: Tally) -> list[tuple[str, int]]:
    """Upper bounds as text, and how many values are at most each."""
    spelled = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(spelled, accumulate(tally.counts), strict=True))


class _EngineCounts(Collector):
    """What the engine counts itself: its totals and tallies, as its last beat told them."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self._labels = prefix, labels
        self._ready: Ready | None = None
        self._beat = Beat(0, 0, 0, 0, 0, 0)
        self._num_restarts = 0

    def show(self, ready: Ready | None, beat: Beat, num_restarts: int) -> None:
        """What `collect` tells from now on."""
        self._ready, self._beat, self._num_restarts = ready, beat, num_restarts

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: names depend on what was counted."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        values = tuple(self._labels.values())
        totals = {
            "num_preemptions": (self._beat.num_preemptions, "requests that made room for others"),
            "tokens_dropped": (self._beat.num_dropped, "computed for requests that had ended"),
            "engine_restarts": (self._num_restarts, "of the engine process"),
        }
        for name, (value, text) in totals.items():
            counter = CounterMetricFamily(self._name(name), text, labels=_LABELS)
            counter.add_metric(values, value)
            yield counter
        for name, kind in ((STEP, "kind"), (HOST, "part"), (IDLE, ""), (SIZE, "")):
            yield self._histogram(name, kind, values)
        if self._ready is not None:
            cache = {"num_gpu_blocks": self._ready.num_pages, "block_size": self._ready.page_size}
            cache["num_snapshots"] = self._ready.num_snapshots
            labels = {**self._labels, **{key: str(value) for key, value in cache.items()}}
            info = GaugeMetricFamily(
                self._name("cache_config_info"), "of the pool of pages", labels=tuple(labels)
            )
            info.add_metric(tuple(labels.values()), 1)
            yield info

    def _histogram(self, name: str, kind: str, values: tuple[str, ...]) -> Metric:
        full = f"{name}_total" if name == SIZE else name
        labels = (*_LABELS, kind) if kind else _LABELS
        found = HistogramMetricFamily(self._name(full), full, labels=labels)
        for key, tally in self._beat.tallies.items():
            own, _, which = key.partition("/")
            if own == name:
                buckets = _buckets(bounds_of(name), tally)
                found.add_metric((*values, which) if kind else values, buckets, tally.total)
        return found

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"
