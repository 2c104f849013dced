"""The program of a worker process: imports the reward function once, and calls it for each answer. No torch.

    python -m megatron.rl.reward_process DESCRIPTOR PARENT FOLDER

DESCRIPTOR is the connection to the pool, PARENT the process that owns it, FOLDER its current folder.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from megatron.base.errors import UserError
from megatron.base.parent_process import end_with_parent
from megatron.rl.reward_functions import RewardFunction


def main(descriptor: int, parent: int, folder: str) -> None:
    """Serves until the connection is closed or the parent has ended.

    Receives the RewardSource, then RewardInputs. Sends JSON objects: one when the function is ready
    or cannot be used, then one per answer.
    """
    end_with_parent(parent)
    os.set_inheritable(descriptor, False)  # programs that the function starts shall not hold the connection
    os.dup2(2, 1)  # the log lines of training are on stdout
    os.chdir(folder)
    connection = Connection(descriptor)
    try:
        function = RewardFunction(connection.recv())
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
            reward = function(answer)
            _send(connection, {"score": reward.score, "figures": dict(reward.figures)})
        except ValueError as error:
            _send(connection, {"failure": str(error)})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
