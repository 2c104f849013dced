"""The cases of the campaign of lost hosts are possible; tests/e2e/test_elastic.py runs a job whose host is lost."""

from tests.fuzz.campaign import case_of
from tests.fuzz.elastic import CAMPAIGN


def test_events_of_a_case_follow_from_those_before():
    kinds = set()
    for number in range(300):
        case = case_of(CAMPAIGN, 1, number)
        present = set(range(case.hosts)) - set(case.absent)
        for event in case.events:
            kinds.add((event.kind, event.back is None, event.host == 0))
            assert (event.host in present) == (event.kind != "join"), case
            assert event.kind != "lose" or event.host or case.apart, case  # host 0 holds the store
            if event.kind == "join":
                present.add(event.host)
            elif event.kind == "lose" and event.back is None:
                present.remove(event.host)
            assert len(present) >= case.minimum, case
    assert len(kinds) >= 7  # all there are: lost hosts that come back or not, of each place
