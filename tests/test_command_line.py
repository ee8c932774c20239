"""What the command line prints and draws."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from full_calls import CALLS
from problems import make_problem
from test_latest import operand, packed_operands

import fa3
from fa3 import settings
from fa3.__main__ import main
from fa3.calls.call import AttentionCall, describe_tensors
from fa3.calls.combine import prepare_combine
from fa3.calls.execution import prepare_on_cache
from fa3.calls.options import DENSE, PACKED, Options
from fa3.calls.prepare import prepare_call
from fa3.planning.costs import GPUS
from fa3.planning.explanation import describe_kernel, quantity
from fa3.planning.routes import PackedSizes, launches_of_route
from fa3.problem import Window
from fa3.running import code_cache
from fa3.tools.arguments import DEFAULT_SHAPE, GPU_NAMES, make_parser
from fa3.tools.plan_command import problem_of

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def problem(*arguments: str):
    options = make_parser("").parse_args(["plan", *arguments])
    return problem_of(options.shape, options)


def printed_plan(capsys, *arguments: str) -> dict[str, list[str]]:
    """The lines that `fa3 plan` prints about each thing."""
    main(["plan", *arguments])
    about: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        about.setdefault(line[:9].strip() or list(about)[-1], []).append(line[9:])
    return about


def test_plan_is_printed_and_drawn(tmp_path, capsys):
    png = tmp_path / "order.png"
    main(["plan", "--shape", DEFAULT_SHAPE, "--causal", "--png", str(png)])
    printed = capsys.readouterr().out
    assert "32 query heads on 8 key/value heads" in printed
    assert "16,896 key blocks" in printed
    assert {line.split()[0] for line in printed.splitlines()} >= {"Time", "Bound", "Choice"}
    assert png.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("command", ["info", "plan", "--help"])
def test_a_reader_that_has_gone_is_no_error(command, monkeypatch):
    """As in `python -m fa3 plan | head`; what is printed last is written last."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            main([command])
        print("what is still to come goes nowhere", flush=True)
    assert ended.value.code == 141


def test_a_closed_standard_output_is_no_error(monkeypatch, capsys):
    """As in `python -m fa3 plan >&-`; Python has no object for it then."""
    monkeypatch.setattr(sys, "stdout", None)
    main(["plan"])
    assert not capsys.readouterr().err


def test_ctrl_c_ends_a_command_in_a_word(monkeypatch, capsys):
    monkeypatch.setattr("fa3.tools.warmup.warmup", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--preset", "llama3-8b"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "fa3: interrupted\n"


def test_causal_sets_the_right_bound():
    assert problem("--window", "5", "7", "--causal") == problem("--window", "5", "0")


def test_info_without_a_folder_for_the_cache(monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", "~nouser/x")
    main(["info"])
    assert "cache     none: Could not determine home directory" in capsys.readouterr().out


def test_info_counts_kernels_and_says_why_a_folder_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    for key in "012":
        code_cache.load_or_make(key, lambda: bytes(100_000))
    main(["info"])
    assert f"cache     {tmp_path}, 3 kernels, 0.3 MB\n" in capsys.readouterr().out
    tmp_path.chmod(0o777)
    main(["info"])
    assert f"MB; not used: others may write to {tmp_path}" in capsys.readouterr().out
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "none"))
    main(["info"])
    assert "none, 0 kernels, 0.0 MB\n" in capsys.readouterr().out


# ------------------------------------------------------------------------- what is planned


@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_plan_names_the_gpu_that_it_is_for(name, capsys):
    assert printed_plan(capsys, "--gpu", name)["GPU"] == [f"{GPUS[name].name}, 132 SMs."]


@pytest.mark.parametrize("shape", ["1,1,32768,32,8,128", "2,7,9000,4,4,64", "1,4096,4096,8,2,128"])
def test_the_plan_is_that_of_the_call(shape, capsys):
    """Few queries run in the decode kernel, and so does their plan."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = map(int, shape.split(","))
    q, k = (
        torch.empty(batch, seqlen, heads, head_dim, dtype=torch.bfloat16)
        for seqlen, heads in ((seqlen_q, heads_q), (seqlen_k, heads_kv))
    )
    options = Options(Window(right=0), kind=DENSE)
    call = prepare_call(describe_tensors({"q": q, "k": k, "v": k}, options), options)
    expected = [describe_kernel(launch.kernel) for launch in call.run.args[0].launches()]
    printed = printed_plan(capsys, "--gpu", "H200", "--shape", shape, "--causal")
    assert printed["Kernels"] == expected
    assert expected[0].startswith("decode" if seqlen_q < 100 else "forward")


@pytest.mark.parametrize(("seqlen", "softmax"), [(512, "Online: "), (8192, "Subtracts a fixed ")])
def test_plans_say_which_row_max_a_call_uses(seqlen, softmax, capsys):
    main(["plan", "--shape", f"1,{seqlen},{seqlen},32,8,128", "--causal"])
    printed = capsys.readouterr().out
    assert (", fixed row max, " in printed) == (seqlen == 8192)
    assert f"Softmax  {softmax}" in printed


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize(("queries", "name"), [(1, "decode"), (100, "decode"), (2048, "forward")])
def test_a_plan_on_a_cache_is_that_of_the_call(queries, name, appends, page_size, capsys):
    pages = operand(3, 4096 // page_size) if page_size else None
    cache = operand(192, 64, 2, 128) if page_size else operand(3, 4096, 2, 128)
    new = operand(3, 1, 2, 128) if appends else None
    call = AttentionCall(operand(3, queries, 8, 128), cache, cache, new, new, page_table=pages)
    run, is_tiled = prepare_on_cache(call, Options(Window(right=0)))
    assert is_tiled == (name == "forward")
    arguments = ["--shape", f"3,{queries},4096,8,2,128", "--causal", "--page-size", str(page_size)]
    arguments += ["--append"] * appends
    printed = printed_plan(capsys, "--call", "cache", "--gpu", "H200", *arguments)
    if name == "decode":
        launches = run.args[0].launches()
    else:
        packed = run.__self__.packed
        launches = launches_of_route(packed.signature, name)
        sizes = PackedSizes(3, 8, 3 * queries, 0, queries, 4096)
        assert printed["Rule"][0].endswith(packed.find(sizes)[0].reason + ".")
    expected = ["append"] * appends + [describe_kernel(one.kernel) for one in launches]
    assert printed["Kernels"] == expected
    assert (" us predicted, " in printed["Time"][0]) == (name == "decode")


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("6,512,512,8,2,64", ["tile table", "forward", "forward"]),
        ("6400,30,30,8,2,64", ["shared-tile table", "forward", "forward"]),
        ("64,1,8000,8,2,64", ["decode"]),
    ],
)
def test_a_packed_plan_is_that_of_the_call(shape, names, capsys):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = map(int, shape.split(","))
    q, k, v = (operand(1, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv))
    options = Options(Window(right=0), kind=PACKED)
    call = prepare_call(packed_operands(q=q, k=k, v=v), options).run.__self__
    rows = batch * seqlen_q, batch * seqlen_k
    route, _ = call.find(PackedSizes(batch, heads_q, *rows, seqlen_q, seqlen_k))
    launches = launches_of_route(call.signature, route.name, route.most_queries)
    arguments = "--call", "packed", "--gpu", "H200", "--shape", shape, "--causal"
    printed = printed_plan(capsys, *arguments)
    assert [kernel.split(",")[0] for kernel in printed["Kernels"]] == names
    assert printed["Kernels"] == [describe_kernel(launch.kernel) for launch in launches]
    assert printed["Rule"][0].endswith(f": {route.reason}.")


def test_a_backward_plan_says_what_it_takes(capsys):
    shape = "--shape", "2,1000,900,8,2,192", "--head-dim-v", "128"
    printed = printed_plan(capsys, "--call", "backward", *shape)
    first, second = printed["Kernels"]
    assert first == "backward preprocess, bfloat16, head_dim 192 and 128"
    assert second.startswith("backward, ")
    assert quantity(2.5 * problem(*shape).flops, "FLOP") in printed["Problem"][0]
    tile_n = int(printed["CTA"][0].split()[3])
    assert printed["Grid"][0].startswith(f"{2 * 2 * -(-900 // tile_n)} tiles of keys")
    # The sums of dQ alone are fp32 of all queries.
    megabytes = float(printed["Memory"][0].split(" MB")[0])
    assert 1e6 * megabytes > 4 * 2 * 1000 * 8 * 192


# ------------------------------------------------------------------------------ wrong arguments


def fails(capsys, *arguments: str) -> str:
    """What a command prints that ends for wrong arguments: one line."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,2,3"), "a shape must be six positive integers"),
        (("--shape", "1,x"), "argument --shape: must be integers and commas, got '1,x'"),
        (("--shape", "1,64,64,3,2,64"), "q must have a multiple of k's heads"),
        (("--shape", "1,64,64,2,2,100"), "q has head_dim 100, supported are multiples of 8 up to"),
        (("--shape", "1,64,64,2,2,264"), "q has head_dim 264, supported are multiples of 8 up to"),
        (("--head-dim-v", "7"), "v has head_dim 7, supported are multiples of 8 up to 256"),
        (("--window", "-2", "0"), "window_size must be two integers (left, right), each"),
        (("--schedule", "fifo"), "schedule must be one of ['dynamic', "),
        (("--shape", f"1,{1 << 40},1,1,1,8"), "q must have at most 1073741311 queries"),
        (("--shape", "99999999999,1,1,1,1,8"), "q must have at most 16777216 tiles"),
        (("--gpu", "A100"), "argument --gpu: invalid choice: 'A100'"),
        (("--page-size", "16"), "--page-size goes with --call cache, got --call dense"),
        (("--call", "cache", "--page-size", "-1"), "--page-size must be 0 or more, got -1"),
        (("--call", "cache", "--schedule", "list"), "--schedule goes with --call dense, got"),
        (("--shape", "1,1,8192,8,2,64", "--png", "x.png"), "--png shows the forward kernel"),
        (("--call", "packed", "--png", "x"), "--png goes with --call dense, got --call packed"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message, capsys):
    line = fails(capsys, "plan", *arguments)
    assert line.startswith(f"fa3 plan: {message}") and line.endswith("(see fa3 plan --help)")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("plann",),
        ("plan", "--shap"),
        ("plan", "--head-dim", "64"),
        ("tune", "--x"),
        *(("compile", *text.split()) for text in ("--heads 8", "--causal --full", "--dtype x")),
        ("compile", "--heads", f"{10**11},1", "--head-dim", "64"),
    ],
)
def test_all_wrong_arguments_end_alike(arguments, capsys):
    assert fails(capsys, *arguments).startswith("fa3")


# ------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize("command", ["info", "plan", "compile", "tune", "demo"])
def test_every_help_has_examples_that_can_be_parsed(command, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, *_ = printed = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: fa3 {command}")
    examples = [line.split("#")[0].split() for line in printed if line.startswith("  fa3 ")]
    assert examples
    (tmp_path / "Llama-3.1-8B").mkdir()
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "Llama-3.1-8B/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    for name, *arguments in examples:
        assert name == "fa3" and make_parser("").parse_args(arguments).command == command


def test_the_program_has_one_name_and_a_version():
    root = Path(fa3.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "fa3", "--version"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"fa3 {fa3.__version__}\n"


@pytest.mark.compiles
def test_the_demo_needs_no_extras(tmp_path, monkeypatch, capsys):
    for package in ("rich", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["demo", "--png", str(tmp_path / "order.png")])
    printed = capsys.readouterr().out
    assert "Not drawn: drawing needs matplotlib" in printed
    assert " bytes for sm_90a." in printed and "fa3 " in printed.split("Is it right?")[1]
    assert "No kernel ran on a GPU" in printed and not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------- environment variables

BAD = [
    ("FA3_ASSERTIONS", "true", "'0' or '1'"),
    ("FA3_FP8_EXP", "1", "'linear' or 'exact'"),
    ("FA3_FP8_SUMS", "one", "'two-level' or 'one-level'"),
    ("FA3_ROW_MAX", "onlin", "'auto' or"),
]
RUN = {name: lambda run=run, of=of: run(of()) for name, (run, of) in CALLS.items()} | {
    "plan": lambda: fa3.plan_forward(make_problem(1, 20, 20, 2)),
    "warmup": lambda: fa3.warmup((2, 2), 64, calls=()),
}


@pytest.fixture
def nothing_remembered():
    """Have every call look at the environment again."""
    prepare_call.cache_clear()
    prepare_combine.cache_clear()


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
    assert "variable  FA3_ROW_MAX=auto\n" in printed
    assert f"variable  FA3_CACHE_DIR={tmp_path}\n" in printed
    assert "variable  FA3_ASSERTION: nothing reads it\n" in printed
