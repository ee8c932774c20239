"""Whether a call may run here and now, on its tensors' memory.

A kernel is launched on addresses. What torch hangs on its own operators passes it by: a node of a
graph that is being traced, a gradient, a tangent of forward mode, the batch of a vmap. In a graph
an operator stands for the call (`fa3.calls.operators`). A call that would lose another of these is
refused, and so is a tensor that lies nowhere.
"""

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

RECORDERS = (
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.FUNCTIONAL,
)
"""Modes that keep what operators do, or do not let them do it. Others, that count or print what
goes by, are none of our business."""

LOWEST_ADDRESS = 1 << 33
"""Nearly all memory lies above, on GPUs too. An address below may be an offset from nowhere."""


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a graph records what is done to a tensor now.
    Then an operator of `fa3.calls.operators` stands for the call. Raises NotImplementedError where
    no operator can stand, or for what stands for other tensors: a launch would be lost."""
    # torch.compile reads this line itself, and no further.
    return is_dynamo_compiling() or (
        (
            _len_torch_dispatch_stack()
            or _are_functorch_transforms_active()
            or _is_torch_function_mode_enabled()
            or _is_tracing()
        )
        and is_recorded(tensor)
    )


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether one of the modes that are active records what operators do."""
    if _is_tracing():
        raise NotImplementedError(
            "torch.jit.trace cannot see the kernels: use torch.compile or torch.export, or call "
            "fa3 outside of it"
        )
    if _are_functorch_transforms_active():
        # It may wrap what is allocated under it, also next to tensors that it does not know.
        try:
            address_of("what a call allocates", tensor.new_empty(1))
        except NotImplementedError as error:
            raise NotImplementedError(
                "fa3 was called under a transform of torch.func (vmap, grad, vjp, jvp, jacrev, "
                "functionalize), which is not supported: gradients come from torch.autograd"
            ) from error
    return bool(_len_torch_dispatch_stack_pre_dispatch()) or any(
        _get_dispatch_mode(key) is not None for key in RECORDERS
    )


def check_undifferentiated(name: str) -> None:
    """Raise if a tensor that requires grad would get none."""
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but would get no gradient here. Only q, k, v and sinks of "
            "flash_attn_func, and of flash_attn_varlen_func without page_table, get one. "
            "Detach it or use torch.no_grad()"
        )


def cannot_be_traced() -> NotImplementedError:
    return NotImplementedError(
        "a graph is being traced (torch.compile, torch.export, make_fx or a FakeTensorMode). This "
        "call cannot be part of one: call it outside of the graph"
    )


def address_of(name: str, tensor: torch.Tensor) -> int:
    """Where a tensor begins."""
    try:
        address = tensor.data_ptr()
        is_low = address < LOWEST_ADDRESS
    except (RuntimeError, TypeError) as error:
        # What stands for an address under torch.compile compares with nothing. Asking only here
        # costs other calls no time.
        raise cannot_be_traced() if is_dynamo_compiling() else no_memory(name, tensor) from error
    # Meta tensors may have none: no kernel runs.
    has_memory = is_low and not tensor.is_meta and tensor.numel()
    if has_memory and address == tensor.storage_offset() * tensor.element_size():
        raise no_memory(name, tensor)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            f"{name} carries a forward-mode tangent, which is not supported: pass "
            "torch.autograd.forward_ad.unpack_dual of it, without the tangent"
        )
    return address


def no_memory(name: str, tensor: torch.Tensor) -> NotImplementedError:
    # A collective that is under way has the first, a DTensor the second.
    ways = [way for way in ("wait", "to_local") if callable(getattr(tensor, way, None))]
    advice = f". Pass what its .{ways[0]}() returns" if ways else ""
    return NotImplementedError(
        f"{name} must lie in memory, got a {type(tensor).__name__} that does not: sparse, nested "
        "and fake tensors, subclasses that wrap others and the tensors of torch.func's transforms "
        f"(vmap, grad, jvp) are not supported{advice}"
    )


def in_memory(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor of a backward pass with memory to read.
    The current stream waits for a collective that computes it. A gradient comes from other people's
    code, and so does a tensor that was kept, where hooks of saved tensors are active."""
    if not isinstance(tensor, torch.Tensor) or lie_in_memory(tensor):
        return tensor
    # Nearly all tensors have been spared this.
    if type(tensor) is not torch.Tensor and torch.distributed.is_available():
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
    address_of(name, tensor)
    return tensor.resolve_neg()


def lie_in_memory(*tensors: torch.Tensor | None) -> bool:
    """Whether `in_memory` has nothing to do for these tensors, as nearly always."""
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        return (
            forward_ad._current_level < 0
            and min(map(torch.Tensor.data_ptr, present)) >= LOWEST_ADDRESS
            and not any(map(torch.Tensor.is_neg, present))
        )
    except (RuntimeError, TypeError):
        return False
