"""Every error the engine raises on purpose: what was given, what is allowed, what to do.

One family, so that a caller can write ``except EngineError`` and know that anything else is a bug.
Where Python has a matching built-in error the class inherits from it too: code that has never heard
of this package still catches a ``SchemaError`` as a ``ValueError``.

    EngineError
    +-- SchemaError (ValueError)        a file or a setting is malformed; ``.path`` says where
    +-- RequestError (ValueError)       a request is malformed
    |   +-- DuplicateRequestError       its id is taken
    |   +-- CapacityError               it can never fit, however long it waits
    |   +-- QueueFullError              too many requests wait already; try again later
    +-- UnknownRequestError (KeyError)  nobody knows this id
    +-- OutOfPagesError                 it does not fit *now*; try again when pages are free
    |   +-- PoolTooSmallError           nor ever: more pages than the pool has (a CapacityError, too)
    +-- StaleHandleError                a handle that was released, or that another manager gave out
    +-- QuantizationError (ValueError)  an unsupported format, or data that contradict their metadata
    +-- BackendError                    a backend is missing or failed
    |   +-- MissingWingError            a part of the project that was taken off, such as a backend or a file reader
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the family."""


class SchemaError(EngineError, ValueError):
    """Malformed data. ``path`` is a JSON pointer (RFC 6901) to the offending value; "" is the whole document."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)  # as they are: what is unpickled is made anew from them
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
    """As many requests wait as the settings allow (``max_waiting``). Nothing is wrong with this one."""


class UnknownRequestError(EngineError, KeyError):
    """No live request and no unread stream has this id."""

    def __str__(self) -> str:  # KeyError would print the quoted repr of the message
        return str(self.args[0]) if self.args else ""


class OutOfPagesError(EngineError):
    """Not enough free pages at the moment. Whoever raises it has left every table and counter unchanged."""


class PoolTooSmallError(CapacityError, OutOfPagesError):
    """An allocation of more pages than the whole pool has: it does not fit now, and never will."""


class StaleHandleError(EngineError):
    """A KV handle after its release, or one that this manager never gave out."""


class QuantizationError(EngineError, ValueError):
    """Unsupported bits or group size, input that is not finite, or packed data that contradict their metadata."""


class BackendError(EngineError):
    """A backend that does not exist, is not installed, or failed while computing."""


class MissingWingError(BackendError):
    """What was asked for is in a package that this copy of the project does not have."""
