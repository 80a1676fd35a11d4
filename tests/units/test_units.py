from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hiremate_lightning.errors import BudgetError
from hiremate_lightning.units import Budget, format_bytes, format_ratio, format_time, parse_budget

MIB = 2**20
GIB = 2**30


READ: dict[int | float | str, Budget] = {
    "12 GiB": Budget(size_bytes=12 * GIB),
    "12GiB": Budget(size_bytes=12 * GIB),
    " 12 gib ": Budget(size_bytes=12 * GIB),
    "12 GB": Budget(size_bytes=12 * 10**9),
    "800 MB": Budget(size_bytes=800 * 10**6),
    "800 MiB": Budget(size_bytes=800 * MIB),
    "1.5 GiB": Budget(size_bytes=3 * GIB // 2),
    "1 TiB": Budget(size_bytes=2**40),
    "1_000_000 B": Budget(size_bytes=10**6),
    "1,000,000 B": Budget(size_bytes=10**6),
    "2e3 KiB": Budget(size_bytes=2000 * 2**10),
    12_884_901_888: Budget(size_bytes=12_884_901_888),
    MIB: Budget(size_bytes=MIB),
    8e9: Budget(size_bytes=8 * 10**9),
    "60%": Budget(share=0.6),
    "60 %": Budget(share=0.6),
    "12.5%": Budget(share=0.125),
    "100%": Budget(share=1.0),
    0.6: Budget(share=0.6),
    1.0: Budget(share=1.0),
    **dict.fromkeys(("auto", "AUTO", " auto "), Budget()),
}


@pytest.mark.parametrize(("value", "budget"), READ.items(), ids=str)
def test_bytes_shares_and_auto_are_read(value: int | float | str, budget: Budget) -> None:
    assert parse_budget(value) == budget
    assert budget.is_auto == (budget == Budget())


def test_a_budget_that_was_read_is_left_as_it_is() -> None:
    budget = Budget(share=0.5)

    assert parse_budget(budget) is budget


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0, "above zero"),
        (-1, "above zero"),
        (16, "16 bytes is less than 1 MiB"),
        (0.0, "share in (0, 1]"),
        (-0.5, "share in (0, 1]"),
        (1.5, "share in (0, 1]"),
        (float("nan"), "share in (0, 1]"),
        (float("inf"), "share in (0, 1]"),
        ("10", "it has no unit"),
        ("10 bananas", "'bananas' is not one of the units"),
        ("0%", "above 0 and at most 100"),
        ("101%", "above 0 and at most 100"),
        ("0 GiB", "above zero"),
        ("-1 GiB", "not a number with a unit"),
        ("1,5 GiB", "not a number with a unit"),
        ("12,34%", "not a number with a unit"),
        ("", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("half", "not a number with a unit"),
        (None, "it is a NoneType"),
        (True, "it is a bool"),
        ([1], "it is a list"),
    ],
)
def test_what_is_no_budget_is_refused_with_reason_and_forms(value: object, reason: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(value)  # type: ignore[arg-type]

    text = str(caught.value)
    assert repr(value) in text
    assert reason in text
    assert '"12 GiB"' in text
    assert '"60%"' in text
    assert '"auto"' in text


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("10", 'Did you mean "10 GiB"?'),
        (16, 'Did you mean "16 GiB"?'),
        (984_122, 'Did you mean "984122 B"?'),
        ("10G", 'Did you mean "10 GiB"?'),
        ("512 m", 'Did you mean "512 MiB"?'),
        ("1,5 GiB", 'Did you mean "1.5 GiB"?'),
    ],
)
def test_a_number_with_no_unit_or_half_of_one_gets_a_hint(value: int | str, hint: str) -> None:
    with pytest.raises(BudgetError, match="Did you mean") as caught:
        parse_budget(value)

    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(size_bytes=12 * GIB), "12.0 GiB"),
        (Budget(share=0.6), "60%"),
        (Budget(share=0.125), "12.5%"),
        (Budget(), "auto"),
    ],
)
def test_a_budget_is_written_as_a_user_would(budget: Budget, text: str) -> None:
    assert str(budget) == text
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * MIB, "10.0 MiB"),
        (455 * MIB, "455 MiB"),
        (int(14.2 * GIB), "14.2 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_bytes_are_written_in_binary_units_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0.0015, "2 us"),
        (0.25, "250 us"),
        (1, "1 ms"),
        (12.34, "12.3 ms"),
        (1500, "1.5 s"),
        (90_000, "90 s"),
        (900_000, "15 min"),
    ],
)
def test_times_are_written_in_the_unit_that_fits(time_ms: float, text: str) -> None:
    assert format_time(time_ms) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.127, "+12.7%"), (0.0, "+0.0%"), (-0.031, "-3.1%")])
def test_overheads_are_written_with_their_sign(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text


@given(st.integers(min_value=MIB, max_value=2**50))
def test_every_number_of_bytes_from_one_mebibyte_is_a_budget(size_bytes: int) -> None:
    assert parse_budget(size_bytes).size_bytes == size_bytes
    assert parse_budget(f"{size_bytes} B").size_bytes == size_bytes


@given(st.integers(min_value=1024, max_value=2**55))
@example(1111)
def test_what_is_written_reads_back_within_half_a_percent(size_bytes: int) -> None:
    """And less than a byte: budgets are whole bytes, rounded down."""
    read = parse_budget(format_bytes(size_bytes)).size_bytes

    assert abs(read - size_bytes) < 0.005 * size_bytes + 1
