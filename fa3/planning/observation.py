"""Measured times of plans, as the fit of the cost model takes them.

`benchmarks.fit_costs` makes them from records of benchmarks, `fa3.tools.tuning` from what it
measures on the user's GPU; `fa3.planning.fit` fits a model to them.
"""

from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import Costs
from fa3.planning.gpu import Gpu
from fa3.planning.load import Load, Segments, segments_of
from fa3.planning.planner import plan_forward
from fa3.planning.prediction import predict, unit_name
from fa3.planning.tile_costs import TileKey
from fa3.planning.tiled import TiledProblem
from fa3.problem import Problem


class Observation(NamedTuple):
    """A measured time and what it was measured on.

    Fields:
        cell: name of the problem; observations of one name are held out together.
        regime: "burst", at full clock after idleness, or "steady", under the power cap.
        us: microseconds of a call.
    """

    cell: str
    regime: str
    us: float
    tiled: TiledProblem
    schedule: str
    segments: Segments

    @classmethod
    def of(
        cls,
        cell: str,
        regime: str,
        us: float,
        problem: Problem,
        gpu: Gpu,
        config: ForwardConfig,
        schedule: str,
    ) -> "Observation":
        """The observation of a problem's plan with this tiling and schedule."""
        plan = plan_forward(problem, gpu, config, schedule)
        segments = segments_of(plan.tiled, plan.schedule)
        return cls(cell, regime, us, plan.tiled, schedule, segments)

    @property
    def key(self) -> TileKey:
        return self.tiled.key

    @property
    def unit_name(self) -> str:
        return unit_name(self.schedule, self.tiled.config)


def predicted_us(costs: Costs, seen: Observation) -> float:
    """What a cost model says of an observation."""
    load = Load.of(seen.segments, costs.tile(seen.key), seen.tiled.lanes)
    prediction = predict(costs, seen.tiled, seen.schedule, load)
    return prediction.us if seen.regime == "steady" else prediction.burst_us
