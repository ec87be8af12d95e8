"""Every error that the engine raises on purpose. A message says what was given, what is allowed, and what to do.

All are of one family: a caller writes ``except EngineError``, and anything else is a bug. Where Python has a matching
built-in error, the class inherits from it, too: code that does not know this package catches a ``SchemaError`` as a
``ValueError``.

    EngineError
    +-- SchemaError (ValueError)        a file or a setting is malformed; ``.path`` says where
    +-- RequestError (ValueError)       a request is malformed
    |   +-- DuplicateRequestError       its id is taken
    |   +-- CapacityError               it can never fit, however long it waits
    |   +-- QueueFullError              too many requests wait already; try again later
    +-- UnknownRequestError (KeyError)  there is no request with this id
    +-- StreamTimeoutError (TimeoutError)  a stream brought no event in the time that its reader gave it
    +-- OutOfPagesError                 it does not fit *now*; try again when pages are free
    |   +-- PoolTooSmallError           and never will: it needs more pages than the pool has (a CapacityError, too)
    +-- StaleHandleError                a handle that was released, or that another manager gave out
    +-- QuantizationError (ValueError)  an unsupported format, or data that contradict their metadata
    +-- BackendError                    a backend is missing or failed
    |   +-- MissingWingError            an optional part of the project, such as a file reader, is not in this copy
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the family."""


class SchemaError(EngineError, ValueError):
    """Malformed data. ``path`` is a JSON pointer (RFC 6901) to the offending value; "" is the whole document."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)  # both, because unpickling calls __init__ with these arguments
        self.problem, self.path = message, path

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class RequestError(EngineError, ValueError):
    """A request that is malformed whatever the load: empty prompt, token outside the vocabulary, negative length."""


class DuplicateRequestError(RequestError):
    """The request id belongs to a live request, or to a finished one whose stream was not read to its end."""


class CapacityError(RequestError):
    """A request that could not be served even by an otherwise empty engine."""


class QueueFullError(RequestError):
    """As many requests wait as the settings allow (``max_waiting``). The request itself is valid."""


class UnknownRequestError(EngineError, KeyError):
    """No live request and no unread stream has this id."""

    def __str__(self) -> str:  # KeyError would print the quoted repr of the message
        return str(self.args[0]) if self.args else ""


class StreamTimeoutError(EngineError, TimeoutError):
    """No event within the reader's timeout. The request goes on, and nothing is lost."""


class OutOfPagesError(EngineError):
    """Not enough free pages at the moment. Every table and counter is as it was before the call."""


class PoolTooSmallError(CapacityError, OutOfPagesError):
    """An allocation of more pages than the whole pool has: it does not fit now, and never will."""


class StaleHandleError(EngineError):
    """A KV handle that was released, or that this manager did not give out."""


class QuantizationError(EngineError, ValueError):
    """Unsupported bits or group size, input that is not finite, or packed data that contradict their metadata."""


class BackendError(EngineError):
    """A backend that does not exist, is not installed, or failed while computing."""


class MissingWingError(BackendError):
    """The function is in an optional package that this copy of the project does not have."""
