"""What a call's tensor is, and the checks that calls share.

The checks look at operands, so that their outcome can be remembered for repeated calls.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fa3.calls.eager import LOWEST_ADDRESS, address_of, check_undifferentiated, no_memory
from fa3.calls.latest import MOST_PLACES
from fa3.complaints import kind_of
from fa3.problem import HEAD_DIM_UNIT, MAX_HEAD_DIM, REMEMBERED

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What q, k, v and out may have, and the kernels' names for it."""

FP8_DTYPE = torch.float8_e4m3fn  # what q, k and v, or a cache, may have besides

DIMENSIONS = ("batch", "seqlen", "heads", "head_dim")
PACKED_DIMENSIONS = ("total", "heads", "head_dim")  # of q, k, v and out
ALIGNMENT = 16  # bytes to which TMA wants storage and strides aligned


class Operand(NamedTuple):
    """All of a tensor that validation and planning look at; hashable."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(stride, size) of the dimensions that lead anywhere, the shortest stride first."""
        sizes = zip(self.stride, self.shape, strict=True)
        return sorted((stride, size) for stride, size in sizes if size > 1)

    @property
    def bytes(self) -> int:
        """From the first byte of a tensor to its last."""
        return 0 if 0 in self.shape else self.within(math.inf)

    def within(self, step: float) -> int:
        """Bytes of what lies within steps of so many bytes.
        More than a step unless all longer strides are multiples of it."""
        itemsize, inner = self.dtype.itemsize, 0
        for stride, size in self.steps:
            if stride * itemsize < step:
                inner += stride * (size - 1)
            elif stride * itemsize % step:
                return int(step) + 1
        return itemsize * (1 + inner)

    def with_rows(self, rows: int) -> "Operand":
        """The same with so many rows."""
        return self._replace(shape=(rows, *self.shape[1:]))

    # Checks of a tensor with this name in error messages.

    def check_rank(self, name: str, dimensions: Sequence[str] = DIMENSIONS) -> None:
        """Raise unless a tensor has as many dimensions as are named."""
        if len(self.shape) != len(dimensions):
            raise ValueError(
                f"{name} must have {len(dimensions)} dimension{'s' * (len(dimensions) > 1)} "
                f"({', '.join(dimensions)}), got shape {tuple(self.shape)}"
            )

    def check_shape(self, name: str, shape: tuple[int, ...], other: str) -> None:
        """Raise unless a tensor has the shape that follows from `other`."""
        if tuple(self.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} to go with {other}, got {tuple(self.shape)}"
            )

    def check_sizes(
        self, name: str, dimensions: Sequence[str], sizes: dict[str, tuple[int, str]]
    ) -> None:
        """Raise unless a tensor's sizes agree with the tensors before it.
        `sizes` has by dimension its size, and the tensor that says so; new ones are added."""
        pairs = zip(dimensions, self.shape, strict=True)
        known = [sizes.setdefault(dimension, (size, name)) for dimension, size in pairs]
        others = dict.fromkeys(other for _, other in known if other != name)
        self.check_shape(name, tuple(size for size, _ in known), " and ".join(others))

    def check_dtype(self, name: str, *accepted: torch.dtype, like_q: bool = False) -> None:
        """Raise unless a tensor has one of the accepted dtypes."""
        if self.dtype not in accepted:
            names = " or ".join(map(str, accepted)).replace(" or ", ", ", max(len(accepted) - 2, 0))
            names += " like q" * like_q
            raise TypeError(f"{name} must be {names}, got {self.dtype}")

    def check_device(
        self, name: str, other_name: str, other: "Operand", or_cpu: bool = False
    ) -> None:
        """Raise unless a tensor is on another's device, or perhaps the CPU."""
        if self.device != other.device and not (or_cpu and self.device.type == "cpu"):
            also = ", or on the CPU" * or_cpu
            raise ValueError(
                f"{name} must be on {other.device} like {other_name}{also}, got {self.device}"
            )

    def check_head_dim(
        self, name: str, unit: int = HEAD_DIM_UNIT, where: str = "", most: int = MAX_HEAD_DIM
    ) -> None:
        """Raise unless kernels can take rows of this length."""
        columns, units = self.shape[-1], f"multiples of {unit} up to {most}"
        if columns % unit or not 0 < columns <= most:
            raise ValueError(f"{name} has head_dim {columns}, supported{where} are {units}")

    def check_layout(self, name: str, has_any_rows: bool = False) -> None:
        """Raise unless TMA can walk the tensor, perhaps also with more rows."""
        self.check_contiguous(name)
        unit = ALIGNMENT // self.dtype.itemsize
        for dim, size in enumerate(self.shape[:-1]):
            if (size > 1 or has_any_rows) and self.stride[dim] % unit:
                raise ValueError(
                    f"{name} must have strides that are multiples of {unit} elements "
                    f"({ALIGNMENT} bytes), got stride {self.stride[dim]} in dimension {dim}"
                )

    def check_contiguous(self, name: str) -> None:
        """Raise unless the elements of a row lie side by side."""
        if self.shape[-1] > 1 and self.stride[-1] != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got stride {self.stride[-1]}"
            )

    def check_no_overlap(self, name: str) -> None:
        """Raise if elements of a tensor that is written share their memory."""
        if overlaps_itself(self):
            raise ValueError(
                f"{name} must not overlap itself when it is written, got shape "
                f"{tuple(self.shape)} with strides {self.stride}"
            )


def dtype_of_output(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype by the dtype of q."""
    return torch.bfloat16 if dtype == FP8_DTYPE else dtype


def describe(
    name: str, tensor: torch.Tensor, alignment: int = ALIGNMENT, has_backward: bool = False
) -> Operand:
    """Check what may change from call to call, and describe the rest.

    `alignment` is in bytes, 1 for a tensor that kernels read number by number. With `has_backward`
    the tensor may require grad. Raises TypeError for what is no tensor. Raises ValueError if it
    requires grad, begins at another address than a multiple of `alignment`, or is to be read by
    number and lazily negated. Raises NotImplementedError if it lies nowhere, or has a tangent.
    """
    try:
        if isinstance(tensor, torch.Tensor) and (has_backward or not tensor.requires_grad):
            address = tensor.data_ptr()
            is_aligned = address >= LOWEST_ADDRESS and not address % alignment
            is_resolved = alignment > 1 or not tensor.is_neg()
            if is_aligned and is_resolved and forward_ad._current_level < 0:
                return operand_of(tensor)
    except (RuntimeError, TypeError):
        pass
    # Nearly all tensors have been spared this.
    return describe_rare(name, tensor, alignment, has_backward)


def describe_rare(name: str, tensor: torch.Tensor, alignment: int, has_backward: bool) -> Operand:
    """`describe`, step by step, for what it cannot see at once."""
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
    if alignment == 1 and tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
    try:
        return operand_of(tensor)
    except RuntimeError as error:
        # Nested tensors have an address, but no strides.
        raise no_memory(name, tensor) from error


def operand_of(tensor: torch.Tensor) -> Operand:
    """The operand of a tensor, of which nothing is checked."""
    # In a third of the time that the class itself takes.
    return tuple.__new__(Operand, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise if torch would refuse to write a tensor, in mid-call."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must not be an inference tensor when it is written outside of "
            "torch.inference_mode()"
        )


# ------------------------------------------------------------------------------- shared memory


def overlaps_itself(operand: Operand) -> bool:
    """Whether a tensor may have elements in the same place."""
    extent = 1
    for stride, size in operand.steps:
        if stride < extent:
            return 0 not in operand.shape
        extent += stride * (size - 1)
    return False


# A call's buffers lie the same way again and again.
@functools.lru_cache(maxsize=REMEMBERED)
def share_bytes(first: Operand, second: Operand, distance: int) -> bool:
    """Whether tensors may share a byte; `second` begins `distance` bytes after `first`.

    Byte ranges that do not meet share nothing. Where they meet, both tensors may step through one
    buffer together, as two caches do or the K and V of one allocation: then what lies within a step
    is compared. Anything else counts as shared.
    """
    if not -second.bytes < distance < first.bytes:
        return False
    strides = {stride * one.dtype.itemsize for one in (first, second) for stride, _ in one.steps}
    return not any(
        first.within(step) <= distance % step <= step - second.within(step)
        for step in strides - {0}
    )


# Takes numbers of rows, of which there are none if no tensor grows, and the tensors' addresses.
CheckOfAddresses = Callable[..., None]


# Fewer than of other things: each remembers many addresses.
@functools.lru_cache(maxsize=REMEMBERED // 16)
def check_of_addresses(
    names: tuple[str, ...],
    operands: tuple[Operand | None, ...],
    written: tuple[str, ...],
    growing_names: tuple[tuple[str, ...], ...] = (),
) -> CheckOfAddresses:
    """Return a check that written tensors share no memory with others.

    `operands` are the tensors of these names, None where there is none, and `written` the names of
    those that are written. `growing_names` have another number of rows in each call; they are
    grouped by that number.
    """
    present = {name: one for name, one in zip(names, operands, strict=True) if one is not None}
    named, placed = list(present), list(present.values())
    places = [named.index(name) for name in written if name in present]
    pairs = [
        (i, j) for n, i in enumerate(places) for j in range(len(placed)) if j not in places[: n + 1]
    ]
    sizes = [one.bytes for one in placed]
    # Of these: which number of rows it is, bytes from row to row, and bytes of a row.
    growing = {
        i: (side, placed[i].stride[0] * placed[i].dtype.itemsize, placed[i].with_rows(1).bytes)
        for side, growing_name in enumerate(growing_names)
        for i, name in enumerate(named)
        if name in growing_name
    }

    def check(rows: tuple[int, ...], *begins: int) -> None:
        lengths = sizes
        if growing:
            lengths = sizes.copy()
            for i, (side, step, row) in growing.items():
                lengths[i] = step * (rows[side] - 1) + row if rows[side] else 0
        for i, j in pairs:
            distance = begins[j] - begins[i]
            # Most do not even come near each other.
            if -lengths[j] < distance < lengths[i]:
                one, other = (
                    placed[place].with_rows(rows[growing[place][0]])
                    if place in growing
                    else placed[place]
                    for place in (i, j)
                )
                if share_bytes(one, other, distance):
                    raise ValueError(
                        f"{named[i]} must not overlap {named[j]}: it is written in a call "
                        f"that uses {named[j]}"
                    )

    # These numbers are other ones in every call.
    return check if growing else functools.lru_cache(maxsize=MOST_PLACES)(check)


def check_apart(written: Sequence[str], tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise if written tensors share memory with others of the call.
    `tensors` are by name, and None where there is none."""
    present = {name: one for name, one in tensors.items() if one is not None}
    operands = tuple(map(operand_of, present.values()))
    begins = [tensor.data_ptr() for tensor in present.values()]
    check_of_addresses(tuple(present), operands, tuple(written))((), *begins)


def used_queries(total_q: int, ends: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Which rows of q are used, (total_q,) bool; at least one sequence."""
    row = torch.arange(total_q, dtype=torch.int32, device=ends.device)
    end = ends[1:]
    if used is not None:
        end = ends[:-1] + torch.minimum(used.clamp(min=0), ends.diff())
    # Rows after the last sequence count as rows past its end.
    return row < end[torch.bucketize(row, ends[1:-1], right=True)]


def hide_all_keys(values: Mapping[str, Any]) -> None:
    """Write o and lse as without keys: 0, and -inf or sinks.
    Packed rows that are not used stay as they are. `values` are the call's, by name."""
    out, lse, sinks, ends = (values[name] for name in ("o", "lse", "sinks", "cu_seqlens_q"))
    is_used = None if ends is None else used_queries(len(out), ends, values["seqused_q"])
    if is_used is None:
        out.zero_()
    else:
        out.masked_fill_(is_used[:, None, None], 0.0)
    if lse is not None:
        hidden = torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None]
        lse.copy_(hidden if is_used is None else torch.where(is_used, hidden, lse))
