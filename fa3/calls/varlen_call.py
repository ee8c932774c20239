"""What a call on packed sequences leads to, whatever its lengths are: attention and its gradients.

`fa3.calls.varlen` checks and remembers it. For gradients `fa3.calls.autograd` comes back,
and in graphs `fa3.calls.operator_backward`.
"""

from dataclasses import dataclass, field, replace

import torch

from fa3.calls import varlen_gpu
from fa3.calls.known_lengths import HostSeqlens, LastHostSeqlens
from fa3.calls.modifiers import ModifierSpec
from fa3.calls.ragged import hide_all_keys_of_packed
from fa3.calls.varlen_gpu import DecodeLaunch
from fa3.planning.gpu import Gpu
from fa3.planning.ragged import RaggedPlan
from fa3.planning.routes import (
    PACKED,
    SHARED,
    ZEROS,
    PackedSizes,
    Route,
    Signature,
)
from fa3.problem import AttentionSpec, Window
from fa3.reference.cache import NO_TABLES, execute_decode
from fa3.reference.dropout import Dropout
from fa3.reference.joined import execute_joined
from fa3.reference.varlen import RaggedOperands, execute_varlen


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """What a call leads to, whatever its lengths are.

    Fields:
        signatures: what routes depend on, by whether a gradient is wanted, and whether all
            sequences may be the decode kernel's. The window has bounds that any lengths may have.
        structure: what of its scores, mask and sinks is in the spec.
        gpu: the kernels; None on the CPU.
        latest: the lengths that the latest call had on the CPU, if one had them there.
    """

    signatures: dict[tuple[bool, bool], Signature]
    structure: ModifierSpec
    gpu: varlen_gpu.PackedKernels | None
    latest: LastHostSeqlens = field(default_factory=LastHostSeqlens, compare=False)

    @property
    def signature(self) -> Signature:
        """Of calls without gradients."""
        return self.signatures[False, True]

    @property
    def plan(self) -> RaggedPlan:
        return self.signature.plan

    @property
    def window(self) -> Window:
        return self.signature.window

    @property
    def spec(self) -> AttentionSpec:
        return self.signature.spec

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
        if route.name == ZEROS:
            query_lengths = operands.cu_seqlens_q, operands.seqused_q
            sinks = tensors[-1] if self.spec.sinks else None
            hide_all_keys_of_packed(operands.out, operands.lse, *query_lengths, sinks)
        elif route.name != SHARED:
            may_cut = known is not None and known.may_cut and splits and not has_gradients
            longest_k = sizes.max_seqlen_k if known is None else known.longest_k
            self.attend_one_by_one(
                operands, route, longest_k, tensors, scale, dropout, known, may_cut
            )
        elif self.gpu is None:
            execute_joined(self.plan, self.window, operands, scale, tensors)
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
        if known is not None:
            sizes = sizes._replace(fewest_q=known.fewest_q)
        return self.signatures[has_gradients, splits].route(sizes)

    def most_short_of_table(self, known: HostSeqlens, heads: int) -> int | None:
        """The `short_queries` of the table that a call without gradients walks; None if it walks
        none."""
        route = self.route(known.sizes(heads), False, known)
        return route.most_queries if route.has_forward else None

    def attend_one_by_one(
        self,
        operands: RaggedOperands,
        route: Route,
        longest_k: int,
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
        most, has_long = route.most_queries, route.has_forward
        if self.gpu is None:
            if most:
                plan = self.signature.decode_plan(most, has_long)
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
    structure: ModifierSpec,
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
    signature = Signature(
        PACKED, spec, window, heads_q, heads_kv, gpu, sm_margin, has_used_q=has_used_q,
        has_used_k=has_used_k,
    )  # fmt: skip
    signatures = {
        (has_gradients, splits): replace(
            signature, has_gradients=has_gradients, num_splits=0 if splits else 1
        )
        for has_gradients in (False, True)
        for splits in (False, True)
    }
    return RaggedCall(signatures, structure, None)
