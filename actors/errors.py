"""The one base class of what the actors refuse."""


class ActorError(Exception):
    """Something a person can mend: says what is wrong, where, and what to do."""


class EngineLost(ActorError):
    """An engine is gone, or answers no more. What it was asked goes to another."""


class Stopped(ActorError):
    """Not an error: someone asked the job to stop, and what was done is kept."""
