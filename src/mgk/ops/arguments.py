"""Checks of arguments. Each error names the argument, what was expected and what was passed.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor

E_STEPS = ("soft", "hard")


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def check_tensor(name: str, value: object, axes: str) -> Tensor:
    """Require a float tensor with the dimensions that `axes` names, e.g. "B,H,Nq,D"."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor ({axes}), got {describe(value)}")
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        raise TypeError(f"{name}: expected a floating-point tensor ({axes}) of 16 bits up, got dtype {value.dtype}")
    if value.dim() != axes.count(",") + 1:
        raise ValueError(f"{name}: expected {axes.count(',') + 1} dimensions ({axes}), got {describe(value)}")
    return value


def check_shape(name: str, value: Tensor, axes: str, expected: tuple[int, ...], because: str = "") -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{name}: expected shape ({axes}) = {expected}{because}, got {tuple(value.shape)}")


def check_same(name: str, value: Tensor, other: Tensor, *, dtype: bool = True, whose: str = "query") -> None:
    if dtype and value.dtype != other.dtype:
        raise TypeError(f"{name}: expected the dtype of {whose}, {other.dtype}, got {value.dtype}")
    if value.device != other.device:
        raise ValueError(f"{name}: expected the device of {whose}, {other.device}, got {value.device}")


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return value


def check_count(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def check_cutoffs(cutoffs: Sequence[object]) -> list[int]:
    """Require increasing positive integers: the cutoffs of an adaptive softmax."""
    starts = [cutoff for cutoff in cutoffs if isinstance(cutoff, int) and not isinstance(cutoff, bool) and cutoff > 0]
    if list(cutoffs) != sorted(set(starts)):
        raise ValueError(f"cutoffs: expected increasing integers above 0, got {cutoffs}")
    return starts


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(choices)}, got {describe(value)}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def check_probability(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value}")
    return float(value)


def check_mask(name: str, mask: object, axes: str, expected: tuple[int, ...], query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected a bool tensor ({axes}) or None, got {describe(mask)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: expected a bool tensor ({axes}), True where it takes part, got dtype {mask.dtype}")
    check_shape(name, mask, axes, expected)
    check_same(name, mask, query, dtype=False)
    return mask


def check_log_prior(log_prior: object, heads: int, components: int, keys: int, query: Tensor) -> Tensor | None:
    if log_prior is None:
        return None
    if not isinstance(log_prior, Tensor):
        raise TypeError(f"log_prior: expected a tensor (H,M) or (H,M,Nk) or None, got {describe(log_prior)}")
    if not log_prior.is_floating_point():
        raise TypeError(f"log_prior: expected a floating-point tensor, got dtype {log_prior.dtype}")
    shape = tuple(log_prior.shape)
    if shape != (heads, components) and shape != (heads, components, keys):  # torch.compile traces no `in` of symbols
        raise ValueError(
            f"log_prior: expected shape (H,M) = {(heads, components)} or (H,M,Nk) = {(heads, components, keys)}, "
            f"got {tuple(log_prior.shape)}"
        )
    check_same("log_prior", log_prior, query, dtype=False)
    if readable(log_prior) and bool((log_prior.isnan() | (log_prior == torch.inf)).any()):
        raise ValueError("log_prior: expected numbers below +inf (-inf removes a component), got NaN or +inf")
    return log_prior


def check_variance(variance: object, heads: int, components: int, query: Tensor) -> float | Tensor:
    """Return a number, by default sqrt(D), or a tensor (H,M), whose values are checked on the CPU only."""
    if variance is None:
        return math.sqrt(query.shape[-1])
    if isinstance(variance, Tensor):
        check_tensor("variance", variance, "H,M")
        check_shape("variance", variance, "H,M", (heads, components))
        check_same("variance", variance, query, dtype=False)
        if readable(variance) and not bool(((variance > 0) & variance.isfinite()).all()):
            raise ValueError("variance: expected finite numbers above 0, got a tensor with others")
        return variance
    if isinstance(variance, bool) or not isinstance(variance, int | float):
        raise TypeError(f"variance: expected None, a number or a tensor (H,M), got {describe(variance)}")
    if not (variance > 0 and math.isfinite(variance)):
        raise ValueError(f"variance: expected a finite number above 0, got {variance}")
    return float(variance)


def check_window(window: object, is_causal: bool, keys: int) -> int | None:
    """Return the window, or None where it hides no key that a causal mask shows."""
    if window is None:
        return None
    window = check_count("window", window)
    if not is_causal:
        raise ValueError(f"window: expected None without is_causal=True, got {window}")
    return window if window < keys else None


def check_query_key(query: object, key: object, shift: object) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check query (B,H,Nq,D) with key (B,G,M,Nk,D), or with key (B,G,Nk,D) and shift (H,M,D). G divides H."""
    query = check_tensor("query", query, "B,H,Nq,D")
    batch, heads, _, width = query.shape
    if width == 0:
        raise ValueError(f"query: expected a head width D of at least 1, got {describe(query)}")
    if shift is None:
        key = check_tensor("key", key, "B,G,M,Nk,D")
        if key.shape[2] == 0:
            raise ValueError(f"key: expected at least one component M, got {describe(key)}")
        with_components = (batch, key_heads(key, heads), key.shape[2], key.shape[3], width)
        check_shape("key", key, "B,G,M,Nk,D", with_components, " to go with query")
    else:
        key = check_tensor("key", key, "B,G,Nk,D")
        expected = (batch, key_heads(key, heads), key.shape[2], width)
        check_shape("key", key, "B,G,Nk,D", expected, " to go with query")
        shift = check_tensor("shift", shift, "H,M,D")
        if shift.shape[1] == 0:
            raise ValueError(f"shift: expected at least one component M, got {describe(shift)}")
        check_shape("shift", shift, "H,M,D", (heads, shift.shape[1], width), " to go with query")
        check_same("shift", shift, query, dtype=False)
    check_same("key", key, query)
    return query, key, shift


def key_heads(key: Tensor, heads: int) -> int:
    """The number of heads G of `key`, of which each serves H/G query heads."""
    number = key.shape[1]
    if number != heads and (number == 0 or heads % number):
        axes = "B,G,M,Nk,D" if key.dim() == 5 else "B,G,Nk,D"
        raise ValueError(
            f"key: expected shape ({axes}) with a G that divides H = {heads} of query, got {tuple(key.shape)}"
        )
    return number


def check_value(value: object, query: Tensor, key: Tensor) -> Tensor:
    value = check_tensor("value", value, "B,G,Nk,Dv")
    expected = (*key.shape[:2], key.shape[-2], value.shape[-1])
    check_shape("value", value, "B,G,Nk,Dv", expected, " to go with query and key")
    check_same("value", value, query)
    return value


def is_traced() -> bool:
    """Whether torch.compile or a transform of torch.func is active."""
    return torch.compiler.is_compiling() or peek_interpreter_stack() is not None


def is_exported_to_onnx() -> bool:
    """Whether torch.onnx.export traces; ONNX has none of our operators."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def exports_any_length(query: Tensor, key: Tensor) -> bool:
    """Whether as many queries (B,H,N,D) as keys (B,H,N,F) are exported without loops: for any N, or to ONNX."""
    if not torch.compiler.is_exporting():
        return False
    free = isinstance(query.shape[2], torch.SymInt) or is_exported_to_onnx()
    return free and query.shape[2] == key.shape[2]


def has_values(tensor: Tensor) -> bool:
    """Whether Python code may branch on the values of `tensor`: nothing is traced, and it is neither meta nor fake."""
    return not (is_traced() or tensor.is_meta or isinstance(tensor, FakeTensor))


def readable(tensor: Tensor) -> bool:
    """Whether Python code may branch on the values of `tensor` without a synchronisation."""
    return tensor.device.type == "cpu" and has_values(tensor)
