"""What relative positions cost: Shaw's logits in units of q k^T, a bias in clones of it, attention with one in NoPE's.

Run as a script. The two sides of a ratio are timed in turn, in one process on one thread, in CPU seconds of the
thread; the ratio is of the two medians.
"""
import statistics
import time
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from posenc_lib import TUPE, ALiBi, NoPE, PositionMethod, Shaw, T5Bias, attend

HEADS, HEAD_DIM, MAX_OFFSET = 8, 64, 64
REPEATS = 7


class Ready(PositionMethod):
    """A bias that is there already, as when the layers of a model share it."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def bias(self, q_positions, k_positions):
        return self.matrix


def ratio(work, unit):
    """Median thread time of work() over that of unit()."""
    seconds = {work: [], unit: []}
    for _ in range(REPEATS):
        for call, record in seconds.items():
            start = time.thread_time()
            result = call()
            record.append(time.thread_time() - start)
            del result
    return statistics.median(seconds[work]) / statistics.median(seconds[unit])


def peak_megabytes(work):
    """Largest amount held at one time beyond the inputs, the result included, in MB of 10**6 bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 1e6


def qkv(length, requires_grad=False):
    return (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=requires_grad) for _ in range(3))


def shaw_rows():
    length = 4096
    q, k, _ = qkv(length)
    method, positions = Shaw(HEAD_DIM, MAX_OFFSET), torch.arange(length)
    gaps = torch.arange(length).index_add(0, torch.tensor([length - 1]), torch.tensor([1]))

    def plain():
        return (q * HEAD_DIM ** -0.5) @ k.transpose(-2, -1)

    def logits(positions=positions):
        return method.logits(q, k, positions, positions)

    with torch.no_grad():
        yield "Shaw logits, of q k^T", "<= 1.1", ratio(logits, plain)
        yield "  peak MB, 537 of them the result", "< 700", peak_megabytes(logits)
        yield "  positions with a gap", "", ratio(lambda: logits(gaps), plain)
        yield "  peak MB", "< 700", peak_megabytes(lambda: logits(gaps))
    yield "  with gradients wanted, forward", "", ratio(logits, plain)


def bias_rows(length):
    positions, padded = torch.arange(length), torch.arange(length)[None]
    methods = {"T5": T5Bias(HEADS), "ALiBi": ALiBi(HEADS), "TUPE": TUPE(HEADS * HEAD_DIM, HEADS, length)}
    clone = torch.randn(HEADS, length, length).clone
    q, k, _ = qkv(length)
    with torch.no_grad():
        for name, method in methods.items():
            yield (f"{name} bias, {length} positions, of its clone", "<= 1.5",
                   ratio(partial(method.bias, positions, positions), clone))
        yield "  for TUPE: a product q k^T of this size", "", ratio(lambda: q @ k.mT, clone)
        for name in ("T5", "ALiBi"):
            yield f"  {name}, positions batched", "", ratio(partial(methods[name].bias, padded, padded), clone)


def attention_rows():
    length = 2048
    positions = torch.arange(length)
    matrix = T5Bias(HEADS).bias(positions, positions).detach()
    q, k, v = qkv(length)
    with torch.no_grad():
        yield "attention, ready bias, of NoPE", "<= 1.2", ratio(lambda: attend(q, k, v, Ready(matrix)),
                                                                lambda: attend(q, k, v, NoPE()))
        yield "  causal", "", ratio(lambda: attend(q, k, v, Ready(matrix), causal=True),
                                    lambda: attend(q, k, v, NoPE(), causal=True))
        yield "  weights asked for (explicit softmax)", "", ratio(
            lambda: attend(q, k, v, Ready(matrix), return_weights=True), lambda: attend(q, k, v, NoPE()))
    q, k, v = qkv(length, requires_grad=True)
    trainable = T5Bias(HEADS)
    yield "  trainable bias, forward and backward", "", ratio(lambda: attend(q, k, v, trainable).sum().backward(),
                                                               lambda: attend(q, k, v, NoPE()).sum().backward())


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Relative positions on the CPU, one thread, torch {torch.__version__}; {HEADS} heads of {HEAD_DIM}, float32")
    for rows in (shaw_rows(), bias_rows(2048), bias_rows(4096), attention_rows()):
        for what, goal, value in rows:
            print(f"{what:48}{goal:>8}{value:9.2f}", flush=True)


if __name__ == "__main__":
    main()
