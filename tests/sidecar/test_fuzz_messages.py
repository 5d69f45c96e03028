"""Mutated messages: each is refused with a reason, or its rows are accounted for."""

from __future__ import annotations

import pytest
from fuzzing import fuzz_seed
from message_fuzz import Fuzzer
from running import running
from served_runs import rows_of

from pipeline.store.open import open_store


@pytest.mark.parametrize("count", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_answered_and_no_row_is_lost_in_silence(tmp_path, runs, count):
    """`benchmarks/sidecar_fuzz.py` sends 100,000."""
    seed = fuzz_seed()
    with running(tmp_path, runs=runs) as sidecar:
        fuzzer = Fuzzer(sidecar.host_port, sidecar.stream, rows_of(10, "fuzz"), seed)
        fuzzer.send(count)
        counts = fuzzer.check()["fingerprints"]
        fuzzer.close()
        # What was meant to be damaged was, and what was not got through.
        assert fuzzer.wanted["malformed"] > count / 10, fuzzer.wanted
        assert counts["stored"] > count / 250 and counts["invalid"] > count / 50, counts
        assert sidecar.client.get("/ready").status_code == 200
    with open_store(sidecar.db) as store:
        assert store.verify().is_good, seed
        assert store.counts().rows == counts["stored"], seed
