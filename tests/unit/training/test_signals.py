"""Exit signals are remembered, also after an error; an interrupt ends the process even if its exception is lost."""

import os
import signal
import threading

import pytest

from megatron.training.signals import EXIT_SIGNALS, ExitSignals, Interrupt


@pytest.fixture(autouse=True)
def handlers():
    """Those of before the test come back."""
    before = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_old_handlers_come_back():
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    with ExitSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (signals.received, heard) == ("SIGUSR1", [])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_after_an_error_does_not_end_the_process_before_it_says_why():
    with pytest.raises(RuntimeError), ExitSignals():
        raise RuntimeError
    for number in EXIT_SIGNALS:
        os.kill(os.getpid(), number)


def test_disabled_leaves_every_handler_alone():
    before = [signal.getsignal(number) for number in EXIT_SIGNALS]
    with ExitSignals(enabled=False) as signals:
        assert [signal.getsignal(number) for number in EXIT_SIGNALS] == before
    assert signals.received is None


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_still_interrupts():
    with pytest.raises(KeyboardInterrupt), ExitSignals():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_whose_exception_is_lost_ends_the_process():
    ended = threading.Event()
    with Interrupt(ended.set, seconds=0.01) as interrupt:
        with pytest.raises(KeyboardInterrupt):  # and nobody passes it on
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(30)
        assert interrupt.received and ended.wait(30)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_ends():
    with Interrupt(lambda: pytest.fail("ended"), seconds=0.0) as interrupt:
        pass
    assert not interrupt.received


def test_an_interrupt_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt(lambda: None) as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        assert not interrupt.received and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
