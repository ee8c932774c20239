"""What all tests share: reproducible hypothesis examples, and skips for what is not there."""

import os
import shutil

import pytest
import torch
from hypothesis import settings
from problems import poisoned_allocations

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use all cores wait for one another.
    torch.set_num_threads(1)

settings.register_profile("fa3", derandomize=True, deadline=None, database=None, max_examples=100)
settings.load_profile("fa3")


def missing_gpu() -> str | None:
    """Return why the GPU tests cannot run, or None if they can."""
    if not torch.cuda.is_available():
        return "needs a GPU, and torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a Hopper GPU (9, 0), this one is {capability}"
    return None


def pytest_collection_modifyitems(items):
    no_gpu = missing_gpu()
    no_sanitizer = None if shutil.which("compute-sanitizer") else "compute-sanitizer is not in PATH"
    for item in items:
        for marker, reason in (("gpu", no_gpu), ("sanitizer", no_sanitizer)):
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    """The GPU that a test runs on."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def poisoned_memory():
    """Run a test with `poisoned_allocations`."""
    with poisoned_allocations():
        yield
