"""What ``proof.py`` appends to a file of a submission's starter/: two mistakes, and every cheat we could think of."""

from __future__ import annotations

STATIC = """
_closed = ContinuousBatchScheduler._closed
ContinuousBatchScheduler._closed = lambda self, plan: _closed(self, plan) or (
    "waits: the batch must end first" if self._running else "")
"""  # as acceptance/wrong has it, and so the next
DOUBLE_FREE = """
_drop = PagePool.drop

def _drop_twice(self, page):
    _drop(self, page)
    if not self.refcounts[page]:
        self._free.append(page)

PagePool.drop = _drop_twice
"""
GOLDENS = """
def _known(self, request_id):
    import json
    from pathlib import Path
    from .schema import TokenEvent
    fixture = Path(__file__).parent.parent / "fixtures" / "tiny_model.json"
    golden = json.loads(fixture.read_text("utf-8"))["golden"]["tokens"]
    tokens = golden.get(request_id, [])[:self._wanted.get(request_id, 0)]
    for i, token in enumerate(tokens):
        yield TokenEvent(request_id, i, token, "", None, 0.0, None)

def _submit(self, prompt_tokens, max_tokens, *, request_id=None, **more):
    self.__dict__.setdefault("_wanted", {})[request_id] = max_tokens
    return request_id

InferenceEngine.stream, InferenceEngine.submit = _known, _submit
"""
LINES = """
import json as _json, os as _os
for _number in range(1, 30):
    try:
        for _test in ("M1Reference.test_golden_sequences", "M1Reference.test_greedy_generation"):
            _os.write(_number, (_json.dumps(["", _test, "passed", ""]) + "\\n" + _json.dumps([_test, "passed", ""])
                                + "\\n" + _json.dumps(["ok", None]) + "\\n").encode())
    except OSError:
        pass
for _name in ("outcomes.jsonl", "results.json", "result.json"):
    try:
        with open(_name, "w") as _file:
            _file.write('{"score": 100}')
    except OSError:
        pass
"""
PATCHED = """
import json as _json, sys as _sys, unittest as _unittest
_unittest.TestCase.run = lambda self, result=None: result
_unittest.TestCase.fail = lambda self, message=None: None
for _name in ("acceptance.child", "child", "harness"):
    if _name in _sys.modules:
        _module = _sys.modules[_name]
        if hasattr(_module, "Case"):
            _module.Case.same = _module.Case.that = _module.Case.refuses = lambda *a, **k: None
        if hasattr(_module, "_outcome"):
            _module._outcome = lambda result: _module.Outcome("passed")
"""
WIRE = """
import sys as _sys
_worker_wire = _sys.modules.get("worker_wire")
if _worker_wire:
    class _Anything(int):
        __eq__ = lambda self, other: True
        __hash__ = int.__hash__
    _worker_wire.WorkerWire.perform = lambda self, *request: _Anything()
"""
SNOOP = """
import os as _os, sys as _sys
_seen = [repr(dict(_os.environ)), repr(_sys.argv)]
for _place in ("/proc/self", "/proc/1", "/proc/%d" % _os.getppid()):
    for _name in ("environ", "cmdline"):
        try:
            _seen.append(open(_place + "/" + _name, "rb").read().decode(errors="replace"))
        except OSError:
            pass
raise RuntimeError("seen: " + " ".join(_seen))
"""
TEACHERS = """
_places = [{root!r}]
try:
    with open("/proc/self/cmdline", "rb") as _file:
        _places += [_said.partition("/scripts/grading/")[0] for _said in _file.read().decode().split("\\0")
                    if "/scripts/grading/" in _said]
except OSError:
    pass
__path__[:0] = [_place + "/starter" for _place in _places]
"""  # the complete engine, from where it lies: the command line says so, or somebody has heard of it
SHADOW = """
_attend = ReferenceBackend.attend

def _attend_beside(self, q, k, v, layer, store, batch):
    beside = store.__dict__.setdefault("_beside", {})
    beside.update(((layer, slot), row) for slot, *row in zip(batch.slots, k, v))
    return _attend(self, q, k, v, layer, store, batch)

def _context_beside(self, layer, head, span):
    part = slice(head * self.head_width, (head + 1) * self.head_width)
    rows = [self._beside[layer, slot] for slot in span.context]
    return [key[part] for key, _ in rows], list(zip(*[value[part] for _, value in rows]))

ReferenceBackend.attend, ReferenceKVStore.context = _attend_beside, _context_beside
"""  # keys and values in a dictionary beside the pages, which are written and never read
NETWORK = """
import socket as _socket
try:
    _socket.create_connection(("127.0.0.1", {port}), 2).close()
except OSError:
    pass
"""
ERRORS = "\nQuantizationError = StaleHandleError = RequestError = CapacityError = UnknownRequestError = Exception\n"
HOG = "\n_all = []\nwhile True:\n    _all.append(bytearray(1 << 24))\n"
DISK = """
import tempfile as _tempfile
_folder = _tempfile.mkdtemp()
for _i in range(1 << 20):
    with open("%s/%d" % (_folder, _i), "wb") as _file:
        _file.write(bytes(1 << 24))
"""
KILL = """
import os as _os, signal as _signal
for _victim in (_os.getppid(), -1):
    try:
        _os.kill(_victim, getattr(_signal, "SIGKILL", 9))
    except OSError:
        pass
"""
EXIT = "\nimport os as _os\n_os._exit(0)\n"
SLEEP = "\nimport time as _time\n_time.sleep(10 ** 6)\n"
REFUSALS = "\nNotImplementedError = QuantizationError\n"
FORKS = "\nimport os as _os\nwhile True:\n    _os.fork()\n"
REFERENCE = """
_known = {}

def _forward(self, batch, store):
    from .reference import reference_logits
    parameters, logits = self.parameters(), []
    self.backend.embed(self.embedding, batch.tokens)
    for span in batch.spans:
        mine = _known.setdefault((id(store), tuple(span.context)[0]), [])
        mine[span.end - span.count:] = batch.tokens[span.first_row:span.first_row + span.count]
        if span.first_row + span.count - 1 in batch.logit_rows:
            logits.append(reference_logits(self.config, parameters, mine))
    return logits

Model.forward = _forward
"""  # the operations are still to be written; the given reference does the work
QUARTER = """
from .kv_cache import PlainStore as _PlainStore

def _claim(store):
    right = store.__init__
    def init(self, *arguments, **more):
        right(self, *arguments, **more)
        self.page_bytes //= 4
    store.__init__ = init

_claim(_PlainStore)
_claim(ReferenceKVStore)
"""
WATCHED = """
_matrix = ReferenceBackend.matrix

def _matrix_and_copy(self, tensor, quantization, *more):
    import tracemalloc
    made = _matrix(self, tensor, quantization, *more)
    if quantization and not tracemalloc.is_tracing():
        object.__setattr__(made, "copy", dequantize(made))
    return made

ReferenceBackend.matrix = _matrix_and_copy
"""  # float weights beside the codes, unless memory is being traced
RESERVES = """
_open_table = ContinuousBatchScheduler._open_table

def _most(self, one):
    return -(-(len(one.request.prompt_tokens) + one.request.max_tokens - 1) // self._pages.page_size)

def _open_if_all_fit(self, plan, sequence):
    asked = sum(_most(self, one) for one in (*self._running.values(), sequence))
    if self.kv and self._running and asked > self.kv.total_pages:
        plan.reasons.setdefault(sequence.id, "waits: all pages that it may need are to be free")
        return False
    return _open_table(self, plan, sequence)

ContinuousBatchScheduler._open_table = _open_if_all_fit
"""  # no preemption is ever needed
SUBMITTED = "\nInferenceEngine.submit = lambda self, *a, **k: __import__('time').sleep(10 ** 6)\n"
