"""Attention of a few queries to the keys and values of a cache: what is launched for it.

`fa3.calls.kvcache` validates a call and has it prepared here, once for all calls that are
described alike; `fa3.calls.packed_calls` has it done for sequences with few queries and packed
keys, and `fa3.calls.forward` hands over the plans of dense calls with few queries. A prepared call
allocates its workspace and launches the plan's kernels. Lengths are read on the device only: a
captured graph stays right while they grow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fa3.calls.call import AttentionCall
from fa3.calls.launcher import lse_address
from fa3.calls.options import Options
from fa3.kernels.combine import CombineArguments
from fa3.kernels.decode_launch import DecodeArguments
from fa3.planning.decode import DecodePlan, Sizes, check_workspace, choose_cut, ctas_of_call
from fa3.planning.gpu import H200
from fa3.planning.launch import Launch, slots
from fa3.primitives.cache_blocks import CacheTables
from fa3.reference.cache import execute_decode
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.running.counters import counters_of
from fa3.running.graphs import capture_of, current_device, current_stream

TENSORS_AND_LENGTHS = slice(*slots(DecodeArguments, "q", "modifiers"))
"""From q to page_table, in the order of `DecodeArguments`: tensors, lengths and `CacheTables`. One
slice: slots one by one take the host 0.2 us more."""

MODIFIERS, DESCALES, WORKSPACE, COUNTERS, SOFTMAX_SCALE, MAX_SEQLEN_K, TILE_TABLE = slots(
    DecodeArguments,
    "modifiers", "descales", "workspace", "counters", "softmax_scale", "max_seqlen_k", "table",
)  # fmt: skip
MERGED = slice(*slots(CombineArguments, "o", "sinks"))
SINKS, PARTS_OF_TILES = slots(CombineArguments, "sinks", "workspace")


@dataclass(frozen=True, slots=True)
class PreparedDecode:
    """How calls of a description run."""

    plan: DecodePlan
    attends: Launch | None = None  # the kernel that attends; None on the CPU
    # The kernel that merges parts; None if there are none, or `attends` merges them.
    merges: Launch | None = None
    workspace: int = 0  # numbers of 32 bits that parts take
    cleared: int = 0  # how many of them, the first ones, must be zero before the launches
    # How many counters the kernel that attends takes to merge parts; 0 if it does not.
    counters: int = 0

    @classmethod
    def of(cls, plan: DecodePlan, on_gpu: bool) -> "PreparedDecode":
        """Load the kernels of a plan, if it runs on a GPU."""
        if not on_gpu:
            return cls(plan)
        attends, *merges = (one.loaded(load_kernel) for one in plan.launches)
        size = plan.workspace
        numbers = size.numbers(plan.spec.head_dim_v)
        if not merges:
            counters = size.num_slots if plan.merges_inside else 0
            return cls(plan, attends, workspace=numbers, counters=counters)
        cleared = size.numbers_of_records if plan.clears_records else 0
        return cls(plan, attends, *merges, workspace=numbers, cleared=cleared)

    def start(
        self,
        # See `fa3.reference.cache.execute_decode`; with packed queries, those sequences that the
        # plan has room for.
        operands: RaggedOperands,
        tables: CacheTables,  # where sequences are in the cache
        # The tensors of the spec's scores, mask and sinks.
        modifiers: tuple[torch.Tensor, ...] | None,
        softmax_scale: float,
        seqlen_new: int = 0,  # keys that each sequence has beyond `seqused_k`
        max_seqlen_k: int = 0,  # no sequence has more keys, if they are packed
        # The tiles of the forward kernel, if that kernel is launched next.
        table: torch.Tensor | None = None,
        descales: tuple[torch.Tensor, ...] | None = None,  # see `DecodeArguments`
    ) -> Callable[[], None]:
        """Attend on the current stream, or on the CPU; return what launches the merge of parts.
        None of the tensors that have queries or keys is empty. Without lengths the cache is full.
        """
        if self.attends is None:
            most_keys = max_seqlen_k or self.plan.sizes.capacity
            given = operands, most_keys, softmax_scale, modifiers, tables, seqlen_new, descales
            execute_decode(self.plan, *given)
            return merge_nothing
        q, k, v, out, lse, ends_q, ends_k, used_q, seqlens = operands
        device = q.device
        if self.counters and device.index != current_device():
            with torch.cuda.device(device):
                return self.start(
                    operands, tables, modifiers, softmax_scale, seqlen_new, max_seqlen_k, table,
                    descales,
                )  # fmt: skip
        lse = lse_address(lse)
        arguments = self.attends.template.copy()
        arguments[TENSORS_AND_LENGTHS] = (
            q, k, v, out, lse, ends_q, used_q, ends_k, seqlens, seqlen_new, *tables,
        )  # fmt: skip
        arguments[MODIFIERS] = modifiers
        arguments[DESCALES] = descales
        arguments[SOFTMAX_SCALE] = softmax_scale
        arguments[MAX_SEQLEN_K] = max_seqlen_k
        arguments[TILE_TABLE] = table
        if self.counters:
            stream = current_stream(device.index)
            stream_memory = counters_of(device, stream, capture_of(stream))
            counters = stream_memory.take(self.counters)
            arguments[WORKSPACE] = workspace = stream_memory.take_parts(self.workspace)
            arguments[COUNTERS] = counters.data_ptr()
            self.attends.kernel(*arguments)
            stream_memory.give_back(counters)
            stream_memory.give_back_parts(workspace)
            return merge_nothing
        workspace = None
        if self.workspace:
            workspace = q.new_empty(self.workspace, dtype=torch.float32)
            if self.cleared:
                workspace[: self.cleared].zero_()
        arguments[WORKSPACE] = workspace
        self.attends.kernel(*arguments)
        if self.merges is None:
            return merge_nothing
        merge = self.merges.template.copy()
        merge[MERGED] = out, lse
        merge[SINKS] = modifiers[-1] if self.plan.spec.sinks else None
        merge[PARTS_OF_TILES] = workspace
        return partial(self.merges.kernel, *merge)


def merge_nothing() -> None:
    """Launch no merge: the kernel that attends has merged the parts."""


def prepare_decode(
    call: AttentionCall, options: Options, overlaps_forward: bool = False
) -> PreparedDecode:
    """Choose how calls of a description run, and load their kernels.

    Args:
        call: valid, and with room for keys and queries.
        overlaps_forward: see `DecodePlan`.
    """
    device = call.q.device
    group = call.heads_q // call.heads_kv
    sizes = Sizes(call.batch, call.seqlen_q, call.heads_kv, group, call.capacity)
    window = sizes.bounds(options.window)
    spec = call.spec(options, window, window.right == 0)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    num_sms = (properties.multi_processor_count if on_gpu else H200.num_sms) - options.sm_margin
    num_ctas = ctas_of_call(spec, call.cache_layout, sizes, window, num_sms)
    cut = choose_cut(
        sizes, window, num_ctas, options.num_splits, options.batch_invariant, call.is_packed,
        call.k_new is not None,
    )  # fmt: skip
    plan = DecodePlan(
        spec, call.cache_layout, sizes, window, cut, num_ctas, call.is_packed,
        call.seqused_q is not None, overlaps_forward, call.has_fp8_q,
    )  # fmt: skip
    if on_gpu and cut.has_parts:
        check_workspace(plan.workspace, call.head_dim_v, call.capacity, properties.total_memory)
    return PreparedDecode.of(plan, on_gpu)
