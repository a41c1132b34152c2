"""What rotating q and k costs, in units of cloning them: one process, one thread, work and clone timed in turn.

Run as a script. Times are the thread's CPU time: on one thread and an idle machine the clock's, and on a busy machine
without the time that other programs take. The tables of sines and cosines are built once for the positions, as a model
of several layers would; the row "with its table" builds them anew in every call.
Each size is measured in processes of its own, and the table shows the median of three: what a clone of a few MB takes
depends on the memory that the process has used before.
"""
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from posenc_lib import Rotary, rotary

HEAD_DIM = 128
SHAPES = {"4 MB": (1, 4, 1024), "16 MB": (1, 8, 2048), "64 MB": (1, 16, 4096)}     # of q and k together, in float32
SECONDS = 0.8                                                                      # for each number in the table
PROCESSES = 3


def times(*calls):
    """Median CPU seconds of each call, all timed in turn."""
    for call in calls:
        call()
    taken, until = [[] for _ in calls], time.thread_time() + SECONDS
    while time.thread_time() < until or len(taken[0]) < 5:
        for call, record in zip(calls, taken):
            start = time.thread_time()
            result = call()
            record.append(time.thread_time() - start)
            del result
    return [statistics.median(record) for record in taken]


def in_clones(work, clone):
    work_time, clone_time = times(work, clone)
    return work_time / clone_time


def inputs(shape, dtype):
    """q and k that take as many bytes as `shape` does in float32, and their positions."""
    batch, heads, length = shape
    heads = heads * torch.float32.itemsize // dtype.itemsize
    q, k = (torch.randn(batch, heads, length, HEAD_DIM).to(dtype) for _ in range(2))
    return q, k, torch.arange(length)


def forward(shape, layout, dtype=torch.float32):
    q, k, positions = inputs(shape, dtype)
    method = Rotary(HEAD_DIM, layout=layout)
    return in_clones(lambda: method.rotate(q, k, positions, positions), lambda: (q.clone(), k.clone()))


def with_table(shape, layout, dtype=torch.float32):
    q, k, positions = inputs(shape, dtype)
    method = Rotary(HEAD_DIM, layout=layout)

    def work():
        rotary._recent = ()
        return method.rotate(q, k, positions, positions)
    return in_clones(work, lambda: (q.clone(), k.clone()))


def forward_and_backward(shape, layout, dtype=torch.float32):
    q, k, positions = inputs(shape, dtype)
    gradients = torch.randn_like(q), torch.randn_like(k)
    method, q_leaf, k_leaf = Rotary(HEAD_DIM, layout=layout), q.clone().requires_grad_(), k.clone().requires_grad_()
    return in_clones(lambda: torch.autograd.grad(method.rotate(q_leaf, k_leaf, positions, positions),
                                                 (q_leaf, k_leaf), gradients),
                     lambda: (q.clone(), k.clone(), q.clone(), k.clone()))


def faster_than_transformers(shape, layout):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    q, k, positions = inputs(shape, torch.float32)
    method = Rotary(HEAD_DIM, layout=layout)
    angle = torch.outer(positions, 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)[None]
    cos, sin = angle.cos(), angle.sin()
    ours, theirs = times(lambda: method.rotate(q, k, positions, positions),
                         lambda: apply_rotary_pos_emb(q, k, cos, sin))
    return theirs / ours


def there_and_back(shape):
    """The least that half types can cost: into float32 and back, block by block, and nothing else."""
    q, k, _ = inputs(shape, torch.bfloat16)

    def convert(x):
        y, scratch = torch.empty_like(x), torch.empty(rotary._BLOCK)
        for source, target in zip(x.flatten().split(rotary._BLOCK), y.view(-1).split(rotary._BLOCK)):
            target.copy_(scratch.copy_(source))
        return y
    return in_clones(lambda: (convert(q), convert(k)), lambda: (q.clone(), k.clone()))


def extra_memory(shape, layout, dtype):
    """Largest number of bytes held at one time beyond the inputs, the results included, in units of the inputs."""
    q, k, positions = inputs(shape, dtype)
    method = Rotary(HEAD_DIM, layout=layout)
    method.rotate(q, k, positions, positions)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        method.rotate(q, k, positions, positions)
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / (q.nbytes + k.nbytes)


ROWS = [                                             # what, goal, function of the shape
    ("float32 interleaved, clones", "<= 2.2, 1.5, 1.5", lambda s: forward(s, "interleaved")),
    ("  with its table", "", lambda s: with_table(s, "interleaved")),
    ("  forward and backward, of two clones", "<= 1.8", lambda s: forward_and_backward(s, "interleaved")),
    ("  times faster than transformers (half)", ">= 4", lambda s: faster_than_transformers(s, "interleaved")),
    ("float32 half, clones", "<= 3", lambda s: forward(s, "half")),
    ("  with its table", "", lambda s: with_table(s, "half")),
    ("  forward and backward, of two clones", "", lambda s: forward_and_backward(s, "half")),
    ("  times faster than transformers (half)", "", lambda s: faster_than_transformers(s, "half")),
    ("bfloat16 interleaved, clones", "<= 3, 3, 2", lambda s: forward(s, "interleaved", torch.bfloat16)),
    ("  with its table", "", lambda s: with_table(s, "interleaved", torch.bfloat16)),
    ("  extra memory, of the inputs", "<= 1.1", lambda s: extra_memory(s, "interleaved", torch.bfloat16)),
    ("  to float32 and back, nothing else", "", there_and_back),
    ("bfloat16 half, clones", "<= 3, 3, 2", lambda s: forward(s, "half", torch.bfloat16)),
    ("  with its table", "", lambda s: with_table(s, "half", torch.bfloat16)),
    ("  extra memory, of the inputs", "<= 1.1", lambda s: extra_memory(s, "half", torch.bfloat16)),
]


def measured(size):
    """The column of one size, from processes of its own."""
    columns = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, __file__, size], stdout=subprocess.PIPE, text=True, check=True)
        columns.append(json.loads(done.stdout.splitlines()[-1]))
    return [statistics.median(values) for values in zip(*columns)]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:]:
        torch.empty(2**25, dtype=torch.uint8)        # makes the allocator reuse memory from here on, as a long run does
        print(json.dumps([measure(SHAPES[sys.argv[1]]) for _, _, measure in ROWS]))
        return
    print(f"Rotary on the CPU, one thread, torch {torch.__version__}; head_dim {HEAD_DIM}, sizes of q and k together")
    columns = [measured(size) for size in SHAPES]
    print(f"{'':42}{'goal':>20}" + "".join(f"{size:>9}" for size in SHAPES))
    for (what, goal, _), *numbers in zip(ROWS, *columns):
        print(f"{what:42}{goal:>20}" + "".join(f"{number:9.2f}" for number in numbers))
    print("CUDA: no kernel of its own, the plain torch path; it has not been timed, because no CUDA device was there.")


if __name__ == "__main__":
    main()
