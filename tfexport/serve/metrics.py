"""Collect Prometheus metrics of the engines."""

from __future__ import annotations

import copy
import itertools
import operator
import threading
from bisect import bisect_left
from collections import Counter as Sums
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tfexport.decode.result import FinishReason
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer, Outcome

# In seconds; the largest is the default time limit of a request.
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TIMES = {
    "queue": "Time from arrival until a request joins a batch.",
    "encode": "Time to encode the sources that join together.",
    "time_to_first_token": "Time from arrival to the first token.",
    "time_per_output_token": "Mean time per token of a request after its first token.",
    "request": "Time from arrival to the answer of successful requests.",
    "align": "Time from arrival to the answer of alignments.",
}
# Of steps, several of which are recorded at once.
_STEPS = {
    "tfexport_decode_step_seconds": ("Time of a decoder step for all rows.", BUCKETS),
    "tfexport_step_batch_size": ("Rows of a decoder step.", ROWS),
}
_GAUGES = {
    "tfexport_requests_running": ("Requests that are being decoded.", "num_running"),
    "tfexport_requests_waiting": ("Requests that have not joined a batch.", "num_waiting"),
    "tfexport_slots": ("Maximum number of rows that are decoded at once.", "slots"),
    "tfexport_slots_used": ("Rows that are being decoded.", "num_slots_used"),
    "tfexport_replicas": ("Devices that the model is loaded on.", "num_replicas"),
    "tfexport_replicas_ready": ("Replicas that have not failed and make progress.", "num_replicas_ready"),
}


@dataclass(frozen=True)
class Measured(Collector):
    """The values of metrics at one time, of a process or of all processes of a server."""

    families: Sequence[Metric]
    failed_s: Mapping[str, float]  # total time of requests without an answer, by model

    def collect(self) -> Sequence[Metric]:
        """Return the metrics."""
        return self.families

    def total(self, metric: str, model: str) -> float:
        """Return the sum of a model's samples with this metric name."""
        samples = (sample for family in self.families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == metric and sample.labels["model"] == model)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, as the Accept header requests."""
        encode, media_type = exposition.choose_encoder(accept)
        return encode(self), media_type


def added(processes: Sequence[Measured]) -> Measured:
    """Add the samples of several processes that agree in name and labels."""
    families: dict[str, tuple[Metric, dict[object, Sample]]] = {}
    for family in itertools.chain.from_iterable(measured.families for measured in processes):
        _, samples = families.setdefault(family.name, (copy.copy(family), {}))
        for sample in family.samples:
            key, add = (sample.name, *sample.labels.items()), operator.add
            if sample.name.endswith("_created"):  # a time
                add = min
            value = add(samples[key].value, sample.value) if key in samples else sample.value
            samples[key] = sample._replace(value=value)
    for total, samples in families.values():
        total.samples = list(samples.values())
    failed_s = sum((Sums(measured.failed_s) for measured in processes), Sums[str]())
    return Measured([total for total, _ in families.values()], failed_s)


class Metrics(Collector):
    """The metrics of a server, labeled by model, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        outcomes = ("model", "outcome", "finish_reason")
        self.requests = Counter("tfexport_requests", "Ended requests.", outcomes, registry=registry)
        self.times = {
            name: Histogram(f"tfexport_{name}_seconds", help_text, ("model",), buckets=BUCKETS, registry=registry)
            for name, help_text in _TIMES.items()
        }
        self.tokens = {
            "source": Counter("tfexport_source_tokens", "Encoded tokens.", ("model",), registry=registry),
            "target": Counter("tfexport_target_tokens", "Generated tokens.", ("model",), registry=registry),
        }
        self._observers: dict[str, _Counts] = {}
        self.engines: Mapping[str, Engine] = {}  # whose gauges are read at each scrape
        registry.register(self)

    def observer(self, model: str) -> _Counts:
        """Return the observer for a model; the same object on every call."""
        if model not in self._observers:
            self._observers[model] = _Counts(self, model)
        return self._observers[model]

    def collect(self) -> Iterator[Metric]:
        """Yield histograms of steps, and gauges of the engines that have started."""
        for name, (help_text, _) in _STEPS.items():
            histogram = HistogramMetricFamily(name, help_text, labels=("model",))
            for model, observer in self._observers.items():
                histogram.add_metric((model,), *observer.steps[name].found())
            yield histogram
        started = {model: engine for model, engine in self.engines.items() if engine.state != "starting"}
        for name, (help_text, attribute) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=("model",))
            for model, engine in started.items():
                gauge.add_metric((model,), getattr(engine, attribute))
            yield gauge

    def measured(self) -> Measured:
        """Return the current values."""
        failed_s = {model: observer.failed_s for model, observer in self._observers.items()}
        return Measured(list(self.registry.collect()), failed_s)


class _Repeated:
    """A histogram of values that occur several times."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0
        self._lock = threading.Lock()  # each replica observes on its thread

    def observe(self, value: float, times: int) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    def found(self) -> tuple[list[tuple[str, float]], float]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum


class _Counts(Observer):
    def __init__(self, metrics: Metrics, model: str) -> None:
        self._requests = {
            (outcome, reason): metrics.requests.labels(model, outcome, reason)
            for outcome in get_args(Outcome)
            for reason in (*(get_args(FinishReason) if outcome == "ok" else ()), "")
        }
        self._times = {name: metric.labels(model) for name, metric in metrics.times.items()}
        self._tokens = {side: metric.labels(model) for side, metric in metrics.tokens.items()}
        self.steps = {name: _Repeated(bounds) for name, (_, bounds) in _STEPS.items()}
        self.failed_s = 0.0  # total time of requests without an answer

    def joined(self, waited_s: float, source_tokens: int) -> None:
        self._times["queue"].observe(waited_s)
        self._tokens["source"].inc(source_tokens)

    def encoded(self, took_s: float) -> None:
        self._times["encode"].observe(took_s)

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        times, rows = self.steps.values()
        times.observe(took_s / num_steps, num_steps)
        rows.observe(num_rows, num_steps)

    def began(self, took_s: float) -> None:
        self._times["time_to_first_token"].observe(took_s)

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        self._requests[outcome, reason].inc()
        self._tokens["target"].inc(num_tokens)
        if outcome == "ok":
            self._times["request"].observe(took_s)
        else:
            self.failed_s += took_s
        if per_token_s is not None:
            self._times["time_per_output_token"].observe(per_token_s)

    def aligned(self, took_s: float) -> None:
        self._requests["ok", ""].inc()
        self._times["align"].observe(took_s)
