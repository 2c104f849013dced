"""Exit signals are remembered and the old handlers come back."""

import os
import signal

import pytest

from megatron.training.signals import EXIT_SIGNALS, ExitSignals


@pytest.mark.parametrize("number", EXIT_SIGNALS)
def test_a_signal_is_only_remembered(number):
    with ExitSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name


def test_the_first_signal_is_kept():
    with ExitSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == "SIGUSR1"


def test_old_handlers_come_back_even_after_an_error():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RuntimeError), ExitSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise RuntimeError
        assert (signals.received, heard) == ("SIGUSR1", [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_disabled_leaves_every_handler_alone():
    before = [signal.getsignal(number) for number in EXIT_SIGNALS]
    with ExitSignals(enabled=False) as signals:
        assert [signal.getsignal(number) for number in EXIT_SIGNALS] == before
    assert signals.received is None


def test_ctrl_c_still_interrupts():
    with pytest.raises(KeyboardInterrupt), ExitSignals():
        os.kill(os.getpid(), signal.SIGINT)
