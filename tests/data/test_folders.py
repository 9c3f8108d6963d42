"""Tests `Folders` as a whole: owners and parts, a run from the command line, and runs that go on."""

import csv
import pickle
import shutil
import warnings

import numpy as np
import pytest
import torch

from lcfl.cli.commands import partition
from lcfl.data.augmentation import CropAndFlip
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Arrays, Folders, ImageFiles, Table
from lcfl.data.partition import ByOwner
from tests.helpers.builders import loaded
from tests.helpers.clients_on_disk import write_arrays, write_image, write_table, write_wards
from tests.helpers.commandline import CONFIGS, lcfl

COLUMNS = ("age", "dose", "outcome")
SIZES = {"large": 40, "middle": 17, "tiny": 3}

LAYER = """
data:
  dataset:
    class_path: Folders
    init_args:
      root: wards
      reader: {class_path: Table, init_args: {target: outcome, regression: true}}
  partition: ByOwner
  batch_size: 8
model:
  network: {class_path: lcfl.models.MLP, init_args: {in_features: 2, hidden: [4], num_classes: 1}}
  optimizer: {class_path: SGD, init_args: {lr: 0.1}}
  loss: {class_path: torch.nn.MSELoss}
  report: loss
trainer: {clients_per_round: 1.0, devices: 1, logger: false, enable_progress_bar: false, evaluate_every: 1}
"""
FEDAVG = ("fit", "-c", CONFIGS / "methods" / "fedavg.yaml", "-c", LAYER)


def test_own_test_and_validation_samples_keep_their_parts(tmp_path):
    rows = [[number, 0, number % 2] for number in range(20)]
    write_table(tmp_path / "a/train.csv", COLUMNS, *rows[:6])
    write_table(tmp_path / "a/test.csv", COLUMNS, *rows[6:8])
    write_table(tmp_path / "b/val.csv", COLUMNS, *rows[8:10])
    write_table(tmp_path / "b/train/1.csv", COLUMNS, *rows[10:16])
    write_table(tmp_path / "c.csv", COLUMNS, *rows[16:])
    data = loaded(FederatedDataModule(Folders(str(tmp_path), Table("outcome")), ByOwner()))
    population, age = data.population, data.samples.inputs[:, 0].int().numpy()
    assert population.names == ("a", "b", "c") and data.num_clients == 3
    test, val, train = population.test["own_split"], population.val, population.train
    assert age[test[0]].tolist() == [6, 7] and age[val[1]].tolist() == [8, 9]
    assert len(train[0]) + len(val[0]) == 6, "nothing else is held out for testing"
    assert len(train[1]) == 4 and set(age[[*train[1], *test[1]]]) == set(range(10, 16))
    assert (len(train[2]), len(val[2]), len(test[2])) == (3, 0, 1)
    assert set(age[np.concatenate([*train, *val, *test])]) == set(range(20))


def test_owners_are_known_before_anything_is_loaded(tmp_path):
    write_wards(tmp_path, SIZES)
    owners = Folders(str(tmp_path), Table("outcome")).owners()
    assert owners.names == tuple(SIZES) and np.bincount(owners.number).tolist() == list(SIZES.values())
    with pytest.raises(ValueError, match=r"^Folders: there is no column 'age'; the folders are the owners"):
        Folders(str(tmp_path), Table("outcome")).owners("age")


def test_a_class_of_one_client_is_a_warning(tmp_path):
    def data():
        folders = Folders(str(tmp_path), Table("outcome"))
        return FederatedDataModule(folders, ByOwner(), protocols=["global"], val_fraction=0.0)

    write_table(tmp_path / "a/train.csv", COLUMNS, [1, 2, "ill"], [1, 2, "well"])
    write_table(tmp_path / "ward_b/train.csv", COLUMNS, [1, 2, "ill"], [1, 2, "wel"], [1, 2, "well"], [1, 2, "wel"])
    for client in ("a", "ward_b"):
        write_table(tmp_path / client / "test.csv", COLUMNS, [1, 2, "ill"])
    message = r"^data.dataset: only one client trains on 1 of 3 classes: 'wel' \(client 1 \(ward_b\)\)\. If a cl"
    with pytest.warns(UserWarning, match=message):
        loaded(data())
    shutil.rmtree(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(
            FederatedDataModule(Folders(str(tmp_path), Table("outcome")), ByOwner(), val_fraction=0.0)
        )  # no other one


@pytest.mark.filterwarnings("ignore:data.dataset. Folders. classes that occur")
@pytest.mark.parametrize("kind", ["images", "arrays", "table", "numbers"])
def test_a_dataset_can_be_sent_to_a_spawned_rank(tmp_path, kind):
    if kind == "images":
        write_image(tmp_path / "a/x/1.png", 7)
        data = Folders(str(tmp_path), ImageFiles())
    elif kind == "arrays":
        write_arrays(tmp_path / "a.npz", x=np.ones((2, 3)), y=np.array([0, 1]))
        data = Folders(str(tmp_path), Arrays())
    else:
        write_wards(tmp_path, SIZES)
        data = Folders(str(tmp_path), Table("outcome", regression=kind == "numbers"))
    assert pickle.loads(pickle.dumps(data)).load().fingerprint() == data.load().fingerprint()


def test_names_of_files_do_not_matter(tmp_path):
    rows = [[number, 0, number % 2] for number in range(6)]
    write_table(tmp_path / "one/a/train.csv", COLUMNS, *rows[:4])
    write_table(tmp_path / "one/b.csv", COLUMNS, *rows[4:])
    write_table(tmp_path / "two/a/train/x.csv", COLUMNS, *rows[:2])
    write_table(tmp_path / "two/a/train/y.csv", COLUMNS, *rows[2:4])
    write_table(tmp_path / "two/b/any.csv", COLUMNS, *rows[4:])
    one, two = (
        loaded(FederatedDataModule(Folders(str(tmp_path / name), Table("outcome")), ByOwner()))
        for name in ("one", "two")
    )
    assert one.samples.fingerprint() == two.samples.fingerprint()
    assert one.population.fingerprint == two.population.fingerprint


@pytest.mark.parametrize("kind", ["table", "arrays", "images"])
def test_the_place_of_a_sample_is_its_file_and_row(tmp_path, kind):
    """The inputs are the numbers 0, 1, ... in the order in which they are written."""
    suffix = {"table": ".csv", "arrays": ".npz", "images": ".png"}[kind]
    folder = "/z" if kind == "images" else ""
    number, written = 0, []
    for name, size in {"a/train/1": 2, "a/train/2": 3, "b/train/1": 1, "c/1": 2, "a/test/1": 2}.items():
        parent, _, stem = name.rpartition("/")
        path = tmp_path / f"{parent}{folder}/{stem}{suffix}"
        values = np.arange(number, number + (1 if kind == "images" else size))
        if kind == "table":
            write_table(path, ("x", "y"), *([value, value % 2] for value in values))
        elif kind == "arrays":
            write_arrays(path, x=np.float32(values)[:, None], y=values % 2)
        else:
            write_image(path, number, mode="L")
        written += [(str(path), row + 1) for row in range(len(values))]
        number += len(values)
    data = Folders(str(tmp_path), {"table": Table("y"), "arrays": Arrays(), "images": ImageFiles(mode="L")}[kind])
    values = data.load().inputs.flatten(1)[:, 0].long().tolist()
    assert sorted(values) == list(range(number))
    assert [data.place_of(index) for index in range(number)] == [written[value] for value in values]


def test_an_augmentation_changes_training_batches_but_not_masks(tmp_path):
    write_image(tmp_path / "a/x/1.png", size=(8, 8))
    assert Folders(str(tmp_path), ImageFiles(), CropAndFlip()).load().is_random(training=True)
    write_arrays(tmp_path / "masks/a.npz", x=np.zeros((2, 1, 8, 8)), y=np.zeros((2, 8, 8)))
    with pytest.raises(ValueError, match=r"^Folders: an augmentation changes inputs alone"):
        Folders(str(tmp_path / "masks"), Arrays(), CropAndFlip())


def test_a_reader_is_an_object(tmp_path):
    with pytest.raises(TypeError, match=r"^Folders: reader: got the class ImageFiles, not an instance of it"):
        Folders(str(tmp_path), ImageFiles)


@pytest.mark.parametrize("reader", ["Table", "lcfl.data.datasets.Table", "lcfl.data.datasets.table.Table"])
def test_partition_prints_clients_and_classes(here, capsys, reader):
    write_table("wards/a.csv", COLUMNS, [1, 2, "ill"], [3, 4, "well"])
    write_table("wards/b.csv", COLUMNS, [5, 6, "well"], [7, 8, "ill"])
    options = ["--data.dataset=Folders", "--data.dataset.root=wards", f"--data.dataset.reader={reader}"]
    partition.main([*options, "--data.dataset.reader.target=outcome", "--data.partition=ByOwner"])
    printed = capsys.readouterr().out
    assert "2 clients, true groups: unknown" in printed and "\nclasses: 0 ill, 1 well\n" in printed
    write_wards("numbers", SIZES)
    partition.main(
        [*options, "--data.dataset.reader.target=outcome", "--data.partition=ByOwner", "--data.dataset.root=numbers"]
    )
    assert "classes" not in capsys.readouterr().out, "the classes are called 0 and 1"


def test_a_misspelt_reader_is_explained(here, capsys):
    with pytest.raises(SystemExit):
        lcfl(*FEDAVG, "--data.dataset.reader=Tabel")
    assert (
        "data.dataset.init_args.reader: there is no class 'Tabel'. Did you mean Table? Classes of lcfl: Arrays, "
        "ImageFiles, Table;" in capsys.readouterr().err
    )


def test_regression_is_resumed_to_the_same_bits(here):
    write_wards("wards", SIZES)
    run = lcfl(*FEDAVG, "--trainer.rounds=2", "--trainer.name=whole")
    with (run.path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and float(rows[-1]["test/own_split/global/loss"]) > 0
    lcfl(*FEDAVG, "--trainer.rounds=1", "--trainer.name=halves")
    halves = lcfl(*FEDAVG, "--trainer.rounds=2", "--trainer.name=halves", "--ckpt_path=last")
    assert torch.equal(run.state.global_model, halves.state.global_model)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([COLUMNS, [1, 2, 3], [1, "nan", 3]], "row 2: column 'dose' is nan"),
        ([("age", "outcome"), [1, 2]], "it has no column 'dose'"),
    ],
)
def test_bad_input_is_said_before_anything_is_written(here, table, message):
    write_wards("wards", SIZES)
    write_table("wards/ward_b/train.csv", *table)
    with pytest.raises(ValueError, match=f"^data.dataset: Folders: client 'ward_b': wards/ward_b/train.csv: {message}"):
        lcfl(*FEDAVG, "--trainer.rounds=1")
    assert not (here / "logs").exists()


def test_a_loss_that_refuses_the_targets_is_said_before_anything_is_written(here):
    write_wards("wards", SIZES)
    with pytest.raises(ValueError, match=r"^model.loss: CrossEntropyLoss cannot take outputs"):
        lcfl(*FEDAVG, "--trainer.rounds=1", "--model.loss=torch.nn.CrossEntropyLoss", "--model.network.num_classes=3")
    assert not (here / "logs").exists()


def test_a_test_file_without_rows_is_refused(tmp_path):
    write_table(tmp_path / "ward/train.csv", COLUMNS, [1, 2, "ill"], [1, 2, "well"])
    write_table(tmp_path / "ward/test.csv", COLUMNS)
    with pytest.raises(ValueError, match=r"client 'ward': .*: it has no samples; its files, test\.csv, are empty"):
        Folders(str(tmp_path), Table("outcome"))


def test_a_class_that_nobody_trains_on_is_a_warning(tmp_path):
    for ward in ("a", "b"):
        write_table(tmp_path / ward / "train.csv", COLUMNS, [1, 2, "ill"], [1, 2, "well"])
        write_table(tmp_path / ward / "test.csv", COLUMNS, [1, 2, "wel"])
    with pytest.warns(UserWarning, match=r"no client trains on 1 of 3 classes: 'wel'\. If a class is misspelt"):
        loaded(FederatedDataModule(Folders(str(tmp_path), Table("outcome")), ByOwner(), val_fraction=0.0))


def test_names_of_classes_may_be_numbers_and_no_truth_values(tmp_path):
    write_wards(tmp_path, {"a": 12}, outcomes=("0", "1"))
    assert Folders(str(tmp_path), Table("outcome"), classes=[1, 0]).classes == ("1", "0")
    with pytest.raises(
        ValueError, match=r"classes: got False as a name; YAML reads yes, no, .* so. Write names in quotes"
    ):
        Folders(str(tmp_path), Table("outcome"), classes=[False, True])


def test_classes_name_each_class_of_the_files_once(tmp_path):
    write_wards(tmp_path, {"a": 12}, outcomes=("benign", "malignant"))
    with pytest.raises(ValueError, match=r"classes: got benign, benign; name each class once"):
        Folders(str(tmp_path), Table("outcome"), classes=["benign", "benign"])
    with pytest.raises(
        ValueError, match=r"classes: got benign, odd, but \d+ samples are 'malignant'\. Name this class"
    ):
        Folders(str(tmp_path), Table("outcome"), classes=["benign", "odd"])
