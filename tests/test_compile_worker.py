"""The process that compiles for others."""

from problems import make_problem

from fa3.planning.backward import BackwardPlan
from fa3.running.compiler import is_on_disk
from fa3.tools.compile_worker import compile_in, worker

WITHOUT_DRIVER = """
import cutlass.base_dsl.env_manager as manager

def refuse(prefix):
    raise AssertionError("the driver is asked for its GPU")

manager.detect_gpu_arch = refuse
"""


class Run:
    """Code that runs where it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple:
        return exec, (self.code, {})


def test_nobody_asks_the_driver(tmp_path, monkeypatch):
    """Its GPUs are hidden: each time the driver would look for them in vain."""
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    kernel = BackwardPlan.of(make_problem(1, 64, 64, 1, 1, 32)).kernels.entry.begin
    with worker() as process:
        assert compile_in(process, Run(WITHOUT_DRIVER))
        assert compile_in(process, kernel)
    assert is_on_disk(kernel)
