"""Attention of a few queries to the keys and values of a cache: what is launched for it.

`fa3.calls.prepared_cache` validates a call and has it prepared here, once for all calls that are
described alike; `fa3.calls.varlen_gpu` has the same done for sequences with few queries and packed
keys, and `fa3.calls.forward` hands over the plans of dense calls with few queries. A prepared call
allocates its workspace and launches the plan's kernels. Lengths are read on the device only: a
captured graph stays right while they grow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fa3.calls.cache_call import CacheCall
from fa3.calls.known_lengths import KnownLengths
from fa3.calls.modifiers import structure_of
from fa3.planning.decode import DecodePlan, Sizes, check_workspace, choose_cut
from fa3.planning.gpu import H200
from fa3.primitives.cache_blocks import CacheLayout, CacheTables
from fa3.problem import AttentionSpec, Window
from fa3.reference.cache import execute_decode
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.running.counters import CaptureCounters, StreamCounters, counters_of
from fa3.running.graphs import capture_of, current_device, current_stream


@dataclass(frozen=True, slots=True)
class PreparedDecode:
    """How calls of a description run.

    Fields:
        attends: the entry of the kernel that attends; None on the CPU.
        integers: what it takes after the softmax scale, but for the most packed keys.
        merges: the entry of the kernel that merges parts; None if there are none, or `attends`
            merges them.
        sizes: what it takes after the tensors.
        workspace: numbers of 32 bits that parts take.
        cleared: how many of them, the first ones, must be zero before the launches.
        counters: how many counters the kernel that attends takes to merge parts; 0 if it does not.
    """

    plan: DecodePlan
    attends: Callable | None = None
    integers: tuple[int, ...] = ()
    merges: Callable | None = None
    sizes: tuple[int, ...] = ()
    workspace: int = 0
    cleared: int = 0
    counters: int = 0

    @classmethod
    def on_gpu(cls, plan: DecodePlan) -> "PreparedDecode":
        """Load the kernels of a plan."""
        (attends, integers, _), *rest = (one.loaded(load_kernel) for one in plan.launches)
        size = plan.workspace
        numbers = size.numbers(plan.spec.head_dim_v)
        if not rest:
            counters = size.num_slots if plan.merges_inside else 0
            return cls(plan, attends, integers, workspace=numbers, counters=counters)
        ((merges, sizes, _),) = rest
        cleared = size.numbers_of_records if plan.clears_records else 0
        return cls(plan, attends, integers, merges, sizes, numbers, cleared)

    def attend(
        self, q, k, v, out, lse, seqlens, batch_idx, leftpad, page_table, slopes, sinks, ends,
        softmax_scale: float, seqlen_new: int = 0, known: KnownLengths | None = None,
        used_q: torch.Tensor | None = None, of_functions: tuple[torch.Tensor, ...] = (),
    ) -> None:  # fmt: skip
        """Run on the current stream of the tensors' GPU, or on the CPU.

        None of the tensors that have queries or keys is empty. Without lengths the cache is full.

        Args:
            q, k, v, out, lse, ends: dense, or with `ends`, which are cu_seqlens_q, packed queries.
            batch_idx, leftpad, page_table: of `CacheTables`.
            seqlen_new: keys that each sequence has beyond those that `seqlens` says.
            known: the lengths, if the host knows them; of use to `PreparedMixed` only.
            used_q: how many of packed queries are used; None for all.
            of_functions: the tensors of the user's score and mask.
        """
        modifiers = modifiers_of(slopes, sinks, of_functions)
        if self.attends is None:
            operands = RaggedOperands(q, k, v, out, lse, ends, None, used_q, seqlens)
            tables = CacheTables(batch_idx, leftpad, page_table)
            most_keys = self.plan.sizes.capacity
            execute_decode(
                self.plan, operands, most_keys, softmax_scale, modifiers, tables, seqlen_new
            )
            return
        device = q.device
        if self.counters and device.index != current_device():
            with torch.cuda.device(device):
                self.attend(
                    q, k, v, out, lse, seqlens, batch_idx, leftpad, page_table, slopes, sinks, ends,
                    softmax_scale, seqlen_new, None, used_q, of_functions,
                )  # fmt: skip
            return
        lse = 0 if lse is None else lse.data_ptr()
        workspace, words = None, 0
        if self.counters:
            of_stream, counters, workspace = self.memory_on(device)
            words = counters.data_ptr()
        elif self.workspace:
            workspace = q.new_empty(self.workspace, dtype=torch.float32)
            if self.cleared:
                workspace[: self.cleared].zero_()
        # In the order of `DecodeArguments`; to make one of them would take the host 0.5 us.
        self.attends(
            q, k, v, out, lse, ends, used_q, None, seqlens, seqlen_new, batch_idx, leftpad,
            page_table, modifiers, workspace, words, softmax_scale, *self.integers, 0, None,
        )  # fmt: skip
        if self.counters:
            of_stream.give_back(counters)
            of_stream.give_back_parts(workspace)
        if self.merges is not None:
            self.merges(out, lse, sinks, None, None, workspace, *self.sizes)

    def start(
        self,
        operands: RaggedOperands,
        max_seqlen_k: int,
        modifiers: tuple[torch.Tensor, ...] | None,
        softmax_scale: float,
        page_table: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """Begin to attend on a GPU from the packed sequences that the plan has room for.

        Args:
            operands: k and v may be a cache, with `seqused_k` keys of each sequence.
            max_seqlen_k: no sequence has more keys.
            modifiers: the tensors of the spec's scores, mask and sinks.
            page_table: the pages of a cache that has some.
            table: the tiles of the forward kernel, if that kernel is launched next.

        Returns:
            what launches the merge of the parts, if the kernel that attends does not merge them.
        """
        q, k, v, out, lse, ends_q, ends_k, used_q, used_k = operands
        device = q.device
        if self.counters and device.index != current_device():
            with torch.cuda.device(device):
                return self.start(
                    operands, max_seqlen_k, modifiers, softmax_scale, page_table, table
                )
        lse = 0 if lse is None else lse.data_ptr()
        words = 0
        if self.counters:
            of_stream, counters, workspace = self.memory_on(device)
            words = counters.data_ptr()
        else:
            workspace = q.new_empty(self.workspace, dtype=torch.float32)
        # In the order of `DecodeArguments`.
        self.attends(
            q, k, v, out, lse, ends_q, used_q, ends_k, used_k, 0, None, None, page_table, modifiers,
            workspace, words, softmax_scale, *self.integers, max_seqlen_k, table,
        )  # fmt: skip
        if self.counters:
            of_stream.give_back(counters)
            of_stream.give_back_parts(workspace)
            return merge_nothing
        sinks = modifiers[-1] if self.plan.spec.sinks else None
        return partial(self.merges, out, lse, sinks, None, None, workspace, *self.sizes)

    def memory_on(
        self, device: torch.device
    ) -> tuple[StreamCounters | CaptureCounters, torch.Tensor, torch.Tensor]:
        """What the current stream of a GPU has, the present one, and of it counters and memory for
        the parts of a launch that merges them."""
        stream = current_stream(device.index)
        of_stream = counters_of(device, stream, capture_of(stream))
        return of_stream, of_stream.take(self.counters), of_stream.take_parts(self.workspace)


def merge_nothing() -> None:
    """Launch no merge: the kernel that attends has merged the parts."""


def modifiers_of(
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    of_functions: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, ...] | None:
    """What kernels take for scores, mask and sinks."""
    if slopes is sinks is None:
        return of_functions or None
    return tuple(tensor for tensor in (slopes, *of_functions, sinks) if tensor is not None)


def spec_of_call(call: CacheCall, window: Window, softcap: float) -> AttentionSpec:
    """What a call computes, with the bounds that its window has."""
    structure = structure_of(
        softcap,
        None if call.alibi_slopes is None else len(call.alibi_slopes.shape),
        None if call.sinks is None else call.sinks.dtype,
        is_causal=window.right == 0,
    )
    if call.functions is not None:
        structure = structure.joined(call.functions)
    return structure.spec(call.q.dtype, call.head_dim, call.head_dim_v, window)


def cache_layout(call: CacheCall) -> CacheLayout:
    """How the keys of a call lie in its cache."""
    return CacheLayout(
        0 if call.page_table is None else call.page_size,
        call.cache_batch_idx is not None,
        call.cache_leftpad is not None,
    )


def prepare_decode(
    call: CacheCall,
    window: Window,
    softcap: float = 0.0,
    num_splits: int = 0,
    batch_invariant: bool = False,
    sm_margin: int = 0,
    is_beside: bool = False,
) -> PreparedDecode:
    """Choose how calls of a description run, and load their kernels.

    Args:
        call: valid, and with room for keys and queries.
        window: keys that a query sees before and after its own position, aligned bottom-right.
        softcap: see `fa3.scores.scores.Softcap`; 0 for none.
        num_splits, batch_invariant: see `fa3.planning.decode.choose_cut`.
        sm_margin: SMs to leave to other kernels.
        is_beside: see `DecodePlan`.
    """
    heads_kv, device = call.k_cache.shape[2], call.q.device
    sizes = Sizes(call.batch, call.seqlen_q, heads_kv, call.heads_q // heads_kv, call.capacity)
    window = sizes.bounds(window)
    spec, cache = spec_of_call(call, window, softcap), cache_layout(call)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    num_ctas = (properties.multi_processor_count if on_gpu else H200.num_sms) - sm_margin
    kind = call.is_packed, call.k is not None
    cut = choose_cut(sizes, window, num_ctas, num_splits, batch_invariant, *kind)
    of_kernel = spec, cache, sizes, window, cut, num_ctas, call.is_packed
    plan = DecodePlan(*of_kernel, call.seqused_q is not None, is_beside)
    if not on_gpu:
        return PreparedDecode(plan)
    if cut.has_parts:
        check_workspace(plan.workspace, call.head_dim_v, call.capacity, properties.total_memory)
    return PreparedDecode.on_gpu(plan)
