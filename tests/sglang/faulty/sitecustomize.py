"""Stands in for what a test cannot bring about, in a process that has this folder on its
PYTHONPATH: where ATTN_TEST_FAULT_AT is set, the captured step of that number raises; where
ATTN_TEST_RECORDS_AT_END is set, no record is made before the recorder is closed."""

from __future__ import annotations

import importlib.util
import os
import sys
from itertools import count


class ChangingFinder:
    """Finds a module once, as it is, and changes it when it has been run."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def break_results(module):
    results = module.StepCapture.results
    steps, last = count(), int(os.environ["ATTN_TEST_FAULT_AT"])

    def broken(self, rows, **asked):
        if next(steps) == last:
            raise RuntimeError("a fault for the test")
        return results(self, rows, **asked)

    module.StepCapture.results = broken


def make_records_at_end(module):
    module.EVERY_S = 3600.0


CHANGES = {
    "ATTN_TEST_FAULT_AT": ("capture_kernels.serving.step", break_results),
    "ATTN_TEST_RECORDS_AT_END": (
        "pipeline.engines.serving.steps.records", make_records_at_end,
    ),
}  # fmt: skip
for variable, (module, change) in CHANGES.items():
    if variable in os.environ:
        sys.meta_path.insert(0, ChangingFinder(module, change))
