"""One sequence over several GPUs: a layer's gradients, compared with one GPU.

torchrun --nproc-per-node 2 -m docs.examples.context_parallel
"""

import torch
import torch.distributed as dist

import fa3
import fa3.distributed as fd

HEADS, HEAD_DIM = 4, 32


def project(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return q, k and v of rows at these positions; q and k are turned by RoPE."""
    q, k, v = (x @ weight).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
    frequencies = 0.01 ** torch.linspace(0, 1, HEAD_DIM // 2, device=x.device)
    turn = torch.polar(torch.ones(1, device=x.device), positions[:, None, None] * frequencies)
    pairs = (torch.view_as_complex(y.float().unflatten(-1, (-1, 2))) for y in (q, k))
    q, k = (torch.view_as_real(y * turn).flatten(-2).to(x.dtype) for y in pairs)
    return [q, k, v]


def example(device: str = "cpu", seqlen: int = 1001, group: dist.ProcessGroup | None = None):
    """Return the largest difference of the weight's gradient from one process's, as a share."""
    # All ranks draw the same numbers.
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, seqlen, 64, generator=draw).bfloat16().to(device)
    weight = torch.randn(64, 3 * HEADS * HEAD_DIM, generator=draw).mul(0.1).bfloat16().to(device)

    weight.requires_grad_()
    out = fa3.flash_attn_func(*project(x, weight, torch.arange(seqlen, device=device)), causal=True)
    (alone,) = torch.autograd.grad(out.float().square().sum() / seqlen, weight)

    layout = fd.zigzag
    positions = layout.positions(seqlen, group, device)
    q, k, v = project(layout.shard(x, group=group), weight, positions)
    out = fd.flash_attn_func(q, k, v, layout=layout, group=group, causal=True)
    # This rank's share of the loss; the shares of the gradient add up over ranks.
    (gradient,) = torch.autograd.grad(out.float().square().sum() / seqlen, weight)
    gradient = gradient.float()
    dist.all_reduce(gradient, group=group)
    return ((gradient - alone).abs().max() / alone.abs().max()).item()


if __name__ == "__main__":
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    difference = example("cuda" if has_gpu else "cpu", 8192 if has_gpu else 1001)
    if dist.get_rank() == 0:
        print(
            f"Checked: {dist.get_world_size()} ranks give one's gradient, but for {difference:.4f}"
        )
    dist.destroy_process_group()
