"""Device memory that capture takes in a server of contexts of up to 1,048,576 tokens.

    python benchmarks/capture_memory.py [--processors 132] [--json PATH]

What `StepCapture` holds beside the engine, by the sizes of its buffers: no GPU is needed, and
nothing is allocated. 32 query and 8 key heads of dimension 128; the server runs 1 or 16 requests at
once and has room for 16 rows more, as the SGLang plug-in does. The number of processors is that of
an H100 or H200. Raw entries name 64 positions at most, sketches 32. `least` is
--attention-chunk-size 0.

Exits 1 if fingerprints of one layer take a megabyte or more, with the server's defaults, or one
request's raw entries or sketches with the least.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from capture_kernels.serving.step import LayerKind, StepCapture
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import SKETCH_TOP_K
from pipeline.engines.serving.steps.base_recorder import GRAPH_PADDING, RAW_TOP_K

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 1_048_576, 32, 8, 128
MODES = {"fingerprint": 0, "sketch": SKETCH_TOP_K, "raw": RAW_TOP_K}
MOST_BYTES = 1_000_000


def capture_bytes(requests: int, layers: int, top_k: int, chunk_size: int) -> int:
    kind = LayerKind(
        tuple(range(layers)), heads=HEADS, key_heads=KEY_HEADS, head_dim=HEAD_DIM, scale=0.1
    )
    capture = StepCapture(
        [kind], max_rows=requests + GRAPH_PADDING, max_length=LENGTH, num_requests=requests + 1,
        device="meta", mean_top_k=top_k, on_host=False,
        scratch_bytes=ServeOptions(chunk_size=chunk_size).scratch_bytes,
    )  # fmt: skip
    return capture.bytes


def measure(processors: int) -> list[dict[str, Any]]:
    default = ServeOptions().chunk_size
    found = []
    # How many programs share the keys, and with it what each keeps, depends on the GPU alone.
    with mock.patch("capture_kernels.decode.plan.processors", lambda device: processors):
        for layers in (1, 4):
            for requests in (1, 16):
                for mode, top_k in MODES.items():
                    case = {"layers": layers, "requests": requests, "mode": mode}
                    found.append(case | {
                        "bytes": capture_bytes(requests, layers, top_k, default),
                        "least_bytes": capture_bytes(requests, layers, top_k, 0),
                    })  # fmt: skip
    return found


def run(asked: argparse.Namespace) -> None:
    cases = measure(asked.processors)
    print(f"{'layers':>6} {'requests':>9}  {'mode':<12}{'MB':>9}{'MB, least':>11}")
    for case in cases:
        print(
            f"{case['layers']:>6} {case['requests']:>9}  {case['mode']:<12}"
            f"{case['bytes'] / 1e6:>9.2f}{case['least_bytes'] / 1e6:>11.2f}"
        )
    if asked.json:
        figures = {"processors": asked.processors, "length": LENGTH, "cases": cases}
        common.write_figures(asked.json, {**common.about(("torch", "triton")), **figures})
    for case in cases:
        if case["layers"] > 1:
            continue
        promised = case["bytes"] if case["mode"] == "fingerprint" else case["least_bytes"]
        if promised >= MOST_BYTES and (case["mode"] == "fingerprint" or case["requests"] == 1):
            raise WrongAnswerError(f"{case} takes {promised:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sys.exit(common.exit_code(lambda: run(asked)))


if __name__ == "__main__":
    main()
