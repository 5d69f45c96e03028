"""Runs the benchmarks one after another, and says the figures that the README quotes.

    python benchmarks/run.py --out DIR [--only NAME,...]      # on any machine
    python benchmarks/run.py --out DIR --gpu [--only NAME,...]   # the ones that need a GPU

Each runs in a process of its own and writes DIR/<name>.json (with --gpu, DIR/<name>-gpu.json):
its figures, date, versions, machine and command, to which a "note" may be added by hand.
DIR/README-figures.md is the table of the figures of every file that is there. Exits 1 when one
failed; the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.figures import figures_table
from benchmarks.sglang_process import python_on_cpu
from discovery.engines.rapids import why_not
from pipeline.serve_command import is_installed

HERE = Path(__file__).resolve().parent
# By name: the script and its options.
ON_CPU = {
    name: [name]
    for name in ("store", "records", "capture", "zones", "discovery", "behaviours", "classifier")
}
ON_CPU["capture"] += ["--device", "cpu"]
ON_CPU["behaviours"] += ["--half", "held_out"]
ON_CPU |= {name: [name] for name in ("memberships", "nights", "interruptions", "kills", "online")}
ON_CPU["live-rounds"] = ["live_rounds"]
ON_CPU["gone-areas"] = ["gone_areas"]
ON_CPU["real-nights"] = ["real_nights", "--clusterings", "consensus,hdbscan"]
ON_CPU |= {"sidecar": ["sidecar"], "sidecar-soak": ["sidecar", "--soak", "30"]}
ON_CPU |= {"sidecar-fuzz": ["sidecar_fuzz"], "stream": ["stream"]}
ON_CPU |= {"answer-bytes": ["answer_bytes"], "capture-memory": ["capture_memory"]}
ON_CPU["step-host"] = ["step_host"]
ON_CPU |= {"outage": ["sidecar_under_engine"], "page-map": ["page_map"]}
# Their rows are kept there: made anew they would take longer than what is measured.
MEMORY = ["memory", "--folder", "build/benchmarks"]
ON_CPU["memory-500k"] = [*MEMORY, "--rows", "500000", "--store", "sqlite", "--limit", "4"]
ON_CPU["memory-5m"] = [*MEMORY, "--rows", "5000000", "--store", "parquet", "--limit", "8"]
ON_GPU = {
    "capture": ["capture", "--device", "cuda", "--size", "small", "--dtype", "float32"],
    "capture-8b": ["capture", "--device", "cuda", "--size", "8b", "--dtype", "bfloat16"],
}
# At sizes for one GPU; rows are kept as those of memory are.
ON_GPU["discovery"] = ["gpu_discovery", "--folder", "build/benchmarks"]
ON_GPU["sample"] = [*ON_GPU["discovery"], "--rows", "100000", "--sample"]
ON_GPU["discovery-sampled"] = [*ON_GPU["discovery"], "--rows", "10000000", "--sampling"]
ON_GPU["discovery"] += ["--rows", "100000,1000000,10000000", "--times", "2", "--peers"]
ON_GPU["real-million"] = ["real_million", "--folder", "build/benchmarks"]
ON_GPU["clustering"] = ["gpu_clustering", "--rows", "200000,1000000,10000000"]
ON_GPU["layers"] = ["kernel_layers"]
ON_GPU["steps"] = ["gpu_server_steps"]
# vllm_serving is not among them: an installation has SGLang or vLLM.
ON_GPU["sglang"] = ["sglang_serving"]
ON_GPU["sglang-windows"] = "sglang_serving --batches 64 --rounds 6 --steps 200".split()
ON_GPU["sglang-windows"] += "--layers 22,23 --kinds recording --shape gpt-oss-20b".split()
ON_GPU |= {"kernels": ["gpu_kernels"], "latent": ["gpu_latent"]}
# Where `gpu_kernels` says how a wheel of SGLang is unpacked, if there is one.
SGLANG = Path("build/sglang")
if SGLANG.is_dir():
    for name in ("kernels", "latent"):
        ON_GPU[name] += ["--sglang", str(SGLANG)]
ON_GPU["kills"] = ["gpu_kills", "--folder", "build/benchmarks", "--rows", "10000000"]
ON_GPU["transports"] = ["gpu_transports", "--folder", "build/benchmarks"]
# Weights of the 8b model, its cache, and the attention that the peer asks for.
MEMORY_8B_GIB = 40
LIBRARIES = (
    *common.LIBRARIES,
    "dask",
    "igraph",
    "river",
    "tokenizers",
    "torch",
    "triton",
    "transformers",
)
# Those that need torch and no RAPIDS.
OF_TORCH = (
    *("capture", "capture-8b", "kernels", "latent", "layers", "steps"),
    *("sglang", "sglang-windows"),
)


def gpu_memory_gib() -> float:
    """Free memory of the GPU; 0 where there is none."""
    try:
        import torch
    except ImportError:
        return 0.0
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


def gpu_count() -> int:
    """GPUs that NVIDIA's driver shows; 0 where there is none."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def cannot_run(name: str, on_gpu: bool) -> str | None:
    """Why a benchmark cannot run here, in words; None where it can."""
    if name == "outage":
        return None if python_on_cpu() else "SGLang is not set up: make sglang"
    if name == "page-map":
        return None if common.chromium_path() else "there is no Chromium"
    if not on_gpu:
        return None
    if name == "transports" and gpu_count() < 2:
        return "it needs two GPUs"
    if name not in OF_TORCH:
        return why_not()
    free = gpu_memory_gib()
    if not free:
        return "torch sees no GPU"
    if name.startswith("sglang") and not is_installed("sglang"):
        return "SGLang is not installed"
    if name == "capture-8b" and free < MEMORY_8B_GIB:
        return f"{free:.0f} GiB are free and it takes {MEMORY_8B_GIB}"
    return None


def run(arguments: list[str], path: Path) -> bool:
    """Run one benchmark and complete its file; False where it failed."""
    script, *options = arguments
    command = ["benchmarks/" + script + ".py", *options]
    print(f"== python {' '.join(command)}", flush=True)
    path.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(HERE / f"{script}.py"), *options, "--json", str(path)], check=False
    )
    if path.exists():
        figures = json.loads(path.read_text(encoding="utf-8"))
        # The options of a benchmark are in its command; where its file lies is nobody's business.
        figures.get("about", {}).pop("arguments", None)
        told = {**common.about(LIBRARIES), **figures}
        told["command"] = " ".join(["python", *command])
        told["passed"] = done.returncode == 0
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if done.returncode:
        print(f"== {script} failed with exit code {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--gpu", action="store_true", help="the benchmarks that need a GPU")
    parser.add_argument("--only", help="names, with commas between them")
    options = parser.parse_args()
    chosen = dict(ON_GPU if options.gpu else ON_CPU)
    names = options.only.split(",") if options.only else list(chosen)
    if unknown := sorted(set(names) - set(chosen)):
        parser.error(f"unknown benchmark {unknown[0]!r}: use {', '.join(chosen)}")
    reasons = {name: reason for name in names if (reason := cannot_run(name, options.gpu))}
    for name, reason in reasons.items():
        print(f"{name}: left out, {reason}")
    names = [name for name in names if name not in reasons]
    if not names:
        parser.error("nothing of this can run here: --gpu needs a GPU, and its libraries")
    options.out.mkdir(parents=True, exist_ok=True)
    ending = "-gpu.json" if options.gpu else ".json"
    good = [run(chosen[name], options.out / f"{name}{ending}") for name in names]
    table = figures_table(options.out)
    (options.out / "README-figures.md").write_text(table, encoding="utf-8")
    print(table)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
