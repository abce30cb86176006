"""Core lists are read and written the way the kernel and vLLM spell them."""

from __future__ import annotations

import pytest

from enginepool.dispatcher.cpuset import format_cpus, format_groups, parse_cpus, parse_groups


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        pytest.param("0", (0,), id="one"),
        pytest.param("0-3", (0, 1, 2, 3), id="range"),
        pytest.param("5,2-4\n", (2, 3, 4, 5), id="unsorted-with-newline"),
        pytest.param("1, 1-2", (1, 2), id="overlapping-with-blank"),
        pytest.param("", (), id="empty"),
    ],
)
def test_parse_cpus_reads_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["garbage", "1-", "-1", "1,,2", "+1", "1_0", "٣", "0x1", "0-99999999999", "1-2-3"])
def test_parse_cpus_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a core or a range of cores"):
        parse_cpus(text)


def test_parse_cpus_names_the_bad_part() -> None:
    with pytest.raises(ValueError, match="'7-5' runs backwards"):
        parse_cpus("0-3,7-5")


def test_parse_groups_splits_at_bars() -> None:
    assert parse_groups("0-1|2,3") == ((0, 1), (2, 3))


@pytest.mark.parametrize(("text", "index"), [("0|", 1), ("|0", 0), ("", 0)], ids=["last", "first", "only"])
def test_parse_groups_refuses_an_empty_group(text: str, index: int) -> None:
    with pytest.raises(ValueError, match=f"group {index} is empty"):
        parse_groups(text)


@pytest.mark.parametrize("text", ["", "0", "0-3,8", "1,3,5-6"])
def test_format_cpus_is_the_opposite_of_parse(text: str) -> None:
    assert format_cpus(parse_cpus(text)) == text


def test_format_groups_is_the_opposite_of_parse() -> None:
    assert format_groups(parse_groups("0-3|4,6")) == "0-3|4,6"
