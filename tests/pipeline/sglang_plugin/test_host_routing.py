"""What records and entries say of the experts of a step's rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pipeline.engines.serving.responses import mean_routing, routing_of  # noqa: E402
from pipeline.engines.serving.rows import LayerRow  # noqa: E402
from pipeline.engines.serving.steps.routing import HostRouting  # noqa: E402


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 8))
def test_records_and_entries_say_the_same_of_each_row(seed, rows, k):
    layers, scales = (2, 5, 9), [0.5, 1.0, 2.0]
    random = np.random.default_rng(seed)
    experts = random.integers(0, 60, (3, rows, k)).astype(np.int32)
    weights = (random.integers(0, 4, (3, rows, k)) / 4).astype(np.float32)  # some are equal
    entropy = random.uniform(-0.1, 1.0, (3, rows)).astype(np.float32)
    parts = experts, weights.view(np.int32), entropy.view(np.int32)[..., None]
    found = HostRouting(layers, scales, torch.tensor(np.concatenate(parts, axis=2)))
    for row in range(rows):
        routings = found.of_row(row)
        assert list(routings) == list(layers)
        for index, number in enumerate(layers):
            order = sorted(range(k), key=lambda i: (-weights[index, row, i], i))
            assert routings[number].experts.tolist() == experts[index, row, order].tolist()
            expected = float(entropy[index, row]) * scales[index]
            assert routings[number].entropy == min(max(expected, 0.0), 1.0)
        # Layers without a router among them, in any number.
        for asked in ((2, 5, 9), (1, 5), (9, 2), (1,), ()):
            none = np.zeros(0, np.float32)
            of_layers = [LayerRow(n, none, 0.0, none, none, routing=routings.get(n)) for n in asked]
            own = [routings[n] for n in asked if n in routings]
            expected = (None, None)
            if own:
                entropies = [each.entropy for each in own]
                expected = own[-1].experts.tolist(), sum(entropies) / len(entropies)
            assert mean_routing(own) == routing_of(of_layers) == expected
            assert found.of_record(row, asked) == expected
