"""train_rl.py as a user runs it: rollouts, evaluation, a run that continues, a reward that fails, mistakes."""

import json
import re

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import flags

DRIVER = "tests.e2e.helpers.drivers:train_rl"
REWARD = """
def reward(prompt, completion, label):
    ids = [int(word) for word in completion.split()]
    return {"score": sum(number % 2 == label for number in ids) / max(1, len(ids)), "tokens": len(ids)}


def next_turn(conversation):
    words = conversation[-1]["content"].split()
    return f" {len(words)} 1" if words and int(words[-1]) % 2 else None


class Sampler:
    def start(self, settings):
        self.end = settings.stop_ids[-1]

    def update(self, weights):
        self.names = [name for name, _ in weights]

    def sample(self, requests):
        assert len(self.names) > 10
        return [([request.seed % 60, self.end], [-4.0, -4.0]) for request in requests]


def fails(prompt, completion, label):
    if prompt == "5 6":
        raise KeyError("nothing to say about it")
    return 0.0
"""
ROLLOUTS = {
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--rollout-max-response-len": 6,
    "--grpo-prompts-per-step": 4,
    "--grpo-group-size": 4,
    "--train-iters": 8,
    "--rm-workers": 1,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The flags of a task: prompts, others that are held out, and a reward function."""
    folder = tmp_path_factory.mktemp("rewards")
    rows = [{"prompt": f"{number} {number + 1}", "label": number % 2} for number in range(12)]
    for name, part in (("prompts", rows[:10]), ("held_out", rows[10:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "rewards.py").write_text(REWARD)
    return {
        **ROLLOUTS,
        "--prompt-data": folder / "prompts.jsonl",
        "--eval-prompt-data": folder / "held_out.jsonl",
        "--custom-rm-path": folder / "rewards.py",
        "--eval-interval": 4,
    }


def rollouts(folder):
    """Name of the file -> its rows, without log-probabilities, whose last bits depend on the batch."""
    return {
        path.name: [{**json.loads(line), "logprobs": None} for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
        if path.name.startswith("rollout_")
    }


def assert_the_best_is_kept(saved, out):
    """The file names the saved iteration with the highest reward, and --save-retain 1 leaves it next to the newest."""
    rewards = {int(n): float(value) for n, value in re.findall(r"evaluation at iteration (\d+) \| reward: (\S+)", out)}
    best = json.loads((saved / "best_checkpoint.json").read_text())
    assert best["value"] == pytest.approx(max(rewards[4], rewards[8]), rel=1e-4)
    assert {path.name for path in saved.glob("iter_*")} == {"iter_0000008", f"iter_{best['iteration']:07d}"}


def test_a_run_that_continues_samples_the_same_answers_under_another_layout(task, tmp_path):
    whole, parts, saved = tmp_path / "whole", tmp_path / "parts", tmp_path / "saved"
    save = {"--save": saved, "--save-interval": 4, "--save-retain": 1}
    # An answer whose last number is odd is followed by a turn of the environment.
    task = task | {"--custom-environment-path": task["--custom-rm-path"], "--rollout-max-response-len": 24}
    done = run(flags(task, {"--save-rollouts": whole}), tmp_path / "1", driver=DRIVER)
    assert done.codes == [0], done.text
    out = done.stdout[0]
    assert out.count("rollout before step") == 4 and out.count("evaluation at iteration") == 3
    assert "| turns: 1." in out, "some conversations go on"
    assert "| tokens: " in out, "further figures of the reward function"
    first = run(flags(task, save, {"--save-rollouts": parts, "--exit-interval": 4}), tmp_path / "2", driver=DRIVER)
    assert first.codes == [0], first.text
    layout = {"--tensor-model-parallel-size": 2, "--load": saved}
    second = run(flags(task, save, layout, {"--save-rollouts": parts}), tmp_path / "3", 2, driver=DRIVER)
    assert second.codes == [0, 0], second.text
    assert_the_best_is_kept(saved, first.stdout[0] + second.stdout[0])
    expected = rollouts(whole)
    assert len(expected) == 4 and rollouts(parts) == expected
    assert len({row["reward"] for rows in expected.values() for row in rows}) > 2
    assert "rollout_0000006.html" in (parts / "index.html").read_text()


def test_a_reward_that_fails_is_named_with_its_prompt_also_with_an_external_sampler(task, tmp_path):
    failing = {"--custom-rm-path": f"{task['--custom-rm-path']}:fails"}
    done = run(flags(task, failing), tmp_path / "1", 2, driver=DRIVER)
    assert 2 in done.codes, done.text
    (message,) = [line for text in done.stderr for line in text.splitlines() if line.startswith("error")]
    assert "5 6" in message and "nothing to say about it" in message and "--rm-on-error" in message
    external = {"--rl-external-sampler": task["--custom-rm-path"], "--rl-generation-lag": 1, "--tis-clip": 2}
    goes_on = run(
        flags(task, failing, external, {"--rm-on-error": -1, "--train-iters": 6}), tmp_path / "2", driver=DRIVER
    )
    assert goes_on.codes == [0] and "failed rewards: " in goes_on.text, goes_on.text
    assert "| staleness: 2 |" in goes_on.text and goes_on.text.count("weights of iteration") == 4


def test_other_programs_name_the_right_one(task, tmp_path):
    done = run(flags(task, {"--perform-rl-step": None}), tmp_path / "1")
    assert done.codes == [2] and "start that program" in done.text and "train_rl.py" in done.text
