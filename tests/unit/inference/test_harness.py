"""Scores of lm-evaluation-harness through our class and through its own `hf` class, on one model."""

import json

import pytest

from megatron.base.errors import ConfigError
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.generate import generate
from tests import pool
from tests.unit.inference.serving import BYTES, write_tokenizer
from tests.unit.inference.small import GREEDY, small_model
from tests.unit.inference.test_generate import transformers_twin

HFLM = pytest.importorskip(
    "lm_eval.models.huggingface",
    reason="needs lm-eval[hf]: pip install -c constraints.txt lm-eval[hf] (600 MB, so not part of [dev])",
).HFLM
from megatron.core.inference.harness import CheckpointLM, format_table, run_tasks  # noqa: E402

QUESTIONS = [f"Question {i}: {'word ' * (i % 7)}\nAnswer:" for i in range(12)]
CHOICES = [" yes", " no, never", " é"]
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
num_fewshot: 1
fewshot_split: test
fewshot_config: {sampler: first_n}
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["Q", "?"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "local_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def built():
    return small_model(pool.groups(), **BYTES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, built, tokenizer):
    """Folder of the tasks. Every second generation is asked for what the model writes, so neither all nor none is
    right."""
    folder = tmp_path_factory.mktemp("tasks")
    with open(folder / "data.jsonl", "w") as file:
        for i, question in enumerate(QUESTIONS):
            ids = tokenizer.encode(question)
            options = {"max_new_tokens": 9, "sampling": GREEDY, "seeds": [0], "stop_strings": ["Q", "?"]}
            (found,) = generate(*built, tokenizer, [ids], **options)
            text = found.text if i % 2 else "something else"
            long = question * (1 + 3 * (i % 3))
            row = {"question": question, "choices": CHOICES, "answer": i % 3, "text": text, "long": long}
            file.write(json.dumps(row) + "\n")
    for name, task in TASKS.items():
        data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{folder / "data.jsonl"}"}}}}\n'
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: test\n{task}metadata: {{version: 1}}\n")
    return str(folder)


@pytest.fixture(scope="module")
def results(built, tokenizer, tasks, tmp_path_factory):
    """(ours, theirs)"""
    model, build = built
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        ours = CheckpointLM(model, build, tokenizer, context=128, batch_tokens=600, add_bos=False)
        twin = transformers_twin(model, build.config)
        theirs = HFLM(pretrained=twin, tokenizer=tokenizer.library, max_length=128, batch_size=4, device="cpu")
        return [run_tasks(lm, list(TASKS), tasks, None, None) for lm in (ours, theirs)]


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_the_hf_class(results, task):
    ours, theirs = (
        {name: value for name, value in found["results"][task].items() if isinstance(value, float)} for found in results
    )
    assert ours == pytest.approx(theirs, rel=1e-5) and ours


def test_every_answer_is_that_of_the_hf_class(results):
    for task in TASKS:
        ours, theirs = (found["samples"][task] for found in results)
        assert len(ours) == len(theirs) == 12
        for one, other in zip(ours, theirs, strict=True):
            if task == "local_generation":
                assert one["filtered_resps"] == other["filtered_resps"]
            else:
                for mine, its in zip(_flat(one["resps"]), _flat(other["resps"]), strict=True):
                    assert mine == pytest.approx(its, rel=1e-5)


def _flat(value):
    return [x for item in value for x in _flat(item)] if isinstance(value, list | tuple) else [value]


def test_some_are_right_and_some_are_not(results):
    """Else the comparison would prove little."""
    found = results[0]["results"]
    assert found["local_generation"]["exact_match,none"] == pytest.approx(0.5, abs=0.2)
    assert 0 < found["local_choice"]["acc,none"] < 1
    assert "local_choice" in format_table(results[0])


def test_a_task_that_is_not_known(built, tokenizer, tasks):
    lm = CheckpointLM(*built, tokenizer, context=128, batch_tokens=600, add_bos=False)
    with pytest.raises(ConfigError, match="--tasks no_such_task: not known"):
        run_tasks(lm, ["no_such_task"], tasks, None, None)
