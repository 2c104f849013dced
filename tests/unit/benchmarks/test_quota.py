"""Holding processes to a share of a core: what is written to the cpu controller, and what it does."""

import os
import time

import pytest

from benchmarks.cluster import quota
from benchmarks.cluster.hosts import PREFIX
from benchmarks.cluster.quota import (
    Controller,
    QuotaError,
    Quotas,
    achieved_shares,
    find_controller,
    remove_left_groups,
)


class TestController:
    def test_version_1_has_a_quota_per_period(self, tmp_path):
        controller = Controller(1, tmp_path)
        controller.set_quota(tmp_path, 0.4)
        assert [(tmp_path / f"cpu.cfs_{name}_us").read_text() for name in ("period", "quota")] == ["5000", "2000"]
        controller.set_quota(tmp_path, None)
        assert (tmp_path / "cpu.cfs_quota_us").read_text() == "-1"

    def test_version_2_has_both_in_one_file(self, tmp_path):
        controller = Controller(2, tmp_path)
        controller.set_quota(tmp_path, 0.4)
        assert (tmp_path / "cpu.max").read_text() == "2000 5000"
        controller.set_quota(tmp_path, None)
        assert (tmp_path / "cpu.max").read_text() == "max 5000"

    def test_a_machine_without_one_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(quota, "ROOT", tmp_path)
        with pytest.raises(QuotaError, match="cpu controller of cgroups"):
            find_controller()

    def test_only_groups_of_processes_that_have_ended_are_left(self, tmp_path):
        here, gone = tmp_path / f"{PREFIX}{os.getpid()}r0", tmp_path / f"{PREFIX}99999999r0"
        here.mkdir()
        gone.mkdir()
        remove_left_groups(Controller(1, tmp_path))
        assert here.exists()
        assert not gone.exists()


@pytest.fixture
def quotas():
    try:
        with Quotas(len(os.sched_getaffinity(0)), 0.25) as made:
            yield made
    except QuotaError as error:
        pytest.skip(str(error))


def test_more_than_a_core_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(quota, "find_controller", lambda: Controller(1, tmp_path))
    with pytest.raises(QuotaError, match="give a smaller share"):
        Quotas(2 * len(os.sched_getaffinity(0)), 0.5)


@pytest.mark.alone
@pytest.mark.slow
def test_a_rank_gets_its_share_alone_and_with_others(quotas):
    for share in (*achieved_shares(quotas, [0]), *achieved_shares(quotas, range(quotas.ranks))):
        assert 0.8 * quotas.share < share < 1.05 * quotas.share


@pytest.mark.alone
@pytest.mark.slow
def test_waiting_saves_no_time_up(quotas):
    quotas.limit(on=True)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        quotas.add(0, os.getpid())
        os.sched_setaffinity(0, {quotas.core(0)})
        taken = []
        for _ in range(10):
            time.sleep(0.05)
            started, used = time.perf_counter(), time.process_time()
            while time.process_time() - used < 0.02:
                pass
            taken.append(time.perf_counter() - started)
        os.write(writer, str(sorted(taken)[5]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert float(os.read(reader, 64)) > 0.9 * 0.02 / quotas.share
