"""The driver of the GPU checklist with made-up parts, its reports, and its arguments; a dry run of the real parts."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.gpu import checklist, driver, expected, part_g_speed, part_h_peers, part_j_memory
from benchmarks.gpu.case import Setting
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.pair import Pair
from benchmarks.gpu.part_b_tests import read_junit
from benchmarks.gpu.part_i_profile import Span, calls, gaps_of, summary
from benchmarks.gpu.parts import PARTS, Part, chosen
from benchmarks.gpu.record import (
    CRASHED,
    FAILED,
    MISSING,
    OK,
    SKIPPED,
    START,
    TIMEOUT,
    Record,
    failed_cases,
    read_records,
)
from benchmarks.gpu.report import TABLE_LINES, Report, table
from benchmarks.gpu.runs import DECODER, configured, step_flops
from megatron.base.errors import ConfigError
from tests.unit.benchmarks.checklist_cases import CHILD

MODULE = "tests.unit.benchmarks.checklist_cases"
PART = Part("Y", "made up", MODULE, 30.0)


def run(out, parts, seconds=60.0):
    """case -> record"""
    found = Driver(out, "cpu", False).run(parts, time.monotonic() + seconds, lambda record: None)
    return {record.case: record for record in found}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


OUTCOMES = {
    "good": OK,
    "bad": FAILED,
    "missing": MISSING,
    "skipped": SKIPPED,
    "crash": CRASHED,
    "after the crash": OK,
    "crash beside a fork": CRASHED,
    "hang": TIMEOUT,
    "after the hang": OK,
    "lose the GPU": FAILED,
    "after the loss": OK,
    "too long": SKIPPED,
    "child": OK,
}


class TestDriver:
    @pytest.fixture(scope="class")
    def out(self, tmp_path_factory):
        return tmp_path_factory.mktemp("checklist")

    @pytest.fixture(scope="class")
    def found(self, out):
        return run(out, [(PART, set(OUTCOMES))])

    def test_every_case_has_its_outcome(self, found):
        assert {case: record.status for case, record in found.items()} == OUTCOMES

    def test_reasons(self, found):
        assert found["bad"].text == "ValueError: two lines"
        assert found["missing"].text == "missing: package nowhere"
        assert found["crash"].text.endswith("the last words")
        assert found["crash beside a fork"].seconds < 20.0, "of the 60 s that the case may take"
        assert "planned for 1000000 s" in found["too long"].text

    def test_a_case_runs_once(self, out, found):
        log = (out / driver.LOG).read_text()
        assert log.count("--- Y good") == 1 and "ValueError: two\nlines" in log

    def test_no_process_is_left(self, out, found):
        pid = int((out / CHILD).read_text())
        deadline = time.monotonic() + 10
        while is_alive(pid):  # the kernel ends a killed process soon
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_chosen_cases(self, tmp_path):
        assert list(run(tmp_path, [(PART, {"skipped", "good"})])) == ["good", "skipped"]

    def test_a_part_that_cannot_start_stops_nothing(self, tmp_path):
        broken = Part("X", "broken", "benchmarks.gpu.no_such_part", 30.0)
        found = run(tmp_path, [(broken, set()), (PART, {"good"})])
        assert (found[START].status, found["good"].status) == (CRASHED, OK)
        assert "no_such_part" in found[START].text

    def test_a_part_that_hangs_before_its_first_case(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driver, "LEAST_SECONDS", 0.2)
        found = run(tmp_path, [(Part("X", "", "tests.unit.benchmarks.checklist_hangs", 1.0), set())], seconds=1.0)
        assert [(record.case, record.status) for record in found.values()] == [(START, TIMEOUT)]

    def test_no_time_left(self, tmp_path):
        found = run(tmp_path, [(PART, {"good"})], seconds=1.0)
        assert [record.status for record in found.values()] == [SKIPPED]

    def test_a_part_leaves_the_time_that_later_parts_need(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driver, "LEAST_SECONDS", 0.2)
        hanging, waiting = Part("X", "", MODULE, 1.0), Part("Y", "", MODULE, 1e3)
        found = run(tmp_path, [(hanging, {"hang for long", "child"}), (waiting, {"good"})], seconds=30.0)
        assert {case: record.status for case, record in found.items()} == {
            "hang for long": TIMEOUT,
            "child": SKIPPED,
            "good": OK,
        }
        assert found["hang for long"].text == "the part's time ran out"


class TestRecords:
    def test_a_round_trip(self, tmp_path):
        records = [Record("A", "a", OK, 1.0, "t", {"x": [1.0, float("inf")]}), Record("B", "b", FAILED, 2.0, "u")]
        path = tmp_path / "results.jsonl"
        path.write_text("".join(record.to_json() + "\n" for record in records) + '{"part": "C", "ca')
        found = read_records(path)
        assert found[1] == records[1] and found[0].values == {"x": [1.0, "inf"]}

    def test_another_file(self, tmp_path):
        path = tmp_path / "other"
        path.write_text("not json\n{}\n")
        with pytest.raises(ConfigError, match="line 1 is no record"):
            read_records(path)

    def test_what_failed_runs_again(self):
        kinds = [("A", "a", OK), ("A", "b", FAILED), ("B", "c", TIMEOUT), ("C", START, CRASHED), ("D", "d", MISSING)]
        records = [Record(part, case, status, 0.0, "") for part, case, status in kinds]
        assert failed_cases(records) == {"A": {"b"}, "B": {"c"}, "C": set()}


class TestReport:
    def test_the_table_is_short(self):
        records = [Record("ABCDEFGHIJ"[n % 10], f"case {n}", FAILED, 0.0, "because " * 40) for n in range(100)]
        lines = table(records, 1.0).splitlines()
        assert len(lines) == TABLE_LINES and lines[-1] == "and 74 more failures in report.md"
        assert all(len(line) <= 120 for line in lines)

    def test_files_are_written_with_every_record(self, tmp_path, capsys):
        report = Report(tmp_path, "title")
        report.add(Record("A", "a", OK, 1.0, "x | y"))
        assert "| a | ok | 1.0 | x \\| y |" in (tmp_path / "report.md").read_text()
        assert [record.case for record in read_records(tmp_path / "results.jsonl")] == ["a"]
        report.add(Record("B", "b", FAILED, 1.0, "why"))
        assert "## B: tests/gpu" in (tmp_path / "report.md").read_text()
        assert "B b: failed, 1.0 s; why" in capsys.readouterr().out


class TestArguments:
    @pytest.mark.parametrize(("text", "letters"), [("A-C", "ABC"), ("j,a,c-d", "ACDJ"), ("B", "B"), ("A-A,A", "A")])
    def test_parts(self, text, letters):
        assert "".join(part.letter for part in chosen(text)) == letters

    @pytest.mark.parametrize("text", ["", "A-", "K", "C-A", "A-Z", "AB", "1"])
    def test_wrong_parts(self, text, tmp_path, capfd):
        assert checklist.main(["--out", str(tmp_path), "--parts", text]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1

    def test_nothing_failed(self, tmp_path, capsys):
        path = tmp_path / "results.jsonl"
        path.write_text(Record("A", "a", OK, 0.0, "").to_json() + "\n")
        assert checklist.main(["--out", str(tmp_path / "new"), "--only-failed", str(path)]) == 0
        assert capsys.readouterr().out.startswith("nothing failed in ")
        assert not (tmp_path / "new").exists()

    def test_every_part_has_its_letter(self):
        assert list(PARTS) == list("ABCDEFGHIJ")
        assert sum(part.seconds for part in chosen("A-F")) == sum(part.seconds for part in chosen("G-J")) == 9.3 * 60


class TestSizes:
    """The flags and sizes of a GPU, which a dry run replaces by toys, are accepted."""

    GPU = Setting("cuda", False, Path())

    @pytest.mark.parametrize("flags", [*part_g_speed.WAYS.values(), *part_g_speed.ATTENTION.values()])
    def test_slice(self, flags):
        assert configured(f"{part_g_speed.SLICE_8B} {flags}", self.GPU).model.vocab_size == 32064

    @pytest.mark.parametrize("flags", ["", part_g_speed.HOST_BOUND])
    def test_1b(self, flags):
        assert configured(f"{part_g_speed.MODEL_1B} {flags}", self.GPU).model.bf16

    def test_peers(self):
        assert configured(part_h_peers.shape(self.GPU), self.GPU).train.global_batch_size == 1

    @pytest.mark.parametrize("flags", [*part_j_memory.RECOMPUTE.values(), *part_j_memory.OFFLOAD.values()])
    def test_memory(self, flags):
        assert configured(f"{part_j_memory.MODEL} {flags}", self.GPU).model.hidden_size == 2048

    def test_the_slice_has_the_share_of_the_head_of_the_whole_model(self):
        shares = []
        for flags in (
            part_g_speed.SLICE_8B,
            "--preset llama3-8b --vocab-size 128256 --seq-length 8192 --micro-batch-size 1",
        ):
            run = configured(flags, self.GPU)
            head = 6 * run.model.hidden_size * run.model.vocab_size * 8192
            shares.append(head / step_flops(run, 1))
        assert shares[0] == pytest.approx(shares[1], rel=2e-3)


class TestExpected:
    def test_the_slice_is_that_of_part_g(self):
        run = configured(part_g_speed.SLICE_8B, TestSizes.GPU)
        assert run.train.global_batch_size == expected.MICROBATCHES
        assert expected.model_flops() == pytest.approx(step_flops(run, expected.MICROBATCHES), rel=1e-3)

    def test_no_rate_is_above_that_of_the_products(self):
        for gpu in expected.GPUS:
            rate = expected.model_flops() / expected.step_seconds(gpu, fp8=False) / 1e12
            assert 0.5 * gpu.bf16 < rate < gpu.bf16 * expected.PRODUCT
            if gpu.fp8:
                assert rate < expected.model_flops() / expected.step_seconds(gpu, fp8=True) / 1e12 < 2 * rate


class TestProfile:
    def test_gaps(self):
        """The second span lies in the first, the third begins later."""
        spans = [Span("a", 0.0, 10.0), Span("b", 2.0, 5.0), Span("a", 12.0, 13.0), Span("c", 13.0, 20.0)]
        assert gaps_of(spans) == (18.0, [2.0])
        found = summary(spans)
        assert [(row["name"], row["ms"], row["count"]) for row in found["top"]] == [
            ("a", 0.011, 2),
            ("c", 0.007, 1),
            ("b", 0.003, 1),
        ]
        assert (found["busy_ms"], found["idle_ms"]) == (0.018, 0.002)

    def test_calls_that_wait(self):
        host = [Span("aten::item", 0.0, 5.0), Span("aten::add", 5.0, 6.0), Span("cudaDeviceSynchronize", 6.0, 16.0)]
        assert [row["name"] for row in calls(host)] == ["cudaDeviceSynchronize", "aten::item"]


def test_junit(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="ok"/>'
        '<testcase classname="tests.gpu.test_a.TestB" name="bad[1]"><failure message="a&#10;b">trace</failure></testcase>'
        '<testcase classname="" name="import"><error message="no module"/></testcase>'
        '<testcase classname="tests.gpu.test_a" name="not"><skipped message="needs CUDA"/></testcase>'
        "</testsuite></testsuites>"
    )
    counts, failures = read_junit(path)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failures == ["TestB::bad[1] a b", "::import no module"]


@pytest.mark.slow
def test_a_pair_goes_on_after_a_failed_job(tmp_path):
    pair = Pair(Setting("cpu", True, tmp_path))
    try:
        with pytest.raises(RuntimeError, match=r"rank [01]: ConfigError: world size 2 is not divisible by tp 3"):
            pair.ask({"work": "train", "flags": f"{DECODER} --tensor-model-parallel-size 3", "steps": 1})
        first, second = pair.ask({"work": "train", "flags": f"{DECODER} --tensor-model-parallel-size 2", "steps": 1})
        assert first == second and len(first["losses"]) == 1
    finally:
        pair.close()


FILES = {"results.jsonl", "report.md", "log.txt", "tests_gpu.xml"}
FILES |= {f"profile_{name}.json" for name in ("baseline", "fp8_blockwise", "cuDNN")}


@pytest.mark.slow
@pytest.mark.parametrize("letter", PARTS)
def test_dry_run(letter, tmp_path, capfd):
    """Every part plays on the CPU without a failure."""
    code = checklist.main(["--out", str(tmp_path), "--parts", letter, "--dry-run", "--minutes", "15"])
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    said = capfd.readouterr().out
    assert code == 0, said
    assert any(record["status"] == OK for record in records), said
    assert {path.name for path in tmp_path.iterdir()} <= FILES
