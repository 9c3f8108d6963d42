"""Groups finished runs by all settings except the seed, and computes the rows of a comparison.

Runs with different data, partitions or test protocols cannot be compared.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite, isnan, nan
from statistics import mean, stdev
from typing import Any

from lcfl.core.metric_names import ACCURACY, BACKDOOR, Reported, added_metrics, definitions_of
from lcfl.core.validation import abbreviated
from lcfl.runs.finished import OPTION, FinishedRun, trivial_value

__all__ = [
    "Entry",
    "Row",
    "check_same_definition",
    "check_same_setting",
    "entries_of",
    "reported_by",
    "rounds_to_peak",
    "rows_of",
]

LONGEST_IN_LABEL = 24  # characters of an option's value
TARGET_SHARE = 0.9  # of the best final accuracy, if no target is given
SETTING = ("data", "partition", "leavers", "protocols")  # must be equal for two runs to compare
FAIR = (
    "rounds",
    "evaluate_clients",
    "clients_per_round",
    "client_dropout",
    "max_update_norm",
    "batch_size",
    "drop_last",
    "augmentation",
    "init_from",
    "precision",
)  # may differ, but then a warning names them
NETWORK = ("network", "network_settings", "network_functions")  # of the model, and so may these


@dataclass(frozen=True)
class Entry:
    """Runs that differ only in the seed.

    Attributes:
        label: the name of the runs, without its options if the entry differs from the others of its setting without
            them.
        runs: the runs, ordered by seed.
        setting: the number of the data setting, from 1.
        options: the options that the label leaves out, as in ``lr=0.05 cluster_weight=1``.
    """

    label: str
    runs: Sequence[FinishedRun]
    setting: int
    options: str = ""

    @property
    def test_sets(self) -> list[tuple[str, str]]:
        """The protocol and the kind of model of every test that all runs have."""
        first, *others = [run.test_sets for run in self.runs]
        return [pair for pair in first if all(pair in each for each in others)]


@dataclass(frozen=True)
class Row:
    """One row of the table: one kind of model of one method under one test protocol.

    Values are those of the reported metric; accuracies are between 0 and 1. Numbers are means over seeds unless stated
    otherwise.

    Attributes:
        setting: the number of the data setting, from 1.
        protocol: the test protocol.
        label: the label of the entry.
        model: the kind of model.
        seeds: the number of seeds.
        value: the mean over clients.
        value_std: the standard deviation of `value` over seeds (ddof 1), nan for one seed.
        worst10: the mean over the worst tenth of the clients.
        rounds_to_target: the rounds until the target is reached, nan if a seed never reaches it.
        bytes_to_target: the bytes sent and received until then.
        clusters: the number of clusters at the end, nan without clusters.
        total_bytes: the bytes sent and received in total.
        seconds: the duration of all rounds.
        rounds_to_peak90: the rounds until 90 % of the best value of the same run during training, nan if none was
            measured, or for a backdoor.
        stability: the mean of ``cluster/stability`` over rounds, nan without clusters.
        rand_index: the adjusted Rand index of the clusters and the true groups at the end, nan if the groups are not
            known.
        options: the options in the names of the runs that are not in the label.
        added: the metrics that the user added (``model.metrics``) by name, and their standard deviations over seeds as
            ``<name>_std``.
    """

    setting: int
    protocol: str
    label: str
    model: str
    seeds: int
    value: float
    value_std: float
    worst10: float = nan
    rounds_to_target: float = nan
    bytes_to_target: float = nan
    clusters: float = nan
    total_bytes: float = nan
    seconds: float = nan
    rounds_to_peak90: float = nan
    stability: float = nan
    rand_index: float = nan
    options: str = ""
    added: Mapping[str, float] = field(default_factory=dict)


def entries_of(runs: Iterable[FinishedRun]) -> list[Entry]:
    """Groups runs that differ only in the seed, and labels each group with the shortest distinct name.

    If neither names nor short options distinguish two groups, their labels are numbered, and a warning tells which runs
    a number stands for. Kinds of model that only some seeds have (``trainer.final_models``) are left out with a
    warning.
    """
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    names = [_common_name([run.name for run in group]) for group in groups.values()]
    methods = Counter(OPTION.split(name)[0] for name in names)
    settings = list(dict.fromkeys(_setting(group[0]) for group in groups.values()))
    used: Counter[tuple[int, str]] = Counter()
    entries = []
    for name, group in zip(names, groups.values(), strict=True):
        namesakes = [other[0].settings for key, other in zip(names, groups.values(), strict=True) if key == name]
        label, left_out = _label(name, group[0].settings, namesakes, methods)
        setting = settings.index(_setting(group[0])) + 1
        used[setting, label] += 1
        if used[setting, label] > 1:
            label = f"{label} #{used[setting, label]}"
            warnings.warn(
                f"{label} is {group[0].path}: the settings that differ are too long for a label. Give these runs "
                "different names (trainer.name).",
                stacklevel=2,
            )
        entry = Entry(label, sorted(group, key=lambda run: run.seed), setting, left_out)
        of_some = {kind for run in group for _, kind in set(run.test_sets) - set(entry.test_sets)}
        if of_some:
            warnings.warn(
                f"{label}: {', '.join(sorted(of_some))} is left out, because not all seeds have it "
                "(trainer.final_models).",
                stacklevel=2,
            )
        entries.append(entry)
    return entries


def _label(
    name: str, settings: Mapping[str, Any], namesakes: Sequence[Mapping[str, Any]], methods: Mapping[str, int]
) -> tuple[str, str]:
    """Returns the label of a group of runs, and the options in their name that it leaves out.

    Args:
        name: the name of the runs.
        settings: their settings.
        namesakes: the settings of every group of that name.
        methods: the number of groups of each method.
    """
    method, *options = OPTION.split(name)
    if methods[method] == 1:
        return method, " ".join(options)
    own, others = _leaves(settings), [_leaves(each) for each in namesakes]
    differing = [key for key in own if len({repr(each.get(key)) for each in others}) > 1]
    short = [f"{key.rpartition('.')[2]}={own[key]}" for key in differing if len(str(own[key])) <= LONGEST_IN_LABEL]
    return " ".join([name, *short]), ""


def reported_by(entries: Sequence[Entry]) -> Reported:
    """Returns the metric that all entries report.

    Raises:
        ValueError: if they report different ones, or different ones of the same name; names two runs.
    """
    runs: dict[Reported, FinishedRun] = {}
    for run in (run for entry in entries for run in entry.runs):
        runs.setdefault(run.reported, run)
    if len(runs) > 1:
        (one, first), (other, second) = list(runs.items())[:2]
        raise ValueError(
            f"these runs cannot be compared: {first.path} reports {one.name} and {second.path} reports {other.name}. "
            "Compare the runs of one metric at a time, or set model.report and model.larger_is_better alike for all."
        )
    (reported,) = runs
    check_same_definition([run for entry in entries for run in entry.runs])
    return reported


def check_same_definition(runs: Iterable[FinishedRun]) -> None:
    """Checks that the metric that runs report under one name is the same one. Warns of another one that is not.

    Raises:
        ValueError: if it is not; names two runs.
    """
    runs = list(runs)
    for one, other in combinations(runs, 2):
        if one.reports_otherwise(other):
            name = one.reported.name
            option = "loss" if name == "loss" else f"metrics.{name}"
            raise ValueError(
                f"these runs cannot be compared: {one.path} and {other.path} report {name}, but model.{option} "
                "differs, so the numbers measure different things. Set it alike for all, or report another metric."
            )
    known: dict[str, list[tuple[Any, FinishedRun]]] = {}
    for run in runs:
        for name, definition in definitions_of(run.summary["identity"]).items():
            known.setdefault(name, []).append((definition, run))
    for name, ((first, one), *others) in known.items():
        if differing := [run for definition, run in others if definition != first]:
            warnings.warn(
                f"model.metrics.{name} differs between these runs, such as {one.path} and {differing[0].path}, so its "
                "numbers measure different things.",
                stacklevel=3,
            )


def check_same_setting(entries: Sequence[Entry]) -> None:
    """Checks that all entries have the same data, partition and test protocols.

    Warns of other differences that make a comparison unfair.

    Raises:
        ValueError: if data, partition or protocols differ. The message names a run of each of two settings.
    """
    settings: dict[int, FinishedRun] = {}
    for entry in entries:
        settings.setdefault(entry.setting, entry.runs[0])
    if len(settings) > 1:
        one, other = list(settings.values())[:2]
        differing = [name for name in SETTING if one.settings.get(name) != other.settings.get(name)]
        raise ValueError(
            f"these runs cannot be compared: {one.path} and {other.path} differ in {' and '.join(differing)}. Compare "
            "runs with the same data configuration and data.seed, or add --mix to get a section for each setting."
        )
    firsts = [entry.runs[0] for entry in entries]
    compared = {name: {json.dumps(run.settings.get(name), sort_keys=True) for run in firsts} for name in FAIR}
    compared["local work"] = {run.local_work for run in firsts} - {""}
    for name, values in compared.items():
        if len(values) > 1:
            warnings.warn(f"{name} differs between these runs: {', '.join(sorted(values))}.", stacklevel=2)
    models = {entry.label: entry.runs[0].settings.get("model", {}) for entry in entries}
    first, *others = models
    both = {label: models[label].keys() & models[first].keys() & set(NETWORK) for label in others}  # of any version
    if others := [each for each in others if any(models[each][name] != models[first][name] for name in both[each])]:
        warnings.warn(f"the network of {first} differs from that of {abbreviated(others)}.", stacklevel=2)
    seeds = {entry.label: ", ".join(str(run.seed) for run in entry.runs) for entry in entries}
    if len(set(seeds.values())) > 1:
        known = "; ".join(f"{label}: {own}" for label, own in seeds.items())
        warnings.warn(f"the seeds differ between these runs ({known}); give all methods the same ones.", stacklevel=2)


def rows_of(entries: Sequence[Entry], target: float | None = None) -> tuple[list[Row], dict[tuple[int, str], float]]:
    """Computes the rows of the table, and the target of each setting and protocol.

    The rows of each protocol end with the trivial baseline.

    Args:
        entries: the entries from `entries_of`.
        target: the value whose first round is determined; None stands for nine tenths of the best final value of the
            models that are measured during training, or for a metric whose smaller values are better, ten ninths.

    Returns:
        The rows, and the targets by setting and protocol; nan for a backdoor, whose success is nothing to reach.
    """
    rows, targets = [], {}
    for setting in dict.fromkeys(entry.setting for entry in entries):
        members = [entry for entry in entries if entry.setting == setting]
        for protocol in dict.fromkeys(protocol for entry in members for protocol, _ in entry.test_sets):
            reported = members[0].runs[0].reported
            tested = [
                (entry.runs, f"test/{protocol}/{kind}/{reported.name}")
                for entry in members
                for of, kind in entry.test_sets
                if of == protocol
            ]
            # What is measured at the end alone reaches nothing before.
            followed = [(runs, name) for runs, name in tested if all(run.curve(name) for run in runs)] or tested
            best = reported.best(mean(run.metrics[name] for run in runs) for runs, name in followed)
            aim = _share_of(best, reported) if target is None else target
            targets[setting, protocol] = nan if protocol == BACKDOOR else aim
            rows += [
                _row(protocol, entry, kind, targets[setting, protocol])
                for entry in members
                for of, kind in entry.test_sets
                if of == protocol
            ]
            baseline = trivial_value(members[0].runs, protocol)
            if not isnan(baseline):
                rows.append(Row(setting, protocol, reported.trivial, "", 0, baseline, nan))
    return rows, targets


def _share_of(best: float, reported: Reported) -> float:
    """Returns the value that is nine tenths as good as the best."""
    return TARGET_SHARE * best if reported.larger_is_better == (best >= 0) else best / TARGET_SHARE


def _deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation over seeds; nan for one seed, and if a value is not finite."""
    return stdev(values) if len(values) > 1 and all(map(isfinite, values)) else nan


def _row(protocol: str, entry: Entry, kind: str, target: float) -> Row:
    reported = entry.runs[0].reported
    name = f"test/{protocol}/{kind}/{reported.name}"
    finals = [run.metrics[name] for run in entry.runs]
    reached = [
        next(((n, size) for n, size, value in run.curve(name) if reported.is_reached(value, target)), None)
        for run in entry.runs
    ]
    arrived = [each for each in reached if each is not None]
    is_reached = len(arrived) == len(reached)
    last = [run.history[-1] if run.history else {} for run in entry.runs]  # with rounds=0 there is no row
    peaks = [nan if protocol == BACKDOOR else rounds_to_peak(run.curve(name), reported) for run in entry.runs]
    added: dict[str, float] = {}
    for metric in added_metrics(entry.runs[0].metrics, reported.name):
        values = [run.metrics.get(f"test/{protocol}/{kind}/{metric}", nan) for run in entry.runs]
        added |= {metric: mean(values), f"{metric}_std": _deviation(values)}
    return Row(
        setting=entry.setting,
        protocol=protocol,
        label=entry.label,
        model=kind,
        seeds=len(finals),
        value=mean(finals),
        value_std=_deviation(finals),
        worst10=mean(run.metrics[f"{name}_worst10"] for run in entry.runs),
        rounds_to_target=mean(n for n, _ in arrived) if is_reached else nan,
        bytes_to_target=mean(size for _, size in arrived) if is_reached else nan,
        clusters=mean(row.get("cluster/count", nan) for row in last),
        total_bytes=mean(run.summary["total_bytes"] for run in entry.runs),
        seconds=mean(sum(row.get("time/round_s", nan) for row in run.history) for run in entry.runs),
        rounds_to_peak90=mean(peaks),
        stability=mean(run.metrics.get("cluster/stability", nan) for run in entry.runs),
        rand_index=mean(row.get("cluster/ari", nan) for row in last),
        options=entry.options,
        added=added,
    )


def rounds_to_peak(curve: Sequence[tuple[int, float, float]], reported: Reported = ACCURACY) -> float:
    """Returns the rounds until a curve first is nine tenths as good as its peak, which is AS-CFL's measure of speed.

    An empty curve gives nan.
    """
    target = _share_of(reported.best(value for _, _, value in curve), reported)
    return next((float(number) for number, _, value in curve if reported.is_reached(value, target)), nan)


def _setting(run: FinishedRun) -> str:
    """Returns the settings that must be equal for a comparison."""
    return json.dumps([run.settings.get(name) for name in SETTING], sort_keys=True)


def _common_name(names: Sequence[str]) -> str:
    """Returns the name of the runs of one experiment without the suffix of the seed, as in ``lcfed-seed0``."""
    stems = dict.fromkeys(re.sub(r"(?<=.)-seed\d+$", "", name) for name in names)
    return " / ".join(stems)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Returns every plain value of a nested description by its dotted path."""
    if isinstance(value, dict):
        return {key: leaf for name, each in value.items() for key, leaf in _leaves(each, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {key: leaf for n, each in enumerate(value) for key, leaf in _leaves(each, f"{path}.{n}").items()}
    return {path: value}
