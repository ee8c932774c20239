"""Before the backward kernel: each row's log-sum-exp and delta, what sums of dQ begin with
(`fa3.primitives.query_begin`), and zeros for the backward kernel's counters.

A CTA has a tile of queries of the first sections; the backward kernel begins the others
(`fa3.schedules.query_sections`).

Timeline of a CTA
    wait for the kernel before | rows of O and dO, all loads in flight | zeros | sums over lanes
    The backward kernel is launched early and waits in hardware for the end of this one.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute

from fa3.kernels.attention_kernel import AttentionKernel
from fa3.kernels.backward_launch import BackwardConfig, BeginArguments, CallSizes
from fa3.primitives import arguments
from fa3.primitives.query_begin import QueryBegin
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork

BEGIN_THREADS = 256


@dataclass(frozen=True)
class BackwardBegin(AttentionKernel):
    """The kernel, compiled for one (spec, config).

    Fields:
        is_ragged: whether sequences are packed.
        has_used_q: whether these have `seqused_q`.
        has_words: whether there is a word for each tile of queries, see `Backward`.
    """

    spec: AttentionSpec
    config: BackwardConfig
    is_ragged: bool = False
    has_used_q: bool = False
    has_words: bool = True

    entry_name: ClassVar[str] = "fa3_backward_begin"

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream."""
        sizes = CallSizes.symbolic(self.is_ragged)
        kinds = self.has_words, self.is_ragged, self.has_used_q
        call = BeginArguments.symbolic(self.spec, sizes, *kinds)
        return [*call, arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *given):
        """Launch on `BeginArguments` and a stream."""
        *given, stream = given
        call = BeginArguments(*given)
        if cutlass.const_expr(self.is_ragged):
            lengths = call.cu_seqlens_q, call.seqused_q
            queries = PackedQueryWork.of(call.out, *lengths, self.config.tile_m)
            call = call.in_batch()
        else:
            queries = DenseQueryWork.of(call.out, self.config.tile_m)
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        self.kernel(call, queries).launch(
            grid=(call.num_tiles, 1, 1),
            block=(BEGIN_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, call: BeginArguments, queries: DenseQueryWork | PackedQueryWork):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        ctas, _, _ = cute.arch.grid_dim()
        first = block * BEGIN_THREADS + thread
        for i in cutlass.range(first, call.counters.shape[0], ctas * BEGIN_THREADS, unroll=1):
            call.counters[i] = 0
        # The last tiles first: what the backward kernel needs first is then in L2.
        own = queries.at(ctas - 1 - block, self.config.tile_m)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        begin = QueryBegin.of(self.spec, self.config, call, BEGIN_THREADS // WARP)
        begin.load(own, warp)
        begin.write(own, warp)
