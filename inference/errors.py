"""Errors whose message is meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user can mend.

    The message is one line that says what happened, where, and what to do. The command line prints it
    without a traceback and exits with code 2; code that imports the package can catch it.
    """
