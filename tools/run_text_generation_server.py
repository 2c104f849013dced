"""Serve a checkpoint, or a Hugging Face folder, over OpenAI's HTTP API. See docs/serving.md.

python tools/run_text_generation_server.py --load DIR
python tools/run_text_generation_server.py --load-hf models/Llama-3.2-1B-Instruct
torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load DIR --host 0.0.0.0 --port 8000
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import sys
import threading

try:
    import uvicorn
    from fastapi import FastAPI

    from megatron.core.inference.server.app import Settings, build_app
    from megatron.core.inference.server.connections import configure
except ModuleNotFoundError as missing:
    print(f"error: the server needs {missing.name}; pip install 'megatron-patched[serve]'", file=sys.stderr)
    sys.exit(2)

from megatron.base.errors import ConfigError
from megatron.base.launch import launch_environment
from megatron.base.log import get_logger
from megatron.command_line.flag_parser import FlagParser, within
from megatron.config.interval import SIZE, between
from megatron.core.comm.collectives import barrier
from megatron.core.datasets.tokenizer import beginning
from megatron.core.groups import disconnect
from megatron.core.inference.chat import open_template
from megatron.core.inference.engine.continuous_batching import InferenceEngine
from megatron.core.inference.engine.slots import SlotDecoder, check_room
from megatron.core.models.hf.side_files import stop_ids
from megatron.tooling.tool import (
    add_model_flags,
    check_stop_ids,
    context_length,
    end,
    open_model,
    read_model,
    run_tool,
)
from megatron.training.together import together

KEY_VARIABLE = "MEGATRON_API_KEY"
DEFAULT_CONTEXT = 8192  # limit for models that allow more: the cache is allocated for every row
GRACE_SECONDS = 10  # for running answers when the server is told to end
log = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (default 127.0.0.1: this machine)")
    add(
        "--port",
        type=within(int, between(0, 65535)),
        default=5000,
        metavar="N",
        help="default 5000; 0 takes a free one and prints it",
    )
    add(
        "--api-key",
        metavar="TEXT",
        help=f"clients must send it; {KEY_VARIABLE} is safer, because ps does not show it",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help="model name for clients (default: the name of the model's folder)",
    )
    add(
        "--max-batch-size",
        type=within(int, SIZE),
        default=16,
        metavar="N",
        help="requests that run at the same time (default 16)",
    )
    add(
        "--max-queue",
        type=within(int, SIZE),
        default=256,
        metavar="N",
        help="requests that may wait; more get 503 (default 256)",
    )
    add(
        "--max-body-mb",
        type=within(int, between(1, 1024)),
        default=4,
        metavar="N",
        help="longest request in MiB; longer ones get 413 (default 4)",
    )
    add(
        "--max-sequence-length",
        type=within(int, SIZE),
        metavar="N",
        help=f"longest prompt and answer together (default: the model's limit, at most {DEFAULT_CONTEXT})",
    )
    # Omitted from the namespace if not given, like the tokenizer's other flags.
    add(
        "--chat-template",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="chatml, or a file with a Jinja template, in the place of the model's own",
    )
    add("--add-bos", action="store_true", help="begin prompts of /v1/completions with the tokenizer's bos")
    add("--stop-id", action="append", default=[], type=int, metavar="N", help="token that ends an answer, like eod")
    return parser


def serve(args: argparse.Namespace) -> None:
    """Checks everything that needs no other process, loads, and serves until SIGTERM or Ctrl-C. Collective over the
    world.
    """
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if key == "":
        raise ConfigError("the API key is empty, which protects nothing; give one, or none at all")
    saved, tokenizer = read_model(args)
    beginning(tokenizer, args.add_bos)  # raises for a tokenizer without a bos
    context = context_length(saved, args.max_sequence_length, "--max-sequence-length", DEFAULT_CONTEXT)
    template = open_template(tokenizer)
    check_stop_ids(args.stop_id, tokenizer)
    ends = [*args.stop_id, *stop_ids(saved.tokenizer, saved.base)]
    first = launch_environment()[0] == 0
    listener = open_listener(args.host, args.port) if first else None
    if first and key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("anyone who can reach %s can use this server, because no API key is set", args.host)

    model, build = open_model(saved, args, timeout_minutes=2.0)

    def open_decoder() -> SlotDecoder:
        check_room(model, build, slots=args.max_batch_size, capacity=context)
        return SlotDecoder(model, build, slots=args.max_batch_size, capacity=context)

    decoder = together(build.groups.world, open_decoder)
    log.info("cache: %d requests of %d tokens, %.2f GB on each rank", decoder.slots, context, decoder.nbytes / 1e9)
    with build.groups.heartbeat.phase("serve"):
        if listener is None:
            follow(decoder)
        else:
            engine = InferenceEngine(decoder, tokenizer, max_waiting=args.max_queue, stop_ids=ends)
            name = args.served_model_name or saved.name
            settings = Settings(
                model=name,
                api_key=key,
                add_bos=args.add_bos,
                chat_template=template,
                max_body=args.max_body_mb * 2**20,
            )
            connections = most_connections(args.max_batch_size + args.max_queue)
            lead(engine, build_app(engine, tokenizer, settings), listener, name, connections)
    barrier(build.groups.world)
    disconnect(build.groups.heartbeat)


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that does not accept connections yet. Raises ConfigError, before the model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}; give others") from error
    return listener


def most_connections(requests: int) -> int:
    """Returns the limit of connections: the running and waiting requests, and as many idle connections that clients
    keep.

    It is at most half of the files that this process may open.
    """
    wanted, files = 2 * requests + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files == resource.RLIM_INFINITY else min(wanted, files // 2)


def lead(engine: InferenceEngine, app: FastAPI, listener: socket.socket, name: str, max_connections: int) -> None:
    """Serves until a signal, or until the engine fails; then raises the engine's error.

    The event loop has the main thread, where signals arrive, and the engine has a separate one.
    """
    config = configure(app, max_connections, grace_seconds=GRACE_SECONDS)
    server = uvicorn.Server(config)

    def compute() -> None:
        try:
            engine.run()
        finally:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles both while it runs, and afterwards sends them again to the previous handlers.
        signal.signal(number, lambda *_: None)
    thread = threading.Thread(target=compute, name="engine")
    thread.start()
    listener.listen(config.backlog)
    host, port = listener.getsockname()[:2]
    log.info("serving %s at http://%s:%d/v1", name, f"[{host}]" if ":" in host else host, port)
    try:
        server.run(sockets=[listener])
    finally:
        engine.stop()
        thread.join()
    if engine.failure is not None:
        raise engine.failure


def follow(decoder: SlotDecoder) -> None:
    """Computes with the first rank until it ends. Signals are sent to all ranks, but the first rank decides when to
    stop.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    decoder.follow()


if __name__ == "__main__":
    if code := run_tool(build_parser(), serve, sys.argv[1:]):
        end(code)
