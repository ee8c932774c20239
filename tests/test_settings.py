"""Environment variables: what they may be is checked by the first call, whatever it is."""

import os
import subprocess
import sys

import pytest
from full_calls import CALLS
from problems import make_problem

import fa3
from fa3 import settings
from fa3.__main__ import main
from fa3.calls import forward, kvcache, varlen
from fa3.calls.combine import prepare_combine

BAD = [
    ("FA3_ASSERTIONS", "true", "'0' or '1'"),
    ("FA3_FP8_SUMS", "one", "'two-level' or 'one-level'"),
    ("FA3_REFERENCE", "folowing", "'auto' or"),
]
RUN = {name: lambda run=run, of=of: run(of()) for name, (run, of) in CALLS.items()} | {
    "plan": lambda: fa3.plan_forward(make_problem(1, 20, 20, 2)),
    "warmup": lambda: fa3.warmup((2, 2), 64, calls=()),
}


@pytest.fixture
def nothing_remembered():
    """Have every call look at the environment again."""
    for prepare in (
        forward.prepare_forward, varlen.prepare_varlen, kvcache.prepare_cache_call,
        prepare_combine,
    ):  # fmt: skip
        prepare.cache_clear()


@pytest.mark.parametrize("call", RUN)
@pytest.mark.parametrize(("name", "value", "accepted"), BAD)
def test_every_call_refuses(call, name, value, accepted, monkeypatch, nothing_remembered):
    monkeypatch.setitem(settings.SETTINGS, name, value)
    complaint = f"^the environment variable {name} must be {accepted}.*got '{value}'$"
    with pytest.raises(ValueError, match=complaint):
        RUN[call]()


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_what_is_read(value):
    """The import does not complain, and an empty variable is none."""
    program = "import fa3.settings; print(fa3.settings.SETTINGS); fa3.settings.check_settings()"
    environment = os.environ | {"FA3_ASSERTIONS": value}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"'FA3_ASSERTIONS': '{value or '0'}'" in printed


def test_info_shows_the_variables(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(settings.SETTINGS, "FA3_ASSERTIONS", "true")
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FA3_ASSERTION", "1")
    main(["info"])
    printed = capsys.readouterr().out
    assert "variable  FA3_ASSERTIONS=true: refused by every call, must be 0 or 1\n" in printed
    assert "variable  FA3_REFERENCE=auto\n" in printed
    assert f"variable  FA3_CACHE_DIR={tmp_path}\n" in printed
    assert "variable  FA3_ASSERTION: nothing reads it\n" in printed
