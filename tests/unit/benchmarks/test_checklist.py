"""The driver of the GPU checklist with made-up parts, its reports, and its arguments; a dry run of the real parts."""

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu import checklist, driver, expected, part_f_two_ranks, part_g_speed, part_h_peers, part_j_memory
from benchmarks.gpu.case import Setting
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.pair import Pair
from benchmarks.gpu.part_b_tests import read_junit
from benchmarks.gpu.part_i_profile import Span, calls, gaps_of, summary
from benchmarks.gpu.parts import (
    PARTS,
    START_SECONDS,
    Part,
    Planned,
    by_worth,
    chosen,
    planned_seconds,
    processes,
    that_fit,
)
from benchmarks.gpu.record import (
    CRASHED,
    FAILED,
    MISSING,
    OK,
    SKIPPED,
    START,
    TIMEOUT,
    Record,
    read_records,
)
from benchmarks.gpu.report import TABLE_LINES, Report, table
from benchmarks.gpu.runs import DECODER, DECODER_EXPERTS, DECODER_FP8, configured, step_flops
from megatron.base.cuda_environment import ALLOCATOR
from megatron.base.errors import ConfigError
from tests.unit.benchmarks.checklist_cases import CHILD

MODULE = "tests.unit.benchmarks.checklist_cases"
PART = Part("Y", "made up", MODULE)


def listed(out, part=PART, names=None, limit=None):
    """The cases of a part, or those of some names."""
    cases = Driver(out, "cpu", False).listed([part]).cases
    chosen_cases = [case for case in cases if names is None or case.name in names]
    return [case._replace(limit=limit or case.limit) for case in chosen_cases]


def run(out, cases, seconds=60.0):
    """case -> record"""
    records = Driver(out, "cpu", False).run(cases, time.monotonic() + seconds, lambda record: None)
    return {record.case: record for record in records}


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
    "fill the GPU": OK,
    "after it was filled": OK,
    "too long": SKIPPED,
    "child": OK,
}


class TestDriver:
    @pytest.fixture(scope="class")
    def out(self, tmp_path_factory):
        return tmp_path_factory.mktemp("checklist")

    @pytest.fixture(scope="class")
    def records(self, out):
        return run(out, listed(out, names=OUTCOMES))

    def test_every_case_has_its_outcome(self, records):
        assert {case: record.status for case, record in records.items()} == OUTCOMES

    def test_reasons(self, records):
        assert records["bad"].text == "ValueError: two lines"
        assert records["missing"].text == "missing: package nowhere"
        assert records["crash"].text.endswith("the last words")
        assert records["crash beside a fork"].seconds < 20.0, "of the 60 s that the case may take"
        assert "planned for 1000000 s" in records["too long"].text

    def test_a_case_runs_once(self, out, records):
        log = (out / driver.LOG).read_text()
        assert log.count("--- Y good") == 1 and "ValueError: two\nlines" in log

    def test_no_process_is_left(self, out, records):
        pid = int((out / CHILD).read_text())
        deadline = time.monotonic() + 10
        while is_alive(pid):  # the kernel ends a killed process soon
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_part_that_cannot_be_listed_stops_nothing(self, tmp_path):
        listing = Driver(tmp_path, "cpu", False).listed([Part("X", "broken", "benchmarks.gpu.no_such_part"), PART])
        assert [case.name for case in listing.cases if case.name == "good"] == ["good"]
        assert [(record.title, record.status) for record in listing.broken] == [(f"X {START}", CRASHED)]
        assert "no_such_part" in listing.broken[0].text

    def test_a_listing_that_hangs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driver, "LIST_SECONDS", 1.0)
        with pytest.raises(ConfigError, match="not listed within 1 s"):
            Driver(tmp_path, "cpu", False).listed([Part("X", "", "tests.unit.benchmarks.checklist_hangs")])

    def test_a_process_that_hangs_before_its_first_case(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driver, "OPENING_SECONDS", 1.0)
        hanging = Planned("X", "tests.unit.benchmarks.checklist_hangs", "never", 1.0, 60.0)
        records = run(tmp_path, [hanging, *listed(tmp_path, names={"good"})])
        assert {case: record.status for case, record in records.items()} == {"never": TIMEOUT, "good": OK}

    def test_a_case_that_its_module_lacks(self, tmp_path):
        records = run(tmp_path, [Planned("Y", MODULE, "unknown", 1.0, 60.0), *listed(tmp_path, names={"good"})])
        assert {case: record.status for case, record in records.items()} == {"unknown": CRASHED, "good": OK}

    def test_no_time_left(self, tmp_path):
        records = run(tmp_path, listed(tmp_path, names={"good"}), seconds=1.0)
        assert [record.status for record in records.values()] == [SKIPPED]

    def test_the_time_of_the_run_ends_a_case(self, tmp_path, monkeypatch):
        monkeypatch.setattr(driver, "START_SECONDS", 0.0)
        records = run(tmp_path, listed(tmp_path, names={"hang for long", "child"}), seconds=3.0)
        assert {case: record.status for case, record in records.items()} == {"hang for long": TIMEOUT, "child": SKIPPED}
        assert records["hang for long"].text == "the time of the run was over"

    def test_packages_that_were_brought_along(self, tmp_path):
        environment = Driver(tmp_path, "cpu", False, tmp_path / "site")._environment()
        assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(driver.ROOT), str(tmp_path / "site")]

    def test_the_allocator_is_that_of_a_run(self, tmp_path, monkeypatch):
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        assert ALLOCATOR in Driver(tmp_path, "cpu", False)._environment().values()


def planned(title, seconds=1.0):
    part, _, name = title.partition(" ")
    return Planned(part, MODULE, name, seconds, 60.0)


class TestOrder:
    def test_by_worth(self):
        titles = ["B streams", "H transformers, compiled", "J bus", "G 1B", "A versions", "G 8B slice, baseline"]
        assert [case.title for case in by_worth([planned(title) for title in titles])] == [
            "A versions", "G 8B slice, baseline", "G 1B", "J bus", "B streams", "H transformers, compiled",
        ]  # fmt: skip

    def test_neighbours_of_a_part_share_a_process(self):
        cases = [planned(title) for title in ("A a", "A b", "G c", "A d")]
        assert [[case.name for case in group] for group in processes(cases)] == [["a", "b"], ["c"], ["d"]]
        assert planned_seconds(cases) == 4.0 + 3 * START_SECONDS

    def test_what_fits(self):
        cases = [planned("A a", 5.0), planned("A b", 50.0), planned("A c", 5.0), planned("G d", 5.0)]
        assert [case.name for case in that_fit(cases, START_SECONDS + 11.0)] == ["a", "c"]
        assert that_fit(cases, START_SECONDS) == []


class TestSelection:
    CASES = (planned("A a"), planned("B b"), planned("B c"), planned("C d"))

    def titles(self, words, earlier=()):
        args = checklist.build_parser().parse_args(["--out", "x", *words])
        return [case.title for case in checklist.selected(self.CASES, args, earlier)]

    def test_an_expression(self):
        assert self.titles(["--cases", "^B|d"]) == ["B b", "B c", "C d"]

    def test_what_failed_runs_again(self):
        kinds = [("A", "a", OK), ("B", "b", FAILED), ("B", "c", FAILED), ("B", "c", OK), ("C", START, CRASHED)]
        earlier = [Record(part, case, status, 0.0, "") for part, case, status in kinds]
        assert self.titles(["--only-failed", "f"], earlier) == ["B b", "C d"]

    def test_what_ended_is_left_out(self):
        kinds = [("A", "a", OK), ("B", "b", FAILED), ("B", "c", SKIPPED)]
        earlier = [Record(part, case, status, 0.0, "") for part, case, status in kinds]
        assert self.titles(["--resume", "f"], earlier) == ["B c", "C d"]

    def test_a_wrong_expression(self, tmp_path, capfd):
        out = tmp_path / "new"
        assert checklist.main(["--out", str(out), "--cases", "(", "--dry-run"]) == 2
        assert "--cases ( is no regular expression" in capfd.readouterr().err
        assert not out.exists()

    def test_no_site(self, tmp_path, capfd):
        assert checklist.main(["--out", str(tmp_path / "new"), "--site", str(tmp_path / "none")]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1


class TestRecords:
    def test_a_round_trip(self, tmp_path):
        records = [Record("A", "a", OK, 1.0, "t", {"x": [1.0, float("inf")]}), Record("B", "b", FAILED, 2.0, "u")]
        path = tmp_path / "results.jsonl"
        path.write_text("".join(record.to_json() + "\n" for record in records) + '{"part": "C", "ca')
        again = read_records(path)
        assert again[1] == records[1] and again[0].values == {"x": [1.0, "inf"]}

    def test_another_file(self, tmp_path):
        path = tmp_path / "other"
        path.write_text("not json\n{}\n")
        with pytest.raises(ConfigError, match="line 1 is no record"):
            read_records(path)

    def test_a_resumed_run_takes_over_the_records(self, tmp_path):
        Report(tmp_path, "title", [Record("A", "a", OK, 1.0, "t")]).add(Record("B", "b", OK, 1.0, "u"))
        assert [record.title for record in read_records(tmp_path / "results.jsonl")] == ["A a", "B b"]


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

    def test_every_part_has_its_letter(self):
        assert list(PARTS) == list("ABCDEFGHIJ")


class TestSizes:
    """The flags and sizes of a GPU, which a dry run replaces by toys, are accepted."""

    GPU = Setting("cuda", False, Path())

    @pytest.mark.parametrize("name", part_g_speed.WAYS)
    def test_slice(self, name):
        flags = f"{part_g_speed.SLICE_8B} {part_g_speed.WAYS[name][0]}"
        assert configured(flags, self.GPU).model.vocab_size == 32064

    @pytest.mark.parametrize("more", ["", part_g_speed.HOST_BOUND])
    @pytest.mark.parametrize("name", part_g_speed.MODELS)
    def test_models(self, name, more):
        assert configured(f"{part_g_speed.MODELS[name]} {more}", self.GPU).model.bf16

    @pytest.mark.parametrize("flags", part_f_two_ranks.LAYOUTS.values())
    def test_two_ranks(self, flags):
        assert configured(f"{DECODER} {flags}", self.GPU, 2).model.num_layers == 4

    @pytest.mark.parametrize("flags", part_f_two_ranks.EXPERT_LAYOUTS.values())
    def test_two_ranks_with_experts(self, flags):
        assert configured(f"{DECODER_EXPERTS} {flags}", self.GPU, 2).model.num_experts == 8

    @pytest.mark.parametrize("flags", part_f_two_ranks.FP8_LAYOUTS.values())
    def test_two_ranks_in_fp8(self, flags):
        assert configured(f"{DECODER_FP8} {flags}", self.GPU, 2).model.bf16

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


FILES = {"results.jsonl", "report.md", "log.txt"}
FILES |= {f"profile_{name}.json" for name in ("baseline", "fp8_blockwise", "fp8_tensorwise", "cuDNN", "experts")}


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
