"""Mistakes 25 to 31, and others like them: quantization."""

from __future__ import annotations

from dataclasses import replace

from starter import quantization
from starter.backend import ReferenceBackend
from starter.calibration import grid_search
from starter.quantization import QuantizedTensor, dequantize, quantize
from starter.schema import QuantizationConfig

from .mistake import mistake


def with_copy(q, rows):
    """The tensor, and rows of floats beside it, which ``row_of_copy`` returns."""
    object.__setattr__(q, "copy", rows)
    return q


def row_of_copy(right):
    def row(self, r):
        return list(self.copy[r]) if hasattr(self, "copy") else right(self, r)
    return row


@mistake(25, "M5Quantization.test_distinct_values", says="different numbers with")
def quantized_by_label_only(patch):
    """Label only: more than 2^bits distinct values in a group, since the numbers are the originals."""
    patch.everywhere(quantize, lambda rows, config, *more: with_copy(quantize(rows, config, *more), list(rows)))
    patch(QuantizedTensor, "row", row_of_copy(QuantizedTensor.row))


@mistake(25, "M5Quantization.test_engine_computes_with_quantized_weights", says="equal the float model's")
def bytes_unchanged(patch):
    """Label only: the engine's weights stay floats whatever the setting says."""
    right = ReferenceBackend.matrix
    patch(ReferenceBackend, "matrix", lambda self, tensor, quantization, *more: right(self, tensor, None))


@mistake(26, "M5Quantization.test_packed_bytes_are_what_counts", says="packed bytes are used")
def float_copy_is_used(patch):
    """A float copy is what is really used: corrupting the quantized storage changes nothing."""
    to_dict, from_dict = QuantizedTensor.to_dict, QuantizedTensor.from_dict

    def quantize_and_copy(rows, config, *more):
        q = quantize(rows, config, *more)
        return with_copy(q, dequantize(q))

    def from_dict_and_copy(document):
        rows = document.get("copy")
        q = from_dict({key: value for key, value in document.items() if key != "copy"})
        return with_copy(q, rows or dequantize(q))

    patch.everywhere(quantize, quantize_and_copy)
    patch(QuantizedTensor, "row", row_of_copy(QuantizedTensor.row))
    patch(QuantizedTensor, "to_dict", lambda self: {**to_dict(self), "copy": self.copy})
    patch(QuantizedTensor, "from_dict", from_dict_and_copy)


@mistake(27, "M5Quantization.test_packed_size", says="two nibbles a byte")
def int4_takes_a_byte_each(patch):
    """int4 unpacked: a byte a value."""
    right = QuantizedTensor.row_codes

    def row_codes(self, r):
        if self.bits == 8:
            return right(self, r)
        data = self.packed[r * self.row_bytes:(r + 1) * self.row_bytes]
        return [code - 16 if self.symmetric and code > 7 else code for code in data]

    patch(QuantizedTensor, "row_bytes", property(lambda self: self.shape[1]))
    patch(QuantizedTensor, "row_codes", row_codes)
    patch(quantization, "_pack_row", lambda codes, bits: bytes(code % 2**bits for code in codes))


@mistake(27, "M5Quantization.test_nibbles", says="come back exactly")
def negative_nibbles_lose_their_sign(patch):
    """int4: negative nibbles corrupt, since their sign is not extended."""
    patch(quantization, "_NIBBLES", dict.fromkeys((False, True), quantization._NIBBLES[False]))


@mistake(28, "M5Quantization.test_extreme_groups", says="constant")
def constant_group_becomes_zero(patch):
    """Constant, zero or one-sided group becomes NaN, zero, or saturates: a range of 0 is taken for 1."""
    patch(quantization, "_scale", lambda low, high, steps: (high - low) / steps or 1.0)


@mistake(29, "M5Quantization.test_outliers_stay_local", says="a scale for each group")
def one_global_scale(patch):
    """One global scale: an outlier ruins the other rows."""
    right = quantization.choose_grids

    def choose_grids(groups, config):
        number_format, [grid] = right([[x for group in groups for x in group]], config)
        return number_format, [grid] * len(groups)

    patch.everywhere(right, choose_grids)


@mistake(30, "M5Quantization.test_extreme_groups", says="far away|positive|negative")
def zero_point_clamped(patch):
    """Zero point clamped or wrapped for groups far from zero."""
    right = quantization.choose_grids

    def clamped(grid):
        steps = grid.last - grid.first
        first = max(-steps, min(0, grid.first))
        return grid._replace(first=first, last=first + steps)

    def choose_grids(groups, config):
        number_format, chosen = right(groups, config)
        return number_format, list(map(clamped, chosen))

    patch.everywhere(right, choose_grids)


@mistake(31, "M5Quantization.test_error_bound", says="off by")
def tail_of_a_row_dropped(patch):
    """Group size that does not divide the width drops the tail."""
    def quantize_whole_groups(rows, config, *more):
        size = config.group_size or 1
        return quantize([[x if i < len(row) // size * size else 0.0 for i, x in enumerate(row)] for row in rows],
                        config, *more)

    patch.everywhere(quantize, quantize_whole_groups)


# ------------------------------------------------------------------------------------------ found on the way


@mistake(None, "M5Quantization.test_bad_input", says="bits|group_size")
def config_not_checked(patch):
    """Any number of bits is accepted."""
    patch(QuantizationConfig, "__post_init__", lambda self: None)


@mistake(None, "M5Quantization.test_metadata_explain_every_number", says="from its metadata")
def correction_stored_nowhere(patch):
    """dequantize corrects the numbers by a factor that no metadata hold."""
    right = QuantizedTensor.row
    patch(QuantizedTensor, "row", lambda self, r: [1.0001 * x for x in right(self, r)])


@mistake(None, "M5Quantization.test_round_trip", says="QuantizationError")
def metadata_not_checked(patch):
    """A document whose parts contradict each other becomes a tensor."""
    patch(QuantizedTensor, "__post_init__", lambda self: None)


@mistake(None, "M5Quantization.test_search", says="squared error falls by 0.0%")
def search_by_name_only(patch):
    """Method "search" does what "nearest" does."""
    patch(grid_search, "search", lambda group, full, importance, symmetric: full)


@mistake(None, "M5Quantization.test_reported_error", says="measure, do not guess")
def half_of_the_error_reported(patch):
    """The error is reported smaller than it is."""
    right = QuantizedTensor.error

    def error(self, rows):
        real = right(self, rows)
        return replace(real, max_abs=real.max_abs / 2)

    patch(QuantizedTensor, "error", error)


@mistake(None, "M5Quantization.test_memory_really_falls", says="no float copy beside")
def floats_kept_beside(patch):
    """The floats are kept beside the packed codes, unused."""
    right = ReferenceBackend.matrix

    def matrix(self, tensor, config, *more):
        loaded = right(self, tensor, config, *more)
        return with_copy(loaded, tensor) if config else loaded

    patch(ReferenceBackend, "matrix", matrix)


@mistake(None, "M5Quantization.test_quantized_cache", says="or refuse the setting")
def int8_pages_by_name_only(patch):
    """kv_quantization="int8" changes nothing."""
    right = ReferenceBackend.kv_store

    def kv_store(self, model, num_pages, page_size, bounds=(), kv_quantization=None):
        return right(self, model, num_pages, page_size, bounds)

    patch(ReferenceBackend, "kv_store", kv_store)
