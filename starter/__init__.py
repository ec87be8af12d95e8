"""A mini LLM inference engine: KV cache, continuous batching, paged KV and quantization in standard-library Python.

    from starter import InferenceEngine, load_scenario

    scenario = load_scenario("fixtures/tiny_model.json")
    with InferenceEngine.from_scenario(scenario) as engine:
        print(engine.generate("a text", max_tokens=20, temperature=0.8).text)
        request_id = engine.submit([1, 2, 3], max_tokens=8)      # or tokens, and several at a time
        for event in engine.stream(request_id):
            print(event.token, event.text)

Reading order: errors, schema, reference, backend, model, kv_cache, sampling, sequences, scheduler, streams,
quantization, timeline, metrics, core, engine, numpy_backend, driver. What they build on is in base/, and the command
line in command/; neither need be read. Every other folder is optional.

Names are imported when first used (PEP 562), so that ``import starter`` costs next to nothing and
``python3 -m starter.schema`` runs its module once, not twice.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.version_info < (3, 10):  # noqa: UP036  # before any line that such a Python could not run
    sys.exit(f"Python 3.10 or newer is needed; this is {'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")

if TYPE_CHECKING:
    from .backend import Backend as Backend
    from .backend import load_backend as load_backend
    from .base.version import __version__ as __version__
    from .command.play import play as play
    from .command.play import tokens_of as tokens_of
    from .engine import InferenceEngine as InferenceEngine
    from .errors import BackendError as BackendError
    from .errors import CapacityError as CapacityError
    from .errors import DuplicateRequestError as DuplicateRequestError
    from .errors import EngineError as EngineError
    from .errors import MissingWingError as MissingWingError
    from .errors import OutOfPagesError as OutOfPagesError
    from .errors import PoolTooSmallError as PoolTooSmallError
    from .errors import QuantizationError as QuantizationError
    from .errors import QueueFullError as QueueFullError
    from .errors import RequestError as RequestError
    from .errors import SchemaError as SchemaError
    from .errors import StaleHandleError as StaleHandleError
    from .errors import StreamTimeoutError as StreamTimeoutError
    from .errors import UnknownRequestError as UnknownRequestError
    from .kv_cache import KVCacheManager as KVCacheManager
    from .kv_cache import KVHandle as KVHandle
    from .metrics import Metrics as Metrics
    from .quantization import QuantizedTensor as QuantizedTensor
    from .quantization import dequantize as dequantize
    from .quantization import quantize as quantize
    from .sampling import Choice as Choice
    from .sampling import Sampler as Sampler
    from .scheduler import ContinuousBatchScheduler as ContinuousBatchScheduler
    from .scheduler import Policy as Policy
    from .scheduler import ScheduleDecision as ScheduleDecision
    from .schema import EngineSettings as EngineSettings
    from .schema import ModelConfig as ModelConfig
    from .schema import QuantizationConfig as QuantizationConfig
    from .schema import Request as Request
    from .schema import SamplingParams as SamplingParams
    from .schema import Scenario as Scenario
    from .schema import TokenEvent as TokenEvent
    from .schema import load_scenario as load_scenario
    from .streams import Completion as Completion
    from .streams import RequestStatus as RequestStatus
    from .streams import Result as Result
    from .streams import TokenStream as TokenStream
    from .timeline import VirtualClock as VirtualClock


_HOME = {
    "base.version": "__version__",
    "errors": "BackendError CapacityError DuplicateRequestError EngineError MissingWingError "
              "OutOfPagesError PoolTooSmallError QuantizationError QueueFullError RequestError SchemaError "
              "StaleHandleError StreamTimeoutError UnknownRequestError",
    "schema": "EngineSettings ModelConfig QuantizationConfig Request SamplingParams Scenario TokenEvent "
              "load_scenario",
    "backend": "Backend load_backend",
    "kv_cache": "KVCacheManager KVHandle",
    "sampling": "Choice Sampler",
    "streams": "Completion RequestStatus Result TokenStream",
    "scheduler": "ContinuousBatchScheduler Policy ScheduleDecision",
    "quantization": "QuantizedTensor dequantize quantize",
    "timeline": "VirtualClock",
    "metrics": "Metrics",
    "engine": "InferenceEngine",
    "command.play": "play tokens_of",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
