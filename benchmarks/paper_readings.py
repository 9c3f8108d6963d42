"""Readings of what a paper leaves open, each as the options that it changes.

A function returns None for a cell that it does not apply to: of another paper, or with a point that it would undo.
"""

from collections.abc import Callable

from paper_items import Cell

__all__ = ["AS_CONFIGURED", "READINGS", "words_of"]

AS_CONFIGURED = "as_configured"
LENETS = {
    "cifar10": "{class_path: lcfl.models.LeNet5}",
    "cifar100": "{class_path: lcfl.models.LeNet5, init_args: {num_classes: 100}}",
    "mnist": "{class_path: lcfl.models.LeNet5, init_args: {in_channels: 1, image_size: 28}}",
}
PULLED = ("lcfed", "fedac")
# What neither LCFed nor FedAC prints: momentum, and one more option of each method, two values of each. CGPFL's steps
# are its own, so it has rates in place of momenta.
MOMENTA = "model.optimizer.init_args.momentum=0,0.9"
RATES = "method.local_update.init_args={inner_lr: 0.01, outer_lr: 0.01},{inner_lr: 0.05, outer_lr: 0.05}"
PULL_PAIRS = "model={cluster_weight: 1, global_weight: 0},{cluster_weight: 0.5, global_weight: 0.5}"
PENALTIES = "method.local_update.init_args.penalty=5,15"
DECAYS = "model.optimizer.init_args.weight_decay=0,0.001"
OWN_OPTIONS = dict.fromkeys(PULLED, PULL_PAIRS) | {"cgpfl": PENALTIES}
# "CFL methods determine their respective optimal K" (FedAC, section 5.2): ten, or the number of blocks with equal
# labels; without blocks, or with ten of them, a larger number in place of the latter. LCFed has K = 10 for all (section
# IV-A).
CLUSTERED = ("fesem", "fedgroup", "fl_hc", "ifca", "cgpfl")
NUMBERS = {"dirichlet-0.1": 40, "pathological-3": 4, "pathological-8": 13, "pathological-10": 20}
THREE_RATES = "model.optimizer.init_args.lr=0.1,0.01,0.001"  # which FedClust prints for these methods
WITH_THREE_RATES = ("fedavg", "fedprox", "fednova", "cfl")

Words = list[str] | None


def _is_personalised(cell: Cell) -> bool:
    """Returns whether the paper is FedAC's or LCFed's, which leave the same things open."""
    return cell.paper in ("fedac", "lcfed")


def lenet(cell: Cell) -> Words:
    """LeNet-5 (on MNIST 44,426 parameters, on CIFAR 62,006 or 69,656), also for FedClust's CIFAR-100."""
    applies = _is_personalised(cell) or (cell.paper, cell.dataset) == ("fedclust", "cifar100")
    return [f"--model.network={LENETS[cell.dataset]}"] if applies else None


def ring(cell: Cell) -> Words:
    """Each client has n labels, and the clients form as many groups with equal labels as there are labels."""
    return _labels(cell, "LabelRing")


def random(cell: Cell) -> Words:
    """Each client has n random labels. FedClust's label skew says this, too."""
    if cell.paper == "fedclust" and "label-skew" in cell.column:
        return ["--data.partition.init_args.draw=random"]
    if cell.column == "cifar100-pathological-8":  # the clients of one class would need 507 of its 500 images
        return None
    return _labels(cell, "LabelSkew", ", draw: random")


def _labels(cell: Cell, partition: str, more: str = "") -> Words:
    kind, _, number = cell.column.partition("-")[2].rpartition("-")
    if kind != "pathological":
        return None
    return [
        f"--data.partition={{class_path: {partition}, init_args: {{num_labels: {number}, sizes: [50, 350]{more}}}}}"
    ]


def momentum(cell: Cell) -> Words:
    """A momentum of 0.9."""
    has_own_steps = cell.method == "cgpfl"
    return ["--model.optimizer.init_args.momentum=0.9"] if _is_personalised(cell) and not has_own_steps else None


def faster(cell: Cell) -> Words:
    """A learning rate of 0.05."""
    if not _is_personalised(cell):
        return None
    if cell.method == "cgpfl":
        return [f"--method.local_update.init_args.{name}=0.05" for name in ("inner_lr", "outer_lr")]
    return ["--model.optimizer.init_args.lr=0.05"]


def decayed(cell: Cell) -> Words:
    """A learning rate that falls to an eighth over 1,000 rounds."""
    has_own_steps = cell.method == "cgpfl"
    words = ["--method.local_update.init_args.lr_decay=0.998"]
    return words if _is_personalised(cell) and not has_own_steps else None


def epochs(cell: Cell) -> Words:
    """Five local iterations are five epochs."""
    words = ["--method.local_update.init_args.steps=null", "--method.local_update.init_args.epochs=5"]
    return words if _is_personalised(cell) else None


def everyone(cell: Cell) -> Words:
    """All clients take part in each round."""
    return ["--trainer.clients_per_round=1.0"] if _is_personalised(cell) else None


def no_global_pull(cell: Cell) -> Words:
    """LCFed and FedAC with mu = 1 and lambda = 0."""
    if cell.method not in PULLED or cell.point:
        return None
    return ["--model.cluster_weight=1", "--model.global_weight=0"]


def tuned(cell: Cell) -> Words:
    """The best of four trials on validation data: two momenta, and two values of one option of the method."""
    if not _is_personalised(cell) or cell.point:
        return None
    first, second = RATES if cell.method == "cgpfl" else MOMENTA, OWN_OPTIONS.get(cell.method, DECAYS)
    if cell.paper == "fedac" and cell.method in CLUSTERED:
        number = NUMBERS[cell.column.partition("-")[2]]
        second = f"method.clustering.0.num_clusters=10,{number}"
    return [f"--grid={first}", f"--grid={second}"]


def tuned_rate(cell: Cell) -> Words:
    """The best of FedClust's three learning rates on validation data."""
    return [f"--grid={THREE_RATES}"] if cell.paper == "fedclust" and cell.method in WITH_THREE_RATES else None


def adapted(cell: Cell) -> Words:
    """FedClust's models are also tested after a local update in every evaluation."""
    return ["--trainer.evaluate_models=[after_local]"] if cell.paper == "fedclust" else None


def letters(cell: Cell) -> Words:
    """EMNIST's letters, 26 classes. The papers' numbers are of 62 classes, so none stands beside."""
    if cell.dataset != "emnist":
        return None
    return ["--data.dataset.init_args.split=letters", "--model.network.init_args.num_classes=26"]


def all_images(cell: Cell) -> Words:
    """No validation images. In FedAC and LCFed, clients also train on their test images; official ones test them."""
    own = ["--data.protocols=[label_view]"] if _is_personalised(cell) else []
    return [*own, "--data.val_fraction=0"]


def augmented(cell: Cell) -> Words:
    """Training images of CIFAR are cropped and flipped at random."""
    is_cifar = cell.dataset in ("cifar10", "cifar100")
    return ["--data.dataset.init_args.augmentation=CropAndFlip"] if is_cifar else None


def bf16(cell: Cell) -> Words:
    """The precision bf16-mixed, which no paper names: large networks are faster on processors that have bfloat16."""
    return ["--trainer.precision=bf16-mixed"]


def shares(cell: Cell) -> Words:
    """AS-CFL's clients divide all images among themselves, in proportion to sizes from 10 to 60 %."""
    if cell.paper != "ascfl" or cell.point.startswith("alpha"):
        return None
    options = f"{{alpha: {cell.config.rpartition('-')[2]}, balance: false, fractions: [0.1, 0.6]}}"
    return [f"--data.partition={{class_path: ClassDirichlet, init_args: {options}}}"]


def strict(cell: Cell) -> Words:
    """AS-CFL's incentive as its Eq. 3 has it."""
    has_incentive = cell.method.startswith("ascfl") and cell.method != "ascfl_no_incentive"
    return ["--method.clustering.0.rule=strict"] if has_incentive else None


def reclustered(cell: Cell) -> Words:
    """AS-CFL without dynamic adjustment forms its clusters in every round, and not only in the first."""
    return ["--method.clustering.0.once=false"] if cell.method == "ascfl_no_adjustment" else None


_ALL = (
    lenet,
    ring,
    random,
    momentum,
    faster,
    decayed,
    epochs,
    everyone,
    no_global_pull,
    tuned,
    tuned_rate,
    adapted,
    letters,
    all_images,
    augmented,
    bf16,
    shares,
    strict,
    reclustered,
)
READINGS: dict[str, Callable[[Cell], Words]] = {reading.__name__: reading for reading in _ALL}


def words_of(cell: Cell, reading: str) -> Words:
    """Returns the options of a reading, such as ``lenet+ring``; None if a part of it does not apply to the cell."""
    parts = [READINGS[name](cell) for name in reading.split("+") if name != AS_CONFIGURED]
    return None if None in parts else [word for part in parts for word in part or ()]
