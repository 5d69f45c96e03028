"""Whether it repays to finish the layers of a step together: four layers in one step, in us a step.

    python benchmarks/kernel_layers.py [--json PATH]

A plan of several layers puts off their passes and merges, and launches each kernel once for all of
them (`capture_kernels/decode/step/layers.py`). Three ways, each a CUDA graph, with plans made for
exactly this step, at 32/8 heads, D=128, bfloat16, 4,096 keys:

    together        one plan of four layers, finished with the last
    layer by layer  the same plan, each layer finished as soon as it has run
    one-layer plan  four steps of a plan of one layer, so with four schedules

for B=1 and B=32 requests; statistics alone, and with the top 16 of each head and of the mean. The
ways take turns; the median of the rounds counts. Each layer's answer, as the graph left it, is
compared with float64; exits 1 if one is wrong. It takes less than a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

# A GPU host runs this from a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_cases import Errors, Shape, captured, checked_rows, make_batch, timed
from benchmarks.kernel_compile import Job, compile_ahead
from benchmarks.kernel_ways import Beside, errors_of, step, steps_of_one_layer

LAYERS = 4
BATCHES = (1, 32)
VARIANTS = ("statistics", "mean")
TOGETHER, BY_LAYER, ONE_LAYER = "together", "layer by layer", "one-layer plan"


def finish_layer_by_layer(way: Beside, layers: int) -> None:
    way.schedule()
    for number in range(layers):
        way.layer(number)
        way.finish()


def measure(shape: Shape, variant: str) -> dict[str, Any]:
    """Microseconds a step of each way, and what was wrong with their answers."""
    batch = make_batch(shape, LAYERS)
    plans = {
        TOGETHER: Beside(batch, variant),
        BY_LAYER: Beside(batch, variant),
        ONE_LAYER: Beside(batch, variant, 1),
    }
    works = {
        TOGETHER: partial(step, plans[TOGETHER], LAYERS),
        BY_LAYER: partial(finish_layer_by_layer, plans[BY_LAYER], LAYERS),
        ONE_LAYER: partial(steps_of_one_layer, plans[ONE_LAYER], LAYERS),
    }
    graphs = {name: captured(work) for name, work in works.items()}
    times = timed({name: graph.replay for name, graph in graphs.items()}, layers=1)
    rows, problems = checked_rows(batch, 2), []
    for name, plan in plans.items():
        worst = Errors()
        for layer in range(LAYERS):
            # A plan of one layer holds the answer of the last.
            if name != ONE_LAYER or layer == LAYERS - 1:
                answer = plan.answer(0 if name == ONE_LAYER else layer)
                worst = worst.worst(errors_of(batch, answer, layer, rows))
        problems += [f"{name}: {problem}" for problem in worst.problems()]
    return {
        "shape": shape.as_dict(),
        "variant": variant,
        "layers": LAYERS,
        "us": {name: took.us for name, took in times.items()},
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    shapes = [Shape(batch=batch, context=4096) for batch in BATCHES]
    jobs: list[Job] = [(shape, variant) for shape in shapes for variant in VARIANTS]
    compile_ahead(jobs)
    found = []
    print(f"{'us a step of 4 layers':<32}{TOGETHER:>16}{BY_LAYER:>16}{ONE_LAYER:>16}")
    for shape in shapes:
        for variant in VARIANTS:
            figures = measure(shape, variant)
            found.append(figures)
            line = "".join(
                f"{figures['us'][name]:16.1f}" for name in (TOGETHER, BY_LAYER, ONE_LAYER)
            )
            print(f"{f'B={shape.batch}, {variant}':<32}{line}", flush=True)
            for problem in figures["problems"]:
                print(f"wrong answer: {problem}", file=sys.stderr)
    if asked.json:
        asked.json.write_text(json.dumps({"cases": found}) + "\n", encoding="utf-8")
    return 1 if any(figures["problems"] for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
