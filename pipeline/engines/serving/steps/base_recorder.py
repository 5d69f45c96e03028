"""What the recorders of all engines have: records, a budget, and an end of capture."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from capture_kernels.serving.step import StepCapture, StepResults
from pipeline.engines.serving.budget import OverheadBudget
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.facts_file import ENDED
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import SKETCH_TOP_K, CaptureRequest, ModelFacts

from .hubs import asked_slots
from .ranks import Ranks
from .records.process import RecordProcess
from .served_model import ServedModel
from .states import NotedRow, wants_keys, wants_lists

LOG = logging.getLogger("attn.capture")

# Of raw entries the most a client may ask for.
RAW_TOP_K = 64
# A CUDA graph may be for a few rows more than there are requests.
GRAPH_PADDING = 16


def top_k_of_mean(options: ServeOptions) -> int:
    """Of the mean of a row's heads, how many keys a step has to find."""
    modes = options.modes
    return RAW_TOP_K if "raw" in modes else SKETCH_TOP_K if "sketch" in modes else 0


def top_k_of_heads(options: ServeOptions) -> int:
    """Of each head, how many keys a step has to find."""
    return RAW_TOP_K if "raw" in options.modes and options.head_lists else 0


class BaseRecorder:
    """Captures for one model.

    Args:
        options: of the server, with capture on.
        model: whose attention is captured, with its `facts`.
        switched_off: is given the facts that hold once capture is off.
        ranks: the processes that hold the model's heads, of which this is one.

    Attributes:
        failed: whether an error has ended capture.

    Raises:
        AttnError: records cannot be stored or sent as asked, or no process for them starts.
    """

    def __init__(
        self,
        options: ServeOptions,
        model: ServedModel,
        switched_off: Callable[[ModelFacts], None],
        ranks: Ranks,
    ) -> None:
        self.options, self.ranks = options, ranks
        self._served, self._switched_off = model, switched_off
        self._has_lists = top_k_of_heads(options) > 0
        self._records = None
        if ranks.answers and (options.sidecar_url or options.store):
            self._records = RecordProcess(
                options.layout, sidecar_url=options.sidecar_url, store=options.store,
                curve_keys=options.curve_keys,
            )  # fmt: skip
        self._budget = OverheadBudget(options.overhead_budget)
        self.failed = self._closed = False

    def new_collector(
        self, request: CaptureRequest, prompt: Sequence[int], name: str, *, is_thinking: bool
    ) -> RequestCollector:
        """Of a request that begins.

        Args:
            prompt: its tokens.
            name: of the request in records, and of its response.
            is_thinking: as `ServedModel.phases` has it.
        """
        model = self._served
        return RequestCollector(
            request,
            request_id=name,
            model=model.name,
            capture_id=model.capture_id(request.layers, request.heads, request.mask_prefix),
            layout=self.options.layout,
            prompt_len=len(prompt),
            phases=model.phases(prompt, is_thinking=is_thinking),
            response_id=name,
            keep_records=False,
            records_elsewhere=self.options.records,
        )

    def results_of(
        self, capture: StepCapture, rows: int, noted: Sequence[NotedRow]
    ) -> StepResults:  # fmt: skip
        """Copies of what a step found of its first rows, as far as requests ask for it.

        Args:
            noted: the captured ones of them.
        """
        requests = [note.state.collector.request for note in noted]
        return capture.results(
            rows, keys=any(map(wants_keys, requests)),
            heads=self._has_lists and any(map(wants_lists, requests)), hubs=asked_slots(noted),
        )  # fmt: skip

    @property
    def off(self) -> str | None:
        """Why capture is off since some time, in words for clients."""
        if self.failed:
            return "capture ended with an error: see the server's log"
        return self._budget.exceeded

    def add_seconds(self, elapsed: float, spent: float) -> None:
        """Add what capture took of some seconds of serving, and switch it off past its budget."""
        if self._budget.add(elapsed, spent):
            LOG.warning("capture is switched off: %s", self._budget.exceeded)
            self.report_off(self.off)

    def report_off(self, reason: str | None) -> None:
        if not self.ranks.answers:
            return
        facts = self._served.facts
        off = {**facts.reasons, "capture": str(reason)}
        self._switched_off(dataclasses.replace(facts, reasons=off))

    def close(self) -> None:
        """Deliver what waits, log what became of all records, and report the end; once."""
        if self._closed:
            return
        self._closed = True
        if self._records is not None:
            counts = self._records.close()
            LOG.info("records: %s", " ".join(f"{k} {v}" for k, v in counts._asdict().items()))
        self.report_off(ENDED)
