"""TMA loads of a head's tiles from global memory into pipeline stages, for forward's producer."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute

from fa3.primitives.tma import TmaTensor


def tile_loader(
    tma: TmaTensor,
    smem: cute.Tensor,
    pipe,
    head,
    rows,
    copies: int = 1,
    rank=0,
    cluster: int = 1,
    load_more: Callable | None = None,
) -> Callable:
    """A function (index, state) -> next state that loads tile `index` of a head into a stage.

    It waits until the stage is free. The loads signal the stage's mbarrier.

    Args:
        smem: (rows, columns, stages * copies), the stages of the pipeline `pipe`.
        rows: where the rows of the head's sequence lie.
        copies: TMA copies that fill one stage, from neighbouring tiles in global memory.
        rank: this CTA's rank in the cluster. It loads its share of each tile for all CTAs.
        load_more: (index, state), loads what else belongs to the stage.
    """
    to_smem, from_gmem = tma.tiles_of_head(smem, head, rows, rank, cluster)
    multicast = {} if cluster == 1 else {"mcast_mask": cutlass.Int16((1 << cluster) - 1)}

    def load(index, state):
        pipe.producer_acquire(state)
        for i in range(copies):
            cute.copy(
                tma.atom,
                from_gmem[None, index * copies + i],
                to_smem[None, state.index * copies + i],
                tma_bar_ptr=pipe.producer_get_barrier(state),
                **multicast,
            )
        if load_more is not None:
            load_more(index, state)
        state.advance()
        return state

    return load
