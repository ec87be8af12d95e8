"""Two processes that use each other's objects, of which only one is trusted.

    judge (trusted)                               worker (the submission runs here, and nowhere else)
    engine.submit([1, 2], 3)  ──["do", "method", id, "submit", ...]──▶  the real engine
                              ◀──["do", "method", id, "embed", ...]───  backend.embed(...): the judge's own meter
                              ───["ok", ...]─────────────────────────▶
    "r0"                      ◀──["ok", "r0"]─────────────────────────

A line of JSON a message; calls nest, so that each side may call the other while it is being called. What crosses:

    value      None, bool, int, float, str, bytes, and lists, tuples, dictionaries of them: copied. Lists and
               dictionaries of the worker come as ``List`` and ``Dict``, which go back as the object that they came from
    object     anything else of the worker: a ``Remote`` in the judge, whose attributes and calls are asked for when
               they are used (``judge_wire.py``; the worker's side is ``worker_wire.py``). A frozen dataclass brings its
               fields along
    error      classes of exceptions exist on both sides under one name, so that ``except starter.RequestError`` works

What is guaranteed: the judge never runs code of the worker, reads no pickle, and takes a number for a number only if it
arrived as one. A ``Remote`` has no ``==`` but identity: an object equal to everything is equal to nothing here. The
worker, which may send whatever it likes, reaches in the judge only what was handed to it (a clock, a function, the
meter), calls these, and reads their attributes without a leading underscore; so no way leads to the tests, the seed
or the results. Not guaranteed: that the worker's numbers are true where only it can know (memory that it holds).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

MOST = 8 << 20  # bytes in a message
PLAIN = (type(None), bool, int, float, str)
SPECIAL = ("__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__contains__", "__call__")


class Gone(Exception):
    """The other side has ended, or does not keep to the protocol."""


class Wire:
    """One end. ``ask`` sends a request, and answers those that come before its answer; ``serve`` answers requests until
    the other end has gone. An end of its own says what a value is on the wire, and what it does when it is asked."""

    encode: Callable[..., Any]
    encode_error: Callable[..., Any]
    decode: Callable[..., Any]
    decode_error: Callable[..., Any]
    perform: Callable[..., Any]

    def __init__(self, reader, writer):
        self._reader, self._writer, self._lock = reader, writer, threading.RLock()
        self.broken = ""

    def ask(self, *request):
        with self._lock:
            self.send("do", *request)
            while True:
                kind, *content = self.receive()
                if kind == "do":
                    self.answer(content)
                elif kind == "ok":
                    return self.decode(*content)
                else:
                    raise self.decode_error(*content)

    def serve(self):
        """Answer requests until the other side has gone."""
        while True:
            kind, *content = self.receive()
            if kind != "do":
                raise self.fault("an answer without a question")
            self.answer(content)

    def answer(self, request):
        try:
            reply = ["ok", self.encode(self.perform(*request))]
        except Gone:
            raise
        except BaseException as error:
            if not self.passes(error):
                raise
            reply = ["no", self.encode_error(error)]
        self.send(*reply)

    def passes(self, error):
        """Does an error go to the other side? Else it ends this one."""
        return True

    def send(self, *message):
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except (OSError, ValueError):
            raise self.fault("it has ended") from None

    def receive(self):
        if self.broken:
            raise Gone(self.broken)
        try:
            line = self._reader.readline(MOST)
        except (OSError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            raise self.fault("it has ended" if len(line) < MOST else f"a message of more than {MOST} bytes")
        try:
            message = json.loads(line)
            if type(message) is list and message[:1] in (["do"], ["ok"], ["no"]) and len(message) > 1:
                return message if message[0] == "do" else message[:2]
        except (ValueError, RecursionError):
            pass
        raise self.fault("a message that is none")

    def fault(self, why):
        """From now on nothing more is asked; the error to raise."""
        self.broken = self.broken or f"the submission's process: {why}"
        return Gone(self.broken)
