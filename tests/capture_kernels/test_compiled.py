"""What the compiler makes of the kernels for GPUs that are not there: lean loops without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
# Instructions of the loop over tiles. The branch that ends a range of distances is among them, so
# most tiles run fewer.
LOOP_BUDGET = {
    "beside": 700,
    "beside, one layer": 700,
    "beside float8": 850,
    "beside head_dim 80": 700,
    "beside head_dim 256": 800,
    "top 16": 850,
    "top 16, one layer": 800,
    "heads, head_dim 80, top 16": 850,
    "heads, top 16": 750,
    "heads, top 16, small programs": 750,
    "float8, top 16": 900,
    "fused": 900,
    "fused, top 16": 950,
    "fused without statistics": 600,
}


def compiled(capability: int, plans: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_only.py"), str(capability), *plans],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return report


OTHER_PLANS = [
    "heads, top 3",
    "one row, top 16",
    "top 64",
    "top 16 of a million keys",
    "scores",
    "records",
]


@pytest.fixture(scope="module")
def for_hopper() -> dict[str, dict[str, dict[str, int]]]:
    return compiled(90, [*LOOP_BUDGET, *OTHER_PLANS])


# What a kernel may put aside before its loop and fetch after it, in bytes of a thread; others none.
PUT_ASIDE = {"key_pass": 16, "finish": 8}


@pytest.mark.parametrize("plan", [*LOOP_BUDGET, *OTHER_PLANS])
def test_no_kernel_spills_in_its_loop_on_hopper(for_hopper, plan):
    kernels = for_hopper[plan]
    assert kernels
    for name, kernel in kernels.items():
        assert kernel["loop_spills"] == 0, name
        assert kernel["spilled"] <= PUT_ASIDE.get(name, 0), name


@pytest.mark.parametrize("plan", [*LOOP_BUDGET, *OTHER_PLANS])
def test_no_reduction_takes_a_value_twice(for_hopper, plan):
    assert not any(kernel["scattered_reductions"] for kernel in for_hopper[plan].values())


@pytest.mark.parametrize("plan", LOOP_BUDGET)
def test_the_loop_over_keys_is_within_its_budget(for_hopper, plan):
    assert 0 < for_hopper[plan]["key_pass"]["loop"] <= LOOP_BUDGET[plan]


# Plans that are compiled for GPUs other than Hopper as well; none has float8 keys, which compute
# capability 8.0 does not know.
EVERYWHERE = [
    *("beside", "top 16", "top 16, one layer", "heads, top 16", "top 64", "fused"),
    *("scores", "records"),
]


@pytest.mark.parametrize("capability", [80, 100])
def test_kernels_compile_for_other_gpus_with_next_to_no_spills(capability):
    for kernels in compiled(capability, EVERYWHERE).values():
        assert all(kernel["spilled"] <= 16 for kernel in kernels.values()), kernels
