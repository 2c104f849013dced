"""Rewards from real worker processes: order, time limits, failures, and that no process stays behind."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from megatron.base.errors import USER_ERROR_EXIT_CODE
from megatron.command_line.exits import exit_code
from megatron.rl.reward_workers import RewardPool
from megatron.rl.rewards import built_in_source, file_source
from megatron.rl.user_functions import AnsweredPrompt, FunctionError
from tests.unit.project_names import ROOT

SECONDS = 60.0  # longer than anything takes on a busy machine
# Its row says how the function misbehaves.
FUNCTION = """
import os, subprocess, sys, time

print("printed by the import")

def reward(completion, action="", **row):
    print("printed for", completion)
    if action == "hang":
        time.sleep(3600)
    if action == "backtrack":
        import re
        re.fullmatch("(a*)*b", "a" * 64)
    if action == "raise":
        raise KeyError("level")
    if action == "killed once" and not os.path.exists(row["file"]):
        open(row["file"], "w").close()
        os.kill(os.getpid(), 9)
    if action == "exit":
        os._exit(3)
    if action == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        with open(row["file"], "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    if action == "pid":
        return os.getpid()
    if action == "torch":
        return "torch" in sys.modules
    return float("nan") if action == "nan" else {"score": float(completion), "half": float(completion) / 2}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return file_source(str(tmp_path / "mine.py"))


def answers(*actions, **row):
    return [
        AnsweredPrompt(f"question {n}", str(n), None, {"action": action, **row}) for n, action in enumerate(actions)
    ]


def wait_for(condition):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_many_calls_over_two_workers_are_in_order(source, capfd):
    before = children()
    with RewardPool(source, workers=2, call_seconds=SECONDS) as pool:
        batch = pool.score(answers(*[""] * 200))
        assert len(children() - before) == 2
        assert set(pool.score(answers(*["pid"] * 50)).scores) == children() - before
    assert batch.scores == list(map(float, range(200)))
    assert (batch.failures, batch.mean_figures()) == (0, {"half": 199 / 4})
    assert children() == before
    assert capfd.readouterr().out == ""  # the function's lines are on stderr, below those of training


def test_no_answers(source):
    with RewardPool(source, workers=1, call_seconds=SECONDS) as pool:
        assert pool.score([]).rewards == ()


def test_workers_do_not_import_torch(source):
    with RewardPool(source, workers=1, call_seconds=SECONDS) as pool:
        assert pool.score(answers("torch")).scores == [0.0]


def test_a_built_in_function():
    with RewardPool(built_in_source("exact"), workers=1, call_seconds=SECONDS) as pool:
        assert pool.score([AnsweredPrompt("p", " a", "a", {}), AnsweredPrompt("p", "b", "a", {})]).scores == [1.0, 0.0]


def test_failures_are_replaced_and_counted(source, caplog):
    with RewardPool(source, workers=2, call_seconds=SECONDS, replacement=-1.0) as pool:
        with caplog.at_level(logging.WARNING):
            batch = pool.score(answers("", "raise", "nan", "exit", ""))
        assert pool.score(answers("", "")).scores == [0.0, 1.0]
    assert batch.scores == [0.0, -1.0, -1.0, -1.0, 4.0]
    assert [reward.failure for reward in batch.rewards] == [
        None,
        "KeyError: 'level' (line 14)",
        "it returned nan, which is not finite",
        "its worker process ended with exit code 3",
        None,
    ]
    assert batch.failures == 3
    (line,) = caplog.messages
    assert line.startswith("3 of 5 rewards failed and count as -1; the first: --custom-rm-path ")
    assert line.endswith("mine.py:reward fails for the prompt 'question 1': KeyError: 'level' (line 14)")


@pytest.mark.parametrize("action", ["hang", "backtrack"])
def test_a_call_that_hangs_is_killed_and_its_worker_replaced(source, action):
    """A regular expression that backtracks holds the interpreter, so only a kill from outside ends it."""
    with RewardPool(source, workers=1, call_seconds=1.5, replacement=0.5) as pool:
        (first,) = pool.score(answers("pid")).scores
        batch = pool.score(answers("", action, ""))
        assert batch.scores == [0.0, 0.5, 2.0]
        assert batch.rewards[1].failure == "the call took longer than 1.5 s (--rm-timeout)"
        assert is_gone(int(first)) and pool.score(answers("pid")).scores != [first]


def test_what_a_hanging_function_has_started_is_killed_too(source, tmp_path):
    file = tmp_path / "pid"
    with RewardPool(source, workers=1, call_seconds=2.0, replacement=0.0) as pool:
        assert pool.score(answers("child", file=str(file))).failures == 1
        child = int(file.read_text())
        wait_for(lambda: is_gone(child))


@pytest.mark.parametrize(
    ("action", "reason"), [("raise", r"KeyError: 'level' \(line 14\)"), ("nan", "it returned nan"), ("exit", "code 3")]
)
def test_a_failure_stops_without_a_replacement(source, action, reason, capsys):
    before = children()
    pool = RewardPool(source, workers=2, call_seconds=SECONDS)
    with pytest.raises(
        FunctionError, match=f"fails for the prompt 'question 1': .*{reason}.*; correct the function, or"
    ):
        pool.score(answers("", action, "hang"))
    assert children() == before

    def program():
        with RewardPool(source, workers=1, call_seconds=SECONDS) as second:
            second.score(answers(action))
        return 0

    assert exit_code(program) == USER_ERROR_EXIT_CODE
    assert capsys.readouterr().err.count("\n") == 1


def test_the_words_of_the_last_turn_name_the_prompt(source):
    turns = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"})
    answer = AnsweredPrompt("<system>be brief<user>2 + 2?", "4", None, {"action": "nan"}, messages=turns)
    with pytest.raises(FunctionError, match=r"for the prompt '2 \+ 2\?':"):
        RewardPool(source, workers=1, call_seconds=SECONDS).score([answer])


def test_a_worker_that_is_killed_while_it_is_idle_costs_nothing(source):
    with RewardPool(source, workers=2, call_seconds=SECONDS) as pool:
        pids = set(map(int, pool.score(answers(*["pid"] * 50)).scores))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert pool.score(answers(*[""] * 6)).scores == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_call_whose_worker_is_killed_is_tried_once_more(source, tmp_path):
    with RewardPool(source, workers=1, call_seconds=SECONDS) as pool:
        assert pool.score(answers("", "killed once", "", file=str(tmp_path / "mark"))).scores == [0.0, 1.0, 2.0]


def test_an_import_that_fails_is_told_at_the_start(tmp_path):
    before = children()
    (tmp_path / "bad.py").write_text("import no_such_package")
    with pytest.raises(
        FunctionError, match=r"bad.py:reward: the file cannot be imported: ModuleNotFoundError: .*package"
    ):
        RewardPool(file_source(str(tmp_path / "bad.py")), workers=2, call_seconds=SECONDS)
    (tmp_path / "worse.py").write_text("import os; os._exit(7)")
    with pytest.raises(
        FunctionError, match=r"worse.py:reward: the file cannot be imported: its worker process ended with exit code 7"
    ):
        RewardPool(file_source(str(tmp_path / "worse.py")), workers=2, call_seconds=SECONDS)
    assert children() == before


@pytest.mark.parametrize("action", ["", "backtrack"])
def test_workers_end_when_training_is_killed(source, tmp_path, action):
    """Also in the middle of a call that holds the interpreter."""
    program = f"""
        import sys
        import psutil
        from megatron.rl.reward_workers import RewardPool
        from megatron.rl.rewards import file_source
        from megatron.rl.user_functions import AnsweredPrompt

        pool = RewardPool(file_source({source.path!r}), workers=2, call_seconds=3600)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        pool.score([AnsweredPrompt("p", "1", None, {{"action": {action!r}}})] * 2)
        sys.stdin.read()
    """
    training = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        workers = list(map(int, training.stdout.readline().split()))
        assert len(workers) == 2
        if action:
            wait_for(lambda: all(psutil.Process(pid).status() == psutil.STATUS_RUNNING for pid in workers))
    finally:
        training.kill()
        training.communicate()
    wait_for(lambda: all(map(is_gone, workers)))
    assert training.returncode == -signal.SIGKILL
