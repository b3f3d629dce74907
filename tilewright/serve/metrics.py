"""The Prometheus text of ``/metrics``. Names are vLLM's after a prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

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

from tilewright.runtime.messages import EngineReady, Heartbeat, RequestFinished, RequestStarted
from tilewright.runtime.scheduling.engine_stats import (
    HOST,
    IDLE,
    SIZE,
    STEP,
    HistogramCounts,
    bounds_of,
)
from tilewright.runtime.speculative.counts import SpeculationCounts
from tilewright.serve.output.choice import ChoiceStream

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 480, 960)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")
_EXEMPLAR = "request_id"
_EXEMPLAR_CHARACTERS = 128 - len(_EXEMPLAR)  # limit for name and value together
_T = TypeVar("_T")
OPEN_METRICS = openmetrics.CONTENT_TYPE_LATEST


class Metrics:
    """The engines' metrics, and of the processes (``process_...``, ``engine_process_...``).

    Args:
        prefix: prefix for all names.
        model: value for the label ``model_name``.
        engine_pids: functions that return each engine's process id, or 0.
    """

    def __init__(self, prefix: str, model: str, engine_pids: Sequence[Callable[[], int]]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineProcesses(engine_pids))
        made = _Families(prefix, self.registry)
        self._engines = [
            EngineMetrics(made, {"model_name": model, "engine": str(number)})
            for number in range(len(engine_pids))
        ]
        self._refused = made.counter("requests_refused", "answered with an error", "code")
        # A refused request has no engine.
        self._nobody = {"model_name": model, "engine": "0" if len(engine_pids) == 1 else ""}
        self._counts = _EngineCounts(prefix, [engine.labels for engine in self._engines])
        self.registry.register(self._counts)

    def of(self, engine: int) -> EngineMetrics:
        """Return an engine's metrics."""
        return self._engines[engine]

    def refuse(self, code: str) -> None:
        """Count a request with an error response."""
        self._refused.labels(**self._nobody, code=code).inc()

    def render(self, engines: Sequence[EngineState], *, is_open: bool = False) -> bytes:
        """Return the text with each engine's latest state.

        ``is_open`` selects OpenMetrics with exemplars.
        """
        for own, engine in zip(self._engines, engines, strict=True):
            own.show(engine)
        self._counts.engines = engines
        if is_open:  # the default escaping replaces colons in names by underscores
            return openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
        return generate_latest(self.registry)


class EngineState(Protocol):
    """An engine's latest messages."""

    @property
    def ready(self) -> EngineReady | None: ...

    @property
    def beat(self) -> Heartbeat: ...

    @property
    def num_restarts(self) -> int: ...


class EngineMetrics:
    """Counters, gauges and histograms of a single engine."""

    def __init__(self, made: _Families, labels: Mapping[str, str]) -> None:
        self.labels = labels
        gauge, counter, histogram = (
            lambda *said: made.gauge(*said).labels(**labels),
            lambda *said: made.counter(*said).labels(**labels),
            lambda name, bounds: made.histogram(name, bounds).child(labels),
        )
        self.running = gauge("num_requests_running", "requests that have a slot")
        self.waiting = gauge("num_requests_waiting", "requests in the queue")
        self.pages = gauge("kv_cache_usage_perc", "share of used pages, 0 to 1")
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = counter("generation_tokens", "tokens of answers")
        self.cached_tokens = counter("prompt_tokens_cached", "tokens not computed again")
        self.queries = counter("prefix_cache_queries", "tokens looked up")
        self.hits = counter("prefix_cache_hits", "tokens found")
        self.swapped = gauge("num_requests_swapped", "requests whose state made room")
        self.snapshots = gauge("snapshots_used", "snapshots that hold a state")
        self.success = made.counter("request_success", "ended", "finished_reason")
        self.first = histogram("time_to_first_token_seconds", _FIRST)
        self.between = histogram("inter_token_latency_seconds", _BETWEEN)
        self.per_token = histogram("request_time_per_output_token_seconds", _BETWEEN)
        self.whole = made.exemplified("e2e_request_latency_seconds", _SECONDS)
        self.queued = histogram("request_queue_time_seconds", _SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", _SECONDS)
        self.decode = histogram("request_decode_time_seconds", _SECONDS)
        self.inference = histogram("request_inference_time_seconds", _SECONDS)
        self.prompt_length = histogram("request_prompt_tokens", _LENGTHS)
        self.computed = histogram("request_prefill_kv_computed_tokens", _LENGTHS)
        self.answer_length = histogram("request_generation_tokens", _LENGTHS)
        self.max_tokens = histogram("request_params_max_tokens", _LENGTHS)
        self.num_choices = histogram("request_params_n", (1, 2, 5, 10, 16))

    def take_vector(
        self, length: int, started: RequestStarted | None, done: RequestFinished, *, seconds: float
    ) -> None:
        """Count a prompt of ``length`` tokens with an embedding after ``seconds``."""
        self.take_prompt(length, started.num_cached if started is not None else 0, num_choices=1)
        self.success.labels(**self.labels, finished_reason=done.reason).inc()
        self.whole.labels(**self.labels).observe(seconds)
        if started is not None:
            self.queued.observe(started.queue_s)
        self.prefill.observe(done.prefill_s)
        self.inference.observe(done.prefill_s)

    def take_prompt(self, length: int, cached: int, *, num_choices: int) -> None:
        """Count a prompt when its first choice finishes. Its choices share a single prefill.

        Args:
            length: prompt tokens.
            cached: prompt tokens from the prefix cache.
            num_choices: choices per prompt.
        """
        self.prompt_tokens.inc(length)
        self.cached_tokens.inc(cached)
        self.queries.inc(length)
        self.hits.inc(cached)
        self.prompt_length.observe(length)
        self.computed.observe(length - cached)
        self.num_choices.observe(num_choices)

    def take(self, choice: ChoiceStream, *, seconds: float, request_id: str = "") -> None:
        """Count a finished choice, ``seconds`` after its request arrived."""
        self.success.labels(**self.labels, finished_reason=choice.finish_reason or "stop").inc()
        count = len(choice.tokens)
        self.generation_tokens.inc(count)
        named = {_EXEMPLAR: request_id[:_EXEMPLAR_CHARACTERS]} if request_id.isascii() else None
        self.whole.labels(**self.labels).observe(seconds, named)
        self.answer_length.observe(count)
        self.max_tokens.observe(choice.request.sampling.max_tokens)
        if choice.started is not None:
            self.queued.observe(choice.started.queue_s)
        if (done := choice.finished) is not None:
            self.prefill.observe(done.prefill_s)
            self.decode.observe(done.decode_s)
            self.inference.observe(done.prefill_s + done.decode_s)
            if count > 1:
                self.per_token.observe(done.decode_s / (count - 1))

    def show(self, engine: EngineState) -> None:
        """Set the gauges to the latest heartbeat."""
        beat, ready = engine.beat, engine.ready
        self.running.set(beat.num_running)
        self.waiting.set(beat.num_waiting)
        self.swapped.set(beat.num_swapped)
        self.snapshots.set(beat.num_snapshots_used)
        pages = ready.num_pages if ready is not None else 0
        self.pages.set(beat.num_used_pages / pages if pages else 0.0)


class _Families:
    """Metrics by name. Engines share each metric."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix, self._registry = prefix, registry
        self._made: dict[str, Any] = {}

    def gauge(self, name: str, text: str) -> Gauge:
        return self._once(name, lambda full: Gauge(full, text, _LABELS, registry=self._registry))

    def counter(self, name: str, text: str, more: str = "") -> Counter:
        labels = (*_LABELS, more) if more else _LABELS
        return self._once(name, lambda full: Counter(full, text, labels, registry=self._registry))

    def exemplified(self, name: str, bounds: Sequence[float]) -> Histogram:
        """Return a histogram with exemplars."""
        return self._once(
            name,
            lambda full: Histogram(full, full, _LABELS, registry=self._registry, buckets=bounds),
        )

    def histogram(self, name: str, bounds: Sequence[float]) -> _Histograms:
        def make(full: str) -> _Histograms:
            made = _Histograms(full, name, bounds)
            self._registry.register(made)
            return made

        return self._once(name, make)

    def _once(self, name: str, make: Callable[[str], _T]) -> _T:
        if name not in self._made:
            self._made[name] = make(f"{self._prefix}:{name}")
        family: _T = self._made[name]
        return family


class _FastHistogram:
    """A histogram for a value per token, without locks and exemplars.

    A single thread observes. ``bounds`` are the buckets' upper bounds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.histogram = HistogramCounts([0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count a value."""
        self.histogram.counts[bisect_left(self._bounds, value)] += 1
        self.histogram.total += value


class _Histograms(Collector):
    """Histograms with the same name, one per engine."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._children: list[tuple[tuple[str, ...], _FastHistogram]] = []

    def child(self, labels: Mapping[str, str]) -> _FastHistogram:
        """Create a histogram with these labels."""
        made = _FastHistogram(self._bounds)
        self._children.append((tuple(labels.values()), made))
        return made

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        for values, own in self._children:
            family.add_metric(values, _buckets(self._bounds, own.histogram), own.histogram.total)
        yield family


def _buckets(bounds: Sequence[float], histogram: HistogramCounts) -> list[tuple[str, int]]:
    """Return the upper bounds as text with cumulative counts."""
    spelled = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(spelled, accumulate(histogram.counts), strict=True))


class _EngineProcesses(Collector):
    """Process metrics of the engines. Several engines are distinguished by a label."""

    def __init__(self, pids: Sequence[Callable[[], int]]) -> None:
        self._sources = [ProcessCollector("engine", pid, registry=None) for pid in pids]

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because there may be no process yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        families: dict[str, Metric] = {}
        for number, source in enumerate(self._sources):
            labels = {"engine": str(number)} if len(self._sources) > 1 else {}
            for metric in source.collect():
                kept = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    kept.add_sample(sample.name, labels, sample.value)
        return families.values()


class _EngineCounts(Collector):
    """Totals and histograms of the engines, from their latest heartbeats.

    Attributes:
        engines: states that `collect` reads.
    """

    def __init__(self, prefix: str, labels: Sequence[Mapping[str, str]]) -> None:
        self._prefix, self._labels = prefix, labels
        self.engines: Sequence[EngineState] = ()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the names depend on the counts."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        engines = list(zip(self._labels, self.engines, strict=False))
        for name, (read, text) in _TOTALS.items():
            counter = CounterMetricFamily(self._name(name), text, labels=_LABELS)
            for labels, engine in engines:
                counter.add_metric(tuple(labels.values()), read(engine))
            yield counter
        yield from self._speculation(engines)
        for name, kind in ((STEP, "kind"), (HOST, "part"), (IDLE, ""), (SIZE, "")):
            yield self._histogram(name, kind)
        infos = [(labels, _cache_info(each.ready)) for labels, each in engines if each.ready]
        if infos:
            names = (*_LABELS, *infos[0][1])
            info = GaugeMetricFamily(
                self._name("cache_config_info"), "of the pool of pages", labels=names
            )
            for labels, cache in infos:
                info.add_metric((*labels.values(), *cache.values()), 1)
            yield info

    def _speculation(
        self, engines: Sequence[tuple[Mapping[str, str], EngineState]]
    ) -> Iterable[Metric]:
        """Return the speculative decoding counters, named as vLLM's."""
        drafting = [
            (tuple(labels.values()), engine.beat.speculation)
            for labels, engine in engines
            if engine.beat.speculation is not None
        ]
        if not drafting:
            return
        length = GaugeMetricFamily(
            self._name("spec_decode_k"), "maximum draft tokens in the last step", labels=_LABELS
        )
        for labels, counts in drafting:
            length.add_metric(labels, counts.length)
        yield length
        for name, (label, values_of, text) in _SPECULATION.items():
            names = (*_LABELS, label) if label else _LABELS
            counter = CounterMetricFamily(self._name(f"spec_decode_{name}"), text, labels=names)
            for labels, counts in drafting:
                for value, count in values_of(counts).items():
                    counter.add_metric((*labels, value) if label else labels, count)
            yield counter

    def _histogram(self, name: str, kind: str) -> Metric:
        full = f"{name}_total" if name == SIZE else name
        labels = (*_LABELS, kind) if kind else _LABELS
        family = HistogramMetricFamily(self._name(full), full, labels=labels)
        for own, engine in zip(self._labels, self.engines, strict=False):
            values = tuple(own.values())
            for key, histogram in engine.beat.stats.items():
                counted, _, which = key.partition("/")
                if counted == name:
                    buckets = _buckets(bounds_of(name), histogram)
                    family.add_metric(
                        (*values, which) if kind else values, buckets, histogram.total
                    )
        return family

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"


_TOTALS: dict[str, tuple[Callable[[EngineState], int], str]] = {
    "num_preemptions": (
        lambda each: each.beat.num_preemptions,
        "requests that made room for others",
    ),
    "tokens_dropped": (lambda each: each.beat.num_dropped, "computed for requests that had ended"),
    "images": (lambda engine: engine.beat.num_images, "images of requests"),
    "image_cache_hits": (lambda engine: engine.beat.num_image_hits, "images from the cache"),
    "engine_restarts": (lambda each: each.num_restarts, "of the engine process"),
}


_SPECULATION: dict[str, tuple[str, Callable[[SpeculationCounts], Mapping[str, int]], str]] = {
    "num_drafts": ("", lambda counts: {"": counts.num_drafts}, "verified drafts"),
    "num_draft_tokens": ("", lambda counts: {"": counts.num_draft_tokens}, "their tokens"),
    "num_accepted_tokens": ("", lambda counts: {"": sum(counts.num_accepted)}, "accepted tokens"),
    "num_accepted_tokens_per_pos": (
        "position",
        lambda counts: {str(at): count for at, count in enumerate(counts.num_accepted)},
        "accepted tokens by position in the draft",
    ),
    "requests_without_drafts": (
        "reason",
        lambda counts: counts.without_drafts,
        "requests without drafts",
    ),
}
"""Counters by name: an additional label, the values by that label, and a help text."""


def _cache_info(ready: EngineReady) -> dict[str, str]:
    pool = {"num_gpu_blocks": ready.num_pages, "block_size": ready.page_size}
    return {
        key: str(value) for key, value in {**pool, "num_snapshots": ready.num_snapshots}.items()
    }
