"""`plan`: work, bytes and time of attention over ranks, predicted without GPUs."""

import math
from dataclasses import dataclass
from itertools import chain

from fa3.calls.options import DENSE, PACKED, Options, as_pair, check_window, flag, integer, real
from fa3.complaints import shown
from fa3.distributed.alone import KeyPart
from fa3.distributed.hops import keeps_keys
from fa3.distributed.layouts import Documents, SequenceLayout, check_sequence_layout
from fa3.distributed.steps import pairs_of, steps_of
from fa3.problem import NO_BOUND, Window

AUTO = "gather", "ulysses"  # not ring, which has a launch and a merge for each hop


@dataclass(frozen=True)
class RankPlan:
    """How a call over ranks runs; pairs are forward and backward.

    Attributes:
        pairs: of a query and a key that it sees, for each rank, in all query heads together.
        tflop, compute_us: of the rank with most work.
        received_mib: by the rank that gets most; exposed_us: waiting, where nothing is computed.
        efficiency: the time of one rank alone, over the ranks' time together.
    """

    method: str
    layout: SequenceLayout
    pairs: tuple[int, ...]
    tflop: tuple[float, ...]
    received_mib: tuple[float, ...]
    compute_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    efficiency: float

    def __str__(self) -> str:
        lines = [f"{self.method} over {len(self.pairs)} ranks, efficiency {self.efficiency:.3f}"]
        for i, name in enumerate(("forward: ", "backward:")):
            lines.append(
                f"  {name} {self.tflop[i]:.4g} TFLOP in {self.compute_us[i]:.4g} us, "
                f"{self.received_mib[i]:.4g} MiB received, {self.exposed_us[i]:.4g} us exposed"
            )
        return "\n".join(lines)


def plan(
    layout: SequenceLayout,
    seqlen: int,
    num_ranks: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    has_slopes: bool = False,
    method: str = "auto",
    tflops: float = 600.0,
    gbps: float = 330.0,
) -> RankPlan:
    """Predict attention over ranks in 16 bits, batch 1.

    Args:
        layout: `zigzag`, `contiguous` or `documents(cu_seqlens)`; seqlen: of the whole sequence.
        causal, window_size: as in `flash_attn_func`; has_slopes: with alibi_slopes.
        method: "auto" for the more efficient of gather and Ulysses.
        tflops: of a GPU that only computes. gbps: received by a GPU while all receive.
    """
    check_sequence_layout(layout)
    integer("seqlen", seqlen, 0)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"num_ranks": num_ranks, "heads_q": heads_q, "heads_kv": heads_kv}
    for name, size in (sizes | {"head_dim": head_dim, "head_dim_v": head_dim_v}).items():
        integer(name, size, 1)
    for name, rate in (("tflops", tflops), ("gbps", gbps)):
        if not real(name, rate) > 0:
            raise ValueError(f"{name} must be positive, got {rate}")
    window = check_window(as_pair(window_size), flag("causal", causal))
    if heads_q % heads_kv:
        raise ValueError(f"heads_q must be a multiple of heads_kv, got {heads_q} and {heads_kv}")
    methods = methods_for(method, num_ranks, heads_q, window, flag("has_slopes", has_slopes))
    chunks = layout.chunks(seqlen, num_ranks)
    kind = PACKED if isinstance(layout, Documents) else DENSE
    part = KeyPart(Options(window, has_gradient=True, kind=kind), None, False)
    ends = layout.cu_seqlens if kind == PACKED else (0, seqlen)
    local, steps = steps_of(chunks, ends, (), part, methods == ["ring"])
    parts = [list(chain(*x)) for x in zip(local, *(of_ranks for _, of_ranks in steps), strict=True)]
    pairs = tuple(heads_q * sum(map(pairs_of, x)) for x in parts)
    rows, alone = sum(x.most_received() for x, _ in steps), sum(pairs)
    columns, copies = head_dim + head_dim_v, math.lcm(heads_kv, num_ranks) // heads_kv
    plans, others = [], seqlen * (num_ranks - 1) / num_ranks**2
    for name in methods:
        # K and V come again unless they are kept. dK and dV are float32.
        again = 2.0 if keeps_keys(part, num_ranks, heads_q, heads_kv) else 3.0
        shares, sent = pairs, (1.0 * heads_kv * rows, again * heads_kv * rows)
        if name == "ulysses":
            shares = (alone // num_ranks,) * num_ranks
            heads = heads_q + copies * heads_kv, heads_q + copies * heads_kv * (1 + (copies > 1))
            sent = heads[0] * others, heads[1] * others
        received = tuple(2 * columns * x / 2**20 for x in sent)
        tflop = tuple(factor * 2e-12 * columns * max(shares) for factor in (1, 2.5))
        compute = tuple(x / tflops * 1e6 for x in tflop)
        exposed = tuple(x * 2**20 / gbps / 1e3 for x in received)
        if name == "ring":
            # Ranks compute while hops are under way, but for the last one of dK and dV.
            exposed = 0.0, 2 * exposed[0] / max(num_ranks - 1, 1)
        efficiency = sum(compute) * alone / max(*shares, 1) / num_ranks
        efficiency /= max(sum(compute) + sum(exposed), 1e-9)
        plans.append(RankPlan(name, layout, shares, tflop, received, compute, exposed, efficiency))
    return max(plans, key=lambda one: one.efficiency)


def methods_for(
    method: str, num_ranks: int, heads_q: int, window: Window, has_slopes: bool
) -> list[str]:
    """Return the methods that suit a call, or raise."""
    if method not in (accepted := ("auto", "gather", "ring", "ulysses")):
        raise ValueError(f"method must be one of {accepted}, got {shown(method)}")
    names = AUTO if method == "auto" else (method,)
    # Slopes count positions from the last key: it must be the query's, or the last of all.
    suits = {"gather": window.right == 0 or not has_slopes, "ring": not has_slopes}
    suited = [name for name in names if suits.get(name, True)]
    if methods := [name for name in suited if name != "ulysses" or heads_q % num_ranks == 0]:
        return methods
    if suited:
        why = " (alibi_slopes leave only method='ulysses')" if method == "auto" else ""
        raise ValueError(f"heads_q must be a multiple of {num_ranks} ranks{why}, got {heads_q}")
    when = " where keys after a query are seen" if names[0] == "gather" else ""
    raise NotImplementedError(
        f"alibi_slopes is not supported with method={names[0]!r}{when}: pass method='ulysses'"
    )
