"""Tests that ``metrics.csv`` gives back the numbers that were written, even if writing was interrupted."""

import csv
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lcfl.runs.metrics_table import MetricsTable


def lines(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def cells(table):
    return [{name: value for name, value in row.items() if value != ""} for row in table.rows]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_numbers_are_read_back_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("table") / "metrics.csv"
    MetricsTable(path).append(-1, {f"m/{number}": value for number, value in enumerate(values)})
    (row,) = MetricsTable(path).rows
    assert row.pop("round") == "-1"
    back = [float(value) for value in row.values()]
    assert [(each, math.copysign(1, each)) for each in back if each == each] == [
        (each, math.copysign(1, each)) for each in values if each == each
    ]
    assert [each != each for each in back] == [each != each for each in values]


def test_a_row_is_in_the_file_as_soon_as_it_is_appended(path):
    table = MetricsTable(path)
    table.append(0, {"a": 1, "b/c": 0.1})
    assert lines(path) == [["round", "a", "b/c"], ["0", "1.0", "0.1"]]
    table.append(1, {"b/c": 2, "a": 3})
    assert lines(path)[2:] == [["1", "3.0", "2.0"]]


def test_a_metric_that_comes_later_gets_a_column(path):
    table = MetricsTable(path)
    table.append(0, {"a": 1})
    table.append(1, {"b": 2})
    table.append(2, {"a": 3})
    assert lines(path) == [["round", "a", "b"], ["0", "1.0", ""], ["1", "", "2.0"], ["2", "3.0", ""]]


def test_a_first_row_without_metrics_has_a_header(path):
    MetricsTable(path).append(0, {})
    assert lines(path) == [["round"], ["0"]]


def test_another_process_continues_the_table(path):
    MetricsTable(path).append(0, {"a": 1, "b": 2})
    MetricsTable(path).append(1, {"b": 3})
    assert lines(path) == [["round", "a", "b"], ["0", "1.0", "2.0"], ["1", "", "3.0"]]


def test_cut_drops_later_rows_and_the_columns_that_only_they_had(path):
    table = MetricsTable(path)
    for number, row in [(-1, {"a": 1}), (0, {"a": 2}), (9, {"a": 3}), (10, {"a": 4, "b": 5})]:
        table.append(number, row)
    resumed = MetricsTable(path)
    resumed.cut(9)
    assert lines(path) == [["round", "a"], ["-1", "1.0"], ["0", "2.0"]]
    resumed.append(9, {"b": 7})
    assert lines(path) == [["round", "a", "b"], ["-1", "1.0", ""], ["0", "2.0", ""], ["9", "", "7.0"]]


def test_cut_makes_a_new_file_with_a_header(path):
    MetricsTable(path).cut(0)
    assert lines(path) == [["round"]]


def test_an_incomplete_last_line_is_dropped(path):
    table = MetricsTable(path)
    table.append(0, {"a": 1, "b": 0.125})
    table.append(1, {"a": 2, "b": 0.375})
    whole = path.read_bytes()
    start = whole.index(b"1,2.0")
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        resumed = MetricsTable(path)
        assert cells(resumed) == [{"round": "0", "a": "1.0", "b": "0.125"}], whole[start:end]
        resumed.cut(1)
        assert path.read_bytes() == whole[:start]
    path.write_bytes(whole)
    assert len(MetricsTable(path).rows) == 2


def test_no_reader_sees_a_partly_rewritten_table(path, monkeypatch):
    table = MetricsTable(path)
    table.append(0, {"a": 1})
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda self, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        table.append(1, {"b": 1})
    assert lines(path) == [["round", "a"], ["0", "1.0"]]
    monkeypatch.undo()
    with open(path) as reader:
        MetricsTable(path).append(1, {"b": 1})
        assert reader.read().split() == ["round,a", "0,1.0"]
    assert len(lines(path)) == 3


@pytest.mark.parametrize("text", ["round,a\n1,2,3\n", "a,b\n1,2\n", "round,a\nx,2\n", "round,a\n,2\n"])
def test_a_damaged_table_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="damaged: every row needs a round and one value per column"):
        MetricsTable(path)
