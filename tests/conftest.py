"""What all tests share: reproducible hypothesis examples, skips for what is not there, and who may
compile.

The process that hands tests to workers reads this file before it starts them, and needs neither
torch nor fa3: they are imported where they are used.
"""

import gc
import os
import shutil

import pytest
from golden import (  # noqa: F401
    pytest_addoption,
    pytest_itemcollected,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    pytest_testnodedown,
)
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use all cores wait for one another.
    import torch

    torch.set_num_threads(1)

settings.register_profile("fa3", derandomize=True, deadline=None, database=None, max_examples=100)
settings.load_profile("fa3")

COMPILING = ("compiles", "gpu")
"""Markers of tests that may compile kernels."""


def missing_gpu() -> str | None:
    """Return why the GPU tests cannot run, or None if they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a GPU, and torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a Hopper GPU (9, 0), this one is {capability}"
    return None


def pytest_collection_modifyitems(items):
    """Tests that take `device` need a GPU; tests are skipped where they lack what they need."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "device" in getattr(item, "fixturenames", ()) and "device" not in parameters:
            item.add_marker(pytest.mark.gpu)
    no_gpu = missing_gpu()
    no_sanitizer = None if shutil.which("compute-sanitizer") else "compute-sanitizer is not in PATH"
    for item in items:
        for marker, reason in (("gpu", no_gpu), ("sanitizer", no_sanitizer)):
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """The garbage collector need not walk again and again, as kernels compile, what has been
    imported and collected: that is there to the end."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_locations():
    """Compile kernels with ptxas's remarks but without the places of their sources.

    With remarks the DSL looks for the line of each instruction, which takes a quarter of a kernel's
    time. Only errors of users' functions tell lines, and their tests have a fixture of this name.
    Kernels that calls load are compiled without lines too; the machine code is the same. Versions
    of the DSL that have no such switch stay as they are.
    """
    from cutlass.base_dsl import dsl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None, raising=False)
        yield


@pytest.fixture(scope="session")
def no_kernels(tmp_path_factory):
    """A folder for compiled kernels in which there are none."""
    return tmp_path_factory.mktemp("no_kernels")


@pytest.fixture(autouse=True)
def no_latest_calls():
    """Forget what calls of other tests led to, whose kernels may have been stubs."""
    from fa3.calls import options

    options.remembered_options.cache_clear()
    options.LATEST.clear()


@pytest.fixture(autouse=True)
def only_marked_tests_compile(request, no_kernels):
    """Fail tests without a marker that compile, or whose processes put kernels on disk.

    Kernels that earlier runs left on disk are out of reach, so each run finds the same.
    """
    if any(map(request.node.get_closest_marker, COMPILING)):
        yield
        return
    import cutlass.cute as cute

    def refuse(*arguments, **options):
        pytest.fail("compiles a kernel: mark the test with `compiles`")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "compile", refuse)
        patch.setenv("FA3_CACHE_DIR", str(no_kernels))
        yield
    found = list(no_kernels.glob("*.o"))
    for path in found:
        path.unlink()
    assert not found, "a process of the test compiles kernels: mark the test with `compiles`"


@pytest.fixture
def device():
    """The GPU that a test runs on, a `torch.device`; the test is marked `gpu`."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request) -> str:
    """Run a test on the CPU, and once more on a GPU; see also `pairs.places`."""
    return request.param


@pytest.fixture
def no_shared_tiles(monkeypatch):
    """Load no kernels for sequences that share tiles: calls of the test have too few of them."""
    from fa3.planning.routes import Signature

    monkeypatch.setattr(Signature, "shared_tiling", None)


@pytest.fixture
def always_fixed(monkeypatch):
    """Have calls of any size take a fixed reference."""
    from gpu_checks import forget_prepared_calls

    from fa3.planning import tilings

    monkeypatch.setattr(tilings, "FIXED_FLOPS", 0)
    forget_prepared_calls()
    yield
    forget_prepared_calls()
