"""How prepared calls run: by a plan, or a packed call's route.

A call gives its tensors and numbers in one dictionary, from which the reference takes them on the
CPU. On a GPU `Prepared` launches the kernels of any plan on the current stream of the tensors'
device. It adds counters and memory, which it gives back for other calls, and picks the arguments of
each kernel by their names.

Lengths are read on the device only, so a captured graph stays right while they grow. With packed
queries, `fa3.planning.routes` decides which kernels serve a call. The forward kernel walks a table
of tiles, which a kernel before it makes from the lengths; tiles may be split. One more kernel
recomputes rows whose fixed row max failed, or, where sequences share tiles, rows that are not
finite. Sequences with few queries may be the decode kernel's, which then overlaps the forward
kernel. All that depends on lengths is in tensors that a call owns while it launches. So calls in
several threads, on several streams and in captured graphs share nothing that is written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3.calls.call import MOST_RAGGED_ROWS, AttentionCall
from fa3.calls.devices import gpu_for_call
from fa3.calls.operands import FP8_DTYPE, hide_all_keys
from fa3.calls.options import Options
from fa3.kernels.segment_table import segment_rows
from fa3.kernels.tile_table import shift_of_work, words_of_table
from fa3.planning import routes
from fa3.planning.decode import DecodePlan, Sizes, check_workspace
from fa3.planning.launch import NO_MEMORY, FromCall, Launch, Memory
from fa3.planning.planner import Plan
from fa3.planning.routes import PackedSizes, Route, Signature
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.problem import REMEMBERED
from fa3.reference.walker import execute, execute_decode, execute_packed
from fa3.running.compiler import load_kernel
from fa3.running.memory import (
    Table,
    capture_of,
    current_device,
    current_stream,
    is_capturing,
    memory_of,
)
from fa3.schedules.recompute import words_of_marks
from fa3.schedules.split import FIELDS
from fa3.schedules.stretches import most_slots
from fa3.scores.masks import ROW_RECORD


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The launches of a plan with their kernels loaded."""

    launchers: tuple[Callable[[dict[str, Any]], object], ...]  # take a call's values
    names: frozenset[str]  # of the values that kernels take
    memory: Memory = NO_MEMORY
    table: Table | None = None  # of the schedule, or where sequences end
    name_of_table: str = "schedule_state"  # the value that the table becomes
    numbers: Mapping[str, int] | None = None  # values that all calls have

    @classmethod
    def of(
        cls, launches: Sequence[Launch], memory: Memory = NO_MEMORY, table: Table | None = None
    ) -> "Prepared":
        """Load the kernels of launches."""
        launchers = tuple([launcher(load_kernel(one.kernel), one.arguments) for one in launches])
        names = {x for one in launches for x in one.arguments.values() if isinstance(x, FromCall)}
        return cls(launchers, frozenset(names), memory, table)

    def run(self, values: dict[str, Any]) -> None:
        """Launch the kernels.
        `values` are of the call, by name; more are added."""
        q = values["q"]
        device = q.device
        if device.index != current_device():
            with torch.cuda.device(device):
                return self.run(values)
        loan, memory = None, self.memory
        if memory.counters or memory.kept:
            stream = current_stream(device.index)
            # Now: to zero new counters takes a kernel, and none may come between two others.
            stream_memory = memory_of(device, stream, capture_of(stream))
            loan = stream_memory.lend(self, stream)
            values |= loan.values[self]
        elif self.table is not None:
            stream = current_stream(device.index)
            values[self.name_of_table] = self.table.on(stream, capture_of(stream))
        elif self.numbers is not None:
            values |= self.numbers
        if memory.parts:
            for name, count in memory.parts:
                values[name] = q.new_empty(count, dtype=torch.float32)
            if memory.cleared:
                values["workspace"][: memory.cleared].zero_()
        for launch in self.launchers:
            launch(values)
        # Counters do not go back if anything was raised: then they may not be zero.
        if loan is not None:
            stream_memory.take_back(loan)
        return None


def launcher(kernel: Callable, arguments: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    """Return a function that calls a kernel with a launch's arguments.
    It is compiled: to add what is the same in all calls to the values, and to pick all arguments by
    name, took the host 0.6 us more."""
    sources = [f"values[{x!r}]" if isinstance(x, FromCall) else n for n, x in arguments.items()]
    return eval(code_of_call(", ".join(sources)), {"kernel": kernel} | arguments)


@functools.cache
def code_of_call(arguments: str) -> CodeType:
    """Compile a call of a kernel with values and fixed arguments."""
    return compile(f"lambda values: kernel({arguments})", __name__, "eval")


Attend = Callable[[dict[str, Any]], None]
"""Writes out and, unless it is None, the log-sum-exp. There are queries and keys. It takes a call's
values by name, see `PreparedAttention.attend`."""


def attend_by(
    plan: Plan | DecodePlan, device: torch.device, launches: tuple[Launch, ...] = ()
) -> Attend:
    """Return what attends by a plan, or on GPUs by `launches`.
    It serves calls of any lengths. Loads the kernels; there are none on CPUs."""
    if device.type == "cuda":
        table = None if plan.table is None else Table.upload(plan.table, device)
        return Prepared.of(launches or plan.launches(), plan.memory, table).run
    if isinstance(plan, Plan):
        return functools.partial(execute, plan)
    return functools.partial(execute_decode, plan, max_seqlen_k=plan.sizes.capacity)


@dataclass(frozen=True, slots=True)
class PackedCall:
    """What a call with packed queries leads to, whatever its lengths are."""

    signature: Signature  # what routes depend on; bounds of the window that any lengths may have
    # Gives the launches of a route with so many queries of the decode kernel. It loads kernels when
    # they are first asked for: those for many keys, or for split tiles, most calls never have.
    prepared: Callable[[str, int], Prepared] | None  # None on the CPU
    # Gives the route of calls of these sizes, which layers of a model share, and its launches with
    # all that sizes determine. The launches are None on the CPU.
    find: Callable[[PackedSizes], tuple[Route, Prepared | None]]

    @classmethod
    def of(cls, signature: Signature, on_gpu: bool = False) -> "PackedCall":
        """Load the kernels that calls of any lengths are likely to need."""

        @functools.lru_cache(maxsize=REMEMBERED)
        def prepared(name: str, most_queries: int) -> Prepared:
            launches, memory = routes.launches_of_route(signature, name, most_queries), NO_MEMORY
            if most_queries:
                memory = signature.decode_plan(most_queries, name != routes.DECODE).memory
            return Prepared.of(launches, memory)

        # The latest: layers of a model share sizes, and most steps have others.
        @functools.lru_cache(maxsize=1)
        def find(sizes: PackedSizes) -> tuple[Route, Prepared | None]:
            route = routes.choose_route(signature, sizes)
            if not on_gpu or route.name in (routes.NOTHING, routes.ZEROS):
                return route, None
            made = prepared(route.name, route.most_queries)
            return route, prepared_for(sizes, made, signature, route)

        if on_gpu and signature.call == routes.PACKED:
            prepared(routes.FORWARD, 0)
            if signature.shared_tiling is not None:
                prepared(routes.SHARED, 0)
        return cls(signature, prepared if on_gpu else None, find)

    def sizes(self, values: dict[str, Any]) -> PackedSizes:
        """What the host knows of the lengths."""
        (total_q, heads, _), batch = values["q"].shape, values["cu_seqlens_q"].shape[0] - 1
        if self.signature.call == routes.CACHE:
            longest_q, longest_k = values["max_seqlen_q"], self.signature.capacity
            return PackedSizes(batch, heads, total_q, 0, longest_q, longest_k)
        total_k, (longest_q, longest_k) = values["k"].shape[0], values["longest"]
        longest = min(longest_q, total_q), min(longest_k, total_k)
        return PackedSizes(batch, heads, total_q, total_k, *longest)

    def attend(self, values: dict[str, Any]) -> None:
        """Write the rows of out and lse that belong to used queries.
        `values` are of the call, by name; see `PreparedAttention.attend`. Lengths of a cache have
        the new keys. `longest`, or of a cache `max_seqlen_q`, bounds the lengths."""
        signature, sizes = self.signature, self.sizes(values)
        route, prepared = self.find(sizes)
        if route.name == routes.ZEROS:
            hide_all_keys(values)
            return
        if prepared is not None:
            if route.name == routes.SHARED:
                new_empty = values["cu_seqlens_q"].new_empty
                num_rows = prepared.numbers["num_tiles"] * signature.shared_tiling.tile_m
                values["rows"] = rows = new_empty(num_rows, ROW_RECORD)
                # Softcaps have no tensors, so the mask's comes first.
                values["shared_modifiers"] = (rows, *(values["modifiers"] or ()))
            prepared.run(values)
            return
        if route.has_forward or signature.call == routes.PACKED:
            values["max_seqlen_k"] = sizes.max_seqlen_k
        if route.most_queries:
            plan = signature.decode_plan(route.most_queries, route.has_forward)
            execute_decode(plan, values, values["max_seqlen_k"] or plan.sizes.capacity)
        if route.has_forward or route.name == routes.SHARED:
            execute_packed(signature, values, route.most_queries)


def prepared_for(
    sizes: PackedSizes, prepared: Prepared, signature: Signature, route: Route
) -> Prepared:
    """Return a route's launches with numbers and memory for these sizes."""
    batch, heads, total_q, total_k, _, most_keys = sizes
    numbers = {"max_seqlen_k": most_keys}
    if route.name == routes.DECODE:
        # Alone, it knows the capacity of a cache.
        return prepared if signature.cache else replace(prepared, numbers=numbers)
    num_sms, memory = signature.gpu.num_sms, prepared.memory
    # Of a cache, each sequence has room for so many keys.
    numbers |= {"total_q": total_q, "total_k": most_keys if signature.cache else total_k}
    if route.name == routes.SHARED:
        num_tiles = -(-total_q // signature.shared_tiling.tile_m)
        tables, num_marked = [("tiles", num_tiles), ("table", batch)], batch * heads
        numbers |= {
            "num_tiles": num_tiles,
            "num_clusters": min(num_sms, num_tiles * heads),
            "num_recompute": min(num_sms, num_marked),
        }
    else:
        tile_m, tile_n = signature.config.tile_m, signature.config.tile_n
        capacity = number_of_packed_tiles(total_q, batch, tile_m)
        tables, num_marked = [("table", capacity)], capacity * heads
        num_ctas = min(num_sms, num_marked)
        numbers |= {
            "capacity": capacity,
            "shift": shift_of_work(most_keys, tile_n),
            "short_queries": route.most_queries,
            "qhead_per_kvhead": heads // signature.heads_kv,
            "num_clusters": num_ctas,
            "num_recompute": num_ctas,
        }
        if "segments" in prepared.names:
            num_slots = most_slots(num_marked, num_sms)
            memory = Memory.of_parts(num_slots, tile_m, signature.spec.head_dim_v)
            words = segment_rows(num_marked) * num_sms * FIELDS
            kept = *memory.kept, ("segments", words, "int32")
            memory = memory._replace(parts=prepared.memory.parts, kept=kept)
            numbers |= {"heads": heads, "num_slots": num_slots, "num_clusters": num_sms}
    marks = [("marks", words_of_marks(num_marked))] * ("marks" in prepared.names)
    # Exactly so many: kernels count a table's tiles, and place marks, by its size.
    kept = *memory.kept, *[(name, words_of_table(count), "int32") for name, count in tables]
    memory = memory._replace(counters=(*memory.counters, *marks), kept=kept)
    return replace(prepared, memory=memory, numbers=numbers)


class EqualQueries(NamedTuple):
    """How calls on a cache with equally many queries run: packed."""

    packed: PackedCall
    sizes: PackedSizes  # of all calls
    # Their launches; None on the CPU. They know where sequences end, unless they were prepared
    # during a capture: then each call makes its own ends, which takes a launch.
    prepared: Prepared | None

    def attend(self, values: dict[str, Any]) -> None:
        """Write out and, unless it is None, the log-sum-exp.
        `values` are of the call, by name; the log-sum-exp becomes a packed one."""
        lse, prepared, sizes = values["lse"], self.prepared, self.sizes
        if prepared is None or prepared.table is None:
            seqlen, device = sizes.max_seqlen_q, values["q"].device
            ends = torch.arange(0, sizes.total_q + 1, seqlen, dtype=torch.int32, device=device)
            values["cu_seqlens_q"], values["max_seqlen_q"] = ends, seqlen
        if lse is not None:
            batch, heads, seqlen = lse.shape
            # In a packed log-sum-exp, heads come first.
            packed = values["lse"] = lse[0] if batch == 1 else lse.new_empty(heads, batch * seqlen)
            values["address_of_lse"] = packed.data_ptr()
        if prepared is None:
            values["q"], values["o"] = (values[x].view(-1, *values[x].shape[2:]) for x in "qo")
            self.packed.attend(values)
        else:
            prepared.run(values)
        if lse is not None and batch > 1:
            lse.copy_(packed.view(heads, batch, seqlen).transpose(0, 1))


@functools.lru_cache(maxsize=REMEMBERED)
def decode_alone(signature: Signature, most_queries: int, device: torch.device) -> Attend:
    """How calls on a cache run that the decode kernel serves alone."""
    plan = signature.decode_plan(most_queries, overlaps_forward=False)
    if device.type == "cuda" and plan.cut.has_parts:
        memory = torch.cuda.get_device_properties(device).total_memory
        check_workspace(plan.workspace, plan.spec.head_dim_v, signature.capacity, memory)
    return attend_by(plan, device)


packed_call = functools.lru_cache(maxsize=REMEMBERED)(PackedCall.of)
"""What calls with packed queries lead to, whatever the number of their sequences is."""


def prepare_on_cache(call: AttentionCall, options: Options) -> tuple[Attend, bool]:
    """Choose how calls on a cache run, and load their kernels.
    The call is valid, and has room for keys and queries. Also says whether the forward kernel may
    have a part in it."""
    device = call.q.device
    on_gpu = device.type == "cuda"
    window = options.window.tighten(MOST_RAGGED_ROWS, call.capacity)
    group = call.heads_q // call.heads_kv
    tiles = Sizes(call.batch, call.seqlen_q, call.heads_kv, group, call.capacity)
    fits = 2 * tiles.num_tiles * tiles.most_blocks(window) <= LARGEST
    # A single query stands at the last key.
    spec = call.spec(options, window, window.right == 0 or call.seqlen_q == 1)
    signature = Signature(
        routes.CACHE, spec, window, call.heads_q, call.heads_kv,
        gpu_for_call(device, options.sm_margin), options.sm_margin, call.cache_layout,
        call.capacity, 1 if fits else call.batch, call.is_packed or call.may_be_packed,
        has_equal_queries=call.may_be_packed,
        has_used_q=call.seqused_q is not None, num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
    )  # fmt: skip
    rows = MOST_RAGGED_ROWS if call.is_packed else call.batch * call.seqlen_q
    sizes = PackedSizes(call.batch, call.heads_q, rows, 0, call.seqlen_q, call.capacity)
    name, most_queries, _ = routes.choose_route(signature, sizes)
    if name == routes.DECODE:
        signature = replace(
            signature,
            has_packed_queries=call.is_packed,
            has_fp8_q=call.q.dtype == FP8_DTYPE,
            appends=call.k_new is not None and not call.is_packed,
        )
        # The number of packed sequences and their most queries change in every step. So it does not
        # count, except in how keys are cut, and how many CTAs serve an FP8 cache.
        if not (call.is_packed and signature.may_split) or call.has_fp8_cache:
            signature = replace(signature, batch=call.batch)
        return decode_alone(signature, most_queries, device), False
    made = packed_call(signature, on_gpu)
    # Now, since no length may cause a compilation.
    routes_to_load = [(name, most_queries)]
    if call.is_packed:
        both = [routes.BOTH, *[routes.BOTH_SPLIT] * signature.can_split]
        routes_to_load = [(name, signature.short_limit) for name in both]
        routes_to_load.append((routes.DECODE, signature.most_queries_of_few))
    for route in routes_to_load if made.prepared else ():
        made.prepared(*route)
    if call.is_packed:
        return made.attend, True
    _, prepared = made.find(sizes)
    if prepared is not None and not is_capturing(device):
        ends = Table.upload(np.arange(0, rows + 1, call.seqlen_q, dtype=np.int32), device)
        prepared = replace(prepared, table=ends, name_of_table="cu_seqlens_q")
    return EqualQueries(made, sizes, prepared).attend, True
