"""Exceptions of the tree. A user's mistake is a `UserError`: one line, the values, the fix; exit code 2."""


class MegatronError(Exception):
    """Root of every exception this package raises on purpose."""


class UserError(MegatronError):
    """Something the user gave is wrong. The message says what, with the values, and how to fix it; several messages are
    several mistakes.

    on_all_ranks: every rank raises the same, so one of them prints it. Clear it where only this rank can know.
    """

    on_all_ranks = True

    def __str__(self) -> str:
        """A line for each mistake, whatever bytes the values in it have."""
        lines = ("".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message)) for message in self.args)
        return "\n".join(lines)


class ConfigError(UserError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(UserError):
    """A dataset or tokenizer file that is missing, damaged or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, of another model, or that could not be written."""


class TrainingError(MegatronError):
    """Training cannot go on, and no flag was wrong: every rank raises the same, and one of them prints it."""


class CommError(MegatronError):
    """A collective failed or timed out. The message names the collective, its group and the missing ranks."""


USER_ERROR_EXIT_CODE = 2
