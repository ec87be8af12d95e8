"""Whatever is given to a public name in place of what it wants: it is used, or one clear sentence refuses it."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import starter
from starter.base.fault_kinds import MemoryCut
from starter.errors import EngineError, RequestError, SchemaError, UnknownRequestError
from tests.paths import FIXTURE
from tests.support import make_engine
from tests.wings import needs_wing

Arguments = dict[str, object]
SURPRISES: tuple[object, ...] = (
    None, True, -1, 0, 2**70, 1.5, math.nan, math.inf, "", "x", "\0", "\ud800", b"x", [], [1], [None], ["a"], [[]],
    (1, 2), {}, {"a": 1}, {1: "a"}, {1}, range(3), object, object(), Path("nowhere"), MemoryCut(0, 1, 1),
    starter.SamplingParams(), starter.QuantizationConfig())


@cache
def scenario() -> starter.Scenario:
    return starter.load_scenario(FIXTURE)


def of_an_engine(method: str, **arguments: object) -> object:
    """A method of an engine that serves a request "r" and was not asked for anything else."""
    engine = make_engine()
    engine.submit([1, 2], 3, request_id="r")
    result = getattr(engine, method)(**arguments)
    if isinstance(result, Iterator):
        next(result)
    engine.run()
    engine.kv.check()
    return result


def of_a_scheduler(method: str, **arguments: object) -> object:
    scheduler = starter.ContinuousBatchScheduler()
    scheduler.submit(starter.Request("r", (1, 2), 3))
    return getattr(scheduler, method)(**arguments)


def new_scheduler(**arguments: object) -> None:
    """Make one, and use it."""
    scheduler = starter.ContinuousBatchScheduler(**arguments)
    scheduler.submit(starter.Request("r", (1, 2), 3))
    scheduler.step(4)


def of_a_manager(method: str, **arguments: object) -> object:
    """A method of a manager with one table, of one token; pages are conserved whatever it says."""
    kv = starter.KVCacheManager(num_pages=4, page_size=2, width=1)
    handle = kv.allocate("r", 1)
    kv.append(handle, [1.0], [2.0])
    try:
        return getattr(kv, method)(**{"handle": handle, **arguments} if method != "allocate" else arguments)
    finally:
        kv.check()


Call = tuple[str, Callable[..., object], Arguments, type[Exception]]  # its name; good arguments; what refuses others
CALLS: tuple[Call, ...] = (
    ("load_scenario", starter.load_scenario, {"path": FIXTURE}, SchemaError),
    ("from_scenario", starter.InferenceEngine.from_scenario,
     {"scenario": scenario, "quantization": None, "weights_seed": 1, "clock": None}, EngineError),
    ("settings", lambda **given: scenario().engine.override(given),
     {"page_size": 4, "num_pages": 9, "kv_budget_bytes": 9, "budget_tokens": 9, "max_running": 2, "max_waiting": 3,
      "batching": "static", "policy": "fcfs", "preemption": "swap", "host_pages": 2, "prefix_sharing": True,
      "use_cache": True, "seed": 1}, SchemaError),
    ("submit", partial(of_an_engine, "submit"),
     {"prompt_tokens": [1], "max_tokens": 2, "request_id": "new", "sampling": None, "priority": 0, "stop_tokens": [],
      "cache_salt": None}, RequestError),
    ("stream", partial(of_an_engine, "stream"), {"request_id": "r"}, UnknownRequestError),
    ("poll", partial(of_an_engine, "poll"), {"request_id": "r"}, UnknownRequestError),
    ("status", partial(of_an_engine, "status"), {"request_id": "r"}, UnknownRequestError),
    ("cancel", partial(of_an_engine, "cancel"), {"request_id": "r"}, UnknownRequestError),
    ("step", partial(of_an_engine, "step"), {"budget_tokens": 2}, RequestError),
    ("generate", partial(of_an_engine, "generate"), {"prompts": [[1]], "max_tokens": 2, "sampling": None},
     RequestError),
    ("scheduler", new_scheduler,
     {"max_running": 2, "policy": "fcfs", "kv": None, "batching": "none", "preemption": "swap"}, RequestError),
    ("scheduler.submit", partial(of_a_scheduler, "submit"), {"request": starter.Request("s", (1,), 2)}, RequestError),
    ("scheduler.step", partial(of_a_scheduler, "step"), {"budget_tokens": 2}, RequestError),
    ("scheduler.cancel", partial(of_a_scheduler, "cancel"), {"request_id": "r"}, UnknownRequestError),
    ("scheduler.finish", lambda request_id: of_a_scheduler("finish", request_id=request_id, reason="stop"),
     {"request_id": "r"}, UnknownRequestError),
    ("kv.allocate", partial(of_a_manager, "allocate"), {"request_id": "s", "token_count": 2}, RequestError),
    ("kv.append", partial(of_a_manager, "append"), {"key": [1.0], "value": [2.0]}, RequestError),
    ("kv.read", partial(of_a_manager, "read"), {"position": 0}, IndexError),
    ("kv.fork", partial(of_a_manager, "fork"), {"request_id": "s"}, RequestError),
    *((f"kv.{method}", partial(of_a_manager, method), {"handle": None}, starter.StaleHandleError)
      for method in ("length", "pages", "release")),
    ("quantize", starter.quantize, {"rows": [[1.0]], "config": starter.QuantizationConfig()},
     starter.QuantizationError),
    ("dequantize", starter.dequantize, {"q": None}, starter.QuantizationError),
    ("Request", starter.Request,
     {"request_id": "r", "prompt_tokens": [1], "max_tokens": 3, "arrival": 0.0, "priority": 0,
      "sampling": starter.SamplingParams(), "stop_tokens": (), "cache_salt": None}, RequestError),
    ("SamplingParams", starter.SamplingParams,
     {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "logit_bias": (),
      "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
      "ignore_eos": False, "stop": (), "logprobs": None, "n": 1}, RequestError),
    ("QuantizationConfig", starter.QuantizationConfig, {"bits": 8, "group_size": 32, "symmetric": True},
     starter.QuantizationError),
)


class WrongTypes(unittest.TestCase):
    def check_call(self, name: str, call: Callable[..., object], good: Arguments, error: type[Exception]) -> None:
        """Nothing but the call's own class of error, with a sentence that says what was wanted."""
        good = {key: value() if value is scenario else value for key, value in good.items()}
        for argument in good:
            for surprise in SURPRISES:
                with self.subTest(call=name, argument=argument, surprise=surprise):
                    try:
                        call(**{**good, argument: surprise})
                    except error as refusal:
                        self.assertGreater(len(str(refusal)), 15)

    def test_every_argument_of_every_public_call(self) -> None:
        for call in CALLS:
            self.check_call(*call)

    @needs_wing("checkpoints")
    def test_from_checkpoint(self) -> None:
        self.check_call("from_checkpoint", starter.InferenceEngine.from_checkpoint, {"path": "nowhere"}, SchemaError)

    @needs_wing("workloads")
    def test_inject(self) -> None:
        self.check_call("inject", partial(of_an_engine, "inject"), {"faults": []}, RequestError)

    def test_refused(self) -> None:
        """What would otherwise be taken for something else, or for nothing."""
        engine, from_scenario = make_engine(), starter.InferenceEngine.from_scenario
        for call, words in (
                (lambda: from_scenario("path"), "expected a Scenario, as load_scenario"),
                (lambda: from_scenario(scenario(), weights_seed=True), "/weights_seed: expected an integer"),
                (lambda: from_scenario(scenario(), weights_seed=-1), "/weights_seed: must be from 0"),
                (lambda: from_scenario(scenario(), clock=0), "/clock: expected a function that returns"),
                (lambda: starter.InferenceEngine.from_checkpoint(None), "path of a model file or of its folder"),
                (lambda: engine.submit([1], 2, sampling=0), "sampling must be a SamplingParams, not 0"),
                (lambda: engine.generate(None, 3), "or a list of prompts, each a list of tokens, not null"),
                (lambda: engine.generate(b"ab", 3), "expected a text, a list of texts"),
                (lambda: engine.inject([5]), "expected a list of faults"),
                (lambda: starter.SamplingParams(stop=5), "stop must be strings that are not empty, not 5"),
                (lambda: starter.SamplingParams(stop={"a": 1}), "stop must be strings"),
                (lambda: starter.SamplingParams(logit_bias=[1]), "logit_bias must be a mapping from token to number"),
                (lambda: starter.Request("r", [1], 2, cache_salt=""), "cache_salt must be a string that is not empty"),
                (lambda: new_scheduler(kv=0), "kv must be a KVCacheManager or None, not 0"),
                (lambda: new_scheduler(policy=None), "policy must be one of 'fcfs', ")):
            with self.subTest(words), self.assertRaisesRegex(EngineError, words):
                call()
        self.assertEqual((engine.active, engine.timeline.recorded), ((), 2))  # the header, and the refusal of submit


if __name__ == "__main__":
    unittest.main()
