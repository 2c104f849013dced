import json

from megatron.rl.answers import Response
from megatron.rl.callbacks import format_figures
from megatron.rl.pages import write_rollout


def group(number, rewards):
    return [
        Response(
            prompt=number,
            number=sample,
            prompt_ids=(1, 2),
            ids=(3,),
            logprobs=(-0.5,),
            sampler_rank=0,
            text="<b>4</b>",
            is_cut=sample == 1,
            reward=reward,
            failure="" if reward else "no number",
            numbers={"length": 1.0},
        )
        for sample, reward in enumerate(rewards)
    ]


def test_rollouts_are_written_as_lines_and_pages(tmp_path):
    write_rollout(tmp_path, 0, [group(0, [1.0, 0.0])], ["2 + 2 & so on"])
    write_rollout(tmp_path, 3, [group(4, [1.0, 1.0]), group(5, [0.0, 1.0])], ["a", "b"])
    rows = [json.loads(line) for line in (tmp_path / "rollout_0000003.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "a", "b", "b"]
    assert rows[2] == {
        **{"prompt": "b", "answer": "<b>4</b>", "reward": 0.0, "prompt_number": 5, "sample": 0},
        **{"prompt_ids": [1, 2], "ids": [3], "logprobs": [-0.5], "is_cut": False, "failure": "no number"},
        "length": 1.0,
    }
    page = (tmp_path / "rollout_0000000.html").read_text()
    assert "Rollout before step 1" in page and "2 + 2 &amp; so on" in page and "<b>4</b>" not in page
    index = (tmp_path / "index.html").read_text()
    assert "rollout_0000000.html>1<" in index and "rollout_0000003.html>4<" in index and "0.750" in index


def test_a_step_that_is_sampled_again_is_listed_once(tmp_path):
    write_rollout(tmp_path, 2, [group(0, [1.0, 0.0])], ["a"])
    write_rollout(tmp_path, 2, [group(0, [1.0, 1.0])], ["a"])
    index = (tmp_path / "index.html").read_text()
    assert index.count("rollout_0000002.html") == 1 and "1.000" in index


def test_the_line_of_a_rollout_names_its_figures():
    assert format_figures({"reward": 0.25, "answer length": 4.0}) == "reward: 0.25 | answer length: 4"
