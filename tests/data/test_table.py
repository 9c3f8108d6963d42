"""Tests the reader of tables: columns, classes, numbers to predict, and what is refused."""

import builtins
from decimal import Decimal
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch

from lcfl.core import memory
from lcfl.data.datasets import Folders, Table, table_files
from tests.helpers.clients_on_disk import write_table

COLUMNS = ("age", "dose", "outcome")


def dataset(root, target="outcome", **options):
    return Folders(str(root), Table(target, **options))


def refused(root, target="outcome", **options):
    with pytest.raises(ValueError) as error:
        dataset(root, target, **options)
    return str(error.value).replace(str(root), "ROOT")


def test_text_targets_are_classes_of_all_clients(tmp_path):
    write_table(tmp_path / "a/train.csv", COLUMNS, [1, 0.5, "well"], [2, 1e-3, " ill "])
    write_table(tmp_path / "a/test.csv", COLUMNS, [3, 3, "dead"])
    write_table(tmp_path / "b.csv", COLUMNS, [4, -4, "ill"], ["", "", ""][:0], [5, 5, "well"], [6, 6, "dead"])
    data = dataset(tmp_path)
    samples = data.load()
    assert (data.shape, data.dtype, data.num_classes) == ((2,), torch.float32, 3)
    assert data.classes == ("dead", "ill", "well")
    assert samples.labels.tolist() == [2, 1, 1, 2, 0, 0] and samples.num_train == 5
    assert torch.equal(samples.inputs, torch.tensor([[1, 0.5], [2, 1e-3], [4, -4], [5, 5], [6, 6], [3, 3]]))


def test_a_quote_may_follow_a_space(tmp_path):
    (tmp_path / "a.csv").write_text('age, "dose", outcome\n1, 2, "well"\n3, "4", ill\n5,6,well\n')
    data = dataset(tmp_path)
    assert data.classes == ("ill", "well") and data.load().inputs.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_text_beyond_csvs_limit_is_named(tmp_path):
    (tmp_path / "a.csv").write_text(f"age,note,outcome\n1,{'x' * 200_000},well\n")
    assert "remove a column with texts this long" in refused(tmp_path)


def test_names_with_underscores_are_no_numbers(tmp_path):
    """Python reads 1_0 as 10."""
    write_table(tmp_path / "a/train.csv", COLUMNS, [1, 0.5, "1_0"], [2, 1, "10"], [2, 1, "2"])
    assert dataset(tmp_path).classes == ("10", "1_0", "2")


def test_a_number_with_an_underscore_is_refused(tmp_path):
    write_table(tmp_path / "a/train.csv", COLUMNS, [1, 0.5, 1], ["1_0", 1, 0])
    with pytest.raises(ValueError, match=r"row 2: column '\w+' is '1_0', which is no number"):
        dataset(tmp_path).load()


def test_whole_numbers_are_classes_in_the_order_of_numbers(tmp_path):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 1, 10], [1, 1, "9"])
    write_table(tmp_path / "b.csv", COLUMNS, [1, 1, "9.0"], [1, 1, "10.0"])
    data = dataset(tmp_path)
    assert data.classes == ("9", "10") and data.load().labels.tolist() == [1, 0, 0, 1]


def test_a_leading_zero_makes_text_of_a_class(tmp_path):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 1, "010"], [1, 1, "10"], [1, 1, "0"], [1, 1, "01067"])
    assert dataset(tmp_path).classes == ("0", "010", "01067", "10")
    of_all = Folders(str(tmp_path), Table("outcome"), classes=["10", "A10", "010", "0", "01067"])
    assert of_all.load().labels.tolist() == [2, 0, 3, 4]


def test_the_first_wrong_class_is_named(tmp_path):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 1, 1], [1, 1, 2.5], [1, 1, ""], [1, 1, 0.5])
    assert "row 2: column 'outcome' is 2.5, which is no class" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_whole_numbers_that_float32_rounds_give_one_warning(tmp_path, kind):
    ages, doses = [2**24, 20240101, 20240103], [0.1, 2**24 + 2, 1.5]
    if kind == "csv":
        write_table(tmp_path / "a.csv", COLUMNS, *zip(ages, doses, "xyx", strict=True))
        write_table(tmp_path / "b.csv", COLUMNS, [20240101, 0.1, "x"])
    else:
        parquet(tmp_path / "a.parquet", age=ages, dose=doses, outcome=list("xyx"))
        parquet(tmp_path / "b.parquet", age=[20240101], dose=[0.1], outcome=["x"])
    with pytest.warns(
        UserWarning, match=r"rounds whole numbers in 'age' \(.*, row 2: 20240101 becomes 20240100\)"
    ) as caught:
        dataset(tmp_path)
    assert len(caught) == 1 and "'dose'" not in str(caught[0].message)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_large_whole_numbers_give_the_warning_and_other_large_numbers_do_not(tmp_path, kind):
    """From 2^53 on, all float64 are whole numbers."""
    ages, doses = [1735689600000000001, 2], [1e20 / 3, 0.5]
    if kind == "csv":
        write_table(tmp_path / "a.csv", COLUMNS, *zip(ages, doses, "xy", strict=True))
    else:
        parquet(tmp_path / "a.parquet", age=ages, dose=doses, outcome=list("xy"))
    with pytest.warns(UserWarning, match=r"rounds whole numbers in 'age' \(.*, row 1: 17356896") as caught:
        dataset(tmp_path)
    assert len(caught) == 1 and "'dose'" not in str(caught[0].message)


@pytest.mark.filterwarnings("error")
def test_half_precision_and_texts_as_bytes_are_read_from_parquet(tmp_path):
    parquet(tmp_path / "a.parquet", age=np.float16([1, 2]), dose=[1, 2], outcome=[b"x", "größe".encode()])
    write_table(tmp_path / "b.csv", COLUMNS, [3, 3, "x"])
    data = dataset(tmp_path)
    assert data.classes == ("größe", "x") and data.load().inputs.tolist() == [[1, 1], [2, 2], [3, 3]]
    parquet(tmp_path / "a.parquet", age=[1], dose=[1], outcome=[b"\xff"])
    assert "column 'outcome' holds bytes that are no text in UTF-8" in refused(tmp_path)


def test_columns_are_found_by_name(tmp_path):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 2, "x"])
    write_table(tmp_path / "b.csv", ("outcome", " dose", "age"), ["x", 20, 10])
    assert dataset(tmp_path).load().inputs.tolist() == [[1, 2], [10, 20]]
    assert dataset(tmp_path, features=["dose"]).load().inputs.tolist() == [[2], [20]]
    write_table(tmp_path / "c.csv", ("more", "dose", "outcome"), ["text", 200, "x"])
    assert dataset(tmp_path, features=["dose"]).load().inputs.tolist() == [[2], [20], [200]]


def test_accents_may_be_stored_apart_from_their_letters(tmp_path):
    """In NFD, as some systems store them, and in NFC, as most people type them."""
    apart, whole = (normalize(form, "größe") for form in ("NFD", "NFC"))
    write_table(tmp_path / "a.csv", ("more", apart, "outcome"), [0, 1, apart], [0, 2, "a"])
    write_table(tmp_path / "b.csv", ("outcome", whole, "more"), [whole, 3, 0])
    for name in (apart, whole):
        data = dataset(tmp_path, features=[name])
        assert data.classes == ("a", whole) and data.load().inputs.tolist() == [[1], [2], [3]]
    numbers = dataset(tmp_path, apart, features=["more"], regression=True)
    assert numbers.load().targets(np.arange(3)).tolist() == [[1], [2], [3]]


@pytest.mark.parametrize("target", ["outcome", ["outcome"], ["outcome", "dose"]])
def test_numbers_to_predict_have_a_shape(tmp_path, target):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 0.5, 7.25], [2, 1.5, -1])
    data = dataset(tmp_path, target, regression=True)
    number = 1 if isinstance(target, str) else len(target)
    assert (data.target_shape, data.target_dtype, data.num_classes) == ((number,), torch.float32, None)
    samples = data.load()
    assert samples.labels is None and data.classes is None
    assert samples.targets(np.arange(2)).tolist() == [[7.25, 0.5][:number], [-1, 1.5][:number]]
    assert samples.inputs.shape == (2, 3 - number)


def test_other_dialects(tmp_path):
    text = '\ufeff"age";"dose";"outcome"\r\n\r\n"1";2;"a;b"\r\n3;4;"c"\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    data = dataset(tmp_path, delimiter=";")
    assert data.classes == ("a;b", "c") and data.load().inputs.tolist() == [[1, 2], [3, 4]]


def test_long_tables_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK", 9)  # three rows
    rows = [[number, -number, f"c{number % 2}"] for number in range(8)]
    write_table(tmp_path / "a.csv", COLUMNS, *rows)
    data = dataset(tmp_path)
    assert data.load().inputs.tolist() == [row[:2] for row in rows] and len(data.owners().part) == 8
    write_table(tmp_path / "a.csv", COLUMNS, *rows[:7], ["x", 1, "c0"])
    assert "row 8: column 'age' is 'x', which is no number" in refused(tmp_path)
    write_table(tmp_path / "a.csv", COLUMNS, *rows[:7], [1, 1])
    assert "row 8 has 2 cells, but the first line has 3" in refused(tmp_path)


def test_no_file_is_read_twice(tmp_path, monkeypatch):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 2, "x"])
    read = []
    original = table_files._read_csv
    monkeypatch.setattr(table_files, "_read_csv", lambda path, *rest: read.append(path) or original(path, *rest))
    data = dataset(tmp_path)
    data.owners(), data.load()
    assert len(read) == 1
    again = data.load()
    assert len(read) == 2 and again.inputs.tolist() == [[1, 2]]


REGRESSION = "is 0.5, which is no class; set data.dataset.init_args.reader.init_args.regression=true to predict numbers"
REFUSED = {
    "missing column": (
        [("age", "outcome"), [1, "x"]],
        "it has no column 'dose', but age, outcome; the first file, ROOT/a.csv, has age, dose, outcome",
    ),
    "more columns": (
        [("age", "dose", "outcome", "sex"), [1, 2, "x", "f"]],
        "it has more columns, 'sex'; the first file, ROOT/a.csv, has age, dose, outcome; remove them, or name",
    ),
    "column twice": ([("age", "dose", "dose", "outcome"), [1, 2, 3, "x"]], "it has several columns 'dose'; give each"),
    "text": (
        [COLUMNS, [1, 2, "x"], [3, "high", "x"]],
        "row 2: column 'dose' is 'high', which is no number; write a category as columns of 0 and 1, one for each of",
    ),
    "empty cell": ([COLUMNS, [1, 2, "x"], [3, " ", "x"]], "row 2: column 'dose' is empty; fill it, or drop the row"),
    "nan": ([COLUMNS, [1, "NaN", "x"]], "row 1: column 'dose' is nan; drop or replace such values"),
    "infinity": ([COLUMNS, [1, 2, "x"], ["-inf", 2, "x"]], "row 2: column 'age' is -inf; drop or replace such values"),
    "beyond float32": (
        [COLUMNS, [1, 2, "x"], [1, 1e300, "x"]],
        "row 2: column 'dose' is 1e+300, too large for float32",
    ),
    "short row": ([COLUMNS, [1, 2, "x"], [1, 2]], "row 2 has 2 cells, but the first line has 3"),
    "no class": ([COLUMNS, [1, 2, "x"], [1, 2, " "]], "row 2: column 'outcome' is empty; drop samples without a class"),
    "NA as class": ([COLUMNS, [1, 2, "NA"]], "row 1: column 'outcome' is NA; drop samples without a class"),
    "nan as class": ([COLUMNS, [1, 2, "nan"]], "row 1: column 'outcome' is nan; drop samples without a class"),
    "number as class": ([COLUMNS, [1, 2, "x"], [1, 2, 0.5]], f"row 2: column 'outcome' {REGRESSION}"),
    "empty file": ([()], "it is empty; the first line must hold the names of the columns"),
    "no rows": ([COLUMNS], ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_tables_are_refused(tmp_path, case):
    table, message = REFUSED[case]
    write_table(tmp_path / "a.csv", COLUMNS, [1, 2, "x"])
    write_table(tmp_path / "ward_b/train.csv", *table)
    where = "Folders: client 'ward_b': ROOT/ward_b/train.csv: "
    if case == "no rows":
        where, message = (
            "Folders: client 'ward_b': ROOT/ward_b: ",
            "it has no samples; its files, train.csv",
        )
    assert refused(tmp_path).startswith(where + message)


def test_a_quote_that_is_not_closed_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text('age,dose,outcome\n1,2,x\n3,4,"x\n5,6,x\n')
    assert refused(tmp_path).endswith("line 4: unexpected end of data; look for a quote that is not closed")


def test_a_column_without_a_name_is_refused_as_a_feature(tmp_path):
    write_table(tmp_path / "a.csv", ["", *COLUMNS], [0, 1, 2, "x"])
    assert "column 1 has no name, as the row numbers that pandas writes. Remove it" in refused(tmp_path)
    assert dataset(tmp_path, features=["age", "dose"]).columns == ("age", "dose")
    assert dataset(tmp_path, ["outcome", "dose"][1:], features=["age"], regression=True).columns == ("age", "dose")


def test_targets_that_are_not_finite_are_refused(tmp_path):
    write_table(tmp_path / "ward_b.csv", COLUMNS, [1, 2, 0.5], [1, 2, "nan"])
    assert refused(tmp_path, regression=True) == (
        "Folders: client 'ward_b': ROOT/ward_b.csv: row 2: column 'outcome' is nan; drop or replace such values"
    )
    write_table(tmp_path / "ward_b.csv", COLUMNS, [1, 2, "many"])
    assert "ROOT/ward_b.csv: row 1: column 'outcome' is 'many', which is no number" in refused(
        tmp_path, regression=True
    )


def test_a_first_file_without_the_columns_is_refused(tmp_path):
    write_table(tmp_path / "a.csv", COLUMNS, [1, 2, "x"])
    assert refused(tmp_path, "outcomes") == (
        "Folders: client 'a': ROOT/a.csv: it has no column 'outcomes', but age, dose, outcome. Did you mean 'outcome'? "
        "Change the file, or data.dataset.init_args.reader.init_args.target"
    )
    assert "it has no column 'size'" in refused(tmp_path, features=["size"])
    write_table(tmp_path / "a.csv", ["age;dose;outcome"], ["1;2;x"])
    assert refused(tmp_path).endswith("If another sign does, set delimiter")
    write_table(tmp_path / "a.csv", ["outcome"], ["x"])
    assert "it has only the column 'outcome'; a table needs features, too" in refused(tmp_path)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "ward_b.csv").write_bytes("age,outcome\n1,für\n".encode("latin-1"))
    assert refused(tmp_path).startswith("Folders: client 'ward_b': ROOT/ward_b.csv: it cannot be read (UnicodeDecode")


def test_tables_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    write_table(tmp_path / "a.csv", COLUMNS, *[[1, 2, "x"]] * 100)
    write_table(tmp_path / "b.csv", COLUMNS, *[[1, 2, "x"]] * 900)
    monkeypatch.setattr(memory, "_memory", lambda: 1000 * 2 * 4 // 2 - 200)
    assert refused(tmp_path).startswith("Folders: the tables need at least 0 GiB of memory")
    monkeypatch.setattr(memory, "_memory", lambda: 1000 * 2 * 4)
    assert len(dataset(tmp_path).load()) == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": []}, "target and features need at least one column"),
        ({"target": "y", "features": []}, "target and features need at least one column"),
        ({"target": ["y", "z"]}, "got 2 target columns, y, z; a class has one. Set regression: true"),
        ({"target": "y", "features": ["x", "y"]}, "target and features name y more than once"),
        ({"target": "y", "delimiter": "::"}, "delimiter must be one sign, got '::'"),
        ({"target": None}, "got target=null; it must be a text or a list"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=f"^Table: {message}"):
        Table(**options)


def parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table as write

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(pyarrow.table(columns), path)


def test_parquet_holds_the_same_as_csv(tmp_path):
    write_table(tmp_path / "csv/a/train.csv", COLUMNS, [1, 0.5, "well"], [2, 1.5, "ill"])
    write_table(tmp_path / "csv/b/train.csv", COLUMNS, [3, 2.5, "ill"], [4, 3.5, "well"])
    parquet(tmp_path / "parquet/a/train.parquet", outcome=["well", "ill"], age=[1, 2], dose=[0.5, 1.5], more=["?", "!"])
    write_table(tmp_path / "parquet/b/train.csv", COLUMNS, [3, 2.5, "ill"], [4, 3.5, "well"])
    for options in ({}, {"target": "dose", "regression": True, "features": ["age"]}):
        options = {"features": ["age", "dose"], **options}
        one, other = (dataset(tmp_path / kind, **options).load() for kind in ("csv", "parquet"))
        assert one.fingerprint() == other.fingerprint()


def test_truth_values_and_decimals_are_numbers(tmp_path):
    prices = [Decimal("0.25"), Decimal("1.50")]
    parquet(tmp_path / "parquet/a.parquet", outcome=["x", "y"], holiday=[True, False], price=prices)
    write_table(tmp_path / "csv/a.csv", ["outcome", "holiday", "price"], ["x", True, 0.25], ["y", False, "1.50"])
    write_table(tmp_path / "csv/b.csv", ["outcome", "holiday", "price"], ["x", 1, 2])
    parquet(tmp_path / "parquet/b.parquet", outcome=["x"], holiday=[True], price=[Decimal(2)])
    for kind in ("parquet", "csv"):
        samples = dataset(tmp_path / kind).load()
        assert samples.inputs.tolist() == [[1.0, 0.25], [0.0, 1.5], [1.0, 2.0]]


def test_row_numbers_of_pandas_in_parquet_are_no_feature_unless_they_are_named(tmp_path):
    numbers = {"__index_level_0__": [7, 2]}
    parquet(tmp_path / "a.parquet", age=[1, 2], outcome=["x", "y"], **numbers)
    parquet(tmp_path / "b.parquet", age=[3, 4], outcome=["x", "y"])
    parquet(tmp_path / "c.parquet", **numbers, age=[5, 6], outcome=["x", "y"])
    assert dataset(tmp_path).columns == ("age",)
    assert dataset(tmp_path).load().inputs.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    (tmp_path / "b.parquet").unlink()
    assert dataset(tmp_path, features=[*numbers]).load().inputs.flatten().tolist() == [7, 2, 7, 2]


def test_accents_in_parquet_may_be_stored_apart_from_their_letters(tmp_path):
    apart, whole = (normalize(form, "größe") for form in ("NFD", "NFC"))
    parquet(tmp_path / "a.parquet", **{"more": ["?", "!"], apart: [1, 2], "outcome": ["x", "y"]})
    assert dataset(tmp_path, features=[whole]).load().inputs.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"age": [1.0, None]}, "row 2: column 'age' is nan; drop or replace such values"),
        ({"age": ["a", "b"]}, "column 'age' holds string, which is no number; write a category as columns of 0 and 1"),
        ({"age": [True, None]}, "row 2: column 'age' is empty; fill it, or drop the row"),
        ({"outcome": ["x", None]}, "row 2: column 'outcome' is empty; drop samples without a class"),
    ],
)
def test_unusable_parquet_is_refused(tmp_path, columns, message):
    parquet(tmp_path / "ward_b.parquet", **{"age": [1, 2], "outcome": ["x", "y"], **columns})
    assert refused(tmp_path).startswith(f"Folders: client 'ward_b': ROOT/ward_b.parquet: {message}")


def test_parquet_without_pyarrow_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ward_b.parquet").write_bytes(b"PAR1")
    original = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert refused(tmp_path) == (
        "Folders: client 'ward_b': ROOT/ward_b.parquet: Parquet files need pyarrow: pip install \"lcfl[parquet]\", or "
        "save the table as .csv"
    )


def test_damaged_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "ward_b.parquet").write_bytes(b"PAR1 nothing")
    assert refused(tmp_path).startswith("Folders: client 'ward_b': ROOT/ward_b.parquet: it cannot be read (ArrowInv")
