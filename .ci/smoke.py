"""Uses an installed fa3: what the archives hold, attention on the CPU, a kernel for sm_90a."""

import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import torch

import fa3
from fa3.planning.planner import plan_forward
from fa3.running.compiler import is_on_disk, load_kernel
from fa3.scores.masks import Band

(wheel,) = Path(sys.argv[1]).glob("*.whl")
(sdist,) = Path(sys.argv[1]).glob("*.tar.gz")
with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
assert {"fa3/py.typed", "fa3/planning/costs_h200.json"} <= set(names)
assert {name.split("/")[0].split("-")[0] for name in names} == {"fa3"}, names
with tarfile.open(sdist) as archive:
    sources = {name.partition("/")[2] for name in archive.getnames()}
assert {
    ".ci/smoke.py",
    "tests/conftest.py",
    "docs/extending.md",
    "benchmarks/harness.py",
} <= sources

assert "site-packages" in fa3.__file__, fa3.__file__
assert metadata.version("fa3") == fa3.__version__
(plugin,) = metadata.entry_points(group="vllm.general_plugins")
assert plugin.name == "fa3" and callable(plugin.load())

q, k, v = torch.randn(3, 2, 200, 4, 64, dtype=torch.bfloat16)
out = fa3.flash_attn_func(q, k, v, causal=True)
heads_first = (t.transpose(1, 2) for t in (q, k, v))
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)

window = fa3.Window(right=0)
spec = fa3.AttentionSpec("bfloat16", 64, 64, Band.of(window))
kernel = plan_forward(fa3.Problem(spec, 1, 4096, 4096, 8, 1, window)).kernel()
assert callable(load_kernel(kernel)) and is_on_disk(kernel)
print(f"fa3 {fa3.__version__} from {wheel.name}: attends on the CPU, compiles for sm_90a")
