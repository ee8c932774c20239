"""mbarrier pipelines from TMA or from warps to the warps that read."""

import cutlass
import cutlass.cute as cute
from cutlass import pipeline


def threads(count: int = 1) -> pipeline.CooperativeGroup:
    """Threads that arrive on a pipeline's mbarriers."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def tma_pipeline(
    barriers,  # a field of shared memory, with two mbarriers for each stage
    dtype,
    layout,  # (rows, columns, stages * copies), of the buffer
    readers: int,  # threads of a CTA that release a stage
    copies: int = 1,  # TMA copies that fill one stage
    peers: int = 1,  # CTAs of a cluster that receive them
    more_bytes: int = 0,  # what else is copied into a stage
) -> pipeline.PipelineTmaAsync:
    """The pipeline of a buffer that TMA fills."""
    stage_bytes = cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0)))
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=cute.size(layout, mode=[2]) // copies,
        producer_group=threads(),
        consumer_group=threads(readers * peers),
        tx_count=copies * stage_bytes + more_bytes,
        cta_layout_vmnk=cute.make_layout((1, peers, 1, 1)),
        mcast_mode_mn=(0, 1),
        defer_sync=True,
    )


def thread_pipeline(
    barriers, stages: int, writers: int, readers: int, kind: type = pipeline.PipelineAsync
) -> pipeline.PipelineAsync:
    """The pipeline of a buffer that some threads fill and others read."""
    return kind.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=threads(writers),
        consumer_group=threads(readers),
        defer_sync=True,
    )


@cute.jit
def lend_stages(pipe: pipeline.PipelineTmaAsync, count, state):
    """Lend the next stages to readers, which write to them.

    The producer warp calls this, and readers release the stages as if they had read them.
    """
    for _ in cutlass.range(count, unroll=1):
        pipe.sync_object_empty.wait(state.index, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipe.producer_get_barrier(state))
        state.advance()
    return state


@cute.jit
def skip_stages(pipe: pipeline.PipelineTmaAsync, count, state):
    """Release stages that were lent to other warpgroups."""
    for _ in cutlass.range(count, unroll=1):
        pipe.consumer_wait(state)
        pipe.consumer_release(state)
        state.advance()
    return state
