"""The errors of an export, each one readable line for the person at the terminal.

ExportError
├── RecipeError        what was asked for cannot be: names the field, the value and the bound
├── CheckError         the result differs from the original: says where and by how much
└── MissingToolError   a library or a device is missing: says what to install, where to run
"""


class ExportError(Exception):
    """Base of all errors that an export raises on purpose. Nothing has been written then."""


class RecipeError(ExportError):
    """The description of the model, or an argument of the command, is wrong."""


class CheckError(ExportError):
    """The exported model is invalid, or does not compute what the original computes."""


class MissingToolError(ExportError):
    """What a step needs is not on this machine."""
