"""From flags to a finished run: arguments, set-up, step, loop, callbacks."""
