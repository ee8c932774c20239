"""What GPU tests ask of counters (`fa3.running.counters`) when no launch runs any more."""

import torch

from fa3.running import counters, graphs


def used_counters() -> list[str]:
    """Counters that the next call on a stream or in a capture would take, and that are not zero.

    A capture keeps more than counters, such as the tables that its launches read, and those of a
    graph that is gone are kept until the next capture begins.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    places = {f"stream {stream:#x}": one for (_, stream), one in list(counters.BY_STREAM.items())}
    for number, capture in list(graphs.LIVE.items()):
        for stream, one in list(capture.counters.items()):
            places[f"capture {number}, stream {stream:#x}"] = one
    return [
        f"{place}: {words.count_nonzero()} of {len(words)}, the first at {words.nonzero()[0, 0]}"
        for place, one in places.items()
        for words in list(one.free)
        if words.any()
    ]
