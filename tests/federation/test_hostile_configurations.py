"""Any value for any option is refused in words before a file is written, or the run works.

Every case runs in a process of its own, with a limit on time and memory. Most options are common to all methods, so the
options of a method are those that no file before has for the same class.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import traceback
from pathlib import Path

import pytest
import yaml

from lcfl.cli.error_lines import user_errors
from lcfl.cli.federated_cli import FederatedCLI
from tests.helpers.commandline import CONFIGS, METHODS, SYNTHETIC, files, printed

SECONDS = 60  # a case that takes longer hangs, also on a busy machine; most take less than one
PARTS = 4  # of the values of each group, so that one test takes seconds
MEMORY = 6 * 2**30  # bytes of address space beyond what the process has

FEW = """
data:
  dataset: {init_args: {samples_per_class: 10, test_per_class: 2}}
  num_clients: 4
trainer: {rounds: 1, evaluate_every: 1, devices: 1, accelerator: cpu, logger: false, enable_progress_bar: false}
"""
TRIAL = "trainer: {fast_dev_run: true, devices: 1, accelerator: cpu, logger: false, engine: sequential}"
VALUES = {
    "null": None,
    "negative": -1,
    "zero": 0,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "large": 1e30,
    "huge": 2**62,
    "fraction": 0.5,
    "text": "x",
    "empty text": "",
    "list": [],
    "mixed list": [1, "x", None],
    "mapping": {"x": 1},
    "true": True,
    "class": {"class_path": "lcfl.models.MLP", "init_args": {"in_features": 16}},
    "other class": {"class_path": "torch.nn.ReLU"},
}


def places(value, path=()):
    """Yields the path of every value in a nested configuration."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key != "class_path":
            yield from places(item, (*path, key))


def changed(value, path, new):
    """Returns a copy in which the value at the path is another one."""
    copy = value.copy()
    copy[path[0]] = new if len(path) == 1 else changed(value[path[0]], path[1:], new)
    return copy


class Ended(Exception):
    """Raised in the parent when all commands have been tried."""


def outcomes(commands):
    """Tries commands, each in a process of its own that is forked once the parser is built.

    Yields nothing in the children. Returns (how it ended, what it said) for each command.
    """
    parent, found = os.getpid(), []

    class Forking(FederatedCLI):
        def parse_arguments(self, parser, args):
            gc.freeze()  # otherwise a collection in the child would copy all memory
            for words in commands:
                reading, self.writing = os.pipe()
                if (child := os.fork()) == 0:
                    os.close(reading)
                    os.mkdir(folder := f"case {len(found)}")
                    os.chdir(folder)
                    limited()
                    return super().parse_arguments(parser, [str(word) for word in words])
                os.close(self.writing)
                found.append(awaited(child, reading))
            gc.unfreeze()
            raise Ended

    cli = Forking.__new__(Forking)
    try:
        cli.__init__(args=["fit"])
        how, said = "worked", ""
    except Ended:
        return found
    except SystemExit as ended:
        how, said = "refused" if ended.code == 2 else f"exit {ended.code}", ""
    except user_errors() as error:
        how, said = "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[-4:])
        how, said = "traceback", f"{type(error).__name__}: {error}\n{frames}"
    finally:
        if os.getpid() != parent:
            sys.stderr.flush()
            os.lseek(2, 0, os.SEEK_SET)
            said = said or os.read(2, 3000).decode(errors="replace")
            if how == "refused" and files(Path()):
                how = "refused after it wrote"
            os.write(cli.writing, json.dumps([how, said[-3000:]]).encode())
            os._exit(0)
    raise AssertionError


def limited():
    """Limits the memory of this process, and redirects what it prints into memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (1, 2):
        os.dup2(os.memfd_create("said"), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))


def awaited(child, reading):
    """Returns how a child ended and what it said."""
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    return tuple(json.loads(content)) if content else (f"hung or died with {os.waitstatus_to_exitcode(status)}", "")


def layers(option, *parts, also="{}"):
    """Returns (layers, option) for each part ``Class: {argument: value}``; an option that ends in 0 is a list."""
    found = []
    for part in parts:
        name, _, arguments = part.partition(": ")
        layer = {"class_path": name, "init_args": yaml.safe_load(arguments or "{}")}
        for key in reversed(option.split(".")):
            layer = [layer] if key == "0" else {key: layer}
        found.append(([also, yaml.safe_dump(layer)], option.removesuffix(".0")))
    return found


IMAGES = "data: {dataset: {class_path: Digits}, partition: {class_path: IID, init_args: {samples_per_client: 8}}}"
MONITOR = "{monitor: val/own_split/personal/acc}"
# The configurations of each group, as layers, and the option below which every value is replaced.
OTHERS = {
    "trainer": [([], "trainer")],
    "data": [([], "data")],
    "model": [([], "model")],
    "loss": layers("model.loss", "torch.nn.CrossEntropyLoss: {label_smoothing: 0.1}"),
    "metrics": layers(
        "model.metrics.f1", "torchmetrics.classification.MulticlassF1Score: {num_classes: 8, average: macro}"
    ),
    "optimizers": layers("model.optimizer", "SGD: {lr: 0.1, momentum: 0.9}", "Adam: {weight_decay: 0.1}"),
    "networks": layers(
        "model.network",
        "CNN: {in_channels: 1, image_size: 8, channels: [2, 3], kernel_size: 3, padding: 1, hidden: [4]}",
        "LeNet5: {in_channels: 1, image_size: 8, padding: 4}",
        "ResNet9: {in_channels: 1, image_size: 8}",
        "VGG16: {in_channels: 1}",
        also=IMAGES,
    ),
    "partitions": layers(
        "data.partition",
        "IID: {samples_per_client: 5}",
        "ClassDirichlet: {alpha: 0.5, min_samples: 3}",
        "ClientDirichlet: {alpha: 0.5, sizes: [5, 9]}",
        "LabelRing: {num_labels: 2, min_per_label: 2}",
        "LabelSkew: {num_labels: 2}",
        "Shards: {shards_per_client: 2}",
        "Quantity: {alpha: 0.5, min_samples: 3}",
    ),
    "further partitions": layers(
        "data.partition",
        "CopyPerGroup: {num_groups: 2, samples_per_client: 5}",
        "OverlappingFractions: {fractions: [0.1, 0.5], alpha: 0.5}",
        "PartOfPool: {base: {class_path: IID}, num_samples: 40}",
        "Subsampled: {base: {class_path: IID}, sizes: [4, 8]}",
        "FromFile: {path: nothing.json}",
    ),
    "client transforms": layers(
        "data.client_transforms.0",
        "lcfl.data.transforms.GaussianNoise: {sigma: 0.5}",
        "LabelPermutation: {by: client, num_groups: 2}",
        "Rotation: {by: client}",
        also=IMAGES,
    ),
    "data sets": layers(
        "data.dataset", "Digits", "CIFAR10: {augmentation: {class_path: CropAndFlip}}", "EMNIST: {split: letters}"
    ),
    "callbacks": layers(
        "trainer.callbacks.0",
        f"Checkpoint: {MONITOR}",
        f"EarlyStopping: {MONITOR}",
        "Monitor",
        "LabelSimilarity: {fine_tuning: {class_path: LocalTraining, init_args: {steps: 1}}}",
    ),
    "uploads": layers(
        "method.exchange.init_args.transforms.0",
        "LowRankCompression",
        "GaussianNoise: {clip: 1.0, sigma: 1.0}",
        "GaussianNoise: {clip: 1.0, epsilon: 5.0}",
    ),
}


def name_of(config, place):
    """Returns the name of a place below the innermost class around it."""
    name = ()
    for key in place:
        kind = config.get("class_path") if isinstance(config, dict) else None
        name = (kind.rpartition(".")[2],) if kind else name
        name, config = (*name, str(key)), config[key]
    return ".".join(name)


def configurations(group):
    """Returns (layers, option) for each configuration of a group."""
    if group in OTHERS:
        return [([CONFIGS / "methods" / "fedavg.yaml", FEW, *own], option) for own, option in OTHERS[group]]
    return [([TRIAL, CONFIGS / "methods" / f"{group}.yaml"], "method")]


def names_of_options(method):
    """Returns the names of the options that a method's file has."""
    content = yaml.safe_load(method.read_text())
    return {name_of(content, place) for place in places(content) if place[0] == "method"}


# The options that each method's file has and no file before it.
NEW, known = {}, set()
for method in METHODS:
    NEW[method.stem] = names_of_options(method) - known
    known |= NEW[method.stem]
GROUPS = [*OTHERS, *(method for method, new in NEW.items() if new)]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("part", "group"), [(part, group) for part in range(PARTS) for group in GROUPS])
def test_any_value_of_any_option_is_refused_in_words_or_works(capsys, tmp_path, part, group):
    cases, seen = {}, set()
    for configs, option in configurations(group):
        base = printed(capsys, *SYNTHETIC, *(word for config in configs for word in ("-c", config)))
        for place in places(base):
            path, name = ".".join(map(str, place)), name_of(base, place)
            if path.startswith(f"{option}.") and name in NEW.get(group, {name}) and name not in seen:
                seen.add(name)
                cases |= {f"{path} ({name}): {word}": changed(base, place, VALUES[word]) for word in VALUES}
    names = [name for name in cases if ".download)" not in name][part::PARTS]  # this would need the internet
    commands = []
    for number, name in enumerate(names):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(cases[name]))
        commands.append(("fit", "-c", tmp_path / f"{number}.yaml"))
    found = dict(zip(names, outcomes(commands), strict=True))
    wrong = {name: each for name, each in found.items() if each[0] not in ("worked", "refused")}
    assert not wrong, "\n".join(f"{name}: {how}: {said}" for name, (how, said) in wrong.items())
    assert sum(how == "refused" for how, _ in found.values()) >= len(found) / 3
