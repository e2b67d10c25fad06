"""`hebbian play`: opens a local page on which two heads learn what you draw."""

import argparse
import errno
import socket
import sys
import webbrowser
from dataclasses import asdict, dataclass
from typing import Any

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.settings import add_options, choice, given_options, integer, setting
from hebbian_softmax.lab.images.compare import SOURCES
from hebbian_softmax.lab.images.omniglot import data_root_setting
from hebbian_softmax.lab.play.network import STEPS

HOST = "127.0.0.1"


@dataclass(frozen=True)
class PlaySettings:
    """The options of `hebbian play`."""

    images: str = setting(
        "glyphs",
        "characters that the network knows: glyphs (printed, no download) or omniglot (handwritten)",
        choice(*(source.name for source in SOURCES)),
    )
    data_root: str = data_root_setting()
    steps: int = setting(STEPS, "training steps of the network, which is trained once and then kept", integer(1, 10**6))
    seed: int = setting(0, "seed of the network's training", integer(0, 2**32 - 1))
    port: int = setting(8517, "port of the page on this computer; 0 for any that is free", integer(0, 65535))
    open: bool = setting(True, "whether to open the page in the browser")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `hebbian play` to the commands."""
    command = commands.add_parser(
        "play",
        description=(
            "Opens a local page: draw a character, give it a name, and see how a plain and a Hebbian softmax recognise "
            "it; or watch both learn a curriculum. At first use a small network is trained, in about two minutes."
        ),
        allow_abbrev=False,
    )
    add_options(command, PlaySettings)
    command.set_defaults(execute=lambda arguments: play(PlaySettings(**given_options(arguments, PlaySettings))))


def play(settings: PlaySettings) -> int:
    """Serve the page until Ctrl-C."""
    require("starlette", "uvicorn", "numpy", "PIL", "matplotlib")
    import uvicorn

    from hebbian_softmax.lab.play.server import create_app

    with bound(settings.port) as listening:
        port = listening.getsockname()[1]
        given = asdict(settings)

        def curriculum(values: dict[str, Any]) -> list[str]:
            return worker("live", {**given, **values})

        app = create_app(port, worker("classroom", given), curriculum, lambda: server.should_exit)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=3,
                limit_concurrency=512,
            )
        )
        address = f"http://{HOST}:{port}/"
        say(f"The page is at {address} (Ctrl-C ends it)")
        if settings.open:
            webbrowser.open(address)
        server.run(sockets=[listening])
    return 0


def worker(module: str, settings: dict[str, Any]) -> list[str]:
    """Return the command of a worker. `-P` keeps modules in the current folder from being imported."""
    return [sys.executable, "-P", "-m", f"hebbian_softmax.lab.play.{module}", to_json(settings)]


def bound(port: int) -> socket.socket:
    """Return a socket that listens on a port of this computer, and of no other."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(256)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise LabError(f"port {port} cannot be used ({error.strerror}): give another one with --port") from error
        raise
    return listening
