"""Training: losses with fa3's attention lie on those with torch's, step after step."""

import pytest
import torch
from training import Sizes, check_training


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_few_steps_on_the_cpu(is_packed):
    sizes = Sizes(longest=24, batch=4, is_packed=is_packed)
    check_training(sizes, 30, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_packed", [False, True])
def test_300_steps_on_the_gpu(is_packed, head_dim, device):
    sizes = Sizes(head_dim, 4, 2, layers=2, width=128, longest=200, batch=8, is_packed=is_packed)
    check_training(sizes, 300, device)
