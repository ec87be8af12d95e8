"""M1 · The decoder, written once over a backend's operations, with keys and values in pages.

``reference.py`` is the same network without a cache; read that first. Here the hidden state x holds one row for
each token of a *batch* (``backend.Batch``), and attention reads earlier positions from the pages of each row's request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from .backend import Backend, Batch, Matrix, Piece, Vector, load_backend
from .base.kv_bounds import kv_bounds
from .base.tokenizer import CharacterTokenizer, Tokenizer
from .base.weights import (
    StoredWeights,
    Tensor,
    Weights,
    check_digest,
    check_weights,
    seeded_weights,
    weights_digest,
)
from .base.wings import wing
from .errors import QuantizationError, RequestError
from .kv_cache import KVStore
from .quantization import QuantizedTensor, stacked_codes
from .reference import reference_generate as reference_generate
from .schema import (
    TOKENIZER_SHAPE,
    WEIGHTS_SHAPE,
    ModelConfig,
    QuantizationConfig,
    SafetensorsWeights,
    Scenario,
    SeededWeights,
)


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, in the backend's form."""

    attention_norm: Vector
    qkv: Matrix
    qkv_bias: Vector | None  # None where the model has none; likewise the norms
    query_norm: Vector | None
    key_norm: Vector | None
    output: Matrix
    ffn_norm: Vector
    gate_up: Matrix
    down: Matrix


# Field of Layer -> names in a checkpoint, after "model.layers.<i>.". Matrices that multiply the same vector are stacked
# into one: one product instead of three, and the numbers of every row are the same.
LAYER_NAMES = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "query_norm": ("self_attn.q_norm.weight",),
    "key_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


Quantizer = Callable[[Sequence[Sequence[float]]], QuantizedTensor]  # of a matrix, given as rows: the caller's own


class Model:
    """A decoder with its weights on a backend. ``quantization``, a config or the caller's own quantizer, applies to
    every matrix; gains and biases stay float. A matrix that is quantized already keeps its codes.

    ``importance``, by tensor name: how much each column counts when the grids of that tensor are chosen
    (``calibration/importance.py`` measures it). Stacked tensors share their input, so the first one's applies to all.
    """

    def __init__(self, config: ModelConfig, weights: StoredWeights, backend: Backend,
                 quantization: QuantizationConfig | Quantizer | None = None,
                 importance: Mapping[str, Sequence[float]] | None = None) -> None:
        check_weights(config, weights)
        self.config, self.backend = config, backend
        self._quantizer = quantization if callable(quantization) else None
        self.quantization = None if callable(quantization) else quantization
        self._importance = importance or {}
        backend.expect(weights, self.quantization)
        self._loaded: dict[tuple[str, ...], Any] = {}  # by names: one tensor, or several stacked, in the backend's form
        self._rows = {name: tensor.shape[0] for name, tensor in weights.items()}
        self.embedding = self._load(weights, "model.embed_tokens.weight")
        self.final_norm = self._load(weights, "model.norm.weight")
        self.head = self.embedding if config.tied_output else self._load(weights, "lm_head.weight")
        self.layers = [
            Layer(**{field: self._load(weights, *(f"model.layers.{i}.{name}" for name in names))
                     for field, names in LAYER_NAMES.items()})
            for i in range(config.layers)]
        self._frequencies = config.rope_frequencies
        self.kv_bounds = kv_bounds(config, weights)

    def _load(self, weights: StoredWeights, *names: str) -> Any:
        if names[0] not in weights:  # this architecture has no such tensor: check_weights found all that it has
            return None
        tensor = stacked([weights[name] for name in names])
        if isinstance(tensor, Tensor) and len(tensor.shape) == 1:
            loaded = self.backend.vector(tensor)
        else:
            if self._quantizer and isinstance(tensor, Tensor):
                tensor = _quantized(self._quantizer, tensor)
            loaded = self.backend.matrix(tensor, self.quantization, self._importance.get(names[0]))
        self._loaded[names] = loaded
        return loaded

    def forward(self, batch: Batch, store: KVStore) -> Sequence[Sequence[float]]:
        """Compute every token of the batch, leave its keys and values in ``store``, and return the logits
        [vocab_size] of each row in ``batch.logit_rows``. The pages behind the batch must be reserved."""
        b, config = self.backend, self.config
        q_width, kv_width, ffn_width = config.q_width, config.kv_width, config.ffn_width
        with b.step():
            x = b.embed(self.embedding, batch.tokens)                                    # [T, width]
            for i, layer in enumerate(self.layers):
                h = b.norm(x, layer.attention_norm, config.norm_eps)
                q, k, v = b.split(b.linear(layer.qkv, h, layer.qkv_bias), (q_width, kv_width, kv_width))
                if config.qk_norm:
                    q = b.norm_heads(q, layer.query_norm, config.norm_eps)
                    k = b.norm_heads(k, layer.key_norm, config.norm_eps)
                q = b.rotate(q, batch.positions, self._frequencies)
                k = b.rotate(k, batch.positions, self._frequencies)
                x = b.add(x, b.linear(layer.output, b.attend(q, k, v, i, store, batch)))
                h = b.norm(x, layer.ffn_norm, config.norm_eps)
                gate, up = b.split(b.linear(layer.gate_up, h), (ffn_width, ffn_width))
                x = b.add(x, b.linear(layer.down, b.swiglu(gate, up)))
            if not batch.logit_rows:
                return []
            last = b.norm(b.pick(x, batch.logit_rows), self.final_norm, config.norm_eps)  # [due, width]
            return b.logits(b.linear(self.head, last))

    def forward_uncached(self, tokens: Sequence[int]) -> list[float]:
        """Logits after ``tokens``, every position computed again in a throw-away store: what having no cache costs."""
        store = self.new_store(num_pages=1, page_size=len(tokens))
        batch = Batch.of([Piece(tokens, start=0, pages=(0,), wants_logits=True)], page_size=len(tokens))
        return list(self.forward(batch, store)[0])

    def new_store(self, num_pages: int, page_size: int, kv_quantization: str | None = None,
                  host: bool = False) -> KVStore:
        """Empty storage for keys and values of this model's shape; ``host``: for pages that are swapped out."""
        make = self.backend.host_kv_store if host else self.backend.kv_store
        return make(self.config, num_pages, page_size, self.kv_bounds, kv_quantization)

    def parameters(self) -> dict[str, list[list[float]]]:
        """All weights as plain floats by checkpoint name (dequantized; a vector becomes a one-row matrix)."""
        found: dict[str, list[list[float]]] = {}
        for names, loaded in self._loaded.items():
            if _is_vector(names):
                numbers = iter(self.backend.to_lists([loaded])[0])
                found.update((name, [list(islice(numbers, self._rows[name]))]) for name in names)
            else:
                rows = iter(self.backend.rows(loaded))
                found.update((name, list(islice(rows, self._rows[name]))) for name in names)
        return found

    @property
    def matrices(self) -> dict[tuple[str, ...], Matrix]:
        """Every weight matrix in the backend's form, by the names of the tensors stacked in it."""
        return {names: loaded for names, loaded in self._loaded.items() if not _is_vector(names)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight matrices as they are stored, without gains and biases."""
        return sum(map(self.backend.matrix_bytes, self.matrices.values()))

    @property
    def working_bytes(self) -> int:
        """Bytes that the backend keeps in addition, to compute faster."""
        return sum(map(self.backend.working_bytes, self.matrices.values()))


def _quantized(quantizer: Quantizer, tensor: Tensor) -> QuantizedTensor:
    codes = quantizer(tensor.rows())
    if not isinstance(codes, QuantizedTensor) or codes.shape != tensor.shape:
        raise QuantizationError(f"a quantizer returns a QuantizedTensor of the matrix's shape {tensor.shape}, not "
                                f"{codes!r}")
    return codes


def _is_vector(names: Sequence[str]) -> bool:
    """A gain or bias, not a matrix?"""
    return names[0].endswith(("norm.weight", ".bias"))


def stacked(tensors: Sequence[Tensor | QuantizedTensor]) -> Tensor | QuantizedTensor:
    """Tensors of equal columns as one, rows after rows; vectors end to end. A single tensor is passed through. Codes
    stay codes if all tensors have codes of one form, and become floats otherwise."""
    if len(tensors) == 1:
        return tensors[0]
    codes = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if len(codes) == len(tensors) and (together := stacked_codes(codes)):
        return together
    values = array("f")
    for tensor in tensors:
        values.extend(tensor.values if isinstance(tensor, Tensor) else chain.from_iterable(tensor.rows()))
    return Tensor((sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]), values)


# ------------------------------------------------------------------------------------------- from a scenario to a model


AS_IN_SCENARIO = "as in the scenario"


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and what a timeline's header should say about them."""

    model: Model
    tokenizer: Tokenizer
    about: dict[str, object]


def load_scenario_model(scenario: Scenario, backend: str | Backend, quantization: object = AS_IN_SCENARIO,
                        weights_seed: int | None = None) -> Loaded:
    """The model of a scenario; ``weights_seed`` draws other weights than the scenario names."""
    source = scenario.weights if weights_seed is None else SeededWeights(weights_seed)
    weights = scenario_weights(scenario, source)
    config = scenario.quantization if quantization == AS_IN_SCENARIO else quantization_config(quantization)
    model = Model(scenario.model, weights, load_backend(backend), config)
    tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
    return Loaded(model, tokenizer, {
        "scenario": scenario.name, "weights": WEIGHTS_SHAPE.dump(source),
        "tokenizer": TOKENIZER_SHAPE.dump(scenario.tokenizer), **about_weights(weights, config)})


def about_weights(weights: StoredWeights, quantization: QuantizationConfig | Quantizer | None) -> dict[str, object]:
    """For a timeline's header, which can name a caller's own quantizer, not hold it."""
    about: object = asdict(quantization) if isinstance(quantization, QuantizationConfig) else None
    if callable(quantization):
        about = getattr(quantization, "__name__", type(quantization).__name__)
    return {"weights_sha256": weights_digest(weights), "quantization": about}


def quantization_config(quantization: object) -> QuantizationConfig | Quantizer | None:
    """None, "int8", "int4", "int4-search", a ready config or a quantizer -> what ``Model`` takes; "stored" is for
    checkpoints."""
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    if callable(quantization) and not isinstance(quantization, type):
        own: Quantizer = quantization
        return own
    named = {"int8": QuantizationConfig(bits=8), "int4": QuantizationConfig(bits=4),
             "int4-search": QuantizationConfig(bits=4, symmetric=False, method="search")}
    if not isinstance(quantization, str) or quantization not in named:
        raise RequestError(f"quantization must be None, {', '.join(map(repr, named))}, a QuantizationConfig or "
                           f"a function from rows to a QuantizedTensor, not {quantization!r}")
    return named[quantization]


def scenario_weights(scenario: Scenario, source: SeededWeights | SafetensorsWeights) -> Weights:
    """The weights a scenario names, checked against the sha256 it records."""
    if isinstance(source, SeededWeights):
        weights: Weights = seeded_weights(scenario.model, source.seed)
    else:
        files = wing("checkpoints.safetensors", f"the weights file {source.path}")
        weights = files.read_safetensors(scenario.folder / source.path)
    check_digest(weights, source.sha256)
    return weights
