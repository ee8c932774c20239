"""Gradients that a collective on the GPU computes: the stream waits before the kernels read."""

import pytest
import torch
import torch.distributed as dist
from test_arriving_gradients import Through
from torch.distributed import _functional_collectives as collectives

import fa3

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(gradient: torch.Tensor) -> torch.Tensor:
    return collectives.all_gather_tensor(gradient.contiguous(), 0, dist.group.WORLD)


def dense(q, k, v):
    return fa3.flash_attn_func(q, k, v, return_lse=True, deterministic=True)


def packed(q, k, v):
    ends = torch.tensor([0, 130, 400], dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return fa3.flash_attn_varlen_func(
        q, k, v, ends, ends, 270, 270, return_lse=True, deterministic=True
    )


@pytest.mark.parametrize("call", [dense, packed])
@pytest.mark.parametrize("of_result", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_collectives(call, of_result, is_compiled, device):
    torch.manual_seed(0)
    shape = 2, 200, 4, 64
    inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
    torch.compiler.reset()
    run = torch.compile(call, backend="aot_eager") if is_compiled else call

    def gradients(change):
        results = list(run(*inputs))
        results[of_result] = Through.apply(results[of_result], change)
        return torch.autograd.grad(sum((x.float() ** 2).sum() for x in results), inputs)

    assert all(map(torch.equal, gradients(gathered), gradients(lambda x: x)))
