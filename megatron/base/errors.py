"""The exceptions raised on purpose. A user's mistake is a `UserError`: one line with the values and the fix; exit code
2.
"""


class MegatronError(Exception):
    """The root of all exceptions that this package raises on purpose."""


class UserError(MegatronError):
    """An input of the user is wrong. The message names the mistake, the values and the fix.

    Several messages describe several mistakes. `on_all_ranks` means that every rank raises the same error, so only one
    rank prints it; set it to False if only this rank can detect the error.
    """

    on_all_ranks = True

    def __str__(self) -> str:
        """Returns one line per mistake, with unprintable characters of the values escaped."""
        lines = ("".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message)) for message in self.args)
        return "\n".join(lines)


class ConfigError(UserError):
    """A flag, or a combination of flags, is not supported."""


class DataError(UserError):
    """A dataset or tokenizer file is missing, damaged or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, of another model, or could not be written."""


class TrainingError(MegatronError):
    """Training cannot continue although no flag is wrong. Every rank raises the same error, and one of them prints it.

    `recurs` means that another attempt on the same machines would end the same way.
    """

    exit_code = 1
    recurs = True


class ReplicaError(TrainingError):
    """Ranks that hold copies of the same numbers hold different ones. Starting again from a checkpoint may succeed."""

    recurs = False


class ResultError(TrainingError):
    """A number of a step is suspicious, and computing it again has shown, or could not show, whose fault it is."""

    def __init__(self, message: str, exit_code: int, *, recurs: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.recurs = exit_code, recurs


class CommError(MegatronError):
    """A collective failed or timed out. The message names the collective, its group and the missing ranks."""


def shown(value: object) -> str:
    """Returns a value as Python writes it, cut where it is long, to quote it in a message."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, to quote it in another; the error's type if it has no message."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


USER_ERROR_EXIT_CODE = 2
# Those of a ResultError, with Megatron-LM's meanings.
RESUME_EXIT_CODE = 16  # start again from the saved checkpoint, on other machines, to find out more
VALIDATION_EXIT_CODE = 17  # a machine is at fault
_LONG = 40  # characters of a value that are quoted
