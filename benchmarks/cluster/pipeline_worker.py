"""The process of one host for pipeline.py: a pipeline rank whose stages sleep, and whose messages are real.

It communicates like worker.py: JSON lines on stdin and stdout.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.cluster.stdio import run_worker
from benchmarks.pipeline import Case, Ours
from megatron.base.launch import launch_environment
from megatron.base.mesh import Mesh
from megatron.core.comm.collectives import barrier
from megatron.core.groups import connect, create_groups, disconnect

TIMEOUT_SECONDS = 600.0


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Joins the world and measures for every line: {"rounds": n, "ways": {name: fields of a Case}}.

    The answer is name -> seconds of each step of this rank, with the schedules alternating.
    """
    rank, world_size, _ = launch_environment()
    heartbeat = connect(rank, world_size, backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    groups = create_groups(Mesh.create(world_size, pp=world_size), rank, heartbeat, TIMEOUT_SECONDS)
    answer({"ready": {name: name for name in names}})
    sides: dict[str, Ours] = {}
    for line in lines:
        request: dict[str, Any] = json.loads(line)
        found: dict[str, list[float]] = {name: [] for name in request["ways"]}
        for number, (name, fields) in itertools.product(range(request["rounds"]), request["ways"].items()):
            answer({"progress": f"round {number + 1}/{request['rounds']} {name}"})
            side = sides.setdefault(name, Ours(Case(**fields), groups))
            barrier(groups.world)
            started = time.perf_counter()
            side.step()
            found[name].append(time.perf_counter() - started)
        answer({"measured": found})
    disconnect(heartbeat)


if __name__ == "__main__":
    run_worker(__doc__, serve)
