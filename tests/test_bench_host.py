"""The benchmark of what calls cost the host, as far as it needs no GPU."""

import torch

from benchmarks.bench_host import HEAD_DIM, HEADS, calls_on


def test_all_kinds_of_calls_run_and_agree_with_metadata():
    calls = calls_on("cpu")
    for name, call in calls.items():
        out = call()
        assert out.shape[-2:] == (HEADS, HEAD_DIM)
        assert out.isfinite().all()
        if name == "packed, other lengths":
            assert not torch.equal(out, call())
            continue
        plain = calls[name.removesuffix(", metadata")]
        torch.testing.assert_close(out, plain(), atol=0.01, rtol=0.02)
