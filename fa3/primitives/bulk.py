"""Copies and reductions of plain runs of global memory, without a tensor map."""

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.vectors import FLOAT_BYTES


@cute.jit
def load_run(source: cute.Tensor, target: cute.Tensor, barrier):
    """Copy contiguous fp32 numbers to shared memory; an mbarrier counts their bytes.

    One warp calls it; the addresses and the size are multiples of 16 bytes.
    """
    size = Int32(cute.size(source) * FLOAT_BYTES)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                Int32(target.iterator.toint()),
                source.iterator.toint(),
                size,
                Int32(barrier.toint()),
            ],
        )


@cute.jit
def store_run(source: cute.Tensor, target: cute.Pointer):
    """Copy contiguous fp32 numbers in shared memory to global memory; otherwise as `add_run`."""
    send_run("cp.async.bulk.global.shared::cta.bulk_group", source, target)


@cute.jit
def add_run(source: cute.Tensor, target: cute.Pointer):
    """Add contiguous fp32 numbers in shared memory to those in global memory; a bulk group.

    One thread calls it, which also waits for the group; alignment is as for `load_run`.
    """
    send_run("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", source, target)


def send_run(instruction: str, source: cute.Tensor, target: cute.Pointer):
    """Issue a bulk instruction from shared to global memory, and commit its group."""
    cute.arch.inline_ptx(
        f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};",
        read_only_args=[
            target.toint(),
            Int32(source.iterator.toint()),
            Int32(cute.size(source) * FLOAT_BYTES),
        ],
    )
    cute.arch.cp_async_bulk_commit_group()
