"""Files of --save-rollouts: the answers of each step as JSON lines, a page for each step, and one that lists them."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.rl.answers import Response

_STYLE = """
body { font-family: sans-serif; margin: 2em; max-width: 70em }
pre { white-space: pre-wrap; background: #f4f4f4; padding: 0.5em; margin: 0.3em 0 }
td, th { text-align: right; padding: 0 1em }
.reward { font-weight: bold }
"""
INDEX, SUMMARY = "index.html", "summary.jsonl"


def write_rollout(folder: Path, iteration: int, groups: Sequence[Sequence[Response]], prompts: Sequence[str]) -> None:
    """Writes the answers of the rollout before step `iteration` + 1, and the list of all rollouts in the folder.

    prompts: the text of each group's prompt. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rollout_{iteration:07d}"
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
        for group, prompt in zip(groups, prompts, strict=True):
            file.writelines(json.dumps(_row(answer, prompt), ensure_ascii=False) + "\n" for answer in group)
    (folder / f"{name}.html").write_text(
        _page(f"Rollout before step {iteration + 1}", _groups(groups, prompts)), encoding="utf-8"
    )
    rewards = [answer.reward for group in groups for answer in group]
    line = {"iteration": iteration, "answers": len(rewards), "reward": sum(rewards) / len(rewards)}
    with open(folder / SUMMARY, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    (folder / INDEX).write_text(_page("Rollouts", _index(folder)), encoding="utf-8")


def _row(answer: Response, prompt: str) -> dict[str, object]:
    return {
        "prompt": prompt,
        "answer": answer.text,
        "reward": answer.reward,
        "prompt_number": answer.prompt,
        "sample": answer.number,
        "prompt_ids": answer.prompt_ids,
        "ids": answer.ids,
        "logprobs": answer.logprobs,
        **({"mask": answer.mask, "turns": answer.turns} if answer.mask else {}),
        "is_cut": answer.is_cut,
        "failure": answer.failure,
        **answer.numbers,
    }


def _groups(groups: Sequence[Sequence[Response]], prompts: Sequence[str]) -> Iterable[str]:
    for group, prompt in zip(groups, prompts, strict=True):
        rewards = [answer.reward for answer in group]
        yield f"<h3>Prompt {group[0].prompt}, mean reward {sum(rewards) / len(rewards):.3f}</h3>"
        yield f"<pre>{html.escape(prompt)}</pre>"
        for answer in sorted(group, key=lambda answer: -answer.reward):
            notes = f"{len(answer.trained)} sampled tokens{', cut' if answer.is_cut else ''}"
            notes += f", {html.escape(answer.failure)}" if answer.failure else ""
            yield f"<p><span class=reward>{answer.reward:g}</span> ({notes})</p><pre>{html.escape(answer.text)}</pre>"


def _index(folder: Path) -> Iterable[str]:
    yield "<table><tr><th>step</th><th>answers</th><th>mean reward</th></tr>"
    lines = [json.loads(line) for line in (folder / SUMMARY).read_text(encoding="utf-8").splitlines()]
    # A continued run samples again what the run before it had sampled behind its last checkpoint.
    for iteration, line in sorted({line["iteration"]: line for line in lines}.items()):
        link = f"<a href=rollout_{iteration:07d}.html>{iteration + 1}</a>"
        yield f"<tr><td>{link}</td><td>{line['answers']}</td><td>{line['reward']:.3f}</td></tr>"
    yield "</table>"


def _page(title: str, parts: Iterable[str]) -> str:
    head = f"<meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return "\n".join((f"<!doctype html><html><head>{head}</head><body><h1>{title}</h1>", *parts, "</body></html>\n"))
