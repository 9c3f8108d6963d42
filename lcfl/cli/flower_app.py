"""The two halves of the Flower app that ``lcfl fleet app`` writes: the server, and what runs on every node.

Flower starts the node's half anew for every message, so what takes long is imported in the server's half alone.
"""

import json
import logging
import sys
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from lcfl.cli.error_lines import reported
from lcfl.fleet.flower import packed, unpacked
from lcfl.fleet.parcel import MessageError, in_words, refusal
from lcfl.fleet.relay import relayed

__all__ = ["client_app", "server_app"]


def server_app(config: Path) -> ServerApp:
    """Returns the server's half.

    Args:
        config: the configuration of the run.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from lcfl.cli.flower_server import lead

        try:
            lead(config, grid, context.run_config)
        except Exception as error:
            if line := reported(error):
                _log_in_words(error, line)
            raise  # so that the run counts as failed

    return app


def _log_in_words(error: Exception, line: str) -> None:
    """Has Flower log a line in place of the traceback of an error."""

    def replace(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is error:
            record.msg, record.args, record.exc_info = line, (), None
        return True

    logging.getLogger("flwr").addFilter(replace)


def _text(path: Path) -> str:
    """Returns the content of a file; empty if there is none, which the node itself reports."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def client_app(config: Path) -> ClientApp:
    """Returns the half that runs on nodes.

    Args:
        config: the configuration of the run.
    """
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        """Returns what the process that keeps the node answers."""
        settings = json.dumps(dict(context.node_config), sort_keys=True)
        section = Path(str(context.node_config.get("data")))
        command = [sys.executable, "-m", "lcfl.cli.flower_node", str(config), settings]
        request = unpacked(message.content)
        try:
            reply = relayed(request, command, "\n".join([*command, config.read_text("utf-8"), _text(section)]))
        except MessageError as error:
            reply = refusal(request, str(error))
        print(in_words(request, reply), flush=True)
        return Message(packed(reply), reply_to=message)

    return app
