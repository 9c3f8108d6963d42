"""What loggers receive of a run besides the rows of its rounds: configuration, figures, final metrics, and its end."""

import multiprocessing
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from numpy.typing import NDArray

from lcfl.runs.identity import describe
from lcfl.server.server import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["fit_logged", "forget_from", "log_figure", "log_histogram"]


def fit_logged(server: Server, is_new: bool) -> dict[str, float]:
    """Fits, and reports to the loggers what the run is and how it ended.

    As with Lightning, a run that was stopped is ``failed`` too.
    """
    loggers = server.loggers
    try:
        if is_new:
            server.run_log.tell_loggers("log_hyperparams", lambda each: _log_configuration(each, server))
        metrics = server.fit()
        if not server.is_interrupted:
            server.run_log.tell_loggers("log_metrics", lambda each: _log_final(each, metrics, server))
    except BaseException as error:
        for logger in loggers:
            try:
                _finalize(logger, "failed")
            except Exception as another:  # of any kind, because the first error must be raised
                error.add_note(f"{type(logger).__name__}.finalize: {another}")
        raise
    status: Literal["success", "failed"] = "failed" if server.is_interrupted else "success"
    server.run_log.tell_loggers("finalize", lambda each: _finalize(each, status))
    return metrics


def log_figure(logger: Any, name: str, figure: "Figure", path: Path, step: int) -> None:
    """Hands a figure to a logger that takes figures: W&B, TensorBoard, MLflow. Another logger gets nothing.

    Loggers are told apart by their methods, so that none of these packages must be installed.

    Args:
        logger: the logger.
        name: the name of the figure, e.g. ``figures/codes``.
        figure: the figure.
        path: the file of the figure, which is what MLflow gets. MLflow keeps no steps of it, only the newest file.
        step: the round that the figure shows.
    """
    writer = _writer_of(logger)
    if hasattr(logger, "log_image"):
        logger.log_image(name, [figure], step)
    elif isinstance(logger, TensorBoardLogger) and path.suffix == ".png":
        _add_png(writer, name, path.read_bytes(), step)
    elif hasattr(writer, "add_figure"):
        writer.add_figure(name, figure, step, close=False)  # there is no pyplot window to close
    elif hasattr(writer, "log_artifact") and hasattr(logger, "run_id"):
        writer.log_artifact(logger.run_id, str(path), Path(name).parent.as_posix())


def log_histogram(logger: Logger, name: str, values: NDArray[Any], borders: Any, step: int) -> None:
    """Hands values to a logger that draws histograms, such as TensorBoard. Another logger gets nothing."""
    if hasattr(writer := _writer_of(logger), "add_histogram"):
        writer.add_histogram(name, values, step, bins=borders)


def _add_png(writer: Any, name: str, png: bytes, step: int) -> None:
    """Gives TensorBoard the file of a figure, because drawing the figure again takes a quarter of the time."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # only runs with figures need it

    width, height = struct.unpack(">II", png[16:24])
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)  # 4 channels: RGBA
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def _writer_of(logger: Logger) -> Any:
    """Returns the object of the logger's own library that writes, or None."""
    return getattr(logger, "experiment", None)


def forget_from(logger: TensorBoardLogger, step: int) -> None:
    """Makes TensorBoard drop what an earlier process wrote for `step` and later."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only resumed runs need it

    # TensorBoard orders its files by the second in their names, and the file of a resumed run must come last.
    written = [int(path.name.split(".")[3]) for path in Path(logger.log_dir).glob("events.out.tfevents.*")]
    while written and int(time.time()) <= max(written) <= time.time() + 2:
        time.sleep(0.05)
    events = logger.experiment.file_writer
    events.add_event(Event(step=step, file_version="brain.Event:2"))  # the first version with sessions
    events.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


def _log_configuration(logger: Any, server: Server) -> None:
    """Logs the configuration as hyperparameters, and ``config.yaml`` if the logger takes text or files."""
    with suppress(NotImplementedError):  # Fabric's CSVLogger has the method but does not support it
        logger.log_hyperparams(_readable(server))
    writer, path = _writer_of(logger), server.run_dir / "config.yaml"
    if hasattr(writer, "add_text"):  # TensorBoard, which reads it as markdown
        writer.add_text("config", f"```yaml\n{path.read_text('utf-8')}\n```", 0)
    elif hasattr(writer, "log_artifact") and hasattr(logger, "run_id"):
        writer.log_artifact(logger.run_id, str(path))


def _readable(server: Server) -> dict[str, Any]:
    """Returns the configuration for loggers: the run's name and identity, what is evaluated, and the data in words.

    The user's code is left out.
    """
    data, schedule = server.data, server.schedule
    words = {
        "run": f"{server.run_dir.parent.name}/{server.run_dir.name}",
        "rounds": schedule.rounds,
        "evaluate_every": schedule.evaluate_every,
        "evaluate_clients": schedule.num_evaluated or data.num_initial_clients,
        "evaluate_models": schedule.evaluated_kinds(server.method.exchange),
        "final_models": schedule.evaluated_kinds(server.method.exchange, is_final=True),
        "data": {
            "dataset": _plain(data.dataset),
            "protocols": data.protocols,
            "pool": data.pool,
            "proxy": data.proxy,
            "test_fraction": data.test_fraction,
            "val_fraction": data.val_fraction,
            "client_transforms": describe(data.client_transforms),
            "seed": data.seed,
        },
        "partition": _plain(data.partition) | {"num_clients": data.num_clients},
    }
    return {name: value for name, value in server.identity.items() if name != "code"} | words


def _plain(part: Any) -> dict[str, Any]:
    """Returns the class of a part and those of its attributes that are numbers or text."""
    plain = {name: value for name, value in vars(part).items() if isinstance(value, bool | int | float | str)}
    return {"class": type(part).__name__} | {name: value for name, value in plain.items() if not name.startswith("_")}


def _log_final(logger: Logger, metrics: dict[str, float], server: Server) -> None:
    """Logs the final metrics, one step after the last round. TensorBoard gets them as HParams too."""
    step = server.state.round
    if isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(_readable(server), metrics, step)
    else:
        logger.log_metrics(metrics, step)


def _finalize(logger: Logger, status: Literal["success", "failed"]) -> None:
    """Tells a logger that the run has ended, and how.

    W&B writes everything when Python exits, but a rank that another process has started ends without that.
    """
    logger.finalize(status)
    if multiprocessing.parent_process() is not None:
        writer = _writer_of(logger)
        if hasattr(writer, "finish"):
            writer.finish(exit_code=int(status == "failed"))
