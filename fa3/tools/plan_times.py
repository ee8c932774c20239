"""What `fa3 tune` has measured on a GPU: times of plans, kept next to the kernels.

The record is written whenever plans were measured, so a run that was interrupted goes on where it
stopped, and later runs add to it. Times of kernels from other sources of fa3 are not read.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from fa3.calls.tuned_costs import read_kept, tuned_path, write_kept
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.plan import Plan
from fa3.problem import AttentionSpec, Problem, Window
from fa3.running.code_cache import SOURCES, check_trust
from fa3.scores.masks import Band

OF_TIMES = ".times"

SIZE_FIELDS = tuple(field.name for field in fields(Problem) if field.name not in ("spec", "window"))
"""The integers of a problem."""


class PlanTime(NamedTuple):
    """The time of one plan. Its problem has a mask at most, no scores and no sinks.

    Fields:
        regime: "burst" or "steady", see `fa3.tools.timing`.
        us: microseconds of a call.
    """

    problem: Problem
    config: ForwardConfig
    schedule: str
    regime: str
    us: float

    def to_json(self) -> dict:
        problem, spec = self.problem, self.problem.spec
        return {
            "spec": [spec.dtype, spec.head_dim, spec.head_dim_v],
            "sizes": [getattr(problem, name) for name in SIZE_FIELDS],
            "window": list(problem.window),
            "config": asdict(self.config),
            "schedule": self.schedule,
            "regime": self.regime,
            "us": round(self.us, 3),
        }

    @classmethod
    def from_json(cls, row: dict) -> "PlanTime":
        window = Window(*row["window"])
        dtype, head_dim, head_dim_v = row["spec"]
        spec = AttentionSpec(dtype, head_dim, head_dim_v, Band.of(window))
        problem = Problem(spec, **dict(zip(SIZE_FIELDS, row["sizes"], strict=True)), window=window)
        config = ForwardConfig(**row["config"])
        return cls(problem, config, row["schedule"], row["regime"], float(row["us"]))


@dataclass
class PlanTimes:
    """All times of a GPU; `path` is their file."""

    gpu_name: str
    path: Path
    times: list[PlanTime]

    @classmethod
    def read(cls, gpu_name: str) -> "PlanTimes":
        """Those on disk; none if there are none of this GPU and of these sources.

        Raises:
            RuntimeError: there is no folder for them.
        """
        path = tuned_path(gpu_name, OF_TIMES)
        content = json.loads(read_kept(path) or b"{}")
        rows = []
        if (content.get("gpu"), content.get("sources")) == (gpu_name, digest_of_sources()):
            rows = content["times"]
        return cls(gpu_name, path, [PlanTime.from_json(row) for row in rows])

    def has(self, plan: Plan) -> bool:
        """Whether a plan was measured."""
        wanted = plan.problem, plan.config, plan.schedule.name
        return any((one.problem, one.config, one.schedule) == wanted for one in self.times)

    def add(self, times: list[PlanTime]) -> None:
        """Add times and write all to disk."""
        self.times += times
        rows = ",\n".join(json.dumps(time.to_json()) for time in self.times)
        head = json.dumps({"gpu": self.gpu_name, "sources": digest_of_sources(), "times": None})
        write_kept(self.path, head.replace("null}", f"[\n{rows}\n]}}"))


def digest_of_sources() -> str:
    """Says which sources of fa3 run; other ones may have kernels that take other times."""
    digests = sorted((name, digest) for name, (_, digest) in SOURCES.items())
    return hashlib.sha256(repr(digests).encode()).hexdigest()[:16]


@contextlib.contextmanager
def alone(gpu_name: str) -> Iterator[None]:
    """Keep other processes from measuring this GPU, since both would measure nonsense.

    Raises:
        RuntimeError: another one does.
        OSError: what is measured could not be kept.
    """
    path = tuned_path(gpu_name, ".lock")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_trust(path.parent, path.parent.stat())
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process tunes the {gpu_name}: {path} is locked") from None
        yield
