"""What the GPU says of itself while it works: clock, power, energy, reasons to slow down."""

import bisect
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

try:
    import pynvml
except ModuleNotFoundError:
    pynvml = None

PERIOD_S = 0.005
ENERGY_FROM_S = 0.15
"""The energy counter advances about ten times a second: no joules for a shorter interval."""

REASONS = {
    0x04: "power-cap",
    0x08: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "power-brake",
    0x02: "clock-setting",
    0x100: "display-clock",
}
"""NVML's clock event reasons; being idle is left out."""


class Sample(NamedTuple):
    """One look at the GPU. `joules` is the energy counter."""

    time: float
    sm_mhz: float
    power_w: float
    reasons: int
    joules: float


class Reading(NamedTuple):
    """What the samples say of an interval; None where they say nothing."""

    sm_mhz: float | None
    power_w: float | None
    reasons: int
    joules: float | None


NO_READING = Reading(None, None, 0, None)


def reason_names(reasons: int) -> str:
    """Name the bits of clock event reasons."""
    return "+".join(name for bit, name in REASONS.items() if reasons & bit)


def energy_at(samples: Sequence[Sample], moment: float) -> float:
    """The energy counter at a moment, between the two samples around it where it moved."""
    steps = [samples[0]]
    for sample in samples:
        if sample.joules != steps[-1].joules:
            steps.append(sample)
    after = bisect.bisect_left(steps, moment, key=lambda sample: sample.time)
    after = min(max(after, 1), len(steps) - 1)
    if after < 1:
        return steps[0].joules
    left, right = steps[after - 1], steps[after]
    return left.joules + (right.joules - left.joules) * (moment - left.time) / (
        right.time - left.time
    )


def read_interval(samples: Sequence[Sample], begin: float, end: float) -> Reading:
    """Sum up the samples of an interval of host time (`time.perf_counter`)."""
    inside = [sample for sample in samples if begin <= sample.time <= end]
    if not inside:
        return NO_READING
    reasons = 0
    for sample in inside:
        reasons |= sample.reasons
    joules = None
    if end - begin >= ENERGY_FROM_S:
        joules = energy_at(samples, end) - energy_at(samples, begin)
    return Reading(
        statistics.median(sample.sm_mhz for sample in inside),
        statistics.median(sample.power_w for sample in inside),
        reasons,
        joules,
    )


class NvmlGauge:
    """Samples one GPU through NVML."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.driver = pynvml.nvmlSystemGetDriverVersion()

    def __call__(self) -> Sample:
        power = pynvml.nvmlDeviceGetFieldValues(self.handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        return Sample(
            time.perf_counter(),
            pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM),
            power[0].value.uiVal / 1e3,
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle),
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3,
        )


def open_gauge(uuid: str) -> tuple[NvmlGauge | None, str]:
    """Open NVML for a GPU; without it there is no gauge, and the reason."""
    if pynvml is None:
        return None, "nvidia-ml-py is not installed"
    try:
        gauge = NvmlGauge(uuid)
        gauge()
    except pynvml.NVMLError as error:
        return None, str(error)
    return gauge, ""


class Meter:
    """Samples in a thread of its own while its `with` block runs. Without a gauge it is mute."""

    def __init__(self, gauge: Callable[[], Sample] | None) -> None:
        self.gauge = gauge
        self.samples: list[Sample] = []
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.stopping.wait(PERIOD_S):
            self.samples.append(self.gauge())

    def __enter__(self) -> "Meter":
        if self.gauge:
            self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.gauge:
            # One more step of the energy counter, so that the last interval ends between two.
            time.sleep(ENERGY_FROM_S)
            self.stopping.set()
            self.thread.join()
