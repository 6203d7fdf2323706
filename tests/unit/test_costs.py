"""Round costs from samples, what they say of speculation, and the file that carries them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_verify_graphs.costs import (
    MIN_SAMPLES,
    PLAIN_DECODE,
    CostKey,
    CostRow,
    CostTable,
    RoundCosts,
    verdict,
)
from sglang_verify_graphs.errors import CostsError

KEY = CostKey("NVIDIA H200", 1, "sha256:a", "sha256:b", "1.2.3", "fa3", "bfloat16")
MS = st.floats(0.01, 1e4)


def costs_of(samples: dict[tuple[int, int], list[float]]) -> RoundCosts:
    costs = RoundCosts()
    for (batch, steps), times in samples.items():
        for ms in times:
            costs.add(batch, steps, ms)
    return costs


class TestBreakEven:
    """Case 12 of the field: verify 24 ms, draft and extend 6 ms, plain decode 15 ms."""

    COSTS = costs_of({(1, 3): [24.0 + 6.0] * 4, (1, 0): [15.0] * 4})

    def test_needed_accept_length(self) -> None:
        assert self.COSTS.break_even(1, 3) == (2.0, 2.0, 2.0)

    @pytest.mark.parametrize(
        ("accept_length", "said"),
        [(1.8, "losing 10%"), (2.4, "gaining 20%"), (2.0, "breaking even")],
    )
    def test_verdict(self, accept_length: float, said: str) -> None:
        assert verdict(self.COSTS.break_even(1, 3), accept_length) == said

    def test_without_a_decode_sample_it_is_unknown(self) -> None:
        costs = costs_of({(1, 3): [30.0] * 4})
        assert costs.break_even(1, 3) is None
        assert verdict(None, 1.8).startswith("unknown: no decode sample")

    def test_without_acceptance_it_is_unknown(self) -> None:
        assert verdict(self.COSTS.break_even(1, 3), None) == "unknown: no acceptance observed"

    def test_a_warm_round_without_drafts_is_not_plain_decode(self) -> None:
        costs = costs_of({(1, 3): [30.0] * 4, (1, 0): [15.0] * 4, (1, PLAIN_DECODE): [12.0] * 4})
        assert costs.break_even(1, 3) == (2.0, 2.0, 2.0)
        assert costs.break_even(1, 3, against=PLAIN_DECODE) == (2.5, 2.5, 2.5)

    def test_noise_widens_the_interval(self) -> None:
        rng = random.Random(0)
        costs = costs_of(
            {(1, k): [ms * rng.lognormvariate(0, 0.1) for _ in range(30)] for k, ms in
             ((0, 15.0), (3, 30.0))}
        )  # fmt: skip
        even = costs.break_even(1, 3)
        assert even is not None
        assert even.low < 2.0 < even.high
        assert verdict(even, 2.0) == "breaking even"


class TestRoundCosts:
    def test_one_slow_first_sample_decides_nothing(self) -> None:
        """Case 15 of the field, the estimator's half: five times too slow at first."""
        for steps in (0, 3):
            costs = RoundCosts()
            costs.add(1, steps, 100.0)
            assert costs.round(1, steps) is None
            for _ in range(4):
                costs.add(1, steps, 20.0)
            found = costs.round(1, steps)
            assert found is not None
            assert found.value == 20.0

    @given(st.integers(0, 5), st.integers(0, 5))
    def test_verify_and_decode_shrug_stalls_off(self, stalls: int, steps: int) -> None:
        times = [20.0] * 20 + [200.0] * stalls
        random.Random(stalls).shuffle(times)
        found = costs_of({(8, steps): times}).round(8, steps)
        assert found is not None
        assert found.value == pytest.approx(20.0)

    def test_plain_decode_is_an_average(self) -> None:
        found = costs_of({(8, 0): [10.0, 11.0, 12.0, 14.0]}).round(8, 0)
        assert found is not None
        assert found.value == pytest.approx(11.75)

    @given(
        st.dictionaries(
            st.tuples(st.integers(1, 64), st.integers(-1, 7)), st.lists(MS, max_size=40)
        ),
        st.tuples(st.integers(1, 64), st.integers(-1, 7)),
    )
    def test_unknown_stays_unknown(
        self, samples: dict[tuple[int, int], list[float]], asked: tuple[int, int]
    ) -> None:
        """A bucket knows its own rounds only; no neighbour's, and none by default."""
        costs = costs_of(samples)
        found = costs.round(*asked)
        assert (found is not None) == (len(samples.get(asked, [])) >= MIN_SAMPLES)
        if found is not None:
            assert 0 < found.low <= found.value <= found.high < math.inf
            assert min(samples[asked]) <= found.low
            assert found.high <= max(samples[asked])

    @given(st.lists(st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf])))
    def test_what_is_no_duration_is_no_sample(self, times: list[float]) -> None:
        assert costs_of({(1, 3): times}).round(1, 3) is None

    def test_memory_is_bounded_and_old_rounds_are_forgotten(self) -> None:
        costs = costs_of({(1, 3): [20.0] * 1000 + [30.0] * 100})
        found = costs.round(1, 3)
        assert found == (30.0, 30.0, 30.0)
        assert len(costs._samples[1, 3]) <= 100


ROWS = st.builds(
    lambda batch, steps, times, n: CostRow(batch, steps, times[1], times[0], times[2], n),
    st.integers(1, 512), st.integers(PLAIN_DECODE, 16),
    st.lists(MS, min_size=3, max_size=3).map(sorted), st.integers(2, 99),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class TestTable:
    @given(st.lists(ROWS, unique_by=lambda row: (row.batch, row.draft_steps)))
    def test_file_roundtrip(self, rows: list[CostRow]) -> None:
        table = CostTable(KEY, tuple(rows))
        assert CostTable.from_json(table.to_json()) == table

    @given(st.lists(ROWS, unique_by=lambda row: (row.batch, row.draft_steps)))
    def test_costs_start_from_a_table(self, rows: list[CostRow]) -> None:
        costs = RoundCosts(CostTable(KEY, tuple(rows)))
        for row in rows:
            found = costs.round(row.batch, row.draft_steps)
            assert found is not None
            assert row.low_ms <= found.value <= row.high_ms
            if row.draft_steps > 0:
                assert found.value == row.ms

    def test_served_rounds_replace_it(self) -> None:
        costs = RoundCosts(CostTable(KEY, (CostRow(1, 3, 20.0, 19.0, 21.0, 9),)))
        for _ in range(100):
            costs.add(1, 3, 30.0)
        assert [row.ms for row in costs.rows()] == [30.0]

    def test_a_table_holds_what_is_known(self) -> None:
        costs = costs_of({(1, 3): [20.0] * 9, (8, 3): [21.0]})
        assert costs.rows() == (CostRow(1, 3, 20.0, 20.0, 20.0, 9),)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("gpu", "NVIDIA L4"), ("tp_size", 8), ("model_digest", "x"), ("draft_digest", "x"),
         ("sglang_version", "9"), ("attention_backend", "triton"), ("dtype", "float16")],
    )  # fmt: skip
    def test_a_mismatch_names_what_differs(self, name: str, value: object) -> None:
        table = CostTable(KEY, ())
        table.check(KEY)
        with pytest.raises(CostsError) as error:
            table.check(replace(KEY, **{name: value}))
        assert f"{name} {getattr(KEY, name)!r}, here {value!r}; calibrate" in str(error.value)
        assert sum(field in str(error.value) for field in vars(KEY)) == 1

    @settings(max_examples=50, deadline=None)
    @given(st.text() | JSON.map(json.dumps))
    def test_any_other_text_is_refused_in_one_line(self, text: str) -> None:
        self.refused(text)

    GOOD = json.loads(CostTable(KEY, (CostRow(1, 3, 2.0, 1.0, 3.0, 9),)).to_json())

    @settings(max_examples=50, deadline=None)
    @given(st.sampled_from(list(vars(KEY))), JSON)
    def test_a_key_field_of_another_type(self, name: str, value: object) -> None:
        if type(value) is not type(getattr(KEY, name)):
            self.refused(json.dumps({**self.GOOD, "key": {**self.GOOD["key"], name: value}}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("batch", 0), ("batch", True), ("batch", 1.5), ("batch", 10**9), ("draft_steps", -2),
         ("draft_steps", 10**9), ("ms", 0), ("ms", -1.0), ("ms", math.nan), ("ms", math.inf),
         ("ms", 10**400), ("low_ms", 2.5), ("high_ms", 1.5), ("samples", "9"), ("more", 1)],
    )  # fmt: skip
    def test_a_row_that_cannot_be(self, name: str, value: object) -> None:
        row = {**self.GOOD["rows"][0], name: value}
        self.refused(json.dumps({**self.GOOD, "rows": [row]}))

    def test_two_rows_of_one_bucket(self) -> None:
        self.refused(json.dumps({**self.GOOD, "rows": self.GOOD["rows"] * 2}))

    def test_deep_nesting(self) -> None:
        self.refused("[" * 100_000)

    def refused(self, text: str) -> None:
        with pytest.raises(CostsError) as error:
            CostTable.from_json(text)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400
