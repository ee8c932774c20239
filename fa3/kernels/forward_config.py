"""How the forward kernel is tiled, and what fits a CTA."""

from dataclasses import MISSING, dataclass, fields, replace

from fa3.primitives.shared_memory import check_fits, padded
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import AttentionSpec

REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Consumer warpgroups -> registers a thread of (producer, consumer) after setmaxnreg."""

OTHER_REGISTERS = 24
"""Registers that a consumer thread needs beside its fragments of S, P and O."""

BOUNDED = 60.0
"""Largest natural logits of bounded scores that are taken relative to 0, where rows for which
that fails are computed again."""

HOLDS_POWERS = {"bfloat16": True, "float16": False}
"""Whether P has the range of fp32, as sums and O have."""


@dataclass(frozen=True)
class Config:
    """Tiling of the forward kernel.

    Fields:
        tile_m: query rows of a CTA's tile, 64 for each consumer warpgroup.
        tile_n: keys of a block.
        q_stages: Q tiles in shared memory; two let the next tile's Q arrive early.
        kv_stages: blocks of K, and of V, in shared memory.
        cluster_m: CTAs along M that share K and V by multicast (1 or 2).
        cluster_h: CTAs of neighbouring query heads that share K and V by multicast (1 or 2): all
            of them walk the same key blocks, also under a mask.
        fixed_reference: whether scores are taken relative to a number that does not follow their
            maximum: that of a row's first block of visible keys, or 0 if scores are bounded
            (`fa3.primitives.softmax.Reference`). Rows for which that fails are marked, and a
            second launch computes them again: `again`.
        own_o: whether O has shared memory of its own; otherwise it is staged where Q was, and
            the next Q waits until O has been stored.
    """

    tile_m: int
    tile_n: int
    q_stages: int = 1
    kv_stages: int = 2
    cluster_m: int = 1
    own_o: bool = True
    cluster_h: int = 1
    fixed_reference: bool = False

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_h

    @property
    def consumers(self) -> int:
        return self.tile_m // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def fragment_registers(self) -> int:
        """Registers that a consumer thread has for fragments of S, P and O."""
        _, registers = REGISTERS[self.consumers]
        return registers - OTHER_REGISTERS

    @property
    def again(self) -> "Config":
        """The config of the launch that computes marked tiles again."""
        return replace(self, cluster_m=1, cluster_h=1, fixed_reference=False)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of the operand buffers and barriers, as the kernel lays them out."""
        head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        q = self.q_stages * self.tile_m * head_dim
        kv = self.kv_stages * self.tile_n * (head_dim + head_dim_v)
        o = self.tile_m * head_dim_v if self.own_o else 0
        return 2 * (q + kv + o) + 1024

    def validate(self, spec: AttentionSpec) -> None:
        """Raise unless the kernel can run this config for this spec.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: a field has a value that the kernel cannot run.
        """
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            kind = int if field.default is MISSING else kind
            if type(value) is not kind:
                raise TypeError(f"{field.name} must be of type {kind.__name__}, got {value!r}")
        for name in ("q_stages", "kv_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.consumers not in REGISTERS or self.tile_m % ROWS:
            raise ValueError(f"tile_m must be 128 or 192, got {self.tile_m}")
        if not (16 <= self.tile_n <= 256 and self.tile_n % 16 == 0):
            raise ValueError(f"tile_n must be a multiple of 16 up to 256, got {self.tile_n}")
        if self.cluster_m not in (1, 2):
            raise ValueError(f"cluster_m must be 1 or 2, got {self.cluster_m}")
        if self.cluster_h not in (1, 2) or self.cluster > 2:
            raise ValueError(
                f"cluster_h must be 1, or 2 with cluster_m=1, got cluster_h={self.cluster_h} and "
                f"cluster_m={self.cluster_m}"
            )
        if self.cluster_h > 1 and spec.mask.templates:
            raise ValueError("cluster_h must be 1 with a mask of the user's: its blocks may differ")
        if spec.qhead_per_kvhead % self.cluster_h:
            raise ValueError(
                f"cluster_h={self.cluster_h} must divide the {spec.qhead_per_kvhead} query heads "
                f"of a key/value head"
            )
        if not self.own_o and padded(spec.head_dim) != padded(spec.head_dim_v):
            raise ValueError(
                f"own_o=False stages O in Q's place and needs their columns to be equal, got "
                f"head_dim {spec.head_dim} and head_dim_v {spec.head_dim_v}"
            )
        if self.fixed_reference and not HOLDS_POWERS[spec.dtype]:
            raise ValueError(f"fixed_reference must be False with {spec.dtype}: its range is small")
        if self.fixed_reference and any(score.kind.hides for score in spec.scores):
            raise ValueError("fixed_reference must be False with scores of the user's")
        check_fits(self.smem_bytes(spec), self, spec)
        fragments = self.tile_n // 2 + self.tile_n // 4 + padded(spec.head_dim_v) // 2
        if fragments > self.fragment_registers:
            raise ValueError(
                f"tile_n={self.tile_n} with head_dim_v={spec.head_dim_v} takes {fragments} "
                f"registers a thread for S, P and O, there are {self.fragment_registers} with "
                f"tile_m={self.tile_m}"
            )
