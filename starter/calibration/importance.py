"""M5 · Which columns of a weight matrix matter most: run the model over texts and record the inputs of each matrix.

Column c of a matrix W multiplies number c of every input x: an error in it changes the output y = W x by error * x[c].
So the mean square of x[c] over a text says how much a squared error in that column costs:

    tokens --> model --> linear(matrix, x) --> ...         importance[c]  =  mean over all rows of  x[c]**2
                             |
                             +--> sums of x[c]**2

    importance = column_importance(model, [tokens, more_tokens])
    quantize(rows, QuantizationConfig(4, method="search"), importance["model.layers.0.mlp.down_proj.weight"])

A few hundred tokens are enough. In a small trained model the largest mean square of a layer was 2 to 26 times the
median.

Sources: Frantar et al. 2022, "GPTQ" (this is the diagonal of its Hessian 2 X X^T); Lin et al. 2023, "AWQ"
(which columns matter depends on the activations, not on the weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from operator import add, mul
from typing import Any

from starter.backend import Backend, Batch, Hidden, Matrix, Piece, Vector
from starter.errors import RequestError
from starter.model import Model


class WatchedBackend:
    """A wrapper of any backend that also sums the squares of each matrix's inputs, column by column."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[int, tuple[int, list[float]]] = {}  # by id(matrix): rows, sums of squares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def linear(self, matrix: Matrix, x: Hidden, bias: Vector | None = None) -> Hidden:
        """The product as the wrapped backend computes it; the inputs are recorded."""
        for row in self._backend.to_lists(x):
            rows, sums = self._seen.get(id(matrix), (0, [0.0] * len(row)))
            self._seen[id(matrix)] = rows + 1, list(map(add, sums, map(mul, row, row)))
        return self._backend.linear(matrix, x, bias)

    def mean_squares(self, matrix: Matrix) -> list[float]:
        """The mean square of each column's inputs so far, [columns]; empty if the matrix has multiplied nothing."""
        rows, sums = self._seen.get(id(matrix), (0, []))
        return [total / rows for total in sums]


def column_importance(model: Model, texts: Iterable[Sequence[int]]) -> dict[str, list[float]]:
    """The mean square of each column's inputs over the texts, by the matrix's name in the checkpoint. A matrix that
    multiplies nothing (an embedding that is not also the output matrix) is left out.

    A text is a sequence of tokens; if it is longer than the model's context, it is read in parts. The model is not
    changed. Takes as long as a prefill of all texts with the logits of every position. RequestError if there is no
    token at all, or one outside the vocabulary.
    """
    config, watched = model.config, WatchedBackend(model.backend)
    observed: Any = copy(model)  # the same weights
    observed.backend = watched
    parts = [list(text[start:start + config.max_context]) for text in texts
             for start in range(0, len(text), config.max_context)]
    if not parts:
        raise RequestError("a calibration needs at least one text of at least one token")
    for tokens in parts:
        if wrong := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise RequestError(f"token {wrong[0]} is outside the vocabulary; allowed: 0 to {config.vocab_size - 1}")
        whole = Piece(tokens, start=0, pages=(0,), wants_logits=len(tokens))  # so that the output matrix sees all of it
        batch = Batch.of([whole], page_size=len(tokens))
        observed.forward(batch, model.new_store(num_pages=1, page_size=len(tokens)))
    return {name: squares for names, matrix in model.matrices.items() for name in names
            if (squares := watched.mean_squares(matrix))}
