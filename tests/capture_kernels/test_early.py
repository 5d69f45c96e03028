"""Kernels that are launched before the one ahead of them is over read what that one has written.

`test_compiled` shows that none touches memory before it has waited; this, that waiting is enough.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, paged_case  # noqa: E402
from test_statistics import needs_gpu, page_table  # noqa: E402

from capture_kernels.decode.plan import StatisticsPlan  # noqa: E402
from capture_kernels.decode.step.page_table import PageTable  # noqa: E402
from capture_kernels.ring.append import AppendPlan, StepRows  # noqa: E402
from capture_kernels.ring.ring import Ring  # noqa: E402

LENGTHS, STEPS, LAYERS = [700, 64, 2000, 9], 8, 2
# Cycles of the GPU for which the kernel ahead of a step's inputs keeps it busy.
BUSY = 30_000


class Work:
    """Steps whose queries, lengths and flags are written just before each, and whose answers are
    copied just after it; the next step overwrites all of them."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.case = paged_case(LENGTHS, 8, 2, 64)
        rows, generator = len(LENGTHS), torch.Generator().manual_seed(5)
        shape = (STEPS, rows, 8, 64)
        self.queries = torch.randn(shape, generator=generator).to(DEVICE, torch.float16)
        shares = torch.rand((STEPS, rows), generator=generator)
        lengths = (shares * torch.tensor(LENGTHS)).ceil().clamp(min=2)
        self.lengths = lengths.to(DEVICE, self.case.seq_lens.dtype)
        self.enabled = (torch.rand((STEPS, rows), generator=generator) < 0.7).to(DEVICE)
        self.query, self.length = self.queries[0].clone(), self.lengths[0].clone()
        self.flags = self.enabled[0].clone()
        self.table = PageTable(*page_table(self.case)[:2], self.length)
        self.plan = StatisticsPlan(
            layers=LAYERS, max_rows=max_rows, max_length=max_length, heads=8, key_heads=2,
            head_dim=64, scale=0.125, device=DEVICE, top_k=4, mean_top_k=4,
        )  # fmt: skip
        self.ring = Ring(256, DEVICE)
        self.append = AppendPlan(self.ring, max_rows=max_rows, layers=range(LAYERS))
        handles = torch.arange(rows, device=DEVICE)
        self.rows = StepRows(self.length, handles, handles.to(torch.uint8) % 3, self.flags)
        answers = (self.plan.mean, *self.plan.answers)
        self.kept = [
            torch.zeros((STEPS, *each[:, :rows].shape), dtype=each.dtype, device=DEVICE)
            for each in answers
        ]

    def step(self, number: int) -> None:
        self.length.copy_(self.lengths[number])
        self.flags.copy_(self.enabled[number])
        torch.cuda._sleep(BUSY)
        self.query.copy_(self.queries[number])
        self.plan.schedule(self.table, enabled=self.flags)
        for _ in range(LAYERS):
            self.plan.run(self.query, self.case.k_cache)
        self.append.run(self.plan.mean[:, : len(LENGTHS)], self.rows)
        for kept, answer in zip(self.kept, (self.plan.mean, *self.plan.answers), strict=True):
            kept[number].copy_(answer[:, : len(LENGTHS)])
        for each in (self.query, self.plan.mean, self.plan.per_head):
            each.fill_(torch.nan)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("max_rows", "max_length"), [(4, 2000), (256, 131_072)], ids=["exact", "server"]
)
def test_steps_that_follow_at_once_find_what_each_finds_alone(max_rows, max_length):
    alone, together = (Work(max_rows, max_length) for _ in range(2))
    for number in range(STEPS):
        alone.step(number)
        torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        together.step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(STEPS):
            together.step(number)
    before = int(together.ring.state[0])
    for turn in range(20):
        for kept in together.kept:
            kept.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for kept, expected in zip(together.kept, alone.kept, strict=True):
            assert torch.equal(kept, expected), turn
    # Of each step the records of its own enabled rows, in order.
    a_replay = int(alone.ring.state[0])
    assert a_replay == int(alone.enabled.sum())
    assert int(together.ring.state[0]) == before + 20 * a_replay
    number = torch.arange(a_replay)
    slots = (before + 19 * a_replay + number) % together.ring.capacity
    # All words but the seq.
    found = together.ring.slots.cpu()[slots][:, 2:]
    assert torch.equal(found, alone.ring.slots.cpu()[number][:, 2:])
