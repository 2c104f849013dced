"""A reward for answers that are Python code: the share of the row's tests that the code passes, run in a sandbox.

    --custom-rm-path examples/rl/sandboxed_reward.py

A row has its tests as a list of statements: {"prompt": "Write double(x).", "tests": ["assert double(2) == 4"]}.

The code runs in a process of its own, in an empty temporary folder, with an empty environment and limits of time,
memory, file sizes and open files. It also runs

- under bubblewrap (`bwrap`) if that works here: with a read-only file system of /usr and its like and nothing else,
  without network, and without a view of other processes;
- otherwise under `unshare` if that works here: without network and with process numbers of its own, but it can
  read every file that this user can read, and write to those that this user can write to;
- otherwise under the limits alone.

`python examples/rl/sandboxed_reward.py` prints which of them works here, and a reward.

None of them protects from

- faults of the kernel, which the sandbox shares with the host;
- code that finds the mark or the tests in its own process and forges the result, or changes the functions that the
  tests call: a reward can be cheated even where the machine is safe;
- code that uses the processor for as long as it is allowed to.

Without bubblewrap, the code can read and change the user's files. Under the limits alone, it can also use the network,
see other processes, and start processes that leave its session and stay behind. So train on the answers of a model in
a virtual machine or a container without secrets.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 5  # of the processor, and of the clock; keep it below the time limit of a reward call
MEMORY, FILE, OPEN_FILES = 2**30, 2**20, 64  # bytes, bytes, and numbers
SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG of Linux
BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# Reads {"code", "tests", "mark"}; prints the mark and the number of tests passed, as the last line.
RUNNER = """
import json, sys
work = json.load(sys.stdin)
names = {"__name__": "answer"}
passed = 0
exec(compile(work["code"], "answer.py", "exec"), names)
for test in work["tests"]:
    try:
        exec(compile(test, "test.py", "exec"), names)
        passed += 1
    except Exception:
        pass
print("\\n" + work["mark"], passed, flush=True)
"""


def reward(completion: str, tests: Sequence[str], **row: object) -> dict[str, float]:
    """Returns the share of the tests that pass, and whether the code ran to its end."""
    blocks = BLOCK.findall(completion)
    passed = run(blocks[-1] if blocks else completion, tests)
    return {"score": max(passed, 0) / len(tests), "ran": float(passed >= 0)}


def run(code: str, tests: Sequence[str]) -> int:
    """Returns the number of tests that the code passes, or -1 if it failed, hung or was stopped by a limit."""
    mark = secrets.token_hex(16)  # so that the code cannot print the result itself
    work = json.dumps({"code": code, "tests": list(tests), "mark": mark})
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        output = execute([sys.executable, "-I", "-S", "-c", RUNNER], work, Path(folder), isolation())
    last = output.rstrip().rpartition("\n")[2].split()
    return int(last[1]) if len(last) == 2 and last[0] == mark and last[1].isdecimal() else -1


def execute(command: Sequence[str], work: str, folder: Path, kind: str) -> str:
    """Returns the output of a command in the sandbox, up to FILE bytes; nothing after a time limit."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*wrapper(kind, folder), *command], cwd=folder, env={"HOME": str(folder), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=limit,
        )  # fmt: skip
        try:
            process.communicate(work.encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        finally:  # also what the code has started and left running
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read(FILE).decode(errors="replace")


def limit() -> None:
    """Sets the limits of this process, which its children inherit. It ends with the one that started it."""
    ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_END, signal.SIGKILL)
    for kind, value in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def wrapper(kind: str, folder: Path) -> list[str]:
    """Returns the command of the operating system's sandbox, before the command that it runs. Absent ones give
    nothing.
    """
    program = shutil.which(kind)
    if program is None:
        return []
    if kind == "bwrap":
        system = [
            path for path in ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix) if Path(path).exists()
        ]
        reads = [word for path in dict.fromkeys(system) for word in ("--ro-bind", path, path)]
        space = ["--proc", "/proc", "--dev", "/dev", "--bind", str(folder), str(folder), "--chdir", str(folder)]
        return [program, "--unshare-all", "--die-with-parent", "--new-session", *reads, *space]
    if kind == "unshare":
        names = ["--user", "--map-root-user", "--net", "--ipc", "--uts", "--pid"]
        return [program, *names, "--fork", "--kill-child", "--mount-proc"]
    return []


@functools.cache
def isolation() -> str:
    """Returns the best kind of sandbox that works on this machine: "bwrap", "unshare" or "limits"."""
    for kind in ("bwrap", "unshare"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-I", "-S", "-c", "print(7)"]
            if wrapper(kind, Path(folder)) and execute(command, "", Path(folder), kind).strip() == "7":
                return kind
    return "limits"


if __name__ == "__main__":
    print(f"sandbox: {isolation()}")
    answer = "```python\ndef double(x):\n    return 2 * x\n```"
    print(reward(answer, ["assert double(2) == 4", "assert double('a') == 'b'"]))
