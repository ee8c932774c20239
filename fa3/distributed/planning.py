"""`plan`: work, bytes and time of attention over ranks, predicted without GPUs."""

import functools
import math
from dataclasses import dataclass

import torch

from fa3.calls.options import as_pair, check_window, integer, real
from fa3.complaints import shown
from fa3.distributed.layouts import SequenceLayout, check_sequence_layout
from fa3.distributed.transfer import shares_of_documents
from fa3.problem import NO_BOUND, Window

AUTO = "gather", "ulysses"  # not ring, which rounds the output of each hop


@dataclass(frozen=True)
class RankPlan:
    """How a call over ranks runs; pairs are forward and backward.

    Attributes:
        pairs: of a query and a key that it sees, for each rank, in all query heads together.
        tflop, compute_us: of the rank with most work.
        received_mib: by each rank; exposed_us: waiting for it, where no computation hides it.
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


@functools.lru_cache(maxsize=64)
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
    sizes = {"num_ranks": num_ranks, "heads_q": heads_q, "head_dim": head_dim}
    for name, size in (sizes | {"head_dim_v": head_dim_v or head_dim}).items():
        integer(name, size, 1)
    for name, rate in (("tflops", tflops), ("gbps", gbps)):
        if not real(name, rate) > 0:
            raise ValueError(f"{name} must be positive, got {rate}")
    window = check_window(as_pair(window_size), causal)
    if heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(f"heads_q must be a multiple of heads_kv, got {heads_q} and {heads_kv}")
    methods = methods_for(method, num_ranks, heads_q, window, has_slopes, layout.is_packed)
    pairs = tuple(heads_q * x for x in count_pairs(layout, seqlen, num_ranks, window))
    columns, others = head_dim + (head_dim_v or head_dim), (num_ranks - 1) / num_ranks
    kv, qo = (2 * seqlen * heads * columns / 2**20 for heads in (heads_kv, heads_q))
    # Keys of whole documents stay where they are.
    documents = shares_of_documents(layout.chunks(seqlen, num_ranks)) if layout.is_packed else ()
    cut = sum(sum(x) for x in documents if max(x) < sum(x)) / max(seqlen, 1) if documents else 1
    copies = math.lcm(heads_kv, num_ranks) // heads_kv
    sent = qo + copies * kv, qo + copies * kv * (1 + (copies > 1))
    plans = []
    for name in methods:
        # dK and dV are float32, but for Ulysses where no key/value head is there twice.
        shares, received = pairs, (kv * others * cut, 3 * kv * others * cut)
        if name == "ulysses":
            shares = (sum(pairs) // num_ranks,) * num_ranks
            received = sent[0] * others / num_ranks, sent[1] * others / num_ranks
        tflop = tuple(factor * 2e-12 * columns * max(shares) for factor in (1, 2.5))
        compute = tuple(x / tflops * 1e6 for x in tflop)
        exposed = tuple(x * 2**20 / gbps / 1e3 for x in received)
        if name == "ring":
            # Ranks compute while hops are under way, but for the last one of dK and dV.
            exposed = 0.0, 2 * exposed[0] / max(num_ranks - 1, 1)
        alone = sum(compute) * sum(pairs) / max(*shares, 1)
        efficiency = alone / num_ranks / max(sum(compute) + sum(exposed), 1e-9)
        plans.append(RankPlan(name, layout, shares, tflop, received, compute, exposed, efficiency))
    return max(plans, key=lambda one: one.efficiency)


def count_pairs(layout: SequenceLayout, seqlen: int, num_ranks: int, window: Window) -> list[int]:
    """Return the visible pairs of queries and keys, for each rank."""
    ends = torch.tensor(layout.cu_seqlens if layout.is_packed else (0, seqlen))
    rows = torch.arange(seqlen)
    document = torch.searchsorted(ends, rows, right=True)
    first, last = ends[document - 1], ends[document] - 1
    if window.left >= 0:
        first = torch.maximum(first, rows - window.left)
    if window.right >= 0:
        last = torch.minimum(last, rows + window.right)
    chunks, pairs = layout.chunks(seqlen, num_ranks), last - first + 1
    return [sum(int(pairs[x.start : x.stop].sum()) for x in held) for held in chunks]


def methods_for(
    method: str, num_ranks: int, heads_q: int, window: Window, has_slopes: bool, is_packed: bool
) -> list[str]:
    """Return the methods that suit a call, or raise."""
    refused = {"gather": "", "ring": "alibi_slopes" if has_slopes else "", "ulysses": ""}
    if is_packed:
        refused["ring"] = "documents"
    if window.right != 0:  # keys after a query are seen
        refused["gather"] = "alibi_slopes" * has_slopes
    if method not in (accepted := ("auto", *refused)):
        raise ValueError(f"method must be one of {accepted}, got {shown(method)}")
    names = AUTO if method == "auto" else (method,)
    suited = [name for name in names if not refused[name]]
    if methods := [name for name in suited if name != "ulysses" or heads_q % num_ranks == 0]:
        return methods
    if suited:
        raise ValueError(f"heads_q must be a multiple of {num_ranks} ranks, got {heads_q}")
    when = " where keys after a query are seen" if names[0] == "gather" else ""
    raise NotImplementedError(
        f"{refused[names[0]]} is not supported with method={names[0]!r}{when}: pass "
        "method='ulysses'"
    )
