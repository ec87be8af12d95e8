"""M6 · A process that computes for another: a child holds weights and pages, and answers requests from a pipe.

    parent: Worker ── (operation, arguments) ──▶ child: serve() ── calls ──▶ Shelves
                   ◀── (True, answer) or (False, exception) ──

``parallel.py`` decides what to ask of which process; the parent's own part is a ``Shelves``, too.

A child ends with ``Worker.close``, with the garbage collection of its Worker, and with its parent, however that ends,
because the pipe is closed then. It is started by a command line of its own, not by ``multiprocessing``, so no script
needs a ``__main__`` guard, and it works without a file to import, as in notebooks.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, Union

from starter.backend import Batch, Piece
from starter.errors import BackendError
from starter.kv_cache import KVStore
from starter.model import Model

Key = tuple[int, int, int, Union[str, None]]  # of a store: its number, num_pages, page_size, kv_quantization


class WorkerLost(BackendError):
    """A child has ended; what it held must be computed again."""


class Shelves:
    """The stores of one process by their keys, made when first used, and the operations on them."""

    alive = True  # unlike a ``Worker``, always

    def __init__(self, model: Model) -> None:
        self._model = model
        self.stores: dict[Key, KVStore] = {}

    def __str__(self) -> str:
        return "this process"

    def wait_until_ready(self) -> None:
        """This process always is."""

    def close(self) -> None:
        """There is no child to end."""

    def ask(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """As ``Worker.ask``, but the answer is available at once."""
        answer = getattr(self, name)(*arguments)
        return lambda: answer

    def store(self, key: Key) -> KVStore:
        """The store of this key."""
        if key not in self.stores:
            self.stores[key] = self._model.new_store(*key[1:])
        return self.stores[key]

    def forward(self, key: Key, pieces: Sequence[Piece]) -> list[array[float]]:
        """Compute pieces; the logits of those that want them."""
        rows = self._model.forward(Batch.of(pieces, page_size=key[2]), self.store(key))
        return [array("d", row) for row in rows]

    def pack(self, key: Key, pages: Sequence[int]) -> KVStore:
        """Copies of some pages, in a store of their own that can travel."""
        box = self._model.new_store(len(pages), *key[2:])
        for place, page in enumerate(pages):
            box.copy_page(page, place, self.store(key))
        return box

    def unpack(self, key: Key, pages: Sequence[int], box: KVStore) -> None:
        """Put packed pages into their places."""
        for place, page in enumerate(pages):
            self.store(key).copy_page(place, page, box)

    def copy(self, key: Key, source: int, target: int, origin: Key) -> None:
        """``KVStore.copy_page``."""
        self.store(key).copy_page(source, target, self.store(origin))

    def write(self, key: Key, page: int, offset: int, k: Sequence[float], v: Sequence[float]) -> None:
        """``KVStore.write``."""
        self.store(key).write(page, offset, k, v)

    def read(self, key: Key, page: int, offset: int) -> tuple[list[float], list[float]]:
        """``KVStore.read``."""
        return self.store(key).read(page, offset)

    def drop_tails(self, key: Key, pages: Iterable[int]) -> None:
        """``KVStore.drop_tail``, of several pages."""
        for page in pages:
            self.store(key).drop_tail(page)


# ------------------------------------------------------------------------------------------------ processes


class Worker:
    """A child process that holds a model, seen from the parent.

    The pipe belongs to one thread here, so that a KeyboardInterrupt, which goes to the main thread, never leaves half
    a message in it: the interrupted caller only misses an answer.
    """

    def __init__(self, name: str, model: Model) -> None:
        self._name = name
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        try:
            self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE)
        except OSError as error:
            raise BackendError(f"{name} could not be started: {error}") from error
        self._thread = ThreadPoolExecutor(1, name)
        self.close = weakref.finalize(self, _end, self._process, self._thread)  # also at the interpreter's exit
        self._started = self._thread.submit(self._exchange, model, Event())

    def __str__(self) -> str:
        state = f"runs as process {self._process.pid}" if self.alive else f"ended with code {self._process.returncode}"
        return f"{self._name} {state}"

    @property
    def alive(self) -> bool:
        """False once it was closed or found to have ended."""
        return self.close.alive

    def wait_until_ready(self) -> None:
        """BackendError unless the child has the model."""
        try:
            self._started.result()
        except Exception as error:
            self.close()
            raise BackendError(f"{self._name} could not be started: {error.__cause__ or error}") from error

    def ask(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Send one of the operations of ``Shelves``; what is returned waits for the answer. From any thread."""
        sent = Event()
        try:
            answer = self._thread.submit(self._exchange, (name, arguments), sent)
        except RuntimeError:  # the thread was shut down
            raise WorkerLost(str(self)) from None
        sent.wait()  # otherwise the thread might get no time while the caller computes
        return answer.result

    def _exchange(self, message: object, sent: Event) -> Any:
        """In the thread: send a message and receive its answer."""
        assert self._process.stdin and self._process.stdout
        try:
            pickle.dump(message, self._process.stdin, protocol=5)
            self._process.stdin.flush()
            sent.set()
            succeeded, answer = pickle.load(self._process.stdout)
        except Exception as error:
            self.close()
            raise WorkerLost(str(self)) from error
        finally:
            sent.set()
        if not succeeded:
            raise answer
        return answer


def _end(process: subprocess.Popen[bytes], thread: ThreadPoolExecutor) -> None:
    """End a child, which holds nothing that must be saved, and its pipe and thread."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdout, process.stdin)):
        with suppress(OSError):  # a message that it did not read any more
            pipe.close()
    thread.shutdown(wait=False)


def serve() -> None:
    """A child's whole life: receive the model, then answer message after message until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # printed text goes there, not between the answers
    shelves: Shelves | None = None
    with suppress(OSError):  # the parent is gone, and reads no answer
        while True:
            try:
                message = pickle.load(sys.stdin.buffer)
                if shelves is None:
                    shelves, answer = Shelves(message), None
                else:
                    answer = getattr(shelves, message[0])(*message[1])
                result = True, answer
            except EOFError:  # the pipe is closed
                break
            except Exception as error:
                result = False, portable(error)
            pickle.dump(result, answers, protocol=5)
            answers.flush()
    os._exit(0)  # without another attempt to flush the pipe


def portable(error: Exception) -> Exception:
    """The error itself if it can be pickled, else a BackendError with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BackendError(f"{type(error).__name__}: {error}")
    return error
