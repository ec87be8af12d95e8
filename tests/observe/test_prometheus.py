"""What a Prometheus server would scrape: the text format, vLLM's names, and every number from the timeline."""

from __future__ import annotations

import re
import unittest
from collections import Counter, defaultdict
from itertools import pairwise
from math import inf

from starter.base.statistics import Histogram
from starter.metrics import Metrics
from starter.observe.prometheus import Family, exposition, to_prometheus
from starter.observe.timeline_file import read_timeline
from starter.timeline import Event
from tests.extras import needs
from tests.paths import TIMELINE
from tests.timelines import full_engine, random_run

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
VLLM = {  # as vLLM's servers export them
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc",
    "counter": "num_preemptions_total prompt_tokens_total generation_tokens_total prefix_cache_queries_total "
               "prefix_cache_hits_total request_success_total",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
                 "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds"}
Samples = dict[str, dict[str, float]]  # name -> value of the label that is not the model's -> number


def parse(text: str) -> tuple[dict[str, str], Samples]:
    """The kind of each family, and the samples; a ValueError for a line that the format does not allow."""
    kinds: dict[str, str] = {}
    samples: Samples = defaultdict(dict)
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError(line)
        labels = dict(LABEL.findall(match[2]))
        labels.pop("model_name")
        samples[match[1]][next(iter(labels.values()), "")] = inf if match[3] == "+Inf" else float(match[3])
    return kinds, samples


def expected(events: list[Event]) -> Samples:
    """The numbers, worked out once more from the events."""
    submits = {event["request"]: event for event in events if event["event"] == "submit"}
    of: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        of[event["event"]].append(event)
    times: dict[str, list[float]] = defaultdict(list)
    for event in of["token"]:
        times[event["request"]].append(event["time"])
    admissions: dict[str, float] = {}
    for event in of["step"]:
        for name in event["admitted"]:
            if name in submits:
                admissions.setdefault(name, event["time"])
    ends = {event["request"]: event for event in of["finish"]}
    gaps = [later - sooner for one in times.values() for sooner, later in pairwise(one)]
    durations = {
        "time_to_first_token_seconds": [times[name][0] - submits[name]["time"] for name in submits if times[name]],
        "inter_token_latency_seconds": gaps, "time_per_output_token_seconds": gaps,
        "request_time_per_output_token_seconds": [(times[name][-1] - times[name][0]) / (len(times[name]) - 1)
                                                  for name in ends if len(times[name]) > 1],
        "e2e_request_latency_seconds": [ends[name]["time"] - submits[name]["time"] for name in submits if name in ends],
        "request_queue_time_seconds": [time - submits[name]["time"] for name, time in admissions.items()]}
    reasons = Counter(event["reason"] for name, event in ends.items() if name in submits)
    sharing = events[0]["settings"]["prefix_sharing"]
    samples: Samples = {
        "num_requests_running": {"": 0}, "num_requests_waiting": {"": 0},
        "kv_cache_usage_perc": {"": of["pages"][-1]["used_pages"] / events[0]["num_pages"]},
        "num_preemptions_total": {"": sum(len(event["preempted"]) for event in of["step"])},
        "prompt_tokens_total": {"": sum(len(submits[name]["prompt_tokens"]) for name in submits if times[name])},
        "generation_tokens_total": {"": len(of["token"])},
        "prefix_cache_queries_total": {"": sum(len(submits[name]["prompt_tokens"]) for name in admissions) * sharing},
        "prefix_cache_hits_total": {"": sum(sum(event["found"].values()) for event in of["step"])},
        "request_success_total": {"stop": reasons["stop"], "length": reasons["length"], "abort": reasons["cancelled"],
                                  "error": reasons["error"]}}
    for name, seconds in durations.items():
        samples[f"{name}_count"] = {"": len(seconds)}
        samples[f"{name}_sum"] = {"": sum(seconds)}
        for bound in (0.5, 1.0, 2.5, 20.0):
            samples.setdefault(f"{name}_bucket", {})[str(bound)] = sum(one <= bound for one in seconds)
    return samples


class NumbersTest(unittest.TestCase):
    def test_every_number_comes_from_the_timeline(self) -> None:
        for number, events in enumerate((read_timeline(TIMELINE), list(full_engine().timeline), random_run(6001))):
            kinds, samples = parse(to_prometheus(Metrics.of(events)))
            self.assertEqual(kinds, {f"vllm:{name}": kind for kind, names in VLLM.items() for name in names.split()})
            for name, wanted in expected(events).items():
                with self.subTest(run=number, name=name):
                    got = samples[f"vllm:{name}"]
                    for label in wanted.keys() & got.keys():
                        self.assertAlmostEqual(got[label], wanted[label], 9)
                    self.assertTrue(wanted.keys() & got.keys())

    def test_the_engines_are_those_of_its_timeline(self) -> None:
        engine = full_engine()
        self.assertEqual(to_prometheus(engine.metrics()), to_prometheus(Metrics.of(engine.timeline)))


class FormatTest(unittest.TestCase):
    def test_a_whole_text(self) -> None:
        text = exposition("p:", {"model_name": "m"}, (
            Family("pages", "gauge", "Now.", 0.5), Family("ends_total", "counter", "Ends.", {"stop": 2}, "why"),
            Family("wait", "histogram", "Waits.", Histogram((0.5, 2.0, None), (1, 1, 4), 9.25))))
        self.assertEqual(text, """\
# HELP p:pages Now.
# TYPE p:pages gauge
p:pages{model_name="m"} 0.5
# HELP p:ends_total Ends.
# TYPE p:ends_total counter
p:ends_total{model_name="m",why="stop"} 2
# HELP p:wait Waits.
# TYPE p:wait histogram
p:wait_bucket{model_name="m",le="0.5"} 1
p:wait_bucket{model_name="m",le="2.0"} 1
p:wait_bucket{model_name="m",le="+Inf"} 4
p:wait_sum{model_name="m"} 9.25
p:wait_count{model_name="m"} 4
""")

    def test_any_name_of_a_model_is_escaped(self) -> None:
        for name, written in (('a"b', r'a\"b'), ("a\\n", r"a\\n"), ("a\nb", r"a\nb"), ("世", "世"), ("\ud800", "?")):
            with self.subTest(name=name):
                self.assertEqual(exposition("", {"l": name}, [Family("x", "gauge", "y", 1)]).splitlines()[-1],
                                 f'x{{l="{written}"}} 1')

    def test_another_prefix(self) -> None:
        self.assertIn('\nmine_num_requests_running{model_name=""} 0\n', to_prometheus(Metrics.of([]), "mine_"))


@needs("prometheus", "prometheus_client")
class ClientTest(unittest.TestCase):
    def test_prometheus_own_client_reads_the_same(self) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        events = [{**event} for event in full_engine().timeline]
        events[0]["scenario"] = 'a "strange"\\name\nof a model'
        metrics = Metrics.of(events)
        families = {family.name: family for family in text_string_to_metric_families(to_prometheus(metrics))}
        self.assertEqual({name: family.type for name, family in families.items()}, {
            f"vllm:{name.removesuffix('_total')}": kind for kind, names in VLLM.items() for name in names.split()})
        _, samples = parse(to_prometheus(metrics))
        for family in families.values():
            self.assertTrue(family.documentation)
            for sample in family.samples:
                self.assertEqual(sample.labels["model_name"], 'a "strange"\\name\nof a model')
                label = next((value for key, value in sample.labels.items() if key != "model_name"), "")
                self.assertEqual(sample.value, samples[sample.name][label])
        self.assertEqual(sum(len(family.samples) for family in families.values()), sum(map(len, samples.values())))
        self.assertEqual(families["vllm:generation_tokens"].samples[0].value, metrics.output_tokens)


if __name__ == "__main__":
    unittest.main()
