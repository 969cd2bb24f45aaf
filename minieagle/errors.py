"""What can go wrong through a user's doing, as one small tree of exceptions.

    ValueError
    +-- MinieagleError
        +-- RequestError    one request asks for something invalid or unsupported; HTTP 400; the others go on
        +-- ModelError      a directory does not hold a model, tokenizer or drafter that can be used

The one idea: a message names the value, the bound and the remedy, so that it can be shown as it is. What only a
programmer can cause is an `assert` with a message, not one of these. The folders `dist`, `models` and `spec` raise
ValueError subclasses of their own, since they cannot import from here.
"""


class MinieagleError(ValueError):
    """Any fault that a user can mend."""


class RequestError(MinieagleError):
    """One request is at fault; it costs nobody else.

    `param` names the field at fault as the user wrote it ("messages[2].content"), or is None when no single field is;
    `code` is the machine-readable cause where the OpenAI API has a word for it ("context_length_exceeded").
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(MinieagleError):
    """A directory or one of its files cannot be used; the message names the file."""
