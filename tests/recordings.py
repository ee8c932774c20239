"""Notes such as the instrumented kernel writes, made up from a plan's simulation."""

import random

from fa3.planning.plan import Plan
from fa3.primitives.recorder import Note

START = 1_700_000_000_000_000_000
"""Nanoseconds; the GPU's clock counts from 1970."""

TURN = 400
"""Nanoseconds that a warpgroup is behind the one before it: they take turns."""

PAUSE = 100
"""Nanoseconds between two tiles of a warpgroup."""


def made_up_notes(plan: Plan, seed: int = 0) -> list[Note]:
    """Notes of every segment in any order: the simulation's times with noise, on shuffled SMs."""
    chance, config = random.Random(seed), plan.config
    sms = chance.sample(range(plan.gpu.num_sms), plan.gpu.num_sms)
    free, notes = {}, []
    for span in sorted(plan.simulate().spans, key=lambda span: span.start):
        (tile, first, end, *_), us = span.segment, span.cost.us
        first, end = (first, end) if plan.schedule.splits else (0, span.cost.blocks)
        for rank in range(config.cluster):
            sm = sms[span.lane * config.cluster + rank]
            length = round(1000 * us * chance.gauss(1, 0.02))
            for warpgroup in range(config.consumers):
                began = free.get((sm, warpgroup), START + TURN * warpgroup) + PAUSE
                free[sm, warpgroup] = ended = began + length
                times = (began, began + length // 4, ended - length // 4, ended)
                notes.append(Note(sm, warpgroup, *tile, first, end, *times))
    chance.shuffle(notes)
    return notes
