"""A process that has imported the training program and forks one rank for each line on its stdin.

Starting Python and torch costs seconds a process; a fork costs nothing. A rank is otherwise as the launcher makes it:
a process of its own with torchrun's environment variables, its own stdout and stderr, signals and exit code.

Requests and answers are lines of JSON: {"argv", "env", "out", "err", "driver"} -> pid; {"poll": pid} -> exit code,
minus the signal that killed it, or null while it runs; {"import": module} -> null, and later ranks find it imported.
When stdin ends, ranks that still run are killed.
"""

import importlib
import json
import os
import signal
import sys
import traceback

import tests.warm  # noqa: F401
from megatron.command_line.entry import run_of
from megatron.training.main import main


def serve():
    running = set()
    for line in sys.stdin:
        job = json.loads(line)
        if "import" in job:
            importlib.import_module(job["import"])
            answer = None
        else:
            answer = _poll(job["poll"], running) if "poll" in job else _fork(job, running)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _poll(pid, running):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    running.remove(pid)
    return os.waitstatus_to_exitcode(status)


def _fork(job, running):
    pid = os.fork()
    if pid:
        running.add(pid)
        return pid
    code = 1
    try:
        _become(job)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(job):
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, job["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(path, flags, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, whatever started the tests
    os.environ.update(job["env"])
    if job["driver"]:
        module, _, name = job["driver"].partition(":")
        getattr(importlib.import_module(module), name)(job["argv"])
    else:
        main(run_of(job["argv"], description="test"))


if __name__ == "__main__":
    serve()
