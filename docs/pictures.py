"""Draws the pictures of the documentation: `python docs/pictures.py` writes them all anew.

`round.svg` is drawn here. The picture of a partition is what `lcfl partition` draws for the YAML on its page, which
also gets the table that the command prints; those of monitoring are what a run draws.
"""

import contextlib
import csv
import html
import io
import re
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import pages
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

from lcfl.cli import federated_cli
from lcfl.cli.commands import partition
from lcfl.figures.base import COLOURS, KIND_COLOURS
from lcfl.runs.result import Run

# The four parts of a method, and what is the same for every method.
EXCHANGE, LOCAL, CLUSTERING, AGGREGATION, FRAME = "#1B6CA8", "#C4521B", "#1F7A5C", "#6C3FA0", "#5F6770"
ROOM_COLOURS = {"lcfl.methods": CLUSTERING, "lcfl.server": EXCHANGE, "lcfl.engines": LOCAL, "lcfl.runs": AGGREGATION}
INK, PALE = "#22272E", "#F4F5F7"
CLUSTERS = (COLOURS[0], COLOURS[1], COLOURS[2])
# Clients of the picture: number, cluster, whether it takes part, images of five classes.
CLIENTS = ((0, 0, True, (9, 7, 1, 0, 0)), (1, 1, False, (0, 1, 8, 8, 0)), (2, 0, True, (6, 9, 0, 1, 0)))
CLIENTS += ((3, 2, True, (1, 0, 0, 3, 9)), (4, 1, True, (0, 0, 7, 9, 1)))


def box(axes: Axes, left: float, top: float, width: float, height: float, colour: str, title: str, text: str) -> None:
    """A rounded box: a coloured head with its title, the text below."""
    shape = {"boxstyle": "round,pad=0,rounding_size=0.09", "lw": 1.4, "mutation_aspect": 1}
    axes.add_patch(FancyBboxPatch((left, top - height), width, height, fc="white", ec=colour, **shape))
    axes.text(left + 0.14, top - 0.25, title, color=colour, weight="bold", fontsize=11.5, va="center")
    axes.text(left + 0.14, top - 0.47, text, color=INK, fontsize=9.3, va="top", linespacing=1.35)


def arrow(axes: Axes, start: Sequence[float], end: Sequence[float], colour: str, bend: str = "arc3") -> None:
    """An arrow between two points."""
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(tuple(start), tuple(end), color=colour, connectionstyle=bend, **style))


def client(axes: Axes, left: float, top: float, number: int, cluster: int, takes_part: bool, images: Sequence) -> None:
    """A client: the colour of its cluster, its images by class, its models."""
    alpha = 1.0 if takes_part else 0.3
    edge = LOCAL if takes_part else FRAME
    shape = {"boxstyle": "round,pad=0,rounding_size=0.09", "lw": 1.4}
    axes.add_patch(FancyBboxPatch((left, top - 0.62), 2.95, 0.62, fc="white", ec=edge, alpha=alpha, **shape))
    axes.add_patch(Rectangle((left + 0.1, top - 0.53), 0.11, 0.44, color=CLUSTERS[cluster], alpha=alpha))
    axes.text(left + 0.34, top - 0.2, f"client {number}", fontsize=9.5, color=INK, alpha=alpha, va="center")
    what = rf"trains $w_{number}$" if takes_part else "not drawn this round"
    axes.text(left + 0.34, top - 0.43, what, fontsize=9, color=edge if takes_part else INK, alpha=alpha, va="center")
    for place, count in enumerate(images):
        height = 0.44 * max(count, 0.25) / 9
        axes.add_patch(Rectangle((left + 2.0 + 0.16 * place, top - 0.53), 0.12, height, color=INK, alpha=0.75 * alpha))


def draw_round() -> Figure:
    """One round from left to right: the server, the clients, the server again."""
    figure = Figure(figsize=(11.6, 5.5), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 11.6)
    axes.set_ylim(0, 5.5)
    axes.axis("off")
    for left, width, title in ((0.15, 3.05, "server"), (4.2, 3.25, "clients"), (8.4, 3.05, "server")):
        shape = {"boxstyle": "round,pad=0,rounding_size=0.15", "lw": 0}
        axes.add_patch(FancyBboxPatch((left, 0.55), width, 4.77, fc=PALE, **shape))
        axes.text(left + width / 2, 5.1, title, ha="center", va="center", fontsize=10.5, color=FRAME)

    down = "what each of them is sent:\nthe global model, or\nthe centre Ω of its cluster and\nthe global embedding Φ"
    box(axes, 0.3, 4.2, 2.75, 1.5, EXCHANGE, "2  exchange, down", down)
    box(axes, 0.3, 2.2, 2.75, 1.1, FRAME, "1  sample", "clients, drawn at random:\nthe same under every method")
    arrow(axes, (1.67, 2.2), (1.67, 2.7), FRAME)

    axes.text(4.35, 4.68, "3  local update", color=LOCAL, weight="bold", fontsize=11.5, va="center")
    tops = [4.16 - 0.7 * place for place in range(len(CLIENTS))]
    axes.text(4.35, 4.42, "own data, own steps", color=INK, fontsize=9.3, va="center")
    for top, each in zip(tops, CLIENTS, strict=True):
        client(axes, 4.35, top, *each)
        if each[2]:
            arrow(axes, (3.05, 3.45), (4.33, top - 0.31), EXCHANGE)
            arrow(axes, (7.32, top - 0.31), (8.53, 4.43), EXCHANGE)
    box(axes, 8.55, 4.85, 2.75, 0.83, EXCHANGE, "4  exchange, up", r"what every client returns: $w_i$")
    box(axes, 8.55, 3.82, 2.75, 0.83, CLUSTERING, "5  clustering", "who belongs together?")
    box(axes, 8.55, 2.79, 2.75, 0.83, AGGREGATION, "6  aggregation", "uploads become Ω and Φ")
    last = "validation and test images of\nevery client; checkpoint"
    box(axes, 8.55, 1.76, 2.75, 1.0, FRAME, "7  evaluate, log, save", last)
    for top in (4.02, 2.99, 1.96):
        arrow(axes, (9.92, top), (9.92, top - 0.2), FRAME)

    axes.plot([9.92, 9.92, 1.67], [0.76, 0.26, 0.26], color=FRAME, lw=1.6, solid_joinstyle="round")
    arrow(axes, (1.67, 0.26), (1.67, 1.1), FRAME)
    note = {"ha": "center", "va": "center", "fontsize": 9.8, "color": FRAME}
    axes.text(5.8, 0.26, "  next round  ", backgroundcolor="white", **note)
    return figure


def draw_rooms() -> str:
    """Draws the rooms of the package, floor by floor, from the contract in pyproject.toml; returns SVG."""
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = [[room.strip() for room in layer.split("|")] for layer in layers if layer != "lcfl.__main__"]
    height, gap, width = 46, 8, 920
    lines = []
    for number, rooms in enumerate(floors):
        top = 8 + number * (height + gap)
        room_width = (width - gap * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            left = 8 + place * (room_width + gap)
            colour = ROOM_COLOURS.get(room, FRAME)
            words = (import_module(room).__doc__ or "").partition("\n")[0].rstrip(".").replace("`", "")
            if len(rooms) > 1:
                words = re.split("[:,]", words)[0]
            lines += [
                f'<rect x="{left:.0f}" y="{top}" width="{room_width:.0f}" height="{height}" rx="7" fill="white" '
                f'stroke="{colour}" stroke-width="1.5"/>',
                f'<text x="{left + 12:.0f}" y="{top + 19}" fill="{colour}" font-weight="bold">{room}</text>',
                f'<text x="{left + 12:.0f}" y="{top + 36}" fill="{INK}" font-size="12">{html.escape(words)}</text>',
            ]
    total = 8 + len(floors) * (height + gap)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 16} {total}" font-family="sans-serif" '
            'font-size="14">',
            f'<rect width="{width + 16}" height="{total}" fill="white"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def draw_partition(page: Path) -> None:
    """What `lcfl partition` prints and draws for the first YAML block of a page and the digits: into and beside it."""
    text = page.read_text()
    before, separator, after = text.partition("```text\n")
    if not separator:
        return
    layer = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        partition.main(["-c", str(pages.ROOT / "configs/data/digits.yaml"), "-c", layer, "--out", folder])
        shrink(Path(folder) / "partition.png", page.with_suffix(".png"))
    table = printed.getvalue().partition("written to")[0]
    page.write_text(f"{before}{separator}{table}```{after.partition('```')[2]}")


def draw_monitoring() -> None:
    """The pictures of a run, by the command on the page of the same name."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"-c={pages.ROOT / 'configs' / name}" for name in ("quickstart.yaml", "methods/fedac_silhouette.yaml")]
        run = federated_cli.main(["fit", *files, "--trainer.rounds=40", f"--trainer.default_root_dir={folder}"])
        for path in run.path.glob("figures/*.png"):
            if f"monitoring/{path.name}" in (pages.DOCS / "monitoring.md").read_text():
                shrink(path, pages.DOCS / "monitoring" / path.name)


def draw_quickstart() -> None:
    """Draws the picture in README.md: accuracy over the rounds of the quickstart, and who moved between clusters."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["fit", f"-c={pages.ROOT / 'configs/quickstart.yaml'}", "--trainer.evaluate_every=2"]
        run = federated_cli.main([*words, f"--trainer.default_root_dir={folder}"])
        with (run.path / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["time/eval_s"]]
        majority = run.metrics["test/own_split/trivial/acc"]
        draw_accuracies(rows, majority).savefig(Path(folder) / "curves.png", dpi=120)
        halves = [Image.open(path).convert("RGB") for path in (Path(folder) / "curves.png", flow_of(run))]
        height = min(half.height for half in halves)
        halves = [
            half.resize((half.width * height // half.height, height), Image.Resampling.LANCZOS) for half in halves
        ]
        joined = Image.new("RGB", (sum(half.width for half in halves), height), "white")
        joined.paste(halves[0], (0, 0))
        joined.paste(halves[1], (halves[0].width, 0))
        joined.save(Path(folder) / "quickstart.png")
        shrink(Path(folder) / "quickstart.png", pages.DOCS / "quickstart.png")


def flow_of(run: Run) -> Path:
    """The run's own picture of the flow between clusters."""
    return run.path / "figures" / "assignment_flow.png"


def draw_accuracies(rows: Sequence[dict[str, str]], majority: float) -> Figure:
    """Test accuracy of personal and cluster models over rounds: the mean over clients, and their worst tenth."""
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    rounds = [int(row["round"]) + 1 for row in rows]
    for kind in ("personal", "cluster"):
        for style, metric, words in (("-", "acc", "mean"), (":", "acc_worst10", "worst 10 % of clients")):
            values = [100 * float(row[f"test/own_split/{kind}/{metric}"]) for row in rows]
            axes.plot(rounds, values, style, color=KIND_COLOURS[kind], label=f"{kind} models, {words}")
    axes.axhline(100 * majority, color=FRAME, lw=1, ls="--", label="most frequent class of each client")
    axes.set(xlabel="round", ylabel="test accuracy in %", ylim=(0, 102), xlim=(0, rounds[-1]))
    axes.set_title("LCFed on 20 clients, scikit-learn's digits", fontsize=11)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def shrink(picture: Path, target: Path) -> None:
    """The picture in 192 colours, which are enough, and a third of the bytes."""
    target.parent.mkdir(exist_ok=True)
    Image.open(picture).convert("RGB").quantize(192).save(target)


if __name__ == "__main__":
    matplotlib.rcParams |= {"svg.hashsalt": "lcfl", "font.family": "DejaVu Sans"}
    drawn = io.StringIO()
    draw_round().savefig(drawn, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in drawn.getvalue().splitlines())  # matplotlib ends lines with spaces
    (pages.DOCS / "round.svg").write_text("\n".join(lines) + "\n")
    (pages.DOCS / "rooms.svg").write_text(draw_rooms())
    draw_quickstart()
    draw_monitoring()
    for path in sorted((pages.DOCS / "partitions").glob("*.md")):
        draw_partition(path)
