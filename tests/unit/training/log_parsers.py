"""Patterns by which public scripts read Megatron-LM's logs. Facts about those scripts; their code is not used.

A log of ours must give each of them what Megatron-LM's own would.
"""

import re

# Of the line that is printed every --log-interval steps; one match for each line.
ITERATION = {
    # Megatron-LM, tests/performance_tests: the time of one step from torchrun's stdout.log.
    "Megatron-LM": r"iteration\s+(?P<iteration>\d+)/\s*\d+.*elapsed time per iteration \(ms\):\s*(?P<ms>[\d.]+)",
    # MindSpeed-LLM, tests/test_tools: three values that its nightly tests compare.
    "MindSpeed-LLM": (
        r"elapsed time per iteration \(ms\):\s+(?P<ms>\d+\.?\d*)\s*\|.*?lm loss:\s+(?P<loss>[\d.E+-]+)\s*\|"
        r".*?grad norm:\s+(?P<norm>\d+\.?\d*)"
    ),
    # Pai-Megatron-Patch and ROCm's forks, examples/*/parse_log.sh: grep and sed.
    "Pai throughput": r"throughput per GPU [^|]*\(TFLOP/s/GPU\): (?P<tflops>[0-9.]+)",
    "Pai time": r"elapsed time per iteration [^|]*\(ms\): (?P<ms>[0-9.]+)",
    # FlagScale, auto tuner.
    "FlagScale": r"elapsed time per iteration \(ms\)::* *(?P<ms>\d+(\.\d*)?)",
    # Primus, tests of its Megatron trainer.
    "Primus": r"lm loss: (?P<loss>\d+.\d+E\+\d+)",
    "Primus zeros": r"num zeros: (?P<zeros>\d+)",
    # Amazon's Slapo: a key and the number behind it.
    "Slapo": r"elapsed time per iteration \(ms\): +(?P<ms>[\d\.]+)",
    # Scripts that take the whole line apart, in its order, up to Megatron-LM's last field.
    "whole line": (
        r"\[(?P<time>\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}\.\d+)\]\s+"
        r"iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+)\s*\|\s*"
        r"consumed samples:\s*(?P<samples>\d+)\s*\|\s*"
        r"elapsed time per iteration \(ms\):\s*(?P<ms>[\d.]+)\s*\|\s*"
        r"throughput per GPU \(TFLOP/s/GPU\):\s*(?P<tflops>[\d.]+)\s*\|\s*"
        r"learning rate:\s*(?P<rate>[\d.E+\-]+)\s*\|\s*"
        r"global batch size:\s*(?P<batch>\d+)\s*\|\s*"
        r"lm loss:\s*(?P<loss>[\d.E+\-]+)\s*\|\s*"
        r"loss scale:\s*(?P<scale>[\d.E+\-]+)\s*\|\s*"
        r"grad norm:\s*(?P<norm>[\d.E+\-]+)\s*\|\s*"
        r"num zeros:\s*(?P<zeros>[\d.]+)\s*\|\s*"
        r"params norm:\s*(?P<params>[\d.]+)\s*\|\s*"
        r"number of skipped iterations:\s*(?P<skipped>\d+)\s*\|\s*"
        r"number of nan iterations:\s*(?P<nan>\d+)\s*\|"
    ),
    # Swiss AI and others: the head, then every field by its name.
    "head": r" iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+) \|(.*)",
}
# Of the other lines; the groups are as the names say.
OTHERS = {
    "validation": r"validation loss at iteration (?P<iteration>\d+) \| lm loss value: (?P<loss>[0-9.E+-]+)",
    "final validation": (
        r"validation loss at iteration (?P<iteration>\d+) on validation set.*?lm loss value:\s*(?P<loss>[0-9.eE+-]+)"
    ),
    "perplexity": r"lm loss PPL: (?P<ppl>[\d\.\-E+]+)",
    "memory": (
        r"\[Rank (?P<rank>\d+)\] \(after (?P<iteration>\d+) iterations\) memory \(MB\) \| "
        r"allocated: (?P<allocated>[0-9.]+) \| max allocated: (?P<most>[0-9.]+)"
    ),
    "reserved": r"\s+reserved:\s*(?P<reserved>[0-9.]+)\s+\|\s+max reserved:\s*(?P<most>[0-9.]+)",
    "timer": r"(?m)^\s*(?P<name>[A-Za-z0-9_-]+)\s+\.+:\s+\((?P<least>[0-9.]+),\s*(?P<most>[0-9.]+)\)",
    "parameters": r"parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): +(?P<count>[\d\.]+)",
    "footprint": r"Theoretical memory footprints: weight and optimizer=(?P<size>[\d.]+) MB",
    "argument": r"(?m)^\s+seq_length\s*\.{0,}\s*(?P<length>\d+)",
    "saving": (
        r"\[(?P<time>\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}\.\d{6})\] saving checkpoint at iteration\s+(?P<iteration>\d+) "
        r"to (?P<path>\S+)"
    ),
    "saved": r"successfully saved checkpoint from iteration\s+(?P<iteration>\d+) to (?P<path>\S+)",
    "loading": r" loading checkpoint from (?P<path>\S+) at iteration (?P<iteration>\d+)",
    "loaded": r"successfully loaded checkpoint.*at iteration\s+(?P<iteration>\d+)",
}


def read(pattern, text):
    """The named groups of every match: numbers, or text that is none."""
    return [{name: _value(value) for name, value in found.groupdict().items()} for found in re.finditer(pattern, text)]


def flagscale_losses(text):
    """As FlagScale's functional tests do: lines with " iteration", cut at the bars."""
    parts = [part for line in text.splitlines() if " iteration" in line for part in line.strip().split("|")]
    return [float(part.split(":")[1]) for part in parts if part.startswith(" lm loss:")]


def _value(text):
    try:
        return float(text)
    except ValueError:
        return text
