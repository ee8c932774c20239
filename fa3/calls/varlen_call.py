"""What a call on packed sequences leads to, whatever its lengths are: attention and its gradients.

`fa3.calls.varlen` checks and remembers it. For gradients `fa3.calls.autograd` comes back,
and in graphs `fa3.calls.operators`.
"""

from dataclasses import dataclass, field

import torch

from fa3.calls import varlen_gpu
from fa3.calls.known_lengths import HostSeqlens, LastHostSeqlens
from fa3.calls.results import hide_all_keys_of_packed
from fa3.calls.varlen_gpu import DecodeLaunch
from fa3.planning.gpu import Gpu
from fa3.planning.joined import MultiSequencePlan, PackedSizes
from fa3.planning.ragged import RaggedPlan
from fa3.planning.short_queries import ShortPlan
from fa3.problem import AttentionSpec, Window
from fa3.reference.cache import NO_TABLES, execute_decode
from fa3.reference.dropout import Dropout
from fa3.reference.joined import execute_joined
from fa3.reference.varlen import RaggedOperands, execute_varlen

Route = tuple[bool, int, int, bool]
"""Which kernels attend for a call: whether sequences share tiles, and if not, the most keys of a
sequence, the most queries of one that is the decode kernel's (0 if none is), and whether sequences
may be the forward kernel's. A plain tuple: another one takes the host 0.3 us."""


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """What a call leads to, whatever its lengths are.

    Fields:
        plan: how the forward kernel attends.
        window: with bounds that any lengths may have.
        joined: how short sequences share tiles; None if they cannot.
        short: how the decode kernel attends from few queries; None if it cannot.
        gpu: the kernels; None on the CPU.
        latest: the lengths that the latest call had on the CPU, if one had them there.
    """

    plan: RaggedPlan
    window: Window
    joined: MultiSequencePlan | None
    short: ShortPlan | None
    gpu: varlen_gpu.PackedKernels | None
    latest: LastHostSeqlens = field(default_factory=LastHostSeqlens, compare=False)

    @property
    def spec(self) -> AttentionSpec:
        return self.plan.spec

    def attend(
        self,
        operands: RaggedOperands,
        sizes: PackedSizes,
        tensors: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: Dropout | None,
        has_gradients: bool = False,
        known: HostSeqlens | None = None,
        splits: bool = False,
    ) -> None:
        """Write the rows of out and lse that belong to queries that are used.

        Args:
            sizes: of the call, which bound the lengths.
            tensors: of the spec's scores, mask and sinks.
            dropout: where the spec has it.
            has_gradients: whether gradients may be asked for. Then no sequence is the decode
                kernel's, so that its bits do not depend on other sequences.
            known: the lengths, if the host knows them; they fit the call.
            splits: whether long sequences may be split where SMs would be idle; known lengths
                may say that they are not.
        """
        if 0 in (sizes.batch, sizes.total_q, sizes.heads):
            return
        if known is None:
            route = self.route(sizes, has_gradients, None, splits)
        else:
            known_call, known_gradients, route = known.route
            if known_call is not self or known_gradients != has_gradients:
                route = self.route(known.sizes(sizes.heads), has_gradients, known)
                known.route = self, has_gradients, route
        packs_sequences, longest_k, _, _ = route
        if longest_k == 0:
            query_lengths = operands.cu_seqlens_q, operands.seqused_q
            sinks = tensors[-1] if self.spec.sinks else None
            hide_all_keys_of_packed(operands.out, operands.lse, *query_lengths, sinks)
        elif not packs_sequences:
            may_cut = known is not None and known.may_cut and splits and not has_gradients
            self.attend_one_by_one(operands, route, tensors, scale, dropout, known, may_cut)
        elif self.gpu is None:
            execute_joined(self.joined, self.window, operands, scale, tensors)
        else:
            self.gpu.joined.launch(operands, sizes, tensors, scale)

    def route(
        self,
        sizes: PackedSizes,
        has_gradients: bool,
        known: HostSeqlens | None,
        splits: bool = False,
    ) -> Route:
        """Which kernels run.

        Args:
            sizes: as far as the host knows them.
            splits: whether all sequences may be the decode kernel's.
        """
        longest_q, longest_k = sizes[-2:]
        packs_sequences = longest_k > 0 and sizes.total_q > 0
        if packs_sequences and self.joined is not None and self.joined.suits(sizes):
            return True, longest_k, 0, False
        most = 0
        if self.short is not None and not has_gradients:
            most = self.short.most_queries(sizes)
            if known is not None and known.fewest_q > most:
                most = 0
            if splits and most < longest_q:
                most = self.short.most_queries_of_idle(sizes, self.window) or most
        return False, longest_k, most, most < longest_q

    def most_short_of_table(self, known: HostSeqlens, heads: int) -> int | None:
        """The `short_queries` of the table that a call without gradients walks; None if it walks
        none."""
        packs_sequences, longest_k, most, has_long = self.route(known.sizes(heads), False, known)
        return most if longest_k and not packs_sequences and has_long else None

    def attend_one_by_one(
        self,
        operands: RaggedOperands,
        route: Route,
        tensors: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: Dropout | None,
        known: HostSeqlens | None,
        may_cut: bool,
    ) -> None:
        """Attend in tiles with rows of one sequence, of the decode kernel and of the forward
        kernel.

        Args:
            may_cut: whether tiles may be cut.
        """
        _, longest_k, most, has_long = route
        if self.gpu is None:
            if most:
                plan = self.short.plan(most, has_long, self.window)
                execute_decode(plan, operands, longest_k, scale, tensors)
            if has_long:
                table = None
                if known is not None:
                    heads = operands.q.shape[1], operands.k.shape[1]
                    table = known.make(self.plan.table_kind(self.window, most, *heads, may_cut))
                execute_varlen(
                    self.plan, self.window, operands, scale, tensors, dropout, most, table
                )
        elif has_long:
            short = None
            if most:
                given = operands, NO_TABLES, tensors, scale, 0, longest_k
                kernels = self.gpu.short(most, True)
                short = DecodeLaunch(most, lambda table: kernels.start(*given, table))
            drawn = None if dropout is None else dropout.arguments
            self.gpu.alone.launch(
                operands, operands.k.shape[0], longest_k, tensors, scale, short, None, drawn, known,
                may_cut,
            )  # fmt: skip
        elif most:
            kernels = self.gpu.short(most, False)
            kernels.start(operands, NO_TABLES, tensors, scale, 0, longest_k)()


def plan_varlen(
    spec: AttentionSpec,
    window: Window,
    heads_q: int,
    heads_kv: int,
    has_used_q: bool,
    has_used_k: bool,
    gpu: Gpu,
    sm_margin: int,
) -> RaggedCall:
    """What a call leads to that runs on the CPU, or whose kernels are to be loaded.

    Args:
        gpu: without the SMs that are reserved, of which there are `sm_margin`.
    """
    given = spec, has_used_q, has_used_k, gpu
    short = None
    if not sm_margin:
        # Two kernels beside each other would take the SMs that are reserved.
        short = ShortPlan.of(spec, heads_q, heads_kv, has_used_q, has_used_k, gpu)
    return RaggedCall(RaggedPlan(*given), window, MultiSequencePlan.of(*given), short, None)
