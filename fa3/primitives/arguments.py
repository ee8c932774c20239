"""Arguments of launches: symbolic ones, and what kernels get of them."""

import cutlass
import cutlass.cute as cute

ELEMENT_TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "bool": cutlass.Boolean,
    "int16": cutlass.Int16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
"""Torch's name of a dtype -> the element type in a kernel."""


def tma_tensor(dtype: str, shape: tuple) -> object:
    """A tensor with TMA's strides: multiples of 16 bytes, 1 at last."""
    element = ELEMENT_TYPES[dtype]
    unit = 128 // element.width
    strides = (*(cute.sym_int64(divisibility=unit) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(element, shape, strides, assumed_align=16)


def strided_tensor(dtype: str, rank: int, exists: bool = True) -> object:
    """A tensor of any sizes and strides; None unless it exists."""
    if not exists:
        return None
    element = ELEMENT_TYPES[dtype]
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64() for _ in range(rank))
    return cute.runtime.make_fake_tensor(
        element, shape, strides, assumed_align=max(1, element.width // 8)
    )


def int32_vector(size=None, exists: bool = True, dtype: str = "int32") -> object:
    """Return a contiguous vector, by default of any size; or None."""
    if not exists:
        return None
    return compact_tensor(dtype, (cute.sym_int() if size is None else size,))


def float32_buffer(exists: bool = True) -> object:
    """Return a contiguous buffer of any 64-bit size; None unless it exists."""
    return compact_tensor("float32", (cute.sym_int64(),)) if exists else None


def scalars(kind: type) -> dict[str, object]:
    """Return the arguments of a launch that are numbers, by name."""
    values = {int: cutlass.Int32(0), cutlass.Int64: cutlass.Int64(0), float: cutlass.Float32(0.0)}
    return {name: values[one] for name, one in kind.__annotations__.items() if one in values}


def operands_of(kind: type, call: tuple, **named: object) -> tuple:
    """Return a kernel's operands: `named` ones, others from a launch's arguments."""
    return kind(**{name: getattr(call, name, None) for name in kind._fields} | named)


def symbolic_descales(count: int) -> tuple:
    """Return what FP8 keys, values and queries are multiplied by.
    Each is (batch, heads_kv) float32. Queries in 16 bits have none."""
    return tuple(strided_tensor("float32", 2) for _ in range(count))


def symbolic_modifiers(spec) -> tuple | None:
    """Return tensors of a spec's scores, mask and sinks; None without any."""
    return tuple(strided_tensor(*types) for types in spec.modifier_types) or None


def compact_tensor(dtype: str, shape: tuple) -> object:
    """A contiguous tensor."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(ELEMENT_TYPES[dtype], shape, stride_order=order)


def symbolic_stream() -> object:
    """Torch's current stream on the tensors' device."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
