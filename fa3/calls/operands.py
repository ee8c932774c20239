"""What a tensor of a call is, and the checks that all calls share.

The checks look at descriptions, so that their outcome can be remembered for repeated calls.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from fa3.calls.eager import LOWEST_ADDRESS, address_of, check_undifferentiated, lies_nowhere
from fa3.calls.overlap import Layout, overlaps_itself, share
from fa3.complaints import kind_of
from fa3.problem import HEAD_DIM_UNIT, MAX_HEAD_DIM, REMEMBERED

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What q, k, v and out may have, and the kernels' names for it."""

FP8_DTYPE = torch.float8_e4m3fn  # what q, k and v, or a cache, may have besides

DIMENSIONS = ("batch", "seqlen", "heads", "head_dim")
PACKED_DIMENSIONS = ("total", "heads", "head_dim")  # of q, k, v and out
ALIGNMENT = 16  # bytes to which TMA wants storage and strides aligned


Description = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""The fields of an `Operand` in a plain tuple, which takes a quarter less time to make. Calls are
looked up by it; an operand is made of it where one is prepared."""


class Operand(NamedTuple):
    """All of a tensor that validation and planning look at; hashable."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def layout(self) -> Layout:
        """Where the elements lie, from the first on."""
        return Layout(self.shape, self.stride, self.dtype.itemsize)


class Output(NamedTuple):
    """The output that a call allocates: contiguous and on q's device."""

    shape: tuple[int, ...]
    is_like_q: bool  # whether `torch.empty_like` makes it, which takes less time than `new_empty`
    is_packed: bool = False  # whether it has as many rows as q has when it is allocated
    dtype: torch.dtype = torch.bfloat16  # of q, or bfloat16 for queries in FP8

    @classmethod
    def of(cls, shape: tuple[int, ...], q: Operand, is_packed: bool = False) -> "Output":
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        is_fp8 = q.dtype == FP8_DTYPE
        is_like_q = not is_fp8 and (shape, strides) == (tuple(q.shape), tuple(q.stride))
        return cls(shape, is_like_q, is_packed, dtype_of_output(q.dtype))

    def allocate(self, q: torch.Tensor) -> torch.Tensor:
        if self.is_like_q:
            return torch.empty_like(q)
        # Sizes one by one: in a tuple they would take torch 0.4 us more.
        shape = self.shape_beside(q.shape) if self.is_packed else self.shape
        if q.dtype is self.dtype:
            return q.new_empty(*shape)
        return q.new_empty(*shape, dtype=self.dtype)

    def shape_beside(self, q: tuple[int, ...]) -> tuple[int, ...]:
        """The shape if q has this one."""
        return *q[:1], *self.shape[1:]


def dtype_of_output(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype by the dtype of q."""
    return torch.bfloat16 if dtype == FP8_DTYPE else dtype


def describe(
    name: str, tensor: torch.Tensor, alignment: int = ALIGNMENT, has_backward: bool = False
) -> Description:
    """Check what may change from call to call, and describe the rest.

    Args:
        has_backward: whether the tensor may require grad.

    Raises:
        TypeError: it is no tensor.
        ValueError: it requires grad, or begins at another address than a multiple of `alignment`.
        NotImplementedError: it lies nowhere, or has a tangent.
    """
    try:
        if isinstance(tensor, torch.Tensor) and (has_backward or not tensor.requires_grad):
            address = tensor.data_ptr()
            is_aligned = address >= LOWEST_ADDRESS and not address % alignment
            if is_aligned and forward_ad._current_level < 0:
                return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except (RuntimeError, TypeError):
        pass
    # Nearly all tensors have been spared this.
    return describe_rare(name, tensor, alignment, has_backward)


def describe_rare(
    name: str, tensor: torch.Tensor, alignment: int, has_backward: bool
) -> Description:
    """`describe`, step by step, for what it does not see at a glance."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {kind_of(tensor)}")
    if tensor.requires_grad and not has_backward:
        check_undifferentiated(name)
    address = address_of(name, tensor)
    if address % alignment:
        raise ValueError(
            f"{name} starts {address % alignment} bytes after a multiple of {alignment}; its "
            f"storage must be {alignment}-byte aligned"
        )
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except RuntimeError as error:
        # Nested tensors have an address, but no strides.
        raise lies_nowhere(name, tensor) from error


def describe_unaligned(name: str, tensor: torch.Tensor | None) -> Description | None:
    """Describe a tensor that may begin at any address, if there is one."""
    return None if tensor is None else describe(name, tensor, 1)


def operand_of(description: Description | None) -> Operand | None:
    """The operand that is described, if there is one."""
    return None if description is None else Operand(*description)


# ---------------------------------------------------------------------------------- attention


def check_kind(q: Operand) -> None:
    """Raise unless there are kernels for q's dtype, device and head size."""
    check_dtype("q", q, *DTYPES)
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be a CPU or CUDA tensor, got {q.device}")
    check_head_dim("q", q)


def check_like_q(
    name: str, operand: Operand, q: Operand, dimensions: tuple[str, ...] = DIMENSIONS
) -> None:
    """Raise unless a tensor has these dimensions, q's dtype and device, and a layout for TMA."""
    check_rank(name, operand, dimensions)
    check_same_kind(name, operand, q)
    check_layout(name, operand)


def check_same_kind(name: str, operand: Operand, q: Operand) -> None:
    """Raise unless a tensor has q's dtype and device."""
    if operand.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype} like q, got {operand.dtype}")
    check_device(name, operand, "q", q)


def check_head_dim(name: str, operand: Operand, largest: int = MAX_HEAD_DIM) -> None:
    """Raise unless the kernels can take rows of this length."""
    head_dim = operand.shape[-1]
    if head_dim % HEAD_DIM_UNIT or not 0 < head_dim <= largest:
        raise ValueError(
            f"{name} has head_dim {head_dim}, supported are multiples of {HEAD_DIM_UNIT} "
            f"up to {largest}"
        )


def check_heads_divide(q: Operand, name: str, keys: Operand) -> None:
    """Raise unless each key/value head has the same number of query heads."""
    heads_q, heads_kv = q.shape[-2], keys.shape[-2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv and heads_q % heads_kv):
        raise ValueError(
            f"q must have a multiple of {name}'s heads, got {heads_q} query heads "
            f"and {heads_kv} key/value heads"
        )


def check_out(
    out: torch.Tensor,
    shape: tuple[int, ...],
    q: torch.Tensor,
    # names, tensors: what else the call uses; None where none is given.
    names: tuple[str, ...],
    tensors: tuple[torch.Tensor | None, ...],
    dtype: str | None = None,  # of the output, where it does not follow from the dtype of q
) -> None:
    """Raise unless a call on q can write its output to a tensor of the caller's."""
    description = describe("out", out)
    check_writable("out", out)
    is_like_q = (out.dtype, out.device) == (dtype_of_output(q.dtype), q.device)
    if not (is_like_q and out.shape == shape and out.is_contiguous()):
        # Nearly all outputs are spared this.
        operand_q = Operand(*describe("q", q, ALIGNMENT, True))
        check_output(Operand(*description), shape, operand_q, dtype)
    check_apart("out", out, names, tensors)


def check_output(
    out: Operand, shape: tuple[int, ...], q: Operand, dtype: str | None = None
) -> None:
    """Raise unless the output of a call on q can lie like this."""
    is_packed = len(shape) == len(PACKED_DIMENSIONS)
    if q.dtype == FP8_DTYPE:
        accepted = dtype_of_output(q.dtype) if dtype is None else getattr(torch, dtype)
        if out.dtype != accepted:
            raise TypeError(f"out must be {accepted} with q in {q.dtype}, got {out.dtype}")
        q = q._replace(dtype=out.dtype)
    check_like_q("out", out, q, PACKED_DIMENSIONS if is_packed else DIMENSIONS)
    if is_packed:
        # Kernels step to where other sequences would be, also along a single row.
        check_stride("out", out, 0)
        check_stride("out", out, 1)
    check_shape("out", out, shape, "q and the values")
    check_no_overlap("out", out)


# --------------------------------------------------------------------------------- any tensor


def check_rank(name: str, operand: Operand, dimensions: tuple[str, ...] = DIMENSIONS) -> None:
    """Raise unless a tensor has as many dimensions as are named."""
    if len(operand.shape) != len(dimensions):
        raise ValueError(
            f"{name} must have {len(dimensions)} dimensions ({', '.join(dimensions)}), "
            f"got shape {tuple(operand.shape)}"
        )


def check_shape(name: str, operand: Operand, shape: tuple[int, ...], other: str) -> None:
    """Raise unless a tensor has the shape that follows from `other`."""
    if tuple(operand.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} to go with {other}, got {tuple(operand.shape)}"
        )


def check_dtype(name: str, operand: Operand, *accepted: torch.dtype) -> None:
    """Raise unless a tensor has one of the accepted dtypes."""
    if operand.dtype not in accepted:
        raise TypeError(f"{name} must be {' or '.join(map(str, accepted))}, got {operand.dtype}")


def check_device(name: str, operand: Operand, other_name: str, other: Operand) -> None:
    """Raise unless a tensor is where another one is."""
    if operand.device != other.device:
        raise ValueError(
            f"{name} must be on {other.device} like {other_name}, got {operand.device}"
        )


def check_layout(name: str, operand: Operand) -> None:
    """Raise unless TMA can walk the tensor where it lies."""
    check_contiguous(name, operand)
    for dim, size in enumerate(operand.shape[:-1]):
        if size > 1:
            check_stride(name, operand, dim)


def check_stride(name: str, operand: Operand, dim: int) -> None:
    """Raise unless TMA can step along a dimension."""
    unit, stride = ALIGNMENT // operand.dtype.itemsize, operand.stride[dim]
    if stride % unit:
        raise ValueError(
            f"{name} must have strides that are multiples of {unit} elements "
            f"({ALIGNMENT} bytes), got stride {stride} in dimension {dim}"
        )


def check_contiguous(name: str, operand: Operand) -> None:
    """Raise unless the elements of a row lie side by side."""
    if operand.shape[-1] > 1 and operand.stride[-1] != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got stride {operand.stride[-1]}"
        )


def check_no_overlap(name: str, operand: Operand) -> None:
    """Raise if elements of a tensor that is written share their memory."""
    if overlaps_itself(operand.layout):
        raise ValueError(
            f"{name} must not overlap itself when it is written, got shape "
            f"{tuple(operand.shape)} with strides {operand.stride}"
        )


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise if torch does not let a tensor be written here, which it would say in mid-call."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must not be an inference tensor when it is written outside of "
            "torch.inference_mode()"
        )


CheckOfAddresses = Callable[..., None]  # takes the addresses of the tensors that are given

MOST_REMEMBERED = 128  # addresses that a check remembers: a layer has the same ones in every step


# Fewer than of other things: each remembers many addresses.
@functools.lru_cache(maxsize=REMEMBERED // 16)
def check_of_addresses(
    names: tuple[str, ...], described: tuple[Description | None, ...], written: tuple[str, ...]
) -> CheckOfAddresses:
    """The check that what a call writes shares no memory with what else it uses.

    Args:
        names: of the call's tensors.
        described: what they are like; None where none is given.
        written: names of those that are written, if they are given.
    """
    layouts = {
        name: Operand(*description).layout
        for name, description in zip(names, described, strict=True)
        if description is not None
    }
    given, sizes = list(layouts), [layout.bytes for layout in layouts.values()]
    places = [given.index(name) for name in written if name in layouts]
    pairs = [
        (i, j) for n, i in enumerate(places) for j in range(len(given)) if j not in places[: n + 1]
    ]

    @functools.lru_cache(maxsize=MOST_REMEMBERED)
    def check(*begins: int) -> None:
        for i, j in pairs:
            distance = begins[j] - begins[i]
            # Most do not even come near each other.
            near = -sizes[j] < distance < sizes[i]
            if near and share(layouts[given[i]], layouts[given[j]], distance):
                raise overlaps(given[i], given[j])

    return check


def check_apart(
    name: str,
    written: torch.Tensor,
    other_names: Iterable[str],
    others: Iterable[torch.Tensor | None],
) -> None:
    """Raise if a tensor that is written shares memory with another one of the call.
    For tensors that have other sizes in every call: `check_of_addresses` would remember them."""
    begin = written.data_ptr()
    end = begin + bytes_of(written)
    for other_name, other in zip(other_names, others, strict=True):
        if other is None:
            continue
        other_begin = other.data_ptr()
        # Most do not even come near each other.
        near = other_begin < end and begin < other_begin + bytes_of(other)
        if near and share(layout_of(written), layout_of(other), other_begin - begin):
            raise overlaps(name, other_name)


def overlaps(written: str, other: str) -> ValueError:
    return ValueError(
        f"{written} must not overlap {other}: it is written in a call that uses {other}"
    )


def layout_of(tensor: torch.Tensor) -> Layout:
    """Where a tensor's elements lie, from the first on."""
    return Layout(tensor.shape, tensor.stride(), tensor.dtype.itemsize)


def bytes_of(tensor: torch.Tensor) -> int:
    """From the first byte of a tensor to its last."""
    return tensor.nbytes if tensor.is_contiguous() else layout_of(tensor).bytes


def addresses(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Where the tensors begin that are given."""
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def hide_all_keys(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    """Write what queries get that see no key: 0, and -inf or their head's sink."""
    out.zero_()
    if lse is not None:
        hide_all_keys_of_lse(lse, sinks)


def hide_all_keys_of_lse(lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Write the log-sum-exps (..., heads, queries) of queries that see no key."""
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None])


def used_queries(total_q: int, ends: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Which rows of q belong to queries that are used, (total_q,) bool; there is a sequence."""
    row = torch.arange(total_q, dtype=torch.int32, device=ends.device)
    end = ends[1:]
    if used is not None:
        end = ends[:-1] + torch.minimum(used.clamp(min=0), ends.diff())
    # Rows after the last sequence count as rows past its end.
    return row < end[torch.bucketize(row, ends[1:-1], right=True)]


def hide_all_keys_of_packed(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    # ends, used: cu_seqlens_q and seqused_q, on out's device.
    ends: torch.Tensor,
    used: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write what packed queries get that see no key; rows that are not used stay as they are."""
    is_used = used_queries(len(out), ends, used)
    out.masked_fill_(is_used[:, None, None], 0.0)
    if lse is not None:
        hidden = torch.empty_like(lse)
        hide_all_keys_of_lse(hidden, sinks)
        lse.copy_(torch.where(is_used, hidden, lse))
