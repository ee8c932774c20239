"""The GPUs that the planner knows; `fa3.calls.devices` finds the one that a tensor is on."""

from dataclasses import dataclass

from fa3.complaints import shown
from fa3.planning.costs import H100_NAME, Costs, shipped_costs


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the planner needs to know of a GPU.

    Fields:
        num_sms: streaming multiprocessors.
        l2_bytes: bytes of L2 that the K and V of one section of heads may take.
    """

    name: str
    num_sms: int
    l2_bytes: int

    @property
    def costs(self) -> Costs:
        """The parameters of the cost model."""
        return shipped_costs(self.name)


H200 = Gpu("NVIDIA H200", num_sms=132, l2_bytes=32 << 20)
"""Has 60 MB of L2; Q and O pass through it too, so half is left for K and V."""

H100 = Gpu(H100_NAME, num_sms=132, l2_bytes=26 << 20)  # the SXM version: 50 MB of L2
GPUS = {"H100": H100, "H200": H200}  # GPUs by the names that a caller may give instead of a `Gpu`


def as_gpu(gpu: Gpu | str) -> Gpu:
    """Return the GPU of a name in `GPUS`, or a `Gpu` as it is; else raise an error."""
    if isinstance(gpu, Gpu):
        return gpu
    if gpu in tuple(GPUS):
        return GPUS[gpu]
    kind = ValueError if isinstance(gpu, str) else TypeError
    raise kind(f"gpu must be a Gpu or one of {list(GPUS)}, got {shown(gpu)}")
