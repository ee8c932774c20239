"""Warming up: which kernels a model can need, and that they are on disk afterwards."""

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from test_latest import operand

import fa3
from fa3.__main__ import main
from fa3.calls.call import MOST_FORWARD_TILES, AttentionCall
from fa3.calls.execution import prepare_on_cache
from fa3.calls.options import Options
from fa3.kernels.append import Append
from fa3.kernels.combine import Combine
from fa3.kernels.decode import Decode
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.kernels.segment_table import SegmentTable
from fa3.kernels.shared_tile_table import MultiSequenceTable
from fa3.kernels.tile_table import TileTable
from fa3.planning.backward import BackwardPlan
from fa3.planning.costs import H200
from fa3.planning.explanation import describe_kernel
from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.running import compiler
from fa3.schedules.stream_k import CtaGroups, NoSplit, StreamK
from fa3.scores.masks import Band
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template
from fa3.tools import compile_pool
from fa3.tools import warmup as module
from fa3.tools.compile_pool import compile_all
from fa3.tools.models import CALLS, CAUSAL, MOST_HEADS, PRESETS, Model, causal_window, preset_of

IN_FP8 = Model(16, 16, 64, 64, "float8_e4m3fn", has_fp8_cache=True)
MANY_ROWS = replace(PRESETS["gemma2-9b"], heads_q=64, heads_kv=2, windows=(causal_window(128),))
SMALL = tuple(Combine("bfloat16", head_dim, None, None) for head_dim in (32, 64))


@pytest.fixture
def few_sizes(monkeypatch):
    """The planner is asked about few sizes only."""
    monkeypatch.setattr(module, "BATCHES", (1, 4))
    monkeypatch.setattr(module, "SEQLENS", (1, 64, 4096, 8192))


def kernels_of(preset: str, page_sizes=(0, 64), rotary="halves", calls=tuple(CALLS)) -> list:
    model = PRESETS[preset]
    embedding = module.rotary_of(model, rotary)
    return list(dict.fromkeys(module.kernels_of(model, calls, page_sizes, embedding)))


def of_type(kernels: list, kind: type) -> list:
    return [kernel for kernel in kernels if type(kernel) is kind]


def call_on_cache(model: Model, seqlen_q: int, pages: int | None) -> AttentionCall:
    """Describe a call on the CPU."""
    return AttentionCall(
        operand(5, seqlen_q, model.heads_q, model.head_dim),
        operand(500, 64, model.heads_kv, model.head_dim),
        operand(500, 64, model.heads_kv, model.head_dim_v),
        page_table=None if pages is None else operand(5, pages),
        sinks=operand(model.heads_q) if model.sinks else None,
    )


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        ("dense", {Forward, Decode, Combine}),
        ("packed", {Forward, TileTable, SegmentTable, MultiSequenceTable, Decode, Combine}),
        ("cache", {Decode, Combine, Append, Forward, TileTable, SegmentTable}),
        ("paged", {Decode, Combine, Forward, TileTable, SegmentTable}),
    ],
)
def test_each_kind_of_calls_has_its_kernels(call, kinds, few_sizes):
    found = kernels_of("llama3-8b", calls=(call,))
    assert {type(kernel) for kernel in found} == kinds
    is_packed = call in ("packed", "paged")
    assert all(kernel.is_packed == is_packed for kernel in of_type(found, Decode))
    others = kernels_of("llama3-8b", calls=[other for other in CALLS if other != call])
    # Parts are merged alike, wherever the keys lie. Prompts on caches have tables of packed ones.
    on_caches = {TileTable, SegmentTable} if call in ("cache", "paged") else set()
    assert {type(kernel) for kernel in set(found) & set(others)} <= {Combine} | on_caches


def test_presets_are_models_that_can_be_run():
    for model in PRESETS.values():
        model.check()
    assert PRESETS["mistral-7b"].windows == (Window(4095, 0),) == (causal_window(4096),)


SIZES = {"heads": (2, 2), "head_dim": 64}


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"heads": None}, "heads and head_dim must be given, or a preset"),
        (ValueError, {"preset": "gpt"}, "preset must be one of .*'llama3-8b'.* got 'gpt'"),
        (ValueError, {"preset": "gpt-oss", "heads": (3, 2)}, "heads must be .* got .3, 2."),
        (ValueError, {"heads": (3, 2)}, "heads must be .* got .3, 2."),
        (ValueError, {"heads": (10**11, 1)}, "heads must be up to 1024 .* got .1000"),
        (ValueError, {"heads": (2,)}, "heads must be two integers .* got .2,."),
        (ValueError, {"head_dim": 100}, "head_dim 100, .* multiples of 8 up to 256"),
        (ValueError, {"head_dim_v": 512}, "v has head_dim 512"),
        (ValueError, {"head_dim": -1}, "head_dim must be 1 or more, got -1"),
        (ValueError, {"dtype": "fp8"}, "dtype must be one of .* 'fp8'"),
        (ValueError, {"window_size": (-2, 0)}, "window_size must be two"),
        (ValueError, {"window_size": ()}, "window_size must be two"),
        (ValueError, {"softcap": -1.0}, "softcap must be 0 .* got -1.0"),
        (ValueError, {"rotary": "all"}, "rotary must be of .* 'all'"),
        (ValueError, {"head_dim": 72}, "rotary must be 'none' with head_dim 72"),
        (ValueError, {"page_sizes": (-1,)}, "page_sizes must be 0 or more"),
        (ValueError, {"calls": ("vllm",)}, "calls must be of .* got 'vllm'"),
        (ValueError, {"calls": ("paged",), "page_sizes": (0,)}, "calls and page_sizes must .* .0,"),
        (ValueError, {"processes": 0}, "processes must be 1 or more, got 0"),
        *((TypeError, {name: value}, f"^{name} must be ") for name, value in (
            ("heads", "2,2"), ("head_dim_v", True), ("window_size", (1.5, 0)),
            ("softcap", "30"), ("page_sizes", 64), ("page_sizes", (64.0,)), ("processes", 1.5),
            ("calls", "dense"), ("calls", None), ("causal", "no"), ("sinks", 1),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_explained(error, options, message):
    with pytest.raises(error, match=message):
        fa3.warmup(**options if "preset" in options else SIZES | options)


def test_options_go_before_what_a_preset_says(monkeypatch):
    models = []
    monkeypatch.setattr(module, "kernels_of", lambda model, *rest: models.append(model) or SMALL)
    options = {"heads": (8, 1), "head_dim": 128, "dtype": "fp16", "softcap": 20.0, "sinks": True}
    fa3.warmup(preset="gemma2-9b", window_size=(99, 9), cache_dtype="fp8", dry_run=True, **options)
    fa3.warmup(preset="gemma2-9b", causal=False, dry_run=True)
    assert models == [
        Model(8, 1, 128, 128, "float16", (Window(99, 0),), 20.0, True, True),
        replace(PRESETS["gemma2-9b"], windows=(Window(),)),
    ]


@pytest.mark.parametrize(
    "model",
    [PRESETS["llama3-8b"], PRESETS["gpt-oss"], MANY_ROWS, Model(128, 128, 128, 128), IN_FP8],
    ids=lambda model: f"{model.heads_q},{model.heads_kv}",
)
def test_kernels_have_keys_and_names_of_their_own(few_sizes, model):
    kernels = set(module.kernels_of(model, tuple(CALLS), (0, 64), module.rotary_of(model, "pairs")))
    names = set(map(describe_kernel, kernels))
    assert len({compiler.key_of(kernel) for kernel in kernels}) == len(names) == len(kernels)
    cuts = {kernel.cut_type for kernel in of_type(kernels, Decode) if not kernel.is_packed}
    assert cuts == {StreamK, CtaGroups, NoSplit}
    assert all(kernel.is_storable for kernel in kernels)
    assert any("64-bit counts" in name for name in names) == (model.heads_kv > 64)
    assert any("transpose" in name for name in names) == model.is_fp8
    check_words(names)


def check_words(names: Iterable[str]) -> None:
    """Docs/environment.md's table has all words of these names, except roles, dtypes and sizes."""
    page = (Path(fa3.__file__).parents[1] / "docs" / "environment.md").read_text()
    table = page.split("| word | meaning |")[1].split("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row]
    told = ", ".join(first + re.findall(r"\*([^*]+)\*", table)).lower()
    words = {re.sub(r"\d+", "0", word.strip()) for word in re.split("[,;]", told)}
    roles = "forward|decode|combine|append|(tile|segment|shared-tile) table|backward( preprocess)?"
    known = rf"{roles}|transpose|bfloat16|float16|float8_e4m3fn|head_dim(_v)? \d+( and \d+)?"
    for name in names:
        apart = name.replace(" in pairs of", ", in pairs of")
        for word in apart.replace("in pairs of rows", "of rows").split(", "):
            normal = re.sub(r"\d+", "0", word.lower())
            assert normal in words or re.fullmatch(known, word), (word, name)


def test_names_of_other_kernels_are_in_the_documentation():
    """Those that `fa3 compile` does not list."""
    scores = Template.of(Alibi(torch.ones(8), False)), Template.of(Softcap(30.0))
    spec = AttentionSpec("bfloat16", 128, 64, Band(), scores, None, has_dropout=True)
    problem = Problem(spec, 1, 2048, 2048, 8, 1, Window())
    kernels = [launch.kernel for launch in plan_forward(problem, H200).launches()]
    backward = BackwardPlan.of(problem, is_ordered=True).kernels
    kernels += [backward.preprocess, backward.main]
    call = call_on_cache(PRESETS["llama3-8b"], 1, None)
    kernels += [prepare_on_cache(call, Options(CAUSAL, num_splits=4))[0].args[0].kernel()]
    kernels += [Append("bfloat16", 64, 64, True, False, False, None)]
    names = list(map(describe_kernel, kernels))
    check_words(names)
    assert ", ALiBi, softcap, dropout" in names[0] and ", no rotary embedding, pages" in names[-1]


def test_calls_have_room_for_the_tiles_of_all_sizes():
    tiles = module.MOST_TOKENS // FEWEST_ROWS + max(module.BATCHES)
    assert MOST_HEADS * tiles <= MOST_FORWARD_TILES < 2 * MOST_HEADS * tiles


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (
            "--heads 32,8 --head-dim 128 --window 4095 0",
            {"heads": (32, 8), "head_dim": 128, "window_size": [4095, 0], "causal": False},
        ),
        (
            "--preset gpt-oss --page-size 16 --page-size 0 --calls packed cache",
            {"preset": "gpt-oss", "page_sizes": [16, 0], "calls": ["packed", "cache"]},
        ),
        (
            "--heads 8,8 --head-dim 64 --full --dtype fp16 --sinks --dry-run --softcap 3",
            {
                "heads": (8, 8), "head_dim": 64, "causal": False, "dtype": "fp16", "sinks": True,
                "dry_run": True, "softcap": 3.0,
            },
        ),
    ],
)  # fmt: skip
def test_the_command_line_says_what_the_call_says(arguments, options, monkeypatch, capsys):
    warmup = Mock(return_value="what was done")
    monkeypatch.setattr(module, "warmup", warmup)
    main(["compile", *arguments.split()])
    warmup.assert_called_once_with(**{"causal": True, "sinks": False, "dry_run": False} | options)
    assert capsys.readouterr().out == "what was done\n"


@pytest.mark.compiles
def test_kernels_are_compiled_once_in_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "kernels_of", lambda *arguments: SMALL)
    monkeypatch.setattr("fa3.running.compiler.compiled", lambda *_: pytest.fail("compiles here"))
    first = fa3.warmup((2, 1), 64, processes=2)
    assert first.startswith("2 kernels: 0 were on disk, 2 compiled, in ")
    assert len(list(tmp_path.glob("*.o"))) == 2
    again = fa3.warmup((2, 1), 64)
    assert again.startswith("2 kernels: 2 were on disk, 0 compiled, in ")
    assert callable(compiler.from_disk(SMALL[0]))


@pytest.mark.compiles
def test_kernels_that_do_not_compile_are_told(tmp_path, monkeypatch, capfd):
    """All of them are tried, and what went wrong is printed."""
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    wrong = [Combine(dtype, 64, None, None) for dtype in ("no dtype", "none either")]
    monkeypatch.setattr(module, "kernels_of", lambda *arguments: wrong)
    with pytest.raises(RuntimeError, match=f"2 of 2 kernels are not in {tmp_path}.*'no dtype'"):
        fa3.warmup((2, 1), 64, processes=1)
    printed = capfd.readouterr().err
    assert "KeyError: 'no dtype'" in printed and "KeyError: 'none either'" in printed


def test_a_folder_that_keeps_nothing_is_told_before_compiling(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(module, "kernels_of", lambda *arguments: SMALL)
    monkeypatch.setattr(compile_pool.subprocess, "Popen", lambda *_, **named: pytest.fail("runs"))
    for name, why in (("file", "File exists"), ("file/in", "Not a dir"), ("open", "others may")):
        monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / name))
        with pytest.raises(RuntimeError, match=f"kept in {tmp_path / name}: {why}.*FA3_CACHE_DIR"):
            fa3.warmup((2, 1), 64)
    (tmp_path / "read").mkdir(0o755)
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "read"))
    monkeypatch.setattr("os.access", lambda *arguments: False)  # root may write anywhere
    with pytest.raises(RuntimeError, match="may not be written to"):
        fa3.warmup((2, 1), 64)


@pytest.mark.compiles
def test_a_kernel_of_which_the_compiler_dies_takes_no_other_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_pool, "describe_kernel", lambda kernel: kernel.entry_name)
    deadly = SimpleNamespace(entry_name="deadly", is_storable=True, arguments=os.abort)
    compile_all([deadly, SMALL[0]], 1)
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in printed] == ["deadly", SMALL[0].entry_name]
    assert compiler.is_on_disk(SMALL[0]) and not compiler.is_on_disk(deadly)


def test_what_is_not_done_is_given_up(tmp_path, monkeypatch):
    """The program and what it started are ended: then their lock is free."""
    lock = tmp_path / "lock"
    program = f"""
import fcntl, os, time
fcntl.flock(file := open({str(lock)!r}, "w"), fcntl.LOCK_EX)
os.fork() and print(0, flush=True)
time.sleep(300)
"""
    monkeypatch.setattr(compile_pool, "PROGRAM", program)
    monkeypatch.setattr(compile_pool, "describe_kernel", Mock(side_effect=KeyboardInterrupt))
    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compile_all(["one"], 1)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert time.perf_counter() - begin < 200


def test_a_dry_run_lists_kernels_and_compiles_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(module, "kernels_of", lambda *arguments: SMALL)
    monkeypatch.setattr(module, "is_on_disk", lambda kernel: kernel == SMALL[0])
    monkeypatch.setattr(module, "compile_all", lambda *arguments: pytest.fail("compiles"))
    main(["compile", "--heads", "2,1", "--head-dim", "64", "--dry-run"])
    assert capsys.readouterr().out.splitlines() == [
        f"on disk     {describe_kernel(SMALL[0])}",
        f"to compile  {describe_kernel(SMALL[1])}",
        "2 kernels: 1 on disk, 1 to compile",
    ]
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(module, "is_on_disk", lambda kernel: True)
    assert fa3.warmup((2, 1), 64, dry_run=True).splitlines() == [
        *(f"on disk     {describe_kernel(kernel)}" for kernel in SMALL),
        "2 kernels: 2 on disk, 0 to compile",
    ]


# ------------------------------------------------------------------------------- config.json

LLAMA = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA = {
    "model_type": "gemma2", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "hidden_size": 3584, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "layer_types": ["sliding_attention", "full_attention"], "dtype": "float16",
}  # fmt: skip
OSS = {
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
DEEPSEEK = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
}  # fmt: skip

GPT2 = {"model_type": "gpt2", "n_head": 12, "n_embd": 768}
BERT = {"model_type": "bert", "num_attention_heads": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LLAMA, PRESETS["llama3-8b"]),
        ({"text_config": LLAMA, "vision_config": {}}, PRESETS["llama3-8b"]),
        (GEMMA, replace(PRESETS["gemma2-9b"], dtype="float16")),
        (OSS, PRESETS["gpt-oss"]),
        (DEEPSEEK, Model(128, 128, 192, 128)),
        (GPT2, Model(12, 12, 64, 64)),
        (GPT2 | {"multi_query": True}, Model(12, 1, 64, 64)),
        (BERT | {"is_decoder": True}, Model(12, 12, 64, 64)),
        (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, PRESETS["llama3-8b"]),
        (
            LLAMA | {"sliding_window": 4096},
            replace(PRESETS["llama3-8b"], windows=(causal_window(4096), CAUSAL)),
        ),
        (
            LLAMA | {"sliding_window": 9, "layer_types": ["linear_attention", "sliding_attention"]},
            replace(PRESETS["llama3-8b"], windows=(causal_window(9),)),
        ),
    ],
)
def test_a_config_json_is_a_preset(tmp_path, config, model):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert preset_of(path) == preset_of(str(path)) == model


SLIDING = LLAMA | {"sliding_window": 9}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "preset must be the config.json .* got .*No such file"),
        ("{", "preset must be the config.json"),
        ("[" * 100_000, "preset must be the config.json .* recursion"),
        (BERT, "of a causal decoder, got .* a 'bert' hides no keys.*causal=False.*--full"),
        ({"num_attention_heads": "8"}, "'num_attention_heads' as int, got '8'"),
        (LLAMA | {"torch_dtype": "float32"}, "dtype must be one of .*, got 'float32'"),
        (LLAMA | {"hidden_size": 32 * 512}, "head_dim 512, .* multiples of 8 up to"),
        (SLIDING | {"layer_types": ["chunked"]}, "layers must have one of .* got .'chunked'"),
        (SLIDING | {"layer_types": ["conv"]}, "layers must have one of .* got .'conv'"),
        (SLIDING | {"layer_types": 5}, "'layer_types' as list, got 5"),
        (LLAMA | {"sliding_window": -9}, "layers must have one of"),
        (LLAMA | {"sliding_window": "9"}, "'sliding_window' as int, got '9'"),
        (LLAMA | {"attn_logit_softcapping": [1]}, "'attn_logit_softcapping' as int . float"),
        (LLAMA | {"attn_logit_softcapping": 10**400}, "softcap must be .* got inf"),
        (LLAMA | {"text_config": [1]}, "'list' object is not a mapping"),
    ],
)
def test_a_config_json_that_does_not_do_is_refused(tmp_path, config, message, capsys):
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ValueError, match=message):
        fa3.warmup(preset=path)
    with pytest.raises(SystemExit):
        main(["compile", "--preset", str(path)])
    assert capsys.readouterr().err.startswith("fa3 compile: ")


def test_a_closed_standard_error_is_no_error(monkeypatch):
    """As in `python -m fa3 compile ... 2>&-`; Python has no object for it then."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(compile_pool, "PROGRAM", "print(0)")
    monkeypatch.setattr(compile_pool, "describe_kernel", str)
    compile_all(["one"], 1)
