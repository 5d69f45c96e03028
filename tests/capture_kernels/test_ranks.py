"""Heads in several processes: each rank's answers are those of one process that has all heads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from paged import DEVICE, paged_case  # noqa: E402
from shared import REPO  # noqa: E402

from capture_kernels.decode.host import HostStatisticsPlan  # noqa: E402
from capture_kernels.decode.ranks import HeadRanks  # noqa: E402
from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402

ON_GPU = DEVICE == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
LENGTHS = [1, 5, 33, 128, 70]
HEADS, DIM = 8, 16
FLAGS = {"enabled": torch.uint8, "masks": torch.int32}


class Group:
    """Ranks that run one after the other: what the earlier ones have handed over is kept, and the
    last one gets the sums."""

    def __init__(self, count):
        self.count, self.parts, self.bytes = count, [], 0

    def run(self, step):
        """The last rank's answers; `step` takes its number and its `HeadRanks`."""
        for rank in range(self.count):
            self._turn = iter(list(self.parts))
            self._handed = []
            found = step(rank, HeadRanks(self.count, self._all_reduce))
            # Every rank makes the same calls: with another number of them a server would hang.
            assert not rank or len(self._handed) == len(self.parts)
            self.parts = self._handed
        return found

    def _all_reduce(self, part):
        before = next(self._turn, None)
        assert part.is_contiguous()
        total = part.clone() if before is None else part + before
        assert before is None or before.shape == part.shape
        self._handed.append(total.clone())
        self.bytes = sum(each.nbytes for each in self._handed)
        return total


def plan_of(on_host, **kind):
    if on_host:
        return HostStatisticsPlan(**kind)
    from capture_kernels.decode.plan import StatisticsPlan

    return StatisticsPlan(**kind)


def of_ranks(count, case, on_host, key_heads, **asked):
    """The last rank's answers, and its group."""
    group = Group(count)
    found = group.run(
        lambda rank, ranks: answers(case, on_host, key_heads, rank=rank, ranks=ranks, **asked)
    )
    return found, group


def answers(case, on_host, key_heads, *, rank=0, ranks=None, step=None, **kind):
    """What a rank finds of its heads and its copy of the key heads, in layers that differ by their
    queries."""
    count = 1 if ranks is None else ranks.count
    heads = HEADS // count
    own = slice(rank * heads, (rank + 1) * heads)
    per_key = HEADS // key_heads
    keys = slice(own.start // per_key, (own.stop - 1) // per_key + 1)
    options = {"max_rows": 8, "max_length": 200, "layers": 2, "mean_top_k": 5} | kind
    plan = plan_of(
        on_host, heads=heads, key_heads=keys.stop - keys.start, head_dim=DIM, scale=0.25,
        device=DEVICE, ranks=ranks, **options,
    )  # fmt: skip
    flags = {
        name: torch.tensor(value, dtype=FLAGS[name], device=DEVICE)
        for name, value in (step or {}).items()
    }
    table = PageTable.of_requests(case.req_to_token, case.req_pool_indices, case.seq_lens)
    active = torch.tensor([case.active], dtype=torch.int32, device=DEVICE)
    plan.schedule(table, num_active=active, **flags)
    sinks = torch.linspace(-2, 3, HEADS, device=DEVICE)[own].contiguous()
    for layer in range(plan.layers):
        queries = torch.roll(case.queries, layer, dims=0)
        plan.run(queries[:, own].contiguous(), case.k_cache[:, keys].contiguous(), sinks=sinks)
    return [plan.answer(layer) for layer in range(plan.layers)]


def check(found, expected):
    for one, all_heads in zip(found, expected, strict=True):
        torch.testing.assert_close(one.mean, all_heads.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            one.top.mean_masses, all_heads.top.mean_masses, rtol=1e-5, atol=1e-6
        )
        # Of equals either may come first.
        same = one.top.mean_positions == all_heads.top.mean_positions
        assert not same.numel() or same.float().mean() > 0.98


CASES = [
    ({}, {}),
    ({"visibility": Visibility(3, 5, 30), "soft_cap": 2.0}, {}),
    ({"window": 9, "mean_top_k": 20}, {"enabled": [1, 0, 1, 1, 0]}),
    ({"mean_top_k": 0, "top_k": 2}, {"masks": [0, 4, 200, 1, 17]}),
]


@pytest.mark.skipif(ON_GPU, reason="the plan for a CPU")
@pytest.mark.parametrize(("count", "key_heads"), [(2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize(("kind", "step"), CASES)
def test_means_and_their_top_k_are_of_all_ranks_heads(count, key_heads, kind, step):
    case = paged_case(LENGTHS, HEADS, key_heads, DIM, seed=count)
    expected = answers(case, True, key_heads, step=step, **kind)
    found, _ = of_ranks(count, case, True, key_heads, step=step, **kind)
    check(found, expected)
    assert found[0].valid.any()


@pytest.mark.parametrize(
    ("kind", "step"),
    [CASES[0], *(pytest.param(*each, marks=[] if ON_GPU else pytest.mark.slow)
                 for each in CASES[1:])],
)  # fmt: skip
def test_kernels_of_ranks_give_what_one_rank_does(kind, step):
    """Interpreted, on a CPU."""
    pytest.importorskip("triton")
    lengths = [*LENGTHS, 150, 9] if ON_GPU else [33, 70]
    step = {name: value[: len(lengths)] + [0, 0] * ON_GPU for name, value in step.items()}
    case = paged_case(lengths, HEADS, 4, DIM, seed=3)
    expected = answers(case, ON_GPU is False, 4, step=step, **kind)
    found, _ = of_ranks(2, case, False, 4, step=step, **kind)
    check(found, expected)


@pytest.mark.parametrize("on_host", [False] if ON_GPU else [True])
def test_a_rank_with_keys_that_are_not_finite_makes_the_row_invalid_for_all(on_host):
    case = paged_case([9, 9], HEADS, 4, DIM, seed=1)
    slot = case.req_to_token[case.req_pool_indices[0], 4].long()
    case.k_cache[slot, 0] = torch.nan  # of the first rank
    expected = answers(case, on_host, 4)
    found, _ = of_ranks(2, case, on_host, 4)
    for one, all_heads in zip(found, expected, strict=True):
        assert one.valid.tolist() == all_heads.valid.tolist() == [False, True]
        assert one.mean.isfinite().all()
        torch.testing.assert_close(one.mean[1], all_heads.mean[1], rtol=1e-5, atol=1e-5)
        assert one.mean[0, 29] == all_heads.mean[0, 29] == 0


@pytest.mark.slow
def test_rows_whose_logits_have_no_room_have_no_top_k_but_all_else():
    pytest.importorskip("triton")
    case = paged_case([33, 70, 5], HEADS, 4, DIM, seed=3)
    expected = answers(case, not ON_GPU, 4)
    # Room for one block of each of the rank's 4 heads and of their mean.
    room = {"scratch_bytes": 4 * 5 * 64 + 1, "layers": 1}
    found, _ = of_ranks(2, case, False, 4, **room)
    torch.testing.assert_close(found[0].mean, expected[0].mean, rtol=1e-5, atol=1e-5)
    named = (found[0].top.mean_positions >= 0).any(dim=1).tolist()
    assert not all(named)
    for row, there in enumerate(named):
        masses = expected[0].top.mean_masses[row] if there else torch.zeros(5, device=DEVICE)
        torch.testing.assert_close(found[0].top.mean_masses[row], masses, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(ON_GPU, reason="the plan for a CPU")
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4), seed=st.integers(0, 50),
    count=st.sampled_from([2, 4, 8]), key_heads=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_any_rows_over_any_ranks(lengths, seed, count, key_heads):
    case = paged_case(lengths, HEADS, key_heads, DIM, seed=seed)
    expected = answers(case, True, key_heads, layers=1)
    found, group = of_ranks(count, case, True, key_heads, layers=1)
    check(found, expected)
    # Mean columns of each row, and a probability of each of its keys.
    assert group.bytes == 4 * 32 * len(lengths) + 8 * sum(lengths)


def test_kernels_are_compiled_for_one_number_of_rows_as_for_another():
    """They would be anew where 16 divides the blocks of logits of some steps, and not of others."""
    from capture_kernels.decode.plan import StatisticsPlan

    plan = StatisticsPlan(
        max_rows=16, max_length=1_300, heads=2, key_heads=1, head_dim=16, scale=1.0, mean_top_k=4,
        device="cpu", ranks=HeadRanks(2, torch.clone),
    )  # fmt: skip
    row_blocks = -(-1_300 // plan.scheduled.block_keys)
    assert row_blocks % 2
    for rows in range(1, 17):
        blocks = plan.top._logits_of(rows)["logit_blocks"]
        assert blocks % 16 == 0 and rows * row_blocks <= blocks < rows * row_blocks + 16


def test_ranks_that_could_not_add_up_are_refused():
    from capture_kernels.serving.step import LayerKind, StepCapture

    with pytest.raises(OptionError, match="heads in 1 processes"):
        HeadRanks(1, torch.clone)
    kind = LayerKind((0,), heads=2, key_heads=1, head_dim=16, scale=1.0)
    with pytest.raises(OptionError, match="heads cannot be chosen where several ranks"):
        StepCapture(
            [kind], max_rows=1, max_length=9, num_requests=2, device=DEVICE, chosen=[0],
            ranks=HeadRanks(2, torch.clone),
        )  # fmt: skip


PROCESS = """
import sys
import torch, torch.distributed as dist
from paged import paged_case
from test_ranks import HEADS, DIM, LENGTHS, server_results
from capture_kernels.decode.ranks import HeadRanks

def all_reduce(part):
    dist.all_reduce(part)
    return part

rank, address, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
torch.save(server_results(rank, HeadRanks(2, all_reduce)), output)
dist.destroy_process_group()
"""


def server_results(rank=0, ranks=None):
    """What a server's capture finds in three steps, of which nobody asked for the second."""
    from capture_kernels.serving.step import LayerKind, StepCapture

    count = 1 if ranks is None else ranks.count
    heads, key_heads = HEADS // count, 4 // count
    case = paged_case(LENGTHS, HEADS, 4, DIM, seed=3)
    table = torch.cat([case.req_to_token[:1], case.req_to_token])
    rows = case.req_pool_indices + 1
    kind = {"heads": heads, "key_heads": key_heads, "head_dim": DIM, "scale": 0.25}
    capture = StepCapture(
        [LayerKind((1, 4), **kind), LayerKind((2,), **kind, window=9)], max_rows=8, max_length=200,
        num_requests=len(table), device="cpu", mean_top_k=6, ranks=ranks,
    )  # fmt: skip
    own = slice(rank * heads, (rank + 1) * heads)
    keys = case.k_cache[:, rank * key_heads : (rank + 1) * key_heads].contiguous()
    found = []
    for asked in ([0, 2], [], [1, 2, 4]):
        for index, row in enumerate(rows.tolist()):
            capture.requests.enable(row, mask=index) if index in asked else (
                capture.requests.disable(row))  # fmt: skip
        capture.requests.copy()
        capture.begin(PageTable.of_requests(table, rows, case.seq_lens))
        for layer in capture.layers:
            queries = torch.roll(case.queries, layer, dims=0)[:, own].contiguous()
            capture.layer(layer, queries, keys)
        capture.end()
        found.append(tuple(capture.results(len(rows))[:3]))
    return found


@pytest.mark.skipif(ON_GPU, reason="two processes of a CPU")
def test_two_processes_say_both_what_one_would(tmp_path):
    address = (tmp_path / "meeting").as_uri()
    path = os.pathsep.join([str(REPO), str(REPO / "tests"), str(Path(__file__).parent)])
    outputs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), address, str(output)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
        )
        for rank, output in enumerate(outputs)
    ]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    one, other = (torch.load(output) for output in outputs)
    for step, (expected, found, same) in enumerate(zip(server_results(), one, other, strict=True)):
        for tensor, again in zip(found, same, strict=True):
            assert torch.equal(tensor, again)
        mean, positions, masses = found
        torch.testing.assert_close(mean, expected[0], rtol=1e-5, atol=1e-5)
        seen = expected[0][:, :, 28] == 1
        assert int(seen.sum()) == 3 * [1, 0, 3][step]
        assert torch.equal(positions[seen], expected[1][seen])
        torch.testing.assert_close(masses[seen], expected[2][seen], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device answers")
def test_sums_are_held_by_cuda_graphs_of_several_batch_sizes():
    """A rank beside one with the same heads, so that the mean of all is its own."""
    from capture_kernels.serving.step import LayerKind, StepCapture

    case = paged_case(LENGTHS, HEADS, 4, DIM, seed=3)
    table = torch.cat([case.req_to_token[:1], case.req_to_token])
    rows = case.req_pool_indices + 1
    kind = LayerKind((0, 1), heads=HEADS, key_heads=4, head_dim=DIM, scale=0.25)

    def capture_of(ranks, **sizes):
        made = StepCapture(
            [kind], num_requests=len(table), device=DEVICE, mean_top_k=6, ranks=ranks, **sizes
        )
        for row in rows.tolist():
            made.requests.enable(row)
        made.requests.copy()
        return made

    def step(capture, count):
        capture.begin(PageTable.of_requests(table, rows[:count], case.seq_lens[:count]))
        for layer in (0, 1):
            queries = torch.roll(case.queries, layer, dims=0)[:count].contiguous()
            capture.layer(layer, queries, case.k_cache)
        capture.end()

    alone = capture_of(None, max_rows=8, max_length=200)
    # As a server plans: far more than its steps need, and than has room.
    both = capture_of(HeadRanks(2, lambda part: 2 * part), max_rows=256, max_length=131_072)
    side, graphs = torch.cuda.Stream(), {}
    for count in (5, 1, 3):
        with torch.cuda.stream(side):
            step(both, count)
        torch.cuda.synchronize()
        graphs[count] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[count]):
            step(both, count)
    for count in (1, 5, 3, 5, 1) * 50:  # so often that sums of what was left there would overflow
        graphs[count].replay()
        found = both.results(count)
        step(alone, count)
        expected = alone.results(count)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.mean_positions, expected.mean_positions)
        torch.testing.assert_close(found.mean_masses, expected.mean_masses, rtol=1e-4, atol=1e-5)
