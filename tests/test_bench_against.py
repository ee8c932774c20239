"""Two trees in one process."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import fa3
from benchmarks.bench_against import knows, load_tree, ratio


def test_another_tree_stands_beside_this_one(tmp_path):
    shutil.copytree(Path(fa3.__file__).parent, tmp_path / "fa3")
    theirs = load_tree(tmp_path)
    assert Path(theirs.__file__).is_relative_to(tmp_path)
    assert sys.modules["fa3"] is fa3 and theirs.flash_attn_func is not fa3.flash_attn_func
    q = torch.randn(1, 40, 2, 64).bfloat16()
    assert torch.equal(theirs.flash_attn_func(q, q, q), fa3.flash_attn_func(q, q, q))


def test_a_folder_without_one_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no checkout of fa3"):
        load_tree(tmp_path)
    assert sys.modules["fa3"] is fa3


def test_ratios_are_taken_inside_a_round():
    times = {"before": [2.0, 30.0, 4.0], "now": [1.0, 10.0, 4.0]}
    assert ratio(times, "before", "now") == 2.0


def test_calls_that_an_older_tree_does_not_know_are_left_out(capsys):
    def refused():
        raise NotImplementedError("cu_seqlens_q is not supported yet")

    assert knows(lambda: None) and not knows(refused)
    assert not knows(lambda: fa3.no_such_function())
    assert "left out: cu_seqlens_q is not supported yet" in capsys.readouterr().out
    with pytest.raises(ValueError, match="wrong"):
        knows(lambda: (_ for _ in ()).throw(ValueError("wrong")))
