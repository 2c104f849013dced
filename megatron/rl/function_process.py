"""The program of a worker process: imports a function of the user once, and calls it for each answer. No torch.

    python -m megatron.rl.function_process DESCRIPTOR PARENT FOLDER

DESCRIPTOR is the connection to the pool, PARENT the process that owns it, FOLDER its current folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron.base.errors import UserError
from megatron.base.parent_process import end_with_parent
from megatron.rl.environments import EnvironmentFunction, EnvironmentSource
from megatron.rl.reward_functions import RewardFunction
from megatron.rl.rewards import RewardSource
from megatron.rl.user_functions import AnsweredPrompt


def main(descriptor: int, parent: int, folder: str) -> None:
    """Serves until the connection is closed or the parent has ended.

    Receives the source of the function, then answers. Sends JSON objects: one when the function is ready or cannot be
    used, then one per answer, with its result or with the reason of a failure.
    """
    end_with_parent(parent)
    os.set_inheritable(descriptor, False)  # programs that the function starts shall not hold the connection
    os.dup2(2, 1)  # the log lines of training are on stdout
    os.chdir(folder)
    connection = Connection(descriptor)
    try:
        function = _load(connection.recv())
    except UserError as error:
        _send(connection, {"failure": str(error)})
        return
    _send(connection, {})
    while True:
        try:
            answer = connection.recv()
        except EOFError:
            return
        try:
            _send(connection, {"value": function(answer)})
        except (ValueError, TypeError) as error:  # of the function, or a value that JSON does not hold
            _send(connection, {"failure": str(error)})


def _load(source: RewardSource | EnvironmentSource) -> Callable[[AnsweredPrompt], Any]:
    """Returns the function, whose results JSON can hold."""
    if isinstance(source, EnvironmentSource):
        return EnvironmentFunction(source)
    reward = RewardFunction(source)
    return lambda answer: dataclasses.asdict(reward(answer))


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
