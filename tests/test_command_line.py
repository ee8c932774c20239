"""What the command line prints and draws, and the timelines behind it."""

import json
import os
import sys

import pytest

import fa3
from fa3.__main__ import DEFAULT_SHAPE, main, parser
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.schedules import SingleTile, StaticPersistent, TileList
from fa3.scores.masks import Sequence
from fa3.tools.plan_command import problem_of

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def problem(*arguments: str):
    return problem_of(parser().parse_args(["plan", *arguments]))


@pytest.mark.parametrize("schedule_type", [TileList, StaticPersistent, SingleTile])
@pytest.mark.parametrize("arguments", [("--causal",), (), ("--window", "300", "20")])
def test_timeline_has_every_tile_once_and_no_overlap(arguments, schedule_type):
    plan = plan_forward(problem(*arguments), schedule=schedule_type)
    timeline = plan.simulate()
    assert len({span.segment.tile for span in timeline.spans}) == plan.schedule.order.num_tiles
    assert len(timeline.spans) == plan.schedule.order.num_tiles
    assert timeline.num_lanes == plan.gpu.num_sms // plan.config.cluster
    free_at = [0.0] * timeline.num_lanes
    for span in sorted(timeline.spans, key=lambda span: span.start):
        assert span.start == pytest.approx(free_at[span.lane])
        free_at[span.lane] = span.end
    assert free_at == pytest.approx(timeline.busy)


@pytest.mark.parametrize("schedule_type", [TileList, StaticPersistent, SingleTile])
def test_timeline_ends_when_the_plan_is_predicted_to(schedule_type):
    plan = plan_forward(problem("--causal"), schedule=schedule_type)
    prediction = plan.predict()
    assert plan.simulate().us == pytest.approx(prediction.us - prediction.launch_us)


def test_timeline_counts_the_mask_s_blocks():
    asked = problem("--shape", "2,1000,3000,6,2,64", "--causal")
    plan = plan_forward(asked)
    config = choose_config(asked, H200)
    sequence = Sequence(asked.seqlen_q, asked.seqlen_k, asked.window)
    ranges = [
        asked.spec.mask.key_blocks(row, config.tile_m, config.tile_n, sequence)
        for row in range(0, asked.seqlen_q, config.tile_m)
    ]
    timeline = plan.simulate()
    assert timeline.blocks == 12 * sum(r.end - r.begin for r in ranges)
    assert timeline.full_blocks == 12 * sum(r.full_end - r.full_begin for r in ranges)


def test_plan_is_printed_and_drawn(tmp_path, capsys):
    png = tmp_path / "order.png"
    main(["plan", "--shape", DEFAULT_SHAPE, "--causal", "--png", str(png)])
    printed = capsys.readouterr().out
    assert "32 query heads on 8 key/value heads" in printed
    assert "16,896 key blocks" in printed
    assert {line.split()[0] for line in printed.splitlines()} >= {"Time", "Bound", "Choice"}
    assert png.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_any_head_dim_is_planned(head_dim, capsys):
    main(["plan", "--shape", f"1,64,64,2,2,{head_dim}"])
    assert f"head_dim {head_dim}," in capsys.readouterr().out


def test_a_trace_has_every_tile_on_its_lane(tmp_path):
    path = tmp_path / "order.json"
    main(["plan", "--shape", "1,1000,1000,4,2,64", "--trace", str(path)])
    timeline = plan_forward(problem("--shape", "1,1000,1000,4,2,64")).simulate()
    events = json.loads(path.read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["ts"]) for event in drawn] == [
        (span.lane, round(span.start, 3)) for span in timeline.spans
    ]
    lengths = [span.cost.us for span in timeline.spans]
    assert [event["dur"] for event in drawn] == pytest.approx(lengths, abs=0.0011)
    assert len(events) - len(drawn) == timeline.num_lanes


def test_info_names_the_versions(capsys):
    main(["info"])
    printed = capsys.readouterr().out
    assert {line.split()[0] for line in printed.splitlines()} >= {"fa3", "GPU", "torch", "cache"}


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


def test_ctrl_c_ends_a_command_in_a_word(monkeypatch, capsys):
    def warmup(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(fa3), "warmup", warmup)
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--preset", "llama3-8b"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "fa3: interrupted\n"


def test_causal_sets_the_right_bound():
    assert problem("--window", "5", "7", "--causal") == problem("--window", "5", "0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shape", "1,1,4096,8,8,64", "--window", "4095", "1"),
        ("--shape", "1,4096,4096,8,8,64", "--window", "8192", "8192"),
        ("--shape", "1,4096,4096,8,8,64", "--window", "9" * 20, "4095"),
    ],
)
def test_bounds_that_hide_nothing_are_no_mask(arguments):
    """As in a call, which runs without them."""
    assert problem(*arguments) == problem(*arguments[:2])


def test_a_single_query_keeps_the_mask_of_several():
    """It runs with their kernels."""
    single, several = (problem("--shape", f"1,{n},4096,8,8,64", "--causal") for n in (1, 4096))
    assert single.spec == several.spec


def test_a_window_beyond_64_bits_is_planned(capsys):
    main(["plan", "--shape", "1,64,64,2,2,64", "--window", "9" * 20, "0"])
    assert "head_dim 64," in capsys.readouterr().out


def test_info_without_a_folder_for_the_cache(monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", "~nouser/x")
    main(["info"])
    assert "cache     none: Could not determine home directory" in capsys.readouterr().out


def test_info_counts_only_kernels_that_are_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    (tmp_path / "kept.o").write_bytes(bytes(2_000_000))
    (tmp_path / "dangling.o").symlink_to(tmp_path / "gone.o")
    main(["info"])
    assert f"{tmp_path}, 1 kernels, 2.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,2,3"), "six positive integers"),
        (("--shape", "1,64,64,3,2,64"), "do not divide"),
        (("--shape", "1,64,64,2,2,100"), "head_dim must be a multiple of 8 up to 256, got 100"),
        (("--shape", "1,64,64,2,2,264"), "head_dim must be a multiple of 8 up to 256, got 264"),
        (("--window", "-2", "0"), "--window"),
        (("--schedule", "fifo"), "schedule must be one of .*'dynamic'.*, got 'fifo'"),
        (("--shape", f"1,{1 << 40},1,1,1,8"), "q must have at most 1073741311 queries"),
        (("--shape", "99999999999,1,1,1,1,8"), "q must have at most 16777216 tiles"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["plan", *arguments])
