"""A made-up part of the checklist that hangs before its first case, for test_checklist.py."""

import threading


def cases(setting):
    threading.Event().wait()
