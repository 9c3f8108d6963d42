"""Tests that a later layer drops the arguments of a class that it names and the items of a list that it gives."""

import re
import warnings

import pytest
import yaml
from jsonargparse import Namespace

from lcfl.cli.fleet_config import shared_of
from lcfl.cli.layered_config import as_layers, forget, whole_lists
from lcfl.cli.yaml_files import LOADER
from tests.helpers.commandline import CONFIGS, FEDAVG, LCFED, SYNTHETIC, failure, printed

pytestmark = pytest.mark.usefixtures("here")


def below():
    return Namespace(
        model=Namespace(
            network=Namespace(class_path="a.MLP", init_args=Namespace(width=3, num_classes=8)),
            weight=0.5,
        ),
        clustering=[Namespace(class_path="a.C", init_args=Namespace(k=3))],
    )


@pytest.mark.parametrize("named", ["a.LeNet", {"class_path": "a.LeNet"}, {"class_path": "a.MLP"}])
def test_only_a_named_class_loses_its_arguments(named):
    config = below()
    forget(config, {"model": {"network": named}})
    assert "init_args" not in config.model.network
    assert config.model.weight == 0.5 and config.clustering == below().clustering


@pytest.mark.parametrize("adjusted", [{"init_args": {"width": 4}}, {"width": 4}])
def test_arguments_without_a_class_keep_the_other_arguments(adjusted):
    config = below()
    forget(config, {"model": {"network": adjusted}})
    assert config == below()


def test_a_class_nested_in_changed_arguments_loses_its_arguments():
    inner = Namespace(class_path="a.Inner", init_args=Namespace(size=1))
    config = Namespace(outer=Namespace(class_path="a.Outer", init_args=Namespace(inner=inner, other=2)))
    forget(config, {"outer": {"init_args": {"inner": {"class_path": "a.Else"}}}})
    assert config.outer.init_args.other == 2 and "init_args" not in config.outer.init_args.inner


def test_a_given_list_replaces_the_one_below_and_other_keys_stay():
    config = below()
    forget(config, {"clustering": [{"class_path": "a.C"}], "unknown": {"class_path": "a.C"}, "model": None})
    assert config.clustering == [] and config.model == below().model


def test_a_mapping_keeps_nothing_of_a_class_that_is_named_again_and_no_other_name(capsys):
    kinds = [f"torchmetrics.classification.Multiclass{kind}" for kind in ("AUROC", "F1Score")]
    auroc, f1 = (f"{{class_path: {kind}, init_args: {{num_classes: 8, average: weighted}}}}" for kind in kinds)
    words = [*SYNTHETIC, *FEDAVG, f"--model.metrics={{auroc: {auroc}, f1: {f1}}}"]
    again = f"{{auroc: {{class_path: {kinds[0]}, init_args: {{num_classes: 8}}}}}}"
    block = again[1:-1]  # the same without the braces of the mapping
    for layer in (["-c", f"model: {{metrics: {again}}}"], [f"--model.metrics={again}"], ["--model.metrics", block]):
        (name, metric), *others = printed(capsys, *words, *layer)["model"]["metrics"].items()
        assert name == "auroc" and metric["init_args"]["average"] == "macro" and not others
    changed = printed(capsys, *words, "-c", "model: {metrics: {auroc: {thresholds: 5}}}")["model"]["metrics"]
    arguments = changed["auroc"]["init_args"]
    assert (arguments["average"], arguments["thresholds"], *changed) == ("weighted", 5, "auroc")


def two():
    first = Namespace(class_path="a.C", init_args=Namespace(k=3, size=1))
    return Namespace(method=Namespace(clustering=[first, Namespace(class_path="a.D")]))


@pytest.mark.parametrize("arguments", [{"k": 4}, {"init_args": {"k": 4}}])
def test_an_item_is_changed_by_its_number(arguments):
    layer = whole_lists(two(), {"method": {"clustering": {0: arguments}}, "other": 1})
    first = {"class_path": "a.C", "init_args": {"k": 4, "size": 1}}
    assert layer == {"method": {"clustering": [first, {"class_path": "a.D"}]}, "other": 1}
    (_, second) = whole_lists(two(), {"method": {"clustering": {1: arguments}}})["method"]["clustering"]
    assert second == {"class_path": "a.D", "init_args": {"k": 4}}


def test_an_item_may_get_a_new_class_or_be_inside_a_class():
    named = {"class_path": "a.E"}
    assert whole_lists(two(), {"method": {"clustering": {1: named}}})["method"]["clustering"][1] == named
    inner = Namespace(part=Namespace(class_path="a.P", init_args=two()))
    layer = {"part": {"method": {"clustering": {0: {"k": 9}}}}}
    assert whole_lists(inner, layer)["part"]["method"]["clustering"][0]["init_args"] == {"k": 9, "size": 1}


@pytest.mark.parametrize("named", ["E", {"class_path": "a.E"}])
def test_one_class_for_a_list_of_classes_becomes_a_list(named):
    assert whole_lists(two(), {"method": {"clustering": named}}) == {"method": {"clustering": [named]}}
    below = Namespace(part=Namespace(class_path="a.P"), empty=[], devices=[0, 1])
    assert whole_lists(below, {"part": named, "empty": named}) == {"part": named, "empty": [named]}
    for other in ("auto", 2):  # devices are not classes
        assert whole_lists(below, {"devices": other}) == {"devices": other}


def test_a_file_for_a_list_is_read_from_the_folder_of_the_file_that_names_it(capsys, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "clusterings.yaml").write_text("[{class_path: PrincipalAngles, init_args: {num_clusters: 3}}]")
    (folder / "mean.yaml").write_text("{class_path: ClusterMean, init_args: {over: stored}}")
    for text, number in (("clusterings.yaml", 3), ("PrincipalAngles", 4)):
        (folder / "method.yaml").write_text(f"method: {{clustering: {text}, aggregation: mean.yaml}}")
        config = printed(capsys, *SYNTHETIC, *LCFED, "-c", folder / "method.yaml")["method"]
        (clustering,) = config["clustering"]
        assert clustering["class_path"] == "lcfl.PrincipalAngles"
        assert clustering["init_args"]["num_clusters"] == number
        assert config["aggregation"]["init_args"]["over"] == "stored"
    words = (*SYNTHETIC, *LCFED, f"--method.clustering={folder}/clusterings.yaml")
    assert printed(capsys, *words)["method"]["clustering"][0]["init_args"]["num_clusters"] == 3


@pytest.mark.parametrize("number", [2, -1])
def test_a_missing_item_is_refused(number):
    with pytest.raises(
        ValueError, match=r"method.clustering: there is no item .*; the list has 2 items, counted from 0"
    ):
        whole_lists(two(), {"method": {"clustering": {number: {"k": 4}}}})


@pytest.mark.parametrize("arguments", [{"k": 4}, {"init_args": {"k": 4}}])
def test_arguments_without_a_number_are_for_the_only_item_of_a_list(arguments):
    layer = whole_lists(below(), {"clustering": arguments})
    assert layer == {"clustering": [{"class_path": "a.C", "init_args": {"k": 4}}]}
    with pytest.raises(ValueError, match=r"clustering\.k: the list has 2 .* clustering\.0\.k \(C\) or .*1\.k \(D\)\.$"):
        whole_lists(two().method, {"clustering": arguments})
    with pytest.raises(ValueError, match=r"got k for no class\. Name it first: --empty=CLASS --empty\.k=VALUE"):
        whole_lists(Namespace(empty=[]), {"empty": arguments})
    with pytest.raises(ValueError, match="got k for no class"):
        whole_lists(Namespace(trainer=Namespace(callbacks=None)), {"trainer": {"callbacks": arguments}})


def test_a_class_inside_an_item_keeps_its_other_arguments():
    inner = Namespace(class_path="a.In", init_args=Namespace(size=1, width=2))
    item = Namespace(class_path="a.C", init_args=Namespace(part=inner, sizes={"a": 1}))
    (changed,) = whole_lists(Namespace(items=[item]), {"items": {0: {"part": {"size": 3}, "sizes": {"b": 1}}}})["items"]
    assert changed["init_args"]["part"] == {"class_path": "a.In", "init_args": {"size": 3, "width": 2}}
    assert changed["init_args"]["sizes"] == {"b": 1}


def test_words_about_an_item_become_layers_in_their_place():
    words = ["fit", "--a.0.init_args.b=[1, x]", "-c", "file", "--a.b.12.c", "1=2", "--data.leavers.3=5"]
    converted = as_layers(words)
    plain = [word for word in converted if ":" not in word]
    assert plain == ["fit", "-c", "-c", "file", "-c", "--data.leavers.3=5"]
    layers = [yaml.safe_load(word) for word in converted if ":" in word]
    assert layers == [{"a": {0: {"init_args": {"b": [1, "x"]}}}}, {"a": {"b": {12: {"c": "1=2"}}}}]


def test_words_that_name_a_class_become_layers_in_their_place():
    words = ["fit", "--a.kind=Adam", "--a.kind.lr=1e-3", "--a.kind", "{class_path: m.B, init_args: {lr: 1e-3}}"]
    words += ["--a.parts", "[B, {class_path: C}]", "--a.kind=null", "--a.name=B", "--a.kind=[", "--a.kind={lr: 1}"]
    layers = ["{a: {kind: Adam}}", "{a: {kind: {class_path: m.B, init_args: {lr: 1e-3}}}}"]
    layers += ["{a: {parts: [B, {class_path: C}]}}"]
    expected = ["fit", "-c", layers[0], "--a.kind.lr=1e-3", "-c", layers[1], "-c", layers[2]]
    converted = as_layers(words, ["a.kind", "a.init_args.parts"])
    assert converted[-4:] == words[-4:]
    assert [yaml.safe_load(word) for word in converted[:-4]] == [yaml.safe_load(word) for word in expected]


@pytest.mark.parametrize("named", ["--model.optimizer=Adam", "--model.optimizer={class_path: torch.optim.Adam}"])
def test_a_class_named_on_the_command_line_drops_the_arguments_below(capsys, named):
    arguments = printed(capsys, *SYNTHETIC, *LCFED, named)["model"]["optimizer"]["init_args"]
    assert arguments["lr"] == 0.001 and "momentum" not in arguments
    model = printed(capsys, *SYNTHETIC, *LCFED, named, "--model.optimizer.lr=0.2")["model"]
    assert model["optimizer"]["init_args"]["lr"] == 0.2


@pytest.mark.parametrize("layer", ["--data.client_transforms=Rotation", "-cdata: {client_transforms: Rotation}"])
def test_one_class_is_a_list_of_one_whatever_the_layers_below(capsys, layer):
    words = ("--data.dataset=Digits", "--data.partition=IID", "--data.num_clients=4", *FEDAVG)
    (transform,) = printed(capsys, *words, layer)["data"]["client_transforms"]
    assert transform["class_path"].endswith(".Rotation")


def test_clusterings_named_on_the_command_line_drop_those_below(capsys):
    below = "--method.clustering.num_clusters=3"
    values = {"[RefreshedLowRankCosine]": 10, "RefreshedLowRankCosine": 10, "[{class_path: PrincipalAngles}]": 4}
    for value, number in values.items():
        config = printed(capsys, *SYNTHETIC, *LCFED, below, f"--method.clustering={value}")
        (clustering,) = config["method"]["clustering"]
        assert clustering["init_args"]["num_clusters"] == number


def test_the_command_line_can_change_the_first_of_two_clusterings(capsys):
    fedac = ("-c", CONFIGS / "methods" / "fedac.yaml")
    whole = printed(capsys, *SYNTHETIC, *fedac)["method"]["clustering"]
    changed = printed(capsys, *SYNTHETIC, *fedac, "--method.clustering.0.similarity=l2")["method"]["clustering"]
    whole[0]["init_args"]["similarity"] = "l2"
    assert changed == whole
    assert "has no argument 'similarty'. Did you mean similarity?" in failure(
        capsys, "fit", *SYNTHETIC, *fedac, "--method.clustering.0.similarty=l2"
    )
    for option in ("clustering", "clustering.init_args"):
        with pytest.raises(ValueError, match=r"0\.criterion \(Refr\w+\) or .*1\.criterion \(ClusterNumberTuning\)"):
            printed(capsys, *SYNTHETIC, *fedac, f"--method.{option}.criterion=literal")


def test_an_argument_after_an_added_class_belongs_to_that_class(capsys):
    words = [*SYNTHETIC, "-c", CONFIGS / "methods" / "ifca.yaml", "--method.clustering.num_clusters", "3"]
    words += ["--method.clustering+=ClusterNumberTuning", "--method.clustering.cooldown=2"]
    words += ["--method.clustering+", "ClusterNumberTuning", "--method.clustering.init_args.cooldown=4"]
    first, second, third = printed(capsys, *words)["method"]["clustering"]
    assert first["init_args"]["num_clusters"] == 3
    assert second["init_args"]["cooldown"] == 2 and third["init_args"]["cooldown"] == 4


def test_a_network_of_another_class_starts_from_its_defaults(capsys):
    assert printed(capsys, *SYNTHETIC, *FEDAVG)["model"]["network"]["init_args"]["num_classes"] == 8
    for named in ("{network: LeNet5}", "{network: {class_path: LeNet5}}"):
        config = printed(capsys, *SYNTHETIC, *FEDAVG, "-c", f"model: {named}")["model"]["network"]
        assert config == {
            "class_path": "lcfl.models.LeNet5",
            "init_args": {"in_channels": 3, "image_size": 32, "num_classes": 10, "padding": 0},
        }


def test_a_class_that_is_named_again_starts_from_its_defaults(capsys):
    again = "method: {clustering: [{class_path: LowRankCosine, init_args: {dimension: 7}}]}"
    first = "method: {clustering: [{class_path: LowRankCosine, init_args: {num_clusters: 3, center: true}}]}"
    (clustering,) = printed(capsys, *SYNTHETIC, *LCFED, "-c", first, "-c", again)["method"]["clustering"]
    assert clustering["init_args"] | {"offline_steps": 0} == {
        "num_clusters": 10,
        "dimension": 7,
        "center": False,
        "offline_clients": 1000,
        "offline_steps": 0,
        "keep_offline_models": False,
        "similarity": "low_rank_cosine",
        "init": "kmeans",
    }


def test_a_file_changes_the_method_files_that_come_after_it_by_name(capsys, tmp_path):
    words = "methods: {lcfed: {method: {clustering: {0: {num_clusters: 3}}}, model: {cluster_weight: 2.0}}}"
    plain = printed(capsys, *SYNTHETIC, *LCFED)
    below = printed(capsys, *SYNTHETIC, "-c", words, *LCFED)
    (clustering,) = plain["method"]["clustering"]
    clustering["init_args"]["num_clusters"] = 3
    assert below == plain | {"model": plain["model"] | {"cluster_weight": 2.0}}
    own = tmp_path / "own" / "lcfed.yaml"
    own.parent.mkdir()
    own.write_text("method: {clustering: [{class_path: LowRankCosine, init_args: {num_clusters: 5}}]}")
    after = (*SYNTHETIC, *FEDAVG, *LCFED, "-c", words)  # a file that comes before is not changed
    assert printed(capsys, *after)["method"]["clustering"][0]["init_args"]["num_clusters"] == 10
    assert printed(capsys, *after, "-c", own)["method"]["clustering"][0]["init_args"]["num_clusters"] == 3
    assert "lcfl: error:" in failure(capsys, "fit", *SYNTHETIC, *LCFED, "-c", "methods: [lcfed]")
    with pytest.raises(ValueError, match=r"method\.clustering: there is no item 0"):
        printed(capsys, *SYNTHETIC, "-c", words.replace("lcfed", "fedavg"), *FEDAVG)


@pytest.mark.parametrize("name", ["fedagv", "FedAvg", "fed_avg"])
def test_a_misspelt_name_of_a_method_file_is_warned_about(capsys, name):
    layer = f"methods: {{lcfed: {{}}, {name}: {{model: {{cluster_weight: 2.0}}}}}}"
    with pytest.warns(UserWarning, match=rf"methods: fedavg\.yaml gets no settings, .* for '{name}'.* write fedavg\."):
        printed(capsys, *SYNTHETIC, "-c", layer, *FEDAVG)


@pytest.mark.parametrize("names", ["fedavgm", "fedavg, fedavg2", "own", "1"])
def test_other_names_of_method_files_are_allowed(capsys, names):
    layer = f"methods: {{{', '.join(f'{name}: {{}}' for name in names.split(', '))}}}"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "methods")
        printed(capsys, *SYNTHETIC, "-c", layer, *FEDAVG)


def test_arguments_alone_change_the_class_below(capsys):
    layer = "data: {partition: {init_args: {classes_per_client: 3}}}"
    partition = printed(capsys, *SYNTHETIC, *FEDAVG, "-c", layer)["data"]["partition"]
    assert partition["class_path"].endswith("Pathological")
    assert partition["init_args"] == {"classes_per_client": 3, "sizes": None, "balanced": True}


def test_a_replaced_optimizer_loses_its_arguments(capsys):
    momentum = "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3, momentum: 0.9}}}"
    plain = "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.2}}}"
    arguments = printed(capsys, *SYNTHETIC, *FEDAVG, "-c", momentum, "-c", plain)["model"]["optimizer"]["init_args"]
    assert arguments["lr"] == 0.2 and arguments["momentum"] == 0.0


def test_a_list_with_a_plus_adds_to_the_one_below(capsys):
    early = "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/a/b/acc}}]}"
    more = "trainer: {callbacks+: [Monitor]}"
    callbacks = printed(capsys, *SYNTHETIC, *FEDAVG, "-c", early, "-c", more)["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in callbacks] == ["EarlyStopping", "Monitor"]
    assert callbacks[0]["init_args"]["monitor"] == "val/a/b/acc"


def test_a_text_that_is_too_long_for_a_file_name_is_a_layer(capsys):
    layer = "method: {local_update: {class_path: LocalTraining, init_args: {epochs: 2}}} " + "#" * 5000
    arguments = printed(capsys, *SYNTHETIC, *FEDAVG, "-c", layer)["method"]["local_update"]["init_args"]
    assert (arguments["steps"], arguments["epochs"]) == (None, 2)


@pytest.mark.parametrize("text", ["model: [", "nowhere.yaml", "just words"])
def test_an_unreadable_layer_is_an_error_of_the_parser(capsys, text):
    assert "lcfl: error:" in failure(capsys, "fit", *SYNTHETIC, *FEDAVG, "-c", text)


def test_a_file_that_is_not_yaml_is_named(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("model: [1,2\n")
    assert "bad.yaml is not valid YAML: while parsing" in failure(capsys, "fit", *SYNTHETIC, *FEDAVG, "-c", "bad.yaml")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_named(capsys, tmp_path, encoding):
    (tmp_path / "bad.yaml").write_text("trainer: {name: Zürich}", encoding)
    said = failure(capsys, "fit", *SYNTHETIC, *FEDAVG, "-c", "bad.yaml")
    assert "bad.yaml is not valid YAML: 'utf-8' codec can't decode byte" in said


@pytest.mark.parametrize(
    "text",
    ["trainer: {rounds: 2}\ntrainer: {name: x}", '{"trainer": {"rounds": 2, "rounds": 3}}', "a: [1, {b: 1, b: 2}]"],
)
def test_a_key_that_is_given_twice_is_refused(capsys, tmp_path, text):
    (tmp_path / "twice.yaml").write_text(text)
    said = failure(capsys, "fit", *SYNTHETIC, *FEDAVG, "-c", "twice.yaml")
    assert re.search(r"twice.yaml is not valid YAML: the key (trainer|rounds|b) is given twice in .*, line \d", said)


def test_an_anchor_may_be_merged_and_inside_of_itself():
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: &d [*d]"
    found, expected = yaml.load(text, LOADER), yaml.safe_load(text)
    assert [found[key] for key in "abc"] == [expected[key] for key in "abc"]
    assert found["b"] == {"x": 3, "y": 2} and found["d"][0] is found["d"]


def test_an_argument_of_an_item_that_is_not_yaml_is_named():
    words = ["--method.clustering.0.num_clusters=[1"]
    with pytest.raises(ValueError, match=r"^--method\.clustering\.0\.num_clusters: got \[1, which is not valid YAML"):
        as_layers(words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing", "is empty; a configuration is a mapping, such as trainer: {rounds: 5}."),
        ("[1]", "holds a list; a configuration is a mapping"),
        ("described: {}", "describes a run that was started from Python. Test or resume it from Python"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(capsys, tmp_path, text, says):
    (tmp_path / "bad.yaml").write_text(text)
    assert f"lcfl: error: bad.yaml {says}" in failure(capsys, "fit", *SYNTHETIC, *FEDAVG, "-c", "bad.yaml")


@pytest.mark.parametrize("option", ["method.local_update", "data.dataset", "model.network"])
def test_arguments_before_their_class_are_refused(capsys, option):
    group, name = option.split(".")
    said = failure(capsys, "fit", "-c", f"{group}: {{{name}: {{init_args: {{size: 3}}}}}}", *SYNTHETIC, *FEDAVG)
    assert said.startswith(
        f"lcfl: error: {option}: got init_args, but no class. Add its class_path, or give this layer"
    )
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: [", "is not valid YAML: while"),
        ("- 1", "no section data"),
        ("", "no section data"),
        ("a: 1", "no section d"),
    ],
)
def test_a_data_section_that_is_none_is_named(tmp_path, text, words):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"own.yaml.* {words}"):
        shared_of(tmp_path / "own.yaml")


def test_a_group_can_be_read_from_a_file(capsys, tmp_path):
    whole = printed(capsys, *SYNTHETIC, *LCFED)
    (tmp_path / "method.yaml").write_text(yaml.safe_dump(whole["method"]))
    assert printed(capsys, *SYNTHETIC, "--method=method.yaml")["method"] == whole["method"]
