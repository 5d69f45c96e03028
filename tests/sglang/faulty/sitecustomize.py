"""Stands in for a fault of capture: in a process that has this folder on its PYTHONPATH, the
captured step of the number ATTN_TEST_FAULT_AT raises."""

from __future__ import annotations

import importlib.util
import os
import sys
from itertools import count

MODULE = "capture_kernels.serving.step"


class BreakingFinder:
    """Finds `MODULE` once, as it is, and breaks it when it has been run."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.StepCapture.results = breaking(module.StepCapture.results)

        spec.loader.exec_module = exec_module
        return spec


def breaking(results):
    steps, last = count(), int(os.environ["ATTN_TEST_FAULT_AT"])

    def broken(self, rows, **asked):
        if next(steps) == last:
            raise RuntimeError("a fault for the test")
        return results(self, rows, **asked)

    return broken


if "ATTN_TEST_FAULT_AT" in os.environ:
    sys.meta_path.insert(0, BreakingFinder())
