"""--plan: the lines that compare the predicted step with the measured one."""

from megatron.training.logging.plan import comparison


def test_the_lines_name_both_times_and_the_parts():
    lines = comparison("first steps", 0.2, {"compute": 0.15, "dp": 0.05, "tp": 0.0}, [0.26, 0.25, 9.0])
    assert lines == [
        "plan, first steps: predicted 200.0 ms | measured 260.0 ms | prediction -23.1%",
        "where a planned step goes: 200.0 ms | compute 75.0% | dp 25.0%",
    ]
