"""Gradients that other people's code brings to a backward pass: waited for, or refused by name.

On a GPU kernels are launched on addresses, and these tensors have none. So what reaches a backward
pass must lie in memory.
"""

import pytest
import torch
import torch.distributed as dist
from test_eager import Wrapper
from test_operators import backward_case, varlen_backward_case
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from valid_calls import freed

import fa3
from fa3.calls import backward

# As in test_eager, and what torch says of its own collectives.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor, as the result of a collective that is not waited for."""
    found = collectives.all_gather_tensor(tensor.contiguous(), 0, dist.group.WORLD)
    assert isinstance(found, collectives.AsyncCollectiveTensor) and found.data_ptr() == 0
    return found


def distributed(tensor: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


class Through(torch.autograd.Function):
    """The same tensor; its gradient is changed."""

    @staticmethod
    def forward(ctx, tensor, change):
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def leaves(where="cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = 2, 20 if where == "cpu" else 200, 4, 64
    return [torch.randn(shape, device=where).bfloat16().requires_grad_() for _ in range(3)]


def dense(q, k, v):
    return fa3.flash_attn_func(q, k, v, return_lse=True, deterministic=True)


def packed(q, k, v):
    total = 2 * q.shape[1]
    cut = total * 13 // 40
    ends = torch.tensor([0, cut, total], dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    longest = total - cut
    return fa3.flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, return_lse=True, deterministic=True
    )


CALLS = {"dense": dense, "packed": packed}


@pytest.fixture(autouse=True)
def all_lie_in_memory(monkeypatch):
    """Fail if a backward pass gets anything but plain tensors, or None."""
    compute = backward.BackwardCall.gradients

    def look(call, operands, lengths, tensors, *rest):
        for tensor in (*operands, *tensors):
            assert tensor is None or (type(tensor) is torch.Tensor and tensor.data_ptr())
            assert tensor is None or not tensor.is_neg()
        return compute(call, operands, lengths, tensors, *rest)

    monkeypatch.setattr(backward.BackwardCall, "gradients", look)


def gradients_through(call, of_result: int, change, where="cpu") -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, of which a result's own gradient is changed.

    Args:
        call: takes q, k and v.
    """
    inputs = leaves(where)
    results = list(call(*inputs))
    results[of_result] = Through.apply(results[of_result], change)
    return torch.autograd.grad(sum((x.float() ** 2).sum() for x in results), inputs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_are_brought_to_memory(call, where):
    """On a GPU the stream waits for the collective before the kernels read."""
    for of_result in (0, 1):
        expected = gradients_through(call, of_result, lambda x: x, where)
        for change in (gathered, lambda x: torch._neg_view(-x)):
            found = gradients_through(call, of_result, change, where)
            assert all(map(torch.equal, found, expected))


REFUSED = {
    "DTensor": (distributed, r"got a DTensor .*Pass what its \.to_local\(\) returns"),
    "wrapper": (Wrapper, "got a Wrapper that does not"),
    "freed": (freed, "got a Tensor that does not"),
    "zero": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "got a Tensor"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("of_result", "name"), [(0, "out"), (1, "the log-sum-exp")])
@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_that_lie_nowhere(call, of_result, name, kind):
    change, complaint = REFUSED[kind]
    complaint = f"^the gradient of {name} must lie in memory, {complaint}"
    with pytest.raises(NotImplementedError, match=complaint):
        gradients_through(CALLS[call], of_result, change)


@pytest.mark.parametrize("call", CALLS)
def test_tangents_of_gradients_are_not_dropped(call):
    with (
        forward_ad.dual_level(),
        pytest.raises(
            NotImplementedError, match=r"^the gradient of out carries a forward-mode tan"
        ),
    ):
        gradients_through(CALLS[call], 0, lambda x: forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("call", CALLS)
def test_what_hooks_of_saved_tensors_give(call):
    """Hooks may gather what they spread over ranks, without waiting."""

    def found(unpack):
        inputs = leaves()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out, _ = CALLS[call](*inputs)
        return torch.autograd.grad(out.float().sum(), inputs)

    assert all(map(torch.equal, found(gathered), found(lambda x: x)))
    complaint = (
        r"^a tensor that was saved for backward must lie in memory, got a DTensor .*to_local"
    )
    with pytest.raises(NotImplementedError, match=complaint):
        found(distributed)


@pytest.mark.parametrize("call", ["dense", "packed"])
def test_inputs_are_not_waited_for(call):
    q, k, v = (x.detach() for x in leaves())
    with pytest.raises(NotImplementedError, match=r"^q must lie .*Pass what its \.wait\(\) ret"):
        CALLS[call](gathered(q), k, v)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_in_a_graph(call, where):
    torch.compiler.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True)
    for of_result in (0, 1):
        expected = gradients_through(call, of_result, lambda x: x, where)
        found = gradients_through(run, of_result, gathered, where)
        assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------------ operators

BACKWARD = {"dense": backward_case, "packed": varlen_backward_case}


@pytest.mark.parametrize("call", BACKWARD)
@pytest.mark.parametrize("name", ["d_out", "d_lse", "out", "lse"])
def test_operators_check_what_they_read(call, name):
    operator, arguments = BACKWARD[call]()

    def run(change):
        return operator(**arguments | {name: change(arguments[name])})

    run(lambda x: x)
    for change, error in (
        (freed, NotImplementedError),
        (lambda x: x[:-1], ValueError),
        (lambda x: x.double(), TypeError),
    ):
        with pytest.raises(error, match=f"^{name} must "):
            run(change)


@pytest.mark.parametrize("call", BACKWARD)
def test_operators_want_a_contiguous_log_sum_exp(call):
    operator, arguments = BACKWARD[call]()
    lse = torch.stack((arguments["lse"],) * 2, dim=-1)[..., 0]
    with pytest.raises(ValueError, match=r"^lse must be contiguous"):
        operator(**arguments | {"lse": lse})


def test_operators_check_lengths_on_the_host():
    operator, arguments = varlen_backward_case()
    ends = torch.tensor([0, 99, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q must "):
        operator(**arguments | {"cu_seqlens_q": ends, "cu_seqlens_k": ends})
