"""The time of a step of train_rl.py: the engine's forwards for answers of given lengths, and what each phase costs."""

import itertools
import json

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.planner.memory.plan import plan_memory
from megatron.planner.time.cluster_file import read_cluster
from megatron.planner.time.constants import fitted
from megatron.planner.time.continuous_batch import batching, lengths_of_mean
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.rollout import DECODING, LOG_PROBABILITIES, READING, REFERENCE, TRAINING, RolloutModel
from megatron.rl.sampler import sample_seed
from megatron.spec.sizes import FUSED_GPU
from megatron.tooling.plan.responses import response_lengths
from megatron.tooling.plan.run import settings_of, software_of
from tests.parallel.rl_runs import make_sampler, make_trainer

MODEL = """
    --preset llama3-8b --seq-length 4096 --micro-batch-size 1 --bf16 --sequence-parallel --use-distributed-optimizer
    --train-iters 10 --lr 1e-6 --perform-rl-step --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 128256 --tensor-model-parallel-size 2
"""
SAMPLES = f"""
    {MODEL} --rollout-max-response-len 3072 --prompt-data x --rm-type number --grpo-prompts-per-step 16
    --grpo-group-size 8
"""
WORLD = 8


def time_of(flags, lengths=None):
    """The seconds of each phase on one server, and the batch."""
    run, settings = settings_of(flags.split(), WORLD, description="")
    cluster = read_cluster("h100:1x8")
    if lengths is None and run.rl.preference_data is None:
        lengths = response_lengths(run, None)
    model = RolloutModel(run, settings, cluster, software_of(run), lengths or [])
    return model.time(DataSheetClock(fitted(), cluster))


def test_the_forwards_are_those_of_the_engine(monkeypatch):
    """Prompts of equal length, answers of any: the rows of every forward."""
    trainer, tokenizer = make_trainer(1, "--vocab-size 8 --rollout-max-response-len 12")
    sampler, forwards = make_sampler(trainer, tokenizer), []
    for name, rows_of in (("_fill", lambda rows: rows.stop - rows.start), ("_step", len)):
        original = getattr(SlotDecoder, name)

        def recorded(decoder, rows, original=original, name=name, rows_of=rows_of):
            forwards.append((name, rows_of(rows)))
            return original(decoder, rows)

        monkeypatch.setattr(SlotDecoder, name, recorded)
    count = 20
    seeds = [sample_seed(1, 0, number) for number in range(count)]
    completions = sampler.sample([[1, 2, 3]] * count, seeds, [12] * count)
    lengths = [len(completion.ids) for completion in completions]
    assert len(set(lengths)) > 3, lengths  # so that rows are filled again
    planned = batching(lengths, slots=3, prompt=3)
    decoded = [rows for part in planned.decodings for rows in itertools.repeat(part.rows, part.steps)]
    assert [rows for name, rows in forwards if name == "_step"] == decoded
    assert [rows for name, rows in forwards if name == "_fill"] == [part.prompts for part in planned.readings]
    assert planned.steps == len(decoded) and planned.mean_rows == pytest.approx(sum(decoded) / len(decoded))


def test_the_last_answers_run_alone():
    batch = batching([10, 10, 10, 100], slots=4, prompt=5)
    assert [(part.rows, part.steps) for part in batch.decodings] == [(4, 9), (1, 90)]
    assert batch.steps_of_tail == 90
    assert batch.decodings[0].columns == 5 + 1 + 5  # its steps read 7 to 15 columns


def test_lengths_have_their_mean():
    lengths = lengths_of_mean(200, 1000, 4000)
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.01)
    assert max(lengths) == 1000 and lengths != sorted(lengths)
    assert lengths_of_mean(1000, 1000, 3) == [1000] * 3


def test_phases_of_a_step():
    plain = time_of(SAMPLES)
    assert set(plain.phases) == {READING, DECODING, LOG_PROBABILITIES, TRAINING}
    assert plain.seconds == pytest.approx(sum(plain.phases.values()))
    # Two passes over two steps each: log-probabilities of the rollout, and of three of four steps.
    twice = time_of(f"{SAMPLES} --grpo-iterations 2 --global-batch-size 64 --grpo-kl-beta 0.1")
    forward, step = plain.phases[LOG_PROBABILITIES], plain.phases[TRAINING]
    assert twice.phases[LOG_PROBABILITIES] == pytest.approx(5 / 2 * forward, rel=0.02)
    assert twice.phases[TRAINING] > 1.9 * step
    assert twice.phases[REFERENCE] > forward
    assert 2 * forward < step < 5 * forward, "a step has a forward, and a backward of twice its work"


def test_decoding_reads_weights_and_cache():
    """Weights of a rank are read in every step, and the cache of all answers."""
    few, many = (time_of(f"{SAMPLES} --rl-generation-batch-size {slots}").phases[DECODING] for slots in (2, 32))
    assert 4 < few / many < 16, "32 answers share the weights, and not their caches"
    run, settings = settings_of(SAMPLES.split(), WORLD, description="")
    cluster = read_cluster("h100:1x8")
    model, clock = RolloutModel(run, settings, cluster, software_of(run), [1] * 128), DataSheetClock(fitted(), cluster)
    rows, cached = 512, 32 * 2 * 4 * 128 * 2  # bytes of a token's cache on a rank
    short, long = (model.forward(clock, 1, rows, columns) for columns in (1.0, 4001.0))
    assert long - short == pytest.approx(clock.traffic(4000 * rows * cached), rel=0.05)
    assert model.forward(clock, 1, 1, 1.0) > clock.traffic(8.0e9)  # bf16 weights on two ranks


def test_pipeline_ranks_do_not_shorten_a_decoding_step():
    pipeline = SAMPLES.replace("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2").replace(
        "--sequence-parallel", ""
    )
    one = pipeline.replace("--pipeline-model-parallel-size 2", "")
    both = [time_of(f"{flags} --rl-generation-batch-size 4").phases[DECODING] for flags in (pipeline, one)]
    assert both[0] > both[1]


def test_pairs_have_no_answers():
    times = time_of(f"{MODEL} --preference-data x --global-batch-size 64")
    assert set(times.phases) == {LOG_PROBABILITIES, REFERENCE, TRAINING} and times.batching is None


def test_pairs_of_interleaved_stages():
    """Both stages of a rank belong to the reference that it holds on the host."""
    flags = MODEL.replace("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4").replace(
        "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank 2"
    )
    flags += " --preference-data x --global-batch-size 64"
    assert time_of(flags).phases[REFERENCE] > 0
    run, settings = settings_of(flags.split(), WORLD, description="")
    for rank in plan_memory(run, settings, FUSED_GPU):
        assert rank.layers == 8 and len(rank.phases) == 3
        assert rank.host == pytest.approx(2 * 2 * rank.parameters, rel=0.01)


def test_lengths_of_a_run(tmp_path):
    run, _ = settings_of(SAMPLES.split(), WORLD, description="")
    path = tmp_path / "rollout_0000001.jsonl"
    path.write_text("".join(json.dumps({"ids": [1] * count}) + "\n" for count in (3, 5, 5000)))
    assert response_lengths(run, str(path))[:4] == [3, 5, 3072, 3]
    assert len(response_lengths(run, str(path))) == 128
    path.write_text('{"ids": [1]}\n{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"rollout_0000001.jsonl, line 2 has no token ids"):
        response_lengths(run, str(path))
    many, _ = settings_of([*SAMPLES.split(), "--grpo-prompts-per-step", "4096"], WORLD, description="")
    with pytest.raises(ConfigError, match="are 32768 answers, and at most 16384 are followed"):
        response_lengths(many, None)
    with pytest.raises(ConfigError, match="--response-lengths 5000 is no mean of answers of 1 to"):
        response_lengths(run, "5000")
