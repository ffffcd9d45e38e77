"""The errors that reach a user: one line that says what is wrong, what was expected and what to do.

Every room raises these; only the command line turns them into an exit status.
"""


class BiphaseError(Exception):
    """A failure whose message is written for the user; ``exit_code`` is the status of the process."""

    exit_code = 1


class RunFailed(BiphaseError):  # noqa: N818 - reads as what happened
    """The input was good and the run failed: a server died, the port is taken, the measurement broke off."""


class BadInput(BiphaseError):  # noqa: N818 - reads as what happened
    """The input cannot be used: a model that is not there, a value out of range, an unknown name."""

    exit_code = 2
