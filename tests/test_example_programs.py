"""The programs of the documentation: prefill, decoding, training, an order of one's own."""

import math

import pytest
import torch

from docs.examples import decode_loop, own_schedule, prefill, training_loop


def test_prefill():
    out = prefill.example(seqlen=150)
    assert out.shape == (1, 150, 32, 128) and out.isfinite().all()


def test_decoding_gives_what_one_call_gives():
    torch.manual_seed(0)
    # The program compares by itself; 20 tokens take two pages.
    assert decode_loop.example(tokens=20, batch=2).shape == (2, 20, 8, 64)


def test_training_learns():
    losses = training_loop.example(steps=30)
    guessing = math.log(training_loop.VOCABULARY)
    assert losses[0] > 0.9 * guessing and losses[-1] < 0.5 * guessing


def test_an_order_of_ones_own():
    # The program compares the bits with those of another order by itself.
    assert own_schedule.example(seqlen=300).isfinite().all()
    planned, own = (own_schedule.predicted_us(one, 2048) for one in (None, own_schedule.by_head))
    assert 0 < planned < own


@pytest.mark.gpu
def test_on_the_gpu(device):
    assert prefill.example(str(device), seqlen=2000).isfinite().all()
    assert decode_loop.example(str(device)).isfinite().all()
    assert own_schedule.example(str(device)).isfinite().all()


@pytest.mark.gpu
def test_training_on_the_gpu(device):
    losses = training_loop.example(str(device))
    assert losses[-1] < 0.1 * losses[0]
