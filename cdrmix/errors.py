"""Errors that a user can cause and mend; anything else that is raised is a fault of CDRmix.
Messages say where, what was given, what is allowed and what to try; they reach stderr without a
traceback, and the process ends with the error's `exit_code`."""

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_NO_USABLE_STATE = 3
EXIT_INFRASTRUCTURE = 69
EXIT_STOPPED_BY_SIGNAL = 75


class TrainingError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code = EXIT_USER_ERROR


class ConfigError(TrainingError):
    """A configuration file, an override or a flag is wrong."""


class PlanError(TrainingError):
    """Config, profile and cluster do not go together."""


class DataError(TrainingError):
    """A corpus, shard or tokenizer is missing, damaged or of another kind than configured."""


class StateError(TrainingError):
    """A run directory or checkpoint cannot be used as asked."""


class NoUsableStateError(StateError):
    """Checkpoints exist and every one of them is damaged."""

    exit_code = EXIT_NO_USABLE_STATE


class InfrastructureError(TrainingError):
    """The machine, network or file system failed for now; the same command may succeed later.
    `cdrmix launch` and the SLURM script start such a run again."""

    exit_code = EXIT_INFRASTRUCTURE


class HookError(TrainingError):
    """Code of a user's, called as a hook, has failed. `cdrmix launch` starts such a run again, as
    what failed may pass."""

    exit_code = EXIT_FAULT


class UnreachableDataError(DataError, InfrastructureError):
    """A store of data did not answer, or not with what it should, for longer than was waited."""
